package looprunner_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
)

const waitScript = `[
	{"type":"type","text":"a"},
	{"check":"title","equals":"never","within":100},
	{"type":"type","text":"b"}
]`

// A stop ends a loop while it thinks, whichever runner takes the request in.
func TestStop(t *testing.T) {
	bubble(t, func(g *rig) {
		a := g.runner("a", nil)
		g.start("l", waitScript, nil)
		g.until("l", "acted")
		b := g.runner("b", nil)
		time.Sleep(2 * time.Second)
		asked := time.Now()
		for i := range 2 { // one of them lands at the runner that has not the loop
			g.request(events.Stop, []string{"s1", "s2"}[i], object{"loopId": "l", "reason": "enough"})
		}
		_, f := g.finished("l", events.LoopStopped, events.CodeStopped)
		if !strings.Contains(f.Message, "enough") {
			t.Errorf("message %q", f.Message)
		}
		if d := time.Since(asked); d > 2*time.Second {
			t.Errorf("stopped after %s", d)
		}
		if g.fleet.acts(vmOf("l")) != "type:a" || !g.fleet.killed(vmOf("l")) {
			t.Errorf("acts %s", g.fleet.acts(vmOf("l")))
		}
		a.close()
		b.close()
	})
}

// A stop waits for the act that is out, so that the journal has its result,
// and ends a loop that still waits for its sandbox at once.
func TestStopDuringActAndBeforeReady(t *testing.T) {
	bubble(t, func(g *rig) {
		g.fleet.set(func(f *fleet) { f.actTakes = 2 * time.Second })
		a := g.runner("a", nil)
		g.start("l", `[{"type":"type","text":"a"},{"type":"type","text":"b"}]`, nil)
		g.until("l", "decided")
		time.Sleep(time.Second)
		g.request(events.Stop, "s", object{"loopId": "l"})
		j, f := g.finished("l", events.LoopStopped, events.CodeStopped)
		if f.Steps != 1 || !strings.HasSuffix(names(j), "decided stopRequested acted ending finished") {
			t.Errorf("%d steps, journal %s", f.Steps, names(j))
		}
		g.fleet.set(func(f *fleet) { f.readyIn = time.Hour })
		g.start("l2", waitScript, nil)
		g.until("l2", "started")
		g.request(events.Stop, "s2", object{"loopId": "l2"})
		g.finished("l2", events.LoopStopped, events.CodeStopped)
		if !g.fleet.killed(vmOf("l2")) {
			t.Error("its sandbox was not killed")
		}
		a.close()
	})
}

// A paused loop stands still, also in other hands, until it is resumed.
func TestPauseAndResume(t *testing.T) {
	bubble(t, func(g *rig) {
		g.fleet.set(func(f *fleet) { f.actTakes = time.Second })
		a := g.runner("a", nil)
		g.start("l", crashScript, nil)
		g.until("l", "decided")
		g.request(events.Pause, "p", object{"loopId": "l"})
		g.until("l", "paused")
		time.Sleep(5 * time.Minute)
		b := g.runner("b", nil)
		a.close()
		time.Sleep(5 * time.Minute)
		if got := g.fleet.acts(vmOf("l")); got != "type:a" {
			t.Errorf("acts while paused: %s", got)
		}
		g.request(events.Resume, "r", object{"loopId": "l"})
		j, f := g.finished("l", events.LoopSucceeded, "")
		if strings.Count(names(j), "paused") != 1 || strings.Count(names(j), "resumed") != 1 || f.Seconds < 600 {
			t.Errorf("journal %s, %v s", names(j), f.Seconds)
		}
		b.close()
	})
}

// A message reaches the model in its next turn, once; one that comes while it
// thinks in the turn after; and it answers a model's question.
func TestMessages(t *testing.T) {
	bubble(t, func(g *rig) {
		var told []string
		thinking := make(chan struct{})
		a := g.runner("a", nil, func(o *looprunner.Options) {
			o.Models = map[string]looprunner.ModelFactory{"asker": func(looprunner.Spec) (looprunner.Model, error) {
				return thinker(func(_ context.Context, in looprunner.Turn) (looprunner.Decision, error) {
					told = append(told, strings.Join(in.Messages, "+"))
					switch in.Step {
					case 1:
						return looprunner.Decision{NeedsInput: "which?"}, nil
					case 2:
						close(thinking)
						time.Sleep(3 * time.Second)
						text := "x"
						return looprunner.Decision{Actions: []computer.Action{{Type: computer.TypeText, Text: &text}}, Reply: []byte(`{"n":2}`)}, nil
					default:
						if h := in.History; len(h) != 2 || string(h[1].Decision.Reply) != `{"n":2}` || h[1].Acted.Outcome != computer.OK || h[1].Messages[0] != "that one" {
							t.Errorf("history %+v", h)
						}
						return looprunner.Decision{Done: true}, nil
					}
				}), nil
			}}
		})
		g.request(events.Start, "start", object{"loopId": "l", "model": object{"name": "asker"}, "goal": "g"})
		j := g.until("l", "paused")
		if p := decode[events.LoopPaused](t, j[len(j)-1]); !p.NeedsInput || p.Reason != "which?" {
			t.Errorf("paused %+v", p)
		}
		time.Sleep(time.Minute)
		g.request(events.Message, "m1", object{"loopId": "l", "text": "that one"})
		<-thinking
		g.request(events.Message, "m2", object{"loopId": "l", "text": "hurry"})
		g.finished("l", events.LoopSucceeded, "")
		if got := strings.Join(told, "|"); got != "|that one|hurry" {
			t.Errorf("the model was told %q", got)
		}
		a.close()
	})
}

// What cannot be done to a loop is refused on EVENTS, and no journal changes.
func TestControlRefused(t *testing.T) {
	bubble(t, func(g *rig) {
		a := g.runner("a", nil)
		g.start("l", `[{"type":"type","text":"a"}]`, nil)
		j, _ := g.finished("l", events.LoopSucceeded, "")
		for _, c := range []struct {
			id, loop   string
			verb       events.Verb
			data       object
			code, want string
		}{
			{"c1", "nope", events.Stop, object{"loopId": "nope"}, events.CodeNotFound, "nope"},
			{"c2", "l", events.Stop, object{"loopId": "l"}, events.CodeEnded, "has ended"},
			{"c3", "l", events.Message, object{"loopId": "l"}, events.CodeBadInput, "text"},
			{"c4", "l", events.Pause, object{"loopId": "l", "text": "x"}, events.CodeBadInput, "text"},
			{"c5", "l", events.Stop, object{"loopId": "l", "reasn": "x"}, events.CodeBadInput, "reasn"},
		} {
			g.request(c.verb, c.id, c.data)
			r := g.rejection(bus.Events, events.EventSubject("default", c.loop, "rejected"), c.id)
			if r.Code != c.code || !strings.Contains(r.Message, c.want) {
				t.Errorf("%s: %+v", c.id, r)
			}
		}
		if again := g.journal("l"); names(again) != names(j) {
			t.Errorf("the journal has become %s", names(again))
		}
		a.close()
	})
}

// Whatever a stranger publishes into a journal stops no loop, not even the
// next owner's reading.
func TestStrangersInTheJournal(t *testing.T) {
	bubble(t, func(g *rig) {
		g.fleet.set(func(f *fleet) { f.actTakes = 2 * time.Second })
		a := g.runner("a", nil)
		g.start("l", crashScript, nil)
		g.until("l", "decided")
		for _, m := range []*nats.Msg{
			{Subject: "loop.default.l.acted", Data: []byte("junk")},
			{Subject: "loop.default.l.decided", Data: nil},
			{Subject: "loop.default.l.novelty", Data: []byte(`{"specversion":"1.0","id":"x","source":"/x","type":"y"}`)},
			{Subject: "loop.default.l.stopRequested", Data: []byte(`{"specversion":"1.0","id":"x","source":"/x","type":"y","data":{"step":"a"}}`)},
			{Subject: "loop.default.l.rejected", Data: []byte(`{"specversion":"1.0","id":"x","source":"/x","type":"y"}`)},
		} {
			g.publish(m)
		}
		g.until("l", "acted")
		a.close()
		b := g.runner("b", nil)
		n := 0
		for e, err := range looprunner.Follow(g.t.Context(), g.js, "default", "l") {
			if err == nil && e.Name == "finished" {
				n++
				if f := decode[events.LoopFinished](t, e); f.Outcome != events.LoopSucceeded {
					t.Errorf("%+v", f)
				}
			}
		}
		if got := g.fleet.acts(vmOf("l")); got != "type:a type:b" || n != 1 {
			t.Errorf("acts %s", got)
		}
		b.close()
	})
}

// A person's answer reaches the model, once and beside a fresh picture, wherever
// the runner dies between the question and the answer, also where nobody runs
// loops when it is given.
func TestAnswerAfterACrash(t *testing.T) {
	edges := []string{"appended:decided", "append:paused", "appended:paused", "answered", "append:resumed", "appended:resumed", "append:observed", "appended:observed", "append:thinking", "appended:thinking"}
	bubble(t, func(g *rig) {
		for i, edge := range edges {
			loop := fmt.Sprintf("l%d", i)
			var mu sync.Mutex
			var told []string
			asks := func(o *looprunner.Options) {
				o.Models["asker"] = func(looprunner.Spec) (looprunner.Model, error) {
					return thinker(func(_ context.Context, in looprunner.Turn) (looprunner.Decision, error) {
						mu.Lock()
						defer mu.Unlock()
						if len(in.History) == 0 {
							return looprunner.Decision{NeedsInput: "please log in"}, nil
						}
						told = append(told, strings.Join(in.Messages, "+")+" at "+in.Observation.Title)
						return looprunner.Decision{Done: true}, nil
					}), nil
				}
			}
			answered := false
			first := g.runner("first-"+loop, func(p *process, point, _ string) {
				// The edges after the answer are those of the second turn.
				late := edge == "append:observed" || edge == "appended:observed" || edge == "append:thinking" || edge == "appended:thinking"
				mu.Lock()
				defer mu.Unlock()
				if point == edge && (answered || !late) {
					p.kill()
				}
			}, asks)
			g.request(events.Start, "s-"+loop, object{"loopId": loop, "model": object{"name": "asker"}, "goal": "g"})
			if !strings.HasSuffix(edge, "decided") && edge != "append:paused" {
				g.until(loop, "paused")
			} else {
				g.until(loop, "thinking")
			}
			time.Sleep(time.Minute)
			if edge == "answered" {
				first.kill()
			}
			g.fleet.set(func(f *fleet) { f.boxes[vmOf(loop)].text = "logged in" })
			mu.Lock()
			answered = true
			mu.Unlock()
			g.request(events.Message, "m-"+loop, object{"loopId": loop, "text": "done"})
			time.Sleep(time.Minute) // where the runner is dead, nobody is there
			second := g.runner("second-"+loop, nil, asks)
			g.finished(loop, events.LoopSucceeded, "")
			mu.Lock()
			// A runner that dies once the answer is thought of costs one more question.
			if n := len(told); n < 1 || n > 2 || n == 2 && edge != "appended:thinking" {
				t.Errorf("%s: the model was told %q", edge, told)
			}
			for _, what := range told {
				if what != "done at logged in" {
					t.Errorf("%s: the model was told %q, want the answer and what the person did", edge, what)
				}
			}
			mu.Unlock()
			second.close()
			<-first.done
		}
	})
}

// A loop that nobody ran for hours looks before it thinks.
func TestStalePictureIsTakenAgain(t *testing.T) {
	bubble(t, func(g *rig) {
		var seen string
		model := func(o *looprunner.Options) {
			o.Models["m"] = func(looprunner.Spec) (looprunner.Model, error) {
				return thinker(func(_ context.Context, in looprunner.Turn) (looprunner.Decision, error) {
					seen = in.Observation.Title
					return looprunner.Decision{Done: true}, nil
				}), nil
			}
		}
		first := g.runner("first", func(p *process, point, _ string) {
			if point == "appended:observed" {
				p.kill()
			}
		}, model)
		g.request(events.Start, "s", object{"loopId": "l", "model": object{"name": "m"}, "goal": "g", "limits": object{"seconds": 20000}})
		g.until("l", "observed")
		<-first.done
		time.Sleep(2 * time.Hour)
		g.fleet.set(func(f *fleet) { f.boxes[vmOf("l")].text = "two hours later" })
		second := g.runner("second", nil, model)
		g.finished("l", events.LoopSucceeded, "")
		if seen != "two hours later" {
			t.Errorf("the model saw %q", seen)
		}
		second.close()
	})
}

// What somebody said before a question was put is no answer to it: it is told,
// but the loop waits for one.
func TestEarlierMessageIsNoAnswer(t *testing.T) {
	bubble(t, func(g *rig) {
		var told []string
		a := g.runner("a", nil, func(o *looprunner.Options) {
			o.Models["asker"] = func(looprunner.Spec) (looprunner.Model, error) {
				return thinker(func(_ context.Context, in looprunner.Turn) (looprunner.Decision, error) {
					told = append(told, strings.Join(in.Messages, "+"))
					switch len(in.History) {
					case 0:
						time.Sleep(10 * time.Second)
						return looprunner.Decision{NeedsInput: "pay 100?"}, nil
					case 1:
						return looprunner.Decision{Observe: true}, nil
					default:
						return looprunner.Decision{Done: true}, nil
					}
				}), nil
			}
		})
		g.request(events.Start, "s", object{"loopId": "l", "model": object{"name": "asker"}, "goal": "g"})
		g.until("l", "thinking")
		g.request(events.Message, "m1", object{"loopId": "l", "text": "ok, thanks"})
		g.until("l", "paused")
		time.Sleep(time.Minute)
		if len(told) != 1 {
			t.Errorf("it went on without an answer: the model was told %q", told)
		}
		g.request(events.Message, "m2", object{"loopId": "l", "text": "no"})
		g.finished("l", events.LoopSucceeded, "")
		if got := strings.Join(told, "|"); got != "|ok, thanks+no|" {
			t.Errorf("the model was told %q", got)
		}
		a.close()
	})
}
