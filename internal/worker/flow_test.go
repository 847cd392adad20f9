package worker

import (
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
)

// The whole life of a sandbox: made, used, looked at, killed.
func TestLife(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		p := w.start("w1")
		fence := w.ready("a")
		c := w.publish("a", events.Act, "1", act(click(10, 20), map[string]any{"type": "cursor"}))
		f := w.await(c)
		if f.Outcome != computer.OK || f.Fence != fence || f.Command != events.Act || f.CommandID != "1" || f.Request != (events.Request{Source: "/test", ID: "1"}) {
			t.Errorf("act: %s", mustJSON(f))
		}
		if len(f.Actions) != 2 || string(f.Actions[1].Value) != `{"x":10,"y":20}` {
			t.Errorf("actions: %s", mustJSON(f.Actions))
		}
		if n := len(w.fake(server1).EffectsOf("a")); n != 2 {
			t.Errorf("%d effects, want 2", n)
		}
		f = w.await(w.publish("a", events.Observe, "2", struct{}{}))
		if f.Outcome != computer.OK || f.Observation == nil || f.Observation.Screenshot.Width != 1280 || f.Actions == nil {
			t.Errorf("observe: %s", mustJSON(f))
		}
		k := w.publishTo(server1, "a", events.Kill, events.SourceScheduler, events.KillCommandID("a", fence, 1), events.Command{Fence: &fence})
		if f = w.await(k); f.Outcome != computer.OK {
			t.Errorf("kill: %s", mustJSON(f))
		}
		if l := w.fake(server1).Lives(); len(l) != 1 || l[0].Why != "killed" {
			t.Errorf("lives: %+v", l)
		}
		w.once(c)
		w.once(k)
		w.free(server1, "a")
		start := time.Now()
		p.drain()
		if d := time.Since(start); d > time.Second {
			t.Errorf("draining an idle worker took %s", d)
		}
	})
}
