// Package devstack runs everything in one process: an embedded NATS server
// with JetStream, a scheduler, a worker with Playwright servers, with a server
// of desktops, or with both, a loop-runner and the demo application. It is what `berth dev` serves and what `berth run`
// starts inside itself; the parts meet on the bus, as separate processes do.
//
// Browsers and desktops are ephemeral: they end with this process, however it ends. With a
// data directory of the caller's the streams outlive it, and what was left
// running is then reported as lost by the next stack that has the directory.
package devstack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"berth/internal/bus"
	"berth/internal/demoapp"
	"berth/internal/kv"
	"berth/internal/looprunner"
	"berth/internal/natsd"
	"berth/internal/program"
	"berth/internal/providers"
	"berth/internal/registry"
	"berth/internal/scheduler"
	"berth/internal/telemetry"
	"berth/internal/thinkers"
	"berth/internal/worker"
)

// readyPatience is how long the first server may take to become healthy; a
// machine that installs Playwright's driver first needs a while.
const readyPatience = 2 * time.Minute

// Options of a stack.
type Options struct {
	NATSAddr  string // host:port to listen on; port 0: any; "": in this process only
	HTTPAddr  string // of the demo application; "": any free port of 127.0.0.1
	DataDir   string // kept; "": a temporary one, removed at the end
	Servers   int    // Playwright servers
	Desktop   bool   // a server of desktops, desktop-01
	Weaker    bool   // desktops also where this machine cannot isolate or limit them
	Prices    looprunner.Prices
	Telemetry *telemetry.Telemetry
}

// Stack is a running stack.
type Stack struct {
	NATSURL string // "" where it does not listen
	DemoURL string
	Servers []string
	NC      *nats.Conn
	JS      jetstream.JetStream
}

// Run starts a stack, calls use once a server is healthy, and stops everything
// in order when use returns, a part fails, or ctx ends; then use's context
// ends. It returns use's error, or the part's.
func Run(ctx context.Context, o Options, use func(context.Context, *Stack) error) (err error) {
	log := o.Telemetry.Log
	if o.DataDir == "" {
		dir, err := os.MkdirTemp("", "berth-")
		if err != nil {
			return fmt.Errorf("data directory: %w", err)
		}
		defer func() {
			if e := os.RemoveAll(dir); e != nil {
				log.Warn("data directory not removed", "dir", dir, "err", e)
			}
		}()
		o.DataDir = dir
	}
	srv, err := natsd.Start(natsd.Options{StoreDir: filepath.Join(o.DataDir, "nats"), Addr: o.NATSAddr})
	if err != nil {
		return err
	}
	defer srv.Shutdown()

	// The parts outlive ctx until use has returned.
	parts, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	group, parts := errgroup.WithContext(parts)
	demo, wait, err := demoapp.Serve(parts, o.HTTPAddr)
	if err != nil {
		return err
	}
	group.Go(wait)
	s := &Stack{NATSURL: srv.URL(), DemoURL: demo}
	if err := s.start(parts, group, o, srv); err != nil {
		stop()
		return errors.Join(err, group.Wait())
	}
	defer s.NC.Close()

	using, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	failed := context.AfterFunc(parts, func() { cancel(errPart) })
	defer failed()
	err = s.ready(using)
	if err == nil {
		err = use(using, s)
	}
	failed()
	stop()
	if e := group.Wait(); e != nil {
		return e
	}
	return err
}

var errPart = errors.New("a part of the stack has failed")

// start connects every role by a connection of its own and runs it.
func (s *Stack) start(ctx context.Context, group *errgroup.Group, o Options, srv *natsd.Server) error {
	connect := func(name string) (*program.Process, error) {
		log := o.Telemetry.Log.With("program", name)
		nc, err := bus.Connect(ctx, bus.Config{}, name, log, srv.InProcess())
		if err != nil {
			return nil, err
		}
		js, err := bus.JetStream(nc)
		if err != nil {
			return nil, err
		}
		scope := "berth/" + name
		return &program.Process{Name: program.UniqueName(), NC: nc, JS: js, Log: log,
			Tracer: o.Telemetry.Tracer.Tracer(scope), Meter: o.Telemetry.Meter.Meter(scope)}, nil
	}
	own, err := connect("dev")
	if err != nil {
		return err
	}
	s.NC, s.JS = own.NC, own.JS
	if err := bus.Await(ctx, s.JS, 1, own.Log); err != nil {
		return err
	}
	var entries []registry.Server
	for i := range o.Servers {
		entries = append(entries, registry.Local(fmt.Sprintf("playwright-%02d", i+1)))
	}
	if o.Desktop {
		entry, err := serveDesktops(ctx, group, o)
		if err != nil {
			return err
		}
		entries = append(entries, entry)
	}
	for _, e := range entries {
		s.Servers = append(s.Servers, e.ID)
	}
	for _, role := range []struct {
		name string
		run  func(context.Context, *program.Process) error
	}{
		{"scheduler", runScheduler},
		{"worker", func(ctx context.Context, p *program.Process) error { return runWorker(ctx, p, o, entries) }},
		{"loop-runner", func(ctx context.Context, p *program.Process) error { return runLoopRunner(ctx, p, o.Prices) }},
	} {
		p, err := connect(role.name)
		if err != nil {
			return err
		}
		group.Go(func() error {
			defer p.NC.Close()
			if err := role.run(ctx, p); err != nil && ctx.Err() == nil {
				return fmt.Errorf("%s: %w", role.name, err)
			}
			return nil
		})
	}
	return nil
}

func runScheduler(ctx context.Context, p *program.Process) error {
	r, err := scheduler.New(scheduler.Options{JS: p.JS, Name: p.Name, Log: p.Log, Tracer: p.Tracer, Meter: p.Meter})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

func runLoopRunner(ctx context.Context, p *program.Process, prices looprunner.Prices) error {
	r, err := looprunner.New(looprunner.Options{NC: p.NC, JS: p.JS, Name: p.Name, Models: thinkers.All(), Prices: prices, Log: p.Log, Tracer: p.Tracer, Meter: p.Meter})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

// runWorker serves the servers. One that cannot be opened, for want of a
// Chromium perhaps, ends the stack with the reason instead of having it not
// become ready.
func runWorker(ctx context.Context, p *program.Process, o Options, entries []registry.Server) error {
	deps := registry.Deps{StateDir: filepath.Join(o.DataDir, "playwright"), Spares: -1, Ephemeral: true, Log: p.Log}
	servers := make([]worker.Server, len(entries))
	broken := make(chan error, 1)
	for i, entry := range entries {
		servers[i] = worker.Server{ID: entry.ID, Config: entry.Config, Open: func(ctx context.Context) (providers.Provider, error) {
			provider, err := entry.Open(ctx, deps)
			if err != nil && ctx.Err() == nil {
				select {
				case broken <- err:
				default:
				}
			}
			return provider, err
		}}
	}
	w, err := worker.New(worker.Options{JS: p.JS, Name: p.Name, Servers: servers, Log: p.Log, Tracer: p.Tracer, Meter: p.Meter})
	if err != nil {
		return err
	}
	// Nobody else could serve this machine's browsers: what a worker in a fleet
	// would try again ends the stack.
	running, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- w.Run(running) }()
	select {
	case err := <-broken:
		stop()
		return errors.Join(err, <-ended)
	case err := <-ended:
		return err
	}
}

// ready waits until every server is healthy in SERVERS.
func (s *Stack) ready(ctx context.Context) error {
	waiting, cancel := context.WithTimeout(ctx, readyPatience)
	defer cancel()
	bucket, err := s.JS.KeyValue(ctx, kv.BucketServers)
	if err != nil {
		return fmt.Errorf("open bucket %s: %w", kv.BucketServers, err)
	}
	for {
		view, healthy := kv.ServerView{}, 0
		for _, id := range s.Servers {
			v, _, err := kv.Get[kv.ServerView](waiting, bucket, id)
			if err == nil && v.Health == kv.Healthy {
				healthy++
			} else {
				view = v
			}
		}
		if healthy == len(s.Servers) {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-waiting.Done():
			return fmt.Errorf("no healthy server after %s: %s is %q: %s", readyPatience, view.ID, view.Health, view.Reason)
		case <-time.After(50 * time.Millisecond):
		}
	}
}
