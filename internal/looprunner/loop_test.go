package looprunner_test

import (
	"testing"

	"berth/internal/events"
)

const three = `[
	{"type":"open","target":"http://x/","name":"open it"},
	{"check":"url","equals":"http://x/"},
	{"type":"type","text":"hello"},
	{"check":"title","contains":"ell"},
	{"type":"click","x":3,"y":4}
]`

// The journal of a loop that meets no trouble, entry by entry.
func TestHappyPath(t *testing.T) {
	bubble(t, func(g *rig) {
		p := g.runner("a", nil)
		g.start("l1", three, nil)
		j, f := g.finished("l1", events.LoopSucceeded, "")
		want := "started sandbox observed thinking decided acted thinking decided acted thinking decided acted thinking decided ending finished"
		if got := names(j); got != want {
			t.Errorf("journal\n %s\nwant\n %s", got, want)
		}
		if f.Steps != 3 || g.thoughts.Load() != 4 {
			t.Errorf("%d steps, %d thoughts, want 3 and 4", f.Steps, g.thoughts.Load())
		}
		if got := g.fleet.acts(vmOf("l1")); got != "open type:hello click" {
			t.Errorf("acts: %s", got)
		}
		if !g.fleet.killed(vmOf("l1")) {
			t.Error("the sandbox was not killed")
		}
		p.close()
	})
}
