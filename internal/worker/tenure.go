package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
)

// tenure is one hold of one server's lease.
type tenure struct {
	*handles
	w        *Worker
	js       jetstream.JetStream
	log      *slog.Logger
	server   Server
	lease    *kv.Lease
	provider providers.Provider
	breaker  *breaker
	frames   frameStore

	commands *lanes // create, act, observe, pause, resume
	kills    *lanes // and cancels

	look chan struct{} // asks for an inventory now
	beat chan struct{} // asks for a heartbeat now
	give chan struct{} // asks to hand the server over

	mu        sync.Mutex
	boxes     map[string]box      // sandboxes that serve commands, by vm
	killed    map[string]killMark // by vm
	claims    map[string]bool     // tokens that this tenure is working on
	locks     map[string]*vmLock
	state     kv.Heartbeat            // what the next heartbeat says
	badProbes span                    // of the probes that have failed since the last that passed
	ready     map[placement]bool      // whether a placement's create is known to have been ok
	orphan    map[placement]stray     // sandboxes without allocation
	watched   map[placement]time.Time // when the live view was last seen, by the last inventory, whose goroutine alone has it
}

// placement names one life of a vm.
type placement struct {
	vm    string
	fence uint64
}

func newTenure(w *Worker, s Server, h *handles, lease *kv.Lease, log *slog.Logger) *tenure {
	t := &tenure{
		handles: h, w: w, js: w.opts.JS, server: s, lease: lease,
		log:  log.With("epoch", lease.Epoch),
		look: make(chan struct{}, 1), beat: make(chan struct{}, 1), give: make(chan struct{}, 1),
		boxes: map[string]box{}, killed: map[string]killMark{}, claims: map[string]bool{}, locks: map[string]*vmLock{},
		ready: map[placement]bool{}, orphan: map[placement]stray{},
		frames: frameStore{js: w.opts.JS, store: h.pictures, last: map[string]frame{}},
	}
	t.state = kv.Heartbeat{Server: s.ID, Worker: w.opts.Name, Epoch: lease.Epoch, Probe: "not opened yet"}
	t.breaker = newBreaker(s.ID, func() { ask(t.beat) })
	t.commands = newLanes(bus.BacklogPerSandbox, t.command)
	t.kills = newLanes(bus.BacklogPerSandbox, t.overtake)
	return t
}

// run serves from the moment the lease is held until it is lost (an error), ctx
// ends (nil), or the server is handed over. Everything it started has ended when
// it returns.
func (t *tenure) run(ctx, held context.Context) (handed bool, err error) {
	work, cancel := context.WithCancelCause(held)
	defer cancel(errStopping)
	t.log.Info("tenure begins", "worker", t.w.opts.Name)
	var background sync.WaitGroup
	background.Go(func() { t.beats(work) })
	defer background.Wait()
	defer cancel(errStopping)

	// Until commands are served a drain has nothing to wait for.
	starting := context.AfterFunc(ctx, func() { cancel(errStopping) })
	defer starting()
	if err := t.open(work); err != nil {
		return false, t.ended(ctx, work, err)
	}
	defer t.close(context.WithoutCancel(work))
	alert, err := t.register(work)
	if err != nil {
		return false, t.ended(ctx, work, err)
	}
	if alert != "" {
		background.Go(func() { t.alert(work, alert) })
	}
	background.Go(func() { t.probes(work) })
	t.takeStock(work)
	background.Go(func() { t.inventory(work) })
	background.Go(func() { t.keepHeld(work) })

	if starting() {
		handed = t.serve(ctx, work)
	}
	if handed {
		t.log.Info("tenure ends; the server is handed over")
		return true, nil
	}
	t.drain(work, cancel)
	return false, t.ended(ctx, work, nil)
}

// serve reads both consumers until ctx or work ends, or the server is handed
// over. It returns with the consumers read no more.
func (t *tenure) serve(ctx, work context.Context) (handed bool) {
	for {
		specs := bus.ServerConsumers(t.server.ID, t.server.Config.MaxContainers)
		i := slices.IndexFunc(specs, func(s bus.ConsumerSpec) bool { return s.Durable == bus.KillConsumer(t.server.ID) })
		stopKills, caughtUp := t.pull(work, specs[i], t.kills)
		// What was cancelled while nobody served begins no more.
		select {
		case <-caughtUp:
		case <-time.After(catchUpTime):
			t.log.Warn("commands are served before all kills and cancels are known", "after", catchUpTime)
		case <-ctx.Done():
		case <-work.Done():
		}
		stopCommands, _ := t.pull(work, specs[1-i], t.commands)
		select {
		case <-ctx.Done():
		case <-work.Done():
		case <-t.give:
			// Kills are served to the end: one may end what runs.
			stopCommands()
			done := t.commands.pause(ctx, work, handOverTime)
			stopKills()
			if done && t.kills.pause(ctx, work, handOverTime) {
				return true
			}
			if ctx.Err() == nil && work.Err() == nil {
				t.log.Info("server is too busy to be handed over")
				t.w.roster.keep(t.server.ID)
				t.commands.resume()
				t.kills.resume()
				continue
			}
		}
		stopCommands()
		stopKills()
		return false
	}
}

// catchUpTime bounds the wait for the kills and cancels that are there already.
const catchUpTime = 2 * time.Second

// pull reads a consumer into a lane until stop is called, which waits for the
// reader's end. caughtUp is closed when the lane has what was there before.
func (t *tenure) pull(work context.Context, spec bus.ConsumerSpec, lane *lanes) (stop func(), caughtUp <-chan struct{}) {
	pulling, cancel := context.WithCancelCause(work)
	done, caught := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		t.consume(pulling, work, spec, lane, sync.OnceFunc(func() { close(caught) }))
	}()
	return func() {
		cancel(errStopping)
		<-done
	}, caught
}

// drain lets what runs finish within the grace period and cancels it then.
// What waits is left to the successor.
func (t *tenure) drain(work context.Context, cancel context.CancelCauseFunc) {
	done := make(chan struct{})
	go func() {
		t.commands.stop()
		t.kills.stop()
		close(done)
	}()
	grace := time.NewTimer(drainGrace)
	defer grace.Stop()
	select {
	case <-done:
	case <-grace.C:
		cancel(errStopping)
		<-done
	case <-work.Done():
		<-done
	}
}

// ended says why a tenure ended, nil for a drain.
func (t *tenure) ended(ctx, work context.Context, err error) error {
	cause := context.Cause(work)
	switch {
	case errors.Is(cause, kv.ErrLeaseLost):
		return cause
	case ctx.Err() != nil:
		t.log.Info("tenure ends")
		return nil
	case err != nil:
		return err
	}
	return cause
}

// open opens the provider, trying again for a while: another worker may still
// be closing it.
func (t *tenure) open(ctx context.Context) error {
	start := time.Now()
	for attempt := 0; ; attempt++ {
		p, err := t.server.Open(ctx)
		if err == nil {
			t.provider = p
			info := p.Info()
			if len(t.server.Config.Capabilities) == 0 {
				t.server.Config.Capabilities = info.Capabilities
			}
			if t.server.Config.Provider == "" {
				t.server.Config.Provider = info.Kind
			}
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		t.setProbe(fmt.Sprintf("cannot open: %v", err))
		if attempt == 0 {
			t.log.Warn("provider does not open; trying again", "err", err)
		}
		if time.Since(start) > openPatience {
			return fmt.Errorf("provider does not open: %w", err)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(min(250*time.Millisecond<<min(attempt, 5), 5*time.Second)):
		}
	}
}

func (t *tenure) close(ctx context.Context) {
	if t.w.crashed.Load() {
		return
	}
	bound, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	if _, err := bounded(bound, func(context.Context) (struct{}, error) { return struct{}{}, t.provider.Close() }); err != nil {
		t.log.Warn("provider does not close", "err", err)
	}
}

// errSuperseded: a worker with a later epoch has registered.
var errSuperseded = errors.New("another worker has registered with a later epoch")

// register writes the server's registry entry with this tenure's epoch. From
// here on a worker of an earlier epoch cannot register. Where another worker
// had another entry this one holds now, and disagreement says so.
func (t *tenure) register(ctx context.Context) (disagreement string, err error) {
	config := t.server.Config
	var before kv.Server
	_, _, err = kv.Update(ctx, t.placements, kv.ServerKey(t.server.ID), func(s *kv.Server, _ uint64) error {
		if s.Epoch > t.lease.Epoch {
			return fmt.Errorf("epoch %d after %d: %w", s.Epoch, t.lease.Epoch, errSuperseded)
		}
		before = *s
		s.ID, s.Config, s.Worker, s.Epoch = t.server.ID, config, t.w.opts.Name, t.lease.Epoch
		if s.Admin == "" {
			s.Admin = kv.Active
		}
		return nil
	})
	if err != nil {
		return "", fmt.Errorf("register server: %w", err)
	}
	if before.Worker == "" || before.Worker == t.w.opts.Name {
		return "", nil
	}
	fields := differing(before.Config, config)
	if len(fields) == 0 {
		return "", nil
	}
	t.log.Warn("the registry entry differs from the one that another worker had; this one holds now", "other", before.Worker, "was", before.Config, "is", config)
	return fmt.Sprintf("the registries of workers %s and %s disagree on %s; the entry of %s holds, which has the lease now",
		before.Worker, t.w.opts.Name, strings.Join(fields, ", "), t.w.opts.Name), nil
}

// differing names the fields, as in JSON, that differ. An empty list or map is
// none at all.
func differing(a, b kv.ServerConfig) []string {
	var out []string
	for _, f := range []struct {
		name string
		same bool
	}{
		{"provider", a.Provider == b.Provider},
		{"roles", slices.Equal(a.Roles, b.Roles)},
		{"priority", a.Priority == b.Priority},
		{"maxContainers", a.MaxContainers == b.MaxContainers},
		{"isolation", a.Isolation == b.Isolation},
		{"attributes", maps.Equal(a.Attributes, b.Attributes)},
		{"capabilities", slices.Equal(a.Capabilities, b.Capabilities)},
	} {
		if !f.same {
			out = append(out, f.name)
		}
	}
	return out
}

// eventAlert: something about a server that people should look at.
const eventAlert = "alert"

// alert publishes a server's alert, one per tenure. It serves people only, so
// it is given up after some tries: the log has it too.
func (t *tenure) alert(ctx context.Context, reason string) {
	id := fmt.Sprintf("%s-%d-%s", t.server.ID, t.lease.Epoch, eventAlert)
	e, err := events.New(events.ServerType(eventAlert), events.SourceWorker, id, events.ServerEvent{ServerID: t.server.ID, Reason: reason})
	if err != nil {
		t.log.Error("alert not encoded", "err", err)
		return
	}
	msg, err := events.NewMessage(ctx, events.EventSubject(events.FleetTenant, t.server.ID, eventAlert), e)
	if err != nil {
		t.log.Error("alert not encoded", "err", err)
		return
	}
	for range alertTries {
		call, cancel := context.WithTimeout(ctx, alertTime)
		_, err = t.js.PublishMsg(call, msg, jetstream.WithMsgID(id))
		cancel()
		if err == nil || !sleep(ctx, alertTime) {
			break
		}
	}
	if err != nil && ctx.Err() == nil {
		t.log.Error("alert not published", "subject", msg.Subject, "err", err)
	}
}

// keepHeld tells the server every third of the ack wait that the messages held
// are being worked on.
func (t *tenure) keepHeld(ctx context.Context) {
	wait := bus.ServerConsumers(t.server.ID, 1)[0].AckWait
	for sleep(ctx, wait/3) {
		for _, l := range []*lanes{t.commands, t.kills} {
			for _, m := range l.messages() {
				if err := m.InProgress(); err != nil && !errors.Is(err, jetstream.ErrMsgAlreadyAckd) {
					t.log.Debug("message not kept", "err", err)
				}
			}
		}
	}
}

// retry repeats fn until it succeeds, its error is one of final, or ctx ends.
func retry(ctx context.Context, fn func() error, final ...error) error {
	for attempt := 0; ; attempt++ {
		err := fn()
		if err == nil {
			return nil
		}
		for _, f := range final {
			if errors.Is(err, f) {
				return err
			}
		}
		if bus.Pause(ctx, attempt) != nil {
			return err
		}
	}
}

// sleep reports whether d has passed before ctx ended.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// ask wakes whoever waits for c; several asks before it wakes are one.
func ask(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// linger returns ctx's values with a life that goes on for lingerTime after
// ctx ends: for publishing what is known although the lease is lost or the
// grace period is over. In a crash it ends at once.
func linger(ctx context.Context) (context.Context, context.CancelFunc) {
	out, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		cause := context.Cause(ctx)
		if !errors.Is(cause, errAbandoned) {
			sleep(out, lingerTime)
		}
		cancel(cause)
	})
	return out, func() { stop(); cancel(context.Canceled) }
}

// record reads the server's own record through the leader until it is known.
func (t *tenure) record(ctx context.Context) (kv.Server, error) {
	var s kv.Server
	err := retry(ctx, func() (err error) {
		s, _, err = kv.Get[kv.Server](ctx, t.placements, kv.ServerKey(t.server.ID))
		return err
	}, kv.ErrNotFound)
	if errors.Is(err, kv.ErrNotFound) {
		return kv.Server{}, nil
	}
	return s, err
}

// where reads a vm's placement; nil where there is none.
func (t *tenure) where(ctx context.Context, vm string) (*kv.Placement, error) {
	var p kv.Placement
	err := retry(ctx, func() (err error) {
		p, _, err = kv.Get[kv.Placement](ctx, t.placements, kv.VMKey(vm))
		return err
	}, kv.ErrNotFound)
	if errors.Is(err, kv.ErrNotFound) {
		return nil, nil
	}
	return &p, err
}
