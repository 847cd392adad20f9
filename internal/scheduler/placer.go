package scheduler

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nuid"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/placement"
)

// fullPass is how often the waiting requests are looked at without a reason.
const fullPass = 60 * time.Second

// placer goes over the waiting requests whenever something may have changed.
// It decides one after the other, each on what the ones before have taken, and
// commits in parallel.
func (t *term) placer(ctx context.Context) error {
	full := time.NewTicker(fullPass)
	defer full.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.wakeup:
		case <-full.C:
		}
		t.pass(ctx)
	}
}

// choice is one decided placement.
type choice struct {
	rec      kv.Placement
	fence    uint64 // the revision at which it was queued, which names this placement: it grows with every change of any record
	request  placement.Request
	decision placement.Decision
	attempt  string
}

func (t *term) pass(ctx context.Context) {
	now := time.Now()
	var placed []string
	var parked []parking
	blocked := map[string]placement.Decision{} // by kind: nothing fits in this pass
	t.mu.Lock()
	for i, vm := range t.waiting.turns() {
		v := t.vms[vm]
		if v == nil || v.committing || v.rec.Phase != kv.Queued {
			t.waiting.remove(vm)
			continue
		}
		kind := v.kind
		if avoids(v.rec, now) {
			kind += " avoiding " + v.rec.AvoidServer
		}
		if d, there := blocked[kind]; there {
			parked = append(parked, parking{vm: vm, position: i + 1, decision: d})
			continue
		}
		request := t.requestOf(v.rec, now)
		began := time.Now()
		d := t.fleet.Decide(&request)
		took := time.Since(began)
		if d.Server == "" {
			blocked[kind] = d
			parked = append(parked, parking{vm: vm, position: i + 1, decision: d, first: true})
			continue
		}
		d.Explanation += fmt.Sprintf("; decided in %s", took.Round(100*time.Nanosecond))
		c := choice{rec: v.rec, fence: v.rev, request: request, decision: d, attempt: nuid.Next()}
		t.servers[d.Server].assumed[vm] = kv.Alloc{Attempt: c.attempt, Role: request.Role, Tenant: request.Tenant}
		t.refresh(d.Server)
		v.committing = true
		t.choices[vm] = c
		t.waiting.last = v.rec.Tenant
		t.waiting.remove(vm)
		placed = append(placed, vm)
	}
	waiting := t.waiting.len()
	change := waiting - t.counted
	t.counted = waiting
	t.mu.Unlock()
	t.meters.waiting.Add(ctx, int64(change))
	for _, vm := range placed {
		t.placing.add(vm)
	}
	t.sayQueued(ctx, parked)
}

// requestOf is what placement judges; the caller holds mu.
func (t *term) requestOf(rec kv.Placement, now time.Time) placement.Request {
	r := placement.Request{VM: rec.VMID, Tenant: rec.Tenant, Role: rec.Role, Requires: t.each(rec.Spec.Requires)}
	for _, c := range rec.Spec.Constraints {
		r.Constraints = append(r.Constraints, condition(c))
	}
	for _, a := range rec.Spec.Affinities {
		r.Affinities = append(r.Affinities, placement.Affinity{Condition: condition(a.Constraint), Weight: a.Weight})
	}
	if avoids(rec, now) {
		r.Avoid = rec.AvoidServer
	}
	return r
}

func condition(c events.Constraint) placement.Condition {
	return placement.Condition{Attribute: c.Attribute, Operator: placement.Operator(c.Operator), Values: c.Value}
}

// avoids reports whether a server refused the sandbox a moment ago.
func avoids(rec kv.Placement, now time.Time) bool {
	return rec.AvoidUntil != nil && now.Before(*rec.AvoidUntil)
}

// kindOf groups requests that the same servers fit: where one of a kind finds
// nothing in a pass, the later ones of that kind need not try, and cannot pass
// it.
func kindOf(rec kv.Placement) string {
	return fmt.Sprintf("%q %q %q %v", rec.Tenant, rec.Role, rec.Spec.Requires, rec.Spec.Constraints)
}

// committer commits what the placer has decided.
func (t *term) committer(ctx context.Context) error {
	for {
		vm, ok := t.placing.take(ctx)
		if !ok {
			return nil
		}
		t.mu.Lock()
		c, chosen := t.choices[vm]
		delete(t.choices, vm)
		t.mu.Unlock()
		if chosen {
			t.place(ctx, c)
		}
		t.placing.done(vm)
	}
}

// place commits one decision: the server's slot, then the sandbox's record;
// then the create command goes out. If it cannot, the request waits again.
func (t *term) place(ctx context.Context, c choice) {
	ctx, span := t.tracer.Start(withTraceparent(ctx, c.rec.Traceparent), "sandbox.place", trace.WithAttributes(
		attribute.String("berth.vm", c.rec.VMID), attribute.String("berth.server", c.decision.Server)))
	defer span.End()
	err := t.alone(ctx, c.rec.VMID, func() error { return t.commit(ctx, c) })
	t.mu.Lock()
	if s := t.servers[c.decision.Server]; s != nil {
		delete(s.assumed, c.rec.VMID)
		t.refresh(s.rec.ID)
	}
	again := time.Duration(0)
	if v := t.vms[c.rec.VMID]; v != nil {
		v.committing = false
		if err == nil {
			v.refused = 0
		} else {
			again = min(50*time.Millisecond<<min(v.refused, 6), 2*time.Second)
			v.refused++
		}
	}
	t.mu.Unlock()
	switch {
	case err == nil:
	case errors.Is(err, errNoFit) || errors.Is(err, errMoved):
		span.AddEvent(err.Error())
	case ctx.Err() == nil:
		span.RecordError(err)
		t.log.Warn("placement not committed; trying again", "vm", c.rec.VMID, "server", c.decision.Server, "err", err)
	}
	if again > 0 {
		t.later(c.rec.VMID, again) // never a hot loop over a plan that the commit refuses (Q8)
		return
	}
	t.queue.add(c.rec.VMID)
}

var (
	errNoFit = errors.New("the server has no room for it any more")
	errMoved = errors.New("the sandbox is no longer queued")
)

func (t *term) commit(ctx context.Context, c choice) error {
	id, fence := c.decision.Server, c.fence
	now := time.Now().UTC()
	if err := t.reserve(ctx, id, c, kv.Alloc{Attempt: c.attempt, Fence: fence, Role: c.rec.Role, Tenant: c.rec.Tenant, Since: now}); err != nil {
		return err
	}
	rec, err := t.transition(ctx, c.rec.VMID, func(p *kv.Placement, rev uint64) error {
		if p.Phase == kv.Reserved && p.Attempt == c.attempt {
			return kv.ErrUnchanged // an earlier try of ours, whose answer was lost
		}
		if p.Phase != kv.Queued || rev != fence {
			return errMoved
		}
		p.Phase, p.ServerID, p.Fence, p.Attempt, p.Attempts = kv.Reserved, id, fence, c.attempt, p.Attempts+1
		p.ReservedAt, p.Explanation = &now, c.decision.Explanation
		return nil
	})
	if errors.Is(err, errMoved) || errors.Is(err, kv.ErrNotFound) {
		if holds(rec, id, kv.Alloc{Fence: fence}) {
			return errMoved // another scheduler moved it onto this very slot
		}
		return errors.Join(errMoved, t.free(ctx, id, c.rec.VMID, fence))
	}
	if err != nil {
		return err // not known: the orphan check frees the slot if it was not written
	}
	t.meters.placement.Record(ctx, float64(time.Since(rec.CreatedAt).Microseconds())/1000)
	return t.publishCreate(ctx, rec)
}

// reserve takes a slot of the server in one compare-and-set that also checks
// that the sandbox still fits.
func (t *term) reserve(ctx context.Context, id string, c choice, alloc kv.Alloc) error {
	return t.edit(ctx, id, func(s *kv.Server, rev uint64) error {
		if rev == 0 {
			return errNoFit // removed meanwhile
		}
		if held, ok := s.Allocs[c.rec.VMID]; ok {
			switch {
			case held.Fence == alloc.Fence:
				return kv.ErrUnchanged // this very slot: an earlier try, or another that believes it is active
			case held.Fence > alloc.Fence:
				return errNoFit // this scheduler is behind
			}
			// Left by a reservation that never reached the record, which has
			// moved on since: no worker can take it up. This one replaces it.
		}
		t.mu.Lock()
		health := monitor{state: kv.Down}
		if known := t.servers[id]; known != nil {
			health = known.health
		}
		t.mu.Unlock()
		snapshot := snapshotOf(s, c.rec.VMID, &health, time.Now())
		if placement.Fits(&snapshot, &c.request) != placement.Fit {
			return errNoFit
		}
		if s.Allocs == nil {
			s.Allocs = map[string]kv.Alloc{}
		}
		s.Allocs[c.rec.VMID] = alloc
		return nil
	})
}

// parking is a request that found nothing in a pass.
type parking struct {
	vm       string
	position int
	decision placement.Decision
	first    bool // of its kind; it hears of every change, the others only once
}

// sayQueued tells the requesters why they wait.
func (t *term) sayQueued(ctx context.Context, parked []parking) {
	type saying struct {
		rec  kv.Placement
		data events.Queued
	}
	var say []saying
	t.mu.Lock()
	for _, p := range parked {
		v, decision := t.vms[p.vm], p.decision
		if v == nil || v.queuedSaid == decision.Explanation || (v.queuedSaid != "" && !p.first) {
			continue
		}
		v.queuedSaid = decision.Explanation
		say = append(say, saying{v.rec, events.Queued{VMID: p.vm, Reasons: decision.Reasons, Explanation: decision.Explanation, Position: p.position, Request: v.rec.Request}})
	}
	t.mu.Unlock()
	for _, s := range say {
		t.work.Go(func() {
			id := s.rec.VMID + "-" + s.rec.Request.Token() + "-queued-" + events.Token(s.data.Explanation, "")
			err := t.say(ctx, s.rec.Tenant, s.rec.VMID, events.SandboxType(events.EventQueued), events.EventQueued, id, s.data, s.rec.Traceparent)
			if err != nil && ctx.Err() == nil {
				t.log.Warn("queued not announced", "vm", s.rec.VMID, "err", err)
			}
		})
	}
}
