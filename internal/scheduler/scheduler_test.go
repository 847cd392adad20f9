package scheduler_test

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/scheduler"
	"berth/internal/virtualtime"
)

// run gives a test its bubble and a running scheduler. Bubbles with a NATS
// server in them cannot run in parallel: its servers share a clock goroutine
// that belongs to the bubble of the first.
func run(t *testing.T, f func(t *testing.T, b *bundle)) {
	t.Helper()
	virtualtime.Test(t, func(t *testing.T) {
		b := setup(t)
		b.scheduler("s1")
		f(t, b)
	})
}

func same(t *testing.T, got, want []string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("events %v, want %v", got, want)
	}
}

func TestCreatePlaceReadyKill(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 2, Capabilities: []string{"browser"}})
		defer w.stop()
		b.create("default", "r1", map[string]any{"vmId": "a", "requires": []string{"browser"}, "display": map[string]int{"width": 1024, "height": 768}})
		ready := b.untilEvent(5*time.Second, "default", "a", "ready")
		if ready["serverId"] != "ax102-01" || ready["request"].(map[string]any)["id"] != "r1" || ready["display"].(map[string]any)["width"] != 1024.0 {
			t.Errorf("ready: %v", ready)
		}
		s := b.server("ax102-01")
		if len(s.Allocs) != 1 || s.Allocs["a"].Fence != b.vm("a").Fence || s.Allocs["a"].Fence == 0 {
			t.Errorf("allocs %v, record %+v", s.Allocs, b.vm("a"))
		}
		b.request("default", "sandbox", events.Kill, events.TypeSandboxKill, "k1", map[string]any{"vmId": "a"})
		b.untilEvent(5*time.Second, "default", "a", "killed")
		b.until(5*time.Second, "slot freed", func() bool { return len(b.server("ax102-01").Allocs) == 0 })
		same(t, b.names("default", "a"), []string{"placed", "ready", "killed"})
		b.request("default", "sandbox", events.Kill, events.TypeSandboxKill, "k2", map[string]any{"vmId": "a"})
		if got := b.untilEvent(5*time.Second, "default", "a", "rejected"); got["code"] != events.CodeEnded {
			t.Errorf("killing it again: %v", got)
		}
	})
}

func TestRefusals(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		b.create("default", "first", map[string]any{"vmId": "taken"})
		b.untilEvent(5*time.Second, "default", "taken", "queued")
		for i, c := range []struct {
			data map[string]any
			typ  string
			code string
			says string
		}{
			{map[string]any{"ttlSecond": 5}, "", events.CodeBadInput, "ttlSecond"},
			{map[string]any{"vmId": "a.b"}, "", events.CodeBadInput, "vmId"},
			{map[string]any{"role": "two words"}, "", events.CodeBadInput, "role"},
			{map[string]any{"ttlSeconds": -1}, "", events.CodeBadInput, "ttlSeconds"},
			{map[string]any{"display": map[string]int{"width": 1}}, "", events.CodeBadInput, "display"},
			{map[string]any{"constraints": []any{map[string]any{"attribute": "a", "operator": "~"}}}, "", events.CodeBadInput, "operator"},
			{map[string]any{"env": map[string]string{"A": strings.Repeat("x", 17<<10)}}, "", events.CodeTooLarge, "16384"},
			{map[string]any{"vmId": "taken"}, "", events.CodeVMIDInUse, "taken"},
			{map[string]any{}, "berth.sandbox.destroy.v1", events.CodeUnknownType, "berth.sandbox.create.v1"},
		} {
			id := fmt.Sprintf("bad-%d", i)
			typ := c.typ
			if typ == "" {
				typ = events.TypeSandboxCreate
			}
			b.request("default", "sandbox", events.Create, typ, id, c.data)
			var got map[string]any
			b.until(5*time.Second, "rejected "+id, func() bool {
				for _, e := range b.events("event.default.*.rejected") {
					if e.data["request"].(map[string]any)["id"] == id {
						got = e.data
					}
				}
				return got != nil
			})
			if got["code"] != c.code || !strings.Contains(got["message"].(string), c.says) {
				t.Errorf("%v: rejected with %v: %v; want %s naming %q", c.data, got["code"], got["message"], c.code, c.says)
			}
		}
		// Redelivered, the first request changes nothing.
		b.create("default", "first", map[string]any{"vmId": "taken"})
		time.Sleep(2 * time.Second)
		if n := len(b.events("event.default.taken.rejected")); n != 1 {
			t.Errorf("%d rejections on the id that was taken, want the other requester's alone", n)
		}
		if info, err := b.js.Stream(t.Context(), "REQUESTS"); err != nil || info.CachedInfo().State.Msgs != 0 {
			t.Errorf("REQUESTS is not empty: %v", err)
		}
	})
}

// What can be neither obeyed nor answered is put aside with the reason, leaves
// the queue and stops nobody (I7, Q15: nats-io/nats-server#5564).
func TestMalformedIsPutAside(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 2})
		defer w.stop()
		for _, body := range []string{"", "{", "[]", `{"specversion":"1.0"}`, strings.Repeat("x", 900<<10)} {
			if _, err := b.js.Publish(t.Context(), "request.default.sandbox.create", []byte(body)); err != nil {
				t.Fatal(err)
			}
		}
		b.create("default", "good", map[string]any{"vmId": "good"})
		b.untilEvent(5*time.Second, "default", "good", "ready")
		b.until(5*time.Second, "five dead letters", func() bool {
			s, err := b.js.Stream(t.Context(), "DEADLETTER")
			return err == nil && s.CachedInfo().State.Msgs == 5
		})
	})
}

// What does not fit waits, hears why in counts, and goes on when the very
// change comes: a server, a slot (Q3: SeleniumHQ/docker-selenium#2169; Q7:
// e2b-dev/infra#3553; Q11: hashicorp/nomad#17278; Q12: k8s#72122).
func TestWaitsAndWakes(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		b.create("default", "r1", map[string]any{"vmId": "a"})
		if q := b.untilEvent(5*time.Second, "default", "a", "queued"); q["explanation"] != "0/0 servers fit: no server is registered" {
			t.Errorf("queued: %v", q)
		}
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 1})
		defer w.stop()
		b.untilEvent(5*time.Second, "default", "a", "ready")
		b.create("default", "r2", map[string]any{"vmId": "b"})
		b.create("default", "r3", map[string]any{"vmId": "c", "role": "git"})
		if q := b.untilEvent(5*time.Second, "default", "b", "queued"); q["explanation"] != "0/1 servers fit: 1 full" {
			t.Errorf("queued: %v", q)
		}
		if q := b.untilEvent(5*time.Second, "default", "c", "queued"); q["explanation"] != `0/1 servers fit: 1 lacks role "git"` {
			t.Errorf("queued: %v", q)
		}
		b.request("default", "sandbox", events.Kill, events.TypeSandboxKill, "k", map[string]any{"vmId": "a"})
		b.untilEvent(5*time.Second, "default", "b", "ready")
		if w.peak != 1 {
			t.Errorf("%d at once on a server for 1", w.peak)
		}
		b.request("default", "sandbox", events.Kill, events.TypeSandboxKill, "k2", map[string]any{"vmId": "c"})
		if f := b.untilEvent(time.Second, "default", "c", "failed"); f["code"] != events.CodeKilled {
			t.Errorf("killed while queued: %v", f)
		}
	})
}

// Every clock is in the record and ends its sandbox at its server, with the
// code that says which clock it was (L8: opensandbox#1200; L14: selenoid#783).
func TestClocks(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 5})
		defer w.stop()
		b.untilEvent(3*time.Second, "_", "ax102-01", "healthy")
		b.create("default", "r1", map[string]any{"vmId": "ttl", "ttlSeconds": 30})
		b.create("default", "r2", map[string]any{"vmId": "idle", "idleTimeoutSeconds": 20})
		b.create("default", "r3", map[string]any{"vmId": "late", "role": "nobody", "queueTimeoutSeconds": 10})
		b.create("default", "r4", map[string]any{"vmId": "longer", "ttlSeconds": 30})
		b.untilEvent(5*time.Second, "default", "longer", "ready")
		b.request("default", "sandbox", events.Extend, events.TypeSandboxExtend, "x", map[string]any{"vmId": "longer", "ttlSeconds": 120})
		for vm, code := range map[string]string{"late": "queueTimeout", "idle": "idle", "ttl": "ttl"} {
			if e := b.untilEvent(40*time.Second, "default", vm, "expired"); e["code"] != code {
				t.Errorf("%s expired with %v", vm, e)
			}
		}
		same(t, b.names("default", "longer"), []string{"placed", "ready", "extended"})
		b.untilEvent(100*time.Second, "default", "longer", "expired")
		b.until(5*time.Second, "all freed", func() bool { return len(b.server("ax102-01").Allocs) == 0 && len(w.live) == 0 })
	})
}

// A refusal by the server queues again, elsewhere (Q14: k8s#106884); a failure
// is final, and its slot is free (L12: daytona#5142).
func TestRefusedAndFailedCreates(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		picky := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 5, Priority: 10})
		defer picky.stop()
		picky.answer = func(v events.Verb, vm string) computer.Outcome {
			switch {
			case v == events.Create && vm == "broken":
				return computer.Failed
			case v == events.Create:
				return computer.Rejected
			}
			return computer.OK
		}
		picky.code = events.CodeFull
		other := b.worker("ax102-02", kv.ServerConfig{MaxContainers: 5})
		defer other.stop()
		b.until(3*time.Second, "both healthy", func() bool {
			return len(b.events("event._.*.healthy")) == 2
		})
		b.create("default", "r1", map[string]any{"vmId": "a"})
		if r := b.untilEvent(20*time.Second, "default", "a", "ready"); r["serverId"] != "ax102-02" {
			t.Errorf("ready on %v", r["serverId"])
		}
		b.create("default", "r2", map[string]any{"vmId": "broken"})
		b.untilEvent(20*time.Second, "default", "broken", "failed")
		b.until(5*time.Second, "slots freed", func() bool { return len(b.server("ax102-01").Allocs) == 0 })
	})
}

// A reservation that no worker takes up is swept by claiming it.
func TestUnconfirmedIsSwept(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 5})
		defer w.stop()
		var silent atomic.Bool
		silent.Store(true)
		w.answer = func(v events.Verb, _ string) computer.Outcome {
			if v == events.Create && silent.Load() {
				return ""
			}
			return computer.OK
		}
		b.create("default", "r1", map[string]any{"vmId": "a"})
		b.untilEvent(5*time.Second, "default", "a", "placed")
		first := b.vm("a").Fence
		time.Sleep(20 * time.Second)
		silent.Store(false)
		b.untilEvent(60*time.Second, "default", "a", "ready")
		if second := b.vm("a").Fence; second <= first {
			t.Errorf("fence %d after %d", second, first)
		}
		if n := len(b.server("ax102-01").Allocs); n != 1 {
			t.Errorf("%d allocations", n)
		}
	})
}

// What its worker no longer has is lost, which is an event: a vm is never bound
// quietly to a fresh sandbox (L10: mitos#870).
func TestWorkersWordThatOneIsLost(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 5})
		defer w.stop()
		b.create("default", "r1", map[string]any{"vmId": "a"})
		b.untilEvent(5*time.Second, "default", "a", "ready")
		w.mu.Lock()
		w.gone = []kv.Gone{{VM: "a", Fence: b.vm("a").Fence, Code: "lost", Message: "browser crashed"}}
		w.mu.Unlock()
		if l := b.untilEvent(5*time.Second, "default", "a", "lost"); l["message"] != "browser crashed" {
			t.Errorf("lost: %v", l)
		}
		b.until(5*time.Second, "slot freed", func() bool { return len(b.server("ax102-01").Allocs) == 0 })
	})
}

// (H1: SeleniumHQ/selenium#9658; Q14) A server that falls silent is degraded, then down; what it held is lost
// after a minute, and it comes back with three good heartbeats.
func TestHealth(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 5})
		defer w.stop()
		b.create("default", "r1", map[string]any{"vmId": "a"})
		b.untilEvent(5*time.Second, "default", "a", "ready")
		w.mu.Lock()
		w.quiet = true
		w.mu.Unlock()
		b.untilEvent(9*time.Second, "_", "ax102-01", "degraded")
		b.untilEvent(30*time.Second, "_", "ax102-01", "down")
		if n := b.names("default", "a"); slices.Contains(n, "lost") {
			t.Errorf("lost as soon as down: %v", n)
		}
		if l := b.untilEvent(65*time.Second, "default", "a", "lost"); l["code"] != events.CodeServerDown {
			t.Errorf("lost: %v", l)
		}
		if len(b.server("ax102-01").Allocs) != 1 {
			t.Error("the slot was freed though nobody confirmed that the sandbox is gone")
		}
		w.mu.Lock()
		w.quiet = false
		w.mu.Unlock()
		b.untilEvent(15*time.Second, "_", "ax102-01", "healthy")
		b.until(70*time.Second, "slot freed once the worker confirms", func() bool { return len(b.server("ax102-01").Allocs) == 0 })
	})
}

// A service that knows only its tenant acts through the scheduler, and cannot
// see another tenant's sandbox.
func TestForwardedCommands(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 5})
		defer w.stop()
		b.create("red", "r1", map[string]any{"vmId": "a"})
		b.untilEvent(5*time.Second, "red", "a", "ready")
		act := map[string]any{"vmId": "a", "actions": []any{map[string]any{"type": "cursor"}}}
		b.request("red", "sandbox", events.Act, events.CommandType(events.Act), "act1", act)
		if f := b.untilEvent(5*time.Second, "red", "a", "finished"); f["outcome"] != "ok" || f["commandId"] != "act1" {
			t.Errorf("finished: %v", f)
		}
		b.request("blue", "sandbox", events.Act, events.CommandType(events.Act), "act2", act)
		if f := b.untilEvent(5*time.Second, "blue", "a", "finished"); f["outcome"] != "rejected" || f["error"].(map[string]any)["code"] != events.CodeNotFound {
			t.Errorf("another tenant's: %v", f)
		}
	})
}

// A drain is complete when the worker has confirmed zero, and forced at its
// deadline (H5: hashicorp/nomad#14293, SeleniumHQ/docker-selenium#2654).
func TestCordonDrainRemove(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 5})
		b.create("default", "r1", map[string]any{"vmId": "a"})
		b.untilEvent(5*time.Second, "default", "a", "ready")
		server := map[string]any{"serverId": "ax102-01"}
		b.request("default", "server", events.Cordon, events.TypeServerCordon, "c0", server)
		if r := b.untilEvent(5*time.Second, "default", "*", "rejected"); r["code"] != events.CodeForbidden {
			t.Error(r)
		}
		b.request("_", "server", events.Cordon, events.TypeServerCordon, "c1", server)
		b.untilEvent(5*time.Second, "_", "ax102-01", "cordoned")
		b.create("default", "r2", map[string]any{"vmId": "b"})
		if q := b.untilEvent(5*time.Second, "default", "b", "queued"); q["explanation"] != "0/1 servers fit: 1 cordoned" {
			t.Errorf("queued: %v", q)
		}
		b.request("_", "server", events.Uncordon, events.TypeServerUncord, "c2", server)
		b.untilEvent(5*time.Second, "default", "b", "ready")
		b.request("_", "server", events.Drain, events.TypeServerDrain, "c3", map[string]any{"serverId": "ax102-01", "deadlineSeconds": 10})
		time.Sleep(5 * time.Second)
		same(t, b.names("default", "a"), []string{"placed", "ready"})
		if k := b.untilEvent(10*time.Second, "default", "a", "killed"); k["code"] != "drained" {
			t.Errorf("killed: %v", k)
		}
		b.untilEvent(15*time.Second, "_", "ax102-01", "drained")
		b.request("_", "server", events.Remove, events.TypeServerRemove, "c4", server)
		if r := b.untilEvent(5*time.Second, "_", "ax102-01", "rejected"); r["code"] != events.CodeOccupied {
			t.Errorf("removed under its worker: %v", r)
		}
		w.stop()
		time.Sleep(time.Minute)
		b.request("_", "server", events.Remove, events.TypeServerRemove, "c5", server)
		b.untilEvent(5*time.Second, "_", "ax102-01", "removed")
	})
}

// A tenant has at most its quota of live sandboxes, and hears so.
func TestQuota(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 50})
		defer w.stop()
		b.request("_", "quota", events.Set, events.TypeQuotaSet, "q1", map[string]any{"tenant": "red", "maxSandboxes": 3})
		b.untilEvent(5*time.Second, "_", "red", "quota")
		for i := range 10 {
			b.create("red", fmt.Sprint("r", i), map[string]any{"vmId": fmt.Sprint("vm-", i)})
			b.create("blue", fmt.Sprint("b", i), nil)
		}
		b.until(10*time.Second, "all answered", func() bool {
			return len(b.events("event.red.*.ready"))+len(b.events("event.red.*.rejected")) == 10 && len(b.events("event.blue.*.ready")) == 10
		})
		if n := len(b.events("event.red.*.ready")); n != 3 {
			t.Errorf("%d sandboxes with a quota of 3", n)
		}
		if r := b.events("event.red.*.rejected")[0]; r.data["code"] != events.CodeQuota {
			t.Errorf("rejected: %v", r.data)
		}
		ready := b.events("event.red.*.ready")[0].data["vmId"].(string)
		b.request("red", "sandbox", events.Kill, events.TypeSandboxKill, "k", map[string]any{"vmId": ready})
		b.untilEvent(5*time.Second, "red", ready, "killed")
		b.create("red", "again", map[string]any{"vmId": "again"})
		b.untilEvent(5*time.Second, "red", "again", "ready")
		b.request("_", "quota", events.Set, events.TypeQuotaSet, "q2", map[string]any{"tenant": "red", "maxSandboxes": nil})
		time.Sleep(time.Second)
		b.create("red", "free", map[string]any{"vmId": "free"})
		b.untilEvent(5*time.Second, "red", "free", "ready")
	})
}

// A sandbox that becomes ready after its requester's deadline is destroyed
// again, and the request has expired (Q1: SeleniumHQ/selenium#11881, #10831).
func TestLateIsDestroyed(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 5})
		defer w.stop()
		w.delay = func(v events.Verb, _ string) time.Duration {
			if v == events.Create {
				return 15 * time.Second
			}
			return 0
		}
		b.untilEvent(3*time.Second, "_", "ax102-01", "healthy")
		b.create("default", "r1", map[string]any{"vmId": "a", "queueTimeoutSeconds": 10})
		if e := b.untilEvent(30*time.Second, "default", "a", "expired"); e["code"] != events.CodeQueueTimeout {
			t.Errorf("expired: %v", e)
		}
		b.until(30*time.Second, "destroyed and freed", func() bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return len(w.live) == 0 && len(b.server("ax102-01").Allocs) == 0
		})
		same(t, b.names("default", "a"), []string{"placed", "expired"})
	})
}

// A server that hangs with its creates holds up nobody else's (Q2:
// SeleniumHQ/selenium#13723), and one that refused is tried again after a
// while (Q6: e2b-dev/infra#2867).
func TestSlowAndRefusingServers(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		slow := b.worker("slow-01", kv.ServerConfig{MaxContainers: 200, Priority: 5, Roles: []string{"slow"}})
		defer slow.stop()
		slow.answer = func(v events.Verb, _ string) computer.Outcome { return "" }
		quick := b.worker("quick-01", kv.ServerConfig{MaxContainers: 200})
		defer quick.stop()
		var refusals atomic.Int32
		quick.code = events.CodeFull
		quick.answer = func(v events.Verb, vm string) computer.Outcome {
			if v == events.Create && vm == "picky" && refusals.Add(1) <= 2 {
				return computer.Rejected
			}
			return computer.OK
		}
		b.until(3*time.Second, "both healthy", func() bool { return len(b.events("event._.*.healthy")) == 2 })
		for i := range 100 {
			b.create("default", fmt.Sprint("s", i), map[string]any{"role": "slow"})
		}
		begin := time.Now()
		for i := range 20 {
			b.create("default", fmt.Sprint("q", i), map[string]any{"vmId": fmt.Sprint("q", i)})
		}
		b.until(5*time.Second, "all quick ones ready", func() bool { return len(b.events("event.default.*.ready")) == 20 })
		if d := time.Since(begin); d > time.Second {
			t.Errorf("the quick ones took %s beside a server that hangs", d)
		}
		b.create("default", "picky", map[string]any{"vmId": "picky"})
		b.untilEvent(40*time.Second, "default", "picky", "ready")
	})
}

// A server that refuses what fits its record is asked less and less, one create
// at a time, and holds up nobody: the others get them. Once it takes one it is as
// good as before (Q8: e2b-dev/infra#2878; Q10: hashicorp/nomad#9506).
func TestServerThatRefusesIsSetAside(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		liar := b.worker("liar-01", kv.ServerConfig{MaxContainers: 100, Priority: 9})
		defer liar.stop()
		honest := b.worker("honest-01", kv.ServerConfig{MaxContainers: 30})
		defer honest.stop()
		var asked atomic.Int32
		var mended atomic.Bool
		liar.code = events.CodeFull
		liar.answer = func(v events.Verb, _ string) computer.Outcome {
			if v == events.Create && !mended.Load() {
				asked.Add(1)
				return computer.Rejected
			}
			return computer.OK
		}
		b.until(3*time.Second, "both healthy", func() bool { return len(b.events("event._.*.healthy")) == 2 })
		for i := range 3 {
			b.create("default", fmt.Sprint("a", i), map[string]any{"vmId": fmt.Sprint("a", i)})
			b.untilEvent(10*time.Second, "default", fmt.Sprint("a", i), "ready")
		}
		for i := range 27 {
			b.create("default", fmt.Sprint("b", i), map[string]any{"vmId": fmt.Sprint("b", i)})
		}
		b.until(5*time.Second, "the honest one has them", func() bool { return len(b.server("honest-01").Allocs) == 30 })
		if n := asked.Load(); n != scheduler.AsideAfter {
			t.Errorf("it was asked %d times", n)
		}
		b.create("default", "last", map[string]any{"vmId": "last", "queueTimeoutSeconds": 900})
		time.Sleep(5 * time.Minute)
		if n := asked.Load(); n < scheduler.AsideAfter+2 || n > scheduler.AsideAfter+20 {
			t.Errorf("asked %d times after five minutes", n)
		}
		mended.Store(true)
		b.untilEvent(5*time.Minute, "default", "last", "ready")
		for i := range 5 {
			b.create("default", fmt.Sprint("c", i), map[string]any{"vmId": fmt.Sprint("c", i)})
		}
		b.until(5*time.Second, "five more at once", func() bool { return len(b.server("liar-01").Allocs) == 6 })
	})
}

// Thousands wait durably: every scheduler dies, order within each tenant
// holds, freed slots go to the tenants in turn, a waiting request is killed
// within a second, and REQUESTS holds nothing unacknowledged (Q3, Q11).
// BERTH_PARKED=5000 makes it as large as the nightly target does.
func TestParkedAcrossCrashes(t *testing.T) {
	parked := 100
	if s := os.Getenv("BERTH_PARKED"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil {
			t.Fatal(err)
		}
		parked = n
	}
	const blues = 20
	virtualtime.Test(t, func(t *testing.T) {
		b := setup(t)
		_, crash := b.scheduler("s1")
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 1})
		defer w.stop()
		b.untilEvent(10*time.Second, "_", "ax102-01", "healthy")
		b.create("red", "first", map[string]any{"vmId": "first", "ttlSeconds": 20})
		b.untilEvent(5*time.Second, "red", "first", "ready")
		for i := range parked - blues {
			b.create("red", fmt.Sprint(i), map[string]any{"vmId": fmt.Sprintf("red-%05d", i), "ttlSeconds": 1, "queueTimeoutSeconds": 80000})
		}
		for i := range blues {
			b.create("blue", fmt.Sprint(i), map[string]any{"vmId": fmt.Sprintf("blue-%05d", i), "ttlSeconds": 1, "queueTimeoutSeconds": 80000})
		}
		mustBeEmpty(t, b)
		crash()
		b.scheduler("s2")
		victim := fmt.Sprintf("red-%05d", parked-blues-1)
		b.request("red", "sandbox", events.Kill, events.TypeSandboxKill, "k", map[string]any{"vmId": victim})
		b.untilEvent(6*time.Second, "red", victim, "failed") // the successor's time, then at once
		victim = fmt.Sprintf("red-%05d", parked-blues-2)
		b.request("red", "sandbox", events.Kill, events.TypeSandboxKill, "k2", map[string]any{"vmId": victim})
		b.untilEvent(time.Second, "red", victim, "failed")
		b.until(10*time.Duration(parked)*time.Second, "all ready", func() bool { return len(b.events("event.*.*.ready")) == parked-1 })
		var order []string
		for _, e := range b.events("event.*.*.ready")[1:] {
			order = append(order, e.data["vmId"].(string))
		}
		var want []string
		for i := range blues {
			want = append(want, fmt.Sprintf("blue-%05d", i), fmt.Sprintf("red-%05d", i))
		}
		if !slices.Equal(order[:len(want)], want) {
			t.Errorf("order %v, want %v …", order[:len(want)], want)
		}
		if reds := order[len(want):]; !slices.IsSorted(reds) {
			t.Errorf("red's own order: %v", reds)
		}
		mustBeEmpty(t, b)
	})
}
