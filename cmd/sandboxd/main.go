// Command sandboxd is the reference self-hosted sandbox server: the HTTP API of
// api/sandboxd.yaml over isolated desktops on this host, in namespaces or microVMs.
//
// It exits 0 after SIGTERM or SIGINT, once the calls under way have ended or
// its grace is over; the sandboxes go on and the next sandboxd of the state
// directory takes them over. It exits 1 when it failed and 2 when its usage or
// environment is at fault. It knows no bus: a worker speaks to it.
package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"berth/internal/sandboxd"
)

// Exit codes.
const (
	exitFailed = 1
	exitUsage  = 2
)

func main() {
	sandboxd.TakeOver()
	os.Exit(run())
}

func run() int {
	cfg, faults, done := parse(os.Args[1:], os.Environ(), os.Stdout)
	if done {
		return 0
	}
	if len(faults) > 0 {
		complain(os.Stderr, faults)
		return exitUsage
	}
	log := logger(cfg)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	if err := serve(ctx, stop, cfg, log); err != nil {
		log.Error("stopped", "err", err)
		return exitFailed
	}
	log.Info("stopped; the sandboxes stay")
	return 0
}

func logger(cfg config) *slog.Logger {
	o := &slog.HandlerOptions{Level: cfg.level}
	if cfg.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(os.Stderr, o))
	}
	return slog.New(slog.NewTextHandler(os.Stderr, o))
}

// serve serves until ctx ends and then drains: health says so, calls under way
// get the grace to end. restore makes a second signal end the process at once.
func serve(ctx context.Context, restore func(), cfg config, log *slog.Logger) (err error) {
	s, err := sandboxd.New(ctx, cfg.options(log))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	l, err := net.Listen("tcp", cfg.Addr)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	scheme := "http"
	server := &http.Server{
		Handler: s.Handler(), ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 32 << 10,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	if cfg.TLSCert != "" {
		pair, err := tls.LoadX509KeyPair(cfg.TLSCert, cfg.TLSKey)
		if err != nil {
			return errors.Join(fmt.Errorf("load the TLS certificate: %w", err), l.Close())
		}
		l = tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}})
		scheme = "https"
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	log.Info("serving", "url", scheme+"://"+l.Addr().String(), "docs", "/docs")
	select {
	case err := <-served:
		return err
	case <-ctx.Done():
	}
	restore()
	log.Info("draining", "grace", cfg.Grace)
	s.Drain()
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), cfg.Grace)
	defer cancel()
	if server.Shutdown(grace) != nil { // calls that outlast the grace go on inside, and can be recalled from the next one
		return server.Close()
	}
	return nil
}

func complain(w io.Writer, faults []error) {
	what := "1 fault"
	if len(faults) != 1 {
		what = fmt.Sprintf("%d faults", len(faults))
	}
	fmt.Fprintf(w, "sandboxd: %s in flags and environment:\n", what)
	for _, f := range faults {
		fmt.Fprintf(w, "  %v\n", f)
	}
	fmt.Fprintln(w, "`sandboxd -h` lists what it reads.")
}
