package telemetry

import (
	"context"
	"fmt"
	"log/slog"
	"strings"

	"go.opentelemetry.io/otel/trace"
)

func level(s string, def slog.Level) (slog.Level, error) {
	switch strings.ToLower(s) {
	case "":
		return def, nil
	case "debug":
		return slog.LevelDebug, nil
	case "info":
		return slog.LevelInfo, nil
	case "warn":
		return slog.LevelWarn, nil
	case "error":
		return slog.LevelError, nil
	default:
		return def, fmt.Errorf("LOG_LEVEL: %q; want debug, info, warn or error", s)
	}
}

func logger(cfg Config, opts Options) *slog.Logger {
	l, err := level(cfg.LogLevel, opts.Level)
	if err != nil {
		l = opts.Level // Validate has reported it
	}
	o := &slog.HandlerOptions{Level: l}
	var h slog.Handler = slog.NewTextHandler(opts.Out, o)
	if cfg.LogFormat == "json" {
		h = slog.NewJSONHandler(opts.Out, o)
	}
	return slog.New(traced{h})
}

// traced adds the ids of the context's span to every record, so that a log
// line leads to its trace and back.
type traced struct{ slog.Handler }

func (h traced) Handle(ctx context.Context, r slog.Record) error {
	if sc := trace.SpanContextFromContext(ctx); sc.IsValid() {
		r = r.Clone()
		r.AddAttrs(slog.String("trace_id", sc.TraceID().String()), slog.String("span_id", sc.SpanID().String()))
	}
	return h.Handler.Handle(ctx, r)
}

func (h traced) WithAttrs(attrs []slog.Attr) slog.Handler { return traced{h.Handler.WithAttrs(attrs)} }

func (h traced) WithGroup(name string) slog.Handler { return traced{h.Handler.WithGroup(name)} }
