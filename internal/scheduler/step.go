package scheduler

import (
	"context"
	"errors"
	"fmt"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
)

// Times of the state machine.
const (
	confirmWithin  = 30 * time.Second // of a reservation's start by a worker, else it is swept
	avoidFor       = 5 * time.Second  // a server that refused a sandbox
	lostAfter      = 60 * time.Second // a sandbox of a server that stays down
	asideAfter     = 3                // creates in a row that a server refused: it is set aside
	asideFor       = 15 * time.Second // at first, doubling with each further one
	asideMax       = 5 * time.Minute
	killAgain      = 2 * time.Second // before a failed kill is tried again, doubling
	killAgainMax   = 60 * time.Second
	killUnanswered = 90 * time.Second // past its deadline: nobody will run it any more
)

// tombstone is how long an ended sandbox's record stays; a variable for tests,
// where a day has too many heartbeats.
var tombstone = 24 * time.Hour

// step does the next thing that is due for one sandbox and says when to look
// again; 0 means not before something changes.
//
//	queued ─place→ reserved ─claim→ starting ─finished ok→ ready ─clock, kill, loss→ ended
//	   └────────────── deadline, kill, failure ─────────────────────────────────────┘
func (t *term) step(ctx context.Context, vm string) (time.Duration, error) {
	t.mu.Lock()
	v := t.vms[vm]
	if v == nil {
		t.mu.Unlock()
		return 0, nil
	}
	rec, unsaid, rev, slim := v.rec, t.unsaid[v.rev], v.rev, v.slim
	t.mu.Unlock()
	if unsaid {
		said := rec
		if slim {
			var err error
			if said, _, err = kv.Get[kv.Placement](ctx, t.placements, kv.VMKey(vm)); err != nil {
				return 0, err
			}
		}
		if err := t.announce(ctx, said); err != nil {
			return 0, err
		}
		t.mu.Lock()
		delete(t.unsaid, rev)
		t.mu.Unlock()
	}
	ctx = withTraceparent(ctx, rec.Traceparent)
	switch rec.Phase {
	case kv.Queued:
		return t.stepQueued(ctx, rec)
	case kv.Reserved, kv.Starting:
		return t.stepStarting(ctx, rec)
	case kv.Ready:
		return t.stepReady(ctx, rec)
	case kv.Ended:
		return t.stepEnded(ctx, rec)
	}
	return 0, fmt.Errorf("vm %s is in unknown phase %q", vm, rec.Phase)
}

func (t *term) stepQueued(ctx context.Context, rec kv.Placement) (time.Duration, error) {
	left := time.Until(rec.Deadline)
	if left <= 0 {
		return 0, t.end(ctx, rec, ending(events.EventExpired, events.CodeQueueTimeout, "waited "+waited(rec)+" for a server"))
	}
	t.mu.Lock()
	v := t.vms[rec.VMID]
	if v != nil && v.rec.Phase == kv.Queued && !v.committing {
		t.waiting.add(v.rec)
	}
	t.mu.Unlock()
	t.wake()
	if rec.AvoidUntil != nil {
		if d := time.Until(*rec.AvoidUntil); d > 0 {
			left = min(left, d+time.Millisecond)
		}
	}
	return left, nil
}

func waited(rec kv.Placement) string {
	return rec.Deadline.Sub(rec.CreatedAt).Round(time.Second).String()
}

// stepStarting follows a reservation until its create command has finished.
func (t *term) stepStarting(ctx context.Context, rec kv.Placement) (time.Duration, error) {
	if rec.Phase == kv.Reserved && rec.Ending == nil && t.unanswered(rec) {
		return max(min(time.Until(rec.Deadline), confirmWithin-time.Since(*rec.ReservedAt)), time.Millisecond), nil
	}
	result, err := t.lastResult(ctx, rec, createToken(rec))
	if err != nil {
		return 0, err
	}
	if result.finished == nil && rec.Ending == nil && time.Now().After(rec.Deadline) {
		rec, err = t.setEnding(ctx, rec.VMID, kv.Ending{Outcome: events.EventExpired, Code: events.CodeQueueTimeout, Message: "not ready within " + waited(rec)})
		if err != nil || rec.Ending == nil {
			return 0, err
		}
	}
	if f := result.finished; f != nil {
		return t.confirm(ctx, rec, *f)
	}
	if rec.Ending != nil {
		gone, err := t.pursueKill(ctx, rec)
		if err != nil {
			return 0, err
		}
		if gone && !result.started {
			return 0, t.sweep(ctx, rec, events.CodeKilled, rec.Ending.Message) // lest a worker takes it up after all
		}
	}
	again := time.Until(rec.Deadline)
	if rec.Ending != nil || again <= 0 {
		again = t.untilKillAgain(rec.VMID)
	}
	if result.started {
		if rec.Phase == kv.Reserved {
			_, err := t.transition(ctx, rec.VMID, func(p *kv.Placement, _ uint64) error {
				if p.Phase != kv.Reserved || p.Fence != rec.Fence {
					return kv.ErrUnchanged
				}
				p.Phase = kv.Starting
				return nil
			})
			return again, err
		}
		if down := t.downFor(rec.ServerID); down >= lostAfter {
			return 0, t.end(ctx, rec, ending(events.EventFailed, events.CodeServerDown, "server "+rec.ServerID+" went down while it started the sandbox"))
		}
		return min(again, 5*time.Second), nil
	}
	return t.awaitClaim(ctx, rec, again)
}

// unanswered reports whether this very term has published the create command,
// no result of it has come, and neither is overdue: then there is nothing to
// read, and most reservations are looked at in just this moment.
func (t *term) unanswered(rec kv.Placement) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := t.vms[rec.VMID]
	return v != nil && v.createSent == rec.Fence && !v.answered && time.Since(*rec.ReservedAt) < confirmWithin && time.Now().Before(rec.Deadline)
}

// awaitClaim has the create command published, and sweeps the reservation if
// no worker takes it up in time.
func (t *term) awaitClaim(ctx context.Context, rec kv.Placement, again time.Duration) (time.Duration, error) {
	age := time.Since(*rec.ReservedAt)
	if age >= confirmWithin {
		return 0, t.sweep(ctx, rec, events.CodeUnconfirmed, fmt.Sprintf("no worker of %s took it up within %s", rec.ServerID, confirmWithin))
	}
	t.mu.Lock()
	v := t.vms[rec.VMID]
	sent := v != nil && v.createSent == rec.Fence
	t.mu.Unlock()
	if !sent && rec.Ending == nil {
		if err := t.publishCreate(ctx, rec); err != nil {
			return 0, err
		}
	}
	return max(min(again, confirmWithin-age), time.Millisecond), nil
}

// confirm acts on the finished create.
func (t *term) confirm(ctx context.Context, rec kv.Placement, f events.Finished) (time.Duration, error) {
	code, message := "", ""
	if f.Error != nil {
		code, message = f.Error.Code, f.Error.Message
	}
	switch {
	case f.Outcome == computer.OK && rec.Ending != nil:
		return t.pursueEnding(ctx, rec)
	case f.Outcome == computer.OK:
		return 0, t.becomeReady(ctx, rec, f)
	case rec.Ending != nil:
		// It was to end anyway; before ready a kill is a failed create.
		outcome := rec.Ending.Outcome
		if outcome == events.EventKilled {
			outcome = events.EventFailed
		}
		return 0, t.end(ctx, rec, ending(outcome, rec.Ending.Code, rec.Ending.Message))
	case f.Outcome == computer.Rejected && retryElsewhere(code):
		return 0, t.requeue(ctx, rec, code, message)
	default:
		return 0, t.end(ctx, rec, ending(events.EventFailed, code, message))
	}
}

// retryElsewhere reports whether a refused create may fit another server, or
// this one later. The other refusals are about the request itself.
func retryElsewhere(code string) bool {
	switch code {
	case events.CodeFull, events.CodeFenceStale, events.CodeUnavailable, events.CodeUnconfirmed,
		events.CodeServerDown, events.CodeDeadline, events.CodeBusy, events.CodeNotFound:
		return true
	}
	return false
}

func (t *term) becomeReady(ctx context.Context, rec kv.Placement, f events.Finished) error {
	if time.Now().After(rec.Deadline) {
		_, err := t.setEnding(ctx, rec.VMID, kv.Ending{Outcome: events.EventExpired, Code: events.CodeQueueTimeout, Message: "ready only after " + waited(rec)})
		return err
	}
	ready, err := t.transition(ctx, rec.VMID, func(p *kv.Placement, _ uint64) error {
		if (p.Phase != kv.Reserved && p.Phase != kv.Starting) || p.Fence != rec.Fence || p.Ending != nil {
			return kv.ErrUnchanged
		}
		now := time.Now().UTC()
		expires := now.Add(events.Seconds(*p.Spec.TTLSeconds))
		p.Phase, p.ReadyAt, p.ExpiresAt, p.Info = kv.Ready, &now, &expires, f.Sandbox
		if p.Spec.IdleTimeoutSeconds != nil {
			p.ActiveAt = &now
		}
		return nil
	})
	if err == nil && ready.Phase == kv.Ready {
		t.servedBy(rec.ServerID)
		t.meters.ready.Record(ctx, float64(time.Since(ready.CreatedAt).Microseconds())/1000)
	}
	return err
}

// stepReady watches a ready sandbox's clocks and its end.
func (t *term) stepReady(ctx context.Context, rec kv.Placement) (time.Duration, error) {
	t.mu.Lock()
	var gone *kv.Gone
	var active time.Time
	var limit time.Duration
	if v := t.vms[rec.VMID]; v != nil {
		gone, active, limit = v.gone, v.active, v.idle
	}
	t.mu.Unlock()
	if gone != nil {
		return 0, t.end(ctx, rec, ending(events.EventLost, gone.Code, gone.Message))
	}
	if down := t.downFor(rec.ServerID); down >= lostAfter {
		if err := t.endClaimed(ctx, rec); err != nil {
			return 0, err
		}
		return 0, t.end(ctx, rec, ending(events.EventLost, events.CodeServerDown, fmt.Sprintf("server %s has been down for %s", rec.ServerID, lostAfter)))
	}
	if rec.Ending != nil {
		return t.pursueEnding(ctx, rec)
	}
	again := time.Until(*rec.ExpiresAt)
	if again <= 0 {
		_, err := t.setEnding(ctx, rec.VMID, kv.Ending{Outcome: events.EventExpired, Code: events.CodeTTL, Message: "lived its " + rec.ExpiresAt.Sub(*rec.ReadyAt).Round(time.Second).String()})
		return 0, err
	}
	if limit > 0 && rec.ActiveAt != nil {
		idle, err := t.stepIdle(ctx, rec, active, limit)
		if err != nil || idle == 0 {
			return idle, err
		}
		again = min(again, idle)
	}
	return again, nil
}

// pursueEnding kills the sandbox and ends the record once that is confirmed.
func (t *term) pursueEnding(ctx context.Context, rec kv.Placement) (time.Duration, error) {
	gone, err := t.pursueKill(ctx, rec)
	if err != nil {
		return 0, err
	}
	if gone {
		outcome := rec.Ending.Outcome
		if rec.Phase != kv.Ready && outcome == events.EventKilled {
			outcome = events.EventFailed
		}
		return 0, t.end(ctx, rec, ending(outcome, rec.Ending.Code, rec.Ending.Message))
	}
	return t.untilKillAgain(rec.VMID), nil
}

// stepEnded frees the slot once the sandbox is confirmed gone, and forgets the
// record when its id may be used again.
func (t *term) stepEnded(ctx context.Context, rec kv.Placement) (time.Duration, error) {
	if rec.FreedAt == nil && rec.ServerID != "" {
		gone, err := t.confirmedGone(ctx, rec)
		if err != nil {
			return 0, err
		}
		if !gone {
			if gone, err = t.pursueKill(ctx, rec); err != nil {
				return 0, err
			}
		}
		if !gone {
			return t.untilKillAgain(rec.VMID), nil
		}
		if err := t.free(ctx, rec.ServerID, rec.VMID, rec.Fence); err != nil {
			return 0, err
		}
		_, err = t.transition(ctx, rec.VMID, func(p *kv.Placement, _ uint64) error {
			if p.FreedAt != nil {
				return kv.ErrUnchanged
			}
			now := time.Now().UTC()
			p.FreedAt = &now
			return nil
		})
		return 0, err
	}
	left := time.Until(rec.EndedAt.Add(tombstone))
	if left > 0 {
		return left, nil
	}
	t.mu.Lock()
	var rev uint64
	if v := t.vms[rec.VMID]; v != nil {
		rev = v.rev
	}
	t.mu.Unlock()
	if err := t.deleteAt(ctx, kv.VMKey(rec.VMID), rev); err != nil {
		return 0, err
	}
	t.forgetVM(rec.VMID, ^uint64(0))
	return 0, nil
}

// confirmedGone reports whether somebody who knows has said that the sandbox
// of this record is no more, or never was.
func (t *term) confirmedGone(ctx context.Context, rec kv.Placement) (bool, error) {
	if rec.Outcome == events.EventLost && rec.Code != events.CodeServerDown {
		return true, nil // its worker's word
	}
	if t.serverRemoved(rec.ServerID) {
		return true, nil
	}
	create, err := t.lastResult(ctx, rec, createToken(rec))
	if err != nil {
		return false, err
	}
	if f := create.finished; f != nil && (f.Outcome == computer.Rejected || f.Outcome == computer.Failed) {
		return true, nil // a worker that fails a create leaves nothing behind
	}
	return false, nil
}

// end moves a sandbox to its end, if it is still the placement that was looked
// at and nobody has decided on another end meanwhile.
func (t *term) end(ctx context.Context, rec kv.Placement, how kv.Ending) error {
	_, err := t.transition(ctx, rec.VMID, func(p *kv.Placement, _ uint64) error {
		if p.Phase == kv.Ended || p.Fence != rec.Fence || p.Request != rec.Request || (p.Ending == nil) != (rec.Ending == nil) {
			return kv.ErrUnchanged
		}
		now := time.Now().UTC()
		p.Phase, p.EndedAt, p.Outcome, p.Code, p.Message = kv.Ended, &now, how.Outcome, how.Code, how.Message
		p.Spec = nil
		return nil
	})
	if errors.Is(err, kv.ErrNotFound) {
		return nil
	}
	return err
}

func ending(outcome, code, message string) kv.Ending {
	return kv.Ending{Outcome: outcome, Code: code, Message: message}
}

// setEnding says that a sandbox is to end, unless that has been said.
func (t *term) setEnding(ctx context.Context, vm string, how kv.Ending) (kv.Placement, error) {
	rec, err := t.transition(ctx, vm, func(p *kv.Placement, _ uint64) error {
		if p.Phase == kv.Ended || p.Ending != nil {
			return kv.ErrUnchanged
		}
		how.Since, how.Attempt = time.Now().UTC(), 1
		p.Ending = &how
		return nil
	})
	t.queue.add(vm)
	return rec, err
}

// requeue sends a refused sandbox back to wait, without its slot.
func (t *term) requeue(ctx context.Context, rec kv.Placement, code, message string) error {
	if err := t.free(ctx, rec.ServerID, rec.VMID, rec.Fence); err != nil {
		return err
	}
	_, err := t.transition(ctx, rec.VMID, func(p *kv.Placement, _ uint64) error {
		if (p.Phase != kv.Reserved && p.Phase != kv.Starting) || p.Fence != rec.Fence {
			return kv.ErrUnchanged
		}
		until := time.Now().UTC().Add(avoidFor << min(p.Attempts-1, 4))
		p.Phase, p.AvoidServer, p.AvoidUntil = kv.Queued, p.ServerID, &until
		p.ServerID, p.Fence, p.Attempt, p.ReservedAt = "", 0, "", nil
		return nil
	})
	if err == nil {
		t.refusedBy(rec.ServerID, code, *rec.ReservedAt)
	}
	t.log.Info("refused; queued again", "vm", rec.VMID, "server", rec.ServerID, "code", code, "message", message)
	return err
}

// refusedBy notes that a server refused a create that fits its record. One that
// does so again and again has less room than its record says, or none that
// works: it is set aside for a while, which is to say that it counts as
// degraded: it gets one create at a time, where no other server fits. A create
// that succeeds clears it.
// What was reserved before it was set aside last counts for that, and no more.
func (t *term) refusedBy(server, code string, reserved time.Time) {
	switch code {
	case events.CodeFull, events.CodeUnavailable, events.CodeUnconfirmed, events.CodeBusy:
	default:
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.servers[server]
	if s == nil || reserved.Before(s.asideAt) {
		return
	}
	if s.refusals++; s.refusals < asideAfter {
		return
	}
	d := min(asideFor<<min(s.refusals-asideAfter, 8), asideMax)
	s.asideAt = time.Now()
	s.aside = s.asideAt.Add(d)
	t.refresh(server)
	t.log.Warn("the server refuses what fits its record; set aside", "server", server, "refusals", s.refusals, "code", code, "for", d)
}

// servedBy notes that a server made a sandbox.
func (t *term) servedBy(server string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := t.servers[server]; s != nil && s.refusals > 0 {
		s.refusals, s.aside = 0, time.Time{}
		t.refresh(server)
		t.wake()
	}
}

// sweep claims a create command that no worker has taken up, so that none ever
// will; if a worker was faster, its claim is followed instead.
func (t *term) sweep(ctx context.Context, rec kv.Placement, code, message string) error {
	err := t.publishEnd(ctx, rec.ServerID, rec.VMID, events.Event{}, events.Finished{
		CommandID: events.CreateCommandID(rec.VMID, rec.Fence), Source: events.SourceScheduler, Command: events.Create, Outcome: computer.Rejected,
		Error: &computer.Fault{Code: code, Message: message}, Fence: rec.Fence, Request: rec.Request,
	}, 0)
	if err != nil {
		return err
	}
	t.queue.add(rec.VMID)
	return nil
}
