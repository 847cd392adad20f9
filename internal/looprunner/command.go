package looprunner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/dispatch"
	"berth/internal/events"
)

const (
	// maxAttempts bounds the attempts of one act or observation, all of which
	// certainly did not run.
	maxAttempts = 20
	// maxUntaken bounds the commands in a row that no worker has taken: about
	// five minutes.
	maxUntaken = 4
	// resumeTime is what a worker gives a resume.
	resumeTime = 2 * time.Minute
)

// retryable: nothing ran, and the same may run later.
func retryable(code string) bool {
	switch code {
	case events.CodeBusy, events.CodePaused, events.CodeDeadline, events.CodeUnavailable, events.CodeServerDown, events.CodeLeaseLost:
		return true
	}
	return false
}

// gone: the sandbox is no more, or no longer the loop's.
func gone(code string) bool {
	switch code {
	case events.CodeNotFound, events.CodeLost, events.CodeKilled, events.CodeEnded, events.CodeFenceStale, events.CodeWrongServer:
		return true
	}
	return false
}

// attemptPause grows from 100 ms to 5 s.
func attemptPause(attempt int) time.Duration {
	return min(100*time.Millisecond<<min(attempt-1, 6), 5*time.Second)
}

// actID names one attempt of one step's act: any runner of the loop gives the
// same attempt the same name, so its claim makes it run at most once.
func (l *loop) actID(step, attempt int) events.Request {
	return events.Request{Source: events.SourceLoopRunner, ID: fmt.Sprintf("%s.%s.%d.%d", l.tenant, l.id, step, attempt)}
}

// observeID names one observation. The lease's epoch keeps a successor from
// taking an old picture for a new one; nothing is lost if both are taken.
func (l *loop) observeID(attempt int) events.Request {
	return events.Request{Source: events.SourceLoopRunner,
		ID: fmt.Sprintf("%s.%s.%d.o%d.%d.%d", l.tenant, l.id, l.j.state.step, l.j.state.entries, l.lease.Epoch, attempt)}
}

// send publishes a command until the stream has it. Sending twice is harmless:
// the stream drops what it knows by its id, and the claim what comes later.
func (l *loop) send(ctx context.Context, verb events.Verb, id events.Request, data events.Command) error {
	e, err := events.New(events.CommandType(verb), id.Source, id.ID, data)
	if err != nil {
		return err
	}
	msg, err := events.NewMessage(l.traced(ctx), events.CommandSubject(l.box.server, l.box.vm, verb), e)
	if err != nil {
		return err
	}
	return l.publish(ctx, msg.Subject, func(ctx context.Context) error {
		_, err := l.r.JS.PublishMsg(ctx, msg, jetstream.WithMsgID(id.Token()))
		return err
	})
}

// publish repeats one publication until it is acknowledged or ctx ends.
func (l *loop) publish(ctx context.Context, what string, once func(context.Context) error) error {
	for attempt := 0; ; attempt++ {
		call, cancel := context.WithTimeout(ctx, callTimeout)
		err := once(call)
		cancel()
		if err == nil {
			return nil
		}
		l.log.Warn("not published; trying again", "subject", what, "err", err)
		if bus.Pause(ctx, attempt) != nil {
			return context.Cause(ctx)
		}
	}
}

// command sends a command and returns its result. known: an earlier owner may
// have sent it, so its result is looked for first.
func (l *loop) command(ctx context.Context, verb events.Verb, id events.Request, data events.Command, bound time.Duration, known bool) (*events.Finished, error) {
	p := l.results.Expect(l.box.vm, id.Token())
	defer l.results.Forget(p)
	if known {
		for attempt := 0; ; attempt++ {
			if err := l.results.Look(ctx, p); err == nil {
				break
			}
			if bus.Pause(ctx, attempt) != nil {
				return nil, context.Cause(ctx)
			}
		}
	}
	if f, started := l.results.Read(p); f == nil && started.IsZero() && time.Now().Before(*data.Deadline) {
		l.r.hook("send:"+string(verb), l.id)
		if err := l.send(ctx, verb, id, data); err != nil {
			return nil, err
		}
		l.r.hook("sent:"+string(verb), l.id)
	}
	return l.results.Await(ctx, p, *data.Deadline, bound)
}

// act carries out the pending decision's actions: one attempt.
func (l *loop) act(ctx context.Context) error {
	s := &l.j.state
	d := s.pending
	raw, err := json.Marshal(d.Actions)
	if err != nil {
		return fmt.Errorf("encode actions: %w", err)
	}
	id, deadline, fence := l.actID(d.Step, s.attempt), s.deadline, l.box.fence
	began := time.Now()
	// A stop does not tear the act away from its result; see graceful.
	wait, cancel := l.graceful(ctx)
	defer cancel()
	f, err := l.command(wait, events.Act, id, events.Command{Actions: raw, Observe: true, Deadline: &deadline, Fence: &fence}, computer.FinishTime(d.Actions), l.inherited)
	l.inherited = false
	switch {
	case errors.Is(err, dispatch.ErrNotTaken):
		if err := l.untaken(); err != nil {
			return err
		}
		return l.retry(ctx, computer.Fault{Code: events.CodeDeadline, Message: err.Error()})
	case err != nil:
		return err
	}
	l.ignored = 0
	switch {
	case f.Outcome == computer.Rejected && f.Error != nil && gone(f.Error.Code):
		return &verdict{events.LoopFailed, f.Error.Code, "act: " + f.Error.Message}
	case f.Outcome == computer.Rejected && f.Error != nil && retryable(f.Error.Code) && s.attempt < maxAttempts:
		return l.retry(ctx, *f.Error)
	}
	acted := &events.LoopActed{LoopEntry: events.LoopEntry{Step: d.Step}, Command: id, Attempt: s.attempt, Outcome: f.Outcome, Error: f.Error,
		Actions: f.Actions, Observation: f.Observation, Timing: f.Timing}
	err = l.j.append(l.held, events.LoopActedName, acted)
	var large *tooLargeError
	if errors.As(err, &large) {
		for i := range acted.Actions {
			acted.Actions[i].Value = nil
		}
		acted.ValuesDropped = true
		err = l.j.append(l.held, events.LoopActedName, acted)
	}
	if err == nil {
		l.r.tell.step(l.held, string(f.Outcome), time.Since(began))
	}
	return err
}

// deny journals that what was decided is not allowed. Nothing is sent; the
// model is told, as of any command that was rejected.
func (l *loop) deny(d *events.LoopDecided, why *computer.Fault) error {
	return l.j.append(l.held, events.LoopActedName, &events.LoopActed{LoopEntry: events.LoopEntry{Step: d.Step}, Command: l.actID(d.Step, l.j.state.attempt),
		Attempt: l.j.state.attempt, Outcome: computer.Rejected, Error: why, Timing: events.Timing{FinishedAt: time.Now().UTC()}})
}

// untaken counts a command that nobody took.
func (l *loop) untaken() error {
	if l.ignored++; l.ignored < maxUntaken {
		return nil
	}
	return &verdict{events.LoopFailed, events.CodeDeadline, fmt.Sprintf("no worker took any of the last %d commands in time", l.ignored)}
}

// retry journals the next attempt after a pause, before that is sent: so no
// attempt is ever sent with a later deadline than its entry says, and a
// successor knows that the earlier ones are over.
func (l *loop) retry(ctx context.Context, why computer.Fault) error {
	s := &l.j.state
	if err := l.rest(ctx, s.attempt, why.Code); err != nil {
		return err
	}
	return l.j.append(l.held, events.LoopRetriedName, &events.LoopRetried{LoopEntry: events.LoopEntry{Step: s.pending.Step},
		Attempt: s.attempt + 1, Deadline: time.Now().UTC().Add(events.DefaultDeadline), Code: why.Code, Message: why.Message})
}

// observe takes an observation and journals it. Observing twice harms nobody,
// so any failure but the sandbox's end is tried again.
func (l *loop) observe(ctx context.Context) error {
	for attempt := 1; ; attempt++ {
		id, deadline, fence := l.observeID(attempt), time.Now().UTC().Add(events.DefaultDeadline), l.box.fence
		f, err := l.command(ctx, events.Observe, id, events.Command{Deadline: &deadline, Fence: &fence}, computer.FinishTime(nil), false)
		fault := computer.Fault{Code: events.CodeInternal, Message: "an observation without a picture"}
		switch {
		case errors.Is(err, dispatch.ErrNotTaken):
			if err := l.untaken(); err != nil {
				return err
			}
			fault = computer.Fault{Code: events.CodeDeadline, Message: err.Error()}
		case err != nil:
			return err
		case f.Observation != nil && f.Outcome == computer.OK:
			l.ignored = 0
			return l.j.append(l.held, events.LoopObservedName, &events.LoopObserved{Command: id, Observation: *f.Observation, Timing: f.Timing})
		case f.Error != nil:
			fault = *f.Error
		}
		final := fault.Code == events.CodeUnsupported || fault.Code == events.CodeBadInput || fault.Code == events.CodeForbidden
		if gone(fault.Code) || final || attempt >= maxAttempts {
			return &verdict{events.LoopFailed, fault.Code, "observe: " + fault.Message}
		}
		if err := l.rest(ctx, attempt, fault.Code); err != nil {
			return err
		}
	}
}

// rest waits before the next attempt, and resumes a sandbox that is paused: its
// idle clock may have done that while the loop was. How that ends the next
// attempt tells.
func (l *loop) rest(ctx context.Context, attempt int, code string) error {
	if err := l.sleep(ctx, attemptPause(attempt)); err != nil || code != events.CodePaused {
		return err
	}
	l.log.Info("resuming the sandbox, which is paused", "vm", l.box.vm)
	id, deadline, fence := l.observeID(attempt), time.Now().UTC().Add(events.DefaultDeadline), l.box.fence
	id.ID += ".resume"
	_, err := l.command(ctx, events.Resume, id, events.Command{Deadline: &deadline, Fence: &fence}, resumeTime, false)
	if errors.Is(err, dispatch.ErrNotTaken) {
		return nil
	}
	return err
}
