// Command e2bstandin stands for E2B in tests: it speaks the part of E2B's REST
// API that its clients use to make, list, pause and end sandboxes, and each
// sandbox is real processes in namespaces of their own, in which an envd
// (process and filesystem over Connect RPC, /files, /health) starts what it is
// told to. X11 programs run there as they do in E2B's desktop template, so that
// a click is a click.
//
// It is as strict as the API's description: a header that is missing, a field
// that the description does not have, a state in which a call cannot be are
// refused as E2B refuses them. What it does not have (templates, snapshots,
// volumes, metrics, logs, watches) answers 404 or unimplemented. The official
// npm clients run unchanged against it; see npm_test.go of package e2b.
//
// When it serves it prints its address on a line of its own.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"berth/internal/sandboxd/jail"
)

func main() {
	jail.Main(func(l net.Listener, raw json.RawMessage) error {
		var config envdConfig
		if err := json.Unmarshal(raw, &config); err != nil {
			return fmt.Errorf("read envd's configuration: %w", err)
		}
		return serveEnvd(l, config)
	})
	var opts options
	flag.StringVar(&opts.StateDir, "state", "", "directory for the sandboxes' sockets and logs; a short path")
	flag.StringVar(&opts.Addr, "addr", "127.0.0.1:0", "address to serve the API and the sandboxes on")
	flag.IntVar(&opts.Max, "max", 100, "sandboxes that run at a time")
	flag.IntVar(&opts.Creates, "creates", 1000, "creates a second")
	flag.DurationVar(&opts.MaxLife, "life", 24*time.Hour, "longest time-out")
	flag.Parse()
	opts.APIKey = os.Getenv("E2B_API_KEY")
	if err := run(opts); err != nil {
		fmt.Fprintln(os.Stderr, "e2bstandin:", err)
		os.Exit(1)
	}
}

type options struct {
	StateDir, Addr, APIKey string
	Max, Creates           int
	MaxLife                time.Duration
}

// run serves until SIGTERM or SIGINT, and ends every sandbox.
func run(opts options) error {
	if opts.StateDir == "" || opts.APIKey == "" || flag.NArg() > 0 {
		return errors.New("want --state DIR and a key in E2B_API_KEY")
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	probe, err := jail.ProbeHost(opts.StateDir, nil)
	if err != nil {
		return err
	}
	if probe.Weak.Namespaces {
		return fmt.Errorf("sandboxes need namespaces of their own: %v", probe.Denied)
	}
	l, err := net.Listen("tcp", opts.Addr)
	if err != nil {
		return err
	}
	s := newServer(opts, probe, log)
	server := &http.Server{Handler: s, ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn)}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	fmt.Println("http://" + l.Addr().String())
	select {
	case err = <-served:
	case <-ctx.Done():
		err = server.Close()
	}
	return errors.Join(err, s.close())
}
