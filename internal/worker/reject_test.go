package worker

import (
	"strings"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
	"berth/internal/providers/providertest"
)

// Whatever is wrong with a command is said with its code, before anything runs.
func TestRejections(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fakeWith(server1, providertest.FakeOptions{Capabilities: []providers.Capability{providers.Browser}})
		w.start("w1")
		fence := w.ready("a")
		w.editVM("elsewhere", func(p *kv.Placement) {
			*p = kv.Placement{VMID: "elsewhere", ServerID: "other-01", Phase: kv.Ready, Fence: 5}
		})
		w.editVM("ended", func(p *kv.Placement) {
			*p = kv.Placement{VMID: "ended", ServerID: server1, Phase: kv.Ended, Outcome: "expired", Code: "ttl", Message: "lived its hour"}
		})
		w.editVM("queued", func(p *kv.Placement) { *p = kv.Placement{VMID: "queued", Phase: kv.Queued} })
		w.editVM("failed", func(p *kv.Placement) {
			*p = kv.Placement{VMID: "failed", ServerID: server1, Phase: kv.Starting, Fence: 77}
		})
		past, far := time.Now().Add(-time.Second), time.Now().Add(13*time.Hour)
		for _, c := range []struct {
			name, vm  string
			verb      events.Verb
			data      any
			code, say string
		}{
			{"no actions", "a", events.Act, map[string]any{}, events.CodeBadInput, "at least one"},
			{"empty actions", "a", events.Act, act(), events.CodeBadInput, ""},
			{"unknown action", "a", events.Act, act(map[string]any{"type": "dance"}), events.CodeBadInput, `unknown action "dance"`},
			{"unknown action field", "a", events.Act, act(map[string]any{"type": "click", "x": 1, "y": 1, "z": 1}), events.CodeBadInput, `"z"`},
			{"second action is bad", "a", events.Act, act(click(1, 1), map[string]any{"type": "wait"}), events.CodeBadInput, "action 1"},
			{"unknown data field", "a", events.Act, map[string]any{"actions": []any{click(1, 1)}, "observ": true}, events.CodeBadInput, `"observ"`},
			{"actions of an observe", "a", events.Observe, act(click(1, 1)), events.CodeBadInput, "no actions"},
			{"another vm in the data", "a", events.Observe, map[string]any{"vmId": "b"}, events.CodeBadInput, "vmId"},
			{"outside the display", "a", events.Act, act(click(1280, 0)), events.CodeOutOfRange, "1280,0"},
			{"unknown key", "a", events.Act, act(map[string]any{"type": "key", "keys": []string{"Anykey"}}), events.CodeUnknownKey, "Anykey"},
			{"too many", "a", events.Act, act(make([]map[string]any, 101)...), events.CodeTooLarge, "101"},
			{"no shell", "a", events.Act, act(click(1, 1), map[string]any{"type": "run", "argv": []string{"ls"}}), events.CodeUnsupported, "shell"},
			{"no clipboard", "a", events.Act, act(map[string]any{"type": "clipboardRead"}), events.CodeUnsupported, "clipboard"},
			{"no pause", "a", events.Pause, struct{}{}, events.CodeUnsupported, "paused"},
			{"past its deadline", "a", events.Act, map[string]any{"actions": []any{click(1, 1)}, "deadline": past}, events.CodeDeadline, ""},
			{"far deadline", "a", events.Act, map[string]any{"actions": []any{click(1, 1)}, "deadline": far}, events.CodeBadInput, "12h"},
			{"older fence", "a", events.Act, map[string]any{"actions": []any{click(1, 1)}, "fence": fence - 1}, events.CodeFenceStale, ""},
			{"other fence", "a", events.Act, map[string]any{"actions": []any{click(1, 1)}, "fence": fence + 1}, events.CodeFenceStale, ""},
			{"fence is text", "a", events.Act, map[string]any{"actions": []any{click(1, 1)}, "fence": "1"}, events.CodeBadInput, ""},
			{"wrong server", "elsewhere", events.Act, act(click(1, 1)), events.CodeWrongServer, "other-01"},
			{"ended", "ended", events.Act, act(click(1, 1)), events.CodeNotFound, "expired, ttl: lived its hour"},
			{"not placed", "queued", events.Act, act(click(1, 1)), events.CodeNotFound, "queued"},
			{"never made", "failed", events.Act, act(click(1, 1)), events.CodeNotFound, ""},
			{"unheard of", "nobody", events.Observe, struct{}{}, events.CodeNotFound, "no vm nobody"},
			{"kill of an unheard of", "nobody", events.Kill, struct{}{}, events.CodeNotFound, "no vm nobody"},
			{"kill of one elsewhere", "elsewhere", events.Kill, struct{}{}, events.CodeWrongServer, "other-01"},
			{"kill past its deadline", "a", events.Kill, map[string]any{"deadline": past}, events.CodeDeadline, ""},
			{"create without placement", "a", events.Create, events.CommandCreate{Fence: 99, Tenant: "t", Role: "r"}, events.CodeFenceStale, "99"},
			{"create without fence", "a", events.Create, events.CommandCreate{Tenant: "t", Role: "r"}, events.CodeBadInput, "fence"},
			{"create of no tenant", "a", events.Create, events.CommandCreate{Fence: 1, Role: "r"}, events.CodeBadInput, "tenant"},
			{"create with a bad display", "a", events.Create, events.CommandCreate{Fence: 1, Tenant: "t", Role: "r", Display: computer.Display{Width: 1, Height: 1}}, events.CodeBadInput, "display"},
		} {
			r := w.await(w.publish(c.vm, c.verb, c.name, c.data))
			if r.Outcome != computer.Rejected || r.Error == nil || r.Error.Code != c.code || !strings.Contains(r.Error.Message, c.say) || r.Actions == nil {
				t.Errorf("%s: %s, want %s with %q", c.name, mustJSON(r), c.code, c.say)
			}
			if h := w.history(w.sent(c.vm, c.name)); len(h) != 1 {
				t.Errorf("%s: %v, want a finished alone", c.name, h)
			}
		}
		wrong, err := events.New(events.CommandType(events.Observe), "/test", "type", struct{}{})
		if err != nil {
			t.Fatal(err)
		}
		if r := w.await(w.publishEvent(server1, "a", events.Act, wrong)); r.Outcome != computer.Rejected || r.Error.Code != events.CodeUnknownType {
			t.Errorf("wrong type: %s", mustJSON(r))
		}
		if n := len(f.Effects()); n != 0 {
			t.Errorf("%d effects of rejected commands", n)
		}
		if l := f.Lives(); len(l) != 1 || !l[0].Ended.IsZero() {
			t.Errorf("lives: %+v", l)
		}
		// Berth's own programs may be of another version.
		own := map[string]any{"actions": []any{click(1, 1)}, "fence": fence, "newField": 1}
		if r := w.await(w.publishTo(server1, "a", events.Act, events.SourceLoopRunner, "1", own)); r.Outcome != computer.OK {
			t.Errorf("unknown field from a program of ours: %s", mustJSON(r))
		}
	})
}

// sent names a command of source /test on server1 by its id.
func (w *world) sent(vm, id string) sent {
	return sent{server: server1, vm: vm, token: events.Token("/test", id)}
}

// A command that waits behind another until its deadline does not start.
func TestDeadlineWhileWaiting(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.start("w1")
		w.ready("a")
		w.publish("a", events.Act, "1", act(click(1, 1), wait(70)))
		soon := act(click(2, 2))
		soon["deadline"] = time.Now().Add(10 * time.Second)
		for _, c := range []sent{w.publish("a", events.Act, "2", soon), w.publish("a", events.Act, "default", act(click(3, 3)))} {
			if f := w.await(c); f.Outcome != computer.Rejected || f.Error.Code != events.CodeDeadline {
				t.Errorf("%s", mustJSON(f))
			}
		}
		if n := len(w.fake(server1).EffectsOf("a")); n != 2 {
			t.Errorf("%d effects, want those of the first", n)
		}
	})
}
