package worker

import (
	"context"
	"slices"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
	"berth/internal/providers/providertest"
)

// proliferate#1280: a sandbox without allocation is killed, but not on one look
// alone (nomad#17268), and an allocation without sandbox is told, not freed.
func TestOrphansAreReaped(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		w.start("w1")
		w.ready("keep")
		direct := f.Provider()
		mk := func(vm string, fence uint64) {
			if _, err := direct.Create(context.Background(), providers.Spec{VM: vm, Fence: fence}); err != nil {
				t.Fatal(err)
			}
		}
		start := time.Now()
		mk("orphan", 500)
		fence := w.place(server1, "other") // the allocation is of another life
		mk("other", 400)
		alive := func(vm string) bool {
			_, err := direct.Get(context.Background(), vm)
			return err == nil
		}
		w.until("orphans are killed", 30*time.Second, func() bool { return !alive("orphan") && !alive("other") })
		if d := time.Since(start); d < orphanAge {
			t.Errorf("killed after %s, on one look", d)
		}
		// An allocation that comes back in time saves it.
		s := w.record(server1)
		w.free(server1, "keep")
		w.ready("x") // each change is looked at
		w.ready("y")
		time.Sleep(3 * time.Second)
		w.edit(server1, func(r *kv.Server) { r.Allocs["keep"] = s.Allocs["keep"] })
		time.Sleep(30 * time.Second)
		if !alive("keep") {
			t.Error("a sandbox was killed on one look without allocation")
		}
		// A real loss of the allocation ends it, and what follows is told so.
		w.free(server1, "keep")
		w.until("killed", 30*time.Second, func() bool { return !alive("keep") })
		w.editVM("keep", func(p *kv.Placement) { p.Phase = kv.Ended })
		if r := w.await(w.publish("keep", events.Act, "1", act(click(1, 1)))); r.Outcome != computer.Rejected || r.Error.Code != events.CodeNotFound {
			t.Errorf("act after that: %s", mustJSON(r))
		}
		// The life that the allocation is of can be made.
		if r := w.await(w.create(server1, "other", fence)); r.Outcome != computer.OK {
			t.Errorf("create: %s", mustJSON(r))
		}
	})
}

// infra#2041: a sandbox that died by itself is reported until its allocation
// has been freed, at once when a command notices; one that a list leaves out
// once is not.
func TestGoneIsReported(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		w.start("w1")
		fence := w.ready("a")
		w.ready("b")
		w.place(server1, "unmade")
		gone := func() []kv.Gone {
			h, _ := w.beat(server1)
			return h.Gone
		}
		time.Sleep(12 * time.Second)
		if g := gone(); len(g) != 0 {
			t.Fatalf("gone: %+v", g)
		}
		f.Crash("a")
		c := w.publish("a", events.Act, "1", act(click(1, 1)))
		if r := w.await(c); r.Outcome != computer.Rejected || r.Error.Code != events.CodeNotFound {
			t.Errorf("act on a dead sandbox: %s", mustJSON(r))
		}
		d := w.until("it is reported", 5*time.Second, func() bool { return len(gone()) == 1 })
		if d > time.Second {
			t.Errorf("reported after %s", d)
		}
		if g := gone()[0]; g.VM != "a" || g.Fence != fence || g.Code != events.CodeLost || g.Message == "" {
			t.Errorf("gone: %+v", g)
		}
		// It stays so for a successor, until the allocation is freed.
		w.start("w2")
		w.workers[0].drain()
		w.holds("w2")
		w.until("the successor reports it", 5*time.Second, func() bool { return len(gone()) == 1 })
		w.free(server1, "a")
		w.until("no longer", 10*time.Second, func() bool { return len(gone()) == 0 })

		// An act in a sandbox that dies under it is unknown, and that is noticed.
		f.Inject("Action", "b", 1, providertest.Injection{Crash: true})
		if r := w.await(w.publish("b", events.Act, "2", act(click(1, 1)))); r.Outcome != computer.Unknown || r.Error.Code != events.CodeLost {
			t.Errorf("act in a dying sandbox: %s", mustJSON(r))
		}
		w.until("it is reported", time.Second, func() bool { return len(gone()) == 1 })

		// A reboot loses all, and the boot id says so.
		w.free(server1, "b")
		w.ready("c")
		w.ready("d")
		before, _ := w.beat(server1)
		f.Reboot()
		w.until("both are reported", 5*time.Second, func() bool {
			h, _ := w.beat(server1)
			return len(h.Gone) == 2 && h.BootID != before.BootID && h.Running == 0
		})
	})
}

// A sandbox that was killed is not lost, although its allocation still stands:
// neither for the worker that killed it nor for a successor.
func TestKilledIsNotGone(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		one := w.start("w1")
		fence := w.ready("a")
		w.editVM("a", func(p *kv.Placement) { p.Ending = &kv.Ending{Outcome: "killed", Attempt: 1} })
		w.await(w.publishTo(server1, "a", events.Kill, events.SourceScheduler, events.KillCommandID("a", fence, 1), events.Command{Fence: &fence}))
		for _, next := range []string{"w2", ""} {
			for range 100 {
				if h, _ := w.beat(server1); len(h.Gone) > 0 {
					t.Fatalf("gone: %s", mustJSON(h))
				}
				time.Sleep(200 * time.Millisecond)
			}
			if next != "" {
				w.start(next)
				one.drain()
				w.holds(next)
			}
		}
	})
}

// So it is where somebody else than a scheduler killed it, of whose kill the
// record knows nothing: the worker that killed it does.
func TestKilledByAServiceIsNotGone(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.start("w1")
		w.ready("a")
		if r := w.await(w.publish("a", events.Kill, "1", struct{}{})); r.Outcome != computer.OK {
			t.Fatalf("kill: %s", mustJSON(r))
		}
		for range 100 {
			if h, _ := w.beat(server1); len(h.Gone) > 0 {
				t.Fatalf("gone: %s", mustJSON(h))
			}
			time.Sleep(200 * time.Millisecond)
		}
	})
}

// An inventory that cannot be read changes nothing: absence is no order to
// delete (H7: nomad#18267).
func TestUnreadableInventoryConcludesNothing(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		w.start("w1")
		w.ready("a")
		remove := f.Inject("List", "", -1, providertest.Injection{Err: providers.ErrUnavailable})
		w.place(server1, "b")
		w.free(server1, "a")
		time.Sleep(time.Minute)
		if l := f.Lives(); len(l) != 1 || !l[0].Ended.IsZero() {
			t.Errorf("lives: %+v", l)
		}
		remove()
		w.until("then it is reaped", 20*time.Second, func() bool { return !f.Lives()[0].Ended.IsZero() })
	})
}

// A successor serves what its predecessor made, also where its first look at
// the inventory failed, and makes no second one of it (H6: nomad#12680,
// nomad#15068).
func TestSuccessorAdopts(t *testing.T) {
	for _, blind := range []bool{false, true} {
		bubble(t, func(t *testing.T, w *world) {
			one := w.start("w1")
			fence := w.ready("a")
			one.crash()
			if blind {
				w.fake(server1).Inject("List", "", -1, providertest.Injection{Err: providers.ErrUnavailable})
			}
			w.start("w2")
			data := act(click(1, 1))
			data["fence"] = fence
			if r := w.await(w.publish("a", events.Act, "1", data)); r.Outcome != computer.OK {
				t.Errorf("blind %v: %s", blind, mustJSON(r))
			}
			if l := w.fake(server1).Lives(); len(l) != 1 || !l[0].Ended.IsZero() {
				t.Errorf("lives: %+v", l)
			}
		})
	}
}

// LLM-MM-Agent#26, mastra#24621: the provider's own end of life is moved on while
// the allocation stands, by whoever is the worker.
func TestLifeIsRenewed(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		one := w.start("w1")
		fence := w.place(server1, "a")
		w.await(w.publishTo(server1, "a", events.Create, events.SourceScheduler, events.CreateCommandID("a", fence), events.CommandCreate{
			Fence: fence, Tenant: "acme", Role: "git", TTLSeconds: 60,
		}))
		time.Sleep(5 * time.Minute)
		one.crash()
		w.start("w2")
		time.Sleep(10 * time.Minute)
		if l := w.fake(server1).Lives()[0]; !l.Ended.IsZero() {
			t.Errorf("ended %s after its creation: %s", l.Ended.Sub(l.Created), l.Why)
		}
	})
}

// Heartbeats come every 2 s ± 10 % and tell of probes.
func TestHeartbeats(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		w.start("w1")
		w.until("synced", 5*time.Second, func() bool { h, ok := w.beat(server1); return ok && h.Synced })
		w.ready("a")
		time.Sleep(3 * time.Second)
		first, _ := w.beat(server1)
		if first.Running != 1 || first.Breaker != "closed" || first.Probe != "" || first.BootID == "" || first.Worker != "w1" || first.Epoch == 0 {
			t.Errorf("heartbeat: %s", mustJSON(first))
		}
		time.Sleep(100 * time.Second)
		last, _ := w.beat(server1)
		if n := last.Sequence - first.Sequence; n < 44 || n > 56 {
			t.Errorf("%d heartbeats in 100 s", n)
		}
		remove := f.Inject("Health", "", -1, providertest.Injection{Hang: true})
		w.until("the probe fails", 5*time.Second, func() bool { h, _ := w.beat(server1); return h.Probe != "" })
		remove()
		w.until("the probe passes", 5*time.Second, func() bool { h, _ := w.beat(server1); return h.Probe == "" })
	})
}

// Heartbeats name the sandboxes whose live view somebody saw of late (S11:
// agent-browser#1617).
func TestHeartbeatsTellOfViewers(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		w.start("w1")
		w.ready("a")
		w.ready("b")
		watched := func() []string { h, _ := w.beat(server1); return h.Watched }
		for range 4 {
			f.Watch("b")
			time.Sleep(inventoryEvery)
		}
		w.until("b is named", 3*time.Second, func() bool { return slices.Equal(watched(), []string{"b"}) })
		w.until("nobody looks any more", 3*inventoryEvery, func() bool { return len(watched()) == 0 })
	})
}

// Three failures in a row that are the server's fault open the breaker: creates
// are refused, acts are served, and one success after 15 s closes it.
func TestBreaker(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		w.start("w1")
		w.ready("a")
		breaker := func(state string) func() bool {
			return func() bool { h, _ := w.beat(server1); return h.Breaker == state }
		}
		// A caller's mistake never trips it, nor does a rate limit.
		f.Inject("Create", "", 5, providertest.Injection{Err: providers.ErrInvalid})
		for _, vm := range []string{"i1", "i2", "i3", "i4", "i5"} {
			if r := w.await(w.create(server1, vm, w.place(server1, vm))); r.Outcome != computer.Rejected || r.Error.Code != events.CodeBadInput {
				t.Errorf("invalid: %s", mustJSON(r))
			}
			w.free(server1, vm)
		}
		f.Inject("Execute", "a", 4, providertest.Injection{Err: &providers.RateLimitError{RetryAfter: time.Second}})
		if r := w.await(w.publish("a", events.Act, "r", act(click(1, 1)))); r.Outcome != computer.OK || r.Timing.RanMs < 4000 {
			t.Errorf("rate limited: %s", mustJSON(r))
		}
		if !breaker("closed")() {
			t.Fatal("open")
		}
		f.Inject("Create", "", 3, providertest.Injection{Err: providers.ErrUnavailable})
		f.Inject("Kill", "", 3, providertest.Injection{Err: providers.ErrUnavailable})
		vm := "u1"
		if r := w.await(w.create(server1, vm, w.place(server1, vm))); r.Outcome != computer.Failed || r.Error.Code != events.CodeUnavailable {
			t.Errorf("unavailable: %s", mustJSON(r))
		}
		w.until("open", 3*time.Second, breaker("open"))
		if r := w.await(w.create(server1, "u2", w.place(server1, "u2"))); r.Outcome != computer.Rejected || r.Error.Code != events.CodeUnavailable {
			t.Errorf("create while open: %s", mustJSON(r))
		}
		if r := w.await(w.publish("a", events.Act, "1", act(click(1, 1)))); r.Outcome != computer.OK {
			t.Errorf("act while open: %s", mustJSON(r))
		}
		time.Sleep(16 * time.Second)
		if r := w.await(w.publish("a", events.Act, "2", act(click(1, 1)))); r.Outcome != computer.OK {
			t.Errorf("act: %s", mustJSON(r))
		}
		w.until("closed", 3*time.Second, breaker("closed"))
	})
}
