package worker

import (
	"slices"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"berth/internal/events"
)

// A command's span is named by its verb, continues its publisher's trace and
// has the provider's call below it; counters know verbs and outcomes.
func TestTelemetry(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		spans := tracetest.NewSpanRecorder()
		reader := metric.NewManualReader()
		w.startWith(Options{Name: "w1",
			Tracer: sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)).Tracer("test"),
			Meter:  metric.NewMeterProvider(metric.WithReader(reader)).Meter("test")})
		w.ready("a")
		w.await(w.publish("a", events.Act, "1", act(click(1, 1))))
		w.await(w.publish("a", events.Act, "2", act(click(5000, 1))))
		w.workers[0].drain()
		ended := spans.Ended()
		i := slices.IndexFunc(ended, func(s sdktrace.ReadOnlySpan) bool { return s.Name() == "provider.execute" })
		j := slices.IndexFunc(ended, func(s sdktrace.ReadOnlySpan) bool { return s.Name() == "sandbox.act" })
		if i < 0 || j < 0 || ended[i].Parent().SpanID() != ended[j].SpanContext().SpanID() {
			t.Fatalf("spans: %v", ended)
		}
		if !slices.Contains(ended[j].Attributes(), attribute.String("berth.outcome", "ok")) || !slices.Contains(ended[j].Attributes(), attribute.String("berth.vm", "a")) {
			t.Errorf("attributes: %v", ended[j].Attributes())
		}
		var data metricdata.ResourceMetrics
		if err := reader.Collect(t.Context(), &data); err != nil {
			t.Fatal(err)
		}
		counts := map[string]int64{}
		for _, m := range data.ScopeMetrics[0].Metrics {
			if sum, ok := m.Data.(metricdata.Sum[int64]); ok && m.Name == "berth.worker.commands" {
				for _, p := range sum.DataPoints {
					verb, _ := p.Attributes.Value("verb")
					outcome, _ := p.Attributes.Value("outcome")
					counts[verb.AsString()+" "+outcome.AsString()] = p.Value
				}
			}
		}
		if counts["act ok"] != 1 || counts["act rejected"] != 1 || counts["create ok"] != 1 {
			t.Errorf("counts: %v", counts)
		}
	})
}
