package worker

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
)

// command is a decoded command for one sandbox.
type command struct {
	*item
	events.CommandPath
	event    events.Event
	token    string
	deadline time.Time
	data     events.Command       // of all but create
	create   events.CommandCreate // of create
	actions  []computer.Action    // of act
	fence    uint64               // of the placement it is for, once known
	request  events.Request       // what its result names as its request
}

// box is a sandbox that serves commands.
type box struct {
	fence        uint64
	display      computer.Display
	capabilities []string
}

func boxOf(s providers.Sandbox) box {
	return box{fence: s.Fence, display: s.Display, capabilities: s.Capabilities}
}

// fault makes the reason of a rejection or failure.
func fault(code, format string, args ...any) *computer.Fault {
	return &computer.Fault{Code: code, Message: clip(fmt.Sprintf(format, args...), 4<<10)}
}

// clip shortens s to n bytes at most, at a character's border.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "") + "…"
}

// decode reads a message. An error means that nobody can be answered; a fault
// that the command is to be rejected.
func (t *tenure) decode(it *item) (*command, *computer.Fault, error) {
	path, err := events.ParseCommand(it.msg.Subject())
	if err != nil {
		return nil, nil, err
	}
	e, err := events.Decode(it.msg.Headers(), it.msg.Data())
	if err != nil {
		return nil, nil, err
	}
	c := &command{item: it, CommandPath: path, event: e, token: events.Token(e.Source(), e.ID()), request: events.RequestOf(e)}
	if e.Type() != events.CommandType(c.Verb) {
		return c, fault(events.CodeUnknownType, "type %q on a subject that takes %s", clip(e.Type(), 80), events.CommandType(c.Verb)), nil
	}
	read := events.DecodeStrict
	if strings.HasPrefix(e.Source(), events.OwnSource) {
		read = events.DecodeTolerant
	}
	if c.Verb == events.Create {
		return c, c.decodeCreate(read), nil
	}
	return c, c.decodeOther(read), nil
}

func (c *command) decodeCreate(read func(events.Event, any) error) *computer.Fault {
	if err := read(c.event, &c.create); err != nil {
		return faultOf(err)
	}
	d := &c.create
	if d.Request != (events.Request{}) {
		c.request = d.Request
	}
	if d.Display == (computer.Display{}) {
		d.Display = computer.DefaultDisplay
	}
	switch {
	case d.Fence == 0:
		return fault(events.CodeBadInput, "fence: a create names its placement")
	case d.TTLSeconds < 0 || events.Seconds(d.TTLSeconds) > events.MaxTTL:
		return fault(events.CodeBadInput, "ttlSeconds: %v is not in 0 to %v", d.TTLSeconds, events.MaxTTL.Seconds())
	}
	for _, err := range []error{events.CheckID("tenant", d.Tenant), events.CheckID("role", d.Role), d.Display.Validate()} {
		if err != nil {
			return fault(events.CodeBadInput, "%v", err)
		}
	}
	c.fence = d.Fence
	return c.setDeadline(d.Deadline)
}

func (c *command) decodeOther(read func(events.Event, any) error) *computer.Fault {
	if err := read(c.event, &c.data); err != nil {
		return faultOf(err)
	}
	switch d := c.data; {
	case d.VMID != "" && d.VMID != c.VM:
		return fault(events.CodeBadInput, "vmId %q on the subject of %q", clip(d.VMID, 80), c.VM)
	case c.Verb != events.Act && (len(d.Actions) > 0 || d.Observe):
		return fault(events.CodeBadInput, "a %s has no actions and no observe", c.Verb)
	case c.Verb == events.Act && len(d.Actions) == 0:
		return fault(events.CodeBadInput, "actions: an act needs at least one")
	case c.Verb == events.Cancel && (d.Command == nil || d.Command.Source == "" || d.Command.ID == ""):
		return fault(events.CodeBadInput, "command: a cancel names the source and id of the command that it ends")
	case c.Verb != events.Cancel && d.Command != nil:
		return fault(events.CodeBadInput, "a %s names no command", c.Verb)
	}
	if c.Verb == events.Act {
		actions, err := computer.DecodeActions(c.data.Actions)
		if err != nil {
			return faultOf(err)
		}
		c.actions = actions
	}
	return c.setDeadline(c.data.Deadline)
}

// setDeadline takes the deadline of the command's start.
func (c *command) setDeadline(given *time.Time) *computer.Fault {
	c.deadline = c.published.Add(events.DefaultDeadline)
	if given == nil {
		return nil
	}
	c.deadline = *given
	if c.deadline.Sub(c.published) > events.MaxDeadline {
		return fault(events.CodeBadInput, "deadline %s is more than %s after publication", given.Format(time.RFC3339), events.MaxDeadline)
	}
	return nil
}

// admit decides at a command's turn whether it may run. An error means that
// the tenure has ended before that was known.
func (t *tenure) admit(ctx context.Context, c *command) (*computer.Fault, error) {
	if c.busy {
		return fault(events.CodeBusy, "%d commands wait for vm %s already", bus.BacklogPerSandbox, c.VM), nil
	}
	if t.killedAfter(c.VM, c.seq) {
		return fault(events.CodeKilled, "vm %s was killed before this ran", c.VM), nil
	}
	if f := t.calledOff(c); f != nil {
		return f, nil
	}
	if time.Now().After(c.deadline) {
		return fault(events.CodeDeadline, "not started by %s", c.deadline.UTC().Format(time.RFC3339Nano)), nil
	}
	if f := t.down(); f != nil {
		return f, nil
	}
	if c.Verb == events.Create {
		return t.admitCreate(ctx, c)
	}
	b, refused, err := t.box(ctx, c.VM)
	if err != nil || refused != nil {
		return refused, err
	}
	c.fence = b.fence
	if f := c.data.Fence; f != nil && *f != b.fence {
		return fault(events.CodeFenceStale, "fence %d; vm %s has %d", *f, c.VM, b.fence), nil
	}
	switch {
	case (c.Verb == events.Pause || c.Verb == events.Resume) && !slices.Contains(b.capabilities, providers.PauseCap):
		return fault(events.CodeUnsupported, "vm %s cannot be paused", c.VM), nil
	case c.Verb == events.Snapshot && !slices.Contains(b.capabilities, providers.Snapshot):
		return fault(events.CodeUnsupported, "vm %s cannot be kept as a template", c.VM), nil
	}
	for i, a := range c.actions {
		if need := a.Type.Requires(); need != "" && !slices.Contains(b.capabilities, need) {
			return fault(events.CodeUnsupported, "action %d (%s) needs the capability %s, which vm %s has not", i, a.Type, need, c.VM), nil
		}
	}
	if err := computer.CheckBounds(c.actions, b.display); err != nil {
		return faultOf(err), nil
	}
	return nil, nil
}

// admitCreate looks whether the server's record holds this very placement.
func (t *tenure) admitCreate(ctx context.Context, c *command) (*computer.Fault, error) {
	s, err := t.record(ctx)
	if err != nil {
		return nil, err
	}
	if a, ok := s.Allocs[c.VM]; !ok || a.Fence != c.fence {
		return fault(events.CodeFenceStale, "server %s holds no placement of vm %s with fence %d", t.server.ID, c.VM, c.fence), nil
	}
	return nil, nil
}

// box finds the sandbox that serves a vm's commands, or says why there is none.
func (t *tenure) box(ctx context.Context, vm string) (box, *computer.Fault, error) {
	t.mu.Lock()
	b, ok := t.boxes[vm]
	t.mu.Unlock()
	if ok {
		return b, nil, nil
	}
	p, err := t.where(ctx, vm)
	if err != nil {
		return box{}, nil, err
	}
	if f := t.elsewhere(vm, p); f != nil {
		return box{}, f, nil
	}
	t.mu.Lock()
	killed := t.killed[vm].ended(p.Fence)
	t.mu.Unlock()
	if killed {
		return box{}, fault(events.CodeNotFound, "vm %s was killed", vm), nil
	}
	// It is said to be here, yet the inventory did not show it.
	look, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	s, err := bounded(look, func(ctx context.Context) (providers.Sandbox, error) { return t.provider.Get(ctx, vm) })
	switch {
	case errors.Is(err, providers.ErrNotFound):
		return box{}, fault(events.CodeNotFound, "vm %s has no sandbox on server %s (%s)", vm, t.server.ID, p.Phase), nil
	case err != nil && ctx.Err() != nil:
		return box{}, nil, context.Cause(ctx)
	case err != nil:
		return box{}, faultOf(fmt.Errorf("look for vm %s: %w", vm, err)), nil
	case s.Fence != p.Fence || s.State == providers.Starting:
		return box{}, fault(events.CodeNotFound, "vm %s is not ready on server %s", vm, t.server.ID), nil
	}
	b = boxOf(s)
	t.adopt(vm, b)
	return b, nil, nil
}

// elsewhere says why a vm that is placed so has no sandbox here; nil where it
// may have one.
func (t *tenure) elsewhere(vm string, p *kv.Placement) *computer.Fault {
	switch {
	case p == nil:
		return fault(events.CodeNotFound, "no vm %s", vm)
	case p.Phase == kv.Ended:
		return fault(events.CodeNotFound, "vm %s has ended: %s, %s: %s", vm, p.Outcome, p.Code, p.Message)
	case p.ServerID == "":
		return fault(events.CodeNotFound, "vm %s is %s", vm, p.Phase)
	case p.ServerID != t.server.ID:
		return fault(events.CodeWrongServer, "vm %s lives on server %s, not on %s", vm, p.ServerID, t.server.ID)
	}
	return nil
}

func (t *tenure) adopt(vm string, b box) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.boxes[vm] = b
}

// forget drops a sandbox that is no more, unless the vm has begun another life.
func (t *tenure) forget(vm string, fence uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.boxes[vm].fence == fence {
		delete(t.boxes, vm)
		t.frames.forget(vm)
		t.breaker.forget(vm)
	}
}

// killedAfter reports whether a kill of the vm was published after sequence seq.
func (t *tenure) killedAfter(vm string, seq uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.killed[vm].seq > seq
}

// command handles one delivered message of the server's first consumer.
func (t *tenure) command(ctx context.Context, it *item) { t.handle(ctx, it, t.admit, t.perform) }

// handle takes one delivered message to its end: when it returns the command is
// finished and acknowledged, or left to a successor. admit decides at its turn
// whether it may run; run carries it out once it is claimed.
func (t *tenure) handle(ctx context.Context, it *item, admit func(context.Context, *command) (*computer.Fault, error), run func(context.Context, *command) verdict) {
	c, refused, err := t.decode(it)
	if err != nil {
		t.giveUp(ctx, it, err)
		return
	}
	ctx, span := t.span(ctx, c)
	defer span.End()
	if !t.take(c) {
		return
	}
	defer t.leave(c)
	defer t.rescue(ctx, c)
	if refused == nil {
		refused, err = admit(ctx, c)
	}
	switch {
	case err != nil:
		return
	case refused != nil:
		t.refuse(ctx, c, refused)
	default:
		t.execute(ctx, c, run)
	}
}

// rescue ends a command at which this program has panicked, so that it does
// not bring down every worker that gets it.
func (t *tenure) rescue(ctx context.Context, c *command) {
	p := recover()
	if p == nil {
		return
	}
	t.log.Error("panic", "vm", c.VM, "verb", c.Verb, "token", c.token, "panic", p, "stack", string(debug.Stack()))
	v := verdict{outcome: computer.Rejected, fault: fault(events.CodeInternal, "the worker failed at this command: %v", p)}
	e, raw, err := bus.Last(ctx, t.results, events.ResultSubject(t.server.ID, c.VM, c.token))
	switch {
	case err != nil:
		return // it comes again
	case raw == nil:
		t.finish(ctx, c, 0, v)
	case e.Type() == events.TypeFinished:
		t.ack(c.item)
	default:
		v.outcome = computer.Unknown
		t.finish(ctx, c, raw.Sequence, v)
	}
}

// span begins a command's span, which continues its publisher's trace.
func (t *tenure) span(ctx context.Context, c *command) (context.Context, trace.Span) {
	ctx = events.ExtractTrace(ctx, c.msg.Headers())
	return t.w.inst.tracer.Start(ctx, "sandbox."+string(c.Verb), trace.WithSpanKind(trace.SpanKindConsumer), trace.WithAttributes(
		attribute.String("berth.server", t.server.ID), attribute.String("berth.vm", c.VM),
		attribute.String("berth.token", c.token), attribute.Int64("berth.sequence", int64(c.seq))))
}

// giveUp dead-letters a message that names nobody who could be answered.
func (t *tenure) giveUp(ctx context.Context, it *item, reason error) {
	t.log.Warn("command is unintelligible; dead-lettered", "subject", it.msg.Subject(), "seq", it.seq, "err", reason)
	consumer := t.server.ID
	if overtakes(it) {
		consumer = bus.KillConsumer(t.server.ID)
	}
	if retry(ctx, func() error {
		return bus.PublishDeadLetter(ctx, t.js, bus.Commands, consumer, it.msg, reason.Error())
	}) == nil {
		t.ack(it)
	}
}

// take notes that this tenure works on a token. It returns false where it does
// so already: the same command was published again, and the first decides.
func (t *tenure) take(c *command) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.claims[c.token+c.VM] {
		return false
	}
	t.claims[c.token+c.VM] = true
	return true
}

func (t *tenure) leave(c *command) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.claims, c.token+c.VM)
}
