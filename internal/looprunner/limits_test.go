package looprunner_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/looprunner/script"
)

// obstinate is a priced model that decides the same again and again.
func obstinate(g *rig, decide func(in looprunner.Turn) looprunner.Decision) looprunner.ModelFactory {
	return func(looprunner.Spec) (looprunner.Model, error) {
		return pricedThinker{func(_ context.Context, in looprunner.Turn) (looprunner.Decision, error) {
			g.thoughts.Add(1)
			return decide(in), nil
		}}, nil
	}
}

type pricedThinker struct{ thinker }

func (pricedThinker) PricedAs() string { return "test/dear" }

func text(s string) *string { return &s }

// ending is a way in which limits end a loop.
type ending struct {
	name    string
	limits  object
	flicker bool
	decide  func(in looprunner.Turn) looprunner.Decision
	onAct   func(f *fleet) // what the sandbox does
	code    string
	message string
	asked   int64 // turns
	acts    int   // that took effect
}

func (e ending) thinks(o *looprunner.Options, g *rig) {
	o.Models["obstinate"] = obstinate(g, e.decide)
	o.Prices = looprunner.Prices{"test/dear": {Model: "test/dear", InputPerMillion: 10, OutputPerMillion: 100}}
}

func typing(looprunner.Turn) looprunner.Decision {
	return looprunner.Decision{Actions: []computer.Action{{Type: computer.TypeText, Text: text("x")}}, Usage: events.LoopUsage{InputTokens: 1000, OutputTokens: 100}}
}

func different(in looprunner.Turn) looprunner.Decision {
	d := typing(in)
	d.Actions[0].Text = text(fmt.Sprint(in.Step))
	return d
}

var endings = []ending{
	{name: "screens", limits: object{"repeatedScreens": 3}, decide: different, code: events.CodeRepeatedScreen, message: "3 turns in a row", asked: 3, acts: 3},
	{name: "screens-looked-at", limits: object{"repeatedScreens": 4}, code: events.CodeRepeatedScreen, message: "4 turns in a row", asked: 4,
		decide: func(looprunner.Turn) looprunner.Decision { return looprunner.Decision{Observe: true} }},
	{name: "screens-by-default", decide: different, code: events.CodeRepeatedScreen, message: "20 turns in a row", asked: 20, acts: 20},
	{name: "actions", limits: object{"repeatedActions": 3}, flicker: true, decide: typing, code: events.CodeRepeatedAction, message: "decided 4 times", asked: 4, acts: 3},
	{name: "spend", limits: object{"spendUsd": 0.05}, flicker: true, decide: different, code: events.CodeLimit, message: "limits.spendUsd: about $0.0600 of 0.05", asked: 3, acts: 3},
	{name: "clicked-away", limits: object{"allowHosts": []string{"*.quay.example"}}, decide: different, code: events.CodeHostDenied, message: "host evil.example is not in limits.allowHosts", asked: 2, acts: 2,
		onAct: func(f *fleet) {
			f.onAct = func(vm string, n int, _ []computer.Action) *events.Finished {
				f.boxes[vm].url = []string{"https://app.quay.example/", "https://evil.example/"}[n-1]
				return nil
			}
		}},
	{name: "another-page", limits: object{"denyHosts": []string{"evil.example"}}, decide: different, code: events.CodeHostDenied, message: "host evil.example is in limits.denyHosts", asked: 1, acts: 1,
		onAct: func(f *fleet) {
			f.onAct = func(string, int, []computer.Action) *events.Finished {
				return &events.Finished{Outcome: computer.OK, Observation: &computer.Observation{URL: "https://app.quay.example/", Screenshot: computer.Picture{Object: "o"},
					Pages: []computer.Page{{URL: "https://app.quay.example/", Active: true}, {URL: "https://evil.example/popup"}}}}
			}
		}},
	{name: "no-address", limits: object{"allowHosts": []string{"quay.example"}}, decide: different, code: events.CodeHostDenied, message: "does not say which address", asked: 1, acts: 1,
		onAct: func(f *fleet) {
			f.onAct = func(vm string, _ int, _ []computer.Action) *events.Finished { f.boxes[vm].url = ""; return nil }
		}},
}

// Each limit ends the loop with its code, before the model is asked once more
// than it may be and before one action too many.
func TestLimitsEndLoops(t *testing.T) {
	for _, e := range endings {
		t.Run(e.name, func(t *testing.T) {
			bubble(t, func(g *rig) {
				g.fleet.set(func(f *fleet) { f.flicker = e.flicker })
				if e.onAct != nil {
					g.fleet.set(e.onAct)
				}
				p := g.runner("a", nil, func(o *looprunner.Options) { e.thinks(o, g) })
				g.request(events.Start, "s", object{"loopId": "l", "goal": "g", "model": object{"name": "obstinate"}, "limits": nonNil(e.limits)})
				_, f := g.finished("l", events.LoopFailed, e.code)
				if !strings.Contains(f.Message, e.message) || g.thoughts.Load() != e.asked || f.Steps != e.acts {
					t.Errorf("%q after %d answers and %d acts, want %q after %d and %d", f.Message, g.thoughts.Load(), f.Steps, e.message, e.asked, e.acts)
				}
				if n := len(strings.Fields(g.fleet.acts(vmOf("l")))); n != e.acts {
					t.Errorf("%d acts took effect, want %d", n, e.acts)
				}
				if !g.fleet.killed(vmOf("l")) {
					t.Error("the sandbox was not killed")
				}
				p.close()
			})
		})
	}
}

func nonNil(o object) object {
	if o == nil {
		return object{}
	}
	return o
}

// A runner that dies anywhere in the last turns is succeeded by one that comes
// to the same end, though that one has been told other prices.
func TestLimitsEndLoopsTheSameAfterACrash(t *testing.T) {
	for _, e := range endings {
		if e.asked > 5 {
			continue
		}
		t.Run(e.name, func(t *testing.T) {
			bubble(t, func(g *rig) {
				g.fleet.set(func(f *fleet) { f.flicker = e.flicker })
				edges := []string{"append:thinking", "appended:thinking", "append:decided", "appended:decided", "append:acted", "appended:acted", "append:ending", "appended:ending", "append:finished"}
				for i, edge := range edges {
					if e.acts == 0 && strings.HasSuffix(edge, "acted") {
						continue
					}
					if e.onAct != nil {
						g.fleet.set(e.onAct)
					}
					loop := fmt.Sprintf("l%d", i)
					want := e.asked // of that edge's name, the last
					if strings.HasSuffix(edge, "acted") {
						want = int64(e.acts)
					} else if strings.HasSuffix(edge, "ending") || strings.HasSuffix(edge, "finished") {
						want = 1
					}
					var seen, died atomic.Int64
					g.thoughts.Store(0)
					g.runner("first-"+loop, func(p *process, point, l string) {
						if l == loop && point == edge && seen.Add(1) == want {
							died.Store(1)
							p.kill()
						}
					}, func(o *looprunner.Options) { e.thinks(o, g) })
					g.request(events.Start, "s-"+loop, object{"loopId": loop, "goal": "g", "model": object{"name": "obstinate"}, "limits": nonNil(e.limits)})
					g.until(loop, "started")
					second := g.runner("second-"+loop, nil, func(o *looprunner.Options) {
						e.thinks(o, g)
						o.Prices = nil
					})
					_, f := g.finished(loop, events.LoopFailed, e.code)
					synctest.Wait()
					if died.Load() == 0 {
						t.Errorf("%s: nobody died", edge)
					}
					if !strings.Contains(f.Message, e.message) || f.Steps != e.acts {
						t.Errorf("%s: %q after %d acts, want %q after %d", edge, f.Message, f.Steps, e.message, e.acts)
					}
					if n := len(strings.Fields(g.fleet.acts(vmOf(loop)))); n != e.acts {
						t.Errorf("%s: %d acts took effect, want %d", edge, n, e.acts)
					}
					if n := g.thoughts.Load(); n > e.asked+1 {
						t.Errorf("%s: the model was asked %d times, want at most %d", edge, n, e.asked+1)
					}
					second.close()
				}
			})
		})
	}
}

// What may not be opened or done is not sent; the model hears why and goes on.
func TestDeniedActionsAreTold(t *testing.T) {
	bubble(t, func(g *rig) {
		var told []string
		answers := []looprunner.Decision{
			{Actions: []computer.Action{{Type: computer.Cursor}, {Type: computer.Open, Target: "https://evil.example/"}}},
			{Actions: []computer.Action{{Type: computer.ClipboardRead}}},
			{Actions: []computer.Action{{Type: computer.Open, Target: "quay.example/x"}}},
			{Done: true},
		}
		p := g.runner("a", nil, func(o *looprunner.Options) {
			o.Models["obstinate"] = obstinate(g, func(in looprunner.Turn) looprunner.Decision {
				if last := in.Last(); last != nil && last.Acted.Error != nil {
					told = append(told, string(last.Acted.Outcome)+" "+last.Acted.Error.Error())
				}
				return answers[len(in.History)]
			})
		})
		g.request(events.Start, "s", object{"loopId": "l", "goal": "g", "model": object{"name": "obstinate"},
			"limits": object{"denyHosts": []string{"evil.example"}, "denyActions": []string{"clipboardRead"}}})
		g.until("l", "acted")
		g.fleet.set(func(f *fleet) { // what it opens is what it shows
			for _, b := range f.boxes {
				b.url = "about:blank"
			}
		})
		g.finished("l", events.LoopSucceeded, "")
		want := []string{
			"rejected hostDenied: action 1: host evil.example is in limits.denyHosts (evil.example)",
			"rejected actionDenied: action 0: clipboardRead is in limits.denyActions",
		}
		if strings.Join(told, "\n") != strings.Join(want, "\n") {
			t.Errorf("the model heard\n%s\nwant\n%s", strings.Join(told, "\n"), strings.Join(want, "\n"))
		}
		p.close()
	})
}

// A script that waits for a page and is led elsewhere meanwhile ends there.
func TestHostIsCheckedWithinATurn(t *testing.T) {
	bubble(t, func(g *rig) {
		g.fleet.set(func(f *fleet) { f.lateTitle = "never" })
		p := g.runner("a", nil)
		g.start("l", `[{"type":"cursor"},{"check":"title","equals":"x","within":60}]`, object{"limits": object{"denyHosts": []string{"evil.example"}}})
		g.until("l", "acted")
		g.fleet.set(func(f *fleet) { f.boxes[vmOf("l")].url = "http://evil.example/" })
		_, f := g.finished("l", events.LoopFailed, events.CodeHostDenied)
		if f.Seconds > 30 {
			t.Errorf("it took %g s", f.Seconds)
		}
		p.close()
	})
}

// A limit that nobody could hold is refused at the start, and fields that do
// not exist by name.
func TestLimitsAreRefusedAtTheStart(t *testing.T) {
	bubble(t, func(g *rig) {
		p := g.runner("a", nil, func(o *looprunner.Options) {
			o.Models["silent"] = func(looprunner.Spec) (looprunner.Model, error) { return thinker(nil), nil }
			o.Models["dear"] = obstinate(g, typing)
		})
		for i, c := range []struct {
			model  string
			limits object
			code   string
			says   string
		}{
			{"silent", object{"spendUsd": 1}, events.CodeNoPrice, "no price is known for this model"},
			{"dear", object{"spendUsd": 1}, events.CodeNoPrice, "no price is known for test/dear; name it in MODEL_PRICES_JSON"},
			{"dear", object{"spendUSD": -1}, events.CodeBadInput, "limits.spendUsd: -1"},
			{"dear", object{"spendEuro": 1}, events.CodeBadInput, `unknown field "spendEuro"`},
			{"dear", object{"allowHosts": []string{"https://x.example/"}}, events.CodeBadInput, "limits.allowHosts"},
			{"dear", object{"denyActions": []string{"dance"}}, events.CodeBadInput, `limits.denyActions: unknown action "dance"`},
		} {
			loop := fmt.Sprintf("r%d", i)
			g.request(events.Start, loop, object{"loopId": loop, "goal": "g", "model": object{"name": c.model}, "limits": c.limits})
			j := g.until(loop, "rejected")
			r := decode[events.LoopRejected](t, j[len(j)-1])
			if r.Code != c.code || !strings.Contains(r.Message, c.says) {
				t.Errorf("%v: %s: %s, want %s: … %s", c.limits, r.Code, r.Message, c.code, c.says)
			}
		}
		p.close()
	})
}

// A script costs nothing, may repeat itself as it likes, and what it costs is
// told where a price is known.
func TestLimitsOfScriptsAndSpendTold(t *testing.T) {
	bubble(t, func(g *rig) {
		p := g.runner("a", nil, func(o *looprunner.Options) {
			e := ending{decide: func(in looprunner.Turn) looprunner.Decision {
				d := typing(in)
				if in.Step == 3 {
					d.Actions, d.Done = nil, true
				}
				return d
			}}
			e.thinks(o, g)
			o.Models["script"] = script.New // uncounted: it says that it is free
		})
		g.start("l", "["+strings.Repeat(`{"type":"cursor"},`, 40)+`{"type":"cursor"}]`, object{"limits": object{"spendUsd": 0.01}})
		if _, f := g.finished("l", events.LoopSucceeded, ""); f.SpendUSD != 0 {
			t.Errorf("a script has spent %v", f.SpendUSD)
		}
		g.request(events.Start, "s", object{"loopId": "m", "goal": "g", "model": object{"name": "obstinate"}})
		j, f := g.finished("m", events.LoopSucceeded, "")
		if f.SpendUSD < 0.0599 || f.SpendUSD > 0.0601 {
			t.Errorf("spent %v, want 3 turns of $0.02", f.SpendUSD)
		}
		if s := decode[events.LoopStarted](t, j[0]); s.Price == nil || s.Price.Model != "test/dear" {
			t.Errorf("price %+v in the journal", s.Price)
		}
		p.close()
	})
}

func TestPricesAreChecked(t *testing.T) {
	var p looprunner.Prices
	if err := p.UnmarshalText([]byte(`{"chat/qwen3":{"inputPerMillionUsd":0.2,"outputPerMillionUsd":0.6}}`)); err != nil || p["chat/qwen3"].OutputPerMillion != 0.6 {
		t.Errorf("%+v, %v", p, err)
	}
	for text, want := range map[string]string{
		`[]`: `want {"name/id"`,
		`{"chat/x":{"inputPerMillionUsd":1,"outputPerMillionUsd":1,"cached":1}}`: `unknown field "cached"`,
		`{"chat":{"inputPerMillionUsd":1,"outputPerMillionUsd":1}}`:              `"chat": want the model's name and its id`,
		`{"chat/x":{"inputPerMillionUsd":1}}`:                                    `"chat/x": needs inputPerMillionUsd and outputPerMillionUsd`,
		`{"chat/x":{"inputPerMillionUsd":-1,"outputPerMillionUsd":1}}`:           "neither negative",
	} {
		if err := p.UnmarshalText([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}
