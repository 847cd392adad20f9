package e2b

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
)

// logs appends a line to a file of the sandbox: what it holds is the oracle of
// what ran, and how often.
func logs(line string) computer.Action { return sh("echo " + line + " >> /tmp/ran") }

// begun waits until the file has the line.
func (b *bench) begun(t *testing.T, line string) {
	t.Helper()
	box := must(b.box(t.Context(), b.vm))
	deadline := time.Now().Add(20 * time.Second)
	for {
		var said strings.Builder
		if _, err := b.talk(t.Context(), box, process{args: []string{"-c", "cat /tmp/ran"}}, func(raw []byte) error { said.Write(raw); return nil }); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(said.String(), line) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s has not run: %q", line, said.String())
		}
	}
}

// TestSuccessor: a worker dies in the middle of a batch. Its successor hears that
// it runs, then how it ended; the same batch again runs nothing; and the dead
// one's later calls are refused once the successor has acted.
func TestSuccessor(t *testing.T) {
	t.Parallel()
	s := startStandin(t)
	next := newBench(t, connect(t, s))
	dead := &bench{connect(t, s), next.vm}
	batch := dead.batch(logs("one"), sh("until [ -e /tmp/go ]; do sleep 0.05; done; echo hello"), logs("two"))
	done := make(chan error, 1)
	go func() {
		_, err := dead.Execute(t.Context(), batch)
		done <- err
	}()
	dead.begun(t, "one")
	if err := dead.Close(); err != nil { // and with it the connection; nothing is ended in the sandbox
		t.Fatal(err)
	}
	if err := <-done; err == nil || providers.NothingRan(err) {
		t.Errorf("the dead worker's call: %v", err)
	}

	if rec, err := next.Recall(t.Context(), next.vm, batch.Key); err != nil || rec.Finished {
		t.Fatalf("while it runs: %+v, %v", rec, err)
	}
	box := must(next.box(t.Context(), next.vm))
	if _, err := next.talk(t.Context(), box, process{args: []string{"-c", ": > /tmp/go"}}, func([]byte) error { return nil }); err != nil {
		t.Fatal(err)
	}
	var rec providers.Recollection
	for deadline := time.Now().Add(20 * time.Second); !rec.Finished; {
		var err error
		if rec, err = next.Recall(t.Context(), next.vm, batch.Key); err != nil || time.Now().After(deadline) {
			t.Fatalf("%+v, %v", rec, err)
		}
	}
	if len(rec.Results) != 3 || rec.Results[2].Outcome != computer.OK || !strings.Contains(string(rec.Results[1].Value), `"hello\n"`) {
		t.Errorf("recalled %+v", rec.Results)
	}
	again, err := next.Execute(t.Context(), batch)
	if err != nil || len(again) != 3 || string(again[1].Value) != string(rec.Results[1].Value) {
		t.Errorf("the same key again: %+v, %v", again, err)
	}
	newer, older := next.batch(logs("three")), next.batch(logs("late"))
	newer.Epoch, older.Epoch = 9, 8
	if _, err := next.Execute(t.Context(), newer); err != nil {
		t.Fatal(err)
	}
	frozen := &bench{connect(t, s), dead.vm}
	if _, err := frozen.Execute(t.Context(), older); !errors.Is(err, providers.ErrFenceStale) {
		t.Errorf("an older epoch: %v", err)
	}
	last := next.batch(sh("cat /tmp/ran"))
	last.Epoch = 9
	if results, err := next.Execute(t.Context(), last); err != nil || !strings.Contains(string(results[0].Value), `"one\ntwo\nthree\n"`) {
		t.Errorf("ran: %s, %v", results[0].Value, err)
	}
}

// TestGivenUp: a batch that its caller has given up never begins, however late it
// comes.
func TestGivenUp(t *testing.T) {
	t.Parallel()
	b := newBench(t, connect(t, startStandin(t)))
	late := b.batch(logs("late"))
	b.revoke(t.Context(), must(b.box(t.Context(), b.vm)), late.Key)
	if _, err := b.Recall(t.Context(), b.vm, late.Key); !errors.Is(err, providers.ErrNotFound) {
		t.Errorf("recalled: %v", err)
	}
	if _, err := b.Execute(t.Context(), late); !providers.NothingRan(err) {
		t.Errorf("it ran after all: %v", err)
	}
	// One that waits behind another provider's batch.
	other := &bench{connect(t, &standin{url: b.opts.APIURL}), b.vm}
	long := b.batch(logs("long"), sh("until [ -e /tmp/go ]; do sleep 0.05; done"))
	done := make(chan error, 1)
	go func() {
		_, err := b.Execute(t.Context(), long)
		done <- err
	}()
	b.begun(t, "long")
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if _, err := other.Execute(ctx, other.batch(logs("behind"))); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("behind another batch: %v", err)
	}
	box := must(b.box(t.Context(), b.vm))
	if _, err := b.talk(t.Context(), box, process{args: []string{"-c", ": > /tmp/go"}}, func([]byte) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	if got := b.sh(t, "cat /tmp/ran").Stdout; got != "long\n" {
		t.Errorf("ran: %q", got)
	}
}

// cable forwards connections until they are cut.
type cable struct {
	net.Listener
	mu    sync.Mutex
	conns []net.Conn
	ends  sync.WaitGroup
}

func forward(t *testing.T, to string) *cable {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &cable{Listener: l}
	c.ends.Go(func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			dest, err := net.Dial("tcp", to)
			if err != nil {
				t.Errorf("forward: %v", err)
				return
			}
			c.mu.Lock()
			c.conns = append(c.conns, from, dest)
			c.mu.Unlock()
			for a, b := range map[net.Conn]net.Conn{from: dest, dest: from} {
				c.ends.Go(func() {
					if _, err := io.Copy(a, b); err != nil {
						return // cut
					}
				})
			}
		}
	})
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		c.cut()
		c.ends.Wait()
	})
	return c
}

func (c *cable) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conn := range c.conns {
		if conn.Close() != nil {
			continue // it has been cut before
		}
	}
	c.conns = nil
}

// TestRecallAsABatchEnds: a batch that ends between the looks of a recall has
// ended well; it did not die.
func TestRecallAsABatchEnds(t *testing.T) {
	t.Parallel()
	base := t.TempDir()
	dir := filepath.Join(base, "keys", "k")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"pid": "1\n", "log": "B 1\nS 0\nE 0 run 0 5 0 0\nF\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	functions, dispatch, ok := strings.Cut(script, "\n\"$verb\"")
	if !ok {
		t.Fatal("the script has no dispatch")
	}
	// The batch says that it is done and ends, just when it is looked for.
	ends := functions + "\nalive() { : >\"$dir/done\"; return 1; }\n\"$verb\"" + dispatch
	out, err := exec.Command("bash", "-c", ends, "berth", base, "recall", "k").CombinedOutput()
	if line, _, _ := strings.Cut(string(out), "\n"); err != nil || line != "T done" {
		t.Errorf("%v: %s", err, out)
	}
}

// TestBrokenConnection: the connection breaks in the middle of a batch, and the
// outcome is known all the same.
func TestBrokenConnection(t *testing.T) {
	t.Parallel()
	s := startStandin(t)
	between := forward(t, strings.TrimPrefix(s.url, "http://"))
	b := newBench(t, connect(t, s, func(o *Options) { o.SandboxURL = "http://" + between.Addr().String() }))
	watch := &bench{connect(t, s), b.vm}
	var results []providers.Result
	var err error
	var wg sync.WaitGroup
	wg.Go(func() {
		results, err = b.Execute(t.Context(), b.batch(logs("one"), sh("sleep 1"), logs("two")))
	})
	watch.begun(t, "one")
	between.cut()
	wg.Wait()
	if err != nil || len(results) != 3 || results[2].Outcome != computer.OK {
		t.Errorf("%+v, %v", results, err)
	}
	if got := b.sh(t, "cat /tmp/ran").Stdout; got != "one\ntwo\n" {
		t.Errorf("ran: %q", got)
	}
}

func TestPause(t *testing.T) {
	t.Parallel()
	p := connect(t, startStandin(t))
	b := newBench(t, p)
	state := func() providers.State {
		t.Helper()
		s, err := p.Get(t.Context(), b.vm)
		if err != nil {
			t.Fatal(err)
		}
		return s.State
	}
	b.do(t, logs("before"), at(computer.Move, 12, 34))
	done := make(chan error, 1)
	cutOff := b.batch(logs("during"), sh("sleep 1000"))
	go func() {
		_, err := b.Execute(t.Context(), cutOff)
		done <- err
	}()
	b.begun(t, "during")
	for range 2 {
		if err := p.Pause(t.Context(), b.vm); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-done; err == nil || providers.NothingRan(err) || errors.Is(err, providers.ErrLost) {
		t.Errorf("a batch under way: %v", err)
	}
	if got := state(); got != providers.Paused {
		t.Errorf("paused, it is %s", got)
	}
	if _, err := b.Execute(t.Context(), b.batch(logs("paused"))); !errors.Is(err, providers.ErrPaused) || !strings.Contains(err.Error(), "resume it first") {
		t.Errorf("a batch while it is paused: %v", err)
	}
	if list, err := p.List(t.Context()); err != nil || len(list) != 1 || list[0].State != providers.Paused {
		t.Errorf("List: %+v, %v", list, err)
	}
	for range 2 {
		if err := p.Resume(t.Context(), b.vm); err != nil {
			t.Fatal(err)
		}
	}
	if got := state(); got != providers.Running {
		t.Errorf("resumed, it is %s", got)
	}
	began := time.Now()
	b.do(t, sh("true"))
	if d := time.Since(began); d > 30*time.Second {
		t.Errorf("a batch waited %v for the one that the pause had cut off", d)
	}
	if rec, err := p.Recall(t.Context(), b.vm, cutOff.Key); err != nil || !rec.Finished || rec.Results[0].Outcome != computer.OK || rec.Results[1].Outcome != computer.Unknown {
		t.Errorf("the batch that the pause had cut off: %+v, %v", rec, err)
	}
	s, err := p.Get(t.Context(), b.vm)
	if err != nil || time.Until(s.ExpiresAt) < 20*time.Minute {
		t.Errorf("after the resume it ends at %v, %v", s.ExpiresAt, err)
	}
	if v, err := p.Observe(t.Context(), b.vm); err != nil || v.Observation.Cursor == nil || *v.Observation.Cursor != (computer.Point{X: 12, Y: 34}) {
		t.Errorf("after the resume: %+v, %v", v.Observation, err)
	}
	if err := p.Pause(t.Context(), b.vm); err != nil {
		t.Fatal(err)
	}
	if err := p.Kill(t.Context(), b.vm); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Get(t.Context(), b.vm); !errors.Is(err, providers.ErrNotFound) {
		t.Errorf("killed while paused: %v", err)
	}
}

// TestInventory: this server's sandboxes, all pages, and nobody else's.
func TestInventory(t *testing.T) {
	t.Parallel()
	s := startStandin(t)
	mine, theirs := connect(t, s), connect(t, s, func(o *Options) { o.ServerID = "e2b-02" })
	for _, server := range []string{"e2b-01", "e2b-02"} { // made without desktops: 230 of them cost too much
		for i := range 3 {
			body := map[string]any{"templateID": "base", "timeout": 300, "metadata": map[string]string{"server": server, "vmId": fmt.Sprintf("vm-%d", i), "fence": "5", "tenant": "a&b=c d"}}
			if _, _, err := mine.client.do(t.Context(), call{method: "POST", path: []string{"sandboxes"}, body: body, want: []int{201}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, metadata := range []map[string]string{{}, {"vmId": "vm-0", "fence": "5"}, {"server": "e2b-01"}} {
		if _, _, err := mine.client.do(t.Context(), call{method: "POST", path: []string{"sandboxes"}, body: map[string]any{"templateID": "base", "timeout": 300, "metadata": metadata}, want: []int{201}}); err != nil {
			t.Fatal(err)
		}
	}
	for p, server := range map[*Provider]string{mine: "e2b-01", theirs: "e2b-02"} {
		list, err := p.List(t.Context())
		if err != nil || len(list) != 3 {
			t.Fatalf("%s: %+v, %v", server, list, err)
		}
		for _, sandbox := range list {
			if sandbox.Server != server || sandbox.Fence != 5 || sandbox.Tenant != "a&b=c d" {
				t.Errorf("%s: %+v", server, sandbox)
			}
		}
	}
	if err := theirs.Kill(t.Context(), "vm-0"); err != nil {
		t.Fatal(err)
	}
	if list, err := mine.List(t.Context()); err != nil || len(list) != 3 {
		t.Errorf("after another's kill: %+v, %v", list, err)
	}
	if one, err := mine.Get(t.Context(), "vm-1"); err != nil || one.State != providers.Starting {
		t.Errorf("a sandbox whose desktop was never ready: %+v, %v", one, err)
	}
}

// TestCreates: two workers that create one vm at once make one sandbox; what
// fails leaves none.
func TestCreates(t *testing.T) {
	t.Parallel()
	s := startStandin(t)
	ps := []*Provider{connect(t, s), connect(t, s)}
	// While the first create's desktop starts the second begins at any moment.
	for _, late := range []time.Duration{0, 50 * time.Millisecond, 500 * time.Millisecond} {
		t.Run(fmt.Sprint("two at once, ", late, " apart"), func(t *testing.T) {
			var wg sync.WaitGroup
			var made [2]providers.Sandbox
			var errs [2]error
			for i, p := range ps {
				wg.Go(func() {
					<-time.After(time.Duration(i) * late)
					made[i], errs[i] = p.Create(t.Context(), providers.Spec{VM: "both", Fence: 1})
				})
			}
			wg.Wait()
			list, err := ps[0].List(t.Context())
			if err != nil || len(list) != 1 {
				t.Fatalf("%d sandboxes, %v; the creates: %v", len(list), err, errs)
			}
			for i := range ps {
				if errs[i] == nil && made[i].ID != list[0].ID || errs[i] != nil && !errors.Is(errs[i], providers.ErrConflict) {
					t.Errorf("create %d: %+v, %v", i, made[i], errs[i])
				}
			}
			if errs[0] != nil && errs[1] != nil {
				t.Errorf("both gave way: %v", errs)
			}
			if err := ps[0].Kill(t.Context(), "both"); err != nil {
				t.Fatal(err)
			}
		})
	}
	for name, c := range map[string]struct {
		spec providers.Spec
		want error
	}{
		"no such template":     {providers.Spec{Template: "none"}, providers.ErrInvalid},
		"nothing in its PATH":  {providers.Spec{Env: map[string]string{"PATH": "/none"}}, providers.ErrUnavailable},
		"a display of its own": {providers.Spec{Env: map[string]string{"DISPLAY": ":7"}}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			c.spec.VM, c.spec.Fence = "vm-x", 1
			_, err := ps[0].Create(t.Context(), c.spec)
			if !errors.Is(err, c.want) {
				t.Errorf("%v; want %v", err, c.want)
			}
			if c.want == nil {
				if err := ps[0].Kill(t.Context(), c.spec.VM); err != nil {
					t.Fatal(err)
				}
			}
			if list, err := ps[0].List(t.Context()); err != nil || len(list) != 0 {
				t.Errorf("left: %+v, %v", list, err)
			}
		})
	}
	t.Run("a cancelled create", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := ps[0].Create(ctx, providers.Spec{VM: "vm-y", Fence: 1})
			done <- err
		}()
		for deadline := time.Now().Add(20 * time.Second); ; {
			if _, err := ps[1].Get(t.Context(), "vm-y"); err == nil {
				break
			}
			if time.Now().After(deadline) {
				t.Fatal("it does not begin")
			}
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
		if list, err := ps[0].List(t.Context()); err != nil || len(list) != 0 {
			t.Errorf("left: %+v, %v", list, err)
		}
	})
	t.Run("a rate", func(t *testing.T) {
		p := connect(t, startStandin(t, "--creates", "1"))
		var err error
		for i := 0; err == nil && i < 100; i++ { // without their desktops, which take longer than that
			_, err = p.post(t.Context(), providers.Spec{VM: fmt.Sprintf("vm-r%d", i), Fence: 1})
		}
		var limited *providers.RateLimitError
		if !errors.As(err, &limited) || limited.RetryAfter != time.Second {
			t.Errorf("more than one create a second: %v", err)
		}
	})
}

// TestEnd: the time-out that was set last ends the sandbox, and its end is known.
func TestEnd(t *testing.T) {
	t.Parallel()
	p := connect(t, startStandin(t))
	b := newBench(t, p)
	if s, err := p.Get(t.Context(), b.vm); err != nil || time.Until(s.ExpiresAt) < 50*time.Minute {
		t.Errorf("made for %v, %v", time.Until(s.ExpiresAt), err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := b.Execute(t.Context(), b.batch(logs("one"), sh("sleep 1000")))
		done <- err
	}()
	b.begun(t, "one")
	if err := p.SetTimeout(t.Context(), b.vm, time.Second); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, providers.ErrLost) {
		t.Errorf("a batch in a sandbox that has ended: %v", err)
	}
	if _, err := p.Get(t.Context(), b.vm); !errors.Is(err, providers.ErrNotFound) {
		t.Errorf("Get: %v", err)
	}
	if err := p.SetTimeout(t.Context(), b.vm, time.Minute); !errors.Is(err, providers.ErrNotFound) {
		t.Errorf("SetTimeout: %v", err)
	}
}
