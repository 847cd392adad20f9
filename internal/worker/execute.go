package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"go.opentelemetry.io/otel/codes"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
)

// Bounds of provider calls, beside those of computer. No valid command takes as
// long; a provider that hangs does.
const (
	createTime  = 120 * time.Second
	pauseTime   = 120 * time.Second
	lookTime    = 10 * time.Second // Get, List
	abandonTime = 2 * time.Second  // that a call may take to return after its context has ended
)

// perform executes a claimed command.
func (t *tenure) perform(ctx context.Context, c *command) verdict {
	run, done := t.commands.begin(ctx, c.item, c.token)
	defer done()
	if f := t.halted(run, c); f != nil {
		return verdict{outcome: computer.Rejected, fault: f}
	}
	began := time.Now()
	var v verdict
	switch c.Verb {
	case events.Act:
		v = t.act(run, c)
	case events.Observe:
		v = t.observe(run, c)
	case events.Create:
		v = t.make(run, c)
	case events.Snapshot:
		v = t.snapshot(run, c)
	default:
		v = t.suspend(run, c)
	}
	v.began = began
	if v.ran == 0 {
		v.ran = time.Since(began)
	}
	return v
}

// halted says why a command that is claimed must not begin after all.
func (t *tenure) halted(ctx context.Context, c *command) *computer.Fault {
	off := t.calledOff(c)
	switch {
	case t.killedAfter(c.VM, c.seq):
		return fault(events.CodeKilled, "vm %s was killed before this ran", c.VM)
	case off != nil:
		return off
	case ctx.Err() != nil:
		return faultOf(fmt.Errorf("nothing ran: %w", context.Cause(ctx)))
	case !t.lease.Trusted():
		return faultOf(fmt.Errorf("nothing ran: %w", kv.ErrLeaseLost))
	}
	return nil
}

// act runs an act's actions, and looks afterwards where it is to.
func (t *tenure) act(ctx context.Context, c *command) verdict {
	give, refused := t.roomFor(ctx, c)
	if refused != nil {
		return verdict{outcome: computer.Rejected, fault: refused}
	}
	defer give()
	began := time.Now()
	results, err := t.batch(ctx, c)
	ran := time.Since(began)
	t.at(AfterExecute, c.VM)
	v := t.judge(ctx, c, results, err)
	v.ran = ran
	clear(results) // their pictures are stored
	give()         // before there is room for another
	if v.fault != nil && v.fault.Code == events.CodeTimeout && t.missing(ctx, c.VM) {
		v.fault = fault(events.CodeLost, "the sandbox is gone (%s)", v.fault.Message)
	}
	if c.data.Observe && ctx.Err() == nil && !errors.Is(err, providers.ErrNotFound) && !errors.Is(err, providers.ErrLost) {
		o, oerr := t.picture(ctx, c.VM)
		v.observation = o
		if oerr != nil && v.fault == nil {
			v.fault = fault(events.CodeNoPicture, "the actions ran; the observation failed: %v", oerr)
		}
	} else if c.data.Observe && v.fault == nil {
		v.fault = fault(events.CodeNoPicture, "the actions ran; it ended before it was looked: %v", context.Cause(ctx))
	}
	return v
}

// missing asks after a time-out whether the sandbox is still there.
func (t *tenure) missing(ctx context.Context, vm string) bool {
	call, stop := context.WithTimeout(ctx, lookTime)
	defer stop()
	_, err := bounded(call, func(ctx context.Context) (providers.Sandbox, error) { return t.provider.Get(ctx, vm) })
	return errors.Is(err, providers.ErrNotFound)
}

// batch executes a command's actions once. A rate limit runs nothing and is
// waited out while the command may still start.
func (t *tenure) batch(ctx context.Context, c *command) ([]providers.Result, error) {
	ctx, span := t.w.inst.tracer.Start(ctx, "provider.execute")
	defer span.End()
	ctx, cancel := context.WithTimeoutCause(ctx, computer.ActTime(c.actions), errTimedOut)
	defer cancel()
	for {
		results, err := watched(ctx, t, c.VM, func(ctx context.Context) ([]providers.Result, error) {
			return t.provider.Execute(ctx, providers.Batch{VM: c.VM, Fence: c.fence, Epoch: t.lease.Epoch, Key: c.token, Actions: c.actions})
		})
		var limited *providers.RateLimitError
		if errors.As(err, &limited) && time.Now().Add(limited.RetryAfter).Before(c.deadline) && sleep(ctx, max(limited.RetryAfter, 100*time.Millisecond)) {
			continue
		}
		if limited != nil && ctx.Err() != nil && !errors.Is(err, context.Cause(ctx)) {
			err = fmt.Errorf("%w (%w)", context.Cause(ctx), err) // it ended the wait
		}
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
			if errors.Is(err, providers.ErrLost) || errors.Is(err, providers.ErrNotFound) || errors.Is(err, providers.ErrTimeout) || errors.Is(err, errTimedOut) {
				ask(t.look)
			}
		}
		return results, err
	}
}

// judge makes an act's outcome of what the provider answered.
func (t *tenure) judge(ctx context.Context, c *command, results []providers.Result, err error) verdict {
	if err != nil && providers.NothingRan(err) {
		return verdict{outcome: computer.Rejected, fault: faultOf(err)}
	}
	v := verdict{outcome: computer.OK, actions: make([]computer.ActionResult, len(c.actions))}
	if err == nil && len(results) != len(c.actions) {
		v.outcome, v.fault = computer.Unknown, fault(events.CodeInternal, "the server answered %d results for %d actions", len(results), len(c.actions))
	}
	for i := range v.actions {
		if i >= len(results) {
			v.actions[i] = computer.ActionResult{Outcome: computer.Unknown}
			continue
		}
		v.actions[i] = t.result(ctx, c.VM, results[i])
		switch r := v.actions[i]; r.Outcome {
		case computer.Failed:
			if v.outcome == computer.OK {
				f := fault(events.CodeActionFailed, "action %d (%s) failed", i, c.actions[i].Type)
				if r.Error != nil {
					f = fault(r.Error.Code, "action %d (%s): %s", i, c.actions[i].Type, r.Error.Message)
				}
				v.outcome, v.fault = computer.Failed, f
			}
		case computer.Unknown:
			if v.outcome == computer.OK {
				v.outcome, v.fault = computer.Unknown, fault(events.CodeUnavailable, "nobody can say whether action %d (%s) ran", i, c.actions[i].Type)
			}
		default:
			if r.Error != nil && v.fault == nil {
				v.fault = fault(r.Error.Code, "action %d (%s) ran: %s", i, c.actions[i].Type, r.Error.Message)
			}
		}
	}
	if err != nil {
		v.outcome, v.fault = computer.Unknown, faultOf(err)
	}
	return v
}

// result stores a result's picture and caps its value.
func (t *tenure) result(ctx context.Context, vm string, r providers.Result) computer.ActionResult {
	out := r.ActionResult
	if len(r.Image) > 0 {
		p, err := t.keep(ctx, vm, r.Image)
		if err != nil {
			out.Error = fault(events.CodeNoPicture, "the picture was not kept: %v", err)
			return out
		}
		out.Value, err = json.Marshal(p)
		if err != nil {
			out.Error = fault(events.CodeInternal, "encode picture: %v", err)
		}
	}
	return out
}

// observe looks at a sandbox.
func (t *tenure) observe(ctx context.Context, c *command) verdict {
	o, err := t.picture(ctx, c.VM)
	switch {
	case err == nil:
		return verdict{outcome: computer.OK, observation: o}
	case errors.Is(context.Cause(ctx), kv.ErrLeaseLost):
		return verdict{silent: true} // the successor looks again
	case providers.NothingRan(err):
		return verdict{outcome: computer.Rejected, fault: faultOf(err)}
	}
	return verdict{outcome: computer.Failed, fault: faultOf(err)}
}

// suspend pauses or resumes a sandbox.
func (t *tenure) suspend(ctx context.Context, c *command) verdict {
	bound, cancel := context.WithTimeoutCause(ctx, pauseTime, errTimedOut)
	defer cancel()
	_, err := watched(bound, t, c.VM, func(ctx context.Context) (struct{}, error) {
		if c.Verb == events.Pause {
			return struct{}{}, t.provider.Pause(ctx, c.VM)
		}
		return struct{}{}, t.provider.Resume(ctx, c.VM)
	})
	if err != nil && errors.Is(context.Cause(ctx), kv.ErrLeaseLost) {
		return verdict{silent: true} // the successor looks
	}
	return t.conclusion(err)
}

// snapshot keeps a sandbox's state as a template of this server.
func (t *tenure) snapshot(ctx context.Context, c *command) verdict {
	bound, cancel := context.WithTimeoutCause(ctx, pauseTime, errTimedOut)
	defer cancel()
	name, err := watched(bound, t, c.VM, func(ctx context.Context) (string, error) { return t.provider.Snapshot(ctx, c.VM) })
	v := t.conclusion(err)
	if err == nil {
		v.template = events.TemplateAt(name, t.server.ID)
	}
	return v
}

// conclusion is what a call that is done or not, and nothing between, has come to.
func (t *tenure) conclusion(err error) verdict {
	switch {
	case err == nil:
		return verdict{outcome: computer.OK}
	case providers.NothingRan(err):
		return verdict{outcome: computer.Rejected, fault: faultOf(err)}
	}
	ask(t.look)
	return verdict{outcome: computer.Unknown, fault: faultOf(err)}
}

// faultOf gives an error its code.
func faultOf(err error) *computer.Fault {
	var f *computer.Fault
	if errors.As(err, &f) {
		return f
	}
	var data *events.DataError
	if errors.As(err, &data) {
		return fault(data.Code, "%s", data.Message)
	}
	var invalid *computer.InvalidError
	if errors.As(err, &invalid) {
		return fault(invalid.Code, "%v", err)
	}
	for _, m := range []struct {
		err  error
		code string
	}{
		{errKilled, events.CodeKilled},
		{errCancelled, events.CodeCancelled},
		{kv.ErrLeaseLost, events.CodeLeaseLost},
		{errStopping, events.CodeWorkerDied},
		{errTimedOut, events.CodeTimeout},
		{providers.ErrNotFound, events.CodeNotFound},
		{providers.ErrPaused, events.CodePaused},
		{providers.ErrConflict, events.CodeFenceStale},
		{providers.ErrFenceStale, events.CodeFenceStale},
		{providers.ErrUnsupported, events.CodeUnsupported},
		{providers.ErrInvalid, events.CodeBadInput},
		{providers.ErrFull, events.CodeFull},
		{providers.ErrLost, events.CodeLost},
		{providers.ErrTimeout, events.CodeTimeout},
		{context.DeadlineExceeded, events.CodeTimeout},
		{providers.ErrUnavailable, events.CodeUnavailable},
	} {
		if errors.Is(err, m.err) {
			return fault(m.code, "%v", err)
		}
	}
	var limited *providers.RateLimitError
	if errors.As(err, &limited) {
		return fault(events.CodeUnavailable, "%v", err)
	}
	return fault(events.CodeInternal, "%v", err)
}

// panicError is a provider's panic.
type panicError struct {
	value any
	stack []byte
}

func (e *panicError) Error() string { return fmt.Sprintf("the provider panicked: %v", e.value) }

// watched is bounded for a call at one sandbox that the breaker is told of.
func watched[T any](ctx context.Context, t *tenure, vm string, fn func(context.Context) (T, error)) (T, error) {
	done := t.breaker.begin(vm)
	v, err := bounded(ctx, fn)
	done(err)
	t.logPanic(err)
	return v, err
}

func (t *tenure) logPanic(err error) {
	var p *panicError
	if errors.As(err, &p) {
		t.log.Error("provider panicked", "panic", p.value, "stack", string(p.stack))
	}
}

// bounded calls fn and returns no later than abandonTime after ctx has ended,
// whether fn has returned or not. Where ctx ended fn, its cause is part of the
// error.
func bounded[T any](ctx context.Context, fn func(context.Context) (T, error)) (T, error) {
	type answer struct {
		v   T
		err error
	}
	done := make(chan answer, 1)
	go func() {
		var a answer
		defer func() {
			if p := recover(); p != nil {
				a.err = &panicError{p, debug.Stack()}
			}
			done <- a
		}()
		a.v, a.err = fn(ctx)
	}()
	finish := func(a answer) (T, error) {
		if cause := context.Cause(ctx); a.err != nil && cause != nil && !errors.Is(a.err, cause) {
			a.err = fmt.Errorf("%w (%w)", cause, a.err)
		}
		return a.v, a.err
	}
	select {
	case a := <-done:
		return finish(a)
	case <-ctx.Done():
	}
	grace := time.NewTimer(abandonTime)
	defer grace.Stop()
	select {
	case a := <-done:
		return finish(a)
	case <-grace.C:
		var zero T
		return zero, context.Cause(ctx)
	}
}
