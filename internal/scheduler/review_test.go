package scheduler_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/scheduler"
	"berth/internal/virtualtime"
)

// Requests about one sandbox are taken in in order: a kill right behind its
// create finds it, always.
func TestKillRightBehindCreate(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 100})
		defer w.stop()
		b.untilEvent(3*time.Second, "_", "ax102-01", "healthy")
		const n = 40
		for i := range n {
			vm := fmt.Sprint("vm-", i)
			b.create("default", "c"+vm, map[string]any{"vmId": vm})
			b.request("default", "sandbox", events.Kill, events.TypeSandboxKill, "k"+vm, map[string]any{"vmId": vm})
		}
		b.until(20*time.Second, "all ended", func() bool {
			return len(b.events("event.default.*.killed"))+len(b.events("event.default.*.failed")) == n
		})
		if r := b.events("event.default.*.rejected"); len(r) > 0 {
			t.Errorf("%d kills were refused: %v", len(r), r[0].data)
		}
		b.until(10*time.Second, "slots freed", func() bool { return len(b.server("ax102-01").Allocs) == 0 })
	})
}

// One (source, id) from two tenants is two commands.
func TestSameIDFromTwoTenants(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 5})
		defer w.stop()
		for _, tenant := range []string{"red", "blue"} {
			b.create(tenant, "c"+tenant, map[string]any{"vmId": tenant})
			b.untilEvent(5*time.Second, tenant, tenant, "ready")
			b.request(tenant, "sandbox", events.Act, events.CommandType(events.Act), "2", map[string]any{"vmId": tenant, "actions": []any{map[string]any{"type": "cursor"}}})
		}
		for _, tenant := range []string{"red", "blue"} {
			if f := b.untilEvent(5*time.Second, tenant, tenant, "finished"); f["outcome"] != "ok" {
				t.Errorf("%s: %v", tenant, f)
			}
		}
	})
}

// A phase that somebody else wrote, or this scheduler without hearing so, is
// announced all the same.
func TestForeignMoveIsAnnounced(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		b.create("default", "r1", map[string]any{"vmId": "a", "role": "nobody"})
		b.untilEvent(5*time.Second, "default", "a", "queued")
		_, _, err := kv.Update(t.Context(), b.places, kv.VMKey("a"), func(p *kv.Placement, rev uint64) error {
			if rev == 0 {
				return errors.New("no record")
			}
			now := time.Now().UTC()
			p.Phase, p.Outcome, p.Code, p.EndedAt = kv.Ended, events.EventFailed, events.CodeKilled, &now
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		b.untilEvent(2*time.Second, "default", "a", "failed")
	})
}

// A pause of the idle clock that comes late, after the sandbox was used again, is
// what the sandbox is: the record and the tenant hear of it.
func TestLateIdlePauseIsTheTruth(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 5, Capabilities: []string{"pause"}})
		defer w.stop()
		w.delay = func(verb events.Verb, _ string) time.Duration {
			if verb == events.Pause {
				return 14 * time.Second
			}
			return 0
		}
		b.create("default", "r1", map[string]any{"vmId": "a", "idleTimeoutSeconds": 20, "idlePolicy": "pause"})
		b.untilEvent(10*time.Second, "default", "a", "ready")
		time.Sleep(22 * time.Second) // the pause is out
		b.request("default", "sandbox", events.Act, events.CommandType(events.Act), "2", map[string]any{"vmId": "a", "actions": []any{map[string]any{"type": "cursor"}}})
		b.untilEvent(5*time.Second, "default", "a", "finished")
		b.untilEvent(20*time.Second, "default", "a", "paused")
		if b.vm("a").PausedAt == nil {
			t.Error("the record does not know that it is paused")
		}
	})
}

// A burst of refusals from one incident sets a server aside once.
func TestBurstOfRefusals(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 50})
		defer w.stop()
		b.untilEvent(3*time.Second, "_", "ax102-01", "healthy")
		var mended atomic.Bool
		w.mu.Lock()
		w.code = events.CodeUnavailable
		w.answer = func(v events.Verb, _ string) computer.Outcome {
			if v == events.Create && !mended.Load() {
				return computer.Rejected
			}
			return computer.OK
		}
		w.mu.Unlock()
		for i := range 20 {
			b.create("default", fmt.Sprint(i), map[string]any{"vmId": fmt.Sprint("vm-", i)})
		}
		time.Sleep(time.Second)
		mended.Store(true)
		b.until(30*time.Second, "all ready", func() bool { return len(b.events("event.default.*.ready")) == 20 })
	})
}

// A person who looks at a sandbox uses it, also across a change of scheduler
// (S11: agent-browser#1617).
func TestViewersStopTheIdleClock(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		b := setup(t)
		stop, _ := b.scheduler("s1")
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 5})
		defer w.stop()
		b.create("default", "r1", map[string]any{"vmId": "a", "idleTimeoutSeconds": 20})
		b.create("default", "r2", map[string]any{"vmId": "b", "idleTimeoutSeconds": 20})
		b.untilEvent(5*time.Second, "default", "a", "ready")
		watch := func(vms ...string) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.watched = vms
		}
		watch("a")
		b.untilEvent(30*time.Second, "default", "b", "expired")
		stop()
		b.scheduler("s2")
		time.Sleep(60 * time.Second)
		if got := b.names("default", "a"); slices.Contains(got, "expired") {
			t.Errorf("a was watched and is %v", got)
		}
		watch()
		if e := b.untilEvent(25*time.Second, "default", "a", "expired"); e["code"] != events.CodeIdle {
			t.Errorf("a ended with %v", e)
		}
	})
}

// With the policy `pause` the idle clock pauses a sandbox, once, says so, and
// begins anew with its resume; a sandbox that cannot be paused ends, as does one
// that is not used after its resume and cannot be paused then.
func TestIdlePolicyPause(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		b := setup(t)
		stop, _ := b.scheduler("s1")
		b.create("default", "r0", map[string]any{"vmId": "bad", "idlePolicy": "pause"})
		if e := b.untilEvent(5*time.Second, "default", "bad", "rejected"); e["code"] != events.CodeBadInput {
			t.Errorf("without a time-out: %v", e)
		}
		b.create("default", "r1", map[string]any{"vmId": "a", "idleTimeoutSeconds": 20, "idlePolicy": "pause"})
		poor := b.worker("poor-01", kv.ServerConfig{MaxContainers: 5})
		defer poor.stop()
		b.untilEvent(3*time.Second, "_", "poor-01", "healthy")
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 5, Capabilities: []string{"pause"}})
		defer w.stop()
		if e := b.untilEvent(15*time.Second, "default", "a", "ready"); e["serverId"] != "ax102-01" {
			t.Errorf("ready: %v", e)
		}
		if e := b.untilEvent(30*time.Second, "default", "a", "paused"); e["code"] != events.CodeIdle {
			t.Errorf("paused: %v", e)
		}
		stop()
		b.scheduler("s2")
		time.Sleep(5 * time.Minute)
		same(t, slices.DeleteFunc(b.names("default", "a"), func(s string) bool { return s == "queued" }), []string{"placed", "ready", "paused"})
		b.request("default", "sandbox", events.Resume, events.CommandType(events.Resume), "r2", map[string]any{"vmId": "a"})
		b.untilEvent(5*time.Second, "default", "a", "finished")
		w.mu.Lock()
		w.answer = func(verb events.Verb, _ string) computer.Outcome {
			if verb == events.Pause {
				return computer.Failed
			}
			return computer.OK
		}
		w.mu.Unlock()
		if e := b.untilEvent(30*time.Second, "default", "a", "expired"); e["code"] != events.CodeIdle || !strings.Contains(fmt.Sprint(e["message"]), "could not be paused") {
			t.Errorf("after a pause that failed: %v", e)
		}
	})
}

// A server that died for good can be removed although its slots are taken, and
// then they are free.
func TestRemoveTheDead(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 5})
		b.create("default", "r1", map[string]any{"vmId": "a"})
		b.untilEvent(5*time.Second, "default", "a", "ready")
		w.mu.Lock()
		w.quiet = true
		w.mu.Unlock()
		w.stop()
		b.untilEvent(120*time.Second, "default", "a", "lost")
		results := func() uint64 {
			s, err := b.js.Stream(t.Context(), "RESULTS")
			if err != nil {
				t.Fatal(err)
			}
			return s.CachedInfo().State.Msgs
		}
		before := results()
		time.Sleep(10 * time.Minute)
		if after := results(); after > before+1 {
			t.Errorf("%d results in ten minutes of a dead server", after-before)
		}
		b.request("_", "server", events.Remove, events.TypeServerRemove, "x", map[string]any{"serverId": "ax102-01"})
		b.untilEvent(10*time.Second, "_", "ax102-01", "removed")
		b.until(10*time.Second, "freed", func() bool { return b.vm("a").FreedAt != nil })
	})
}

// Pause stops the idle clock, resume starts it anew (L9: cubeplex#538).
func TestPauseStopsTheIdleClock(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 5})
		defer w.stop()
		b.create("default", "r1", map[string]any{"vmId": "a", "idleTimeoutSeconds": 20})
		b.untilEvent(5*time.Second, "default", "a", "ready")
		b.request("default", "sandbox", events.Pause, events.CommandType(events.Pause), "p", map[string]any{"vmId": "a"})
		time.Sleep(time.Minute)
		same(t, b.names("default", "a"), []string{"placed", "ready", "finished"})
		b.request("default", "sandbox", events.Resume, events.CommandType(events.Resume), "r", map[string]any{"vmId": "a"})
		time.Sleep(15 * time.Second)
		same(t, b.names("default", "a"), []string{"placed", "ready", "finished", "finished"})
		if e := b.untilEvent(10*time.Second, "default", "a", "expired"); e["code"] != events.CodeIdle {
			t.Errorf("expired: %v", e)
		}
	})
}

// A vm id is free again some time after its end, and its record is gone.
func TestTombstone(t *testing.T) {
	defer scheduler.SetTombstone(10 * time.Minute)()
	run(t, func(t *testing.T, b *bundle) {
		b.create("default", "r1", map[string]any{"vmId": "a", "role": "nobody", "queueTimeoutSeconds": 1})
		b.untilEvent(5*time.Second, "default", "a", "expired")
		b.create("default", "r2", map[string]any{"vmId": "a"})
		if r := b.untilEvent(5*time.Second, "default", "a", "rejected"); r["code"] != events.CodeVMIDInUse {
			t.Errorf("rejected: %v", r)
		}
		time.Sleep(11 * time.Minute)
		if _, _, err := kv.Get[kv.Placement](t.Context(), b.places, kv.VMKey("a")); !errors.Is(err, kv.ErrNotFound) {
			t.Errorf("the record is still there: %v", err)
		}
		b.create("default", "r3", map[string]any{"vmId": "a", "role": "nobody", "queueTimeoutSeconds": 1})
		b.until(5*time.Second, "expired again", func() bool { return len(b.events("event.default.a.expired")) == 2 })
	})
}

// Reservations of one server that come together are written together, in the
// order in which they came, and none is lost among them.
func TestReservationsAreWrittenTogether(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 150})
		defer w.stop()
		b.untilEvent(3*time.Second, "_", "ax102-01", "healthy")
		watch, err := b.places.Watch(t.Context(), kv.ServerKey("ax102-01"), jetstream.UpdatesOnly())
		if err != nil {
			t.Fatal(err)
		}
		const n = 200 // more than fit
		for i := range n {
			b.create("default", fmt.Sprint("c", i), map[string]any{"vmId": fmt.Sprint("vm-", i)})
		}
		b.until(20*time.Second, "150 ready, the rest queued", func() bool {
			return len(b.events("event.default.*.ready")) == 150 && len(b.events("event.default.*.queued")) == 50
		})
		if err := watch.Stop(); err != nil {
			t.Fatal(err)
		}
		writes := 0
		for range watch.Updates() {
			writes++
		}
		if held := len(b.server("ax102-01").Allocs); held != 150 || writes == 0 || writes > 75 {
			t.Errorf("%d slots were taken in %d writes; want 150 in half as many at most", held, writes)
		}
	})
}
