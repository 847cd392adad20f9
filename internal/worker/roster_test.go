package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/virtualtime"
)

// serverIDs names n servers.
func serverIDs(n int) []string {
	var out []string
	for i := range n {
		out = append(out, fmt.Sprintf("fake-%02d", i+1))
	}
	return out
}

// holders says which worker serves each server, by the servers' records.
func (w *world) holders(servers []string) map[string]string {
	w.Helper()
	out := map[string]string{}
	for _, s := range servers {
		out[s] = w.record(s).Worker
	}
	return out
}

// shares counts the leases that each worker has.
func (w *world) shares(servers []string) map[string]int {
	w.Helper()
	leases, err := w.js.KeyValue(context.Background(), kv.BucketLeases)
	if err != nil {
		w.Fatal(err)
	}
	out := map[string]int{}
	for _, s := range servers {
		v, _, err := kv.Get[struct{ Holder string }](context.Background(), leases, leaseKey(s))
		if err == nil {
			out[v.Holder]++
		}
	}
	return out
}

// epochs are the servers' lease epochs: they change with every change of hands.
func (w *world) epochs(servers []string) map[string]uint64 {
	w.Helper()
	out := map[string]uint64{}
	for _, s := range servers {
		out[s] = w.record(s).Epoch
	}
	return out
}

// readyOn is ready for any server.
func (w *world) readyOn(server, vm string) {
	w.Helper()
	if f := w.await(w.create(server, vm, w.place(server, vm))); f.Outcome != computer.OK {
		w.Fatalf("create %s: %+v", vm, f)
	}
	w.editVM(vm, func(p *kv.Placement) { p.Phase = kv.Ready })
}

// traffic publishes acts to one sandbox on each server until stopped.
type traffic struct {
	w       *world
	servers []string
	sent    map[string][]sent // by server
	stop    chan struct{}
	done    chan struct{}
}

func (w *world) traffic(servers []string) *traffic {
	t := &traffic{w: w, servers: servers, sent: map[string][]sent{}, stop: make(chan struct{}), done: make(chan struct{})}
	for _, s := range servers {
		w.readyOn(s, "vm-"+s)
	}
	go func() {
		defer close(t.done)
		for n := 0; ; n++ {
			for i, s := range servers {
				seconds := []float64{0, 0.2, 0.6, 3}[(n+i)%4]
				data := act(click(n%1000, i), wait(seconds), click(n%1000, i+100))
				data["deadline"] = time.Now().Add(10 * time.Minute)
				t.sent[s] = append(t.sent[s], w.publishTo(s, "vm-"+s, events.Act, "/traffic", fmt.Sprint(s, "-", n), data))
			}
			select {
			case <-t.stop:
				return
			case <-time.After(1500 * time.Millisecond):
			}
		}
	}()
	return t
}

// check ends the traffic and holds it to what the servers have seen: every act
// whole, once, and in the order published.
func (t *traffic) check() {
	t.w.Helper()
	close(t.stop)
	<-t.done
	for _, s := range t.servers {
		var want, got []string
		for _, c := range t.sent[s] {
			f := t.w.await(c)
			if f.Outcome != computer.OK {
				t.w.Errorf("%s: %s", s, mustJSON(f))
			}
			t.w.once(c)
			for i := range 3 {
				want = append(want, fmt.Sprint(c.token, "/", i))
			}
		}
		for _, e := range t.w.fake(s).EffectsOf("vm-" + s) {
			got = append(got, fmt.Sprint(e.Key, "/", e.Index))
		}
		if !slices.Equal(got, want) {
			t.w.Errorf("%s ran %d actions of %d, or in another order", s, len(got), len(want))
		}
	}
}

// One, two, three workers share eight servers while all are busy: a newcomer is
// given its share, and no command is lost, run twice, reordered or ended
// `unknown` by it. Then nothing moves for ten minutes. When one is killed the
// others have what it had within 15 s, above their share if need be; when one
// stops, at once.
func TestWorkersBalance(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		servers := serverIDs(8)
		w.start("w1", servers...)
		w.until("w1 has all", 5*time.Second, func() bool { return w.shares(servers)["w1"] == 8 })
		load := w.traffic(servers)
		time.Sleep(20 * time.Second)
		w.start("w2", servers...)
		w.until("two workers share", 2*time.Minute, func() bool { n := w.shares(servers); return n["w1"] == 4 && n["w2"] == 4 })
		three := w.start("w3", servers...)
		w.until("three workers share", 2*time.Minute, func() bool {
			n := w.shares(servers)
			return n["w1"]+n["w2"]+n["w3"] == 8 && min(n["w1"], n["w2"], n["w3"]) == 2 && max(n["w1"], n["w2"], n["w3"]) == 3
		})
		load.check()

		before := w.epochs(servers)
		time.Sleep(10 * time.Minute)
		if after := w.epochs(servers); mustJSON(after) != mustJSON(before) {
			t.Errorf("servers changed hands with nothing to even out: %v, then %v", before, after)
		}

		three.crash()
		d := w.until("the others have all", 15*time.Second, func() bool { n := w.shares(servers); return n["w1"]+n["w2"] == 8 })
		if n := w.shares(servers); n["w1"] != 4 || n["w2"] != 4 {
			t.Errorf("after a crash, %s later: %v", d, n)
		}
		w.workers[1].drain()
		if d := w.until("one has all again", 3*time.Second, func() bool { return w.shares(servers)["w1"] == 8 }); d > 300*time.Millisecond {
			t.Errorf("taking over after a clean stop took %s", d)
		}
	})
}

// Workers that start at the same moment take their shares at once: nothing has
// to be handed over.
func TestWorkersStartTogether(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		servers := serverIDs(8)
		for _, name := range []string{"w1", "w2", "w3"} {
			w.start(name, servers...)
		}
		w.until("all are served", 6*time.Second, func() bool { n := w.shares(servers); return n["w1"]+n["w2"]+n["w3"] == 8 })
		time.Sleep(time.Second)
		before := w.epochs(servers)
		if n := w.shares(servers); max(n["w1"], n["w2"], n["w3"]) > 3 {
			t.Errorf("shares: %v", n)
		}
		time.Sleep(2 * time.Minute)
		if after := w.epochs(servers); mustJSON(after) != mustJSON(before) {
			t.Errorf("servers changed hands: %v, then %v", before, after)
		}
	})
}

// A worker is given only what its registry has; what nobody else can serve
// stays where it is.
func TestBalanceOfDifferentRegistries(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		servers := serverIDs(6)
		w.start("w1", servers...)
		w.until("w1 has all", 5*time.Second, func() bool { return w.shares(servers)["w1"] == 6 })
		time.Sleep(20 * time.Second)
		w.start("w2", servers[0], servers[1])
		w.until("w2 has both of its servers", time.Minute, func() bool { return w.shares(servers)["w2"] == 2 })
		time.Sleep(5 * time.Minute)
		got := w.holders(servers)
		for i, s := range servers {
			if want := map[bool]string{true: "w2", false: "w1"}[i < 2]; got[s] != want {
				t.Errorf("%s is served by %s, want %s", s, got[s], want)
			}
		}
		// A server that nobody else has is served again only by its own worker.
		w.workers[0].crash()
		time.Sleep(30 * time.Second)
		if n := w.shares(servers); n["w2"] != 2 {
			t.Errorf("w2 has %d servers of its registry's 2", n["w2"])
		}
	})
}

// What runs is not cut short for balance: a server whose commands do not end
// within handOverTime stays where it is, serves on, and is handed over later.
func TestBusyServerStays(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		servers := serverIDs(2)
		w.start("w1", servers...)
		for _, s := range servers {
			w.readyOn(s, "long-"+s)
			w.readyOn(s, "short-"+s)
		}
		time.Sleep(minHold)
		var long, queued []sent
		for _, s := range servers {
			long = append(long, w.publishTo(s, "long-"+s, events.Act, "/test", "long", act(click(1, 1), wait(55), click(2, 2))))
			queued = append(queued, w.publishTo(s, "long-"+s, events.Act, "/test", "queued", map[string]any{
				"actions": []any{click(3, 3)}, "deadline": time.Now().Add(10 * time.Minute)}))
		}
		w.start("w2", servers...)
		var short []sent
		for n := range 15 {
			time.Sleep(2 * time.Second)
			for _, s := range servers {
				short = append(short, w.publishTo(s, "short-"+s, events.Act, "/test", fmt.Sprint("short", n), act(click(n, n))))
			}
		}
		if n := w.shares(servers); n["w1"] != 2 {
			t.Errorf("a busy server was handed over: %v", n)
		}
		for _, c := range append(append(long, queued...), short...) {
			if f := w.await(c); f.Outcome != computer.OK {
				t.Errorf("%s %s", c.vm, mustJSON(f))
			}
			w.once(c)
		}
		for _, s := range servers {
			if got := keys(w.fake(s), "long-"+s); !slices.Equal(got, []string{long[0].token, queued[0].token}) {
				t.Errorf("%s ran %v", s, got)
			}
		}
		w.until("an idle one is handed over", 10*time.Minute, func() bool { return w.shares(servers)["w2"] == 1 })
	})
}

// A kill of what runs is served while a server waits to be handed over, and
// lets it go.
func TestKillWhileHandingOver(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		servers := serverIDs(2)
		one := w.start("w1", servers...)
		w.readyOn(server1, "a")
		running := w.publish("a", events.Act, "1", act(click(1, 1), wait(60)))
		if _, err := w.fake(server1).WaitEffects(context.Background(), 2); err != nil {
			t.Fatal(err)
		}
		w.start("w2", servers...)
		handOver(one, server1, "w2")
		time.Sleep(time.Second)
		if f := w.await(w.publish("a", events.Kill, "2", struct{}{})); f.Outcome != computer.OK {
			t.Errorf("the kill: %s", mustJSON(f))
		}
		if f := w.await(running); f.Outcome != computer.Unknown || f.Error.Code != events.CodeKilled {
			t.Errorf("the act: %s", mustJSON(f))
		}
		w.until("w2 has it", 2*time.Second, func() bool { return w.record(server1).Worker == "w2" })
	})
}

// handOver has a process hand a server over as if for balance.
func handOver(p *process, server, to string) bool {
	r := p.worker.roster
	r.mu.Lock()
	defer r.mu.Unlock()
	h := r.held[server]
	if h == nil || r.gives != nil {
		return false
	}
	r.gives, r.released = &gift{server, to}, time.Time{}
	r.change()
	ask(h.give)
	return true
}

// A peer that asks and never takes (frozen, or without the right) costs a few
// seconds of service once in a while, no more: its giver takes the server back
// and waits ever longer before it tries again.
func TestGiftThatNobodyTakes(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		servers := serverIDs(3)
		w.start("w1", servers...)
		w.until("w1 has all", 5*time.Second, func() bool { return w.shares(servers)["w1"] == 3 })
		raw, err := json.Marshal(presence{Worker: "ghost", Serves: servers, Holds: []string{}, Asks: "w1"})
		if err != nil {
			t.Fatal(err)
		}
		stop := make(chan struct{})
		defer close(stop)
		go func() {
			for {
				if err := w.nc.Publish(leaseSubjects+presenceKey("ghost"), raw); err != nil {
					return
				}
				select {
				case <-stop:
					return
				case <-time.After(helloEvery):
				}
			}
		}()
		gifts, unserved := 0, time.Duration(0)
		var since time.Time
		for end := time.Now().Add(10 * time.Minute); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
			switch all := w.shares(servers)["w1"] == 3; {
			case !all && since.IsZero():
				gifts++
				since = time.Now()
			case all && !since.IsZero():
				unserved = max(unserved, time.Since(since))
				since = time.Time{}
			}
		}
		if gifts < 2 || gifts > 6 || unserved > giftTime+surplusMax+2*time.Second {
			t.Errorf("%d gifts in ten minutes, the longest of them unserved for %s", gifts, unserved)
		}
	})
}

// Whatever the registries and the loss of announcements, rosters come to rest:
// then no worker has two servers more than another that could serve one of
// them; and from there on nothing moves.
func TestRostersComeToRest(t *testing.T) {
	few(t, "40")
	rapid.Check(t, func(rt *rapid.T) {
		servers := serverIDs(rapid.IntRange(1, 24).Draw(rt, "servers"))
		workers := rapid.IntRange(2, 6).Draw(rt, "workers")
		var registries [][]string
		for i := range workers {
			registries = append(registries, rapid.SliceOfDistinct(rapid.SampledFrom(servers), func(s string) string { return s }).Draw(rt, fmt.Sprint("registry", i)))
		}
		lost := rapid.SliceOfN(rapid.IntRange(0, 3), 16, 16).Draw(rt, "lost")
		var fault string
		virtualtime.Test(t, func(t *testing.T) { fault = restless(registries, lost) })
		if fault != "" {
			rt.Fatal(fault)
		}
	})
}

// restless plays rosters against each other and says what is wrong. One
// announcement in four or so is lost in the first minutes, as lost says.
func restless(registries [][]string, lost []int) string {
	log := slog.New(slog.DiscardHandler)
	var rosters []*roster
	owner := map[string]*roster{}
	for i, registry := range registries {
		r := newRoster(fmt.Sprint("w", i), registry, 7*time.Second)
		rosters = append(rosters, r)
		for _, s := range registry {
			if owner[s] == nil {
				owner[s] = r
				r.take(&hold{server: s, load: func() int { return 0 }})
			}
		}
	}
	moves, last, n := 0, time.Now(), 0
	start := time.Now()
	for time.Since(start) < 30*time.Minute {
		for _, from := range rosters {
			p, _ := from.announcement()
			for _, to := range rosters {
				if n++; time.Since(start) > 3*time.Minute || lost[n%len(lost)] > 0 {
					to.hear(p)
				}
			}
		}
		for _, r := range rosters {
			h := r.decide(time.Now(), log)
			if h == nil {
				continue
			}
			for _, to := range rosters {
				if to.me == r.gives.To {
					moves, last = moves+1, time.Now()
					r.drop(h.server, true)
					to.take(&hold{server: h.server, load: h.load})
				}
			}
		}
		time.Sleep(time.Second)
	}
	if d := last.Sub(start); d > 25*time.Minute {
		return fmt.Sprintf("after %s and %d moves servers still change hands", d, moves)
	}
	for _, giver := range rosters {
		for _, taker := range rosters {
			if len(giver.held) < len(taker.held)+2 {
				continue
			}
			for s := range giver.held {
				if slices.Contains(taker.serves, s) {
					return fmt.Sprintf("%s has %d servers, %s only %d, and could serve %s (%d moves)", giver.me, len(giver.held), taker.me, len(taker.held), s, moves)
				}
			}
		}
	}
	return ""
}

// How long a free server is left to peers.
func TestPatience(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		r := newRoster("me", []string{"a-01", "b-01", "c-01", "d-01"}, 7*time.Second)
		patience := func(server string) string {
			d, other := r.patience(server, nil, time.Now())
			return fmt.Sprint(d, " ", other)
		}
		r.turns = []*ticket{nil}
		expect := func(what, server, want string) {
			t.Helper()
			if got := patience(server); got != want {
				t.Errorf("%s: %s, want %s", what, got, want)
			}
		}
		expect("without peers", "a-01", "0s false")
		r.take(&hold{server: "b-01"})
		r.take(&hold{server: "c-01"})
		expect("without peers, however many it has", "a-01", "0s false")
		r.hear(presence{Worker: "poor", Serves: []string{"a-01"}})
		expect("two more than a peer", "a-01", "1.5s false")
		expect("of no peer's registry", "d-01", "0s false")
		r.hear(presence{Worker: "poor", Serves: []string{"a-01"}, Holds: []string{"x-01", "y-01"}})
		expect("as many as the peer", "a-01", "0s false")
		r.hear(presence{Worker: "rich", Serves: []string{"a-01"}, Holds: []string{"v-01"}, Gives: &gift{"a-01", "poor"}})
		expect("a gift for another", "a-01", "0s true")
		r.hear(presence{Worker: "rich", Serves: []string{"a-01"}, Holds: []string{"v-01"}, Gives: &gift{"a-01", "gone"}})
		expect("a gift for nobody who is there", "a-01", "1.25s false")
		r.hear(presence{Worker: "rich", Serves: []string{"a-01"}, Gives: &gift{"a-01", "me"}})
		expect("a gift", "a-01", "0s false")
		time.Sleep(8 * time.Second)
		expect("when no peer lives", "a-01", "0s false")
		r.tire("x-01", time.Now())
		time.Sleep(10 * r.life)
		r.decide(time.Now(), slog.New(slog.DiscardHandler))
		if len(r.peers) != 0 || len(r.rests) != 1 {
			t.Errorf("after a while: %d peers, %d rests", len(r.peers), len(r.rests))
		}
		time.Sleep(2 * maxRest)
		if r.decide(time.Now(), slog.New(slog.DiscardHandler)); len(r.rests) != 0 {
			t.Errorf("%d rests are kept for ever", len(r.rests))
		}
	})
}
