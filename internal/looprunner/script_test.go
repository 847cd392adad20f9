package looprunner_test

import (
	"image/color"
	"strings"
	"testing"
	"time"

	"berth/internal/events"
)

// Checks against what the sandbox shows: they wait, they fail with what was
// expected and what was seen, and they see pictures, answers and dialogs.
func TestChecks(t *testing.T) {
	cases := []struct{ name, script, code, want string }{
		{"title in time", `[{"type":"type","text":"a"},{"check":"title","equals":"late","within":2}]`, "", ""},
		{"title too late", `[{"type":"type","text":"a"},{"check":"title","equals":"late","within":0.2}]`, events.CodeCheckFailed, `script item 1: want title equal to "late", got "a"`},
		{"named", `[{"type":"type","text":"a"},{"name":"the end","check":"title","matches":"^z","within":0}]`, events.CodeCheckFailed, `script item 1 (the end): want title matching "^z", got "a"`},
		{"url", `[{"type":"open","target":"http://h/p?q"},{"check":"url","matches":"/p\\?q$"},{"check":"url","contains":"//h"},{"check":"pages","count":1}]`, "", ""},
		{"pages", `[{"check":"pages","count":2,"within":0.5}]`, events.CodeCheckFailed, "want pages 2, got 1"},
		{"pixel", `[{"check":"pixel","x":39,"y":29,"color":"#0a141e","tolerance":0}]`, "", ""},
		{"pixel near", `[{"check":"pixel","x":0,"y":0,"color":"#121c26"}]`, "", ""},
		{"pixel far", `[{"check":"pixel","x":0,"y":0,"color":"#131c26","within":0}]`, events.CodeCheckFailed, "want pixel #131c26 ±8 at 0,0, got #0a141e"},
		{"pixel outside the picture", `[{"check":"pixel","x":40,"y":0,"color":"#000000","within":0}]`, events.CodeCheckFailed, "got a picture of 40×30"},
		{"value", `[{"type":"clipboardWrite","text":"ü\n"},{"type":"clipboardRead"},{"check":"value","equals":"ü\n"}]`, "", ""},
		{"value json", `[{"type":"cursor"},{"check":"value","equals":"{\"x\":1,\"y\":2}"}]`, "", ""},
		{"no value", `[{"type":"type","text":"a"},{"check":"value","contains":""}]`, events.CodeCheckFailed, "got no answer"},
		{"dialog", `[{"type":"type","text":"alert:hi"},{"check":"title","equals":"late","within":2},{"check":"dialog","contains":"hi"}]`, "", ""},
		{"old dialog", `[{"type":"type","text":"alert:hi"},{"type":"type","text":"b"},{"check":"dialog","contains":"hi","within":0}]`, events.CodeCheckFailed, "got no dialog"},
		{"download", `[{"type":"type","text":"b"},{"check":"download","equals":"f.txt","within":0}]`, events.CodeCheckFailed, "got no download"},
	}
	bubble(t, func(g *rig) {
		a := g.runner("a", nil)
		g.fleet.set(func(f *fleet) { f.lateTitle = "late" })
		for i, c := range cases {
			loop := "c" + string(rune('a'+i))
			outcome := events.LoopSucceeded
			if c.code != "" {
				outcome = events.LoopFailed
			}
			at := time.Now()
			g.start(loop, c.script, nil)
			_, f := g.finished(loop, outcome, c.code)
			if !strings.Contains(f.Message, c.want) {
				t.Errorf("%s: %q, want %q", c.name, f.Message, c.want)
			}
			if d := time.Since(at); d > 4*time.Second {
				t.Errorf("%s took %s", c.name, d)
			}
		}
		a.close()
	})
}

// Checks that hold are evaluated on one observation: no further command.
func TestChecksShareAnObservation(t *testing.T) {
	bubble(t, func(g *rig) {
		a := g.runner("a", nil)
		g.fleet.set(func(f *fleet) { f.colour = color.RGBA{255, 0, 0, 255} })
		g.start("l", `[{"type":"type","text":"a"},{"check":"title","equals":"a"},{"check":"pages","count":1},{"check":"pixel","x":1,"y":1,"color":"#ff0000"}]`, nil)
		j, _ := g.finished("l", events.LoopSucceeded, "")
		if strings.Count(names(j), "observed") != 1 {
			t.Errorf("journal %s", names(j))
		}
		d := decode[events.LoopDecided](t, j[len(j)-3])
		if len(d.Checks) != 3 || !d.Checks[2].OK || d.Checks[2].Item != 3 || d.Checks[2].Got != "#ff0000" {
			t.Errorf("checks %+v", d.Checks)
		}
		a.close()
	})
}
