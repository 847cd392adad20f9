// Package telemetry sets up a program's logs, traces and metrics.
//
// Logs are slog records on stderr with the trace and span of their context.
// Traces and metrics are off unless the standard OTEL_* variables ask for
// them, and are then exported by OTLP over HTTP (protobuf). Off means no-op
// providers: a trace context that arrives from the bus is still passed on.
//
// Setup is called once at the start of a program and sets OpenTelemetry's
// global propagator and error handler; nothing else reads a global, since
// every component has its Tracer and Meter injected. Spans and metrics of the
// last seconds are lost when a process is killed; Shutdown flushes them.
package telemetry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"strings"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/metric"
	metricnoop "go.opentelemetry.io/otel/metric/noop"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	tracenoop "go.opentelemetry.io/otel/trace/noop"

	"berth/internal/events"
)

// Config is the part of a program's environment that this package reads; embed
// it in the program's own config. What is not listed here (headers, time-outs,
// compression, samplers, resource attributes …) OpenTelemetry's own SDK and
// exporters read from the standard variables.
type Config struct {
	LogLevel  string `env:"LOG_LEVEL"`  // debug, info, warn, error
	LogFormat string `env:"LOG_FORMAT"` // text, json

	Disabled        string `env:"OTEL_SDK_DISABLED"`                   // true: off, whatever else is set
	Traces          string `env:"OTEL_TRACES_EXPORTER"`                // otlp, none
	Metrics         string `env:"OTEL_METRICS_EXPORTER"`               // otlp, none
	Endpoint        string `env:"OTEL_EXPORTER_OTLP_ENDPOINT"`         // base URL of both
	TracesEndpoint  string `env:"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"`  // whole URL
	MetricsEndpoint string `env:"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"` // whole URL
	Protocol        string `env:"OTEL_EXPORTER_OTLP_PROTOCOL"`         // http/protobuf
	TracesProtocol  string `env:"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"`  // likewise
	MetricsProtocol string `env:"OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"` // likewise
}

// Validate lists every fault of the configuration. It prints no endpoint, for
// one may hold credentials.
func (c Config) Validate() []error {
	var errs []error
	if _, err := level(c.LogLevel, slog.LevelInfo); err != nil {
		errs = append(errs, err)
	}
	switch c.LogFormat {
	case "", "text", "json":
	default:
		errs = append(errs, fmt.Errorf("LOG_FORMAT: %q; want text or json", c.LogFormat))
	}
	switch strings.ToLower(c.Disabled) {
	case "", "true", "false":
	default:
		errs = append(errs, fmt.Errorf("OTEL_SDK_DISABLED: %q; want true or false", c.Disabled))
	}
	for _, v := range []struct{ name, value string }{
		{"OTEL_TRACES_EXPORTER", c.Traces},
		{"OTEL_METRICS_EXPORTER", c.Metrics},
	} {
		switch v.value {
		case "", "otlp", "none":
		default:
			errs = append(errs, fmt.Errorf("%s: %q; this build has otlp and none", v.name, v.value))
		}
	}
	for _, v := range []struct{ name, value string }{
		{"OTEL_EXPORTER_OTLP_PROTOCOL", c.Protocol},
		{"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", c.TracesProtocol},
		{"OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", c.MetricsProtocol},
	} {
		switch v.value {
		case "", "http/protobuf":
		default:
			errs = append(errs, fmt.Errorf("%s: %q; this build exports by http/protobuf only (a collector's HTTP port is 4318)", v.name, v.value))
		}
	}
	for _, v := range []struct{ name, value string }{
		{"OTEL_EXPORTER_OTLP_ENDPOINT", c.Endpoint},
		{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", c.TracesEndpoint},
		{"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", c.MetricsEndpoint},
	} {
		if v.value == "" {
			continue
		}
		if u, err := url.Parse(v.value); err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
			errs = append(errs, fmt.Errorf("%s: not a URL such as http://127.0.0.1:4318", v.name))
		}
	}
	return errs
}

// wanted says whether a signal is exported: its exporter variable decides, and
// where that is unset, whether there is an endpoint.
func (c Config) wanted(exporter, endpoint string) bool {
	if strings.EqualFold(c.Disabled, "true") || exporter == "none" {
		return false
	}
	return exporter == "otlp" || endpoint != "" || c.Endpoint != ""
}

// Telemetry is what components have injected.
type Telemetry struct {
	Log    *slog.Logger
	Tracer trace.TracerProvider
	Meter  metric.MeterProvider

	closers []func(context.Context) error
}

// Options of Setup beside the environment.
type Options struct {
	Service  string     // service.name, unless OTEL_SERVICE_NAME says otherwise
	Instance string     // service.instance.id: the process's unique name
	Level    slog.Level // where LOG_LEVEL says nothing
	Out      io.Writer  // of the log
}

// Setup makes what cfg asks for. cfg must have passed Validate. No connection
// is made: a collector that is not there is logged when an export fails.
func Setup(ctx context.Context, cfg Config, opts Options) (*Telemetry, error) {
	t := &Telemetry{
		Log:    logger(cfg, opts),
		Tracer: tracenoop.NewTracerProvider(),
		Meter:  metricnoop.NewMeterProvider(),
	}
	events.Propagator()
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { t.Log.Warn("telemetry", "err", err) }))
	traces, metrics := cfg.wanted(cfg.Traces, cfg.TracesEndpoint), cfg.wanted(cfg.Metrics, cfg.MetricsEndpoint)
	if !traces && !metrics {
		return t, nil
	}
	res, err := resource.New(ctx,
		resource.WithAttributes(
			attribute.String("service.name", opts.Service),
			attribute.String("service.namespace", "berth"),
			attribute.String("service.instance.id", opts.Instance)),
		resource.WithTelemetrySDK(),
		resource.WithFromEnv())
	if err != nil {
		return nil, fmt.Errorf("OTEL_RESOURCE_ATTRIBUTES: %w", err)
	}
	if traces {
		exporter, err := otlptracehttp.New(ctx)
		if err != nil {
			return nil, fmt.Errorf("trace exporter: %w", err)
		}
		p := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(res))
		t.Tracer, t.closers = p, append(t.closers, p.Shutdown)
	}
	if metrics {
		exporter, err := otlpmetrichttp.New(ctx)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("metric exporter: %w", err), t.Shutdown(ctx))
		}
		p := sdkmetric.NewMeterProvider(sdkmetric.WithReader(sdkmetric.NewPeriodicReader(exporter)), sdkmetric.WithResource(res))
		t.Meter, t.closers = p, append(t.closers, p.Shutdown)
	}
	return t, nil
}

// Shutdown exports what is left, until ctx ends.
func (t *Telemetry) Shutdown(ctx context.Context) error {
	var errs []error
	for _, c := range t.closers {
		errs = append(errs, c(ctx))
	}
	t.closers = nil
	return errors.Join(errs...)
}
