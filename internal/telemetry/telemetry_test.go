package telemetry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"
	colmetric "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	coltrace "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"

	"berth/internal/telemetry"
)

// collector is an OTLP/HTTP receiver that keeps what it was sent.
type collector struct {
	mu      sync.Mutex
	spans   []string // service/name
	traceID string
	metrics []string // service/name
}

func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch r.URL.Path {
	case "/v1/traces":
		var req coltrace.ExportTraceServiceRequest
		if err := proto.Unmarshal(body, &req); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		for _, rs := range req.ResourceSpans {
			service := ""
			for _, a := range rs.Resource.Attributes {
				if a.Key == "service.name" {
					service = a.Value.GetStringValue()
				}
			}
			for _, ss := range rs.ScopeSpans {
				for _, s := range ss.Spans {
					c.spans = append(c.spans, service+"/"+s.Name)
					c.traceID = fmt.Sprintf("%x", s.TraceId)
				}
			}
		}
	case "/v1/metrics":
		var req colmetric.ExportMetricsServiceRequest
		if err := proto.Unmarshal(body, &req); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		for _, rm := range req.ResourceMetrics {
			for _, sm := range rm.ScopeMetrics {
				for _, m := range sm.Metrics {
					c.metrics = append(c.metrics, m.Name)
				}
			}
		}
	default:
		http.NotFound(w, r)
	}
}

func TestTracesAndMetricsArriveByOTLP(t *testing.T) {
	var got collector
	srv := httptest.NewServer(&got)
	defer srv.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", srv.URL)
	cfg := telemetry.Config{Endpoint: srv.URL}
	if errs := cfg.Validate(); len(errs) > 0 {
		t.Fatal(errs)
	}
	var log bytes.Buffer
	tel, err := telemetry.Setup(t.Context(), cfg, telemetry.Options{Service: "scheduler", Instance: "host-1", Out: &log})
	if err != nil {
		t.Fatal(err)
	}
	ctx, span := tel.Tracer.Tracer("test").Start(t.Context(), "create")
	counter, err := tel.Meter.Meter("test").Int64Counter("berth.placed")
	if err != nil {
		t.Fatal(err)
	}
	counter.Add(ctx, 1)
	tel.Log.InfoContext(ctx, "placed", "vm", "a")
	span.End()
	stop, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := tel.Shutdown(stop); err != nil {
		t.Fatal(err)
	}
	if len(got.spans) != 1 || got.spans[0] != "scheduler/create" {
		t.Errorf("spans at the collector: %v", got.spans)
	}
	if len(got.metrics) != 1 || got.metrics[0] != "berth.placed" {
		t.Errorf("metrics at the collector: %v", got.metrics)
	}
	if want := "trace_id=" + got.traceID; !strings.Contains(log.String(), want) {
		t.Errorf("log %q lacks %s", log.String(), want)
	}
}

// Off is off: no request leaves the process, and a trace context that arrives
// is passed on all the same.
func TestOffUnlessAsked(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("exported") }))
	defer srv.Close()
	for _, cfg := range []telemetry.Config{
		{},
		{Endpoint: srv.URL, Disabled: "true"},
		{Endpoint: srv.URL, Traces: "none", Metrics: "none"},
	} {
		tel, err := telemetry.Setup(t.Context(), cfg, telemetry.Options{Service: "worker", Out: io.Discard})
		if err != nil {
			t.Fatal(err)
		}
		remote := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{2}, Remote: true})
		ctx, span := tel.Tracer.Tracer("test").Start(trace.ContextWithSpanContext(t.Context(), remote), "act")
		span.End()
		if got := trace.SpanContextFromContext(ctx).TraceID(); got != remote.TraceID() {
			t.Errorf("%+v: trace %s is not passed on", cfg, got)
		}
		if err := tel.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

func TestEveryFaultIsListed(t *testing.T) {
	const secret = "hunter2"
	cfg := telemetry.Config{
		LogLevel: "loud", LogFormat: "xml", Disabled: "perhaps", Traces: "zipkin", Metrics: "prometheus",
		Protocol: "grpc", TracesProtocol: "http/json", Endpoint: "collector:4317?key=" + secret, MetricsEndpoint: "://" + secret,
	}
	errs := cfg.Validate()
	all := fmt.Sprint(errs)
	for _, name := range []string{
		"LOG_LEVEL", "LOG_FORMAT", "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER",
		"OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
	} {
		if !strings.Contains(all, name) {
			t.Errorf("no fault names %s: %s", name, all)
		}
	}
	if len(errs) != 9 {
		t.Errorf("%d faults, want 9: %s", len(errs), all)
	}
	if strings.Contains(all, secret) {
		t.Errorf("a secret was printed: %s", all)
	}
	if errs := (telemetry.Config{LogLevel: "DEBUG", LogFormat: "json", Protocol: "http/protobuf"}).Validate(); len(errs) > 0 {
		t.Error(errs)
	}
}

func TestLogFormatAndLevel(t *testing.T) {
	var out bytes.Buffer
	tel, err := telemetry.Setup(t.Context(), telemetry.Config{LogFormat: "json", LogLevel: "warn"}, telemetry.Options{Out: &out, Level: slog.LevelDebug})
	if err != nil {
		t.Fatal(err)
	}
	tel.Log.Info("quiet")
	tel.Log.With("server", "ax102-01").WithGroup("g").Warn("loud", "n", 1)
	var rec map[string]any
	if err := json.Unmarshal(out.Bytes(), &rec); err != nil {
		t.Fatalf("%v in %q", err, out.String())
	}
	if rec["msg"] != "loud" || rec["server"] != "ax102-01" {
		t.Errorf("record %v", rec)
	}
}
