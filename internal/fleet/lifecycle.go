package fleet

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
)

const (
	// startTime is how long a sandbox may take to become ready once there is
	// room; the worker's own bound is as long.
	startTime = 2 * time.Minute
	// lookEvery is how often a record that is waited for is read, should the
	// follower of its events have been blind.
	lookEvery = 2 * time.Second
	// freeTime is how long a kill waits for the room of what has ended.
	freeTime = 2 * time.Second
	// undoTime is how long a call whose ctx has ended may still take to take back
	// what it has asked for.
	undoTime = time.Second
)

// Create implements [providers.Provider].
func (f *Fleet) Create(ctx context.Context, spec providers.Spec) (providers.Sandbox, error) {
	if ctx.Err() != nil {
		return providers.Sandbox{}, context.Cause(ctx)
	}
	own := createRequest(spec.VM, spec.Fence)
	rec, err := f.present(ctx, spec.VM)
	switch {
	case errors.Is(err, providers.ErrNotFound):
	case err != nil:
		return providers.Sandbox{}, err
	case rec.Phase == kv.Ended:
		return providers.Sandbox{}, fmt.Errorf("%w: vm %s has ended: %s; an id lives once", providers.ErrConflict, spec.VM, rec.Outcome)
	case spec.Tenant != "" && spec.Tenant != rec.Tenant:
		return providers.Sandbox{}, fmt.Errorf("%w: vm %s is another tenant's", providers.ErrConflict, spec.VM)
	case fenceOf(rec) != spec.Fence:
		return providers.Sandbox{}, fmt.Errorf("%w: vm %s exists with fence %d", providers.ErrConflict, spec.VM, fenceOf(rec))
	case rec.Ending != nil:
		return providers.Sandbox{}, fmt.Errorf("%w: vm %s is being ended: %s; an id lives once", providers.ErrConflict, spec.VM, rec.Ending.Outcome)
	case rec.Phase == kv.Ready:
		return handle(rec), nil
	default:
		own = rec.Request
	}
	tenant := spec.Tenant
	if tenant == "" {
		tenant = f.Tenant
	}
	if rec.Tenant != "" {
		tenant = rec.Tenant
	}
	if err := events.CheckID("tenant", tenant); err != nil {
		return providers.Sandbox{}, fmt.Errorf("%w: %w", providers.ErrInvalid, err)
	}
	ttl, queue := events.DefaultTTL.Seconds(), (f.Queue + startTime).Seconds()
	if spec.Timeout > 0 {
		ttl = spec.Timeout.Seconds()
	}
	data := events.SandboxCreate{
		VMID: spec.VM, Role: spec.Role, Template: spec.Template, Requires: f.Requires, Owner: spec.Owner, Session: spec.Session,
		TTLSeconds: &ttl, QueueTimeoutSeconds: &queue, Env: spec.Env, Metadata: spec.Metadata,
	}
	if spec.Display != (computer.Display{}) {
		data.Display = &spec.Display
	}
	checked := data
	if err := checked.Validate(); err != nil {
		return providers.Sandbox{}, errorOf(faultOf(err))
	}
	heard, stop, err := f.hear(ctx, tenant, spec.VM, events.EventQueued, events.EventReady, events.EventFailed, events.EventRejected, events.EventExpired, events.EventKilled, events.EventLost)
	if err != nil {
		return providers.Sandbox{}, err
	}
	defer stop()
	var s providers.Sandbox
	if rec.VMID == "" {
		err = f.request(ctx, tenant, events.Create, own, data)
	}
	if err == nil {
		s, err = f.awaitReady(ctx, spec.VM, own, heard)
	}
	if err != nil && (ctx.Err() != nil || errors.Is(err, errQueued)) && rec.VMID == "" {
		if undo := f.undo(ctx, tenant, spec.VM, own); undo != nil {
			err = errors.Join(err, undo)
		}
	}
	return s, err
}

// errQueued: there was no room in time. What waits for it is to be taken back.
var errQueued = fmt.Errorf("%w: ", providers.ErrFull)

// awaitReady waits for the outcome of a create.
func (f *Fleet) awaitReady(ctx context.Context, vm string, own events.Request, heard <-chan events.Event) (providers.Sandbox, error) {
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	var full <-chan time.Time
	reasons := ""
	for {
		look := false
		select {
		case <-ctx.Done():
			return providers.Sandbox{}, context.Cause(ctx)
		case <-full:
			return providers.Sandbox{}, fmt.Errorf("%w%s", errQueued, reasons)
		case <-ticker.C:
			look = true
		case e := <-heard:
			var d outcome
			if events.DecodeTolerant(e, &d) != nil || d.Request != own {
				continue
			}
			switch e.Type() {
			case events.SandboxType(events.EventQueued):
				reasons = d.Explanation
				if f.Queue == 0 {
					return providers.Sandbox{}, fmt.Errorf("%w%s", errQueued, reasons)
				}
				if full == nil {
					timer := time.NewTimer(f.Queue)
					defer timer.Stop()
					full = timer.C
				}
			case events.SandboxType(events.EventReady):
				look = true
			default:
				return providers.Sandbox{}, d.err()
			}
		}
		if !look {
			continue
		}
		rec, err := f.present(ctx, vm)
		switch {
		case err != nil: // not taken in yet, or the bus is away
		case rec.Request != own:
			return providers.Sandbox{}, fmt.Errorf("%w: vm %s is another request's", providers.ErrConflict, vm)
		case rec.Phase == kv.Ended:
			return providers.Sandbox{}, outcome{Code: rec.Code, Message: rec.Outcome + ": " + rec.Message}.err()
		case rec.Phase == kv.Ready:
			return handle(rec), nil
		}
	}
}

// outcome is the data of the events of one sandbox, as far as it matters here.
type outcome struct {
	Code        string         `json:"code"`
	Message     string         `json:"message"`
	Explanation string         `json:"explanation"`
	Request     events.Request `json:"request"`
}

func (o outcome) err() error {
	return errorOf(&computer.Fault{Code: o.Code, Message: o.Message})
}

// hear follows events of one sandbox from now on.
func (f *Fleet) hear(ctx context.Context, tenant, vm string, names ...string) (heard <-chan events.Event, stop func(), err error) {
	filters := make([]string, len(names))
	for i, n := range names {
		filters[i] = events.EventSubject(tenant, vm, n)
	}
	config, err := bus.NewestOf(ctx, f.JS, bus.Events, filters...)
	if err != nil {
		return nil, nil, unavailable(ctx, err)
	}
	out := make(chan events.Event)
	following, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		bus.Tail{JS: f.JS, Stream: bus.Events, Config: config, Log: f.Log}.Run(following, func(msg jetstream.Msg) bool {
			e, err := events.Decode(msg.Headers(), msg.Data())
			if err != nil || !strings.HasPrefix(e.Type(), "berth.") {
				return true
			}
			select {
			case out <- e:
				return true
			case <-following.Done():
				return false
			}
		}, nil)
	}()
	return out, func() { cancel(); <-done }, nil
}

// request publishes a request about a sandbox.
func (f *Fleet) request(ctx context.Context, tenant string, verb events.Verb, id events.Request, data any) error {
	e, err := events.New(events.SandboxType(string(verb)), id.Source, id.ID, data)
	if err != nil {
		return err
	}
	msg, err := events.NewMessage(ctx, events.RequestSubject(tenant, "sandbox", verb), e)
	if err != nil {
		return err
	}
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if _, err := f.JS.PublishMsg(call, msg, jetstream.WithMsgID(id.Token())); err != nil {
		return unavailable(ctx, fmt.Errorf("publish %s: %w", msg.Subject, err))
	}
	return nil
}

// undo asks for the end of what a create may have made.
func (f *Fleet) undo(ctx context.Context, tenant, vm string, own events.Request) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	id := events.Request{Source: Source, ID: own.ID + ".undo"}
	if err := f.request(ctx, tenant, events.Kill, id, events.SandboxKill{VMID: vm, Request: &own}); err != nil {
		return fmt.Errorf("and it may come to be all the same: %w", err)
	}
	return nil
}

// Kill implements [providers.Provider]. It returns when the sandbox's room is
// free again, too, or freeTime after its end.
func (f *Fleet) Kill(ctx context.Context, vm string) error {
	rec, err := f.record(ctx, vm)
	if errors.Is(err, providers.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	w, err := f.placements.Watch(ctx, kv.VMKey(vm))
	if err != nil {
		return unavailable(ctx, err)
	}
	defer func() { _ = w.Stop() }() // it ends with ctx at the latest
	id := events.Request{Source: Source, ID: "kill." + nuid.Next()}
	if err := f.request(ctx, rec.Tenant, events.Kill, id, events.SandboxKill{VMID: vm}); err != nil {
		return err
	}
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	var free <-chan time.Time
	for {
		var now kv.Placement
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-free:
			return nil
		case entry, ok := <-w.Updates():
			if !ok {
				return unavailable(ctx, errors.New("the connection was closed"))
			}
			if entry == nil {
				continue
			}
			if entry.Operation() != jetstream.KeyValuePut {
				return nil
			}
			now, err = kv.Decode[kv.Placement](entry)
		case <-ticker.C:
			now, err = f.present(ctx, vm)
		}
		switch {
		case errors.Is(err, providers.ErrNotFound):
			return nil
		case err != nil || now.Phase != kv.Ended:
		case now.ServerID == "" || now.FreedAt != nil:
			return nil
		case free == nil:
			timer := time.NewTimer(freeTime)
			defer timer.Stop()
			free = timer.C
		}
	}
}

// SetTimeout implements [providers.Provider]: it moves the sandbox's own end.
func (f *Fleet) SetTimeout(ctx context.Context, vm string, d time.Duration) error {
	rec, err := f.record(ctx, vm)
	if err != nil {
		return err
	}
	heard, stop, err := f.hear(ctx, rec.Tenant, vm, events.EventExtended, events.EventRejected)
	if err != nil {
		return err
	}
	defer stop()
	id := events.Request{Source: Source, ID: "extend." + nuid.Next()}
	if err := f.request(ctx, rec.Tenant, events.Extend, id, events.SandboxExtend{VMID: vm, TTLSeconds: d.Seconds()}); err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case e := <-heard:
			var o outcome
			if events.DecodeTolerant(e, &o) != nil || o.Request != id {
				continue
			}
			if e.Type() == events.SandboxType(events.EventExtended) {
				return nil
			}
			return o.err()
		}
	}
}
