package scheduler

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"berth/internal/bus"
	"berth/internal/events"
	"berth/internal/kv"
)

// Times of the tender.
const (
	viewAtMost  = time.Second          // a server's entry in SERVERS is rewritten no more often than this, but for health and admin
	viewsEvery  = 5 * time.Millisecond // nor those of a large fleet more often than one per this
	viewAtLeast = 15 * time.Second     // and no less often
	orphanEvery = 30 * time.Second     // allocations are held against records
	orphanAge   = 10 * time.Second     // a younger allocation may be in the making
	drainAfter  = 3 * time.Second      // the worker's zero must hold so long
	tenders     = 16                   // servers tended at once
	clockTick   = 500 * time.Millisecond
)

// clock moves the health of the servers on and has those tended that need it.
func (t *term) clock(ctx context.Context) error {
	tick := time.NewTicker(clockTick)
	defer tick.Stop()
	orphansAt, before := time.Now(), time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		now := time.Now()
		slept := now.Sub(before)
		before = now
		var due []string
		t.mu.Lock()
		if slept > silentDegraded {
			t.log.Warn("the scheduler itself stood still; every server has full grace anew", "for", slept)
			for _, s := range t.servers {
				s.health.pardon(now)
			}
		}
		braked, silent, all := t.brake.judge(now, t.servers)
		atMost := t.viewAtMost()
		for id, s := range t.servers {
			s.health.frozen = t.brake.on
			over := !s.aside.IsZero() && !now.Before(s.aside)
			if over {
				s.aside = time.Time{}
			}
			if over || s.health.ramping(now) {
				t.refresh(id)
				t.wake()
			}
			state, _ := s.health.judge(now)
			if state != s.health.state || state == kv.Down || s.rec.Admin == kv.Draining || s.viewDue && now.Sub(s.viewAt) >= atMost || now.Sub(s.viewAt) >= viewAtLeast {
				due = append(due, id)
			}
		}
		t.mu.Unlock()
		for _, id := range due {
			t.tending.add(id)
		}
		if braked {
			t.alarm(ctx, now, silent, all)
		}
		if now.Sub(orphansAt) >= orphanEvery {
			orphansAt = now
			t.freeOrphans(ctx, now)
		}
	}
}

// alarm says that the mass brake has gone on or off.
func (t *term) alarm(ctx context.Context, now time.Time, silent, all int) {
	name, from := "alarm", "normal"
	reason := fmt.Sprintf("%d of %d servers fell silent at once; the observer is the likelier fault, so none is taken for down", silent, all)
	if !t.brake.on {
		name, from, reason = "normal", "alarm", fmt.Sprintf("%d of %d servers are silent; servers are taken for down again", silent, all)
	}
	t.log.Error("mass brake", "state", name, "silent", silent, "servers", all)
	err := t.sayServer(ctx, fleetSubject, name, fmt.Sprintf("%d-%d-%s", t.epoch, now.UnixMilli(), name), events.ServerEvent{ServerID: fleetSubject, From: from, Reason: reason})
	if err != nil && ctx.Err() == nil {
		t.log.Warn("mass brake not announced", "err", err)
	}
}

// fleetSubject stands for the whole fleet where an event names a server.
const fleetSubject = "fleet"

// tender keeps servers, one at a time: their consumers, health, drains and the
// SERVERS view.
func (t *term) tender(ctx context.Context) error {
	for {
		id, ok := t.tending.take(ctx)
		if !ok {
			return nil
		}
		err := t.tendServer(ctx, id, time.Now())
		t.tending.done(id)
		if err != nil && ctx.Err() == nil {
			t.log.Warn("server not tended; trying again", "server", id, "err", err)
			time.AfterFunc(time.Second, func() { t.tending.add(id) })
		}
	}
}

func (t *term) tendServer(ctx context.Context, id string, now time.Time) error {
	t.mu.Lock()
	s := t.servers[id]
	if s == nil || s.rev == 0 {
		t.mu.Unlock()
		return nil
	}
	from := s.health.change(now)
	if from != "" {
		t.refresh(id)
		s.unsaid = append(s.unsaid, healthChange{
			id:   fmt.Sprintf("%s-%d-%d-%s", id, t.epoch, now.UnixMilli(), s.health.state),
			name: string(s.health.state), data: events.ServerEvent{ServerID: id, From: string(from), Reason: s.health.reason},
		})
	}
	unsaid := slices.Clone(s.unsaid)
	health, rec, consumers := s.health, s.rec, s.consumers
	var held []string // looked at again: the lost clock starts, stops or has run out
	if from != "" || health.state == kv.Down && now.Sub(health.since) >= lostAfter {
		for vm := range rec.Allocs {
			held = append(held, vm)
		}
	}
	t.mu.Unlock()

	for i, change := range unsaid {
		if i == len(unsaid)-1 && from != "" {
			t.log.Info("server health", "server", id, "from", from, "to", health.state, "reason", health.reason)
			t.meters.transition.Add(ctx, 1, metric.WithAttributes(attribute.String("to", string(health.state))))
			t.wake()
		}
		if err := t.sayServer(ctx, id, change.name, change.id, change.data); err != nil {
			return err // said when the server is tended again
		}
		t.mu.Lock()
		s.unsaid = s.unsaid[1:]
		t.mu.Unlock()
	}
	if !consumers {
		if err := bus.EnsureConsumers(ctx, t.js, bus.ServerConsumers(id, rec.Config.MaxContainers)); err != nil {
			return err
		}
		t.mu.Lock()
		s.consumers = true
		t.mu.Unlock()
	}
	for _, vm := range held {
		t.queue.add(vm)
	}
	if health.state == kv.Down && now.Sub(health.heard) >= silentDown {
		if err := t.endQueued(ctx, id); err != nil {
			return err
		}
	}
	if err := t.drain(ctx, id, now); err != nil {
		return err
	}
	return t.writeView(ctx, id, from != "", now)
}

// healthChange is a transition that is to be announced.
type healthChange struct {
	id, name string
	data     events.ServerEvent
}

func (t *term) sayServer(ctx context.Context, server, name, id string, data any) error {
	return t.say(ctx, events.FleetTenant, server, events.ServerType(name), name, id, data, "")
}

// downFor is how long a server has been down, as far as this term has seen.
func (t *term) downFor(id string) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.servers[id]
	if s == nil || s.health.state != kv.Down {
		return 0
	}
	return time.Since(s.health.since)
}

func (t *term) serverRemoved(id string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.servers[id] == nil
}

// viewOf merges what is known of a server; the caller holds mu.
func viewOf(s *serverState) kv.ServerView {
	v := kv.ServerView{
		ID: s.rec.ID, Provider: s.rec.Config.Provider, Roles: s.rec.Config.Roles, Priority: s.rec.Config.Priority,
		MaxContainers: s.rec.Config.MaxContainers, Isolation: s.rec.Config.Isolation, Attributes: s.rec.Config.Attributes,
		Capabilities: s.rec.Config.Capabilities, Admin: s.rec.Admin, Health: s.health.state, Reason: s.health.reason,
		Breaker: s.beat.Breaker, Used: len(s.rec.Allocs), BootID: s.beat.BootID, Worker: s.rec.Worker,
	}
	if v.Attributes == nil {
		v.Attributes = map[string]string{}
	}
	if v.Breaker == "" {
		v.Breaker = "closed"
	}
	return v
}

// viewAtMost is how long a server's view stays as it is while only its use
// changes; the caller holds mu.
func (t *term) viewAtMost() time.Duration {
	return min(max(viewAtMost, time.Duration(len(t.servers))*viewsEvery), viewAtLeast)
}

// writeView puts the view into SERVERS when it has changed, or is old. A
// change that is not urgent waits until viewAtMost has passed.
func (t *term) writeView(ctx context.Context, id string, urgent bool, now time.Time) error {
	t.mu.Lock()
	s := t.servers[id]
	if s == nil {
		t.mu.Unlock()
		return nil
	}
	view := viewOf(s)
	age := now.Sub(s.viewAt)
	changed := !reflect.DeepEqual(view, s.view)
	urgent = urgent || view.Admin != s.view.Admin
	s.viewDue = changed && !urgent && age < t.viewAtMost()
	heard := s.health.heard.UTC()
	if s.viewDue || !changed && age < viewAtLeast {
		t.mu.Unlock()
		return nil
	}
	s.view, s.viewAt = view, now
	t.mu.Unlock()
	view.ObservedAt = heard
	raw, err := json.Marshal(view)
	if err != nil {
		return fmt.Errorf("view of %s: %w", id, err)
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if _, err := t.Scheduler.servers.Put(ctx, id, raw); err != nil {
		t.mu.Lock()
		s.view, s.viewDue = kv.ServerView{}, true
		t.mu.Unlock()
		return fmt.Errorf("write view of %s: %w", id, err)
	}
	return nil
}

// freeOrphans frees allocations whose sandbox has ended and been freed, or was
// placed elsewhere: a crash between two writes leaves them.
func (t *term) freeOrphans(ctx context.Context, now time.Time) {
	type orphan struct {
		server, vm string
		fence      uint64
	}
	var suspects []orphan
	t.mu.Lock()
	for id, s := range t.servers {
		for vm, a := range s.rec.Allocs {
			v := t.vms[vm]
			if now.Sub(a.Since) < orphanAge || v != nil && (v.committing || holds(v.rec, id, a)) {
				continue
			}
			suspects = append(suspects, orphan{id, vm, a.Fence})
		}
	}
	t.mu.Unlock()
	for _, o := range suspects {
		// The mirror may be behind; the record itself decides.
		rec, _, err := kv.Get[kv.Placement](ctx, t.placements, kv.VMKey(o.vm))
		if err != nil && !errors.Is(err, kv.ErrNotFound) || err == nil && holds(rec, o.server, kv.Alloc{Fence: o.fence}) {
			continue
		}
		t.log.Warn("allocation without a sandbox; freed", "server", o.server, "vm", o.vm, "fence", o.fence)
		if err := t.free(ctx, o.server, o.vm, o.fence); err != nil && ctx.Err() == nil {
			t.log.Warn("allocation not freed; trying again", "server", o.server, "vm", o.vm, "err", err)
		}
	}
}

// holds reports whether a sandbox's record accounts for an allocation.
func holds(rec kv.Placement, server string, a kv.Alloc) bool {
	return rec.ServerID == server && rec.Fence == a.Fence && (rec.Phase != kv.Ended || rec.FreedAt == nil)
}

// takeServer obeys an operator.
func (t *term) takeServer(ctx context.Context, r request) error {
	var data events.ServerRequest
	if err := r.decode(&data); err != nil {
		return asRefusal(err, data.ServerID)
	}
	if err := events.CheckServerID(data.ServerID); err != nil {
		return &refusal{code: events.CodeBadInput, message: err.Error()}
	}
	if data.DeadlineSeconds != nil && (r.Verb != events.Drain || *data.DeadlineSeconds < 0) {
		return &refusal{subject: data.ServerID, code: events.CodeBadInput, message: "deadlineSeconds: only for drain, and not negative"}
	}
	if r.Verb == events.Remove {
		return t.removeServer(ctx, r, data.ServerID)
	}
	var admin kv.Admin
	var until *time.Time
	var name string
	switch r.Verb {
	case events.Cordon:
		admin, name = kv.Cordoned, "cordoned"
	case events.Uncordon:
		admin, name = kv.Active, "uncordoned"
	case events.Drain:
		admin, name = kv.Draining, "draining"
		if data.DeadlineSeconds != nil {
			d := r.at.UTC().Add(events.Seconds(*data.DeadlineSeconds))
			until = &d
		}
	}
	var from kv.Admin
	err := t.edit(ctx, data.ServerID, func(s *kv.Server, rev uint64) error {
		if rev == 0 {
			return noServer(data.ServerID)
		}
		from = s.Admin
		if s.Admin == admin && (r.Verb != events.Drain || s.DrainID == r.ref.Token()) {
			return kv.ErrUnchanged
		}
		s.Admin, s.DrainDeadline, s.DrainID, s.Drained = admin, until, "", false
		if r.Verb == events.Drain {
			s.DrainID = r.ref.Token()
		}
		return nil
	})
	if err != nil {
		return err
	}
	return t.sayServer(ctx, data.ServerID, name, r.ref.Token()+"-"+name,
		events.ServerEvent{ServerID: data.ServerID, From: string(from), Reason: "asked by " + r.ref.Source, Request: &r.ref})
}

func noServer(id string) *refusal {
	return &refusal{subject: id, code: events.CodeNotFound, message: fmt.Sprintf("there is no server %q; `berth servers` lists them", id)}
}

// removeServer forgets a server that holds nothing and that no worker serves.
func (t *term) removeServer(ctx context.Context, r request, id string) error {
	rec, rev, err := kv.Get[kv.Server](ctx, t.placements, kv.ServerKey(id))
	if errors.Is(err, kv.ErrNotFound) {
		return noServer(id)
	}
	if err != nil {
		return err
	}
	t.mu.Lock()
	s := t.servers[id]
	alive := s == nil || time.Since(s.health.heard) < silentDown
	living := 0 // a dead server's slots stay taken until it comes back, or goes for good
	for vm := range rec.Allocs {
		if v := t.vms[vm]; v != nil && v.rec.ServerID == id && v.rec.Phase != kv.Ended {
			living++
		}
	}
	t.mu.Unlock()
	if living > 0 {
		return &refusal{subject: id, code: events.CodeOccupied, message: fmt.Sprintf("server %q holds %d sandboxes; drain it first", id, living)}
	}
	if alive {
		return &refusal{subject: id, code: events.CodeOccupied, message: fmt.Sprintf("worker %q still serves %q; take it out of its registry first", rec.Worker, id)}
	}
	for _, c := range bus.ServerConsumers(id, 0) {
		if err := t.js.DeleteConsumer(ctx, c.Stream, c.Durable); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
			return fmt.Errorf("remove consumer %s: %w", c.Durable, err)
		}
	}
	if err := t.Scheduler.servers.Purge(ctx, id); err != nil {
		return fmt.Errorf("remove view of %s: %w", id, err)
	}
	err = t.sayServer(ctx, id, "removed", r.ref.Token()+"-removed", events.ServerEvent{ServerID: id, From: string(rec.Admin), Reason: "asked by " + r.ref.Source, Request: &r.ref})
	if err != nil {
		return err
	}
	// The record goes last: until then the request can be tried again.
	if err := t.deleteAt(ctx, kv.ServerKey(id), rev); err != nil {
		return err
	}
	t.forgetServer(id)
	for vm := range rec.Allocs {
		t.queue.add(vm) // its slot has gone with the server
	}
	return nil
}

// drain ends what is left on a draining server at its deadline, and says so
// once the server is empty and its worker has confirmed zero.
func (t *term) drain(ctx context.Context, id string, now time.Time) error {
	t.mu.Lock()
	s := t.servers[id]
	if s == nil || s.rec.Admin != kv.Draining {
		if s != nil {
			s.drainedFor = time.Time{}
		}
		t.mu.Unlock()
		return nil
	}
	rec := s.rec
	empty := len(rec.Allocs) == 0 && s.health.ever && s.beat.Synced && s.beat.Running == 0
	switch {
	case !empty:
		s.drainedFor = time.Time{}
	case s.drainedFor.IsZero():
		s.drainedFor = now
	}
	settled := empty && now.Sub(s.drainedFor) >= drainAfter
	t.mu.Unlock()
	if rec.Drained {
		return nil
	}
	if settled {
		return t.drained(ctx, rec)
	}
	if rec.DrainDeadline == nil || now.Before(*rec.DrainDeadline) {
		return nil
	}
	for vm := range rec.Allocs {
		if err := t.kill(ctx, vm, "drained", "server "+id+" was drained and its deadline has passed"); err != nil && !errors.Is(err, kv.ErrNotFound) {
			return err
		}
	}
	return nil
}

// drained announces that a drain is complete, and notes it.
func (t *term) drained(ctx context.Context, rec kv.Server) error {
	err := t.sayServer(ctx, rec.ID, "drained", rec.DrainID+"-drained", events.ServerEvent{ServerID: rec.ID, From: string(kv.Draining), Reason: "its worker reports no sandboxes"})
	if err != nil {
		return err
	}
	return t.edit(ctx, rec.ID, func(s *kv.Server, rev uint64) error {
		if rev == 0 || s.Drained || s.DrainID != rec.DrainID {
			return kv.ErrUnchanged
		}
		s.Drained = true
		return nil
	})
}
