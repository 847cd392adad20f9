package looprunner

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
)

const (
	// atOnce bounds the requests that are being taken in.
	atOnce = 32
	// pullBatch is small, so that loops, which last, are spread over the runners.
	pullBatch = 2
	// pullWait is how long one pull waits, and so the most that it holds up the
	// end of Run.
	pullWait = time.Second
	// unknownLoopTries is how often a control request for an unknown loop is
	// looked at, 500 ms apart: its start may be on its way through another
	// runner.
	unknownLoopTries = 4
)

// verb is what becomes of a request's message.
type verb struct {
	after time.Duration // not zero: redeliver after this
	drop  error         // not nil: dead letter
}

var done verb

func later(d time.Duration) verb { return verb{after: d} }

// serve takes requests from the shared consumer until ctx ends.
func (r *Runner) serve(ctx, hard context.Context) {
	var handlers sync.WaitGroup
	defer handlers.Wait()
	slots := make(chan struct{}, atOnce)
	for attempt := 0; ctx.Err() == nil; attempt++ {
		err := r.pull(ctx, func(msg jetstream.Msg) {
			slots <- struct{}{}
			handlers.Go(func() {
				defer func() { <-slots }()
				r.settle(hard, msg, r.handle(ctx, hard, msg))
			})
		})
		if err != nil && ctx.Err() == nil {
			r.Log.Warn("requests not readable; trying again", "err", err)
		}
		if bus.Pause(ctx, attempt) != nil {
			return
		}
	}
}

// pull hands over messages until ctx ends or the consumer fails. It fetches
// rather than iterates, so that at the end nothing lies in a buffer: what came
// last is handed back at once.
func (r *Runner) pull(ctx context.Context, take func(jetstream.Msg)) error {
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	c, err := r.JS.Consumer(call, bus.Requests, bus.LoopRunnerConsumer)
	if err != nil {
		return err
	}
	for ctx.Err() == nil {
		batch, err := c.Fetch(pullBatch, jetstream.FetchMaxWait(pullWait))
		if err != nil {
			return err
		}
		for msg := range batch.Messages() {
			if ctx.Err() != nil {
				r.settle(ctx, msg, later(time.Millisecond))
				continue
			}
			take(msg)
		}
		if err := batch.Error(); err != nil && !errors.Is(err, nats.ErrTimeout) {
			return err
		}
	}
	return nil
}

// settle is the one place where requests are acknowledged.
func (r *Runner) settle(ctx context.Context, msg jetstream.Msg, v verb) {
	var err error
	switch {
	case v.drop != nil:
		r.Log.Warn("request given up", "subject", msg.Subject(), "err", v.drop)
		if err = bus.PublishDeadLetter(ctx, r.JS, bus.Requests, bus.LoopRunnerConsumer, msg, v.drop.Error()); err == nil {
			err = msg.Term()
		}
	case v.after > 0:
		err = msg.NakWithDelay(v.after)
	default:
		err = msg.Ack()
	}
	if err != nil {
		r.Log.Warn("request not settled; it comes again", "subject", msg.Subject(), "err", err)
	}
}

// handle takes in one request.
func (r *Runner) handle(ctx, hard context.Context, msg jetstream.Msg) verb {
	path, err := events.ParseRequest(msg.Subject())
	if err != nil {
		return verb{drop: err}
	}
	e, err := events.Decode(msg.Headers(), msg.Data())
	if err != nil {
		return verb{drop: err}
	}
	ctx = events.ExtractTrace(ctx, msg.Headers())
	ctx, span := r.Tracer.Start(ctx, "loop."+string(path.Verb))
	defer span.End()
	q := request{path: path, event: e, id: events.RequestOf(e), deliveries: 1}
	if meta, err := msg.Metadata(); err == nil {
		q.deliveries = meta.NumDelivered
	}
	switch {
	case path.Tenant == events.FleetTenant:
		return r.refuse(ctx, q, &events.DataError{Code: events.CodeForbidden, Message: "the tenant _ is the fleet itself and runs no loops"})
	case !slices.Contains([]events.Verb{events.Start, events.Stop, events.Pause, events.Resume, events.Message}, path.Verb):
		return r.refuse(ctx, q, &events.DataError{Code: events.CodeUnknownType, Message: fmt.Sprintf("no loop request %q", brief(string(path.Verb)))})
	case e.Type() != events.LoopType(string(path.Verb)):
		return r.refuse(ctx, q, &events.DataError{Code: events.CodeUnknownType,
			Message: fmt.Sprintf("type %q on %s; want %s", brief(e.Type()), msg.Subject(), events.LoopType(string(path.Verb)))})
	case path.Verb == events.Start:
		return r.start(ctx, hard, q)
	default:
		return r.control(ctx, q)
	}
}

// request is one request from the bus.
type request struct {
	path       events.RequestPath
	event      events.Event
	id         events.Request
	deliveries uint64
}

// decode reads the data: strictly from outside, tolerantly from Berth's own.
func (q request) decode(v any) error {
	if strings.HasPrefix(q.id.Source, events.OwnSource) {
		return events.DecodeTolerant(q.event, v)
	}
	return events.DecodeStrict(q.event, v)
}

// loopID is the loop that the data names, whatever else is wrong with it.
func (q request) loopID() string {
	var named struct {
		LoopID string `json:"loopId"`
	}
	if json.Unmarshal(q.event.Data(), &named) != nil {
		return ""
	}
	return named.LoopID
}

// refuse answers a request with a typed rejected. Of a start it lies on
// loop.<tenant>.<loop>.rejected, where its requester listens, unless another
// loop's journal is there; all else is told on event.<tenant>.<loop>.rejected,
// so that no journal has what does not belong to it.
func (r *Runner) refuse(ctx context.Context, q request, err error) verb {
	d, loop := faultOf(err), q.loopID()
	if events.CheckID("", loop) != nil {
		loop = events.DerivedVMID(q.path.Tenant, q.id.Source, q.id.ID)
	}
	subject := events.EventSubject(q.path.Tenant, loop, events.EventRejected)
	stream := bus.Events
	if q.path.Verb == events.Start && !r.exists(ctx, q.path.Tenant, loop) {
		subject, stream = events.LoopSubject(q.path.Tenant, loop, events.LoopRejectedName), bus.Loops
	}
	r.Log.Info("loop request refused", "tenant", q.path.Tenant, "loop", loop, "verb", q.path.Verb, "code", d.Code, "message", d.Message)
	out, err := events.New(events.LoopType(events.LoopRejectedName), events.SourceLoopRunner, q.id.Token()+"-rejected",
		events.LoopRejected{LoopID: loop, Code: d.Code, Message: d.Message, Request: q.id})
	if err != nil {
		return verb{drop: err}
	}
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*callTimeout)
	defer cancel()
	s, err := r.JS.Stream(call, stream)
	if err == nil {
		err = bus.Announce(call, r.JS, s, subject, out)
	}
	if err != nil {
		r.Log.Warn("rejection not told; trying again", "subject", subject, "err", err)
		return later(time.Second)
	}
	return done
}

// exists reports whether a loop's journal has begun, or cannot be read.
func (r *Runner) exists(ctx context.Context, tenant, loop string) bool {
	_, raw, err := bus.Last(ctx, r.loopStream, events.LoopSubject(tenant, loop, events.LoopStartedName))
	return err != nil || raw != nil
}

// faultOf makes any error of input a typed one.
func faultOf(err error) *computer.Fault {
	var d *events.DataError
	var i *computer.InvalidError
	var f *computer.Fault
	switch {
	case errors.As(err, &d):
		return &computer.Fault{Code: d.Code, Message: d.Message}
	case errors.As(err, &i):
		return &computer.Fault{Code: i.Code, Message: err.Error()}
	case errors.As(err, &f):
		return f
	default:
		return &computer.Fault{Code: events.CodeBadInput, Message: err.Error()}
	}
}

func (r *Runner) modelNames() string {
	return strings.Join(slices.Sorted(maps.Keys(r.Models)), ", ")
}

// brief keeps echoed input short.
func brief(s string) string {
	if len(s) > 80 {
		return strings.ToValidUTF8(s[:80], "") + "…"
	}
	return s
}
