package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
)

// verdict is what a command has come to.
type verdict struct {
	outcome     computer.Outcome
	fault       *computer.Fault
	actions     []computer.ActionResult
	observation *computer.Observation
	sandbox     *events.SandboxInfo
	template    string
	began       time.Time     // at the provider; zero: nothing was begun
	ran         time.Duration // at the provider
	silent      bool          // nothing is said; the successor will
}

// prior is a message that stands on a result subject in place of ours.
type prior struct {
	seq     uint64
	at      time.Time // by the stream's clock
	event   events.Event
	started *events.Started // nil: it is a finished, or nothing intelligible
}

// execute claims a command, runs it and finishes it.
func (t *tenure) execute(ctx context.Context, c *command, run func(context.Context, *command) verdict) {
	claim, before, err := t.claim(ctx, c)
	switch {
	case err != nil:
		t.log.Warn("command not claimed; left to the successor", "vm", c.VM, "verb", c.Verb, "token", c.token, "err", err)
		return
	case before != nil:
		t.settle(ctx, c, before)
		return
	}
	t.at(AfterClaim, c.VM)
	v := run(ctx, c)
	t.at(BeforeFinish, c.VM)
	t.finish(ctx, c, claim, v)
}

// claim publishes `started` on the empty result subject. It returns the claim's
// sequence, or what stands there instead, or an error where neither could be
// known while the tenure lasted.
func (t *tenure) claim(ctx context.Context, c *command) (uint64, *prior, error) {
	// An id of its own, so that this claim is recognised when its
	// acknowledgement is lost.
	e, err := events.New(events.TypeStarted, events.SourceWorker, c.token+"-started-"+nuid.Next(), events.Started{
		CommandID: c.event.ID(), Source: c.event.Source(), Command: c.Verb,
		Worker: t.w.opts.Name, Epoch: t.lease.Epoch, Fence: c.fence, Request: c.request,
	})
	if err != nil {
		return 0, nil, err
	}
	msg, err := events.NewMessage(ctx, events.ResultSubject(t.server.ID, c.VM, c.token), e)
	if err != nil {
		return 0, nil, err
	}
	seq, before, err := t.publish(ctx, msg, e.ID(), 0)
	if err == nil || errors.Is(context.Cause(ctx), errAbandoned) {
		return seq, before, err
	}
	// The tenure has ended with the claim in doubt. If it was stored, whoever
	// waits shall hear that nothing ran, not `unknown`.
	reading, done := linger(ctx)
	defer done()
	last, raw, rerr := bus.Last(reading, t.results, msg.Subject)
	if rerr == nil && raw != nil && last.ID() == e.ID() {
		return raw.Sequence, nil, nil
	}
	return 0, nil, err
}

// publish stores msg, whose event has the given id, after sequence last of its
// subject and tries until it is known whether it is stored. It returns its
// sequence, or what stands there instead. An error means that ctx has ended, or
// that the message is too large.
func (t *tenure) publish(ctx context.Context, msg *nats.Msg, id string, last uint64) (uint64, *prior, error) {
	for attempt := 0; ; attempt++ {
		seq, err := bus.PublishExpecting(ctx, t.js, msg, last)
		if err == nil || tooLarge(err) {
			return seq, nil, err
		}
		if errors.Is(err, bus.ErrTaken) {
			e, raw, rerr := bus.Last(ctx, t.results, msg.Subject)
			switch {
			case raw == nil && rerr == nil:
				last = 0 // what was expected is gone from the stream
			case raw == nil:
				err = rerr
			case rerr == nil && e.ID() == id:
				return raw.Sequence, nil, nil
			default:
				return 0, newPrior(e, raw, rerr), nil
			}
		}
		if attempt%50 == 10 {
			t.log.Warn("result not published; trying again", "subject", msg.Subject, "err", err)
		}
		if bus.Pause(ctx, attempt) != nil {
			return 0, nil, err
		}
	}
}

func newPrior(e events.Event, raw *jetstream.RawStreamMsg, err error) *prior {
	p := &prior{seq: raw.Sequence, at: raw.Time, event: e}
	var s events.Started
	if err == nil && e.Type() == events.TypeStarted && events.DecodeTolerant(e, &s) == nil {
		p.started = &s
	}
	return p
}

// tooLarge recognises a message that is over the server's or stream's limit.
func tooLarge(err error) bool {
	const messageSizeExceeds = 10054 // JSStreamMessageExceedsMaximumErr
	var api *jetstream.APIError
	return errors.Is(err, nats.ErrMaxPayload) || errors.As(err, &api) && api.ErrorCode == messageSizeExceeds
}

// settle deals with a command on whose result subject something stands already.
func (t *tenure) settle(ctx context.Context, c *command, p *prior) {
	switch {
	case p.started == nil:
		t.log.Debug("command was finished before", "vm", c.VM, "verb", c.Verb, "token", c.token)
		t.ack(c.item)
	case p.started.Epoch > t.lease.Epoch:
		t.log.Error("command is claimed by a later epoch", "vm", c.VM, "token", c.token, "claimant", p.started.Worker, "claimEpoch", p.started.Epoch)
	default:
		t.log.Info("command was claimed by a worker that is gone", "vm", c.VM, "verb", c.Verb, "token", c.token, "claimant", p.started.Worker, "claimEpoch", p.started.Epoch)
		t.recover(ctx, c, p)
	}
}

// refuse ends a command that nothing of has run.
func (t *tenure) refuse(ctx context.Context, c *command, f *computer.Fault) {
	t.finish(ctx, c, 0, verdict{outcome: computer.Rejected, fault: f})
}

// finish publishes a command's `finished` after sequence last (0: there is no
// claim) and acknowledges the command once it is known to be finished, by this
// or by somebody else's word.
func (t *tenure) finish(ctx context.Context, c *command, last uint64, v verdict) {
	if v.silent || errors.Is(context.Cause(ctx), errAbandoned) {
		return
	}
	msg, err := t.finished(ctx, c, v)
	if err != nil {
		t.log.Error("result not encoded", "vm", c.VM, "token", c.token, "err", err)
		return
	}
	t.annotate(ctx, c, v)
	publishing, done := linger(ctx)
	defer done()
	before, err := t.conclude(publishing, c, msg, last)
	if tooLarge(err) {
		t.log.Error("result is too large; its values are dropped", "vm", c.VM, "token", c.token, "bytes", len(msg.Data))
		v.drop()
		if msg, err = t.finished(ctx, c, v); err == nil {
			before, err = t.conclude(publishing, c, msg, last)
		}
	}
	switch {
	case err != nil:
		t.log.Error("result not published in this tenure", "vm", c.VM, "token", c.token, "outcome", v.outcome, "err", err)
		if last != 0 && !errors.Is(context.Cause(ctx), errAbandoned) {
			t.w.remember(msg, last)
		}
	case before != nil && before.started != nil && last == 0:
		t.settle(ctx, c, before) // claimed before it could be refused
	case before != nil && before.started != nil:
		t.log.Error("a claim was overwritten", "vm", c.VM, "token", c.token)
	default:
		if before == nil {
			t.w.inst.count(ctx, c, v)
		}
		t.at(BeforeAck, c.VM)
		if !errors.Is(context.Cause(ctx), errAbandoned) {
			t.ack(c.item)
		}
	}
}

// conclude publishes a finished result; before is what stands there instead.
func (t *tenure) conclude(ctx context.Context, c *command, msg *nats.Msg, last uint64) (before *prior, err error) {
	_, before, err = t.publish(ctx, msg, finishedID(c.token), last)
	return before, err
}

// finishedID is the same whoever finishes: a command has one.
func finishedID(token string) string { return token + "-finished" }

// finished encodes a command's result.
func (t *tenure) finished(ctx context.Context, c *command, v verdict) (*nats.Msg, error) {
	v.fit()
	now := time.Now().UTC()
	data := events.Finished{
		CommandID: c.event.ID(), Source: c.event.Source(), Command: c.Verb,
		Outcome: v.outcome, Error: v.fault, Actions: v.actions, Observation: v.observation, Sandbox: v.sandbox, Template: v.template,
		Fence: c.fence, Request: c.request,
		Timing: events.Timing{FinishedAt: now, RanMs: millis(v.ran), QueuedMs: millis(max(now.Sub(c.published), 0))},
	}
	if data.Actions == nil {
		data.Actions = []computer.ActionResult{}
	}
	if !v.began.IsZero() {
		began := v.began.UTC()
		data.Timing.StartedAt, data.Timing.QueuedMs = &began, millis(max(began.Sub(c.published), 0))
	}
	e, err := events.New(events.TypeFinished, events.SourceWorker, finishedID(c.token), data)
	if err != nil {
		return nil, err
	}
	if tenant, ok := c.event.Extensions()[events.ExtForwarded]; ok {
		e.SetExtension(events.ExtForwarded, tenant)
	}
	return events.NewMessage(ctx, events.ResultSubject(t.server.ID, c.VM, c.token), e)
}

// annotate puts the outcome on the command's span and in the log.
func (t *tenure) annotate(ctx context.Context, c *command, v verdict) {
	span := trace.SpanFromContext(ctx)
	span.SetAttributes(attribute.String("berth.outcome", string(v.outcome)))
	attrs := []any{"vm", c.VM, "verb", c.Verb, "token", c.token, "outcome", v.outcome}
	if v.fault != nil {
		span.SetAttributes(attribute.String("berth.code", v.fault.Code))
		attrs = append(attrs, "code", v.fault.Code, "message", v.fault.Message)
	}
	t.log.Debug("command finished", attrs...)
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// unpublished is a result that its tenure could not publish.
type unpublished struct {
	msg   *nats.Msg
	claim uint64
	since time.Time
}

// maxRemembered bounds the results that wait for the bus over tenures.
const maxRemembered = 1000

// remember keeps a result for a later tenure of this process: the bus may be
// back by then, and what is known need not become `unknown`.
func (w *Worker) remember(msg *nats.Msg, claim uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for subject, u := range w.results {
		if len(w.results) >= maxRemembered || time.Since(u.since) > events.MaxDeadline {
			delete(w.results, subject)
		}
	}
	w.results[msg.Subject] = unpublished{msg, claim, time.Now()}
}

// recollect takes what was remembered for a claim.
func (w *Worker) recollect(subject string, claim uint64) (*nats.Msg, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	u, ok := w.results[subject]
	if !ok || u.claim != claim {
		return nil, fmt.Errorf("no result of claim %d remembered", claim)
	}
	return u.msg, nil
}

func (w *Worker) forgetResult(subject string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.results, subject)
}
