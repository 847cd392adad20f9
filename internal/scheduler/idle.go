package scheduler

import (
	"context"
	"errors"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
)

// activityEvery is how often the use of a sandbox is written to its record,
// where an idle time-out makes it matter: a successor may believe a sandbox
// idle for that much longer than it is, never shorter by more.
const activityEvery = 10 * time.Second

// Times of an idle sandbox's pause.
const (
	pauseWithin = 3 * time.Minute  // from the end of its clock; then it is ended
	pauseAgain  = 15 * time.Second // after its server could not take the command
	maxUnderWay = time.Hour        // a command without an end counts as use for so long
)

// stepIdle follows a sandbox's idle clock and says when to look again; 0: it
// does not run, or the sandbox is to end. active is the last use that was seen.
func (t *term) stepIdle(ctx context.Context, rec kv.Placement, active time.Time, limit time.Duration) (time.Duration, error) {
	if active.Sub(*rec.ActiveAt) >= activityEvery {
		return time.Millisecond, t.noteUse(ctx, rec.VMID, active)
	}
	if rec.PausedAt != nil {
		return events.MaxTTL, nil // it stands
	}
	if rec.ActiveAt.After(active) {
		active = *rec.ActiveAt
	}
	t.mu.Lock()
	v := t.vms[rec.VMID]
	pauses := v != nil && v.pauses
	if v != nil && v.atWork(time.Now()) {
		active = time.Now()
	}
	t.mu.Unlock()
	idle := time.Until(active.Add(limit))
	if idle > 0 {
		return idle, nil
	}
	if pauses {
		return t.pauseIdle(ctx, rec, -idle, limit)
	}
	return 0, t.endIdle(ctx, rec, "unused for "+limit.String())
}

func (t *term) endIdle(ctx context.Context, rec kv.Placement, why string) error {
	_, err := t.setEnding(ctx, rec.VMID, kv.Ending{Outcome: events.EventExpired, Code: events.CodeIdle, Message: why})
	return err
}

// pauseIdle sees to it that an idle sandbox is paused. One that cannot be is
// ended; a server that cannot take the command now is asked again. The command's
// name has the last use that the record knows, so that a successor publishes the
// same. What it did is taken in by onResult.
func (t *term) pauseIdle(ctx context.Context, rec kv.Placement, overdue, limit time.Duration) (time.Duration, error) {
	id := events.IdlePauseID(rec.VMID, rec.Fence, *rec.ActiveAt, int(overdue/pauseAgain))
	if overdue > pauseWithin {
		return 0, t.endIdle(ctx, rec, "unused for "+limit.String()+", and no worker paused it within "+pauseWithin.String())
	}
	result, err := t.lastResult(ctx, rec, events.Token(events.SourceScheduler, id))
	if err != nil || result.started {
		return time.Second, err
	}
	// The message id keeps it from being stored twice; the claim from running twice.
	deadline := time.Now().Add(pauseAgain)
	if err := t.publish(ctx, rec, events.Pause, id, events.Command{Fence: &rec.Fence, Deadline: &deadline}); err != nil {
		return 0, err
	}
	return pauseAgain, nil
}

// idlePaused takes in the end of a pause that the idle clock has asked for. It
// is the truth about the sandbox, whatever has used it meanwhile.
func (t *term) idlePaused(ctx context.Context, vm string, f events.Finished) error {
	return t.alone(ctx, vm, func() error {
		rec, _, err := t.whole(ctx, vm)
		if errors.Is(err, kv.ErrNotFound) || err == nil && (rec.Phase != kv.Ready || rec.Fence != f.Fence) {
			return nil
		}
		if err != nil {
			return err
		}
		if f.Outcome == computer.OK {
			why := "unused"
			if rec.Spec != nil && rec.Spec.IdleTimeoutSeconds != nil {
				why += " for " + events.Seconds(*rec.Spec.IdleTimeoutSeconds).String()
			}
			err := t.say(ctx, rec.Tenant, vm, events.SandboxType(events.EventPaused), events.EventPaused, f.CommandID,
				pausedEvent{VMID: vm, ServerID: rec.ServerID, Code: events.CodeIdle, Message: why, Request: rec.Request}, rec.Traceparent)
			if err == nil {
				err = t.setPaused(ctx, vm, true)
			}
			return err
		}
		why := string(f.Outcome)
		if f.Error != nil {
			if f.Outcome == computer.Rejected && retryElsewhere(f.Error.Code) {
				return nil // step asks again
			}
			why = f.Error.Message
		}
		return t.endIdle(ctx, rec, "unused, and it could not be paused: "+why)
	})
}

// pausedEvent is the data of berth.sandbox.paused.v1.
type pausedEvent struct {
	VMID     string         `json:"vmId"`
	ServerID string         `json:"serverId"`
	Code     string         `json:"code"`
	Message  string         `json:"message"`
	Request  events.Request `json:"request"`
}

// paused stops or starts a sandbox's idle clock.
func (t *term) paused(ctx context.Context, vm string, stop bool) error {
	return t.alone(ctx, vm, func() error { return t.setPaused(ctx, vm, stop) })
}

// setPaused is paused for the holder of the sandbox's lock.
func (t *term) setPaused(ctx context.Context, vm string, stop bool) error {
	_, err := t.transition(ctx, vm, func(p *kv.Placement, _ uint64) error {
		if p.Phase != kv.Ready || stop && p.PausedAt != nil || !stop && p.PausedAt == nil && p.ActiveAt == nil {
			return kv.ErrUnchanged
		}
		now := time.Now().UTC()
		if p.PausedAt = nil; stop {
			p.PausedAt = &now
		}
		if p.ActiveAt != nil {
			p.ActiveAt = &now // it begins anew (cubeplex#538)
		}
		return nil
	})
	if errors.Is(err, kv.ErrNotFound) {
		return nil
	}
	return err
}

// used starts a sandbox's idle clock anew.
func (t *term) used(vm string) {
	t.mu.Lock()
	v := t.vms[vm]
	write := v != nil && t.touch(v, time.Now().UTC())
	t.mu.Unlock()
	if write {
		t.queue.add(vm)
	}
}

// touch notes the use of a sandbox with an idle clock and reports whether it is
// to be written to the record, which step does; the caller holds mu.
func (t *term) touch(v *vmState, now time.Time) (write bool) {
	if v.rec.Phase != kv.Ready || v.rec.ActiveAt == nil {
		return false
	}
	v.active = now
	return now.Sub(*v.rec.ActiveAt) >= activityEvery
}

// noteUse writes the last use of a sandbox to its record, once it is so much
// later than what the record says.
func (t *term) noteUse(ctx context.Context, vm string, used time.Time) error {
	_, err := t.transition(ctx, vm, func(p *kv.Placement, _ uint64) error {
		if p.Phase != kv.Ready || p.ActiveAt == nil || used.Sub(*p.ActiveAt) < activityEvery {
			return kv.ErrUnchanged
		}
		p.ActiveAt = &used
		return nil
	})
	return err
}

// begin and end note the commands under way in a sandbox, which use it; the
// caller holds mu.
func (v *vmState) begin(token string, now time.Time) {
	if v.underWay == nil {
		v.underWay = map[string]time.Time{}
	}
	v.underWay[token] = now
}

func (v *vmState) end(token string) { delete(v.underWay, token) }

func (v *vmState) atWork(now time.Time) bool {
	for token, since := range v.underWay {
		if now.Sub(since) > maxUnderWay {
			delete(v.underWay, token)
		}
	}
	return len(v.underWay) > 0
}

// follow notes the claim or the end of a command in a sandbox with an idle
// clock.
func (t *term) follow(vm, token string, finished bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := t.vms[vm]
	switch {
	case v == nil || v.rec.ActiveAt == nil:
	case finished:
		v.end(token)
	default:
		v.begin(token, time.Now())
	}
}
