package looprunner

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
)

// eventsBefore is how far before the loop's start its sandbox's events are
// read from. A vm id means no second sandbox within 24 h of its end, so events
// of an earlier life are older than this, whatever the clocks say.
const eventsBefore = 10 * time.Minute

// createRequest names a loop's create request; the same for every runner, so
// that one loop has one sandbox. As in actID the parts are joined by what no id
// has in it: tenant a, loop b-c is not tenant a-b, loop c.
func createRequest(tenant, loop string) events.Request {
	return events.Request{Source: events.SourceLoopRunner, ID: tenant + "." + loop + ".create"}
}

func killRequest(tenant, loop string) events.Request {
	return events.Request{Source: events.SourceLoopRunner, ID: tenant + "." + loop + ".kill"}
}

// requestSandbox publishes the create request. Publishing it again is
// harmless: the scheduler knows it by its (source, id).
func requestSandbox(ctx context.Context, js jetstream.JetStream, tenant, loop string, data events.SandboxCreate) error {
	id := createRequest(tenant, loop)
	e, err := events.New(events.TypeSandboxCreate, id.Source, id.ID, data)
	if err != nil {
		return err
	}
	msg, err := events.NewMessage(ctx, events.RequestSubject(tenant, "sandbox", events.Create), e)
	if err != nil {
		return err
	}
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if _, err := js.PublishMsg(call, msg, jetstream.WithMsgID(id.Token())); err != nil {
		return fmt.Errorf("request sandbox: %w", err)
	}
	return nil
}

// box is what the sandbox's events have told. It is written by its follower
// and read by the loop.
type box struct {
	server, vm string // the loop's own; set by settle
	fence      uint64

	mu      sync.Mutex
	ready   *events.Placed
	changed chan struct{} // capacity 1: ready was set
	gone    chan struct{} // closed when the sandbox has ended, or never was
	ended   bool
}

func newBox(vm string) *box {
	return &box{vm: vm, changed: make(chan struct{}, 1), gone: make(chan struct{})}
}

func (b *box) isReady() *events.Placed {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ready
}

// follow begins to follow the sandbox's events. From then on its end is a
// verdict on the loop.
func (l *loop) follow(ctx context.Context) {
	s := &l.j.state
	l.box = newBox(s.started.VMID)
	names := []string{events.EventReady, events.EventFailed, events.EventRejected, events.EventExpired, events.EventKilled, events.EventLost}
	filters := make([]string, len(names))
	for i, n := range names {
		filters[i] = events.EventSubject(l.tenant, s.started.VMID, n)
	}
	from := s.startedAt.Add(-eventsBefore)
	t := bus.Tail{JS: l.r.JS, Stream: bus.Events, Log: l.log, Config: jetstream.OrderedConsumerConfig{
		FilterSubjects: filters, DeliverPolicy: jetstream.DeliverByStartTimePolicy, OptStartTime: &from}}
	l.followers.Go(func() { t.Run(ctx, l.hear, nil) })
}

// hear takes one event of the sandbox. Where the loop made it, events count only
// that answer the loop's own create request: a vm id that somebody else has is
// refused to the loop without any harm to the other's sandbox, and how that one
// ends is no verdict on the loop.
func (l *loop) hear(msg jetstream.Msg) bool {
	e, err := events.Decode(msg.Headers(), msg.Data())
	if err != nil {
		return true
	}
	name := msg.Subject()[strings.LastIndexByte(msg.Subject(), '.')+1:]
	if e.Type() != events.SandboxType(name) {
		return true
	}
	own := createRequest(l.tenant, l.id)
	if name == events.EventReady {
		var p events.Placed
		if events.DecodeTolerant(e, &p) == nil && (l.given || p.Request == own) {
			l.box.mu.Lock()
			l.box.ready = &p
			l.box.mu.Unlock()
			select {
			case l.box.changed <- struct{}{}:
			default:
			}
		}
		return true
	}
	var d events.Ended
	if events.DecodeTolerant(e, &d) != nil {
		return true
	}
	switch {
	case d.Request == own && !l.given:
	case name == events.EventRejected && d.Request == killRequest(l.tenant, l.id): // a kill of what is no more, which says the same
	case name != events.EventRejected && l.given:
	default:
		return true // another's
	}
	l.sandboxEnded(name, d.Code, d.Message)
	return true
}

// sandboxEnded is the loop's verdict, unless it has one already.
func (l *loop) sandboxEnded(name, code, message string) {
	l.box.mu.Lock()
	defer l.box.mu.Unlock()
	if l.box.ended {
		return
	}
	l.box.ended = true
	close(l.box.gone)
	if code == "" {
		code = name
	}
	l.end(&verdict{events.LoopFailed, code, "sandbox " + name + ": " + message})
}

// awaitSandbox waits until the sandbox is ready and journals where it is.
func (l *loop) awaitSandbox() error {
	s := &l.j.state
	if s.started.Given {
		if err := l.findGiven(); err != nil {
			return err
		}
	}
	p := l.box.isReady()
	if p == nil {
		return l.idle(l.box.changed)
	}
	d := computer.DefaultDisplay
	if p.Display != nil {
		d = *p.Display
	} else if s.started.Start.Sandbox != nil && s.started.Start.Sandbox.Display != nil {
		d = *s.started.Start.Sandbox.Display
	}
	return l.j.append(l.held, events.LoopSandboxName, &events.LoopSandbox{VMID: s.started.VMID, ServerID: p.ServerID, Fence: p.Fence, Display: d,
		Capabilities: p.Capabilities, StreamURL: p.StreamURL, Explanation: p.Explanation})
}

// findGiven looks up a sandbox that the requester named. Another tenant's is
// not found.
func (l *loop) findGiven() error {
	vm := l.j.state.started.VMID
	p, _, err := kv.Get[kv.Placement](l.held, l.r.placements, kv.VMKey(vm))
	switch {
	case errors.Is(err, kv.ErrNotFound) || (err == nil && p.Tenant != l.tenant):
		return &verdict{events.LoopFailed, events.CodeNotFound, fmt.Sprintf("no sandbox %q", vm)}
	case err != nil:
		l.log.Warn("placement not readable; trying again", "vm", vm, "err", err)
		return l.sleep(l.live, 200*time.Millisecond)
	case p.Phase == kv.Ended:
		return &verdict{events.LoopFailed, events.CodeEnded, fmt.Sprintf("sandbox %q has ended: %s", vm, p.Outcome)}
	case p.Phase == kv.Ready:
		ready := events.Placed{VMID: vm, ServerID: p.ServerID, Fence: p.Fence, Explanation: p.Explanation}
		if p.Info != nil {
			ready.Display, ready.Capabilities, ready.StreamURL = &p.Info.Display, p.Info.Capabilities, p.Info.StreamURL
		}
		l.box.mu.Lock()
		defer l.box.mu.Unlock()
		l.box.ready = &ready
	}
	return nil
}

// settle begins to follow the sandbox's results and makes the model.
func (l *loop) settle() error {
	s := &l.j.state
	l.box.server, l.box.fence = s.sandbox.ServerID, s.sandbox.Fence
	if l.model == nil {
		display := s.sandbox.Display
		m, err := l.r.makeModel(l.tenant, l.id, s.started.Start, &display)
		if err != nil {
			return modelVerdict(faultOf(err))
		}
		l.model, l.modelName = m, s.started.Start.ModelName()
	}
	res, err := l.r.results.Of(l.live, l.box.server, l.r.draining)
	switch {
	case err != nil:
		return err
	case res == nil:
		return errDrained
	}
	l.results = res
	return nil
}

// kill asks for the end of the sandbox and waits a while to hear of it. It names
// the loop's create: until the answer to that was heard, the vm id may be the
// name of somebody else's sandbox.
func (l *loop) kill(ctx context.Context) error {
	select {
	case <-l.box.gone:
		return nil
	default:
	}
	vm := l.j.state.started.VMID
	id, own := killRequest(l.tenant, l.id), createRequest(l.tenant, l.id)
	e, err := events.New(events.TypeSandboxKill, id.Source, id.ID, events.SandboxKill{VMID: vm, Request: &own})
	if err != nil {
		return err
	}
	msg, err := events.NewMessage(l.traced(ctx), events.RequestSubject(l.tenant, "sandbox", events.Kill), e)
	if err != nil {
		return err
	}
	l.r.hook("send:kill", l.id)
	err = l.publish(ctx, msg.Subject, func(ctx context.Context) error {
		_, err := l.r.JS.PublishMsg(ctx, msg, jetstream.WithMsgID(id.Token()))
		return err
	})
	if err != nil {
		return err
	}
	l.r.hook("sent:kill", l.id)
	select {
	case <-l.box.gone:
	case <-time.After(endGrace):
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-l.r.draining:
	}
	return nil
}
