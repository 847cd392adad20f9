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
	if f.Command == events.Pause && f.Source == events.SourceScheduler {
		if !finished { // its idle clock's, which is no use
			return nil
		}
		defer t.queue.add(path.VM)
		return t.idlePaused(ctx, path.VM, f)
	}
	t.follow(path.VM, path.Token, finished)
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
