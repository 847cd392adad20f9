package scheduler

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"berth/internal/bus"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/placement"
)

// steppers is how many sandboxes are worked on at once. Each step waits for a
// few writes one after the other, so this bounds the writes in flight.
const steppers = 64

// committers is how many placements are written at once. They wait for each
// other's writes only where these are of one server, which then go together.
const committers = 128

// term is one period of following the records, standing by at first and then
// active. Its maps are guarded by mu; records in them are values and replaced
// whole.
type term struct {
	*Scheduler
	epoch uint64
	queue *workqueue

	mu       sync.Mutex
	vms      map[string]*vmState
	servers  map[string]*serverState
	views    map[string]kv.ServerView // what the term before left in SERVERS
	early    map[string]kv.Heartbeat  // of servers that are not mirrored yet
	strings  map[string]string        // see one
	creating map[string]int           // by server: sandboxes that are reserved or starting there
	brake    brake
	fleet    *placement.Fleet
	waiting  *waitingList
	quotas   *quotas
	newest   uint64 // newest revision whose announcement is out, see watermark

	wakeup  chan struct{}     // something that may let a waiting request fit
	placing *workqueue        // sandboxes with a choice that is to be committed
	choices map[string]choice // by vm
	tending *workqueue        // servers whose picture changed

	edits   edits
	own     map[string]*ownWrite // by key of PLACEMENTS; guarded by mu
	moving  keyedMutex           // by vm: what moves a sandbox and announces it does so alone, so that events keep their order
	work    sync.WaitGroup
	counted int             // waiting requests, as the metric has them; guarded by mu
	unsaid  map[uint64]bool // revisions with a new phase that is not yet announced; guarded by mu
	serving bool            // the mirror has been loaded; what moves from here on is announced by this term
}

func newTerm(s *Scheduler) *term {
	t := &term{
		Scheduler: s, queue: newWorkqueue(),
		vms: map[string]*vmState{}, servers: map[string]*serverState{}, early: map[string]kv.Heartbeat{}, views: map[string]kv.ServerView{}, creating: map[string]int{}, strings: map[string]string{},
		fleet: placement.NewFleet(), waiting: newWaitingList(), quotas: newQuotas(),
		wakeup: make(chan struct{}, 1), placing: newWorkqueue(), choices: map[string]choice{}, own: map[string]*ownWrite{}, tending: newWorkqueue(),
		unsaid: map[uint64]bool{}, edits: edits{queues: map[string][]*edit{}},
	}
	t.moving.again = t.queue.add
	return t
}

// run follows the records until ctx ends or active returns. active is called
// once, and calls lead while it may schedule, with a context of its own that
// is a child of the one it got.
func (t *term) run(ctx context.Context, active func(ctx context.Context, lead func(context.Context, uint64) error) error) error {
	following, stop := context.WithCancel(ctx)
	defer stop()
	g, following := errgroup.WithContext(following)
	placementsListed, beatsListed := make(chan struct{}), make(chan struct{})
	g.Go(func() error {
		return t.watch(following, t.placements, "KV_"+kv.BucketPlacements, t.onPlacement, closeOnce(placementsListed, t.onListed))
	})
	g.Go(func() error {
		select {
		case <-placementsListed: // a heartbeat of a server not yet mirrored would be dropped
		case <-following.Done():
			return nil
		}
		return t.watch(following, t.heartbeats, "KV_"+kv.BucketHeartbeats, t.onHeartbeat, closeOnce(beatsListed, nil))
	})
	listed := make(chan struct{})
	g.Go(func() error {
		for _, one := range []chan struct{}{placementsListed, beatsListed} {
			select {
			case <-one:
			case <-following.Done():
				return nil
			}
		}
		t.mu.Lock()
		t.log.Info("following", "sandboxes", len(t.vms), "servers", len(t.servers))
		t.mu.Unlock()
		close(listed)
		return nil
	})
	err := active(ctx, func(ctx context.Context, epoch uint64) error {
		select {
		case <-listed:
		case <-ctx.Done():
			return nil
		}
		t.epoch = epoch
		return t.lead(ctx)
	})
	stop()
	return errors.Join(err, g.Wait())
}

// closeOnce returns a listing callback that closes ch the first time.
func closeOnce(ch chan struct{}, each func(map[string]bool)) func(map[string]bool) {
	var once sync.Once
	return func(keys map[string]bool) {
		if each != nil {
			each(keys)
		}
		once.Do(func() { close(ch) })
	}
}

// lead schedules until ctx ends (the lease is lost or the process stops).
func (t *term) lead(ctx context.Context) error {
	if err := t.loadViews(ctx); err != nil {
		return err
	}
	t.mu.Lock()
	t.serving = true
	now := time.Now()
	for id, s := range t.servers {
		s.health = s.health.handedOver(now, t.views[id])
		t.refresh(id)
	}
	for vm, v := range t.vms {
		t.queue.add(vm)
		// All that wait, before the first of them is placed: their order holds.
		if v.rec.Phase == kv.Queued && now.Before(v.rec.Deadline) {
			t.waiting.add(v.rec)
		}
	}
	t.mu.Unlock()
	if err := t.announceUnsaid(ctx); err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	for range steppers {
		g.Go(func() error { return t.stepper(ctx) })
	}
	g.Go(func() error { return t.placer(ctx) })
	for range committers {
		g.Go(func() error { return t.committer(ctx) })
	}
	for range tenders {
		g.Go(func() error { return t.tender(ctx) })
	}
	g.Go(func() error { return t.clock(ctx) })
	g.Go(func() error { return t.keepWatermark(ctx) })
	g.Go(func() error { return t.consume(ctx, bus.Requests, requestLane, t.onRequest) })
	g.Go(func() error { return t.consume(ctx, bus.Results, resultLane, t.onResult) })
	g.Go(func() error { return t.strays(ctx) })
	t.wake()
	t.log.Info("leading", "epoch", t.epoch)
	err := g.Wait()
	t.work.Wait()
	t.stopTimers()
	if ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) {
		return nil
	}
	return err
}

// wake has the placer look at the waiting requests again.
func (t *term) wake() {
	select {
	case t.wakeup <- struct{}{}:
	default:
	}
}

// stepper works through the queue.
func (t *term) stepper(ctx context.Context) error {
	for {
		vm, ok := t.queue.take(ctx)
		if !ok {
			return nil
		}
		unlock, ok := t.moving.try(vm)
		if !ok {
			t.queue.done(vm) // it comes again once its mover has let go
			continue
		}
		again, err := t.step(ctx, vm)
		unlock()
		if err != nil && ctx.Err() == nil {
			t.log.Warn("step; trying again", "vm", vm, "err", err)
			again = time.Second
		}
		t.queue.done(vm)
		if again > 0 {
			t.later(vm, again)
		}
	}
}

// alone runs f while nothing else moves the sandbox.
func (t *term) alone(ctx context.Context, vm string, f func() error) error {
	unlock, err := t.moving.lock(ctx, vm)
	if err != nil {
		return err
	}
	defer unlock()
	return f()
}

// later has step look at vm in d at the latest: a look that is due sooner
// stays due.
func (t *term) later(vm string, d time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := t.vms[vm]
	if v == nil {
		return
	}
	at := time.Now().Add(d)
	switch {
	case v.timer == nil:
		v.timer = time.AfterFunc(d, func() { t.ring(vm) })
	case !v.wakeAt.IsZero() && !at.Before(v.wakeAt):
		return
	default:
		v.timer.Reset(d)
	}
	v.wakeAt = at
}

// ring is a sandbox's timer.
func (t *term) ring(vm string) {
	t.mu.Lock()
	if v := t.vms[vm]; v != nil {
		v.wakeAt = time.Time{}
	}
	t.mu.Unlock()
	t.queue.add(vm)
}

func (t *term) stopTimers() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, v := range t.vms {
		if v.timer != nil {
			v.timer.Stop()
		}
	}
}

// watermarkKey holds what the next term need not announce again.
const watermarkKey = "scheduler"

type watermark struct {
	Announced uint64 `json:"announced"` // every move up to this revision of PLACEMENTS is announced
}

// keepWatermark records, about once a second, up to which revision every move
// is announced.
func (t *term) keepWatermark(ctx context.Context) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var written uint64
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		t.mu.Lock()
		mark := t.newest
		for rev := range t.unsaid {
			mark = min(mark, rev-1)
		}
		t.mu.Unlock()
		if mark <= written {
			continue
		}
		_, _, err := kv.Update(ctx, t.placements, watermarkKey, func(w *watermark, _ uint64) error {
			if w.Announced >= mark {
				return kv.ErrUnchanged
			}
			w.Announced = mark
			return nil
		})
		if err != nil && ctx.Err() == nil {
			t.log.Warn("watermark not written", "err", err)
			continue
		}
		written = mark
	}
}

// announceUnsaid makes good what an earlier term moved and did not announce.
func (t *term) announceUnsaid(ctx context.Context) error {
	mark, _, err := kv.Get[watermark](ctx, t.placements, watermarkKey)
	if err != nil && !errors.Is(err, kv.ErrNotFound) {
		return err
	}
	t.mu.Lock()
	var unsaid []string
	for vm, v := range t.vms {
		t.newest = max(t.newest, v.rev)
		if v.rev > mark.Announced {
			unsaid = append(unsaid, vm)
		}
	}
	t.mu.Unlock()
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(steppers)
	for _, vm := range unsaid {
		g.Go(func() error {
			rec, _, err := t.whole(ctx, vm)
			if errors.Is(err, kv.ErrNotFound) {
				return nil
			}
			if err != nil {
				return err
			}
			return t.announce(ctx, rec)
		})
	}
	if err := g.Wait(); err != nil {
		return fmt.Errorf("announce what the term before did not: %w", err)
	}
	return nil
}

// transition changes a sandbox's record by compare-and-set, starting from the
// mirror, and announces the phase it reaches. The caller holds the sandbox's
// lock. change must be idempotent; it returns kv.ErrUnchanged to leave the
// record alone.
func (t *term) transition(ctx context.Context, vm string, change func(rec *kv.Placement, rev uint64) error) (kv.Placement, error) {
	rec, rev, err := t.whole(ctx, vm)
	if err != nil {
		return rec, err
	}
	for attempt := 0; ; attempt++ {
		if attempt > 0 {
			if rec, rev, err = kv.Get[kv.Placement](ctx, t.placements, kv.VMKey(vm)); err != nil {
				return rec, err
			}
			t.applyVM(rec, rev)
		}
		before := rec.Phase
		if err := change(&rec, rev); errors.Is(err, kv.ErrUnchanged) {
			return rec, nil
		} else if err != nil {
			return rec, err
		}
		written := t.writing(kv.VMKey(vm))
		next, err := kv.Put(ctx, t.placements, kv.VMKey(vm), rec, rev)
		if err == nil {
			t.applyVM(rec, next)
			written()
			if rec.Phase == before {
				return rec, nil
			}
			return rec, t.moved(ctx, rec, next)
		}
		written()
		if ctx.Err() != nil {
			return rec, err
		}
		if !errors.Is(err, kv.ErrConflict) || attempt > 0 {
			if err := bus.Pause(ctx, attempt); err != nil {
				return rec, err
			}
		}
	}
}

// moved announces the phase of a record that this term has just written; the
// mirror has noted it as unsaid.
func (t *term) moved(ctx context.Context, rec kv.Placement, rev uint64) error {
	if err := t.announce(ctx, rec); err != nil {
		return err // stays unsaid: the next term, or step's next look, makes it good
	}
	t.mu.Lock()
	delete(t.unsaid, rev)
	t.mu.Unlock()
	return nil
}

// announce publishes the event of the phase that rec is in, once.
func (t *term) announce(ctx context.Context, rec kv.Placement) error {
	var name string
	var data any
	id := fmt.Sprintf("%s-%d-", rec.VMID, rec.Fence)
	placed := events.Placed{VMID: rec.VMID, ServerID: rec.ServerID, Fence: rec.Fence, Explanation: rec.Explanation, Request: rec.Request}
	switch rec.Phase {
	case kv.Reserved, kv.Starting:
		name, data = events.EventPlaced, placed
	case kv.Ready:
		name = events.EventReady
		placed.ExpiresAt = rec.ExpiresAt
		if rec.Info != nil {
			placed.Display, placed.Capabilities, placed.StreamURL = &rec.Info.Display, rec.Info.Capabilities, rec.Info.StreamURL
		}
		data = placed
	case kv.Ended:
		name = rec.Outcome
		id = fmt.Sprintf("%s-%s-", rec.VMID, rec.Request.Token())
		data = events.Ended{VMID: rec.VMID, ServerID: rec.ServerID, Code: rec.Code, Message: rec.Message, Request: rec.Request}
	default:
		return nil
	}
	return t.say(ctx, rec.Tenant, rec.VMID, events.SandboxType(name), name, id+name, data, rec.Traceparent)
}

// say announces one event about subject (a vm or server id) once.
func (t *term) say(ctx context.Context, tenant, subject, typ, name, id string, data any, traceparent string) error {
	e, err := events.New(typ, events.SourceScheduler, id, data)
	if err != nil {
		return err
	}
	e.SetSubject(subject)
	ctx = withTraceparent(ctx, traceparent)
	if err := bus.Announce(ctx, t.js, t.Scheduler.events, events.EventSubject(tenant, subject, name), e); err != nil {
		return fmt.Errorf("announce %s of %s: %w", name, subject, err)
	}
	t.meters.outcomes.Add(ctx, 1, eventAttr(name))
	return nil
}
