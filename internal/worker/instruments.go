package worker

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"
	tracenoop "go.opentelemetry.io/otel/trace/noop"
)

// instruments are what the worker measures. Ids are on spans, not here.
type instruments struct {
	tracer   trace.Tracer
	commands metric.Int64Counter
	queued   metric.Float64Histogram
	ran      metric.Float64Histogram
	orphans  metric.Int64Counter
}

func newInstruments(tracer trace.Tracer, meter metric.Meter) (*instruments, error) {
	if tracer == nil {
		tracer = tracenoop.NewTracerProvider().Tracer("")
	}
	if meter == nil {
		meter = metricnoop.NewMeterProvider().Meter("")
	}
	i := &instruments{tracer: tracer}
	var errs [4]error
	i.commands, errs[0] = meter.Int64Counter("berth.worker.commands", metric.WithDescription("commands finished, by verb and outcome"))
	i.queued, errs[1] = meter.Float64Histogram("berth.worker.queued", metric.WithUnit("ms"), metric.WithDescription("from a command's publication to its start"))
	i.ran, errs[2] = meter.Float64Histogram("berth.worker.ran", metric.WithUnit("ms"), metric.WithDescription("time at the provider"))
	i.orphans, errs[3] = meter.Int64Counter("berth.worker.orphans", metric.WithDescription("sandboxes without allocation that were killed"))
	return i, errors.Join(errs[:]...)
}

// count records a command that this worker finished.
func (i *instruments) count(ctx context.Context, c *command, v verdict) {
	set := metric.WithAttributes(attribute.String("verb", string(c.Verb)), attribute.String("outcome", string(v.outcome)))
	i.commands.Add(ctx, 1, set)
	if !v.began.IsZero() {
		i.queued.Record(ctx, millis(max(v.began.Sub(c.published), 0)), set)
		i.ran.Record(ctx, millis(v.ran), set)
	}
}
