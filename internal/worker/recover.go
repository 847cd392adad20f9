package worker

import (
	"context"
	"errors"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/providers"
)

// recover ends a command that a worker which is gone has claimed.
func (t *tenure) recover(ctx context.Context, c *command, p *prior) {
	t.at(InRecovery, c.VM)
	c.fence = p.started.Fence
	if msg, err := t.w.recollect(events.ResultSubject(t.server.ID, c.VM, c.token), p.seq); err == nil {
		// This process ran it, and could not say so in time.
		if before, err := t.conclude(ctx, c, msg, p.seq); err == nil && (before == nil || before.started == nil) {
			t.w.forgetResult(msg.Subject)
			t.ack(c.item)
			return
		}
	}
	var v verdict
	switch c.Verb {
	case events.Act:
		v = t.recoverAct(ctx, c, p.at)
	case events.Observe:
		v = t.again(ctx, c, t.observe)
	case events.Create:
		v = t.recoverCreate(ctx, c)
	case events.Kill:
		v = t.recoverKill(ctx, c)
	case events.Cancel:
		v = t.callOff(ctx, c)
	case events.Snapshot:
		v = verdict{outcome: computer.Unknown, fault: fault(events.CodeWorkerDied, "the worker died while it took the snapshot; the server may have kept it")}
	default:
		v = t.recoverSuspend(ctx, c)
	}
	t.finish(ctx, c, p.seq, v)
}

// again runs what may be run again.
func (t *tenure) again(ctx context.Context, c *command, run func(context.Context, *command) verdict) verdict {
	bound, done := t.commands.begin(ctx, c.item, c.token)
	defer done()
	if !t.lease.Trusted() || bound.Err() != nil {
		return verdict{silent: true}
	}
	began := time.Now()
	v := run(bound, c)
	v.began = began
	return v
}

// recoverAct asks the provider what became of an act; where it cannot tell the
// outcome is unknown. A server that has never seen the key may still receive
// it, so that is unknown too. It asks no longer than the act may run from its
// claim on, so that computer.FinishTime holds over a takeover as well.
func (t *tenure) recoverAct(ctx context.Context, c *command, claimed time.Time) verdict {
	run, done := t.commands.begin(ctx, c.item, c.token)
	defer done()
	bound, cancel := context.WithTimeoutCause(run, max(time.Until(claimed.Add(computer.ActTime(c.actions))), lookTime), errTimedOut)
	defer cancel()
	unknown := fault(events.CodeWorkerDied, "the worker died while it ran, and the server cannot tell how far it went")
	for attempt, failures := 0, 0; failures < 10; attempt++ {
		call, stop := context.WithTimeout(bound, lookTime)
		rec, err := bounded(call, func(ctx context.Context) (providers.Recollection, error) {
			return t.provider.Recall(ctx, c.VM, c.token)
		})
		stop()
		switch {
		case ctx.Err() != nil:
			return verdict{silent: true}
		case err == nil && rec.Finished:
			return t.judge(run, c, rec.Results, nil)
		case errors.Is(err, providers.ErrNotFound):
			unknown.Message = "the worker died before the server had heard of it, as far as the server knows"
			failures = 10
		case errors.Is(err, providers.ErrUnsupported):
			failures = 10
		case err != nil:
			failures++
		}
		if failures < 10 && !sleep(bound, min(50*time.Millisecond<<min(attempt, 6), time.Second)) {
			break
		}
	}
	v := verdict{outcome: computer.Unknown, fault: unknown, actions: make([]computer.ActionResult, len(c.actions))}
	for i := range v.actions {
		v.actions[i].Outcome = computer.Unknown
	}
	if ctx.Err() != nil {
		return verdict{silent: true}
	}
	if run.Err() == nil {
		v.observation, _ = t.picture(run, c.VM) // where there is none the outcome says enough
	}
	return v
}

// recoverCreate looks what a dead worker's create has left.
func (t *tenure) recoverCreate(ctx context.Context, c *command) verdict {
	defer t.lock(c.VM)()
	var s providers.Sandbox
	bound, cancel := context.WithTimeout(ctx, killTime)
	err := retry(bound, func() (err error) {
		call, stop := context.WithTimeout(bound, lookTime)
		defer stop()
		s, err = bounded(call, func(ctx context.Context) (providers.Sandbox, error) { return t.provider.Get(ctx, c.VM) })
		return err
	}, providers.ErrNotFound)
	cancel()
	switch {
	case ctx.Err() != nil:
		return verdict{silent: true}
	case err == nil && s.Fence == c.fence && s.State != providers.Starting && !t.killedAfter(c.VM, c.seq):
		t.admitted(c, s)
		return verdict{outcome: computer.OK, sandbox: t.describe(ctx, s)}
	case err == nil && s.Fence > c.fence:
		return verdict{outcome: computer.Failed, fault: fault(events.CodeWorkerDied, "the worker died while it made the sandbox; the vm has begun another life")}
	}
	return t.undo(ctx, c, fault(events.CodeWorkerDied, "the worker died while it made the sandbox"))
}

// recoverKill kills again, unless the vm has begun another life since.
func (t *tenure) recoverKill(ctx context.Context, c *command) verdict {
	present, _, err := t.present(ctx, c.VM)
	switch {
	case err != nil:
		return verdict{silent: true}
	case present > c.fence:
		return verdict{outcome: computer.OK}
	}
	return t.destroy(ctx, c)
}

// recoverSuspend looks whether a dead worker's pause or resume took effect.
func (t *tenure) recoverSuspend(ctx context.Context, c *command) verdict {
	call, stop := context.WithTimeout(ctx, lookTime)
	defer stop()
	s, err := bounded(call, func(ctx context.Context) (providers.Sandbox, error) { return t.provider.Get(ctx, c.VM) })
	want := providers.Paused
	if c.Verb == events.Resume {
		want = providers.Running
	}
	switch {
	case ctx.Err() != nil:
		return verdict{silent: true}
	case err == nil && s.State == want:
		return verdict{outcome: computer.OK}
	case err != nil:
		return verdict{outcome: computer.Unknown, fault: fault(events.CodeWorkerDied, "the worker died while it ran, and the sandbox does not answer: %v", err)}
	}
	return verdict{outcome: computer.Unknown, fault: fault(events.CodeWorkerDied, "the worker died while it ran; the sandbox is %s", s.State)}
}
