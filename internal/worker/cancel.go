package worker

import (
	"context"
	"fmt"
	"strings"
	"time"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
)

// cancelTime is how long a cancel looks for its command, and waits for its end.
// A command that was published before is here by then; a provider call returns
// within abandonTime of its cancellation.
const cancelTime = 5 * time.Second

// cancelLane makes a vm's cancels a lane of their own; no vm id has a space.
const cancelLane = " cancel"

func isCancel(subject string) bool { return strings.HasSuffix(subject, "."+string(events.Cancel)) }

// overtakes reports whether a message is one of the server's second consumer.
func overtakes(it *item) bool {
	return isCancel(it.msg.Subject()) || strings.HasSuffix(it.msg.Subject(), "."+string(events.Kill))
}

// target is the command that a cancel names, for item.names; "" where the cancel
// is not to be carried out.
func (t *tenure) target(it *item) string {
	c, refused, err := t.decode(it)
	if err != nil || refused != nil || time.Now().After(c.deadline) {
		return ""
	}
	return named(c.VM, c.data.Command.Token())
}

func named(vm, token string) string { return vm + " " + token }

// calledOff says why a command does not begin for which a cancel is here: as
// soon as that is delivered, also where its own turn comes later.
func (t *tenure) calledOff(c *command) *computer.Fault {
	if c.Verb == events.Create || !t.kills.named(named(c.VM, c.token)) {
		return nil
	}
	return faultOf(fmt.Errorf("%w before it ran", errCancelled))
}

// admitCancel lets a cancel run whatever its sandbox is: where the command has
// ended with it there is nothing to do.
func (t *tenure) admitCancel(_ context.Context, c *command) (*computer.Fault, error) {
	if c.busy {
		return fault(events.CodeBusy, "%d cancels wait for vm %s already", bus.BacklogPerSandbox, c.VM), nil
	}
	if time.Now().After(c.deadline) {
		return fault(events.CodeDeadline, "not started by %s", c.deadline.UTC().Format(time.RFC3339Nano)), nil
	}
	return nil, nil
}

// callOff ends the command that a cancel names. One that waits is rejected, as
// nothing of it has run; one that runs is cancelled at the provider, and its
// outcome says how far that is known. It is ok once that command has finished,
// however it has: its own result tells. A create is not cancelled, a kill ends
// it; nor is what overtakes.
func (t *tenure) callOff(ctx context.Context, c *command) verdict {
	began := time.Now()
	v := verdict{began: began, outcome: computer.Failed}
	token := c.data.Command.Token()
	bound, cancel := context.WithTimeout(ctx, cancelTime)
	defer cancel()
	known := false
	for attempt := 0; ; attempt++ {
		if !t.lease.Trusted() || ctx.Err() != nil {
			return verdict{silent: true} // the successor does it
		}
		e, raw, err := bus.Last(bound, t.results, events.ResultSubject(t.server.ID, c.VM, token))
		known = known || raw != nil
		p := &prior{}
		if raw != nil {
			p = newPrior(e, raw, err)
		}
		switch {
		case err == nil && raw != nil && e.Type() == events.TypeFinished:
			v.outcome, v.ran = computer.OK, time.Since(began)
			return v
		case p.started != nil:
			if v.fault = noCancel(p.started.Command, c.VM); v.fault != nil {
				return v
			}
			t.commands.cancelRun(c.VM, token, errCancelled)
		default:
			if v.fault = t.withdraw(ctx, c.VM, token); v.fault != nil {
				return v
			}
		}
		if !sleep(bound, min(10*time.Millisecond<<min(attempt, 5), 200*time.Millisecond)) {
			break
		}
	}
	if ctx.Err() != nil || !known && t.commands.isStopped() {
		return verdict{silent: true} // the command, too, is the successor's
	}
	v.ran = time.Since(began)
	v.fault = fault(events.CodeNotFound, "vm %s has no command %s of %s", c.VM, clip(c.data.Command.ID, 200), clip(c.data.Command.Source, 200))
	if known {
		v.fault = fault(events.CodeTimeout, "the command was cancelled and has not ended in %v; its own result will say how it ends", cancelTime)
	}
	return v
}

// noCancel refuses what is never cancelled; nil for what is.
func noCancel(verb events.Verb, vm string) *computer.Fault {
	switch verb {
	case events.Create:
		return fault(events.CodeUnsupported, "a create is not cancelled; kill vm %s", vm)
	case events.Kill, events.Cancel:
		return fault(events.CodeUnsupported, "a %s is not cancelled", verb)
	}
	return nil
}

// withdraw rejects a command that waits for its turn.
func (t *tenure) withdraw(ctx context.Context, vm, token string) *computer.Fault {
	for _, it := range t.commands.waits(vm) {
		w, refused, err := t.decode(it)
		if err != nil || w.token != token {
			continue
		}
		if f := noCancel(w.Verb, vm); f != nil {
			return f
		}
		if !t.commands.takeOut(vm, it) {
			return nil // its turn has come
		}
		if refused == nil {
			refused = faultOf(fmt.Errorf("%w before it ran", errCancelled))
		}
		t.refuseInstead(ctx, w, refused)
	}
	return nil
}

// refuseInstead refuses a command that was taken out of its lane.
func (t *tenure) refuseInstead(ctx context.Context, w *command, f *computer.Fault) {
	defer t.commands.handled(w.item)
	if !t.take(w) {
		return // another copy of it is at work, and decides
	}
	defer t.leave(w)
	ctx, span := t.span(ctx, w)
	defer span.End()
	t.refuse(ctx, w, f)
}
