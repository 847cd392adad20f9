// Package program is how Berth's programs begin and end: the environment is
// read once and every fault in it listed, the connection is made, the role
// runs until a signal asks it to stop, and what is left is flushed.
//
// A program exits 0 after it was asked to stop and has drained, 1 when its role
// failed, 2 when its usage or environment is at fault. The first SIGTERM or
// SIGINT asks; a second one ends the process at once with 128 + its number, and
// what was running is then finished or reported `unknown` by a successor.
package program

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/caarlos0/env/v11"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"berth/internal/bus"
	"berth/internal/telemetry"
)

// Exit codes of every program.
const (
	ExitOK     = 0
	ExitFailed = 1 // it ran and did not succeed
	ExitUsage  = 2 // bad usage, bad input or bad environment
)

// flushGrace bounds the export of the last spans and metrics.
const flushGrace = 3 * time.Second

// Config is the environment that all programs share; embed it.
type Config struct {
	Bus       bus.Config
	Telemetry telemetry.Config
}

// Validate lists every fault of the shared part.
func (c Config) Validate() []error {
	return append(c.Bus.Validate(), c.Telemetry.Validate()...)
}

// EnvironmentHelp describes Config in a program's usage.
const EnvironmentHelp = `  NATS_URL             nats://[user:password@]host:port, comma list (default nats://127.0.0.1:4222)
  NATS_CREDS           path of a .creds file
  NATS_NKEY            path of an nkey seed file
  NATS_CA              path of a PEM bundle to trust
  NATS_CERT, NATS_KEY  paths of a client certificate and its key
  NATS_USER, NATS_PASSWORD  where NATS_URL names none
  NATS_INBOX_PREFIX    prefix of reply subjects (default _INBOX.<program>)
  NATS_WAIT            0: fail where no server answers instead of trying again (default 1)
  LOG_LEVEL            debug, info, warn, error
  LOG_FORMAT           text, json
  OTEL_*               the standard OpenTelemetry variables; off unless an endpoint or exporter is set:
                       OTEL_SDK_DISABLED, OTEL_TRACES_EXPORTER, OTEL_METRICS_EXPORTER (otlp, none),
                       OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
                       OTEL_EXPORTER_OTLP_METRICS_ENDPOINT, OTEL_EXPORTER_OTLP_PROTOCOL,
                       OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, OTEL_EXPORTER_OTLP_METRICS_PROTOCOL (http/protobuf) …
`

// Service is one of the three services.
type Service struct {
	Name  string // its word everywhere: bus user, span, log
	About string // what it does, for -h
	Env   string // what it reads beside the shared environment, for -h
	// Config points to the service's config, which embeds Config; Shared to
	// that part. Validate, once it is parsed, lists every fault of both.
	Config interface{ Validate() []error }
	Shared *Config
	// Run is the role. It returns nil once it has drained after ctx ended.
	Run func(ctx context.Context, p *Process) error
}

// Process is what a role is given.
type Process struct {
	Name   string // unique: hostname-pid-nuid
	NC     *nats.Conn
	JS     jetstream.JetStream
	Log    *slog.Logger
	Tracer trace.Tracer
	Meter  metric.Meter
}

// Main runs a service to its end and returns the exit code.
func Main(s Service) int {
	flags := flag.NewFlagSet(s.Name, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	usage := fmt.Sprintf("%s\n\nUsage: %s [-h]\n\nIt is configured by its environment:\n%s%s", s.About, s.Name, s.Env, EnvironmentHelp)
	switch err := flags.Parse(os.Args[1:]); {
	case errors.Is(err, flag.ErrHelp):
		fmt.Print(usage)
		return ExitOK
	case err != nil:
		fmt.Fprintf(os.Stderr, "%s: %v\n\n%s", s.Name, err, usage)
		return ExitUsage
	case flags.NArg() > 0:
		fmt.Fprintf(os.Stderr, "%s: takes no argument, got %q\n\n%s", s.Name, flags.Arg(0), usage)
		return ExitUsage
	}
	faults := append(Parse(s.Config), s.Config.Validate()...)
	if len(faults) > 0 {
		Complain(os.Stderr, s.Name, faults)
		return ExitUsage
	}
	ctx, stop := Signals(context.Background())
	defer stop()
	return s.main(ctx)
}

func (s Service) main(ctx context.Context) int {
	name := UniqueName()
	tel, err := telemetry.Setup(ctx, s.Shared.Telemetry, telemetry.Options{Service: s.Name, Instance: name, Out: os.Stderr})
	if err != nil {
		Complain(os.Stderr, s.Name, []error{err})
		return ExitUsage
	}
	Forget()
	log := tel.Log.With("program", s.Name, "process", name)
	err = s.run(ctx, name, log, tel)
	flush, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushGrace)
	defer cancel()
	if e := tel.Shutdown(flush); e != nil {
		log.Warn("the last traces and metrics were not exported", "err", e)
	}
	if err != nil {
		log.Error("stopped", "err", err)
		return ExitFailed
	}
	log.Info("stopped")
	return ExitOK
}

func (s Service) run(ctx context.Context, name string, log *slog.Logger, tel *telemetry.Telemetry) error {
	nc, err := bus.Connect(ctx, s.Shared.Bus, s.Name, log)
	if err != nil {
		return unlessStopped(ctx, err)
	}
	defer nc.Close()
	js, err := bus.JetStream(nc)
	if err != nil {
		return err
	}
	log.Info("connected", "url", nc.ConnectedUrlRedacted())
	if err := bus.Await(ctx, js, 1, log); err != nil {
		return unlessStopped(ctx, err)
	}
	const scope = "berth/"
	p := &Process{Name: name, NC: nc, JS: js, Log: log, Tracer: tel.Tracer.Tracer(scope + s.Name), Meter: tel.Meter.Meter(scope + s.Name)}
	log.Info("running")
	return unlessStopped(ctx, s.Run(ctx, p))
}

// unlessStopped drops an error that only says that ctx has ended.
func unlessStopped(ctx context.Context, err error) error {
	if ctx.Err() != nil && (errors.Is(err, context.Canceled) || errors.Is(err, context.Cause(ctx)) || errors.Is(err, nats.ErrNoServers)) {
		return nil
	}
	return err
}

// Parse reads the environment into cfg, a pointer to a config, and returns
// what does not fit a field, by variable.
func Parse(cfg any) []error {
	err := env.Parse(cfg)
	if err == nil {
		return nil
	}
	var all env.AggregateError
	if !errors.As(err, &all) {
		return []error{err}
	}
	faults := make([]error, 0, len(all.Errors))
	for _, e := range all.Errors {
		var bad env.ParseError
		var file env.LoadFileContentError
		switch {
		case errors.As(e, &bad):
			faults = append(faults, fmt.Errorf("%s: not a %s", variable(reflect.TypeOf(cfg).Elem(), bad.Name), kindName(bad.Type)))
		case errors.As(e, &file):
			faults = append(faults, fmt.Errorf("%s: cannot read the file %q: %w", file.Key, file.Filename, rootCause(file.Err)))
		default:
			faults = append(faults, e)
		}
	}
	return faults
}

func rootCause(err error) error {
	var path *os.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}

func kindName(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "boolean (1 or 0)"
	case reflect.Int, reflect.Int64, reflect.Uint64:
		return "whole number"
	default:
		return t.String()
	}
}

// variable finds the environment variable of a config's field.
func variable(t reflect.Type, field string) string {
	for f := range t.Fields() {
		if f.Name == field {
			if tag := f.Tag.Get("env"); tag != "" {
				name, _, _ := strings.Cut(tag, ",")
				return name
			}
		}
		if f.Type.Kind() == reflect.Struct {
			if name := variable(f.Type, field); name != "" {
				return name
			}
		}
	}
	return ""
}

// Complain lists faults, one a line.
func Complain(w io.Writer, name string, faults []error) {
	what := "1 fault"
	if len(faults) != 1 {
		what = strconv.Itoa(len(faults)) + " faults"
	}
	fmt.Fprintf(w, "%s: %s in the environment:\n", name, what)
	for _, f := range faults {
		fmt.Fprintf(w, "  %v\n", f)
	}
	fmt.Fprintf(w, "`%s -h` lists what it reads.\n", name)
}

// Stopped is the cause of a context that a signal ended.
type Stopped struct{ Signal os.Signal }

func (s Stopped) Error() string { return "asked to stop: " + s.Signal.String() }

// Signals returns a context that the first SIGTERM or SIGINT ends, with Stopped
// as its cause; the second ends the process.
func Signals(parent context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(parent)
	ch := make(chan os.Signal, 2)
	signal.Notify(ch, os.Interrupt, syscall.SIGTERM)
	done := make(chan struct{})
	go func() {
		for n := 0; ; n++ {
			select {
			case <-done:
				return
			case sig := <-ch:
				if n > 0 {
					code := ExitFailed
					if s, ok := sig.(syscall.Signal); ok {
						code = 128 + int(s)
					}
					os.Exit(code)
				}
				cancel(Stopped{sig})
			}
		}
	}()
	return ctx, func() {
		signal.Stop(ch)
		close(done)
		cancel(context.Canceled)
	}
}

// Forget removes from the environment what may hold secrets and has been read,
// so that no browser that is started later has it.
func Forget() {
	for _, name := range []string{"NATS_URL", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_METRICS_HEADERS"} {
		_ = os.Unsetenv(name) // fails for malformed names only
	}
}

// UniqueName names this process among all others, past ones included.
func UniqueName() string {
	host, err := os.Hostname()
	if err != nil || host == "" {
		host = "host"
	}
	host = strings.Map(func(r rune) rune {
		if r == '-' || r == '_' || '0' <= r && r <= '9' || 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' {
			return r
		}
		return '-'
	}, host)
	return fmt.Sprintf("%.40s-%d-%s", host, os.Getpid(), nuid.Next())
}
