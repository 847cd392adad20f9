package looprunner

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/metric"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"
	tracenoop "go.opentelemetry.io/otel/trace/noop"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/dispatch"
	"berth/internal/events"
	"berth/internal/kv"
)

const (
	// defaultMaxLoops is how many loops one process runs at once.
	defaultMaxLoops = 500
	// drainGrace is how long running steps may take once the process stops.
	drainGrace = 10 * time.Second
)

// Options of a Runner.
type Options struct {
	NC       *nats.Conn
	JS       jetstream.JetStream
	Name     string                  // unique per process
	Models   map[string]ModelFactory // by the start's model.name
	Prices   Prices                  // of the models; see Priced
	MaxLoops int                     // at once; 0: 500
	Log      *slog.Logger            // nil: none
	Tracer   trace.Tracer            // nil: none
	Meter    metric.Meter            // nil: none
	Hook     func(point, loop string)
}

// Runner drives loops. See the package's documentation for what it promises.
type Runner struct {
	Options
	tell *instruments

	loopStream jetstream.Stream
	leases     jetstream.KeyValue
	placements jetstream.KeyValue
	results    *dispatch.Followers

	draining chan struct{} // closed when Run's ctx has ended
	slots    chan struct{}

	mu      sync.Mutex
	owned   map[string]*loop // by lease key; nil while being taken on
	running sync.WaitGroup
}

// New makes a runner. It talks to nobody yet.
func New(o Options) (*Runner, error) {
	switch {
	case o.NC == nil || o.JS == nil:
		return nil, errors.New("loop-runner: no connection")
	case o.Name == "":
		return nil, errors.New("loop-runner: no name")
	case len(o.Models) == 0:
		return nil, errors.New("loop-runner: no models")
	}
	if o.MaxLoops == 0 {
		o.MaxLoops = defaultMaxLoops
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Tracer == nil {
		o.Tracer = tracenoop.NewTracerProvider().Tracer("")
	}
	if o.Meter == nil {
		o.Meter = metricnoop.NewMeterProvider().Meter("")
	}
	o.Log = o.Log.With("component", "loop-runner", "runner", o.Name)
	tell, err := newInstruments(o.Meter)
	if err != nil {
		return nil, fmt.Errorf("loop-runner: %w", err)
	}
	return &Runner{Options: o, tell: tell, draining: make(chan struct{}), slots: make(chan struct{}, o.MaxLoops), owned: map[string]*loop{}}, nil
}

// Run serves until ctx ends. Then it takes on nothing more, lets the running
// steps finish for up to 10 s, hands its loops over by releasing their leases
// and returns nil. It is to be called once. An error means that the streams,
// buckets or the shared consumer are not there.
func (r *Runner) Run(ctx context.Context) error {
	if err := r.open(ctx); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return fmt.Errorf("loop-runner: %w", err)
	}
	hard, cut := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cut(errDrained)
	serving, stop := context.WithCancel(ctx)
	defer stop()
	controls, err := bus.NewestOf(ctx, r.JS, bus.Loops, controlFilters()...)
	if err != nil {
		return fmt.Errorf("loop-runner: %w", err)
	}
	var takers, followers sync.WaitGroup
	followers.Go(func() { r.followControls(hard, controls) })
	takers.Go(func() { r.findOrphans(serving, hard) })
	takers.Go(func() { r.serve(serving, hard) })
	<-ctx.Done()
	close(r.draining)
	timer := time.AfterFunc(drainGrace, func() { cut(errDrained) })
	defer timer.Stop()
	takers.Wait() // from here on no loop is launched
	r.running.Wait()
	cut(errDrained)
	followers.Wait()
	return nil
}

func (r *Runner) open(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*callTimeout)
	defer cancel()
	var err error
	if r.loopStream, err = r.JS.Stream(ctx, bus.Loops); err != nil {
		return fmt.Errorf("stream %s: %w", bus.Loops, err)
	}
	results, err := r.JS.Stream(ctx, bus.Results)
	if err != nil {
		return fmt.Errorf("stream %s: %w", bus.Results, err)
	}
	r.results = dispatch.Follow(r.JS, results, r.Log)
	if r.leases, err = r.JS.KeyValue(ctx, kv.BucketLeases); err != nil {
		return fmt.Errorf("bucket %s: %w", kv.BucketLeases, err)
	}
	if r.placements, err = r.JS.KeyValue(ctx, kv.BucketPlacements); err != nil {
		return fmt.Errorf("bucket %s: %w", kv.BucketPlacements, err)
	}
	return nil
}

func (r *Runner) hook(point, loop string) {
	if r.Hook != nil {
		r.Hook(point, loop)
	}
}

// leaseKey is a loop's key in LEASES.
func leaseKey(tenant, loop string) string { return "loop." + tenant + "." + loop }

// claim marks a loop as this process's own business, so that it is not taken
// on twice here. It fails where it is already, or no slot is free.
func (r *Runner) claim(key string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, ok := r.owned[key]; ok {
		return false
	}
	select {
	case r.slots <- struct{}{}:
	default:
		return false
	}
	r.owned[key] = nil
	return true
}

func (r *Runner) unclaim(key string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.owned, key)
	<-r.slots
}

// owns reports whether this process runs the loop, or is about to.
func (r *Runner) owns(key string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.owned[key]
	return ok
}

func (r *Runner) full() bool { return len(r.slots) == cap(r.slots) }

// hold acquires a loop's lease within patience. The lease then lives as long
// as hard; cancelling ctx gives up the attempt only.
func (r *Runner) hold(ctx, hard context.Context, tenant, id string, patience time.Duration) (*loop, context.Context, error) {
	trying, giveUp := context.WithCancelCause(hard)
	stop := context.AfterFunc(ctx, func() { giveUp(context.Cause(ctx)) })
	timer := time.AfterFunc(patience, func() { giveUp(context.DeadlineExceeded) })
	log := r.Log.With("tenant", tenant, "loop", id)
	lease, held, err := kv.Acquire(trying, r.leases, kv.Terms{Key: leaseKey(tenant, id), Holder: r.Name, TTL: leaseTTL}, log)
	inTime, quiet := timer.Stop(), stop()
	if err != nil {
		giveUp(nil)
		return nil, nil, err
	}
	l := &loop{r: r, tenant: tenant, id: id, log: log, lease: lease, ctl: make(chan struct{}, 1)}
	l.j = &journal{js: r.JS, stream: r.loopStream, tenant: tenant, loop: id, runner: r.Name, epoch: lease.Epoch, log: log,
		hook: func(point string) { r.hook(point, id) }}
	if !inTime || !quiet {
		l.letGo(held)
		return nil, nil, context.Cause(trying)
	}
	return l, held, nil
}

// letGo releases the lease of a loop that does not run.
func (l *loop) letGo(held context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(held), callTimeout)
	defer cancel()
	if err := l.lease.Release(ctx); err != nil {
		l.log.Warn("lease not released; it runs out", "err", err)
	}
}

// launch runs a claimed loop in its own goroutine. The claim ends with it.
func (r *Runner) launch(held context.Context, l *loop, how string) {
	key := leaseKey(l.tenant, l.id)
	r.mu.Lock()
	r.owned[key] = l
	r.mu.Unlock()
	l.wake() // for a control entry stored just before
	r.tell.took(held, how)
	r.running.Go(func() {
		defer r.unclaim(key)
		l.run(held)
	})
}

// makeModel calls the factory that the start names.
func (r *Runner) makeModel(tenant, id string, start events.LoopStart, display *computer.Display) (Model, error) {
	name := start.ModelName()
	factory, ok := r.Models[name]
	if !ok {
		return nil, events.BadInput("model.name %q is not known here; known are %s", brief(name), r.modelNames())
	}
	return factory(Spec{Tenant: tenant, Loop: id, Goal: start.Goal, Model: start.Model, Script: start.Script, Limits: start.Limits, Display: display, NC: r.NC})
}
