package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/trace"

	"berth/internal/bus"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/program"
	"berth/internal/telemetry"
)

// operator is the program name, and so the default inbox, of this tool.
const operator = "operator"

// client is a connection to a running fleet.
type client struct {
	nc     *nats.Conn
	js     jetstream.JetStream
	log    *slog.Logger
	tracer trace.Tracer
	close  func()
}

// environment reads what berth's commands read.
func (c *call) environment() (program.Config, error) {
	var cfg program.Config
	faults := append(program.Parse(&cfg), cfg.Validate()...)
	if len(faults) > 0 {
		return cfg, &inputError{"the environment is at fault:", faults}
	}
	if c.server != "" {
		cfg.Bus.URL = c.server
		if errs := cfg.Bus.Validate(); len(errs) > 0 {
			return cfg, badUsage("--server: %s", strings.TrimPrefix(errs[0].Error(), "NATS_URL: "))
		}
	}
	return cfg, nil
}

// connect reaches the server, once: a person is waiting.
func (c *call) connect(ctx context.Context) (*client, error) {
	cfg, err := c.environment()
	if err != nil {
		return nil, err
	}
	if os.Getenv("NATS_WAIT") == "" {
		cfg.Bus.Wait = false
	}
	tel, err := telemetry.Setup(ctx, cfg.Telemetry, telemetry.Options{Service: "berth", Instance: program.UniqueName(), Level: slog.LevelWarn, Out: c.stderr})
	if err != nil {
		return nil, err
	}
	// A user of an account reads its answers under an inbox of its own name.
	name := operator
	if u, err := url.Parse(cfg.Bus.URL); err == nil && u.User.Username() != "" {
		name = u.User.Username()
	}
	nc, err := bus.Connect(ctx, cfg.Bus, name, tel.Log)
	if err != nil {
		return nil, err
	}
	js, err := bus.JetStream(nc)
	if err != nil {
		nc.Close()
		return nil, err
	}
	return &client{nc: nc, js: js, log: tel.Log, tracer: tel.Tracer.Tracer("berth/cli"), close: func() {
		nc.Close()
		flush(ctx, tel)
	}}, nil
}

// flush exports the last spans.
func flush(ctx context.Context, tel *telemetry.Telemetry) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Second)
	defer cancel()
	if err := tel.Shutdown(ctx); err != nil {
		tel.Log.Warn("the last traces were not exported", "err", err)
	}
}

// explain adds the next step to errors of a server that has no such thing.
func explain(err error) error {
	switch {
	case errors.Is(err, jetstream.ErrNoStreamResponse), errors.Is(err, jetstream.ErrStreamNotFound), errors.Is(err, jetstream.ErrBucketNotFound):
		return fmt.Errorf("%w; this NATS server has no Berth yet: start a scheduler, or run `berth provision`", err)
	case errors.Is(err, jetstream.ErrJetStreamNotEnabled), errors.Is(err, nats.ErrNoResponders):
		return fmt.Errorf("%w; does this NATS server run with JetStream (-js)?", err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrTimeout):
		return fmt.Errorf("%w; where the log above tells of a permissions violation, connect as another user", err)
	}
	return err
}

// publish sends one CloudEvent into a stream, in a span of its own.
func (cl *client) publish(ctx context.Context, subject string, e events.Event) error {
	ctx, span := cl.tracer.Start(ctx, "publish "+subject, trace.WithSpanKind(trace.SpanKindProducer))
	defer span.End()
	msg, err := events.NewMessage(ctx, subject, e)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if _, err := cl.js.PublishMsg(ctx, msg, jetstream.WithMsgID(events.Token(e.Source(), e.ID()))); err != nil {
		return explain(fmt.Errorf("publish %s: %w", subject, err))
	}
	return nil
}

// stored is one message of a stream.
type stored struct {
	subject  string
	sequence uint64
	time     time.Time
	header   nats.Header
	data     []byte
	pending  uint64 // messages after this one when it was sent
}

// follow hands the messages of a stream over, in order and without a gap,
// until handle returns false or an error, or ctx ends.
func (cl *client) follow(ctx context.Context, stream string, cfg jetstream.OrderedConsumerConfig, handle func(stored) (bool, error)) error {
	c, err := cl.js.OrderedConsumer(ctx, stream, cfg)
	if err != nil {
		return explain(fmt.Errorf("read %s: %w", stream, err))
	}
	it, err := c.Messages(jetstream.PullMaxMessages(64))
	if err != nil {
		return explain(fmt.Errorf("read %s: %w", stream, err))
	}
	defer it.Stop()
	defer context.AfterFunc(ctx, it.Stop)()
	for {
		msg, err := it.Next()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			return fmt.Errorf("read %s: %w", stream, err)
		}
		meta, err := msg.Metadata()
		if err != nil {
			return fmt.Errorf("read %s: %w", stream, err)
		}
		more, err := handle(stored{msg.Subject(), meta.Sequence.Stream, meta.Timestamp, msg.Headers(), msg.Data(), meta.NumPending})
		if err != nil || !more {
			return err
		}
	}
}

// readAll hands over what a stream has now on some subjects.
func (cl *client) readAll(ctx context.Context, stream string, filters []string, handle func(stored) error) error {
	s, err := cl.js.Stream(ctx, stream)
	if err != nil {
		return explain(fmt.Errorf("read %s: %w", stream, err))
	}
	c, err := s.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{FilterSubjects: filters})
	if err != nil {
		return explain(fmt.Errorf("read %s: %w", stream, err))
	}
	for {
		batch, err := c.Fetch(256, jetstream.FetchMaxWait(time.Second))
		if err != nil {
			return fmt.Errorf("read %s: %w", stream, err)
		}
		n := 0
		for msg := range batch.Messages() {
			n++
			meta, err := msg.Metadata()
			if err != nil {
				return fmt.Errorf("read %s: %w", stream, err)
			}
			if err := handle(stored{msg.Subject(), meta.Sequence.Stream, meta.Timestamp, msg.Headers(), msg.Data(), meta.NumPending}); err != nil {
				return err
			}
			if meta.NumPending == 0 {
				return nil
			}
		}
		if err := batch.Error(); err != nil && !errors.Is(err, nats.ErrTimeout) {
			return fmt.Errorf("read %s: %w", stream, err)
		}
		if n == 0 {
			return nil
		}
	}
}

// records reads the values of a bucket's keys that begin with prefix, by key
// in alphabetical order.
func records[T any](ctx context.Context, cl *client, bucket, filter string, keep func(key string, v T) bool) ([]T, error) {
	b, err := cl.js.KeyValue(ctx, bucket)
	if err != nil {
		return nil, explain(fmt.Errorf("open bucket %s: %w", bucket, err))
	}
	var out []T
	err = kv.Each(ctx, b, filter, func(key string, v T) {
		if keep(key, v) {
			out = append(out, v)
		}
	})
	if err != nil {
		return nil, explain(err)
	}
	return out, nil
}

// printJSON writes v indented.
func (c *call) printJSON(v any) error {
	enc := json.NewEncoder(c.stdout)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// printLine writes v as one line of JSON.
func (c *call) printLine(v any) error {
	enc := json.NewEncoder(c.stdout)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// table writes rows in columns.
func table(w io.Writer, rows ...[]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, r := range rows {
		for i, cell := range r {
			r[i] = strings.Map(printable, cell)
		}
		fmt.Fprintln(t, strings.TrimRight(strings.Join(r, "\t"), "\t"))
	}
	return t.Flush()
}

// printable keeps what others wrote from moving the cursor of a terminal.
func printable(r rune) rune {
	if r < 0x20 || r >= 0x7f && r < 0xa0 {
		return ' '
	}
	return r
}

// ago is how long ago t was, in words short enough for a table.
func ago(t time.Time) string {
	if t.IsZero() {
		return "–"
	}
	return short(time.Since(t))
}

func short(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	default:
		return fmt.Sprintf("%dd", int(d.Hours()/24))
	}
}
