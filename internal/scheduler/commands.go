package scheduler

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
)

func createToken(rec kv.Placement) string {
	return events.Token(events.SourceScheduler, events.CreateCommandID(rec.VMID, rec.Fence))
}

// resultState is what the stream says of one command.
type resultState struct {
	started  bool
	finished *events.Finished
	seq      uint64 // in RESULTS, of the last message
}

// lastResult reads what became of a command of this placement.
func (t *term) lastResult(ctx context.Context, rec kv.Placement, token string) (resultState, error) {
	e, raw, err := bus.Last(ctx, t.results, events.ResultSubject(rec.ServerID, rec.VMID, token))
	if err != nil || raw == nil {
		return resultState{}, err
	}
	if e.Type() != events.TypeFinished {
		return resultState{started: true, seq: raw.Sequence}, nil
	}
	var f events.Finished
	if err := events.DecodeTolerant(e, &f); err != nil {
		return resultState{}, fmt.Errorf("result of %s: %w", rec.VMID, err)
	}
	return resultState{started: true, finished: &f, seq: raw.Sequence}, nil
}

// publish sends a command of the scheduler's own. The message id spares the
// worker a repetition; the claim is what makes it run once.
func (t *term) publish(ctx context.Context, rec kv.Placement, verb events.Verb, id string, data any) error {
	e, err := events.New(events.CommandType(verb), events.SourceScheduler, id, data)
	if err != nil {
		return err
	}
	msg, err := events.NewMessage(ctx, events.CommandSubject(rec.ServerID, rec.VMID, verb), e)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if _, err := t.js.PublishMsg(ctx, msg, jetstream.WithMsgID(e.Source()+e.ID())); err != nil {
		return fmt.Errorf("publish %s of %s: %w", verb, rec.VMID, err)
	}
	return nil
}

func (t *term) publishCreate(ctx context.Context, rec kv.Placement) error {
	deadline := rec.ReservedAt.Add(confirmWithin)
	if rec.Deadline.Before(deadline) {
		deadline = rec.Deadline
	}
	data := events.CommandCreate{
		Fence: rec.Fence, Tenant: rec.Tenant, Role: rec.Role, Owner: rec.Owner, Session: rec.Session,
		Template: rec.Spec.Template, Display: rec.Display(), TTLSeconds: *rec.Spec.TTLSeconds, Deadline: &deadline,
		Env: rec.Spec.Env, Metadata: rec.Spec.Metadata, Request: rec.Request,
	}
	if err := t.publish(ctx, rec, events.Create, events.CreateCommandID(rec.VMID, rec.Fence), data); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if v := t.vms[rec.VMID]; v != nil {
		v.createSent = rec.Fence
	}
	return nil
}

// pursueKill sees to it that a kill is out for this placement and reports
// whether the sandbox is confirmed gone. A kill that failed, was not taken up
// in time, or finished before the create did is followed by another with the
// next number.
func (t *term) pursueKill(ctx context.Context, rec kv.Placement) (gone bool, err error) {
	attempt := 1
	if rec.Ending != nil {
		attempt = rec.Ending.Attempt
	}
	t.mu.Lock()
	v := t.vms[rec.VMID]
	if v == nil {
		t.mu.Unlock()
		return false, nil
	}
	attempt = max(attempt, v.killSent)
	sent, wait, sentAt := v.killSent == attempt, time.Until(v.killAgainAt), v.killSentAt
	t.mu.Unlock()

	token := events.Token(events.SourceScheduler, events.KillCommandID(rec.VMID, rec.Fence, attempt))
	result, err := t.lastResult(ctx, rec, token)
	if err != nil {
		return false, err
	}
	if f := result.finished; f != nil {
		create, err := t.lastResult(ctx, rec, createToken(rec))
		if err != nil {
			return false, err
		}
		confirmed := create.finished == nil || create.seq < result.seq
		if confirmed && (f.Outcome == computer.OK || f.Error != nil && (f.Error.Code == events.CodeNotFound || f.Error.Code == events.CodeFenceStale || f.Error.Code == events.CodeWrongServer)) {
			return true, nil
		}
		if confirmed && wait > 0 && sent {
			return false, nil
		}
		attempt, sent = attempt+1, false
	} else if sent && time.Since(sentAt) > killUnanswered {
		attempt, sent = attempt+1, false
	}
	if sent {
		return false, nil
	}
	if t.unserved(rec.ServerID) != "" {
		return false, nil // nobody would take it; its worker's return, or the server's removal, goes on from here
	}
	if err := t.publish(ctx, rec, events.Kill, events.KillCommandID(rec.VMID, rec.Fence, attempt), events.Command{Fence: &rec.Fence}); err != nil {
		return false, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if v := t.vms[rec.VMID]; v != nil {
		v.killSent, v.killSentAt = attempt, time.Now()
		v.killAgainAt = time.Now().Add(min(killAgain<<min(attempt-1, 6), killAgainMax))
	}
	return false, nil
}

// untilKillAgain is when to look at a kill again at the latest.
func (t *term) untilKillAgain(vm string) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if v := t.vms[vm]; v != nil {
		if d := time.Until(v.killAgainAt); d > 0 {
			return d
		}
	}
	return killAgain
}

// free gives a sandbox's slot back. It is idempotent, and another placement of
// the same vm on that server keeps its slot.
func (t *term) free(ctx context.Context, server, vm string, fence uint64) error {
	err := t.edit(ctx, server, func(s *kv.Server, rev uint64) error {
		if a, held := s.Allocs[vm]; rev == 0 || !held || a.Fence != fence {
			return kv.ErrUnchanged
		}
		delete(s.Allocs, vm)
		return nil
	})
	if err != nil {
		return fmt.Errorf("free %s on %s: %w", vm, server, err)
	}
	return nil
}
