package looprunner

import (
	"context"
	"errors"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
)

// instruments are the loop-runner's metrics.
type instruments struct {
	running  metric.Int64UpDownCounter
	loops    metric.Int64Counter
	steps    metric.Int64Counter
	stepMs   metric.Float64Histogram
	thoughts metric.Float64Histogram
	taken    metric.Int64Counter
}

func newInstruments(m metric.Meter) (*instruments, error) {
	var i instruments
	var errs [6]error
	i.running, errs[0] = m.Int64UpDownCounter("berth.loops.running", metric.WithDescription("loops that this process runs"))
	i.loops, errs[1] = m.Int64Counter("berth.loops.finished", metric.WithDescription("loops finished, by outcome and code"))
	i.steps, errs[2] = m.Int64Counter("berth.loop.steps", metric.WithDescription("acts, by outcome"))
	i.stepMs, errs[3] = m.Float64Histogram("berth.loop.act.duration", metric.WithUnit("ms"), metric.WithDescription("from sending an act to its result in the journal"))
	i.thoughts, errs[4] = m.Float64Histogram("berth.loop.think.duration", metric.WithUnit("ms"), metric.WithDescription("one answer of a model"))
	i.taken, errs[5] = m.Int64Counter("berth.loops.taken", metric.WithDescription("loops taken on, by how: started, adopted"))
	return &i, errors.Join(errs[:]...)
}

func (i *instruments) step(ctx context.Context, outcome string, took time.Duration) {
	set := metric.WithAttributes(attribute.String("outcome", outcome))
	i.steps.Add(ctx, 1, set)
	i.stepMs.Record(ctx, ms(took), set)
}

func (i *instruments) thought(ctx context.Context, model string, took time.Duration) {
	i.thoughts.Record(ctx, ms(took), metric.WithAttributes(attribute.String("model", model)))
}

func (i *instruments) finished(ctx context.Context, outcome, code string) {
	i.loops.Add(ctx, 1, metric.WithAttributes(attribute.String("outcome", outcome), attribute.String("code", code)))
}

func (i *instruments) took(ctx context.Context, how string) {
	i.taken.Add(ctx, 1, metric.WithAttributes(attribute.String("how", how)))
}
