package worker

import (
	"context"
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers/providertest"
	"berth/internal/virtualtime"
)

// step is one thing that happens in a random history.
type step struct {
	Kind string  // see history.do
	VM   string  // of commands
	N    int     // of dup: which command
	Secs float64 // of act: how long it runs; of the others: how long it lasts
}

func (s step) String() string {
	switch s.Kind {
	case "act", "observe", "kill", "hang", "die", "renew", "slow":
		return fmt.Sprintf("%s(%s %.1f)", s.Kind, s.VM, s.Secs)
	}
	return fmt.Sprintf("%s(%d %.1f)", s.Kind, s.N, s.Secs)
}

func drawSteps(rt *rapid.T) []step {
	kinds := []string{"act", "act", "act", "act", "act", "dup", "observe", "sleep", "sleep", "crash", "kill", "cut", "hole", "outage", "drain", "hang", "die", "renew", "slow", "handover", "handover"}
	return rapid.SliceOfN(rapid.Custom(func(rt *rapid.T) step {
		return step{
			Kind: rapid.SampledFrom(kinds).Draw(rt, "kind"),
			VM:   rapid.SampledFrom([]string{"a", "b"}).Draw(rt, "vm"),
			N:    rapid.IntRange(0, 20).Draw(rt, "n"),
			Secs: rapid.SampledFrom([]float64{0, 0.1, 0.7, 2, 6, 9, 14}).Draw(rt, "secs"),
		}
	}), 4, 14).Draw(rt, "steps")
}

// collector notes failures, so that they can be told outside the bubble.
type collector struct {
	testing.TB
	errs []string
}

type stopTest struct{}

func (c *collector) Helper() {}
func (c *collector) Errorf(format string, args ...any) {
	c.errs = append(c.errs, fmt.Sprintf(format, args...))
}
func (c *collector) Error(args ...any) { c.errs = append(c.errs, fmt.Sprint(args...)) }
func (c *collector) Fatal(args ...any) { c.Error(args...); panic(stopTest{}) }
func (c *collector) Fatalf(format string, args ...any) {
	c.Errorf(format, args...)
	panic(stopTest{})
}

// few sets how many cases a property is tried on in this test, unless the
// tester has said.
func few(t *testing.T, checks string) {
	t.Helper()
	f := flag.Lookup("rapid.checks")
	if f.Value.String() != f.DefValue {
		return
	}
	if err := flag.Set("rapid.checks", checks); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := flag.Set("rapid.checks", f.DefValue); err != nil {
			t.Error(err)
		}
	})
}

// Whatever happens to workers, the bus and the sandboxes, in whatever order:
// every command is finished exactly once, no action runs twice, a rejected
// command has run nothing, one that is ok has run whole, commands on one
// sandbox take effect in the order published, and what is killed stays dead.
func TestAnyHistory(t *testing.T) {
	few(t, "20")
	rapid.Check(t, func(rt *rapid.T) {
		opts := providertest.FakeOptions{Recall: rapid.Bool().Draw(rt, "recall"), CheckFences: rapid.Bool().Draw(rt, "fences"), Detached: rapid.Bool().Draw(rt, "detached")}
		steps := drawSteps(rt)
		c := &collector{}
		virtualtime.Test(t, func(t *testing.T) {
			c.TB = t
			w := newWorld(c, t.TempDir())
			defer w.close()
			defer func() {
				if p := recover(); p != nil && p != any(stopTest{}) {
					panic(p)
				}
			}()
			w.fakeWith(server1, opts)
			newHistory(w).play(steps)
		})
		if len(c.errs) > 0 {
			rt.Fatalf("%+v\n%v\n%s", opts, steps, strings.Join(c.errs, "\n"))
		}
	})
}

// history plays steps with the test in the scheduler's part.
type history struct {
	w        *world
	active   []*process
	names    int
	commands []played
	fences   map[string]uint64
}

type played struct {
	sent
	verb    events.Verb
	id      string
	data    any
	actions int
	fence   uint64
}

func newHistory(w *world) *history {
	h := &history{w: w, fences: map[string]uint64{}}
	h.start()
	w.holds("w1")
	h.start()
	h.fences["a"], h.fences["b"] = w.ready("a"), w.ready("b")
	return h
}

func (h *history) start() {
	h.names++
	h.active = append(h.active, h.w.start(fmt.Sprint("w", h.names)))
}

// holder is the process that holds the lease, or the first.
func (h *history) holder() (int, *process) {
	name := h.w.record(server1).Worker
	for i, p := range h.active {
		if p.worker.opts.Name == name {
			return i, p
		}
	}
	return 0, h.active[0]
}

func (h *history) play(steps []step) {
	for _, s := range steps {
		h.do(s)
	}
	for _, p := range h.active {
		p.gate.set("")
	}
	var results []events.Finished
	for _, c := range h.commands {
		results = append(results, h.w.await(c.sent))
	}
	time.Sleep(40 * time.Second) // nothing late changes anything
	h.check(results)
}

func (h *history) send(verb events.Verb, vm string, data any, actions int) {
	id := fmt.Sprint(len(h.commands))
	h.commands = append(h.commands, played{h.w.publish(vm, verb, id, data), verb, id, data, actions, h.fences[vm]})
}

func (h *history) do(s step) {
	w := h.w
	d := time.Duration(s.Secs * float64(time.Second))
	switch s.Kind {
	case "act":
		data := act(click(1, 1), wait(s.Secs), click(2, 2))
		data["deadline"] = time.Now().Add(10 * time.Minute)
		data["fence"] = h.fences[s.VM]
		h.send(events.Act, s.VM, data, 3)
	case "observe":
		h.send(events.Observe, s.VM, events.Command{Fence: ptr(h.fences[s.VM])}, 0)
	case "kill":
		h.send(events.Kill, s.VM, events.Command{Fence: ptr(h.fences[s.VM])}, 0)
	case "dup":
		if len(h.commands) > 0 {
			c := h.commands[s.N%len(h.commands)]
			w.publish(c.vm, c.verb, c.id, c.data)
		}
	case "crash":
		i, p := h.holder()
		p.crash()
		h.active = slices.Delete(h.active, i, i+1)
		h.start()
	case "drain":
		i, p := h.holder()
		p.gate.set("")
		p.cancel() // it drains while other things happen
		h.active = slices.Delete(h.active, i, i+1)
		h.start()
	case "handover": // as for balance, while other things happen
		i, p := h.holder()
		if to := h.active[(i+1)%len(h.active)]; to != p {
			handOver(p, server1, to.worker.opts.Name)
		}
		time.Sleep(d)
	case "cut", "hole":
		_, p := h.holder()
		p.gate.set(s.Kind)
		time.Sleep(d)
		p.gate.set("")
	case "outage":
		w.outage(d)
	case "sleep":
		time.Sleep(d)
	case "hang":
		w.fake(server1).Inject("Action", s.VM, 1, providertest.Injection{Hang: true})
	case "renew": // killed, freed, and placed and made again
		h.send(events.Kill, s.VM, events.Command{Fence: ptr(h.fences[s.VM]), Deadline: ptr(time.Now().Add(10 * time.Minute))}, 0)
		if w.await(h.commands[len(h.commands)-1].sent).Outcome != computer.OK {
			return
		}
		w.free(server1, s.VM)
		h.fences[s.VM] = w.place(server1, s.VM)
		h.send(events.Create, s.VM, events.CommandCreate{Fence: h.fences[s.VM], Tenant: "acme", Role: "git", TTLSeconds: 3600, Deadline: ptr(time.Now().Add(10 * time.Minute))}, 0)
	case "slow": // the next create takes long
		w.fake(server1).Inject("Create", s.VM, 1, providertest.Injection{Latency: d})
	case "die":
		if s.Secs > 6 {
			w.fake(server1).Crash(s.VM)
		}
	}
}

func ptr[T any](v T) *T { return &v }

func (h *history) check(results []events.Finished) {
	w, effects := h.w, h.w.fake(server1).Effects()
	count := map[string]int{}
	order := map[string][]int{}
	for _, e := range effects {
		count[fmt.Sprint(e.Key, "/", e.Index)]++
		i := slices.IndexFunc(h.commands, func(c played) bool { return c.token == e.Key })
		order[e.VM] = append(order[e.VM], i)
		if i < 0 || e.Fence != h.commands[i].fence {
			w.Errorf("an effect of command %d in another life of %s", i, e.VM)
		}
	}
	for k, n := range count {
		if n > 1 {
			w.Errorf("action %s ran %d times", k, n)
		}
	}
	for vm, o := range order {
		if !slices.IsSorted(o) {
			w.Errorf("commands on %s ran in the order %v", vm, o)
		}
	}
	for i, c := range h.commands {
		w.once(c.sent)
		ran := 0
		for j := range c.actions {
			ran += count[fmt.Sprint(c.token, "/", j)]
		}
		switch r := results[i]; {
		case r.Outcome == computer.Rejected && ran > 0:
			w.Errorf("command %d ran %d actions and is rejected: %s", i, ran, mustJSON(r))
		case r.Outcome == computer.OK && c.verb == events.Act && ran != c.actions:
			w.Errorf("command %d is ok and ran %d of %d actions", i, ran, c.actions)
		case r.Outcome != computer.OK && r.Error == nil:
			w.Errorf("command %d has no reason: %s", i, mustJSON(r))
		case r.Outcome == computer.OK && c.verb == events.Kill:
			for _, l := range w.fake(server1).Lives() {
				if l.VM == c.vm && l.Fence <= c.fence && l.Ended.IsZero() {
					w.Errorf("%s was killed and lives: %+v", c.vm, l)
				}
			}
		case c.verb == events.Create && r.Outcome != computer.OK && r.Outcome != computer.Unknown:
			for _, l := range w.fake(server1).Lives() {
				if l.VM == c.vm && l.Fence == c.fence && l.Ended.IsZero() {
					w.Errorf("the create of %s is %s and it lives: %+v", c.vm, r.Outcome, l)
				}
			}
		}
	}
	lives := w.fake(server1).Lives()
	for i, l := range lives {
		for _, later := range lives[i+1:] {
			if later.VM == l.VM && (l.Ended.IsZero() || l.Ended.After(later.Created)) {
				w.Errorf("two lives of %s at once: %+v, %+v", l.VM, l, later)
			}
		}
	}
	b, err := w.js.KeyValue(context.Background(), kv.BucketLeases)
	if err != nil {
		w.Fatal(err)
	}
	if _, err := b.Get(context.Background(), "server."+server1); err != nil {
		w.Errorf("nobody holds the lease in the end: %v", err)
	}
}
