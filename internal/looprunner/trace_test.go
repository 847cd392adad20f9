package looprunner_test

import (
	"encoding/json"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"berth/internal/bus"
	"berth/internal/events"
	"berth/internal/looprunner"
)

// One trace, the start request's, goes through the loop's steps and its
// commands, also after a takeover; and the metrics count what happened.
func TestOneTraceAndMetrics(t *testing.T) {
	const trace = "0af7651916cd43dd8448eb211c80319c"
	bubble(t, func(g *rig) {
		spans := tracetest.NewInMemoryExporter()
		provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans))
		reader := metric.NewManualReader()
		meters := metric.NewMeterProvider(metric.WithReader(reader))
		telling := func(o *looprunner.Options) {
			o.Tracer, o.Meter = provider.Tracer("t"), meters.Meter("m")
		}
		calls := 0
		a := g.runner("a", func(p *process, point, _ string) {
			if point == "appended:acted" {
				if calls++; calls == 1 {
					p.kill()
				}
			}
		}, telling)
		raw, err := json.Marshal(object{"specversion": "1.0", "type": "berth.loop.start.v1", "source": "/test", "id": "s",
			"data": object{"loopId": "l", "model": object{"name": "script"}, "script": json.RawMessage(crashScript)}})
		if err != nil {
			t.Fatal(err)
		}
		msg := &nats.Msg{Subject: "request.default.loop.start", Data: raw, Header: nats.Header{"Traceparent": {"00-" + trace + "-b7ad6b7169203331-01"}}}
		g.publish(msg)
		g.until("l", "acted")
		b := g.runner("b", nil, telling)
		g.finished("l", events.LoopSucceeded, "")
		b.close()
		<-a.done
		for _, stream := range []string{bus.Commands, bus.Loops} {
			for _, m := range g.all(stream) {
				if tp := m.Headers().Get("traceparent"); len(tp) < 35 || tp[3:35] != trace {
					t.Errorf("%s carries traceparent %q", m.Subject(), tp)
				}
			}
		}
		steps := 0
		for _, s := range spans.GetSpans() {
			if s.SpanContext.TraceID().String() != trace {
				t.Errorf("span %s is in trace %s", s.Name, s.SpanContext.TraceID())
			}
			if s.Name == "loop.step" {
				steps++
			}
		}
		if steps < 3 {
			t.Errorf("%d spans of steps", steps)
		}
		var all metricdata.ResourceMetrics
		if err := reader.Collect(g.t.Context(), &all); err != nil {
			t.Fatal(err)
		}
		sums := map[string]int64{}
		for _, s := range all.ScopeMetrics {
			for _, m := range s.Metrics {
				if sum, ok := m.Data.(metricdata.Sum[int64]); ok {
					for _, p := range sum.DataPoints {
						sums[m.Name] += p.Value
					}
				}
			}
		}
		if sums["berth.loop.steps"] != 2 || sums["berth.loops.finished"] != 1 || sums["berth.loops.taken"] != 2 || sums["berth.loops.running"] != 0 {
			t.Errorf("metrics %v", sums)
		}
	})
}

// all reads a whole stream.
func (g *rig) all(stream string) []jetstream.Msg {
	g.t.Helper()
	c, err := g.js.OrderedConsumer(g.t.Context(), stream, jetstream.OrderedConsumerConfig{})
	if err != nil {
		g.t.Fatal(err)
	}
	batch, err := c.FetchNoWait(1000)
	if err != nil {
		g.t.Fatal(err)
	}
	var out []jetstream.Msg
	for m := range batch.Messages() {
		out = append(out, m)
	}
	if len(out) == 0 {
		g.t.Errorf("stream %s is empty: %v", stream, batch.Error())
	}
	return out
}
