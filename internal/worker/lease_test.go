package worker

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
	"berth/internal/providers/providertest"
)

// A standby serves within 15 s of kill -9 and within a second of a clean stop.
func TestTakeoverTimes(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		one := w.start("w1")
		w.ready("a")
		w.start("w2")
		time.Sleep(3 * time.Second)
		before := w.record(server1).Epoch
		start := time.Now()
		one.crash()
		c := w.publish("a", events.Act, "1", act(click(1, 1)))
		if f := w.await(c); f.Outcome != computer.OK {
			t.Errorf("after a crash: %s", mustJSON(f))
		}
		if d := time.Since(start); d > 15*time.Second {
			t.Errorf("takeover after a crash took %s", d)
		}
		s := w.record(server1)
		if s.Worker != "w2" || s.Epoch <= before || s.Admin != kv.Active || len(s.Allocs) != 1 || s.Config.MaxContainers != 10 || len(s.Config.Capabilities) == 0 {
			t.Errorf("record: %s", mustJSON(s))
		}
		w.start("w3")
		time.Sleep(3 * time.Second)
		start = time.Now()
		w.workers[1].drain()
		if d := time.Since(start); d > time.Second {
			t.Errorf("draining took %s", d)
		}
		start = time.Now()
		w.await(w.publish("a", events.Act, "2", act(click(1, 1))))
		if d := time.Since(start); d > 300*time.Millisecond { // it hears the release
			t.Errorf("takeover after a clean stop took %s", d)
		}
	})
}

// A drain lets what runs finish within 10 s and leaves what waits to the
// successor; what runs longer is unknown.
func TestDrain(t *testing.T) {
	for _, c := range []struct {
		seconds float64
		outcome computer.Outcome
	}{{5, computer.OK}, {60, computer.Unknown}} {
		bubble(t, func(t *testing.T, w *world) {
			one := w.start("w1")
			w.ready("a")
			running := w.publish("a", events.Act, "1", act(click(1, 1), wait(c.seconds), click(2, 2)))
			waiting := w.publish("a", events.Act, "2", act(click(3, 3)))
			if _, err := w.fake(server1).WaitEffects(context.Background(), 2); err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			one.drain()
			if d := time.Since(start); d > 13*time.Second {
				t.Errorf("drain took %s", d)
			}
			f, ok := w.finished(running)
			if !ok || f.Outcome != c.outcome || c.outcome == computer.Unknown && f.Error.Code != events.CodeWorkerDied {
				t.Errorf("an act of %v s: %v %s", c.seconds, ok, mustJSON(f))
			}
			if _, ok := w.finished(waiting); ok {
				t.Error("what waited was not left to the successor")
			}
			w.start("w2")
			if f := w.await(waiting); f.Outcome != computer.OK {
				t.Errorf("what waited: %s", mustJSON(f))
			}
			w.once(running)
		})
	}
}

// Two workers that start together share the servers, and one that is left has
// all of them within 15 s.
func TestShareServers(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		var servers []string
		for i := range 6 {
			servers = append(servers, fmt.Sprintf("fake-%02d", i+1))
		}
		w.start("w1", servers...)
		w.start("w2", servers...)
		count := func() map[string]int {
			n := map[string]int{}
			for _, s := range servers {
				if h, ok := w.beat(s); ok {
					n[h.Worker]++
				}
			}
			return n
		}
		w.until("all are served", 20*time.Second, func() bool { n := count(); return n["w1"]+n["w2"] == len(servers) })
		if n := count(); n["w1"] < 2 || n["w2"] < 2 {
			t.Errorf("shares: %v", n)
		}
		w.workers[0].crash()
		w.until("the other has all", 15*time.Second, func() bool { return count()["w2"] == len(servers) })
	})
}

// A worker that is cut off from the bus, or whose packets vanish, stops
// executing before anybody else can take its server, and everything still ends
// once. Its act is stopped at the provider by then.
func TestPartition(t *testing.T) {
	for _, state := range []string{"cut", "hole"} {
		t.Run(state, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				one := w.start("w1")
				w.ready("a")
				w.start("w2")
				var steps []map[string]any
				for i := range 40 {
					steps = append(steps, click(i, i), wait(1))
				}
				data := act(steps...)
				running := w.publish("a", events.Act, "1", data)
				waiting := w.publish("a", events.Act, "2", act(click(100, 100)))
				if _, err := w.fake(server1).WaitEffects(context.Background(), 4); err != nil {
					t.Fatal(err)
				}
				cutAt := time.Now()
				one.gate.set(state)
				w.until("w2 has taken over", 20*time.Second, func() bool { return w.record(server1).Worker == "w2" })
				taken := time.Now()
				f := w.await(running)
				if f.Outcome != computer.Unknown {
					t.Errorf("the act that ran: %s", mustJSON(f))
				}
				if f := w.await(waiting); f.Outcome != computer.OK {
					t.Errorf("the act that waited: %s", mustJSON(f))
				}
				// The bus may not notice that the old worker is gone: what it has
				// asked for must not go to it any more.
				if d := time.Since(taken); d > 3*time.Second {
					t.Errorf("the results came %s after the takeover", d)
				}
				var last time.Time
				for _, e := range w.fake(server1).EffectsOf("a") {
					if e.Client == 1 {
						last = e.At
					}
				}
				if last.After(taken) || last.Before(cutAt) {
					t.Errorf("cut at 0, taken over after %s, last effect of the old worker after %s", taken.Sub(cutAt), last.Sub(cutAt))
				}
				one.gate.set("")
				time.Sleep(40 * time.Second)
				w.once(running)
				w.once(waiting)
				w.workers[1].drain()
				w.holds("w1") // and it stands by again
			})
		})
	}
}

// The bus goes away while an act runs. A short outage is not noticed; after a
// long one the result that the process knows is said, not `unknown`.
func TestResultSurvivesOutage(t *testing.T) {
	for _, outage := range []time.Duration{3 * time.Second, 40 * time.Second} {
		t.Run(outage.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				w.start("w1")
				w.ready("a")
				c := w.publish("a", events.Act, "1", act(click(1, 1), wait(2)))
				if _, err := w.fake(server1).WaitEffects(context.Background(), 2); err != nil {
					t.Fatal(err)
				}
				w.outage(outage)
				if f := w.await(c); f.Outcome != computer.OK {
					t.Errorf("after an outage of %s: %s", outage, mustJSON(f))
				}
				w.once(c)
				if n := len(w.fake(server1).EffectsOf("a")); n != 2 {
					t.Errorf("%d effects", n)
				}
				if f := w.await(w.publish("a", events.Act, "2", act(click(1, 1)))); f.Outcome != computer.OK {
					t.Errorf("afterwards: %s", mustJSON(f))
				}
			})
		})
	}
}

// A worker whose epoch is older than the registered one does not serve.
func TestOlderEpochDoesNotRegister(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.edit(server1, func(s *kv.Server) { s.ID, s.Epoch, s.Worker = server1, 30, "w9" })
		w.start("w1")
		time.Sleep(2 * time.Second)
		if s := w.record(server1); s.Worker != "w9" || s.Epoch != 30 {
			t.Errorf("record: %s", mustJSON(s))
		}
		// Epochs are revisions of the lease's bucket: it gets there.
		w.until("its epoch is newer", 5*time.Minute, func() bool { return w.record(server1).Worker == "w1" })
	})
}

// A provider that does not open is tried again, its heartbeats say why, and
// after a while another worker may try.
func TestProviderDoesNotOpen(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		nc, js, _ := w.dial("w1")
		defer nc.Close()
		wk, err := New(Options{Name: "w1", JS: js, Servers: []Server{{ID: server1, Config: kv.ServerConfig{MaxContainers: 1},
			Open: func(context.Context) (providers.Provider, error) { return nil, errors.New("state dir is locked") }}}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error)
		go func() { done <- wk.Run(ctx) }()
		w.until("a heartbeat says why", 5*time.Second, func() bool {
			h, ok := w.beat(server1)
			return ok && strings.Contains(h.Probe, "state dir is locked") && !h.Synced
		})
		w.start("w2")
		w.until("the other serves", 3*time.Minute, func() bool {
			h, ok := w.beat(server1)
			return ok && h.Worker == "w2" && h.Probe == "" && h.Synced
		})
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// A worker that cannot open what its peer serves well does not take it away: it
// asks for servers, fails with one after the other, and leaves them.
func TestFailingWorkerLeavesServers(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		servers := []string{"ax102-01", "ax102-02", "ax102-03", "ax102-04", "ax102-05", "ax102-06"}
		w.start("w1", servers...)
		served := func() (n int) {
			for _, s := range servers {
				if h, ok := w.beat(s); ok && h.Worker == "w1" && h.Synced && h.Probe == "" {
					n++
				}
			}
			return n
		}
		w.until("all are served", 20*time.Second, func() bool { return served() == len(servers) })
		opts := Options{Name: "w2"}
		for _, s := range servers {
			opts.Servers = append(opts.Servers, Server{ID: s, Config: kv.ServerConfig{MaxContainers: 10},
				Open: func(context.Context) (providers.Provider, error) { return nil, errors.New("401: wrong key") }})
		}
		w.startWith(opts)
		unserved := 0
		for range 30 * 60 / 5 {
			time.Sleep(5 * time.Second)
			unserved += len(servers) - served()
		}
		// Half an hour of six servers is 2,160 looks. Each try costs 30 s of one
		// server, and there are fewer and fewer.
		if unserved > 300 {
			t.Errorf("%d of 2160 looks found a server unserved", unserved)
		}
		if n := served(); n < len(servers)-1 {
			t.Errorf("%d are served at the end", n)
		}
	})
}

// Bad options are all named at once.
func TestNewNamesEveryFault(t *testing.T) {
	open := func(context.Context) (providers.Provider, error) {
		return providertest.NewFake(providertest.FakeOptions{}).Provider(), nil
	}
	_, err := New(Options{LeaseTTL: time.Minute, Servers: []Server{
		{ID: "Bad", Open: open, Config: kv.ServerConfig{MaxContainers: 1}},
		{ID: "none-01", Open: open},
		{ID: "many-01", Open: open, Config: kv.ServerConfig{MaxContainers: 1001}},
		{ID: "iso-01", Open: open, Config: kv.ServerConfig{MaxContainers: 1, Isolation: "cage"}},
		{ID: "open-01", Config: kv.ServerConfig{MaxContainers: 1}},
		{ID: "open-01", Open: open, Config: kv.ServerConfig{MaxContainers: 1, Roles: []string{"a b"}}},
	}})
	if err == nil {
		t.Fatal("accepted")
	}
	for _, say := range []string{"no JetStream", "name", "lease", `"Bad"`, "none-01: maxContainers 0", "many-01: maxContainers 1001", "cage", "open-01: no provider", "given twice", "role"} {
		if !strings.Contains(err.Error(), say) {
			t.Errorf("%q is not named in: %v", say, err)
		}
	}
}

// The process cannot go on without its connection; Run says so.
func TestClosedConnectionEndsRun(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		p := w.start("w1")
		w.holds("w1")
		p.nc.Close()
		if err := p.wait(); !errors.Is(err, errBusClosed) {
			t.Errorf("Run returned %v", err)
		}
	})
}
