package scheduler

import (
	"context"

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
