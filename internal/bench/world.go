package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/natsd"
)

// world is a NATS server of its own on loopback TCP, with Berth's streams.
type world struct {
	srv   *natsd.Server
	dir   string
	conns []*nats.Conn
}

// newWorld starts one; sync has every acknowledged write on the disk first.
func newWorld(ctx context.Context, sync bool) (*world, error) {
	dir, err := os.MkdirTemp("", "berth-bench-")
	if err != nil {
		return nil, err
	}
	srv, err := natsd.Start(natsd.Options{StoreDir: dir, Addr: "127.0.0.1:0", Sync: sync})
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	w := &world{srv: srv, dir: dir}
	js, err := w.connect(ctx, "setup")
	if err == nil {
		err = bus.Ensure(ctx, js, 1)
	}
	if err != nil {
		return nil, errors.Join(err, w.close())
	}
	return w, nil
}

// connect opens a connection of its own.
func (w *world) connect(ctx context.Context, name string) (jetstream.JetStream, error) {
	nc, err := bus.Connect(ctx, bus.Config{URL: w.srv.URL()}, name, slog.New(slog.DiscardHandler))
	if err != nil {
		return nil, err
	}
	w.conns = append(w.conns, nc)
	return bus.JetStream(nc)
}

func (w *world) close() error {
	for _, nc := range w.conns {
		nc.Close()
	}
	w.srv.Shutdown()
	return os.RemoveAll(w.dir)
}

// mode names the world in a figure.
func mode(sync bool) string {
	if sync {
		return "sync=always"
	}
	return "sync=default"
}

// collect receives n messages' tokens at the given place of their subject and
// calls each with the token, in stream order.
func collect(ctx context.Context, js jetstream.JetStream, stream, filter string, n int, each func(subject string)) error {
	c, err := js.OrderedConsumer(ctx, stream, jetstream.OrderedConsumerConfig{FilterSubjects: []string{filter}, DeliverPolicy: jetstream.DeliverNewPolicy})
	if err != nil {
		return err
	}
	done := make(chan struct{})
	cc, err := c.Consume(func(msg jetstream.Msg) {
		each(msg.Subject())
		if n--; n == 0 {
			close(done)
		}
	})
	if err != nil {
		return err
	}
	defer cc.Stop()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%d messages of %s missing: %w", n, filter, ctx.Err())
	}
}
