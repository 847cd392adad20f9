package looprunner_test

import (
	"testing"
	"time"

	"berth/internal/events"
)

// Ids may have a hyphen: the tenants and loops of two loops never join to one
// identity, of which the second's create and kill would be dropped as known.
func TestLoopsOfLikeNames(t *testing.T) {
	bubble(t, func(g *rig) {
		a := g.runner("a", nil)
		loops := [][2]string{{"acme", "eu-1"}, {"acme-eu", "1"}, {"acme-eu-1", "x"}, {"acme", "eu-1-x"}}
		for _, l := range loops {
			g.requestAs(l[0], events.Start, events.TypeLoopStart, "start", object{"loopId": l[1], "model": object{"name": "script"},
				"script": []object{{"type": "cursor"}}, "limits": object{"seconds": 60}})
		}
		for _, l := range loops {
			last := ""
			for e, err := range followOf(g, l[0], l[1]) {
				if err != nil {
					t.Fatal(err)
				}
				if e == "acted" || last != "acted" {
					last = e
				}
			}
			if vm := events.DerivedVMID(l[0], events.SourceLoopRunner, l[0]+"."+l[1]+".create"); last != "acted" || !g.fleet.killed(vm) {
				t.Errorf("loop %s of %s: no act before %s, or its sandbox is not killed", l[1], l[0], last)
			}
		}
		a.close()
	})
}

// A loop that is stopped before it hears that the vm id is another's harms
// nothing of the other's, and neither does the other's end decide about a loop.
func TestKillsNoOthersSandbox(t *testing.T) {
	bubble(t, func(g *rig) {
		a := g.runner("a", nil)
		named := object{"sandbox": object{"vmId": "box"}}
		g.start("first", waitScript, named)
		g.until("first", "acted")
		g.fleet.set(func(f *fleet) { f.readyIn = time.Minute })
		g.start("second", waitScript, named)
		g.until("second", "started")
		g.request(events.Stop, "s2", object{"loopId": "second"})
		asked := time.Now()
		g.finished("second", events.LoopStopped, events.CodeStopped)
		if d := time.Since(asked); d > 5*time.Second {
			t.Errorf("stopped after %s", d)
		}
		if g.fleet.killed("box") {
			t.Error("the first loop's sandbox was killed")
		}
		g.start("third", waitScript, named)
		g.until("third", "started")
		g.request(events.Stop, "s1", object{"loopId": "first"})
		g.finished("first", events.LoopStopped, events.CodeStopped)
		if !g.fleet.killed("box") {
			t.Error("its own loop did not kill it")
		}
		g.finished("third", events.LoopFailed, events.CodeVMIDInUse)
		a.close()
	})
}
