package scheduler

import (
	"context"
	"sync"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"berth/internal/events"
)

// withTraceparent returns ctx in the trace that a record remembers, unless it
// has a span of its own.
func withTraceparent(ctx context.Context, traceparent string) context.Context {
	if traceparent == "" || trace.SpanContextFromContext(ctx).IsValid() {
		return ctx
	}
	return events.ExtractTrace(ctx, nats.Header{"traceparent": []string{traceparent}})
}

// traceparentOf is what a record remembers of the present span, or of the
// publisher's where nothing is traced here.
func traceparentOf(ctx context.Context) string {
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	return carrier["traceparent"]
}

func eventAttr(name string) metric.MeasurementOption {
	return metric.WithAttributes(attribute.String("event", name))
}

// forget drops a key that nobody will lock again.
func (k *keyedMutex) forget(key string) { k.locks.Delete(key) }

// keyedMutex is one lock per key. It is made of channels, since a holder may
// wait for time and a mutex would then stand still in a synctest bubble.
type keyedMutex struct{ locks sync.Map }

func (k *keyedMutex) lock(ctx context.Context, key string) (unlock func(), err error) {
	v, _ := k.locks.LoadOrStore(key, make(chan struct{}, 1))
	held := v.(chan struct{})
	select {
	case held <- struct{}{}:
		return func() { <-held }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
