package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"berth/internal/bus"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
)

// Times of a worker.
const (
	DefaultLeaseTTL = 10 * time.Second
	drainGrace      = 10 * time.Second // for what runs when the worker is told to stop
	lingerTime      = 5 * time.Second  // for publishing results after the lease has ended
	openPatience    = 30 * time.Second // of a lease holder that cannot open its provider, where another may
	alertTime       = 5 * time.Second  // for one publication of an alert, and between two
	alertTries      = 20
)

// Causes with which a tenure's or a command's context ends.
var (
	errStopping  = errors.New("the worker is stopping")
	errAbandoned = errors.New("the worker is gone") // nothing more may be said; in tests as if the process had been killed
	errBusClosed = fmt.Errorf("the NATS connection was closed: %w", errAbandoned)
	errKilled    = errors.New("the sandbox was killed")
	errCancelled = errors.New("the command was cancelled")
	errTimedOut  = errors.New("no answer in the time that the command may take")
)

// Server is one server of a worker's registry.
type Server struct {
	ID     string
	Config kv.ServerConfig // Capabilities are the provider's where empty
	// Open connects to the server. It is called only while the server's lease
	// is held, and again for each tenure; the tenure closes what it returns. Its
	// context lasts as long as the tenure.
	Open func(ctx context.Context) (providers.Provider, error)
}

// Options of a Worker.
type Options struct {
	JS       jetstream.JetStream
	Name     string // unique among all processes
	Servers  []Server
	Log      *slog.Logger
	Tracer   trace.Tracer  // nil: none
	Meter    metric.Meter  // nil: none
	LeaseTTL time.Duration // 0: DefaultLeaseTTL; at most kv.LeaseBucketTTL

	// PictureBytes bounds the pictures in hand at once; 0: DefaultPictureBytes.
	PictureBytes int64

	// Hook, in tests only, is called at each Point with the vm concerned.
	Hook func(p Point, vm string)
}

// ticket is a place in the order of turns; its identity is its address.
type ticket struct{ _ byte }

// Worker executes the commands of its servers.
type Worker struct {
	opts  Options
	inst  *instruments
	alive context.CancelCauseFunc // set by Run; ends everything at once

	crashed atomic.Bool // in tests only: a dead process closes nothing

	pictures *pictureRoom

	roster *roster
	wakes  map[string]chan struct{} // by server: its lease may be free

	mu      sync.Mutex
	results map[string]unpublished
}

// New checks the options and returns a Worker, or every fault at once.
func New(opts Options) (*Worker, error) {
	if opts.LeaseTTL == 0 {
		opts.LeaseTTL = DefaultLeaseTTL
	}
	if opts.PictureBytes == 0 {
		opts.PictureBytes = DefaultPictureBytes
	}
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	var errs []error
	if opts.JS == nil {
		errs = append(errs, errors.New("no JetStream"))
	}
	if opts.Name == "" {
		errs = append(errs, errors.New("a worker needs a name that no other process has"))
	}
	if opts.LeaseTTL < 0 || opts.LeaseTTL > kv.LeaseBucketTTL {
		errs = append(errs, fmt.Errorf("lease of %s: at most %s", opts.LeaseTTL, kv.LeaseBucketTTL))
	}
	if opts.PictureBytes < 0 {
		errs = append(errs, fmt.Errorf("room for pictures of %d bytes: not below 0", opts.PictureBytes))
	}
	if len(opts.Servers) == 0 {
		errs = append(errs, errors.New("no servers"))
	}
	opts.Servers = slices.Clone(opts.Servers)
	seen := map[string]bool{}
	for i := range opts.Servers {
		s := &opts.Servers[i]
		if err := s.check(); err != nil {
			errs = append(errs, err)
		}
		if seen[s.ID] {
			errs = append(errs, fmt.Errorf("server %s: given twice", s.ID))
		}
		seen[s.ID] = true
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("worker: %w", err)
	}
	inst, err := newInstruments(opts.Tracer, opts.Meter)
	if err != nil {
		return nil, fmt.Errorf("worker: %w", err)
	}
	w := &Worker{opts: opts, inst: inst, pictures: newPictureRoom(opts.PictureBytes), results: map[string]unpublished{}, wakes: map[string]chan struct{}{}}
	ids := make([]string, len(opts.Servers))
	for i, s := range opts.Servers {
		ids[i], w.wakes[s.ID] = s.ID, make(chan struct{}, 1)
	}
	// A peer that died is out of the way before its leases are.
	w.roster = newRoster(opts.Name, ids, opts.LeaseTTL*7/10)
	return w, nil
}

// check fills defaults and finds the first fault.
func (s *Server) check() error {
	if err := events.CheckServerID(s.ID); err != nil {
		return err
	}
	if s.Open == nil {
		return fmt.Errorf("server %s: no provider", s.ID)
	}
	if n := s.Config.MaxContainers; n < 1 || n > 1000 {
		return fmt.Errorf("server %s: maxContainers %d; want 1 to 1000", s.ID, n)
	}
	switch s.Config.Isolation {
	case "":
		s.Config.Isolation = kv.IsolationRole
	case kv.IsolationNone, kv.IsolationRole, kv.IsolationTenant:
	default:
		return fmt.Errorf("server %s: isolation %q; want none, role or tenant", s.ID, s.Config.Isolation)
	}
	if len(s.Config.Roles) == 0 {
		s.Config.Roles = []string{events.DefaultRole}
	}
	for _, r := range s.Config.Roles {
		if err := events.CheckID("role", r); err != nil {
			return fmt.Errorf("server %s: %w", s.ID, err)
		}
	}
	return nil
}

// Run serves until ctx ends and then drains: it stops pulling, lets what runs
// finish for up to 10 s, cancels the rest (which ends `unknown`), and releases
// its leases. It returns nil after a clean drain. It is to be called once.
func (w *Worker) Run(ctx context.Context) error {
	alive, end := context.WithCancelCause(context.WithoutCancel(ctx))
	defer end(errStopping)
	w.mu.Lock()
	w.alive = end
	w.mu.Unlock()
	handles, err := w.handles(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	if w.opts.JS.Conn().IsClosed() {
		return errBusClosed
	}
	closed := w.opts.JS.Conn().StatusChanged(nats.CLOSED)
	defer w.opts.JS.Conn().RemoveStatusListener(closed)
	stopWatching := make(chan struct{})
	defer close(stopWatching)
	go func() {
		select {
		case <-closed:
			end(errBusClosed)
		case <-stopWatching:
		}
	}()
	stopListening, err := w.listen()
	if err != nil {
		return fmt.Errorf("worker: %w", err)
	}
	defer stopListening()
	// Peers hear of the end before anything is released, so that they do not
	// leave it to this worker.
	var wg sync.WaitGroup
	serving, stopServing := context.WithCancel(alive)
	defer stopServing()
	wg.Go(func() {
		w.meet(ctx, alive, handles.leases)
		stopServing()
	})
	// Another order in each process, so that workers that start together do not
	// all begin with the same server.
	servers := slices.Clone(w.opts.Servers)
	rand.Shuffle(len(servers), func(i, j int) { servers[i], servers[j] = servers[j], servers[i] })
	if len(servers) == 1 || sleep(serving, listenTime) {
		for _, s := range servers {
			wg.Go(func() { w.serve(serving, alive, s, handles) })
		}
	}
	wg.Wait()
	if cause := context.Cause(alive); cause != nil {
		return cause
	}
	return nil
}

// serve holds one server's lease, tenure after tenure, until ctx ends.
func (w *Worker) serve(ctx, alive context.Context, s Server, h *handles) {
	log := w.opts.Log.With("server", s.ID)
	for attempt := 0; ctx.Err() == nil && alive.Err() == nil; attempt++ {
		if attempt > 0 {
			// Not at once: where this worker could not serve, another may.
			select {
			case <-ctx.Done():
				return
			case <-alive.Done():
				return
			case <-time.After(time.Second + rand.N(time.Second)):
			}
		}
		if err := w.tenure(ctx, alive, s, h, log); err != nil && ctx.Err() == nil && alive.Err() == nil {
			log.Error("tenure ended", "err", err)
		}
	}
}

// tenure waits for the lease and serves while it lasts or until ctx ends.
func (w *Worker) tenure(ctx, alive context.Context, s Server, h *handles, log *slog.Logger) error {
	base, cancel := context.WithCancelCause(alive)
	defer cancel(errStopping)
	stop := context.AfterFunc(ctx, func() { cancel(errStopping) })
	terms := kv.Terms{Key: leaseKey(s.ID), Holder: w.opts.Name, TTL: w.opts.LeaseTTL, Wake: w.wakes[s.ID],
		Turn: func(ctx context.Context) func() { return w.roster.turn(ctx, s.ID) }}
	lease, held, err := kv.Acquire(base, h.leases, terms, log)
	if err != nil {
		return fmt.Errorf("acquire lease: %w", err)
	}
	t := newTenure(w, s, h, lease, log)
	w.roster.take(&hold{server: s.ID, give: t.give, load: t.commands.load})
	handed := false
	if stop() {
		handed, err = t.run(ctx, held)
	}
	if err != nil && !handed && ctx.Err() == nil && alive.Err() == nil && !errors.Is(context.Cause(held), kv.ErrLeaseLost) {
		w.roster.fail(s.ID)
	}
	cancel(errStopping)
	release, done := context.WithTimeout(alive, lingerTime)
	defer done()
	if rerr := lease.Release(release); rerr != nil && err == nil && alive.Err() == nil {
		err = rerr
	}
	w.roster.drop(s.ID, handed)
	return err
}

// handles are the streams and buckets that every tenure uses.
type handles struct {
	results    jetstream.Stream
	placements jetstream.KeyValue
	leases     jetstream.KeyValue
	heartbeats jetstream.KeyValue
	pictures   jetstream.ObjectStore
}

// handles waits for the streams and buckets.
func (w *Worker) handles(ctx context.Context) (*handles, error) {
	js := w.opts.JS
	var h handles
	open := func() (err error) {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		if h.results, err = js.Stream(ctx, bus.Results); err != nil {
			return fmt.Errorf("stream %s: %w", bus.Results, err)
		}
		for name, b := range map[string]*jetstream.KeyValue{
			kv.BucketPlacements: &h.placements, kv.BucketLeases: &h.leases, kv.BucketHeartbeats: &h.heartbeats,
		} {
			if *b, err = js.KeyValue(ctx, name); err != nil {
				return fmt.Errorf("bucket %s: %w", name, err)
			}
		}
		if h.pictures, err = js.ObjectStore(ctx, kv.BucketFrames); err != nil {
			return fmt.Errorf("object store %s: %w", kv.BucketFrames, err)
		}
		return nil
	}
	for attempt := 0; ; attempt++ {
		err := open()
		if err == nil {
			return &h, nil
		}
		if attempt%20 == 0 {
			w.opts.Log.Warn("waiting for streams and buckets", "err", err)
		}
		if perr := bus.Pause(ctx, attempt); perr != nil {
			return nil, fmt.Errorf("worker: %w", err)
		}
	}
}
