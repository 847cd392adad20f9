package demoapp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"
)

// stopGrace is how long a stopping server waits for open requests.
const stopGrace = 2 * time.Second

// Serve serves Handler on addr until ctx ends. An empty addr means any free
// port of 127.0.0.1; an addr that is not on loopback is refused, since the
// application has no access control. It returns once the listener is open:
// url is the base without a trailing slash, and wait blocks until the server
// has stopped and says why, nil after ctx ended.
func Serve(ctx context.Context, addr string) (url string, wait func() error, err error) {
	if addr == "" {
		addr = "127.0.0.1:0"
	}
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return "", nil, fmt.Errorf("demo app address: %w", err)
	}
	if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
		return "", nil, fmt.Errorf("demo app address %q is not on loopback; use 127.0.0.1:PORT", addr)
	}
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return "", nil, fmt.Errorf("demo app: %w", err)
	}
	srv := &http.Server{
		Handler:           Handler(),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       30 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       time.Minute,
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	stopped := make(chan struct{})
	var result error
	go func() {
		defer close(stopped)
		select {
		case result = <-served: // the listener broke
			_ = srv.Close() // ends what is open; why it broke is the error that counts
			return
		case <-ctx.Done():
		}
		// The caller's context has ended, so the grace period has its own.
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGrace)
		defer cancel()
		if srv.Shutdown(grace) != nil {
			_ = srv.Close() // a browser that keeps a request open does not hold us up
		}
		if err := <-served; !errors.Is(err, http.ErrServerClosed) {
			result = err
		}
	}()
	wait = func() error {
		<-stopped
		return result
	}
	return "http://" + ln.Addr().String(), wait, nil
}
