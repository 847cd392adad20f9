package worker

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
	"berth/internal/providers/providertest"
)

// What a provider answers becomes exactly one outcome, and the message names
// the action.
func TestOutcomesOfActs(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		w.start("w1")
		w.ready("a")
		boom := &computer.Fault{Code: "boom", Message: "as asked"}
		for _, c := range []struct {
			name, method string
			inject       providertest.Injection
			times        int
			outcome      computer.Outcome
			code, say    string
			actions      string
			effects      int
		}{
			{"ok", "", providertest.Injection{}, 0, computer.OK, "", "", "ok ok ok", 3},
			{"action fails", "Action", providertest.Injection{Err: boom}, 1, computer.Failed, "boom", "action 0 (click): as asked", "failed skipped skipped", 0},
			{"stale at the server", "Execute", providertest.Injection{Err: providers.ErrFenceStale}, 1, computer.Rejected, events.CodeFenceStale, "", "", 0},
			{"refused", "Execute", providertest.Injection{Err: providers.ErrUnsupported}, 1, computer.Rejected, events.CodeUnsupported, "", "", 0},
			{"unavailable", "Execute", providertest.Injection{Err: providers.ErrUnavailable}, 1, computer.Unknown, events.CodeUnavailable, "", "unknown unknown unknown", 0},
			{"answer lost", "Execute", providertest.Injection{AnswerErr: providers.ErrTimeout}, 1, computer.Unknown, events.CodeTimeout, "", "unknown unknown unknown", 3},
			{"stops in the middle", "Action", providertest.Injection{Err: errors.New("oops")}, 1, computer.Unknown, events.CodeInternal, "oops", "unknown skipped skipped", 0},
			{"times out and is gone", "Action", providertest.Injection{CrashAfter: true, AnswerErr: providers.ErrTimeout}, 1, computer.Unknown, events.CodeLost, "gone", "unknown skipped skipped", 1},
		} {
			before := len(f.Effects())
			remove := f.Inject(c.method, "a", c.times, c.inject)
			r := w.await(w.publish("a", events.Act, c.name, act(click(1, 1), click(2, 2), click(3, 3))))
			remove()
			var outcomes []string
			for _, a := range r.Actions {
				outcomes = append(outcomes, string(a.Outcome))
			}
			if r.Outcome != c.outcome || (r.Error == nil) != (c.code == "") || r.Error != nil && (r.Error.Code != c.code || !strings.Contains(r.Error.Message, c.say)) ||
				strings.Join(outcomes, " ") != c.actions || len(f.Effects())-before != c.effects {
				t.Errorf("%s: %d effects, %s", c.name, len(f.Effects())-before, mustJSON(r))
			}
		}
	})
}

// A picture is in FRAMES under the name that the result gives, with its hash
// and size, and is stored once.
func TestPictures(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		w.start("w1")
		w.ready("a")
		store, err := w.js.ObjectStore(t.Context(), kv.BucketFrames)
		if err != nil {
			t.Fatal(err)
		}
		check := func(p computer.Picture, width, height int) {
			t.Helper()
			raw, err := store.GetBytes(t.Context(), p.Object)
			sum := sha256.Sum256(raw)
			if err != nil || p.SHA256 != hex.EncodeToString(sum[:]) || p.Bytes != len(raw) || p.MediaType != "image/png" || p.Object != "a/"+p.SHA256 ||
				p.Width != width || p.Height != height || !bytes.HasPrefix(raw, []byte("\x89PNG")) {
				t.Errorf("%s: %d bytes, %v", mustJSON(p), len(raw), err)
			}
		}
		r := w.await(w.publish("a", events.Act, "1", map[string]any{"observe": true, "actions": []any{
			map[string]any{"type": "screenshot"},
			map[string]any{"type": "zoom", "region": map[string]int{"x": 10, "y": 10, "width": 40, "height": 30}},
			map[string]any{"type": "screenshot"},
		}}))
		var pictures [3]computer.Picture
		for i := range pictures {
			if err := json.Unmarshal(r.Actions[i].Value, &pictures[i]); err != nil {
				t.Fatal(err)
			}
		}
		check(pictures[0], 1280, 800)
		check(pictures[1], 40, 30)
		if r.Observation == nil || pictures[2] != pictures[0] || r.Observation.Screenshot != pictures[0] || r.Observation.Cursor == nil || r.Observation.TakenAt.IsZero() {
			t.Errorf("%s", mustJSON(r))
		}
		info, err := w.js.Stream(t.Context(), "OBJ_"+kv.BucketFrames)
		if err != nil {
			t.Fatal(err)
		}
		if n := info.CachedInfo().State.Msgs; n != 4 { // two objects: a chunk and a name each
			t.Errorf("%d messages in FRAMES, want 4", n)
		}
		// After an act that failed the model sees too.
		f.Inject("Action", "a", 1, providertest.Injection{Err: &computer.Fault{Code: "boom", Message: "."}})
		r = w.await(w.publish("a", events.Act, "2", map[string]any{"observe": true, "actions": []any{click(1, 1)}}))
		if r.Outcome != computer.Failed || r.Observation == nil {
			t.Errorf("%s", mustJSON(r))
		}
		// A picture that cannot be taken does not change what the actions came to.
		f.Inject("Observe", "a", 2, providertest.Injection{Err: providers.ErrUnavailable})
		r = w.await(w.publish("a", events.Act, "3", map[string]any{"observe": true, "actions": []any{click(1, 1)}}))
		if r.Outcome != computer.OK || r.Observation != nil || r.Error == nil || r.Error.Code != events.CodeNoPicture {
			t.Errorf("%s", mustJSON(r))
		}
		r = w.await(w.publish("a", events.Observe, "4", struct{}{}))
		if r.Outcome != computer.Failed || r.Error.Code != events.CodeUnavailable {
			t.Errorf("%s", mustJSON(r))
		}
		// Nor does one that cannot be kept.
		if err := w.js.DeleteStream(t.Context(), "OBJ_"+kv.BucketFrames); err != nil {
			t.Fatal(err)
		}
		r = w.await(w.publish("a", events.Act, "5", act(click(1, 1), map[string]any{"type": "screenshot"}, click(2, 2))))
		if r.Outcome != computer.OK || r.Error == nil || r.Error.Code != events.CodeNoPicture || r.Actions[1].Error == nil {
			t.Errorf("%s", mustJSON(r))
		}
	})
}

// The server says what became of an act whose worker died, where it keeps a
// record: ok, although nobody saw it end.
func TestRecall(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fakeWith(server1, providertest.FakeOptions{Recall: true, CheckFences: true, Detached: true})
		one := w.start("w1")
		w.ready("a")
		c := w.publish("a", events.Act, "1", act(click(1, 1), wait(30), map[string]any{"type": "cursor"}))
		if _, err := f.WaitEffects(context.Background(), 1); err != nil {
			t.Fatal(err)
		}
		one.crash()
		w.start("w2")
		r := w.await(c)
		if r.Outcome != computer.OK || len(r.Actions) != 3 || string(r.Actions[2].Value) != `{"x":1,"y":1}` {
			t.Errorf("%s", mustJSON(r))
		}
		w.once(c)
		if n := len(f.Effects()); n != 3 {
			t.Errorf("%d effects", n)
		}
	})
}

// A worker that stands still between its claim and its act, for longer than its
// lease, does not act any more, and what it then says is not heard.
func TestFrozenAfterClaim(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		hold := make(chan struct{})
		var p *process
		p = w.startWith(Options{Name: "w1", Hook: func(at Point, vm string) {
			if at == AfterClaim && vm == "b" {
				p.gate.set("hole")
				<-hold
			}
		}})
		w.ready("a")
		w.start("w2")
		w.editVM("b", func(pl *kv.Placement) { *pl = kv.Placement{VMID: "b", ServerID: server1, Phase: kv.Ready} })
		fence := w.place(server1, "b")
		if _, err := f.Provider().Create(t.Context(), providers.Spec{VM: "b", Fence: fence}); err != nil {
			t.Fatal(err)
		}
		c := w.publish("b", events.Act, "1", act(click(1, 1)))
		r := w.await(c)
		if r.Outcome != computer.Unknown || r.Error.Code != events.CodeWorkerDied {
			t.Errorf("%s", mustJSON(r))
		}
		p.gate.set("")
		close(hold)
		time.Sleep(time.Minute)
		w.once(c)
		if n := len(f.EffectsOf("b")); n != 0 {
			t.Errorf("%d effects after the lease was lost", n)
		}
	})
}

// A worker that stands still with a kill in its hand does not kill the next life
// of the vm when it goes on.
func TestFrozenKill(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		hold := make(chan struct{})
		frozen := false
		var p *process
		p = w.startWith(Options{Name: "w1", Hook: func(at Point, vm string) {
			if at == AfterClaim && frozen {
				p.gate.set("hole")
				<-hold
			}
		}})
		fence := w.ready("a")
		w.start("w2")
		frozen = true
		k := w.publishTo(server1, "a", events.Kill, events.SourceScheduler, events.KillCommandID("a", fence, 1), events.Command{Fence: &fence})
		if r := w.await(k); r.Outcome != computer.OK {
			t.Errorf("kill: %s", mustJSON(r))
		}
		w.free(server1, "a")
		w.ready("a")
		p.gate.set("")
		close(hold)
		time.Sleep(time.Minute)
		if l := f.Lives(); len(l) != 2 || !l[1].Ended.IsZero() {
			t.Errorf("lives: %+v", l)
		}
		w.once(k)
	})
}

// A process that was frozen goes on in the middle of its code, while the end of
// its context waits for timers to run. So the clock is read just before each
// effect: with a lease past its time nothing is executed, killed or repeated,
// although no context has ended.
func TestFrozenLooksAtTheClock(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.reconnected = true
		f := w.fake(server1)
		fence := w.place(server1, "a")
		if _, err := f.Provider().Create(t.Context(), providers.Spec{VM: "a", Fence: fence}); err != nil {
			t.Fatal(err)
		}
		nc, js, _ := w.dial("w1")
		leases, err := js.KeyValue(t.Context(), kv.BucketLeases)
		if err != nil {
			t.Fatal(err)
		}
		lease, held, err := kv.Acquire(t.Context(), leases, kv.Terms{Key: leaseKey(server1), Holder: "w1", TTL: DefaultLeaseTTL}, w.log)
		if err != nil {
			t.Fatal(err)
		}
		wk, err := New(Options{JS: w.js, Name: "w1", Servers: []Server{{ID: server1, Config: kv.ServerConfig{MaxContainers: 10},
			Open: func(context.Context) (providers.Provider, error) { return f.Provider(), nil }}}})
		if err != nil {
			t.Fatal(err)
		}
		h, err := wk.handles(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		ten := newTenure(wk, wk.opts.Servers[0], h, lease, w.log)
		ten.provider = f.Provider()
		x := 1
		c := &command{item: &item{seq: 1}, CommandPath: events.CommandPath{Server: server1, VM: "a", Verb: events.Act}, token: "t",
			fence: fence, deadline: time.Now().Add(time.Hour), actions: []computer.Action{{Type: computer.Click, X: &x, Y: &x, Button: computer.Left, Count: 1}}}
		if v := ten.perform(t.Context(), c); v.outcome != computer.OK || len(f.Effects()) != 1 {
			t.Fatalf("with the lease: %+v, %d effects", v.fault, len(f.Effects()))
		}
		nc.Close()
		<-held.Done() // t.Context() goes on, as a frozen process's own would
		calls := 0
		f.OnCall(func(c providertest.Call) providertest.Injection {
			calls++
			return providertest.Injection{}
		})
		if v := ten.perform(t.Context(), c); v.outcome != computer.Rejected || v.fault.Code != events.CodeLeaseLost {
			t.Errorf("an act: %s %+v", v.outcome, v.fault)
		}
		if v := ten.destroy(t.Context(), c); !v.silent {
			t.Errorf("a kill: %+v", v)
		}
		if v := ten.again(t.Context(), c, ten.observe); !v.silent {
			t.Errorf("an observation, repeated: %+v", v)
		}
		if calls != 0 || len(f.Effects()) != 1 || !f.Lives()[0].Ended.IsZero() {
			t.Errorf("the server was called %d times, has %d effects and %+v", calls, len(f.Effects()), f.Lives())
		}
	})
}

// A result carries its command's trace and, of a forwarded command, the tenant.
func TestResultCarriesContext(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.start("w1")
		w.ready("a")
		e, err := events.New(events.CommandType(events.Act), "/test", "1", act(click(1, 1)))
		if err != nil {
			t.Fatal(err)
		}
		e.SetExtension(events.ExtForwarded, "acme")
		id := trace.TraceID{1, 2, 3}
		ctx := trace.ContextWithSpanContext(t.Context(), trace.NewSpanContext(trace.SpanContextConfig{TraceID: id, SpanID: trace.SpanID{4}, TraceFlags: trace.FlagsSampled, Remote: true}))
		msg, err := events.NewMessage(ctx, events.CommandSubject(server1, "a", events.Act), e)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.js.PublishMsg(ctx, msg); err != nil {
			t.Fatal(err)
		}
		c := w.sent("a", "1")
		w.await(c)
		got, raw, err := bus.Last(t.Context(), w.results, events.ResultSubject(server1, "a", c.token))
		if err != nil || got.Extensions()[events.ExtForwarded] != "acme" {
			t.Errorf("extensions %v, %v", got.Extensions(), err)
		}
		if sc := trace.SpanContextFromContext(events.ExtractTrace(t.Context(), raw.Header)); sc.TraceID() != id {
			t.Errorf("trace %s", sc.TraceID())
		}
	})
}

// Results that are too large are cut, and say so; their outcome stands.
func TestLargeResultsFit(t *testing.T) {
	text := strings.Repeat("\x01", computer.MaxTextBytes) // six bytes each in JSON
	run := json.RawMessage(mustJSON(computer.RunValue{Stdout: text, Stderr: text}))
	many := verdict{outcome: computer.OK}
	for range computer.MaxActions {
		many.actions = append(many.actions, computer.ActionResult{Outcome: computer.OK, Value: run})
	}
	long := json.RawMessage(mustJSON(strings.Repeat("ä", 1<<20)))
	for name, v := range map[string]verdict{
		"runs":      many,
		"clipboard": {outcome: computer.OK, actions: []computer.ActionResult{{Outcome: computer.OK, Value: long}}},
		"monster":   {outcome: computer.OK, actions: []computer.ActionResult{{Outcome: computer.OK, Value: json.RawMessage(`{"x":"` + strings.Repeat("y", 2<<20) + `"}`)}}},
	} {
		v.fit()
		if n := len(mustJSON(v.actions)); n > 1000<<10 {
			t.Errorf("%s: %d bytes", name, n)
		}
		said, kept := 0, 0
		for _, a := range v.actions {
			if a.Error != nil && a.Error.Code == events.CodeTooLarge {
				said++
			}
			if a.Value != nil {
				kept++
				if !json.Valid(a.Value) {
					t.Errorf("%s: invalid value", name)
				}
			}
			if a.Outcome != computer.OK {
				t.Errorf("%s: outcome %s", name, a.Outcome)
			}
		}
		if said == 0 || name != "monster" && kept == 0 {
			t.Errorf("%s: %d cut, %d kept", name, said, kept)
		}
	}
	o := computer.Observation{URL: "data:" + strings.Repeat("x", 1<<20), Title: strings.Repeat("t", 1<<20), Pages: make([]computer.Page, 1000)}
	for i := range o.Pages {
		o.Pages[i].URL = o.URL
	}
	trim(&o)
	if n := len(mustJSON(o)); n > 120<<10 {
		t.Errorf("observation of %d bytes", n)
	}
}

// A provider that panics or ignores the end of its calls harms no other vm.
func TestUnrulyProvider(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		w.start("w1")
		w.ready("a")
		w.ready("b")
		release := make(chan struct{})
		f.OnCall(func(c providertest.Call) providertest.Injection {
			if c.Method == "Execute" && c.VM == "a" {
				if c.Key == events.Token("/test", "panic") {
					panic("at the provider")
				}
				<-release // deaf to its context
			}
			return providertest.Injection{}
		})
		if r := w.await(w.publish("a", events.Act, "panic", act(click(1, 1)))); r.Outcome != computer.Unknown || r.Error.Code != events.CodeInternal {
			t.Errorf("panic: %s", mustJSON(r))
		}
		c := w.publish("a", events.Act, "deaf", act(click(1, 1)))
		time.Sleep(time.Second)
		if r := w.await(w.publish("b", events.Act, "1", act(click(1, 1)))); r.Outcome != computer.OK {
			t.Errorf("another vm: %s", mustJSON(r))
		}
		if r := w.await(w.publish("a", events.Kill, "k", struct{}{})); r.Outcome != computer.OK {
			t.Errorf("kill: %s", mustJSON(r))
		}
		start := time.Now()
		if r := w.await(c); r.Outcome != computer.Unknown || r.Error.Code != events.CodeKilled || time.Since(start) > 5*time.Second {
			t.Errorf("deaf: after %s %s", time.Since(start), mustJSON(r))
		}
		close(release)
	})
}

// The stream of results is full: nothing runs, and all runs when there is room
// again (nats-server#7654).
func TestFullResultsStopExecution(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		w.start("w1")
		w.ready("a")
		s, err := w.js.Stream(t.Context(), bus.Results)
		if err != nil {
			t.Fatal(err)
		}
		config := s.CachedInfo().Config
		size := config.MaxBytes
		config.MaxBytes = int64(s.CachedInfo().State.Bytes) + 10
		if _, err := w.js.UpdateStream(t.Context(), config); err != nil {
			t.Fatal(err)
		}
		data := act(click(1, 1))
		data["deadline"] = time.Now().Add(time.Hour)
		c := w.publish("a", events.Act, "1", data)
		time.Sleep(time.Minute)
		if n := len(f.Effects()); n != 0 {
			t.Errorf("%d effects without a claim", n)
		}
		config.MaxBytes = size
		if _, err := w.js.UpdateStream(t.Context(), config); err != nil {
			t.Fatal(err)
		}
		if r := w.await(c); r.Outcome != computer.OK {
			t.Errorf("%s", mustJSON(r))
		}
		w.once(c)
	})
}
