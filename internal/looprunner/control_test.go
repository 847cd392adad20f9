package looprunner_test

import (
	"context"
	"strings"
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
