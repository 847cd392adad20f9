package looprunner_test

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"berth/internal/events"
)

const crashScript = `[
	{"type":"type","text":"a"},
	{"check":"title","equals":"a"},
	{"type":"type","text":"b"},
	{"check":"title","equals":"ab"}
]`

// A runner that dies at any edge of a journal is succeeded by another: the
// act of every step happens once, the model is asked at most once more, the
// end is the same, and it takes at most 15 s.
func TestCrashAtEveryEdge(t *testing.T) {
	var points []string
	bubble(t, func(g *rig) {
		var mu sync.Mutex
		p := g.runner("a", func(_ *process, point, _ string) {
			mu.Lock()
			defer mu.Unlock()
			points = append(points, point)
		})
		g.start("l", crashScript, nil)
		g.finished("l", events.LoopSucceeded, "")
		p.close()
	})
	if len(points) < 30 {
		t.Fatalf("only %d edges: %v", len(points), points)
	}
	const perBubble = 10
	for from := 0; from < len(points); from += perBubble {
		to := min(from+perBubble, len(points))
		t.Run(fmt.Sprintf("edges %d to %d", from, to-1), func(t *testing.T) {
			bubble(t, func(g *rig) {
				for edge := from; edge < to; edge++ {
					crashAt(g, edge, points[edge])
				}
			})
		})
	}
}

func crashAt(g *rig, edge int, point string) {
	loop := fmt.Sprintf("edge%d", edge)
	var calls, died atomic.Int64
	var crashed atomic.Int64 // UnixNano
	standby := make(chan struct{})
	leased := make(chan struct{}, 100)
	g.thoughts.Store(0)
	first := g.runner("first-"+loop, func(p *process, _, _ string) {
		leased <- struct{}{}
		<-standby
		if calls.Add(1) == int64(edge)+1 {
			died.Store(1)
			crashed.Store(time.Now().UnixNano())
			p.kill()
		}
	})
	g.start(loop, crashScript, nil)
	<-leased
	second := g.runner("second-"+loop, nil)
	time.Sleep(time.Second)
	close(standby)
	j, f := g.finished(loop, events.LoopSucceeded, "")
	synctest.Wait() // the last edge comes after finished is there to read
	at := fmt.Sprintf("edge %d (%s)", edge, point)
	if died.Load() == 0 {
		g.t.Errorf("%s: nobody died", at)
	}
	if got := g.fleet.acts(vmOf(loop)); got != "type:a type:b" {
		g.t.Errorf("%s: acts %s", at, got)
	}
	if n := g.thoughts.Load(); n > 3+1 {
		g.t.Errorf("%s: the model was asked %d times", at, n)
	}
	if f.Steps != 2 {
		g.t.Errorf("%s: %d steps", at, f.Steps)
	}
	for _, name := range []string{"started", "sandbox", "acted", "ending", "finished"} {
		want := map[bool]int{true: 2, false: 1}[name == "acted"]
		if n := strings.Count(names(j)+" ", name+" "); n != want {
			g.t.Errorf("%s: %d × %s in %s", at, n, name, names(j))
		}
	}
	crash := time.Unix(0, crashed.Load())
	for _, e := range j {
		if e.Head.Runner == "second-"+loop && e.Stored.Sub(crash) > 15*time.Second {
			g.t.Errorf("%s: taken over after %s with %s", at, e.Stored.Sub(crash), e.Name)
		}
		if e.Head.Runner == "second-"+loop {
			break
		}
	}
	if !g.fleet.killed(vmOf(loop)) {
		g.t.Errorf("%s: the sandbox lives", at)
	}
	<-first.done
	second.close()
}

// A runner that is frozen at an edge, and cut off from the bus, for longer than
// its lease, and then goes on where it was, does no harm: another has the loop
// by then. (What renews its lease is awake in this test, and cannot.)
func TestFrozenRunner(t *testing.T) {
	edges := []string{"append:thinking", "append:decided", "appended:decided", "send:act", "sent:act", "append:acted", "appended:acted",
		"append:ending", "send:kill", "append:finished", "leased", "append:started", "send:observe"}
	bubble(t, func(g *rig) {
		for i, edge := range edges {
			loop := fmt.Sprintf("frozen%d", i)
			var once sync.Once
			asleep := make(chan struct{})
			a := g.runner("a-"+loop, func(p *process, point, _ string) {
				if point == edge {
					once.Do(func() {
						p.gate.set(true)
						close(asleep)
						time.Sleep(25 * time.Second)
						p.gate.set(false)
						time.Sleep(5 * time.Second)
					})
				}
			})
			g.start(loop, crashScript, nil)
			<-asleep
			b := g.runner("b-"+loop, nil)
			j, _ := g.finished(loop, events.LoopSucceeded, "")
			time.Sleep(40 * time.Second)
			if got := g.fleet.acts(vmOf(loop)); got != "type:a type:b" {
				t.Errorf("%s: acts %s", edge, got)
			}
			if again := g.journal(loop); names(again) != names(j) || strings.Count(names(j), "acted") != 2 {
				t.Errorf("%s: journal %s, then %s", edge, names(j), names(again))
			}
			a.close()
			b.close()
		}
	})
}

// A clean stop hands a loop over within a second.
func TestHandover(t *testing.T) {
	bubble(t, func(g *rig) {
		g.fleet.set(func(f *fleet) { f.actTakes = 3 * time.Second })
		a := g.runner("a", nil)
		g.start("l", crashScript, nil)
		g.until("l", "decided")
		b := g.runner("b", nil)
		time.Sleep(time.Second)
		a.close()
		stopped := time.Now()
		j, _ := g.finished("l", events.LoopSucceeded, "")
		for _, e := range j {
			if e.Head.Runner == "b" {
				if d := e.Stored.Sub(stopped); d > time.Second {
					t.Errorf("handed over after %s", d)
				}
				break
			}
		}
		if got := g.fleet.acts(vmOf("l")); got != "type:a type:b" {
			t.Errorf("acts %s", got)
		}
		if strings.Count(names(j), "thinking") != 3 {
			t.Errorf("journal %s", names(j))
		}
		b.close()
	})
}

// Two runners share what comes; a restart of the bus, shorter and longer than
// the loops' leases, stops no loop and repeats no act.
func TestTwoRunnersAndARestartOfTheBus(t *testing.T) {
	for _, down := range []time.Duration{2 * time.Second, 20 * time.Second} {
		t.Run(down.String(), func(t *testing.T) {
			bubble(t, func(g *rig) {
				g.fleet.set(func(f *fleet) { f.actTakes = 300 * time.Millisecond })
				a, b := g.runner("a", nil), g.runner("b", nil)
				time.Sleep(time.Second)
				const n = 20
				for i := range n {
					g.start(fmt.Sprintf("l%d", i), crashScript, nil)
					time.Sleep(20 * time.Millisecond) // in turn, not in one burst that one of them takes whole
				}
				time.Sleep(2 * time.Second)
				g.down()
				time.Sleep(down)
				g.boot()
				owners := map[string]int{}
				for i := range n {
					loop := fmt.Sprintf("l%d", i)
					j, _ := g.finished(loop, events.LoopSucceeded, "")
					owners[j[0].Head.Runner]++
					if got := g.fleet.acts(vmOf(loop)); got != "type:a type:b" {
						t.Errorf("%s: acts %s", loop, got)
					}
				}
				if owners["a"] < 3 || owners["b"] < 3 {
					t.Errorf("owners: %v", owners)
				}
				a.close()
				b.close()
			})
		})
	}
}
