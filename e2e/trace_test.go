package e2e

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	coltrace "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	"google.golang.org/protobuf/proto"
)

// collector is an OTLP/HTTP receiver that keeps, by trace, who made a span.
type collector struct {
	mu    sync.Mutex
	spans map[string][]string // trace id: scope/name
}

func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil || r.URL.Path != "/v1/traces" {
		return // metrics; telemetry's own test looks at them
	}
	var req coltrace.ExportTraceServiceRequest
	if err := proto.Unmarshal(body, &req); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, rs := range req.ResourceSpans {
		for _, ss := range rs.ScopeSpans {
			for _, s := range ss.Spans {
				id := fmt.Sprintf("%x", s.TraceId)
				c.spans[id] = append(c.spans[id], ss.Scope.Name+"/"+s.Name)
			}
		}
	}
}

// A publisher's traceparent goes through scheduler, worker and result: one
// trace, exported by OTLP where OTEL_* asks for it.
func TestOneTraceFromThePublisher(t *testing.T) {
	t.Parallel()
	got := &collector{spans: map[string][]string{}}
	srv := httptest.NewServer(got)
	defer srv.Close()
	d := startDevWith(t, []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + srv.URL, "OTEL_BSP_SCHEDULE_DELAY=100"})
	const trace = "4bf92f3577b34da6a3ce929d0e0e4736"
	d.cli(t, "pub", "request.default.sandbox.create", "-H", "traceparent:00-"+trace+"-00f067aa0ba902b7-01",
		`{"specversion":"1.0","id":"t1","source":"/e2e","type":"berth.sandbox.create.v1","data":{"vmId":"traced"}}`)
	d.ready(t, "traced")
	eventually(t, 10*time.Second, "spans of scheduler and worker in the publisher's trace", func() error {
		got.mu.Lock()
		defer got.mu.Unlock()
		spans := got.spans[trace]
		for _, scope := range []string{"berth/scheduler/", "berth/worker/"} {
			if !slices.ContainsFunc(spans, func(s string) bool { return len(s) > len(scope) && s[:len(scope)] == scope }) {
				return fmt.Errorf("no span of %s in %v", scope, spans)
			}
		}
		return nil
	})
}
