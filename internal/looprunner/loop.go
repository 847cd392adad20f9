package looprunner

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"berth/internal/computer"
	"berth/internal/dispatch"
	"berth/internal/events"
	"berth/internal/kv"
)

const (
	// leaseTTL of a loop: half of what a takeover may take after a crash.
	leaseTTL = 6 * time.Second
	// stopGrace is how long a stopped loop waits for the result of an act that
	// is out, so that its journal has it.
	stopGrace = 5 * time.Second
	// endGrace is how long a loop waits to hear that its sandbox is gone before
	// it says finished; the kill itself is durable.
	endGrace = 10 * time.Second
	// staleAfter is how old a picture may be that a loop which is taken over
	// shows its model. A takeover takes less.
	staleAfter = time.Minute
)

// errDrained: this process stops; another goes on with the loop.
var errDrained = errors.New("loop-runner is draining")

// verdict is how a loop ends. It travels as an error and as the cause of a
// cancelled context.
type verdict struct{ outcome, code, message string }

func (v *verdict) Error() string { return v.outcome + " (" + v.code + "): " + v.message }

// loop is one loop that this process owns. Everything but box and results
// belongs to the goroutine of run.
type loop struct {
	r      *Runner
	tenant string
	id     string
	log    *slog.Logger
	lease  *kv.Lease
	j      *journal

	// held ends with the lease, or with the process; live, its child, also with
	// a verdict from outside: stopped, out of time, the sandbox gone. They are
	// here, against the house rule, because they are the loop's own lifetimes.
	held context.Context
	live context.Context
	mu   sync.Mutex // guards end until run has set it
	end  context.CancelCauseFunc

	ctl       chan struct{} // capacity 1: a control entry was stored
	box       *box
	results   *dispatch.Results
	model     Model
	modelName string
	span      trace.Span
	given     bool // the sandbox is the requester's
	ignored   int  // commands in a row that nobody took
	inherited bool // the pending act may have been sent by an earlier owner
	followers sync.WaitGroup
}

// run drives the loop until it is finished, or no longer this process's. The
// lease is released on every way out.
func (l *loop) run(held context.Context) {
	defer l.letGo(held)
	s := &l.j.state
	if s.started == nil || s.finished {
		return
	}
	l.inherited = s.pending != nil
	if s.obs != nil && time.Since(s.obs.TakenAt) > staleAfter { // nobody had the loop for a while
		s.stale = true
	}
	l.held = events.ExtractTrace(held, s.headers)
	live, end := context.WithCancelCause(l.held)
	l.mu.Lock()
	l.live, l.end = live, end
	l.mu.Unlock()
	following, stop := context.WithCancel(l.held)
	defer l.followers.Wait()
	defer stop()
	defer func() {
		if l.results != nil {
			l.r.results.Release(l.results)
		}
	}()
	defer end(nil)
	left := time.Until(s.started.At.Add(events.Seconds(s.started.Start.Limits.Seconds)))
	timer := time.AfterFunc(left, func() {
		end(&verdict{events.LoopFailed, events.CodeLimit, fmt.Sprintf("limits.seconds: %v are over", s.started.Start.Limits.Seconds)})
	})
	defer timer.Stop()
	l.r.tell.running.Add(held, 1)
	defer l.r.tell.running.Add(held, -1)
	l.given = s.started.Given
	l.follow(following)
	err := l.drive()
	l.closeSpan(err)
	if l.held.Err() != nil {
		l.log.Info("loop handed over", "why", context.Cause(l.held))
		return
	}
	if errors.Is(err, errDrained) || errors.Is(err, errOwned) {
		l.log.Info("loop handed over", "why", err)
		return
	}
	if err := l.finish(l.verdictOf(err)); err != nil {
		l.log.Warn("loop not finished here", "err", err)
	}
}

// verdictOf makes any error a verdict, so that no loop is tried for ever.
func (l *loop) verdictOf(err error) *verdict {
	var v *verdict
	var large *tooLargeError
	switch {
	case errors.As(err, &v), errors.As(context.Cause(l.live), &v):
		return v
	case errors.As(err, &large):
		return &verdict{events.LoopFailed, events.CodeTooLarge, err.Error()}
	default:
		l.log.Error("loop failed by a fault of Berth's own", "err", err)
		return &verdict{events.LoopFailed, events.CodeInternal, err.Error()}
	}
}

// drive takes one step after another until there is a verdict, which it
// returns as the error. Each turn of it appends at least one entry; where an
// earlier owner's late write came first it looks at the state again.
func (l *loop) drive() error {
	for {
		if err := l.checkpoint(); err != nil {
			return err
		}
		err := l.next()
		if err != nil && !errors.Is(err, errMoved) {
			return err
		}
	}
}

func (l *loop) next() error {
	s := &l.j.state
	switch {
	case s.finished:
		return errOwned
	case s.ending != nil:
		return &verdict{s.ending.Outcome, s.ending.Code, s.ending.Message}
	case s.stop != nil:
		return stopVerdict(s.stop)
	case s.sandbox == nil:
		return l.awaitSandbox()
	case l.results == nil:
		return l.settle()
	case strayed(s.obs, &s.started.Start.Limits) != nil:
		return strayed(s.obs, &s.started.Start.Limits)
	case s.waits():
		return l.stand()
	case s.paused:
		return l.j.append(l.held, events.LoopResumedName, &events.LoopPaused{})
	case s.pending != nil:
		return l.carryOut(s.pending)
	case s.obs == nil || s.stale:
		return l.observe(l.live)
	default:
		return l.think()
	}
}

func stopVerdict(c *events.LoopControl) *verdict {
	message := "stopped on request"
	if c.Reason != "" {
		message += ": " + c.Reason
	}
	return &verdict{events.LoopStopped, events.CodeStopped, message}
}

// checkpoint is where a loop can be handed over, stopped or paused.
func (l *loop) checkpoint() error {
	select {
	case <-l.ctl:
		return l.catchUp()
	default:
	}
	if l.held.Err() != nil {
		return context.Cause(l.held)
	}
	if l.live.Err() != nil && l.j.state.ending == nil {
		return context.Cause(l.live)
	}
	select {
	case <-l.r.draining:
		return errDrained
	default:
		return nil
	}
}

// stopNow ends whatever the loop is waiting for. Any goroutine may call it.
func (l *loop) stopNow(c *events.LoopControl) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.end != nil {
		l.end(stopVerdict(c))
	}
}

// catchUp folds the control entries that others have appended.
func (l *loop) catchUp() error {
	_, err := l.j.sync(l.held, "")
	if err != nil && !errors.Is(err, errOwned) {
		l.log.Warn("journal not readable; trying again", "err", err)
		l.wake()
		return l.sleep(l.live, 200*time.Millisecond)
	}
	return err
}

// wake says that there is a control entry to read. Any goroutine may call it.
func (l *loop) wake() {
	select {
	case l.ctl <- struct{}{}:
	default:
	}
}

// sleep waits for d, ctx or the process's end.
func (l *loop) sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-l.r.draining:
		return errDrained
	}
}

// idle waits for a control entry, or for what. It returns nil when either is there.
func (l *loop) idle(what <-chan struct{}) error {
	select {
	case <-what:
		return nil
	case <-l.ctl:
		return l.catchUp()
	case <-l.live.Done():
		return context.Cause(l.live)
	case <-l.r.draining:
		return errDrained
	}
}

// graceful is ctx, but outlives a stop or a limit by stopGrace.
func (l *loop) graceful(ctx context.Context) (context.Context, context.CancelFunc) {
	out, cancel := context.WithCancelCause(l.held)
	stop := context.AfterFunc(ctx, func() {
		cause := context.Cause(ctx)
		var v *verdict
		if errors.As(cause, &v) && (v.code == events.CodeStopped || v.code == events.CodeLimit) {
			select {
			case <-time.After(stopGrace):
			case <-out.Done():
			}
		}
		cancel(cause)
	})
	return out, func() { stop(); cancel(context.Canceled) }
}

// stand waits while the loop is paused or the model's question is open.
func (l *loop) stand() error {
	s := &l.j.state
	if !s.paused {
		return l.j.append(l.held, events.LoopPausedName, &events.LoopPaused{NeedsInput: s.asking != "", Reason: s.asking})
	}
	return l.idle(nil)
}

// carryOut does what was decided.
func (l *loop) carryOut(d *events.LoopDecided) error {
	limits := l.j.state.started.Start.Limits
	switch {
	case d.Failed != nil:
		return &verdict{events.LoopFailed, d.Failed.Code, d.Failed.Message}
	case d.Done:
		return &verdict{outcome: events.LoopSucceeded}
	case d.Step > limits.Steps:
		return &verdict{events.LoopFailed, events.CodeLimit, fmt.Sprintf("limits.steps: %d are done", limits.Steps)}
	case len(d.Actions) > 0:
		if v := l.j.state.repeats(); v != nil {
			return v
		}
		if why := permits(d.Actions, &limits); why != nil {
			return l.deny(d, why)
		}
		return l.act(l.live)
	case d.Observe:
		if err := l.sleep(l.live, events.Seconds(d.WaitSeconds)); err != nil {
			return err
		}
		return l.observe(l.live)
	default:
		return &verdict{events.LoopFailed, events.CodeModelFailed, "the model decided neither an action nor an end"}
	}
}

// think asks the model and journals its answer.
func (l *loop) think() error {
	s := &l.j.state
	if v := s.exhausted(); v != nil {
		return v
	}
	l.openSpan()
	turn := l.turn()
	ok, err := l.j.appendUnlessMoved(l.held, events.LoopThinkingName, &events.LoopThinking{
		Model: l.modelName, RequestHash: turnHash(turn), Messages: len(turn.Messages)})
	if err != nil || !ok {
		return err
	}
	began := time.Now()
	d, err := l.ask(turn)
	thought := time.Since(began)
	switch {
	case errors.Is(err, errMoved) || errors.Is(err, errOwned):
		return err
	case l.live.Err() != nil:
		return context.Cause(l.live)
	case errors.Is(err, errDrained):
		return err
	case err != nil:
		return modelVerdict(err)
	}
	l.r.tell.thought(l.held, l.modelName, thought)
	decided := &events.LoopDecided{Label: d.Label, Actions: d.Actions, Observe: d.Observe, WaitSeconds: d.Wait.Seconds(), NeedsInput: d.NeedsInput,
		Done: d.Done, Failed: d.Failed, Checks: d.Checks, State: d.State, Reply: d.Reply, Usage: d.Usage, ThoughtMs: ms(thought)}
	if len(d.Actions) > 0 {
		deadline := time.Now().UTC().Add(events.DefaultDeadline)
		decided.Deadline = &deadline
	}
	return l.j.append(l.held, events.LoopDecidedName, decided)
}

// ask calls the model; a panic of one model is no other loop's affair.
func (l *loop) ask(turn Turn) (d Decision, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &computer.Fault{Code: events.CodeInternal, Message: fmt.Sprintf("the model panicked: %v", p)}
		}
	}()
	return l.model.Think(l.traced(l.live), turn)
}

func modelVerdict(err error) *verdict {
	var v *verdict
	if errors.As(err, &v) {
		return v
	}
	var fault *computer.Fault
	if errors.As(err, &fault) {
		return &verdict{events.LoopFailed, fault.Code, fault.Message}
	}
	return &verdict{events.LoopFailed, events.CodeModelFailed, err.Error()}
}

// turn is what the model is told.
func (l *loop) turn() Turn {
	s := &l.j.state
	return Turn{
		Tenant: l.tenant, Loop: l.id, Goal: s.started.Start.Goal, Step: s.step,
		Display: s.sandbox.Display, Capabilities: s.sandbox.Capabilities,
		Observation: *s.obs, Dialogs: s.dialogs, Downloads: s.downloads,
		History: s.history, State: s.carried, Messages: s.inbox,
		Frame: func(ctx context.Context, object string) ([]byte, error) { return frame(ctx, l.r.JS, object) },
		Observe: func(ctx context.Context) (computer.Observation, error) {
			select {
			case <-l.r.draining:
				return computer.Observation{}, errDrained
			default:
			}
			if err := l.observe(ctx); err != nil {
				return computer.Observation{}, err
			}
			if v := strayed(s.obs, &s.started.Start.Limits); v != nil {
				return computer.Observation{}, v
			}
			return *s.obs, nil
		},
	}
}

// turnHash identifies what a model was asked, without the history, which
// follows from the journal.
func turnHash(t Turn) string {
	raw, err := json.Marshal([]any{t.Goal, t.Step, t.Display, t.Observation, t.Dialogs, t.Downloads, t.State, t.Messages, t.Last()})
	if err != nil { // values that came from JSON
		return ""
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:])
}

// finish settles the outcome first, so that a successor ends the loop the
// same way, then ends the sandbox, then says finished.
func (l *loop) finish(v *verdict) error {
	s := &l.j.state
	for s.ending == nil {
		err := l.j.append(l.held, events.LoopEndingName, &events.LoopEnding{Outcome: v.outcome, Code: v.code, Message: v.message})
		if err != nil && !errors.Is(err, errMoved) {
			return err
		}
		if s.finished {
			return nil
		}
	}
	if !s.started.Given && !s.started.Start.Keep {
		if err := l.kill(l.held); err != nil {
			return err
		}
	}
	for !s.finished {
		err := l.j.append(l.held, events.LoopFinishedName, &events.LoopFinished{Outcome: s.ending.Outcome, Code: s.ending.Code, Message: s.ending.Message,
			Steps: s.acts, Seconds: time.Since(s.started.At).Seconds(), Usage: s.usage, SpendUSD: s.spend()})
		if err != nil && !errors.Is(err, errMoved) {
			return err
		}
	}
	l.r.tell.finished(l.held, s.ending.Outcome, s.ending.Code)
	l.log.Info("loop finished", "outcome", s.ending.Outcome, "code", s.ending.Code, "message", s.ending.Message, "steps", s.acts)
	return nil
}

// openSpan begins the span of a step, which ends with the next one's or the loop's.
func (l *loop) openSpan() {
	l.closeSpan(nil)
	_, l.span = l.r.Tracer.Start(l.held, "loop.step", trace.WithAttributes(
		attribute.String("berth.tenant", l.tenant), attribute.String("berth.loop", l.id), attribute.Int("berth.step", l.j.state.step)))
}

func (l *loop) closeSpan(err error) {
	if l.span == nil {
		return
	}
	if err != nil && !errors.Is(err, errDrained) {
		l.span.SetAttributes(attribute.String("berth.end", err.Error()))
	}
	l.span.End()
	l.span = nil
}

// traced is ctx with the step's span, or the loop's trace, as the parent.
func (l *loop) traced(ctx context.Context) context.Context {
	if l.span != nil {
		return trace.ContextWithSpan(ctx, l.span)
	}
	return trace.ContextWithSpanContext(ctx, trace.SpanContextFromContext(l.held))
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
