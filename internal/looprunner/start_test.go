package looprunner_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/events"
)

// rejection waits for the rejection of a request.
func (g *rig) rejection(stream, subject, id string) events.LoopRejected {
	g.t.Helper()
	s, err := g.js.Stream(g.t.Context(), stream)
	if err != nil {
		g.t.Fatal(err)
	}
	for range 600 {
		if e, raw, err := bus.Last(g.t.Context(), s, subject); err == nil && raw != nil && e.Type() == "berth.loop.rejected.v1" {
			var r events.LoopRejected
			if err := json.Unmarshal(e.Data(), &r); err != nil {
				g.t.Fatal(err)
			}
			if r.Request == (events.Request{Source: "/test", ID: id}) {
				return r
			}
		}
		time.Sleep(100 * time.Millisecond)
	}
	g.t.Fatalf("no rejection of %s on %s", id, subject)
	return events.LoopRejected{}
}

// Every fault of a start is a typed rejection before anything runs.
func TestBadStart(t *testing.T) {
	script := func(items string) object {
		return object{"model": object{"name": "script"}, "script": json.RawMessage(items)}
	}
	with := func(o object, k string, v any) object { o[k] = v; return o }
	ok := `[{"type":"type","text":"a"}]`
	big := strings.Repeat("x", 60<<10)
	cases := []struct {
		name       string
		data       any
		code, want string
	}{
		{"no data", object{}, events.CodeBadInput, "model"},
		{"array", []int{1}, events.CodeBadInput, "array"},
		{"unknown field", with(script(ok), "limit", 1), events.CodeBadInput, `"limit"`},
		{"unknown limit", with(script(ok), "limits", object{"step": 1}), events.CodeBadInput, `"step"`},
		{"negative steps", with(script(ok), "limits", object{"steps": -1}), events.CodeBadInput, "limits.steps"},
		{"endless seconds", with(script(ok), "limits", object{"seconds": 1e9}), events.CodeBadInput, "limits.seconds"},
		{"bad loop id", with(script(ok), "loopId", "a b"), events.CodeBadInput, "loopId"},
		{"bad vm id", with(script(ok), "vmId", "a.b"), events.CodeBadInput, "vmId"},
		{"both", with(with(script(ok), "vmId", "v"), "sandbox", object{}), events.CodeBadInput, "only one"},
		{"bad sandbox", with(script(ok), "sandbox", object{"role": "a b"}), events.CodeBadInput, "sandbox: role"},
		{"sandbox field", with(script(ok), "sandbox", object{"ttlSecond": 3}), events.CodeBadInput, `"ttlSecond"`},
		{"unknown model", object{"model": object{"name": "gpt"}}, events.CodeBadInput, "known are script"},
		{"model field", object{"model": object{"name": "script", "apiKey": "s"}, "script": json.RawMessage(ok)}, events.CodeBadInput, "apiKey"},
		{"no script", object{"model": object{"name": "script"}}, events.CodeBadInput, "needs one"},
		{"empty script", script(`[]`), events.CodeBadInput, "at least one"},
		{"unknown action", script(`[{"type":"type","text":"a"},{"type":"clck"}]`), events.CodeBadInput, "script item 1"},
		{"unknown key", script(`[{"type":"key","keys":["Contrl"]}]`), events.CodeUnknownKey, "script item 0"},
		{"bad check", script(`[{"check":"title","equals":"a","contains":"b"}]`), events.CodeBadInput, "exactly one"},
		{"outside", script(`[{"type":"type","text":"a"},{"type":"click","x":1280,"y":0}]`), events.CodeOutOfRange, "script item 1"},
		{"outside a display", with(script(`[{"type":"click","x":700,"y":0}]`), "sandbox", object{"display": object{"width": 640, "height": 480}}), events.CodeOutOfRange, "640×480"},
		{"negative wait", script(`[{"type":"wait","seconds":-1}]`), events.CodeBadInput, "seconds"},
		{"large data", script(`[` + strings.Repeat(`{"type":"type","text":"`+big+`"},`, 8) + `{"type":"type","text":"` + big + `"}]`), events.CodeTooLarge, "bytes"},
		{"large when escaped", script(`[` + strings.Repeat(`{"type":"type","text":"`+strings.Repeat("<", 60<<10)+`"},`, 4) + `{"type":"cursor"}]`), events.CodeTooLarge, "bytes"},
	}
	bubble(t, func(g *rig) {
		a := g.runner("a", nil)
		for i, c := range cases {
			id := fmt.Sprintf("bad%d", i)
			g.request(events.Start, id, c.data)
			r := g.rejection(bus.Loops, events.LoopSubject("default", events.DerivedVMID("default", "/test", id), "rejected"), id)
			if r.Code != c.code || !strings.Contains(r.Message, c.want) {
				t.Errorf("%s: %s: %s; want %s with %q", c.name, r.Code, r.Message, c.code, c.want)
			}
		}
		if n := len(g.fleet.creates); n != 0 {
			t.Errorf("%d sandboxes were requested", n)
		}
		// The same loop id may be started once the fault is mended.
		g.start("again", `[{"type":"tpe"}]`, nil)
		g.rejection(bus.Loops, events.LoopSubject("default", "again", "rejected"), "start-again")
		g.request(events.Start, "better", object{"loopId": "again", "model": object{"name": "script"}, "script": json.RawMessage(ok)})
		j, _ := g.finished("again", events.LoopSucceeded, "")
		if !strings.HasPrefix(names(j), "rejected started") {
			t.Errorf("journal %s", names(j))
		}
		a.close()
	})
}

// What is on the wrong subject or is no event disturbs nobody.
func TestBadEnvelope(t *testing.T) {
	bubble(t, func(g *rig) {
		a := g.runner("a", nil)
		g.publish(&nats.Msg{Subject: "request.default.loop.start", Data: []byte("not json")})
		g.requestAs("default", events.Start, "berth.sandbox.create.v1", "t1", object{})
		g.requestAs("default", "frobnicate", "berth.loop.frobnicate.v1", "t2", object{})
		g.requestAs("_", events.Start, "berth.loop.start.v1", "t3", object{})
		id := func(tenant, n string) string { return events.DerivedVMID(tenant, "/test", n) }
		for _, c := range []struct{ stream, subject, id, code string }{
			{bus.Loops, events.LoopSubject("default", id("default", "t1"), "rejected"), "t1", events.CodeUnknownType},
			{bus.Events, events.EventSubject("default", id("default", "t2"), "rejected"), "t2", events.CodeUnknownType},
			{bus.Loops, events.LoopSubject("_", id("_", "t3"), "rejected"), "t3", events.CodeForbidden},
		} {
			if r := g.rejection(c.stream, c.subject, c.id); r.Code != c.code {
				t.Errorf("%s: %+v", c.id, r)
			}
		}
		g.start("l", `[{"type":"type","text":"a"}]`, nil)
		g.finished("l", events.LoopSucceeded, "")
		s, err := g.js.Stream(g.t.Context(), bus.DeadLetter)
		if err != nil {
			t.Fatal(err)
		}
		info, err := s.Info(g.t.Context(), jetstream.WithSubjectFilter(events.DeadLetterSubject("REQUESTS", "loop-runner")))
		if err != nil || info.State.Msgs != 1 {
			t.Errorf("%d dead letters, want 1: %v", info.State.Msgs, err)
		}
		a.close()
	})
}

// The same request twice is one loop; another request with its id is refused
// where the loop's journal does not see it.
func TestLoopIDs(t *testing.T) {
	bubble(t, func(g *rig) {
		a := g.runner("a", nil)
		data := object{"model": object{"name": "script"}, "script": json.RawMessage(`[{"type":"type","text":"a"}]`)}
		for range 3 {
			g.request(events.Start, "same", data)
		}
		loop := events.DerivedVMID("default", "/test", "same")
		g.finished(loop, events.LoopSucceeded, "")
		g.request(events.Start, "same", data)
		data["loopId"] = loop
		g.request(events.Start, "other", data)
		r := g.rejection(bus.Events, events.EventSubject("default", loop, "rejected"), "other")
		if r.Code != events.CodeLoopIDInUse {
			t.Errorf("%+v", r)
		}
		if j := g.journal(loop); strings.Contains(names(j), "rejected") || strings.Count(names(j), "started") != 1 {
			t.Errorf("journal %s", names(j))
		}
		if got := g.fleet.acts(vmOf(loop)); got != "type:a" {
			t.Errorf("acts %s", got)
		}
		// Another tenant's loop of the same id is another loop.
		g.requestAs("acme", events.Start, "berth.loop.start.v1", "same", data)
		for e, err := range followOf(g, "acme", loop) {
			if err != nil {
				t.Fatal(err)
			}
			if e == "finished" {
				break
			}
		}
		a.close()
	})
}

// No environment value is in a journal, and the sandbox gets them all.
func TestNoSecretsInJournals(t *testing.T) {
	bubble(t, func(g *rig) {
		var env map[string]string
		g.fleet.set(func(f *fleet) {
			f.refuse = func(_ string, c events.SandboxCreate) *events.Ended { env = c.Env; return nil }
		})
		a := g.runner("a", nil)
		g.start("l", `[{"type":"type","text":"a"}]`, object{"sandbox": object{"env": object{"TOKEN": "s3cret"}, "owner": "me"}})
		j, _ := g.finished("l", events.LoopSucceeded, "")
		for _, e := range j {
			if strings.Contains(string(e.Data), "s3cret") {
				t.Errorf("%s has the secret", e.Name)
			}
		}
		if env["TOKEN"] != "s3cret" {
			t.Errorf("the sandbox got %v", env)
		}
		a.close()
	})
}

// A full process leaves what comes to others.
func TestCapacity(t *testing.T) {
	bubble(t, func(g *rig) {
		g.fleet.set(func(f *fleet) { f.actTakes = 5 * time.Second })
		a := g.runner("a", nil, limited(1))
		for i := range 3 {
			g.start(fmt.Sprintf("l%d", i), `[{"type":"type","text":"a"}]`, nil)
		}
		time.Sleep(2 * time.Second)
		b := g.runner("b", nil, limited(1))
		for i := range 3 {
			g.finished(fmt.Sprintf("l%d", i), events.LoopSucceeded, "")
		}
		a.close()
		b.close()
	})
}

// Follow ends with its caller's context, and says so.
func TestFollowEnds(t *testing.T) {
	bubble(t, func(g *rig) {
		ctx, cancel := context.WithTimeout(g.t.Context(), 3*time.Second)
		defer cancel()
		n := 0
		for _, err := range followCtx(ctx, g, "nobody") {
			n++
			if err == nil {
				t.Error("an entry of nothing")
			}
		}
		if n != 1 {
			t.Errorf("%d yields", n)
		}
	})
}
