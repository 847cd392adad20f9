package fleet_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/fleet"
	"berth/internal/kv"
	"berth/internal/natsd"
	"berth/internal/providers"
	"berth/internal/providers/providertest"
	"berth/internal/scheduler"
	"berth/internal/worker"
)

var quiet = slog.New(slog.DiscardHandler)

// world is a NATS server, a scheduler and a worker with fake servers.
type world struct {
	testing.TB
	srv   *natsd.Server
	js    jetstream.JetStream
	fakes map[string]*providertest.Fake
}

// start runs a fleet of n servers with room for some sandboxes each; all of it
// ends with the test.
func start(t testing.TB, n, room int) *world {
	t.Helper()
	log := quiet
	if os.Getenv("FLEET_LOG") != "" {
		log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	srv, err := natsd.Start(natsd.Options{StoreDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Shutdown)
	w := &world{TB: t, srv: srv, fakes: map[string]*providertest.Fake{}}
	w.js = w.connect("test")
	if err := bus.Ensure(t.Context(), w.js, 1); err != nil {
		t.Fatal(err)
	}
	var servers []worker.Server
	for i := range n {
		id := fmt.Sprintf("fake-%02d", i+1)
		f := providertest.NewFake(providertest.FakeOptions{ServerID: id, Recall: true, CheckFences: true})
		t.Cleanup(f.Shutdown)
		w.fakes[id] = f
		servers = append(servers, worker.Server{ID: id, Config: kv.ServerConfig{Roles: []string{"default", "sales"}, MaxContainers: room, Isolation: kv.IsolationNone},
			Open: func(context.Context) (providers.Provider, error) { return f.Provider(), nil }})
	}
	s, err := scheduler.New(scheduler.Options{JS: w.connect("scheduler"), Name: "scheduler", Log: log})
	if err != nil {
		t.Fatal(err)
	}
	wk, err := worker.New(worker.Options{JS: w.connect("worker"), Name: "worker", Log: log, Servers: servers})
	if err != nil {
		t.Fatal(err)
	}
	w.run(s.Run)
	w.run(wk.Run)
	bucket, err := w.js.KeyValue(t.Context(), kv.BucketServers)
	if err != nil {
		t.Fatal(err)
	}
	for id := range w.fakes {
		w.until(id+" is healthy", func() bool {
			v, _, err := kv.Get[kv.ServerView](t.Context(), bucket, id)
			return err == nil && v.Health == kv.Healthy
		})
	}
	return w
}

func (w *world) connect(name string) jetstream.JetStream {
	w.Helper()
	nc, err := bus.Connect(context.Background(), bus.Config{}, name, quiet, w.srv.InProcess())
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(nc.Close)
	js, err := bus.JetStream(nc)
	if err != nil {
		w.Fatal(err)
	}
	return js
}

func (w *world) run(fn func(context.Context) error) {
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- fn(ctx) }()
	w.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			w.Errorf("a service ended with %v", err)
		}
	})
}

func (w *world) until(what string, ok func() bool) {
	w.Helper()
	deadline, tick := time.NewTimer(time.Minute), time.NewTicker(5*time.Millisecond)
	defer deadline.Stop()
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			w.Fatalf("not within a minute: %s", what)
		}
	}
}

func (w *world) open(t testing.TB, queue time.Duration) *fleet.Fleet {
	t.Helper()
	f, err := fleet.Open(t.Context(), fleet.Options{JS: w.connect("fleet"), Queue: queue, Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.close(f) })
	return f
}

func (w *world) close(f *fleet.Fleet) {
	w.Helper()
	if err := f.Close(); err != nil {
		w.Errorf("close: %v", err)
	}
}

// own counts the goroutines of this package and of what follows the bus for it;
// the server's, the scheduler's and the worker's come and go beside them.
func own() int {
	buf := make([]byte, 4<<20)
	n := 0
	for g := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		if !strings.Contains(g, "_test.go") && (strings.Contains(g, "berth/internal/fleet.") || strings.Contains(g, "berth/internal/dispatch.")) {
			n++
		}
	}
	return n
}

// The fleet passes what every provider does.
func TestContract(t *testing.T) {
	w := start(t, 3, 10)
	providertest.Exercise(t, func(t *testing.T) providers.Provider { return w.open(t, time.Minute) }, providertest.Options{
		NoPages: true, Fleet: true, ChecksFences: true, Recalls: true, Goroutines: own,
		NewLimited: func(t *testing.T) providers.Provider { return start(t, 1, 2).open(t, 0) },
		Crash: func(t *testing.T, p providers.Provider, vm string) {
			s, err := p.Get(t.Context(), vm)
			if err != nil {
				t.Fatal(err)
			}
			if !w.fakes[s.Server].Crash(vm) {
				t.Fatalf("%s is not on %s", vm, s.Server)
			}
		},
	})
	if lives := w.fakes["fake-02"].Lives(); len(lives) == 0 {
		t.Error("one server had it all")
	}
}

func wait(seconds float64) computer.Action {
	return computer.Action{Type: computer.Wait, Seconds: &seconds}
}

func click(x int) computer.Action {
	return computer.Action{Type: computer.Click, X: &x, Y: &x}
}

// What a caller has given up never runs if it had not begun; also by another
// process the same batch is never run again, and its result is found.
func TestGivenUp(t *testing.T) {
	w := start(t, 1, 4)
	f := w.open(t, 0)
	if _, err := f.Create(t.Context(), providers.Spec{VM: "vm-a", Fence: 7}); err != nil {
		t.Fatal(err)
	}
	long, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if _, err := f.Execute(long, providers.Batch{VM: "vm-a", Fence: 7, Key: "long", Actions: []computer.Action{click(1), wait(60), click(2)}}); !errors.Is(err, context.Canceled) {
			t.Errorf("the long one: %v", err)
		}
	})
	effects := func() int { return len(w.fakes["fake-01"].EffectsOf("vm-a")) }
	w.until("the long one runs", func() bool { return effects() == 2 })
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := f.Execute(short, providers.Batch{VM: "vm-a", Key: "short", Actions: []computer.Action{click(3)}}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the one behind: %v", err)
	}
	stop()
	running.Wait()
	batch := providers.Batch{VM: "vm-a", Fence: 7, Key: "next", Actions: []computer.Action{click(4), {Type: computer.Cursor}}}
	if _, err := f.Execute(t.Context(), batch); err != nil {
		t.Fatalf("the next: %v", err)
	}
	before := effects()
	other := w.open(t, 0)
	if s, err := other.Get(t.Context(), "vm-a"); err != nil || s.Fence != 7 {
		t.Errorf("another process finds %+v, %v", s, err)
	}
	if rs, err := other.Execute(t.Context(), batch); err != nil || len(rs) != 2 || string(rs[1].Value) != `{"x":4,"y":4}` {
		t.Errorf("the same batch by another process: %+v, %v", rs, err)
	}
	if n := effects(); n != before {
		t.Errorf("it ran again: %d effects after %d", n, before)
	}
	if _, err := other.Recall(t.Context(), "vm-a", "short"); !errors.Is(err, providers.ErrNotFound) {
		t.Errorf("recall of what was given up before it ran: %v", err)
	}
	if rec, err := other.Recall(t.Context(), "vm-a", "long"); err != nil || !rec.Finished || rec.Results[2].Outcome == computer.OK {
		t.Errorf("recall of what was given up as it ran: %+v, %v", rec, err)
	}
	for _, e := range w.fakes["fake-01"].EffectsOf("vm-a") {
		if e.Action.X != nil && (*e.Action.X == 2 || *e.Action.X == 3) {
			t.Errorf("what was given up ran: %+v", e)
		}
	}
}

// cutting is a bus at which a call goes wrong at a chosen moment.
type cutting struct {
	jetstream.JetStream
	sent  func(subject string) error // after a publication; nil: nothing
	stale *stale
}

func (c *cutting) PublishMsg(ctx context.Context, msg *nats.Msg, opts ...jetstream.PublishOpt) (*jetstream.PubAck, error) {
	ack, err := c.JetStream.PublishMsg(ctx, msg, opts...)
	if err == nil && c.sent != nil {
		err = c.sent(msg.Subject)
	}
	return ack, err
}

func (c *cutting) KeyValue(ctx context.Context, bucket string) (jetstream.KeyValue, error) {
	b, err := c.JetStream.KeyValue(ctx, bucket)
	if err != nil || c.stale == nil || bucket != kv.BucketPlacements {
		return b, err
	}
	c.stale.KeyValue = b
	return c.stale, nil
}

// stale is a bucket that answers with what it has answered first.
type stale struct {
	jetstream.KeyValue
	first jetstream.KeyValueEntry
}

func (s *stale) Get(ctx context.Context, key string) (_ jetstream.KeyValueEntry, err error) {
	if s.first == nil {
		s.first, err = s.KeyValue.Get(ctx, key)
	}
	return s.first, err
}

// Several callers may wait for one batch.
func TestSameBatchAtOnce(t *testing.T) {
	w := start(t, 1, 4)
	f := w.open(t, 0)
	if _, err := f.Create(t.Context(), providers.Spec{VM: "vm-a", Fence: 7}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var all sync.WaitGroup
	for range 5 {
		all.Go(func() {
			rs, err := f.Execute(ctx, providers.Batch{VM: "vm-a", Fence: 7, Key: "one", Actions: []computer.Action{click(1), wait(1)}})
			if err != nil || len(rs) != 2 {
				t.Errorf("%+v, %v", rs, err)
			}
		})
	}
	all.Wait()
	if n := len(w.fakes["fake-01"].EffectsOf("vm-a")); n != 2 {
		t.Errorf("%d effects, want 2", n)
	}
}

// What may have run in part is never an error by which nothing ran, whatever
// the server called it.
func TestUnknownIsNotNothing(t *testing.T) {
	w := start(t, 1, 4)
	f := w.open(t, 0)
	if _, err := f.Create(t.Context(), providers.Spec{VM: "vm-a", Fence: 7}); err != nil {
		t.Fatal(err)
	}
	w.fakes["fake-01"].OnCall(func(c providertest.Call) providertest.Injection {
		if c.Method == "Action" && c.Index == 1 {
			return providertest.Injection{Err: &computer.InvalidError{Code: events.CodeOutOfRange, Index: 1, Message: "no such place"}}
		}
		return providertest.Injection{}
	})
	_, err := f.Execute(t.Context(), providers.Batch{VM: "vm-a", Fence: 7, Actions: []computer.Action{click(1), click(2)}})
	if n := len(w.fakes["fake-01"].EffectsOf("vm-a")); n != 1 {
		t.Fatalf("%d effects, want 1", n)
	}
	if err == nil || providers.NothingRan(err) {
		t.Errorf("one of two ran, and the error is %v", err)
	}
}

// A create whose caller goes while it is published is taken back.
func TestCreateGivenUpAsItIsSent(t *testing.T) {
	w := start(t, 1, 4)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	js := &cutting{JetStream: w.connect("fleet"), sent: func(subject string) error {
		if !strings.HasSuffix(subject, ".create") {
			return nil
		}
		cancel()
		return context.Canceled
	}}
	f, err := fleet.Open(t.Context(), fleet.Options{JS: js, Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	defer w.close(f)
	if _, err := f.Create(ctx, providers.Spec{VM: "vm-a", Fence: 7}); !errors.Is(err, context.Canceled) {
		t.Errorf("create: %v", err)
	}
	bucket, err := w.js.KeyValue(t.Context(), kv.BucketPlacements)
	if err != nil {
		t.Fatal(err)
	}
	w.until("it has ended", func() bool {
		rec, _, err := kv.Get[kv.Placement](t.Context(), bucket, kv.VMKey("vm-a"))
		return err == nil && rec.Phase == kv.Ended
	})
}

// A sandbox is one tenant's, whoever names its id and fence.
func TestCreateOfAnothersSandbox(t *testing.T) {
	w := start(t, 1, 4)
	f := w.open(t, 0)
	spec := providers.Spec{VM: "vm-a", Fence: 7, Tenant: "acme"}
	if _, err := f.Create(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Create(t.Context(), spec); err != nil {
		t.Errorf("its own again: %v", err)
	}
	spec.Tenant = "other"
	if s, err := f.Create(t.Context(), spec); !errors.Is(err, providers.ErrConflict) {
		t.Errorf("another tenant gets %+v, %v", s, err)
	}
}

// What is being killed is nobody's new sandbox.
func TestCreateOfWhatIsBeingKilled(t *testing.T) {
	w := start(t, 1, 4)
	f := w.open(t, 0)
	spec := providers.Spec{VM: "vm-a", Fence: 7}
	if _, err := f.Create(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	ends := w.fakes["fake-01"].Inject("Kill", "vm-a", -1, providertest.Injection{Err: providers.ErrUnavailable})
	killed := make(chan error, 1)
	go func() { killed <- f.Kill(t.Context(), "vm-a") }()
	bucket, err := w.js.KeyValue(t.Context(), kv.BucketPlacements)
	if err != nil {
		t.Fatal(err)
	}
	w.until("the kill is taken in", func() bool {
		rec, _, err := kv.Get[kv.Placement](t.Context(), bucket, kv.VMKey("vm-a"))
		return err == nil && rec.Ending != nil
	})
	if s, err := f.Create(t.Context(), spec); !errors.Is(err, providers.ErrConflict) {
		t.Errorf("create: %+v, %v", s, err)
	}
	ends()
	if err := <-killed; err != nil {
		t.Errorf("kill: %v", err)
	}
}

// A kill whose connection is closed says so.
func TestKillOnAClosedConnection(t *testing.T) {
	w := start(t, 1, 4)
	js := w.connect("fleet")
	f, err := fleet.Open(t.Context(), fleet.Options{JS: js, Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	defer w.close(f)
	if _, err := f.Create(t.Context(), providers.Spec{VM: "vm-a", Fence: 7}); err != nil {
		t.Fatal(err)
	}
	asked := make(chan struct{})
	var once sync.Once
	w.fakes["fake-01"].OnCall(func(c providertest.Call) providertest.Injection {
		if c.Method != "Kill" {
			return providertest.Injection{}
		}
		once.Do(func() { close(asked) })
		return providertest.Injection{Err: providers.ErrUnavailable}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	killed := make(chan error, 1)
	go func() { killed <- f.Kill(ctx, "vm-a") }()
	<-asked
	js.Conn().Close()
	w.fakes["fake-01"].OnCall(nil)
	if err := <-killed; !errors.Is(err, providers.ErrUnavailable) {
		t.Errorf("kill: %v", err)
	}
}

// A pause that somebody has taken back before its record said so is done.
func TestPauseTakenBack(t *testing.T) {
	w := start(t, 1, 4)
	if _, err := w.open(t, 0).Create(t.Context(), providers.Spec{VM: "vm-a", Fence: 7}); err != nil {
		t.Fatal(err)
	}
	f, err := fleet.Open(t.Context(), fleet.Options{JS: &cutting{JetStream: w.connect("fleet"), stale: &stale{}}, Log: quiet})
	if err != nil {
		t.Fatal(err)
	}
	defer w.close(f)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := f.Pause(ctx, "vm-a"); err != nil {
		t.Errorf("pause: %v", err)
	}
}

// Without a fleet behind it every call ends in an error that says so.
func TestNoFleet(t *testing.T) {
	srv, err := natsd.Start(natsd.Options{StoreDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Shutdown)
	w := &world{TB: t, srv: srv}
	js := w.connect("test")
	if _, err := fleet.Open(t.Context(), fleet.Options{JS: js, Log: quiet}); err == nil {
		t.Error("opened a bus that has no Berth")
	}
	if err := bus.Ensure(t.Context(), js, 1); err != nil {
		t.Fatal(err)
	}
	f := w.open(t, 0)
	if _, err := f.Health(t.Context()); !errors.Is(err, providers.ErrUnavailable) {
		t.Errorf("health of no servers: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := f.Create(ctx, providers.Spec{VM: "vm-a", Fence: 1}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("create without a scheduler: %v", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Get(t.Context(), "vm-a"); !errors.Is(err, providers.ErrNotFound) {
		t.Errorf("get: %v", err)
	}
}

// errand is what a caller of the interface does: it makes a sandbox, looks and
// acts in turn, and ends it. It returns what it was told.
func errand(ctx context.Context, p providers.Provider, vm string) (told []string, err error) {
	s, err := p.Create(ctx, providers.Spec{VM: vm, Fence: 5, Tenant: "acme"})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, p.Kill(ctx, vm)) }()
	told = append(told, fmt.Sprint(s.VM, s.Fence, s.Tenant, s.State, s.Display, s.Capabilities))
	for step := range 5 {
		view, err := p.Observe(ctx, vm)
		if err != nil {
			return told, err
		}
		told = append(told, fmt.Sprintf("%x %v %q", sha256.Sum256(view.PNG), *view.Observation.Cursor, view.Observation.Title))
		word := fmt.Sprint("step ", step)
		results, err := p.Execute(ctx, providers.Batch{VM: vm, Fence: 5, Key: word, Actions: []computer.Action{
			click(10 * step), {Type: computer.TypeText, Text: &word}, {Type: computer.Cursor}, {Type: computer.Screenshot},
		}})
		if err != nil {
			return told, err
		}
		for _, r := range results {
			told = append(told, fmt.Sprintf("%s %s %x", r.Outcome, r.Value, sha256.Sum256(r.Image)))
		}
	}
	return told, nil
}

// The same errand is told the same, and does the same, on a provider directly
// and on the fleet.
func TestOneServerOrMany(t *testing.T) {
	w := start(t, 3, 4)
	direct := providertest.NewFake(providertest.FakeOptions{ServerID: "fake-01", Recall: true, CheckFences: true})
	t.Cleanup(direct.Shutdown)
	want, err := errand(t.Context(), direct.Provider(), "vm-a")
	if err != nil {
		t.Fatal(err)
	}
	got, err := errand(t.Context(), w.open(t, time.Minute), "vm-a")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got, want) {
		t.Errorf("the fleet told\n%s\nthe provider\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	done := func(effects []providertest.Effect) string {
		var out []string
		for _, e := range effects {
			raw, err := json.Marshal(e.Action)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, string(raw))
		}
		return strings.Join(out, " ")
	}
	all := ""
	for _, f := range w.fakes {
		all += done(f.EffectsOf("vm-a"))
	}
	if one := done(direct.EffectsOf("vm-a")); all != one || one == "" {
		t.Errorf("the fleet did %s\nthe provider %s", all, one)
	}
}
