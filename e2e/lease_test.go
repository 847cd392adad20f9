package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
)

// wire is a way to a server that can be cut: connections break, and none comes
// about until it is mended.
type wire struct {
	listener net.Listener
	to       string

	mu    sync.Mutex
	cut   bool
	conns []net.Conn
}

func startWire(t *testing.T, to string) *wire {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{listener: l, to: to}
	var wg sync.WaitGroup
	wg.Go(func() { w.run(&wg) })
	t.Cleanup(func() {
		_ = l.Close() // run ends by it
		w.set(true)
		wg.Wait()
	})
	return w
}

func (w *wire) addr() string { return w.listener.Addr().String() }

func (w *wire) run(wg *sync.WaitGroup) {
	for {
		in, err := w.listener.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", w.to)
		w.mu.Lock()
		if w.cut || err != nil {
			w.mu.Unlock()
			_ = in.Close()
			if err == nil {
				_ = out.Close()
			}
			continue
		}
		w.conns = append(w.conns, in, out)
		w.mu.Unlock()
		pass := func(a, b net.Conn) {
			_, _ = io.Copy(a, b) // until either breaks
			_ = a.Close()
			_ = b.Close()
		}
		wg.Go(func() { pass(in, out) })
		wg.Go(func() { pass(out, in) })
	}
}

// set cuts the wire, or mends it.
func (w *wire) set(cut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut = cut
	if cut {
		for _, c := range w.conns {
			_ = c.Close() // it may have ended
		}
		w.conns = nil
	}
}

// Workers as processes, at a server that checks fences and epochs: one is cut
// off from the bus, for a moment and for longer than its lease, and one is
// frozen for longer than its lease, with a request of its own still on the way.
func TestSeveredAndFrozenWorkers(t *testing.T) {
	t.Parallel()
	const id = "ax102-01"
	began := time.Now()
	mark := func(what string) { t.Helper(); t.Logf("%6.2f s  %s", time.Since(began).Seconds(), what) }
	server, f := startStandIn(t, id), provisioned(t, id, "ax102-02")
	f.start(t, "scheduler")
	through := startWire(t, f.addr)
	registry := fmt.Sprintf(`SANDBOX_SERVERS_JSON=[{"id":%q,"provider":"selfhosted","url":%q,"apiKey":%q,"maxContainers":4}]`, id, server.url, standInKey)
	one := start(t, program("worker"), []string{registry, "LOG_LEVEL=debug", "NATS_URL=nats://worker:worker@" + through.addr()})
	_, js := f.connect(t, "operator")
	_, runner := f.connect(t, "loop-runner")
	cli(t, f.url("service"), "--inbox-prefix", "_INBOX.service", "pub", "request.default.sandbox.create",
		`{"specversion":"1.0","id":"c","source":"/e2e","type":"berth.sandbox.create.v1","data":{"vmId":"a","queueTimeoutSeconds":120}}`)
	awaitKey(t, js, kv.BucketPlacements, kv.VMKey("a"), 60*time.Second, func(p kv.Placement) error {
		if p.Phase != kv.Ready {
			return errors.New(string(p.Phase))
		}
		return nil
	})
	two := f.start(t, "worker", registry)
	two.until(30*time.Second, true, "worker ") // it has started, and stands by
	c := &commands{t: t, js: js, as: runner, server: id}
	servedBy := func(p *process) uint64 {
		t.Helper()
		var epoch uint64
		awaitKey(t, js, kv.BucketPlacements, kv.ServerKey(id), 40*time.Second, func(s kv.Server) error {
			if epoch = s.Epoch; !isNamed(p, s.Worker) {
				return fmt.Errorf("served by %s", s.Worker)
			}
			return nil
		})
		return epoch
	}
	first := servedBy(one)
	effects := func(token string) []time.Time {
		var at []time.Time
		for _, e := range server.EffectsOf("a") {
			if e.Key == token {
				at = append(at, e.At)
			}
		}
		return at
	}
	begun := func(token string) {
		t.Helper()
		for n := 1; ; n++ {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			_, err := server.WaitEffects(ctx, n)
			cancel()
			if err != nil {
				t.Fatal(err)
			}
			if len(effects(token)) > 0 {
				return
			}
		}
	}

	mark("two workers serve")
	// A short cut: what runs goes on, and what came of it is said afterwards.
	short := c.act("short", `{"type":"click","x":1,"y":1},{"type":"wait","seconds":1},{"type":"click","x":2,"y":2}`)
	begun(short)
	through.set(true)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if _, err := server.WaitEffects(ctx, 3); err != nil {
		t.Fatal(err)
	}
	through.set(false)
	if r := c.result(short); r.Outcome != computer.OK {
		t.Errorf("an act whose worker was cut off for a moment: %+v", r)
	}
	if epoch := servedBy(one); epoch != first {
		t.Errorf("the lease changed hands in a moment: epoch %d, then %d", first, epoch)
	}

	mark("mended")
	// A long one: what runs is cut short before another may take over, and what
	// waits is not begun, though the worker has it.
	steps := `{"type":"click","x":3,"y":3}`
	for range 40 {
		steps += `,{"type":"wait","seconds":0.5},{"type":"click","x":3,"y":3}`
	}
	long, waits := c.act("long", steps), c.act("waits", `{"type":"click","x":4,"y":4}`)
	begun(long)
	through.set(true)
	second := servedBy(two)
	mark("the other has taken over")
	if r := c.result(waits); r.Outcome != computer.OK {
		t.Errorf("what waited behind an act that was cut short: %+v", r)
	}
	if r := c.result(long); r.Outcome != computer.Unknown || r.Error == nil {
		t.Errorf("an act whose worker was cut off for good: %+v", r)
	}
	through.set(false)
	at := effects(long)
	for _, e := range server.EffectsOf("a") {
		if e.Key == waits && (e.Epoch != second || e.At.Before(at[len(at)-1])) {
			t.Errorf("what waited ran at epoch %d, before the last of what had run before it", e.Epoch)
		}
	}
	if len(at) >= 41 {
		t.Error("the act was not cut short")
	}

	mark("the results are known")
	// Frozen with a request on its way, and another command in hand.
	late := c.token("late")
	held := server.holdUp(late)
	c.act("late", `{"type":"click","x":5,"y":5}`)
	next := c.act("next", `{"type":"click","x":6,"y":6}`)
	select {
	case <-held.arrived:
	case <-time.After(20 * time.Second):
		t.Fatal("the request has not come")
	}
	signal(t, two, syscall.SIGSTOP)
	third := servedBy(one)
	mark("taken over from the frozen one")
	if d := freeze(t); d > 0 {
		<-time.After(d)
	}
	if r := c.result(next); r.Outcome != computer.OK {
		t.Errorf("what came after the act of a frozen worker: %+v", r)
	}
	if r := c.result(late); r.Outcome != computer.Unknown {
		t.Errorf("the act of a frozen worker: %+v", r)
	}
	mark("the results are known")
	close(held.release)
	if status := <-held.done; status != 409 {
		t.Errorf("a request of an older epoch that came late was answered with %d", status)
	}
	signal(t, two, syscall.SIGCONT)
	two.until(30*time.Second, true, "lease lost")
	mark("thawed, and it knows")
	last := c.act("last", `{"type":"click","x":7,"y":7}`)
	if r := c.result(last); r.Outcome != computer.OK {
		t.Errorf("afterwards: %+v", r)
	}
	// And it is a standby like any other.
	if code := one.terminate(); code != 0 {
		t.Errorf("exit %d", code)
	}
	servedBy(two)
	final := c.act("final", `{"type":"click","x":8,"y":8}`)
	if r := c.result(final); r.Outcome != computer.OK {
		t.Errorf("after the other has stopped: %+v", r)
	}

	mark("stopped, and taken over at once")
	// The server's own record: everything in order, each once, nothing late.
	var order []string
	seen := map[string]bool{}
	for _, e := range server.EffectsOf("a") {
		if what := fmt.Sprint(e.Key, "/", e.Index); seen[what] {
			t.Errorf("action %s ran twice", what)
		} else {
			seen[what] = true
		}
		if len(order) == 0 || order[len(order)-1] != e.Key {
			order = append(order, e.Key)
		}
		if (e.Key == next || e.Key == last) && e.Epoch != third {
			t.Errorf("%s ran at epoch %d, want %d", e.Key, e.Epoch, third)
		}
	}
	if want := []string{short, long, waits, next, last, final}; !slices.Equal(order, want) {
		t.Errorf("ran %v, want %v", order, want)
	}
	for _, token := range []string{short, long, waits, late, next, last, final} {
		c.once(token)
	}
}

// freeze is how long a frozen worker stays so after another has taken over:
// BERTH_FREEZE, in `make nightly` 80 s.
func freeze(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv("BERTH_FREEZE")
	if text == "" {
		return 0
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func signal(t *testing.T, p *process, s syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
	if s == syscall.SIGSTOP {
		t.Cleanup(func() { _ = p.cmd.Process.Signal(syscall.SIGCONT) }) // or it could not be ended
	}
}

// commands publishes acts on one sandbox and reads their results.
type commands struct {
	t      *testing.T
	js, as jetstream.JetStream // that reads; that publishes
	server string
}

func (c *commands) token(id string) string { return events.Token("/e2e", id) }

func (c *commands) act(id, actions string) (token string) {
	c.t.Helper()
	data := fmt.Sprintf(`{"specversion":"1.0","id":%q,"source":"/e2e","type":"berth.command.act.v1","data":{"actions":[%s],"deadline":%q}}`,
		id, actions, time.Now().Add(10*time.Minute).UTC().Format(time.RFC3339))
	if _, err := c.as.Publish(c.t.Context(), "sandbox."+c.server+".a.act", []byte(data)); err != nil {
		c.t.Fatal(err)
	}
	return c.token(id)
}

func (c *commands) result(token string) (f events.Finished) {
	c.t.Helper()
	await(c.t, c.js, "RESULTS", events.ResultSubject(c.server, "a", token), 60*time.Second, func(data []byte) error {
		e, err := events.Decode(nil, data)
		if err == nil && e.Type() != events.TypeFinished {
			err = errors.New(e.Type())
		}
		if err != nil {
			return err
		}
		return events.DecodeTolerant(e, &f)
	})
	return f
}

// once fails unless there is one claim and one result.
func (c *commands) once(token string) {
	c.t.Helper()
	s, err := c.js.Stream(c.t.Context(), "RESULTS")
	if err != nil {
		c.t.Fatal(err)
	}
	info, err := s.Info(c.t.Context(), jetstream.WithSubjectFilter(events.ResultSubject(c.server, "a", token)))
	if err != nil {
		c.t.Fatal(err)
	}
	for subject, n := range info.State.Subjects {
		if n != 2 {
			c.t.Errorf("%d messages on %s, want a claim and a result", n, subject)
		}
	}
}
