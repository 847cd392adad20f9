package worker

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers/providertest"
)

// visits counts the points that workers pass, and strikes at one of them.
type visits struct {
	mu     sync.Mutex
	n      int
	strike map[int]func() // by visit, from 1
	points []Point
}

func (v *visits) hook(p Point, _ string) {
	v.mu.Lock()
	v.n++
	v.points = append(v.points, p)
	f := v.strike[v.n]
	v.mu.Unlock()
	if f != nil {
		f()
	}
}

// point is that of a visit, from 1; "" where there was none.
func (v *visits) point(n int) Point {
	v.mu.Lock()
	defer v.mu.Unlock()
	if n > len(v.points) {
		return ""
	}
	return v.points[n-1]
}

// life is the scenario of the crash tests: every verb once, the act twice.
// Commands go out one after the other, each when the one before has ended.
type life struct {
	w        *world
	fence    uint64
	commands []sent
	verbs    []events.Verb
	results  []events.Finished
}

func (l *life) do(verb events.Verb, id string, data any) {
	w := l.w
	var c sent
	switch verb {
	case events.Create:
		c = w.create(server1, "a", l.fence)
	default:
		c = w.publish("a", verb, id, data)
	}
	f := w.await(c)
	l.commands, l.verbs, l.results = append(l.commands, c), append(l.verbs, verb), append(l.results, f)
}

func live(w *world) *life {
	l := &life{w: w, fence: w.place(server1, "a")}
	l.do(events.Create, "", nil)
	w.editVM("a", func(p *kv.Placement) { p.Phase = kv.Ready })
	l.do(events.Act, "1", map[string]any{"observe": true, "actions": []any{click(1, 1), wait(1), map[string]any{"type": "screenshot"}, click(2, 2)}})
	l.do(events.Observe, "2", struct{}{})
	l.do(events.Pause, "3", struct{}{})
	l.do(events.Resume, "4", struct{}{})
	l.do(events.Act, "5", act(click(3, 3)))
	l.do(events.Kill, "6", struct{}{})
	w.free(server1, "a")
	return l
}

// check holds a life to what must hold however its workers died.
func (l *life) check(what string) {
	l.w.Helper()
	fake := l.w.fake(server1)
	for i, c := range l.commands {
		l.w.once(c)
		f := l.results[i]
		effects := map[int]int{}
		for _, e := range fake.EffectsOf("a") {
			if e.Key == c.token {
				effects[e.Index]++
				if effects[e.Index] > 1 {
					l.w.Errorf("%s: action %d of command %d (%s) ran twice", what, e.Index, i, l.verbs[i])
				}
			}
		}
		switch {
		case f.Outcome == computer.Rejected && len(effects) > 0:
			l.w.Errorf("%s: command %d (%s) had effects and is rejected: %s", what, i, l.verbs[i], mustJSON(f))
		case f.Outcome == computer.OK && l.verbs[i] == events.Act && len(effects) != len(f.Actions):
			l.w.Errorf("%s: command %d (%s) is ok and had %d effects: %s", what, i, l.verbs[i], len(effects), mustJSON(f))
		case f.Outcome == computer.Unknown && f.Error == nil:
			l.w.Errorf("%s: unknown without a reason: %s", what, mustJSON(f))
		}
	}
	l.w.until("no sandbox is left: "+what, 30*time.Second, func() bool {
		for _, s := range fake.Lives() {
			if s.Ended.IsZero() {
				return false
			}
		}
		return true
	})
}

// Whatever moment a worker dies at, its successor ends every command once and
// runs nothing twice. The points of the successor's own recovery are among
// them: there a third worker takes over.
func TestCrashAtEveryPoint(t *testing.T) {
	visited := map[Point]bool{}
	for _, variant := range []struct {
		name string
		opts providertest.FakeOptions
		step int
	}{
		{"plain", providertest.FakeOptions{}, 1},
		{"recall", providertest.FakeOptions{Recall: true, CheckFences: true, Detached: true}, 2},
	} {
		t.Run(variant.name, func(t *testing.T) {
			total := 0
			bubble(t, func(t *testing.T, w *world) {
				w.fakeWith(server1, variant.opts)
				v := &visits{}
				w.startWith(Options{Name: "w1", Hook: v.hook})
				l := live(w)
				l.check("no crash")
				for i, f := range l.results {
					if f.Outcome != computer.OK {
						t.Errorf("without a crash command %d is %s", i, mustJSON(f))
					}
				}
				v.mu.Lock()
				total = v.n
				v.mu.Unlock()
			})
			for n := 1; n <= total; n += variant.step {
				bubble(t, func(t *testing.T, w *world) {
					w.fakeWith(server1, variant.opts)
					first, second := &visits{}, &visits{}
					one := w.startWith(Options{Name: "w1", Hook: first.hook})
					w.holds("w1")
					first.strike = map[int]func(){n: one.crash}
					two := w.startWith(Options{Name: "w2", Hook: second.hook})
					if n%3 == 0 { // and the successor dies while it recovers
						second.strike = map[int]func(){1: two.crash}
						w.start("w3")
					}
					l := live(w)
					what := fmt.Sprintf("crash at visit %d (%s)", n, first.point(n))
					l.check(what)
					visited[first.point(n)] = true
					if at := second.point(1); n%3 == 0 && at != "" {
						visited[at] = true
					}
				})
				if t.Failed() {
					t.Fatalf("after visit %d", n)
				}
			}
		})
	}
	for _, p := range Points {
		if !visited[p] {
			t.Errorf("no crash at point %s was tested", p)
		}
		delete(visited, p)
	}
	for p := range visited {
		t.Errorf("point %s is not in Points: nobody would notice if no test struck there", p)
	}
}
