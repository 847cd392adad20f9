package scheduler

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/metric"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"
	tracenoop "go.opentelemetry.io/otel/trace/noop"

	"berth/internal/bus"
	"berth/internal/kv"
)

// Options of a scheduler. JS and Name are needed.
type Options struct {
	JS     jetstream.JetStream
	Name   string // unique among all processes
	Log    *slog.Logger
	Tracer trace.Tracer
	Meter  metric.Meter
}

// Scheduler is one process's part in scheduling.
type Scheduler struct {
	js     jetstream.JetStream
	name   string
	log    *slog.Logger
	tracer trace.Tracer
	meters *instruments

	placements, servers, heartbeats, leases jetstream.KeyValue
	results, events                         jetstream.Stream
}

// leaseTTL makes a successor work within 5 s of a crash.
const leaseTTL = 3500 * time.Millisecond

// New returns a scheduler that Run will start.
func New(o Options) (*Scheduler, error) {
	if o.JS == nil || o.Name == "" {
		return nil, errors.New("scheduler: JS and Name are needed")
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
	meters, err := newInstruments(o.Meter)
	if err != nil {
		return nil, err
	}
	return &Scheduler{js: o.JS, name: o.Name, log: o.Log.With("scheduler", o.Name), tracer: o.Tracer, meters: meters}, nil
}

// Run stands by for the lease, following what the active one follows, and then
// schedules, term after term, until ctx ends; then it finishes what it has in
// hand, releases the lease and returns nil.
func (s *Scheduler) Run(ctx context.Context) error {
	if err := s.open(ctx); err != nil {
		return err
	}
	terms := kv.Terms{Key: "scheduler", Holder: s.name, TTL: leaseTTL}
	for ctx.Err() == nil {
		var released error
		err := newTerm(s).run(ctx, func(ctx context.Context, lead func(context.Context, uint64) error) error {
			lease, held, err := kv.Acquire(ctx, s.leases, terms, s.log)
			if err != nil {
				return nil // ctx ended while standing by
			}
			err = lead(held, lease.Epoch)
			released = lease.Release(context.WithoutCancel(ctx))
			return err
		})
		switch {
		case ctx.Err() != nil:
			return released
		case err != nil:
			s.log.Error("term ended; standing by again", "err", err)
		}
		if released != nil {
			s.log.Warn("lease not released", "err", released)
		}
		if err := bus.Pause(ctx, 6); err != nil {
			return nil
		}
	}
	return nil
}

func (s *Scheduler) open(ctx context.Context) error {
	var err error
	for name, b := range map[string]*jetstream.KeyValue{
		kv.BucketPlacements: &s.placements, kv.BucketServers: &s.servers,
		kv.BucketHeartbeats: &s.heartbeats, kv.BucketLeases: &s.leases,
	} {
		if *b, err = s.js.KeyValue(ctx, name); err != nil {
			return fmt.Errorf("open bucket %s: %w", name, err)
		}
	}
	for name, st := range map[string]*jetstream.Stream{bus.Results: &s.results, bus.Events: &s.events} {
		if *st, err = s.js.Stream(ctx, name); err != nil {
			return fmt.Errorf("open stream %s: %w", name, err)
		}
	}
	return nil
}

// instruments are the scheduler's metrics.
type instruments struct {
	requests   metric.Int64Counter
	outcomes   metric.Int64Counter
	placement  metric.Float64Histogram
	ready      metric.Float64Histogram
	waiting    metric.Int64UpDownCounter
	transition metric.Int64Counter
}

func newInstruments(m metric.Meter) (*instruments, error) {
	var i instruments
	var errs [6]error
	i.requests, errs[0] = m.Int64Counter("berth.scheduler.requests", metric.WithDescription("requests taken in, by verb and outcome"))
	i.outcomes, errs[1] = m.Int64Counter("berth.scheduler.sandboxes", metric.WithDescription("sandboxes by the event they reached"))
	i.placement, errs[2] = m.Float64Histogram("berth.scheduler.placed.duration", metric.WithUnit("ms"), metric.WithDescription("request published to placed"))
	i.ready, errs[3] = m.Float64Histogram("berth.scheduler.ready.duration", metric.WithUnit("ms"), metric.WithDescription("request published to ready"))
	i.waiting, errs[4] = m.Int64UpDownCounter("berth.scheduler.waiting", metric.WithDescription("requests that no server fits now"))
	i.transition, errs[5] = m.Int64Counter("berth.scheduler.server.transitions", metric.WithDescription("health transitions by state"))
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("scheduler instruments: %w", err)
	}
	return &i, nil
}
