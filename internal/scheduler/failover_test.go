package scheduler_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/natsd/natsdtest"
	"berth/internal/scheduler"
	"berth/internal/virtualtime"
)

// The active scheduler dies, or is cut off, in the middle of a burst; another
// finishes it within 5 s. Nothing is lost, said twice or overbooked, and no
// half-made reservation stays (I1, I2, I8; Q13: k8s#49314; H3:
// hashicorp/nomad#3035).
func TestSuccessorFinishesTheBurst(t *testing.T) {
	for _, how := range []string{"crash", "stop"} {
		virtualtime.Test(t, func(t *testing.T) {
			b := setup(t)
			stop, crash := b.scheduler("s1")
			w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 7})
			defer w.stop()
			b.until(10*time.Second, "healthy", func() bool { return slices.Contains(b.names("_", "ax102-01"), "healthy") })
			b.scheduler("s2")
			const n = 40
			for i := range n {
				b.create("default", fmt.Sprint(i), map[string]any{"vmId": fmt.Sprintf("vm-%d", i), "ttlSeconds": 1, "queueTimeoutSeconds": 600})
				if i == n/2 {
					if how == "crash" {
						crash()
					} else {
						stop()
					}
				}
			}
			ended := time.Now()
			b.create("default", "probe", map[string]any{"vmId": "probe", "role": "nobody"})
			b.untilEvent(5*time.Second, "default", "probe", "queued")
			t.Logf("after a %s the successor worked within %s", how, time.Since(ended))
			if limit := time.Second; how == "stop" && time.Since(ended) > limit {
				t.Errorf("after a clean stop the successor took %s", time.Since(ended))
			}
			for i := range n {
				vm := fmt.Sprintf("vm-%d", i)
				b.untilEvent(120*time.Second, "default", vm, "expired")
				ones := slices.DeleteFunc(b.names("default", vm), func(s string) bool { return s == "queued" })
				same(t, ones, []string{"placed", "ready", "expired"})
			}
			b.until(10*time.Second, "all slots freed", func() bool { return len(b.server("ax102-01").Allocs) == 0 })
			if w.peak > 7 {
				t.Errorf("%d sandboxes at once on a server for 7", w.peak)
			}
			mustBeEmpty(t, b)
		})
	}
}

// A scheduler whose packets vanish keeps nothing to itself: what the server
// would still send to it goes to its successor. Healed, it stands by, and
// nothing has happened twice.
func TestSilentSchedulerKeepsNothing(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		b := setup(t)
		gate := natsdtest.New(func() nats.InProcessConnProvider { return b })
		b.schedulerBy(gate, "s1")
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 50})
		defer w.stop()
		b.untilEvent(10*time.Second, "_", "ax102-01", "healthy")
		b.scheduler("s2")
		gate.Set(natsdtest.Hole)
		const n = 20
		for i := range n {
			b.create("default", fmt.Sprint(i), map[string]any{"vmId": fmt.Sprintf("vm-%d", i)})
		}
		b.until(8*time.Second, "all ready", func() bool { return len(b.events("event.default.*.ready")) == n })
		gate.Set(natsdtest.Open)
		b.create("default", "late", map[string]any{"vmId": "late"})
		b.untilEvent(5*time.Second, "default", "late", "ready")
		time.Sleep(time.Minute)
		for i := range n {
			same(t, b.names("default", fmt.Sprintf("vm-%d", i)), []string{"placed", "ready"})
		}
		mustBeEmpty(t, b)
	})
}

func mustBeEmpty(t *testing.T, b *bundle) {
	t.Helper()
	b.until(15*time.Second, "REQUESTS empty", func() bool {
		s, err := b.js.Stream(t.Context(), "REQUESTS")
		return err == nil && s.CachedInfo().State.Msgs == 0
	})
}

// What the term before moved and could not announce, the next announces.
func TestUnsaidIsSaid(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		b := setup(t)
		stop, _ := b.scheduler("s1")
		b.create("default", "r1", map[string]any{"vmId": "a", "role": "nobody"})
		b.untilEvent(5*time.Second, "default", "a", "queued")
		stop()
		// A scheduler that crashed between the two writes leaves this.
		_, _, err := kv.Update(t.Context(), b.places, kv.VMKey("a"), func(p *kv.Placement, rev uint64) error {
			if rev == 0 {
				return errors.New("no record")
			}
			now := time.Now().UTC()
			p.Phase, p.Outcome, p.Code, p.EndedAt, p.Spec = kv.Ended, "failed", "killed", &now, nil
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		b.scheduler("s2")
		b.untilEvent(10*time.Second, "default", "a", "failed")
		time.Sleep(3 * time.Second)
		b.scheduler("s3")
		time.Sleep(10 * time.Second)
		same(t, b.names("default", "a"), []string{"queued", "failed"})
	})
}

// The NATS server restarts under a scheduler: it goes on, and hears what
// happens afterwards (H11: nats-io/nats.go#1094,
// openobserve#13594).
func TestServerRestart(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		b := setup(t)
		b.scheduler("s1")
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 3})
		b.create("default", "r1", map[string]any{"vmId": "a", "ttlSeconds": 600})
		b.untilEvent(5*time.Second, "default", "a", "ready")
		w.stop()
		b.restart(3 * time.Second)
		w = b.worker("ax102-01", kv.ServerConfig{MaxContainers: 3})
		defer w.stop()
		b.create("default", "r2", map[string]any{"vmId": "b", "ttlSeconds": 600})
		b.untilEvent(40*time.Second, "default", "b", "ready")
		same(t, b.names("default", "a"), []string{"placed", "ready"})
	})
}

// command publishes an act of source /test.
func (b *bundle) act(server, vm, id string) {
	b.t.Helper()
	e, err := events.New(events.CommandType(events.Act), "/test", id, map[string]any{"actions": []any{map[string]any{"type": "cursor"}}})
	if err != nil {
		b.t.Fatal(err)
	}
	msg, err := events.NewMessage(b.t.Context(), events.CommandSubject(server, vm, events.Act), e)
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := b.js.PublishMsg(b.t.Context(), msg); err != nil {
		b.t.Fatal(err)
	}
}

// result waits for the end of a command of source /test.
func (b *bundle) result(d time.Duration, server, vm, id string) events.Finished {
	b.t.Helper()
	var f events.Finished
	stream, err := b.js.Stream(b.t.Context(), "RESULTS")
	if err != nil {
		b.t.Fatal(err)
	}
	b.until(d, "result of "+id, func() bool {
		e, raw, err := bus.Last(b.t.Context(), stream, events.ResultSubject(server, vm, events.Token("/test", id)))
		if err != nil || raw == nil || e.Type() != events.TypeFinished {
			return false
		}
		return events.DecodeTolerant(e, &f) == nil
	})
	return f
}

// Every command ends, also where nobody serves: an unknown server, one that
// went down with commands waiting and one running, and one that is down (H1, H10).
func TestCommandsThatNobodyServes(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		b.act("nowhere-01", "a", "unknown")
		if f := b.result(10*time.Second, "nowhere-01", "a", "unknown"); f.Outcome != "rejected" || f.Error.Code != events.CodeServerDown {
			t.Errorf("unknown server: %+v", f)
		}
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 5})
		defer w.stop()
		b.untilEvent(3*time.Second, "_", "ax102-01", "healthy")
		b.create("default", "r1", map[string]any{"vmId": "a"})
		b.untilEvent(5*time.Second, "default", "a", "ready")
		w.mu.Lock()
		w.quiet = true
		w.mu.Unlock()
		w.stop()
		b.act("ax102-01", "a", "waiting")
		started, err := events.New(events.TypeStarted, events.SourceWorker, "claim", events.Started{CommandID: "running", Source: "/test", Command: events.Act, Fence: b.vm("a").Fence})
		if err != nil {
			t.Fatal(err)
		}
		msg, err := events.NewMessage(t.Context(), events.ResultSubject("ax102-01", "a", events.Token("/test", "running")), started)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := bus.PublishExpecting(t.Context(), b.js, msg, 0); err != nil {
			t.Fatal(err)
		}
		b.untilEvent(40*time.Second, "_", "ax102-01", "down")
		if f := b.result(5*time.Second, "ax102-01", "a", "waiting"); f.Outcome != "rejected" {
			t.Errorf("waiting: %+v", f)
		}
		b.act("ax102-01", "a", "late")
		if f := b.result(10*time.Second, "ax102-01", "a", "late"); f.Outcome != "rejected" {
			t.Errorf("late: %+v", f)
		}
		if f := b.result(70*time.Second, "ax102-01", "a", "running"); f.Outcome != "unknown" {
			t.Errorf("running: %+v", f)
		}
		b.untilEvent(5*time.Second, "default", "a", "lost")
	})
}

// usurper runs a scheduler that is active without a lease.
func (b *bundle) usurper(name string, epoch uint64) {
	nc, js := b.connect("scheduler", name)
	s, err := scheduler.New(scheduler.Options{JS: js, Name: name, Log: testLog()})
	if err != nil {
		b.t.Fatal(err)
	}
	b.wg.Go(func() {
		defer nc.Close()
		if err := s.RunTerm(b.t.Context(), epoch); err != nil && b.t.Context().Err() == nil {
			b.t.Errorf("%s: %v", name, err)
		}
	})
}

// Any number of schedulers that all believe they are active overbook nothing,
// mix nothing, and end every request once (I1, I2, I5; deer-flow#4339,
// k8s#136782, agent-sandbox#418; Q4: sel#14987, capacity is taken where it is
// checked).
func TestManyActiveAtOnce(t *testing.T) {
	for _, n := range []uint64{2, 4, 8} {
		virtualtime.Test(t, func(t *testing.T) {
			b := setup(t)
			for i := range n {
				b.usurper(fmt.Sprintf("s%d", i), i+1)
			}
			a := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 3, Isolation: kv.IsolationTenant, Roles: []string{"default", "git"}})
			defer a.stop()
			c := b.worker("ax102-02", kv.ServerConfig{MaxContainers: 2, Isolation: kv.IsolationRole, Roles: []string{"default", "git"}})
			defer c.stop()
			broken := b.watchInvariants()
			tenants, roles := []string{"red", "blue"}, []string{"default", "git"}
			const sandboxes = 40
			for i := range sandboxes {
				b.create(tenants[i%2], fmt.Sprint(i), map[string]any{"vmId": fmt.Sprintf("vm-%d", i), "role": roles[i/2%2], "ttlSeconds": 1, "queueTimeoutSeconds": 3000})
			}
			b.until(400*time.Second, "all ended", func() bool { return len(b.events("event.*.*.expired")) == sandboxes })
			for i := range sandboxes {
				names := b.names(tenants[i%2], fmt.Sprintf("vm-%d", i))
				names = slices.DeleteFunc(names, func(s string) bool { return s == "queued" || s == "placed" })
				same(t, names, []string{"ready", "expired"})
			}
			if a.peak > 3 || c.peak > 2 {
				t.Errorf("%d and %d at once on servers for 3 and 2\n%s", a.peak, c.peak, b.dump())
			}
			if why := broken(); why != "" {
				t.Error(why)
			}
			mustBeEmpty(t, b)
		})
	}
}

// watchInvariants looks at every version of every server's record: capacity
// and isolation hold in each, not only at the end.
func (b *bundle) watchInvariants() (broken func() string) {
	w, err := b.places.Watch(b.t.Context(), "server.*")
	if err != nil {
		b.t.Fatal(err)
	}
	var mu sync.Mutex
	var why string
	b.wg.Go(func() {
		for e := range w.Updates() {
			if e == nil || e.Operation() != jetstream.KeyValuePut {
				continue
			}
			var s kv.Server
			if err := json.Unmarshal(e.Value(), &s); err != nil {
				continue
			}
			roles, tenants := map[string]bool{}, map[string]bool{}
			for _, a := range s.Allocs {
				roles[a.Role], tenants[a.Tenant] = true, true
			}
			mu.Lock()
			switch {
			case len(s.Allocs) > s.Config.MaxContainers:
				why = fmt.Sprintf("%s: %d allocations of %d", s.ID, len(s.Allocs), s.Config.MaxContainers)
			case s.Config.Isolation != kv.IsolationNone && len(roles) > 1:
				why = fmt.Sprintf("%s holds roles %v", s.ID, roles)
			case s.Config.Isolation == kv.IsolationTenant && len(tenants) > 1:
				why = fmt.Sprintf("%s holds tenants %v", s.ID, tenants)
			}
			mu.Unlock()
		}
	})
	return func() string {
		mu.Lock()
		defer mu.Unlock()
		return why
	}
}

// A kill that a trusted service sends to the worker itself ends the sandbox
// too, also one whose create the scheduler has not heard of yet.
func TestKillPastTheScheduler(t *testing.T) {
	run(t, func(t *testing.T, b *bundle) {
		w := b.worker("ax102-01", kv.ServerConfig{MaxContainers: 5})
		defer w.stop()
		w.delay = func(v events.Verb, vm string) time.Duration {
			if v == events.Create && vm == "early" {
				return 2 * time.Second
			}
			return 0
		}
		b.untilEvent(3*time.Second, "_", "ax102-01", "healthy")
		b.create("default", "r1", map[string]any{"vmId": "ready"})
		b.create("default", "r2", map[string]any{"vmId": "early"})
		b.untilEvent(5*time.Second, "default", "ready", "ready")
		for _, vm := range []string{"ready", "early"} {
			fence := b.vm(vm).Fence
			e, err := events.New(events.CommandType(events.Kill), "/test", "kill-"+vm, events.Command{Fence: &fence})
			if err != nil {
				t.Fatal(err)
			}
			msg, err := events.NewMessage(t.Context(), events.CommandSubject("ax102-01", vm, events.Kill), e)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := b.js.PublishMsg(t.Context(), msg); err != nil {
				t.Fatal(err)
			}
		}
		b.untilEvent(5*time.Second, "default", "ready", "killed")
		if f := b.untilEvent(10*time.Second, "default", "early", "failed"); f["code"] != events.CodeKilled {
			t.Errorf("failed: %v", f)
		}
		b.until(20*time.Second, "all gone and freed", func() bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return len(w.live) == 0 && len(b.server("ax102-01").Allocs) == 0
		})
	})
}
