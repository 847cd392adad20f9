package looprunner_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/thinkers/recorded"
)

func withRecords(o *looprunner.Options) { o.Models[recorded.Name] = recorded.New }

func (g *rig) rerun(loop, of string, more object) {
	model := object{"name": recorded.Name, "loop": of}
	for k, v := range more {
		model[k] = v
	}
	g.request(events.Start, "start-"+loop, object{"loopId": loop, "model": model})
}

// difference is what the last decision of a rerun says.
func difference(t *testing.T, j []looprunner.Entry) recorded.Difference {
	t.Helper()
	var d recorded.Difference
	for _, e := range j {
		if e.Name == events.LoopDecidedName {
			if v := decode[events.LoopDecided](t, e); len(v.Reply) > 0 {
				if err := json.Unmarshal(v.Reply, &d); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	return d
}

// A record is decided again act by act, and a runner that dies after any of its
// decisions is succeeded by one that goes on comparing.
func TestRerunOfARecord(t *testing.T) {
	bubble(t, func(g *rig) {
		a := g.runner("a", nil, withRecords)
		g.start("l", `[{"type":"type","text":"a"},{"check":"title","equals":"a"},{"type":"clipboardWrite","text":"c"},{"type":"clipboardRead"},{"check":"value","equals":"c"},{"type":"type","text":"b"},{"check":"title","equals":"ab"}]`, nil)
		g.finished("l", events.LoopSucceeded, "")
		g.rerun("again", "l", nil)
		g.finished("again", events.LoopSucceeded, "")
		if got, want := g.fleet.acts(vmOf("again")), g.fleet.acts(vmOf("l")); got != want {
			t.Errorf("did %s, want %s", got, want)
		}
		a.close()
		for n := range 4 {
			loop := fmt.Sprintf("crash%d", n)
			var seen atomic.Int64
			first := g.runner("first-"+loop, func(p *process, point, l string) {
				if l == loop && point == "appended:decided" && seen.Add(1) == int64(n)+1 {
					p.kill()
				}
			}, withRecords)
			g.rerun(loop, "l", nil)
			g.until(loop, "started")
			second := g.runner("second-"+loop, nil, withRecords)
			g.finished(loop, events.LoopSucceeded, "")
			if got, want := g.fleet.acts(vmOf(loop)), g.fleet.acts(vmOf("l")); got != want {
				t.Errorf("%s: did %s, want %s", loop, got, want)
			}
			second.close()
			<-first.done
		}
	})
}

// The first difference ends it, before the next act, and says what it is.
func TestRerunDiffers(t *testing.T) {
	bubble(t, func(g *rig) {
		a := g.runner("a", nil, withRecords)
		g.start("l", `[{"type":"type","text":"a"},{"type":"clipboardRead"},{"type":"type","text":"b"}]`, nil)
		g.finished("l", events.LoopSucceeded, "")
		fault := &computer.Fault{Code: "notClickable", Message: "m"}
		for _, c := range []struct {
			name    string
			compare []string
			act     func(f *fleet, n int, a []computer.Action) *events.Finished
			want    string // "": the same
			acts    string
		}{
			{"value", nil, func(f *fleet, n int, _ []computer.Action) *events.Finished {
				f.boxes[vmOf("value")].clip = "other"
				return nil
			}, `{"step":2,"field":"value","action":0,"recorded":"\"\"","now":"\"other\""}`, "type:a clipboardRead"},
			{"outcome", nil, func(_ *fleet, n int, a []computer.Action) *events.Finished {
				if n != 2 {
					return nil
				}
				return &events.Finished{Outcome: computer.Failed, Actions: []computer.ActionResult{{Outcome: computer.Failed, Error: fault}}}
			}, `{"step":2,"field":"outcome","recorded":"ok","now":"failed"}`, "type:a clipboardRead"},
			{"url", nil, func(f *fleet, n int, _ []computer.Action) *events.Finished {
				f.boxes[vmOf("url")].url = "http://elsewhere.example/"
				return nil
			}, `{"step":2,"field":"url","recorded":"\"about:blank\"","now":"\"http://elsewhere.example/\""}`, "type:a"},
			{"ignored", []string{"title", "value"}, func(f *fleet, n int, _ []computer.Action) *events.Finished {
				f.boxes[vmOf("ignored")].url = "http://elsewhere.example/"
				return nil
			}, "", "type:a clipboardRead type:b"},
			{"picture", []string{"picture"}, func(f *fleet, n int, _ []computer.Action) *events.Finished {
				f.boxes[vmOf("picture")].colour.G = uint8(200)
				return nil
			}, "picture", "type:a"},
		} {
			g.fleet.set(func(f *fleet) {
				f.onAct = func(_ string, n int, a []computer.Action) *events.Finished { return c.act(f, n, a) }
			})
			more := object{"settleSeconds": 1}
			if c.compare != nil {
				more["compare"] = c.compare
			}
			g.rerun(c.name, "l", more)
			j := g.journal(c.name)
			f := decode[events.LoopFinished](t, j[len(j)-1])
			raw, err := json.Marshal(difference(t, j))
			if err != nil {
				t.Fatal(err)
			}
			switch {
			case c.want == "":
				if f.Outcome != events.LoopSucceeded {
					t.Errorf("%s: %s: %s", c.name, f.Code, f.Message)
				}
			case f.Code != recorded.CodeDiffers || !strings.Contains(string(raw), c.want) || !strings.HasPrefix(f.Message, "step 2: "+c.name):
				t.Errorf("%s: %s: %s; %s, want %s", c.name, f.Code, f.Message, raw, c.want)
			}
			if got := g.fleet.acts(vmOf(c.name)); got != c.acts {
				t.Errorf("%s: did %s, want %s", c.name, got, c.acts)
			}
		}
		a.close()
	})
}

// A person who was asked is not asked again, and a record that was stopped ends
// well where it ends. Of another tenant there is no record.
func TestRerunOfWhatAPersonDid(t *testing.T) {
	bubble(t, func(g *rig) {
		asker := func(o *looprunner.Options) {
			withRecords(o)
			o.Models["asker"] = func(looprunner.Spec) (looprunner.Model, error) {
				return thinker(func(ctx context.Context, in looprunner.Turn) (looprunner.Decision, error) {
					switch len(in.History) {
					case 0:
						return looprunner.Decision{NeedsInput: "which?"}, nil
					case 1:
						return looprunner.Decision{Actions: []computer.Action{{Type: computer.TypeText, Text: text(in.Messages[0])}}}, nil
					}
					<-ctx.Done()
					return looprunner.Decision{}, context.Cause(ctx)
				}), nil
			}
		}
		a := g.runner("a", nil, asker)
		g.request(events.Start, "s", object{"loopId": "l", "goal": "g", "model": object{"name": "asker"}})
		g.until("l", "paused")
		g.request(events.Message, "m", object{"loopId": "l", "text": "that"})
		g.until("l", "acted")
		g.request(events.Stop, "stop", object{"loopId": "l"})
		g.finished("l", events.LoopStopped, events.CodeStopped)
		g.rerun("again", "l", nil)
		j, _ := g.finished("again", events.LoopSucceeded, "")
		if got := g.fleet.acts(vmOf("again")); got != "type:that" || strings.Contains(names(j), "paused") {
			t.Errorf("did %s; journal %s", got, names(j))
		}
		for tenant, model := range map[string]object{"other": {"name": recorded.Name, "loop": "l"}, "default": {"name": recorded.Name, "loop": "nothing"}} {
			g.requestAs(tenant, events.Start, "berth.loop.start.v1", "r-"+tenant, object{"loopId": "none", "model": model})
			ctx, cancel := context.WithCancel(g.t.Context())
			for e, err := range looprunner.Follow(ctx, g.js, tenant, "none") {
				if err != nil {
					t.Fatal(err)
				}
				if r := decode[events.LoopRejected](t, e); r.Code != events.CodeNotFound || !strings.Contains(r.Message, "no journal of a loop") {
					t.Errorf("%s: %+v", tenant, r)
				}
				break
			}
			cancel()
		}
		a.close()
	})
}
