package scheduler_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/natsd"
	"berth/internal/scheduler"
)

// bundle is one virtual-time world: a server, a client, and what was started.
type bundle struct {
	t      *testing.T
	srv    atomic.Pointer[natsd.Server]
	dir    string
	js     jetstream.JetStream
	nc     *nats.Conn
	places jetstream.KeyValue
	beats  jetstream.KeyValue
	heard  []heard // of EVENTS, by sequence
	wg     sync.WaitGroup
}

// options has every scheduler of these tests run under the grants that
// deploy/nats gives it; everybody else may do everything.
func options(dir string) natsd.Options {
	return natsd.Options{StoreDir: dir, Grants: "../../deploy/nats/dev.conf", Superuser: "test"}
}

// setup must be called inside a synctest bubble.
func setup(t *testing.T) *bundle {
	t.Helper()
	dir := t.TempDir()
	srv, err := natsd.Start(options(dir))
	if err != nil {
		t.Fatal(err)
	}
	b := &bundle{t: t, dir: dir}
	b.srv.Store(srv)
	t.Cleanup(b.close)
	b.nc, b.js = b.connect("test", "test")
	if err := bus.Ensure(t.Context(), b.js, 1); err != nil {
		t.Fatal(err)
	}
	for name, kvp := range map[string]*jetstream.KeyValue{kv.BucketPlacements: &b.places, kv.BucketHeartbeats: &b.beats} {
		if *kvp, err = b.js.KeyValue(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	return b
}

// close ends the bubble's world: the test's context has ended, and with it
// every scheduler and worker.
func (b *bundle) close() {
	b.wg.Wait()
	b.nc.Close()
	b.srv.Load().Shutdown()
}

func (b *bundle) connect(user, name string) (*nats.Conn, jetstream.JetStream) {
	b.t.Helper()
	return b.connectBy(b, user, name)
}

// connectBy connects by a way of the caller's.
func (b *bundle) connectBy(way nats.InProcessConnProvider, user, name string) (*nats.Conn, jetstream.JetStream) {
	b.t.Helper()
	log := slog.New(&refusals{b.t})
	nc, err := bus.Connect(b.t.Context(), bus.Config{User: user, Password: user}, user, log.With("name", name), nats.InProcessServer(way))
	if err != nil {
		b.t.Fatal(err)
	}
	js, err := bus.JetStream(nc)
	if err != nil {
		b.t.Fatal(err)
	}
	return nc, js
}

// refusals is a log that fails the test where a grant is missing.
type refusals struct{ t *testing.T }

func (r *refusals) Enabled(context.Context, slog.Level) bool { return true }
func (r *refusals) WithAttrs([]slog.Attr) slog.Handler       { return r }
func (r *refusals) WithGroup(string) slog.Handler            { return r }
func (r *refusals) Handle(_ context.Context, rec slog.Record) error {
	rec.Attrs(func(a slog.Attr) bool {
		if strings.Contains(a.Value.String(), "ermissions Violation") {
			r.t.Errorf("%s: %s", rec.Message, a.Value)
		}
		return true
	})
	return nil
}

// restart has the NATS server away for d. Connections find the new one.
func (b *bundle) restart(d time.Duration) {
	b.t.Helper()
	b.srv.Load().Shutdown()
	time.Sleep(d)
	srv, err := natsd.Start(options(b.dir))
	if err != nil {
		b.t.Fatal(err)
	}
	b.srv.Store(srv)
	b.until(20*time.Second, "client reconnected", func() bool { return b.nc.IsConnected() })
}

// InProcessConn hands out connections to whichever server runs now.
func (b *bundle) InProcessConn() (net.Conn, error) { return b.srv.Load().InProcessConn() }

// scheduler runs a scheduler on a connection of its own. stop ends it cleanly;
// crash cuts it off from the bus first.
func (b *bundle) scheduler(name string) (stop, crash func()) {
	b.t.Helper()
	return b.schedulerBy(b, name)
}

// schedulerBy runs a scheduler by a way of the caller's.
func (b *bundle) schedulerBy(way nats.InProcessConnProvider, name string) (stop, crash func()) {
	b.t.Helper()
	nc, js := b.connectBy(way, "scheduler", name)
	s, err := scheduler.New(scheduler.Options{JS: js, Name: name, Log: testLog()})
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.t.Context())
	done := make(chan struct{})
	b.wg.Go(func() {
		defer nc.Close()
		defer close(done)
		if err := s.Run(ctx); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
			b.t.Errorf("scheduler %s: %v", name, err)
		}
	})
	return func() { cancel(); <-done }, func() { nc.Close(); cancel(); <-done }
}

// testLog is where schedulers log in tests: nowhere, unless asked for.
func testLog() *slog.Logger {
	if os.Getenv("BERTH_TEST_LOG") == "" {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// fakeWorker serves one server by hand: it confirms what answer says.
type fakeWorker struct {
	b      *bundle
	id     string
	answer func(verb events.Verb, vm string) computer.Outcome // "": stay silent
	delay  func(verb events.Verb, vm string) time.Duration    // before the result; nil: none
	code   string                                             // of refusals

	mu      sync.Mutex
	live    map[string]uint64 // vm → fence
	peak    int
	gone    []kv.Gone
	stop    context.CancelFunc
	quiet   bool     // neither heartbeats nor results
	watched []string // vm ids whose live view somebody has open
}

func (b *bundle) worker(id string, config kv.ServerConfig) *fakeWorker {
	b.t.Helper()
	if config.Roles == nil {
		config.Roles = []string{"default"}
	}
	if config.Isolation == "" {
		config.Isolation = kv.IsolationNone
	}
	config.Provider = "fake"
	w := &fakeWorker{b: b, id: id, live: map[string]uint64{}, answer: func(events.Verb, string) computer.Outcome { return computer.OK }}
	ctx, cancel := context.WithCancel(b.t.Context())
	w.stop = cancel
	_, _, err := kv.Update(ctx, b.places, kv.ServerKey(id), func(s *kv.Server, _ uint64) error {
		s.ID, s.Config, s.Worker, s.Epoch = id, config, "fake", 1
		if s.Admin == "" {
			s.Admin = kv.Active
		}
		return nil
	})
	if err != nil {
		b.t.Fatal(err)
	}
	if err := bus.EnsureConsumers(ctx, b.js, bus.ServerConsumers(id, config.MaxContainers)); err != nil {
		b.t.Fatal(err)
	}
	for _, name := range []string{id, bus.KillConsumer(id)} {
		c, err := b.js.Consumer(ctx, bus.Commands, name)
		if err != nil {
			b.t.Fatal(err)
		}
		cc, err := c.Consume(func(msg jetstream.Msg) {
			path, err := events.ParseCommand(msg.Subject())
			if err == nil && w.delay != nil && w.delay(path.Verb, path.VM) > 0 {
				b.wg.Go(func() {
					select {
					case <-ctx.Done():
					case <-time.After(w.delay(path.Verb, path.VM)):
						w.handle(ctx, msg)
					}
				})
				return
			}
			w.handle(ctx, msg)
		})
		if err != nil {
			b.t.Fatal(err)
		}
		b.wg.Go(func() { <-ctx.Done(); cc.Stop(); <-cc.Closed() })
	}
	b.wg.Go(func() {
		for seq := uint64(1); ; seq++ {
			w.mu.Lock()
			beat := kv.Heartbeat{Server: id, Worker: "fake", Epoch: 1, BootID: "boot", Breaker: "closed", Running: len(w.live), Synced: true, Gone: w.gone, Watched: w.watched, Sequence: seq}
			quiet := w.quiet
			w.mu.Unlock()
			raw, err := json.Marshal(beat)
			if err != nil {
				b.t.Error(err)
			}
			if !quiet {
				if _, err := b.beats.Put(ctx, id, raw); err != nil && ctx.Err() == nil {
					b.t.Error(err)
				}
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(2 * time.Second):
			}
		}
	})
	return w
}

func (w *fakeWorker) handle(ctx context.Context, msg jetstream.Msg) {
	if ctx.Err() != nil {
		return
	}
	path, err := events.ParseCommand(msg.Subject())
	if err != nil {
		w.b.t.Error(err)
		return
	}
	e, err := events.Decode(msg.Headers(), msg.Data())
	if err != nil {
		w.b.t.Error(err)
		return
	}
	var c events.CommandCreate
	if err := events.DecodeTolerant(e, &c); err != nil {
		w.b.t.Error(err)
		return
	}
	w.mu.Lock()
	quiet := w.quiet
	w.mu.Unlock()
	if quiet {
		return // delivered again
	}
	outcome := w.answer(path.Verb, path.VM)
	if outcome == "" {
		return
	}
	code := w.code
	if path.Verb == events.Create {
		if a, held := w.b.server(w.id).Allocs[path.VM]; !held || a.Fence != c.Fence {
			outcome, code = computer.Rejected, events.CodeFenceStale
		}
	}
	f := events.Finished{CommandID: e.ID(), Source: e.Source(), Command: path.Verb, Outcome: outcome, Fence: c.Fence, Request: c.Request, Actions: []computer.ActionResult{}}
	if outcome == computer.OK && path.Verb == events.Create {
		f.Sandbox = &events.SandboxInfo{Display: c.Display, Capabilities: []string{"browser"}}
	} else if outcome != computer.OK {
		f.Error = &computer.Fault{Code: code, Message: "the fake says so"}
	}
	token := events.Token(e.Source(), e.ID())
	out, err := events.New(events.TypeFinished, events.SourceWorker, token+"-finished", f)
	if err != nil {
		w.b.t.Error(err)
		return
	}
	if forwarded, ok := e.Extensions()[events.ExtForwarded]; ok {
		out.SetExtension(events.ExtForwarded, forwarded)
	}
	m, err := events.NewMessage(ctx, events.ResultSubject(path.Server, path.VM, token), out)
	if err != nil {
		w.b.t.Error(err)
		return
	}
	// The result is the claim too: only whoever publishes it has done it.
	w.mu.Lock()
	_, err = bus.PublishExpecting(ctx, w.b.js, m, 0)
	switch {
	case err != nil && !errors.Is(err, bus.ErrTaken) && ctx.Err() == nil:
		w.b.t.Error(err)
	case err == nil && outcome == computer.OK && path.Verb == events.Create:
		w.live[path.VM] = c.Fence
		w.peak = max(w.peak, len(w.live))
	case err == nil && outcome == computer.OK && path.Verb == events.Kill:
		delete(w.live, path.VM)
	}
	w.mu.Unlock()
	if err := msg.Ack(); err != nil && ctx.Err() == nil {
		w.b.t.Error(err)
	}
}

// request publishes a request with source /test and returns nothing to wait for.
func (b *bundle) request(tenant, noun string, verb events.Verb, typ, id string, data any) {
	b.t.Helper()
	e, err := events.New(typ, "/test", id, data)
	if err != nil {
		b.t.Fatal(err)
	}
	msg, err := events.NewMessage(b.t.Context(), events.RequestSubject(tenant, noun, verb), e)
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := b.js.PublishMsg(b.t.Context(), msg); err != nil {
		b.t.Fatal(err)
	}
}

func (b *bundle) create(tenant, id string, data map[string]any) {
	b.t.Helper()
	b.request(tenant, "sandbox", events.Create, events.TypeSandboxCreate, id, data)
}

// names returns the names of all events about a subject so far, in order.
func (b *bundle) names(tenant, subject string) []string {
	b.t.Helper()
	var out []string
	for _, e := range b.events("event." + tenant + "." + subject + ".*") {
		out = append(out, e.name)
	}
	return out
}

type heard struct {
	subject []string
	name    string // its last token
	data    map[string]any
}

// events returns what the stream has had from its beginning; filter is a
// subject with "*".
func (b *bundle) events(filter string) []heard {
	b.t.Helper()
	stream, err := b.js.Stream(b.t.Context(), bus.Events)
	if err != nil {
		b.t.Fatal(err)
	}
	for seq := uint64(len(b.heard)) + 1; seq <= stream.CachedInfo().State.LastSeq; seq++ {
		msg, err := stream.GetMsg(b.t.Context(), seq)
		if err != nil {
			b.t.Fatal(err)
		}
		e, err := events.Decode(msg.Header, msg.Data)
		if err != nil {
			b.t.Fatal(err)
		}
		h := heard{subject: strings.Split(msg.Subject, "."), data: map[string]any{}}
		h.name = h.subject[len(h.subject)-1]
		if err := json.Unmarshal(e.Data(), &h.data); err != nil {
			b.t.Fatal(err)
		}
		b.heard = append(b.heard, h)
	}
	want := strings.Split(filter, ".")
	var out []heard
	for _, h := range b.heard {
		if slices.EqualFunc(h.subject, want, func(h, w string) bool { return w == "*" || h == w }) {
			out = append(out, h)
		}
	}
	return out
}

// until lets virtual time pass until cond holds, at most d.
func (b *bundle) until(d time.Duration, what string, cond func() bool) {
	b.t.Helper()
	deadline := time.Now().Add(d)
	for !cond() {
		if os.Getenv("BERTH_TEST_LOG") != "" {
			fmt.Fprintln(os.Stderr, "waiting", time.Now(), what)
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("after %s: not yet: %s\n%s", d, what, b.dump())
		}
		time.Sleep(200 * time.Millisecond)
	}
}

func (b *bundle) untilEvent(d time.Duration, tenant, vm, name string) map[string]any {
	b.t.Helper()
	var data map[string]any
	b.until(d, fmt.Sprintf("event.%s.%s.%s (heard %v)", tenant, vm, name, b.names(tenant, vm)), func() bool {
		for _, e := range b.events("event." + tenant + "." + vm + "." + name) {
			data = e.data
			return true
		}
		return false
	})
	return data
}

func (b *bundle) server(id string) kv.Server {
	b.t.Helper()
	s, _, err := kv.Get[kv.Server](b.t.Context(), b.places, kv.ServerKey(id))
	if err != nil {
		b.t.Fatal(err)
	}
	return s
}

func (b *bundle) vm(id string) kv.Placement {
	b.t.Helper()
	p, _, err := kv.Get[kv.Placement](b.t.Context(), b.places, kv.VMKey(id))
	if err != nil {
		b.t.Fatal(err)
	}
	return p
}

// dump describes everything that has not ended, for a failure's message.
func (b *bundle) dump() string {
	var out strings.Builder
	keys, err := b.places.Keys(b.t.Context())
	if err != nil {
		return err.Error()
	}
	slices.Sort(keys)
	for _, key := range keys {
		entry, err := b.places.Get(b.t.Context(), key)
		if err == nil && !strings.Contains(string(entry.Value()), `"freedAt"`) {
			fmt.Fprintf(&out, "%s %d %s\n", key, entry.Revision(), entry.Value())
		}
	}
	return out.String()
}
