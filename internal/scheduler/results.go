package scheduler

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
)

// activityEvery is how often the use of a sandbox is written to its record,
// where an idle time-out makes it matter: a successor may believe a sandbox
// idle for that much longer than it is, never shorter by more.
const activityEvery = 10 * time.Second

// onResult hears every claim and result of the fleet. Those of creates and
// kills have step look at the sandbox; those of forwarded commands are shown
// to their tenant; all count as use.
func (t *term) onResult(ctx context.Context, d delivery) error {
	path, err := events.ParseResult(d.Subject())
	if err == nil {
		err = d.err
	}
	if err != nil {
		return &drop{err.Error()}
	}
	e := d.event
	var f events.Finished // a claim has the same fields as far as they matter here
	if err := events.DecodeTolerant(e, &f); err != nil {
		return &drop{err.Error()}
	}
	ctx = events.ExtractTrace(ctx, d.Headers())
	finished := e.Type() == events.TypeFinished
	switch f.Command {
	case events.Create:
		t.mu.Lock()
		if v := t.vms[path.VM]; v != nil {
			v.answered = true
		}
		t.mu.Unlock()
		t.queue.add(path.VM)
		return nil
	case events.Kill:
		if finished && f.Outcome == computer.OK {
			return t.killed(ctx, path, f)
		}
		if finished {
			t.queue.add(path.VM)
		}
		return nil
	}
	if finished && f.Outcome == computer.OK && (f.Command == events.Pause || f.Command == events.Resume) {
		if err := t.paused(ctx, path.VM, f.Command == events.Pause); err != nil {
			return err
		}
	}
	t.used(path.VM)
	tenant, ok := e.Extensions()[events.ExtForwarded].(string)
	if !finished || !ok || events.CheckID("tenant", tenant) != nil {
		return nil
	}
	return t.sayFinished(ctx, tenant, path.VM, path.Token, f)
}

// resultLane is the sandbox that a result is about.
func resultLane(d delivery) string {
	path, err := events.ParseResult(d.Subject())
	if err != nil {
		return ""
	}
	return path.VM
}

// sayFinished shows a command's end to the tenant that asked for it. A sandbox
// has many of these on one subject, so what keeps them from being stored twice
// is the message id, within the stream's window.
func (t *term) sayFinished(ctx context.Context, tenant, vm, token string, f events.Finished) error {
	e, err := events.New(events.TypeFinished, events.SourceScheduler, token+"-finished", f)
	if err != nil {
		return err
	}
	e.SetSubject(vm)
	msg, err := events.NewMessage(ctx, events.EventSubject(tenant, vm, events.EventFinished), e)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if _, err := t.js.PublishMsg(ctx, msg, jetstream.WithMsgID(tenant+"."+vm+"."+e.ID())); err != nil {
		return fmt.Errorf("announce the end of %s: %w", f.CommandID, err)
	}
	return nil
}

// paused stops or starts a sandbox's idle clock.
func (t *term) paused(ctx context.Context, vm string, stop bool) error {
	return t.alone(ctx, vm, func() error {
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
	})
}

// killed ends a sandbox whose kill has finished, where it was not the scheduler
// that asked for it: of its own kills it follows the record's Ending. The
// record itself decides, not the mirror: this result is heard once.
func (t *term) killed(ctx context.Context, path events.ResultPath, f events.Finished) error {
	defer t.queue.add(path.VM)
	if f.Source == events.SourceScheduler {
		return nil
	}
	unlock, err := t.moving.lock(ctx, path.VM)
	if err != nil {
		return err
	}
	defer unlock()
	rec, rev, err := kv.Get[kv.Placement](ctx, t.placements, kv.VMKey(path.VM))
	if errors.Is(err, kv.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	t.applyVM(rec, rev)
	if rec.ServerID != path.Server || rec.Fence != f.Fence || rec.Ending != nil {
		return nil
	}
	how := ending(events.EventKilled, events.CodeKilled, fmt.Sprintf("killed by command %s of %s", f.CommandID, f.Source))
	if rec.Phase == kv.Ready {
		return t.end(ctx, rec, how)
	}
	_, err = t.setEnding(ctx, path.VM, how) // its create has not been confirmed yet
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
