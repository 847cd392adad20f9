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

// pauseWithin bounds the wait for an idle sandbox's pause; then it is ended.
const pauseWithin = 3 * time.Minute

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
	idle := time.Until(active.Add(limit))
	if idle > 0 {
		return idle, nil
	}
	t.mu.Lock()
	v := t.vms[rec.VMID]
	pauses := v != nil && v.pauses
	t.mu.Unlock()
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
// ended. The command's name has the last use that the record knows, so that a
// successor publishes the same.
func (t *term) pauseIdle(ctx context.Context, rec kv.Placement, overdue, limit time.Duration) (time.Duration, error) {
	id := events.IdlePauseID(rec.VMID, rec.Fence, *rec.ActiveAt)
	result, err := t.lastResult(ctx, rec, events.Token(events.SourceScheduler, id))
	if err != nil {
		return 0, err
	}
	if f := result.finished; f != nil && f.Outcome != computer.OK {
		why := string(f.Outcome)
		if f.Error != nil {
			why = f.Error.Message
		}
		return 0, t.endIdle(ctx, rec, "unused for "+limit.String()+", and it could not be paused: "+why)
	}
	if result.finished != nil {
		err := t.say(ctx, rec.Tenant, rec.VMID, events.SandboxType(events.EventPaused), events.EventPaused, id,
			pausedEvent{VMID: rec.VMID, ServerID: rec.ServerID, Code: events.CodeIdle, Message: "unused for " + limit.String(), Request: rec.Request}, rec.Traceparent)
		if err == nil {
			err = t.setPaused(ctx, rec.VMID, true)
		}
		return events.MaxTTL, err
	}
	if overdue > pauseWithin {
		return 0, t.endIdle(ctx, rec, "unused for "+limit.String()+", and no worker paused it within "+pauseWithin.String())
	}
	if !result.started {
		// The message id keeps it from being stored twice; the claim from running twice.
		if err := t.publish(ctx, rec, events.Pause, id, events.Command{Fence: &rec.Fence}); err != nil {
			return 0, err
		}
	}
	return 5 * time.Second, nil
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
		if p.Phase != kv.Ready || (p.PausedAt != nil) == stop {
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
