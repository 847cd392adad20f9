package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/natsd"
	"berth/internal/providers"
	"berth/internal/providers/providertest"
	"berth/internal/virtualtime"
)

// server1 is the server of most tests.
const server1 = "fake-01"

// world is a bus with the tests in the scheduler's part. Its oracle is the
// Fakes' own record and the streams.
type world struct {
	testing.TB
	dir        string
	srvMu      sync.Mutex
	srv        *natsd.Server // nil in an outage
	log        *slog.Logger
	nc         *nats.Conn
	js         jetstream.JetStream
	placements jetstream.KeyValue
	results    jetstream.Stream
	fakes      map[string]*providertest.Fake
	workers    []*process
	fence      uint64

	reconnected bool         // some connection was broken in this world
	stolen      atomic.Int64 // messages that another client took from a consumer
}

// bubble runs fn in virtual time with an own bus, and ends what fn leaves.
func bubble(t *testing.T, fn func(t *testing.T, w *world)) {
	t.Helper()
	virtualtime.Test(t, func(t *testing.T) {
		w := newWorld(t, t.TempDir())
		defer w.close()
		fn(t, w)
	})
}

func newWorld(t testing.TB, dir string) *world {
	t.Helper()
	srv, err := natsd.Start(natsd.Options{StoreDir: dir})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{TB: t, dir: dir, srv: srv, log: slog.New(slog.DiscardHandler), fakes: map[string]*providertest.Fake{}}
	if os.Getenv("WORKER_LOG") != "" {
		w.log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	w.connect()
	if err := bus.Ensure(context.Background(), w.js, 1); err != nil {
		t.Fatal(err)
	}
	if w.placements, err = w.js.KeyValue(context.Background(), kv.BucketPlacements); err != nil {
		t.Fatal(err)
	}
	if w.results, err = w.js.Stream(context.Background(), bus.Results); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *world) connect() {
	w.nc, w.js, _ = w.dial("test")
}

// dial opens a connection that finds the bus again after an outage.
func (w *world) dial(name string) (*nats.Conn, jetstream.JetStream, *gate) {
	g := newGate(w)
	nc, err := bus.Connect(context.Background(), bus.Config{}, name, w.log, nats.InProcessServer(g))
	if err != nil {
		w.Fatal(err)
	}
	js, err := bus.JetStream(nc)
	if err != nil {
		w.Fatal(err)
	}
	return nc, js, g
}

func (w *world) close() {
	for _, p := range w.workers {
		p.crash()
		_ = p.wait() // a crash is no clean end
	}
	for _, f := range w.fakes {
		f.Shutdown()
	}
	w.nc.Close()
	w.srv.Shutdown()
	synctest.Wait()
	w.leaks()
	if w.reconnected {
		// nats.go keeps timers of a reconnect's flush in a global sync.Pool, and
		// one of another bubble is fatal there. Two collections empty the pool.
		runtime.GC()
		runtime.GC()
	}
}

// leaks names goroutines that the world has left; synctest would only say that
// there are some.
func (w *world) leaks() {
	buf := make([]byte, 1<<20)
	var bubble string
	_, head, ok := strings.Cut(string(buf[:runtime.Stack(buf, false)]), "synctest bubble ")
	if !ok {
		return
	}
	bubble, _, _ = strings.Cut(head, "]")
	for wait := time.Second; wait < time.Hour; wait *= 4 {
		var left []string
		for _, g := range strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")[1:] {
			own := strings.Contains(g, "internal/synctest.Run(") || strings.Contains(g, "testing/synctest.testingSynctestTest(")
			if !own && strings.Contains(g, "synctest bubble "+bubble+"]") {
				left = append(left, g)
			}
		}
		if len(left) == 0 {
			return
		}
		if wait > 10*time.Minute {
			w.Errorf("%d goroutines are left:\n%s", len(left), strings.Join(left, "\n\n"))
		}
		time.Sleep(wait)
	}
}

// fake returns the fake server of an id, made at its first use.
func (w *world) fake(id string) *providertest.Fake {
	return w.fakeWith(id, providertest.FakeOptions{})
}

func (w *world) fakeWith(id string, opts providertest.FakeOptions) *providertest.Fake {
	if f := w.fakes[id]; f != nil {
		return f
	}
	opts.ServerID = id
	w.fakes[id] = providertest.NewFake(opts)
	return w.fakes[id]
}

// process is one worker process.
type process struct {
	w      *world
	nc     *nats.Conn
	gate   *gate
	worker *Worker
	cancel context.CancelFunc
	done   chan error
	once   sync.Once
	err    error
}

// start runs a worker for the servers (default: server1).
func (w *world) start(name string, servers ...string) *process {
	return w.startWith(Options{Name: name}, servers...)
}

func (w *world) startWith(opts Options, servers ...string) *process {
	if len(servers) == 0 && len(opts.Servers) == 0 {
		servers = []string{server1}
	}
	nc, js, g := w.dial(opts.Name)
	opts.JS = js
	if opts.Log == nil {
		opts.Log = w.log.With("w", opts.Name)
	}
	for _, id := range servers {
		f := w.fake(id)
		opts.Servers = append(opts.Servers, Server{ID: id, Config: kv.ServerConfig{MaxContainers: 10},
			Open: func(context.Context) (providers.Provider, error) { return f.Provider(), nil }})
	}
	wk, err := New(opts)
	if err != nil {
		w.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	p := &process{w: w, nc: nc, gate: g, worker: wk, cancel: cancel, done: make(chan error, 1)}
	go func() { p.done <- wk.Run(ctx) }()
	w.workers = append(w.workers, p)
	return p
}

// crash ends the process as kill -9 does: nothing more is published,
// acknowledged or released. It does not wait, so that hooks can call it.
func (p *process) crash() {
	p.worker.crashed.Store(true)
	p.nc.Close()
	p.worker.mu.Lock()
	alive := p.worker.alive
	p.worker.mu.Unlock()
	if alive != nil {
		alive(errAbandoned)
	}
	p.cancel()
}

// wait returns what Run has returned.
func (p *process) wait() error {
	p.once.Do(func() { p.err = <-p.done })
	p.nc.Close()
	return p.err
}

// drain stops the process as SIGTERM does.
func (p *process) drain() {
	p.w.Helper()
	p.cancel()
	if err := p.wait(); err != nil {
		p.w.Errorf("drain: %v", err)
	}
}

// place reserves a vm on a server, as the scheduler does before it publishes
// the create; the fence is new.
func (w *world) place(server, vm string) uint64 {
	w.Helper()
	w.fence++
	fence := w.fence
	w.edit(server, func(s *kv.Server) {
		if s.Allocs == nil {
			s.Allocs = map[string]kv.Alloc{}
		}
		s.Allocs[vm] = kv.Alloc{Attempt: fmt.Sprint(fence), Fence: fence, Role: "default", Tenant: "acme", Since: time.Now()}
	})
	w.editVM(vm, func(p *kv.Placement) {
		*p = kv.Placement{VMID: vm, ServerID: server, Tenant: "acme", Role: "default", Phase: kv.Starting, Fence: fence, CreatedAt: time.Now()}
	})
	return fence
}

// free drops a vm's allocation, as the scheduler does when it is gone.
func (w *world) free(server, vm string) {
	w.Helper()
	w.edit(server, func(s *kv.Server) { delete(s.Allocs, vm) })
}

func (w *world) edit(server string, fn func(*kv.Server)) {
	w.Helper()
	if _, _, err := kv.Update(context.Background(), w.placements, kv.ServerKey(server), func(s *kv.Server, _ uint64) error { fn(s); return nil }); err != nil {
		w.Fatal(err)
	}
}

func (w *world) editVM(vm string, fn func(*kv.Placement)) {
	w.Helper()
	if _, _, err := kv.Update(context.Background(), w.placements, kv.VMKey(vm), func(p *kv.Placement, _ uint64) error { fn(p); return nil }); err != nil {
		w.Fatal(err)
	}
}

func (w *world) record(server string) kv.Server {
	w.Helper()
	s, _, err := kv.Get[kv.Server](context.Background(), w.placements, kv.ServerKey(server))
	if err != nil && !errors.Is(err, kv.ErrNotFound) {
		w.Fatal(err)
	}
	return s
}

// sent names a published command.
type sent struct {
	server, vm, token string
	seq               uint64
}

// publish sends a command of a service outside with some id.
func (w *world) publish(vm string, verb events.Verb, id string, data any) sent {
	w.Helper()
	return w.publishTo(server1, vm, verb, "/test", id, data)
}

func (w *world) publishTo(server, vm string, verb events.Verb, source, id string, data any) sent {
	w.Helper()
	e, err := events.New(events.CommandType(verb), source, id, data)
	if err != nil {
		w.Fatal(err)
	}
	return w.publishEvent(server, vm, verb, e)
}

func (w *world) publishEvent(server, vm string, verb events.Verb, e events.Event) sent {
	w.Helper()
	msg, err := events.NewMessage(context.Background(), events.CommandSubject(server, vm, verb), e)
	if err != nil {
		w.Fatal(err)
	}
	ack, err := w.js.PublishMsg(context.Background(), msg)
	if err != nil {
		w.Fatal(err)
	}
	return sent{server, vm, events.Token(e.Source(), e.ID()), ack.Sequence}
}

// create publishes the create of a placement as the scheduler does.
func (w *world) create(server, vm string, fence uint64) sent {
	w.Helper()
	return w.publishTo(server, vm, events.Create, events.SourceScheduler, events.CreateCommandID(vm, fence), events.CommandCreate{
		Fence: fence, Tenant: "acme", Role: "default", Display: computer.DefaultDisplay, TTLSeconds: 3600,
		Request: events.Request{Source: "/service", ID: "r-" + vm},
	})
}

// ready places and creates a vm on server1 and waits until it is ready.
func (w *world) ready(vm string) uint64 {
	w.Helper()
	fence := w.place(server1, vm)
	if f := w.await(w.create(server1, vm, fence)); f.Outcome != computer.OK {
		w.Fatalf("create %s: %+v", vm, f)
	}
	w.editVM(vm, func(p *kv.Placement) { p.Phase = kv.Ready })
	return fence
}

// patience is how long a test waits for a result, in virtual time.
const patience = 10 * time.Minute

// await returns a command's finished result.
func (w *world) await(c sent) events.Finished {
	w.Helper()
	for start := time.Now(); time.Since(start) < patience; time.Sleep(20*time.Millisecond + time.Since(start)/10) {
		if f, ok := w.finished(c); ok {
			return f
		}
	}
	w.Fatalf("no result of %+v", c)
	return events.Finished{}
}

func (w *world) finished(c sent) (events.Finished, bool) {
	w.Helper()
	e, raw, err := bus.Last(context.Background(), w.results, events.ResultSubject(c.server, c.vm, c.token))
	if err != nil {
		w.Fatal(err)
	}
	var f events.Finished
	if raw == nil || e.Type() != events.TypeFinished {
		return f, false
	}
	if err := events.DecodeStrict(e, &f); err != nil {
		w.Fatal(err)
	}
	return f, true
}

// history lists the types of all messages on a command's result subject.
func (w *world) history(c sent) []string {
	w.Helper()
	var out []string
	for seq := uint64(1); ; seq++ {
		raw, err := w.results.GetMsg(context.Background(), seq, jetstream.WithGetMsgSubject(events.ResultSubject(c.server, c.vm, c.token)))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return out
		}
		if err != nil {
			w.Fatal(err)
		}
		seq = raw.Sequence
		e, err := events.Decode(raw.Header, raw.Data)
		if err != nil {
			w.Fatal(err)
		}
		out = append(out, strings.TrimSuffix(strings.TrimPrefix(e.Type(), "berth.command."), ".v1"))
	}
}

// once fails unless the command was finished exactly once, after one claim at
// most.
func (w *world) once(c sent) {
	w.Helper()
	h := fmt.Sprint(w.history(c))
	if h != "[started finished]" && h != "[finished]" {
		w.Errorf("result subject of %s/%s: %s", c.vm, c.token, h)
	}
}

// beat returns a server's last heartbeat.
func (w *world) beat(server string) (kv.Heartbeat, bool) {
	w.Helper()
	b, err := w.js.KeyValue(context.Background(), kv.BucketHeartbeats)
	if err != nil {
		w.Fatal(err)
	}
	h, _, err := kv.Get[kv.Heartbeat](context.Background(), b, server)
	if errors.Is(err, kv.ErrNotFound) {
		return h, false
	}
	if err != nil {
		w.Fatal(err)
	}
	return h, true
}

// holds waits until the named worker holds server1's lease.
func (w *world) holds(name string) {
	w.Helper()
	w.until(name+" holds the lease", 30*time.Second, func() bool {
		h, ok := w.beat(server1)
		return ok && h.Worker == name
	})
}

// until waits for a condition, in virtual time.
func (w *world) until(what string, limit time.Duration, cond func() bool) time.Duration {
	w.Helper()
	start := time.Now()
	for !cond() {
		if time.Since(start) > limit {
			w.Fatalf("not within %s: %s", limit, what)
		}
		time.Sleep(20*time.Millisecond + time.Since(start)/20)
	}
	return time.Since(start)
}

// act is the data of an act.
func act(actions ...map[string]any) map[string]any { return map[string]any{"actions": actions} }

func click(x, y int) map[string]any { return map[string]any{"type": "click", "x": x, "y": y} }

func wait(seconds float64) map[string]any {
	return map[string]any{"type": "wait", "seconds": seconds}
}

// keys lists the idempotency keys of the effects in a vm, in order, one per batch.
func keys(f *providertest.Fake, vm string) []string {
	var out []string
	for _, e := range f.EffectsOf(vm) {
		if len(out) == 0 || out[len(out)-1] != e.Key {
			out = append(out, e.Key)
		}
	}
	return out
}

func mustJSON(v any) string {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(raw)
}
