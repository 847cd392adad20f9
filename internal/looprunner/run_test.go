package looprunner_test

import (
	"context"
	"errors"
	"iter"
	"strings"
	"testing"
	"time"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/looprunner"
)

func limited(n int) func(*looprunner.Options) {
	return func(o *looprunner.Options) { o.MaxLoops = n }
}

// followOf yields the names of a journal's entries.
func followOf(g *rig, tenant, loop string) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		for e, err := range looprunner.Follow(g.t.Context(), g.js, tenant, loop) {
			if !yield(e.Name, err) {
				return
			}
		}
	}
}

func followCtx(ctx context.Context, g *rig, loop string) iter.Seq2[looprunner.Entry, error] {
	return looprunner.Follow(ctx, g.js, "default", loop)
}

// A sandbox that is refused, or dies at any time, ends its loop with its code.
func TestSandboxEnds(t *testing.T) {
	bubble(t, func(g *rig) {
		a := g.runner("a", nil)
		g.fleet.set(func(f *fleet) {
			f.refuse = func(string, events.SandboxCreate) *events.Ended {
				return &events.Ended{Code: events.CodeVMIDInUse, Message: "it is"}
			}
		})
		g.start("refused", waitScript, nil)
		_, f := g.finished("refused", events.LoopFailed, events.CodeVMIDInUse)
		if !strings.Contains(f.Message, "it is") || g.fleet.killed(vmOf("refused")) {
			t.Errorf("%+v", f)
		}
		g.fleet.set(func(f *fleet) { f.refuse = nil })
		for name, code := range map[string]string{events.EventLost: events.CodeLost, events.EventExpired: events.CodeTTL, events.EventKilled: events.CodeKilled} {
			g.start(name, waitScript, nil)
			g.until(name, "acted")
			time.Sleep(time.Second)
			at := time.Now()
			g.fleet.end(g.t.Context(), vmOf(name), name, code)
			g.finished(name, events.LoopFailed, code)
			if d := time.Since(at); d > time.Second {
				t.Errorf("%s: ended after %s", name, d)
			}
		}
		// While an act is out.
		g.fleet.set(func(f *fleet) { f.actTakes = time.Minute })
		g.start("act", waitScript, nil)
		g.until("act", "decided")
		time.Sleep(time.Second)
		g.fleet.end(g.t.Context(), vmOf("act"), events.EventLost, events.CodeLost)
		g.finished("act", events.LoopFailed, events.CodeLost)
		a.close()
	})
}

// Somebody else's sandbox with the wanted id is not taken for the loop's own.
func TestAnothersSandbox(t *testing.T) {
	bubble(t, func(g *rig) {
		a := g.runner("a", nil)
		stream, err := g.js.Stream(g.t.Context(), bus.Events)
		if err != nil {
			t.Fatal(err)
		}
		other := events.Request{Source: "/x", ID: "1"}
		for name, data := range map[string]any{
			"ready":    events.Placed{VMID: "mine", ServerID: "fake-01", Fence: 1, Request: other},
			"rejected": events.Ended{VMID: "mine", Code: "badInput", Request: other},
		} {
			e, err := events.New(events.SandboxType(name), events.SourceScheduler, "x"+name, data)
			if err != nil {
				t.Fatal(err)
			}
			if err := bus.Announce(g.t.Context(), g.js, stream, events.EventSubject("default", "mine", name), e); err != nil {
				t.Fatal(err)
			}
		}
		g.fleet.set(func(f *fleet) { f.readyIn = 5 * time.Second })
		g.start("l", `[{"type":"type","text":"a"}]`, object{"sandbox": object{"vmId": "mine"}})
		j, _ := g.finished("l", events.LoopSucceeded, "")
		for _, e := range j {
			if e.Name == "sandbox" && decode[events.LoopSandbox](t, e).Fence != 7 {
				t.Error("the other's sandbox was taken")
			}
		}
		a.close()
	})
}

// A sandbox given by its id is used and left alone; another tenant's is not
// found.
func TestGivenSandbox(t *testing.T) {
	bubble(t, func(g *rig) {
		a := g.runner("a", nil)
		b, err := g.js.KeyValue(g.t.Context(), kv.BucketPlacements)
		if err != nil {
			t.Fatal(err)
		}
		d := computer.Display{Width: 640, Height: 480}
		g.fleet.boxes["given"] = &fakeSandbox{vm: "given", tenant: "default", server: "fake-01", display: d, titleAt: map[int]string{}}
		for vm, p := range map[string]kv.Placement{
			"given": {Tenant: "default", Phase: kv.Ready, ServerID: "fake-01", Fence: 7, Info: &events.SandboxInfo{Display: d}},
			"ended": {Tenant: "default", Phase: kv.Ended, Outcome: "killed"},
			"other": {Tenant: "acme", Phase: kv.Ready, ServerID: "fake-01", Fence: 7},
		} {
			if _, err := kv.Put(g.t.Context(), b, kv.VMKey(vm), p, 0); err != nil {
				t.Fatal(err)
			}
		}
		one := `[{"type":"click","x":639,"y":1}]`
		g.start("ok", one, object{"vmId": "given"})
		g.finished("ok", events.LoopSucceeded, "")
		if g.fleet.acts("given") != "click" || g.fleet.killed("given") || len(g.fleet.creates) != 0 {
			t.Errorf("acts %s, killed %v", g.fleet.acts("given"), g.fleet.killed("given"))
		}
		g.start("bounds", `[{"type":"click","x":640,"y":1}]`, object{"vmId": "given"})
		g.finished("bounds", events.LoopFailed, events.CodeOutOfRange)
		g.start("gone", one, object{"vmId": "ended"})
		g.finished("gone", events.LoopFailed, events.CodeEnded)
		g.start("theirs", one, object{"vmId": "other"})
		g.finished("theirs", events.LoopFailed, events.CodeNotFound)
		g.start("none", one, object{"vmId": "nowhere"})
		g.finished("none", events.LoopFailed, events.CodeNotFound)
		a.close()
	})
}

func TestKeep(t *testing.T) {
	bubble(t, func(g *rig) {
		a := g.runner("a", nil)
		g.start("l", `[{"type":"type","text":"a"}]`, object{"keep": true})
		g.finished("l", events.LoopSucceeded, "")
		time.Sleep(time.Minute)
		if g.fleet.killed(vmOf("l")) {
			t.Error("killed")
		}
		a.close()
	})
}

func TestLimits(t *testing.T) {
	bubble(t, func(g *rig) {
		a := g.runner("a", nil)
		g.start("steps", three, object{"limits": object{"steps": 2}})
		_, f := g.finished("steps", events.LoopFailed, events.CodeLimit)
		if f.Steps != 2 || g.fleet.acts(vmOf("steps")) != "open type:hello" {
			t.Errorf("%d steps, acts %s", f.Steps, g.fleet.acts(vmOf("steps")))
		}
		g.start("exact", three, object{"limits": object{"steps": 3}})
		g.finished("exact", events.LoopSucceeded, "")
		g.start("seconds", waitScript, object{"limits": object{"seconds": 20}})
		_, f = g.finished("seconds", events.LoopFailed, events.CodeLimit)
		if f.Seconds < 20 || f.Seconds > 22 {
			t.Errorf("%v seconds", f.Seconds)
		}
		g.fleet.set(func(f *fleet) { f.readyIn = time.Hour })
		g.start("queued", waitScript, object{"limits": object{"seconds": 20}})
		g.finished("queued", events.LoopFailed, events.CodeLimit)
		a.close()
	})
}

// What certainly did not run is tried again under a new attempt; what nobody
// can tell is not.
func TestOutcomes(t *testing.T) {
	reject := func(code string) *events.Finished {
		return &events.Finished{Outcome: computer.Rejected, Error: &computer.Fault{Code: code, Message: "no"}}
	}
	bubble(t, func(g *rig) {
		a := g.runner("a", nil)
		two := `[{"type":"type","text":"a"},{"type":"type","text":"b"}]`
		run := func(loop, items string, onAct func(vm string, n int, a []computer.Action) *events.Finished, outcome, code string) ([]looprunner.Entry, string) {
			g.fleet.set(func(f *fleet) { f.onAct = onAct })
			g.start(loop, items, nil)
			j, _ := g.finished(loop, outcome, code)
			return j, g.fleet.acts(vmOf(loop))
		}
		j, acts := run("busy", two, func(_ string, n int, _ []computer.Action) *events.Finished {
			if n <= 3 {
				return reject(events.CodeBusy)
			}
			return nil
		}, events.LoopSucceeded, "")
		if acts != "type:a type:b" || strings.Count(names(j), "retried") != 3 {
			t.Errorf("busy: acts %s, journal %s", acts, names(j))
		}
		run("bad", two, func(string, int, []computer.Action) *events.Finished { return reject(events.CodeUnsupported) }, events.LoopFailed, events.CodeUnsupported)
		run("lost", two, func(string, int, []computer.Action) *events.Finished { return reject(events.CodeFenceStale) }, events.LoopFailed, events.CodeFenceStale)
		unknown := func(_ string, n int, _ []computer.Action) *events.Finished {
			if n == 1 {
				return &events.Finished{Outcome: computer.Unknown, Error: &computer.Fault{Code: events.CodeWorkerDied, Message: "it died"}}
			}
			return nil
		}
		_, acts = run("unknown", two, unknown, events.LoopFailed, events.CodeWorkerDied)
		if acts != "type:a" {
			t.Errorf("unknown: acts %s", acts)
		}
		_, acts = run("accepted", `[{"type":"type","text":"a","unknown":"continue"},{"type":"type","text":"b"}]`, unknown, events.LoopSucceeded, "")
		if acts != "type:a type:b" {
			t.Errorf("accepted: acts %s", acts)
		}
		_, acts = run("failed", two, func(string, int, []computer.Action) *events.Finished {
			fault := &computer.Fault{Code: events.CodeActionFailed, Message: "a page error"}
			return &events.Finished{Outcome: computer.Failed, Actions: []computer.ActionResult{{Outcome: computer.Failed, Error: fault}}}
		}, events.LoopFailed, events.CodeActionFailed)
		if acts != "type:a" {
			t.Errorf("failed: acts %s", acts)
		}
		a.close()
	})
}

// A command that nobody takes is given a new attempt only when no worker may
// start the old one any more; one that no worker ends is unknown.
func TestNobodyTakesTheCommand(t *testing.T) {
	bubble(t, func(g *rig) {
		a := g.runner("a", nil)
		g.start("l", `[{"type":"type","text":"a"},{"check":"title","equals":"x","within":2},{"type":"type","text":"b"}]`, nil)
		g.until("l", "acted")
		g.fleet.set(func(f *fleet) { f.silent = true; f.boxes[vmOf("l")].titleAt[0] = "x" })
		time.Sleep(time.Minute)
		g.fleet.set(func(f *fleet) { f.silent = false })
		g.finished("l", events.LoopSucceeded, "")
		if got := g.fleet.acts(vmOf("l")); got != "type:a type:b" {
			t.Errorf("acts %s", got)
		}
		var silentSince time.Time
		g.fleet.set(func(f *fleet) {
			f.onAct = func(string, int, []computer.Action) *events.Finished {
				f.silent, f.onAct, silentSince = true, nil, time.Now()
				return nil
			}
		})
		g.start("act", `[{"type":"type","text":"a"},{"type":"type","text":"b"}]`, nil)
		j := g.until("act", "retried")
		r := decode[events.LoopRetried](t, j[len(j)-1])
		if d := r.At.Sub(silentSince); d < 75*time.Second || d > 100*time.Second || r.Attempt != 2 {
			t.Errorf("attempt %d after %s", r.Attempt, d)
		}
		g.fleet.set(func(f *fleet) { f.silent = false })
		g.finished("act", events.LoopSucceeded, "")
		if got := g.fleet.acts(vmOf("act")); got != "type:a type:b" {
			t.Errorf("acts %s", got)
		}
		g.fleet.set(func(f *fleet) { f.actTakes = time.Hour })
		g.start("stuck", `[{"type":"type","text":"b"}]`, nil)
		j, _ = g.finished("stuck", events.LoopFailed, events.CodeDeadline) // nor could it be looked at
		for _, e := range j {
			if e.Name == "acted" && decode[events.LoopActed](t, e).Outcome != computer.Unknown {
				t.Errorf("acted %s", e.Data)
			}
		}
		a.close()
	})
}

// An act without a picture is followed by an observation.
func TestActWithoutPicture(t *testing.T) {
	bubble(t, func(g *rig) {
		g.fleet.set(func(f *fleet) { f.noPics = true })
		a := g.runner("a", nil)
		g.start("l", crashScript, nil)
		j, _ := g.finished("l", events.LoopSucceeded, "")
		if !strings.Contains(names(j), "acted observed thinking decided acted observed") {
			t.Errorf("journal %s", names(j))
		}
		a.close()
	})
}

// Whatever a model does wrong ends its own loop only.
func TestModelFaults(t *testing.T) {
	bubble(t, func(g *rig) {
		answer := func(d looprunner.Decision, err error) looprunner.ModelFactory {
			return func(looprunner.Spec) (looprunner.Model, error) {
				return thinker(func(context.Context, looprunner.Turn) (looprunner.Decision, error) { return d, err }), nil
			}
		}
		a := g.runner("a", nil, func(o *looprunner.Options) {
			o.Models = map[string]looprunner.ModelFactory{
				"error":   answer(looprunner.Decision{}, errors.New("overloaded")),
				"fault":   answer(looprunner.Decision{}, &computer.Fault{Code: "refused", Message: "I will not"}),
				"nothing": answer(looprunner.Decision{}, nil),
				"huge":    answer(looprunner.Decision{Reply: []byte(`"` + strings.Repeat("x", 2<<20) + `"`)}, nil),
				"invalid": answer(looprunner.Decision{State: []byte(`{`)}, nil),
				"panics": func(looprunner.Spec) (looprunner.Model, error) {
					return thinker(func(context.Context, looprunner.Turn) (looprunner.Decision, error) { panic("oh") }), nil
				},
				"looks": func(looprunner.Spec) (looprunner.Model, error) {
					return thinker(func(_ context.Context, in looprunner.Turn) (looprunner.Decision, error) {
						if in.Step == 3 {
							return looprunner.Decision{Done: true}, nil
						}
						return looprunner.Decision{Observe: true, Wait: 10 * time.Second, Usage: events.LoopUsage{InputTokens: 5, OutputTokens: 1}}, nil
					}), nil
				},
			}
		})
		for model, code := range map[string]string{"error": events.CodeModelFailed, "fault": "refused", "nothing": events.CodeModelFailed,
			"huge": events.CodeTooLarge, "invalid": events.CodeInternal, "panics": events.CodeInternal} {
			g.request(events.Start, model, object{"loopId": model, "model": object{"name": model}})
			g.finished(model, events.LoopFailed, code)
		}
		g.request(events.Start, "looks", object{"loopId": "looks", "model": object{"name": "looks"}})
		j, f := g.finished("looks", events.LoopSucceeded, "")
		if f.Usage != (events.LoopUsage{InputTokens: 10, OutputTokens: 2}) || f.Seconds < 20 || !strings.Contains(names(j), "decided observed thinking decided observed") {
			t.Errorf("%+v, journal %s", f, names(j))
		}
		g.request(events.Start, "tokens", object{"loopId": "tokens", "model": object{"name": "looks"}, "limits": object{"tokens": 6}})
		g.finished("tokens", events.LoopFailed, events.CodeLimit)
		a.close()
	})
}

// What a worker may still be running is not called unknown: a long text takes
// its time.
func TestLongAct(t *testing.T) {
	bubble(t, func(g *rig) {
		g.fleet.set(func(f *fleet) { f.actTakes = 280 * time.Second })
		a := g.runner("a", nil)
		g.start("l", `[{"type":"type","text":"`+strings.Repeat("x", 11000)+`"}]`, nil) // 60 s + 5 s + 220 s
		j, _ := g.finished("l", events.LoopSucceeded, "")
		for _, e := range j {
			if e.Name == "acted" && decode[events.LoopActed](t, e).Outcome != computer.OK {
				t.Errorf("acted %s", e.Data)
			}
		}
		a.close()
	})
}
