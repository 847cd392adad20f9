package anthropic

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/thinkers/vendors"
)

const opus55 = `{"name":"anthropic","model":"claude-opus-5-5"}`

// A conversation that uses every member of the toolset and every function, in
// the shapes that the API sends, ends with each action done once, in order.
func TestEveryMember(t *testing.T) {
	s := newStandin(t,
		reply{blocks: []object{text("Looking."), call("c1", "screenshot", object{})}},
		reply{blocks: []object{
			call("c2", "left_click", object{"coordinate": []int{0, 0}}),
			call("c3", "right_click", object{"coordinate": []int{10, 20}, "text": "ctrl+shift"}),
			call("c4", "middle_click", object{"coordinate": []int{11, 21}}),
			call("c5", "double_click", object{}), // where the pointer is: 11,21
			call("c6", "triple_click", object{"coordinate": []int{1279, 799}}),
			call("c7", "left_click_drag", object{"start_coordinate": []int{1, 2}, "coordinate": []int{300, 400}, "text": "shift"}),
			call("c8", "mouse_move", object{"coordinate": []int{50, 60}}),
			call("c9", "left_mouse_down", object{}),
			call("c10", "left_mouse_up", object{}),
			call("c11", "scroll", object{"coordinate": []int{5, 6}, "scroll_direction": "down", "scroll_amount": 3, "text": "ctrl"}),
			call("c12", "scroll", object{"scroll_direction": "left", "scroll_amount": 400}),
		}},
		reply{blocks: []object{
			call("d1", "type", object{"text": "Grüße 美 😀\n"}),
			call("d2", "key", object{"text": "ctrl+S"}),
			call("d3", "key", object{"text": "Tab", "repeat": 4}),
			call("d4", "hold_key", object{"text": "space", "duration": 1}),
			call("d5", "wait", object{"duration": 2}),
			call("d6", "cursor_position", object{}),
			call("d7", "zoom", object{"region": []int{100, 200, 400, 350}}),
			call("d8", "screenshot", object{}),
			function("d9", "open", object{"target": "https://example.org/"}),
			function("d10", "clipboardWrite", object{"text": "x"}),
			function("d11", "clipboardRead", object{}),
			function("d12", "run", object{"argv": []string{"ls", "-l"}}),
		}},
		reply{blocks: []object{function("e1", "askUser", object{"question": "Which account?"})}},
		reply{blocks: []object{text("Saved.")}},
	)
	d := s.desk(`{"name":"anthropic","model":"claude-opus-5-5","allow":["run"]}`)
	d.Capabilities = []string{"clipboard", "shell"}
	d.Say = map[int][]string{5: {"the second one"}}
	d.Crash = true
	last := d.Run(10)
	s.clean()
	if !last.Done || last.Label != "Saved." {
		t.Errorf("ended %+v", last)
	}
	want := `{"type":"click","x":0,"y":0,"button":"left","count":1} ` +
		`{"type":"click","x":10,"y":20,"button":"right","count":1,"modifiers":["Control","Shift"]} ` +
		`{"type":"click","x":11,"y":21,"button":"middle","count":1} ` +
		`{"type":"click","x":11,"y":21,"button":"left","count":2} ` +
		`{"type":"click","x":1279,"y":799,"button":"left","count":3} ` +
		`{"type":"drag","button":"left","modifiers":["Shift"],"path":[{"x":1,"y":2},{"x":300,"y":400}]} ` +
		`{"type":"move","x":50,"y":60} {"type":"mouseDown","button":"left"} {"type":"mouseUp","button":"left"} ` +
		`{"type":"scroll","x":5,"y":6,"modifiers":["Control"],"dy":3} {"type":"scroll","x":5,"y":6,"dx":-100} ` +
		`{"type":"type","text":"Grüße 美 😀\n"} {"type":"key","keys":["Control","s"],"repeat":1} {"type":"key","keys":["Tab"],"repeat":4} ` +
		`{"type":"hold","keys":[" "],"seconds":1} {"type":"wait","seconds":2} {"type":"cursor"} ` +
		`{"type":"zoom","region":{"x":100,"y":200,"width":300,"height":150}} {"type":"screenshot"} ` +
		`{"type":"open","target":"https://example.org/"} {"type":"clipboardWrite","text":"x"} {"type":"clipboardRead"} ` +
		`{"type":"run","argv":["ls","-l"]}`
	if got := d.Did(); got != want {
		t.Errorf("did\n%s\nwant\n%s", got, want)
	}
	answers := results(s.last(3))
	for i, want := range []string{"OK", "OK", "OK", "OK", "OK", "X=640, Y=400", "OK", "OK", "OK", "OK", "copied", "exit code 3\nstdout:\nout\nstderr:\nerr"} {
		if got := words(answers[i]); got != want || answers[i]["is_error"] == true {
			t.Errorf("answer %d: %q, want %q", i, got, want)
		}
	}
	if n := len(pictures(answers[6]["content"].([]any))); n != 1 {
		t.Errorf("zoom has %d pictures", n)
	}
	if n := len(pictures(answers[7]["content"].([]any))); n != 1 {
		t.Errorf("screenshot has %d pictures", n)
	}
	if n := len(pictures(answers[11]["content"].([]any))); n != 1 {
		t.Errorf("the last result has %d pictures, want the new screenshot", n)
	}
	if got := words(results(s.last(2))[10]); !strings.Contains(got, "100 ticks") {
		t.Errorf("a clamped scroll is told as %q", got)
	}
	if got := words(results(s.last(4))[0]); got != "A person answers: the second one" {
		t.Errorf("the person's answer is told as %q", got)
	}
	if d.Usage != (events.LoopUsage{InputTokens: 5 * 123, OutputTokens: 5 * 40}) {
		t.Errorf("usage %+v", d.Usage)
	}
}

// The older tools are chosen by the model's name, with their headers, and take
// the same actions as `action` of one tool.
func TestOlderTools(t *testing.T) {
	single := func(id string, input object) object { return function(id, "computer", input) }
	for model, tool := range map[string]string{"claude-opus-4-7": Computer20251124, "claude-sonnet-4-6": Computer20251124, "claude-opus-4-5-20251101": Computer20251124,
		"claude-sonnet-4-5": Computer20250124, "claude-haiku-4-5-20251001": Computer20250124, "claude-sonnet-4-20250514": Computer20250124,
		"claude-3-5-sonnet-20241022": Computer20241022} {
		t.Run(model, func(t *testing.T) {
			s := newStandin(t,
				reply{blocks: []object{single("a", object{"action": "left_click", "coordinate": []int{3, 4}})}},
				reply{blocks: []object{single("b", object{"action": "screenshot"})}},
				reply{blocks: []object{single("c", object{"action": "key", "text": "alt+F4"})}},
				reply{blocks: []object{text("Done.")}})
			d := s.desk(`{"name":"anthropic","model":"` + model + `"}`)
			big := model == "claude-opus-4-7" || model == "claude-sonnet-4-6"
			if big { // no more of them: scaling takes its time under the race detector
				d.Display = computer.Display{Width: 1800, Height: 1200}
			}
			d.Run(6)
			s.clean()
			entry := s.body(0)["tools"].([]any)[0].(object)
			if entry["type"] != tool {
				t.Errorf("tool %v, want %s", entry["type"], tool)
			}
			sent, want, at := entry["display_width_px"].(float64), 1280.0, computer.Point{X: 3, Y: 4}
			switch {
			case model == "claude-opus-4-7":
				want = 1800
			case big:
				want, at = 1313, computer.Point{X: 4, Y: 6} // of 1.15 MP
			}
			if sent != want || d.Acts[0].Point() != at || d.Acts[1].Keys[1] != "F4" {
				t.Errorf("sent %v px wide, did %s", sent, d.Did())
			}
		})
	}
}

// Cases S5 (stagehand#1567, cua#936, #1739): a coordinate is led back by the
// scale of the very screenshot that the model saw, whatever its size.
func TestScaleBelongsToTheScreenshot(t *testing.T) {
	s := newStandin(t,
		reply{blocks: []object{call("a", "left_click", object{"coordinate": []int{1280, 720}})}}, // the middle of 2560×1440
		reply{blocks: []object{call("b", "left_click", object{"coordinate": []int{400, 300}})}},  // the middle of 800×600
		reply{blocks: []object{text("Done.")}})
	d := s.desk(opus55)
	d.Display, d.Picture = computer.Display{Width: 1600, Height: 1200}, computer.Display{Width: 2560, Height: 1440}
	d.Act = func(int, []computer.Action) *looprunner.Acted {
		d.Picture = computer.Display{Width: 800, Height: 600} // of the next screenshot
		return nil
	}
	d.Run(4)
	s.clean()
	for i, a := range d.Acts {
		if p := a.Point(); p.X != 800+i || p.Y != 600+i { // a pixel of the second covers two
			t.Errorf("click %d at %v, want the middle of the display", i, p)
		}
	}
}

// The first failure stops a turn's actions; the rest are answered as not
// executed, and the model sees the new screenshot.
func TestFirstFailureStops(t *testing.T) {
	batch := []object{call("a", "left_click", object{"coordinate": []int{1, 1}}), call("b", "type", object{"text": "x"}), call("c", "screenshot", object{})}
	fault := &computer.Fault{Code: "actionFailed", Message: "no window"}
	for name, c := range map[string]struct {
		acted *looprunner.Acted
		want  []string
	}{
		"failed": {&looprunner.Acted{Outcome: computer.Failed, Error: fault, Actions: []computer.ActionResult{{Outcome: computer.Failed, Error: fault}, {Outcome: computer.Skipped}}},
			[]string{"Error: actionFailed: no window", "Not executed: an earlier computer action in this turn failed.", "Not executed: an earlier computer action in this turn failed."}},
		"second": {&looprunner.Acted{Outcome: computer.Failed, Error: fault, Actions: []computer.ActionResult{{Outcome: computer.OK}, {Outcome: computer.Failed, Error: fault}}},
			[]string{"OK", "Error: actionFailed: no window", "Not executed"}},
		"unknown": {&looprunner.Acted{Outcome: computer.Unknown, Error: &computer.Fault{Code: "workerDied", Message: "the worker died"}},
			[]string{"Unknown: it may have been executed", "Unknown: it may", "Not executed"}},
		"rejected": {&looprunner.Acted{Outcome: computer.Rejected, Error: &computer.Fault{Code: "unsupported", Message: "no"}},
			[]string{"Error: nothing was executed (unsupported: no)", "Error: nothing", "Not executed"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStandin(t, reply{blocks: batch}, reply{blocks: []object{text("Done.")}})
			d := s.desk(opus55)
			d.Act = func(int, []computer.Action) *looprunner.Acted { return c.acted }
			d.Run(3)
			s.clean()
			answers := results(s.last(1))
			for i, want := range c.want {
				if got := words(answers[i]); !strings.HasPrefix(got, want) || (answers[i]["is_error"] == true) != (want != "OK") {
					t.Errorf("answer %d: %q (is_error %v), want %q", i, got, answers[i]["is_error"], want)
				}
			}
			if n := len(pictures(s.last(1))); n != 1 {
				t.Errorf("%d pictures, want the fresh screenshot", n)
			}
			if want := map[bool]int{true: 0, false: 1}[name != "second"]; len(d.Acts) != want {
				t.Errorf("did %s", d.Did())
			}
		})
	}
}

// A call that cannot be carried out is told to the model, and what came before
// it is done.
func TestFaultyCalls(t *testing.T) {
	for name, c := range map[string]struct {
		block object
		raw   string
		want  string
	}{
		"out of range":  {block: call("a", "left_click", object{"coordinate": []int{1280, 5}}), want: "outOfRange: coordinate: 1280,5 is outside the screenshot of 1280×800"},
		"negative":      {block: call("a", "mouse_move", object{"coordinate": []int{-1, 5}}), want: "outOfRange"},
		"no action":     {block: call("a", "fly", object{}), want: `unsupported: there is no action "fly"`},
		"no function":   {block: function("a", "delete_all", object{}), want: `unsupported: there is no tool "delete_all"`},
		"unknown field": {block: call("a", "left_click", object{"coordinate": []int{1, 2}, "force": true}), want: `malformed: left_click takes no "force"`},
		"wrong type":    {block: call("a", "left_click", object{"coordinate": "1,2"}), want: "malformed: "},
		"half a point":  {block: call("a", "left_click", object{"coordinate": []int{1}}), want: "malformed: coordinate must be [x, y]"},
		"bad key":       {block: call("a", "key", object{"text": "ctrl+Frob"}), want: "unknownKey: keys: unknown key"},
		"too long hold": {block: call("a", "hold_key", object{"text": "a", "duration": 200}), want: "badInput: seconds: 200 is outside 0 to 60"},
		"empty":         {block: call("a", "type", object{}), want: "malformed: type needs text"},
		"broken JSON":   {block: call("a", "type", object{}), raw: `{"text": "never clo`, want: "malformed: type needs text"},
		"bad region":    {block: call("a", "zoom", object{"region": []int{5, 5, 5, 9}}), want: "outOfRange: region"},
		"run is off":    {block: function("a", "run", object{"argv": []string{"rm"}}), want: `unsupported: there is no tool "run"`},
		"no clipboard":  {block: function("a", "clipboardRead", object{}), want: "unsupported"},
		"scroll where":  {block: call("a", "scroll", object{"scroll_direction": "sideways", "scroll_amount": 1}), want: "malformed: scroll_direction"},
		"ask empty":     {block: function("a", "askUser", object{"question": " "}), want: "malformed: question"},
		"not an object": {block: function("a", "open", object{}), raw: `[1]`, want: "malformed: the arguments of open are not one JSON object"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStandin(t, reply{blocks: []object{c.block}, raw: c.raw}, reply{blocks: []object{text("Done.")}})
			d := s.desk(opus55)
			d.Run(3)
			s.clean()
			got := results(s.last(1))[0]
			if text := words(got); !strings.HasPrefix(text, "Error: "+c.want) || got["is_error"] != true || len(d.Acts) > 0 {
				t.Errorf("told %q, did %s; want %q", text, d.Did(), c.want)
			}
		})
	}
	t.Run("what came before is done", func(t *testing.T) {
		s := newStandin(t, reply{blocks: []object{call("a", "type", object{"text": "x"}), call("b", "key", object{"text": "Frob"}), call("c", "type", object{"text": "y"})}},
			reply{blocks: []object{text("Done.")}})
		d := s.desk(opus55)
		d.Run(3)
		s.clean()
		if got := d.Did(); got != `{"type":"type","text":"x"}` {
			t.Errorf("did %s", got)
		}
		if a := results(s.last(1)); words(a[0]) != "OK" || !strings.Contains(words(a[1]), "unknownKey") || !strings.HasPrefix(words(a[2]), "Not executed") {
			t.Errorf("told %v", a)
		}
	})
}

// Answers that come to nothing end the loop after the fourth in a row.
func TestPatience(t *testing.T) {
	script := make([]reply, 6)
	for i := range script {
		script[i] = reply{blocks: []object{call(fmt.Sprint("a", i), "fly", object{})}}
	}
	s := newStandin(t, script...)
	d := s.desk(opus55)
	last := d.Run(8)
	s.clean()
	if last.Failed == nil || last.Failed.Code != vendors.CodeMalformed || len(d.History) != maxFaults+1 {
		t.Errorf("after %d turns: %+v", len(d.History), last.Failed)
	}
}

func TestStopReasons(t *testing.T) {
	t.Run("refusal", func(t *testing.T) {
		s := newStandin(t, reply{blocks: []object{text("I can't help with that.")}, stop: "refusal", detail: object{"type": "refusal", "category": "cyber", "explanation": "policy"}})
		last := s.desk(opus55).Run(2)
		if last.Failed == nil || last.Failed.Code != vendors.CodeRefused || !strings.Contains(last.Failed.Message, "cyber") || last.Usage.OutputTokens != 40 {
			t.Errorf("%+v %+v", last.Failed, last.Usage)
		}
	})
	t.Run("max_tokens without a call", func(t *testing.T) {
		s := newStandin(t, reply{blocks: []object{text("I will think about")}, stop: "max_tokens"}, reply{blocks: []object{call("a", "key", object{"text": "Return"})}}, reply{blocks: []object{text("Done.")}})
		d := s.desk(opus55)
		d.Run(5)
		s.clean()
		if n := len(s.body(1)["messages"].([]any)); n != 1 {
			t.Errorf("%d messages, want the user's only", n)
		}
	})
	t.Run("empty", func(t *testing.T) {
		s := newStandin(t, reply{}, reply{blocks: []object{text("Done.")}})
		s.desk(opus55).Run(3)
		s.clean()
	})
	t.Run("give up", func(t *testing.T) {
		s := newStandin(t, reply{blocks: []object{function("a", "giveUp", object{"reason": "no such page"})}})
		if last := s.desk(opus55).Run(2); last.Failed == nil || last.Failed.Code != "gaveUp" || last.Failed.Message != "no such page" {
			t.Errorf("%+v", last.Failed)
		}
	})
}

// Each error has its documented end, and what passes is tried again.
func TestErrors(t *testing.T) {
	ok := reply{blocks: []object{text("Done.")}}
	for name, c := range map[string]struct {
		script []reply
		model  string
		code   string // "": succeeds
	}{
		"429 with retry-after": {script: []reply{{status: 429, kind: "rate_limit_error", after: "0.01"}, ok}},
		"500":                  {script: []reply{{status: 500, kind: "api_error"}, ok}},
		"529":                  {script: []reply{{status: 529, kind: "overloaded_error"}, ok}},
		"429 for ever":         {script: []reply{{status: 429, kind: "rate_limit_error", say: "slow down"}, {status: 429, kind: "rate_limit_error"}}, model: `"retries":1`, code: vendors.CodeRateLimited},
		"529 for ever":         {script: []reply{{status: 529, kind: "overloaded_error"}}, model: `"retries":0`, code: vendors.CodeUnavailable},
		"403":                  {script: []reply{{status: 403, kind: "permission_error"}}, code: vendors.CodeBadCredentials},
		"400":                  {script: []reply{{status: 400, kind: "invalid_request_error", say: "no"}}, code: vendors.CodeRejected},
		"404":                  {script: []reply{{status: 404, kind: "not_found_error", say: "model: claude-nil"}}, code: vendors.CodeRejected},
		"cut":                  {script: []reply{{blocks: []object{call("a", "key", object{"text": "a"})}, cut: 3}, ok}},
		"cut at once":          {script: []reply{{blocks: ok.blocks, cut: 1}, ok}},
		"cut for ever":         {script: []reply{{blocks: ok.blocks, cut: 2}, {blocks: ok.blocks, cut: 2}}, model: `"retries":1`, code: vendors.CodeUnavailable},
		"overloaded inline":    {script: []reply{{blocks: ok.blocks, cut: 2, inline: "overloaded_error"}, ok}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStandin(t, c.script...)
			model := opus55
			if c.model != "" {
				model = strings.TrimSuffix(opus55, "}") + "," + c.model + "}"
			}
			d := s.desk(model)
			err := d.Step()
			s.clean()
			var fault *computer.Fault
			switch {
			case c.code == "" && (err != nil || !d.Last.Done || len(d.Acts) > 0):
				t.Errorf("%v, %+v", err, d.Last)
			case c.code != "" && (!errors.As(err, &fault) || fault.Code != c.code):
				t.Errorf("%v, want %s", err, c.code)
			}
			if fault != nil && strings.Contains(fault.Message, "sk-ant") {
				t.Errorf("a secret in %q", fault.Message)
			}
		})
	}
	t.Run("bad key", func(t *testing.T) {
		s := newStandin(t, ok)
		env := s.env()
		env.APIKey = "other"
		d := s.desk(opus55)
		d.Factory = New(env)
		var fault *computer.Fault
		if err := d.Step(); !errors.As(err, &fault) || fault.Code != vendors.CodeBadCredentials {
			t.Errorf("%v", err)
		}
	})
	t.Run("nobody there", func(t *testing.T) {
		s := newStandin(t, ok)
		env := s.env()
		env.BaseURL = "http://127.0.0.1:1"
		d := s.desk(strings.TrimSuffix(opus55, "}") + `,"retries":0}`)
		d.Factory = New(env)
		var fault *computer.Fault
		if err := d.Step(); !errors.As(err, &fault) || fault.Code != vendors.CodeUnavailable {
			t.Errorf("%v", err)
		}
	})
}

// A request that is too long is shortened and sent once more; what was left
// out stays so.
func TestContextTooLong(t *testing.T) {
	long := reply{status: 400, kind: "invalid_request_error", say: "prompt is too long: 1000001 tokens > 1000000 maximum"}
	script := []reply{}
	for i := range 6 {
		script = append(script, reply{blocks: []object{text(fmt.Sprint("step ", i)), call(fmt.Sprint("a", i), "type", object{"text": fmt.Sprint(i)})}})
	}
	again := append(append([]reply{}, script...), long, reply{blocks: []object{call("b", "type", object{"text": "b"})}}, reply{blocks: []object{text("Done.")}})
	s := newStandin(t, again...)
	d := s.desk(opus55)
	d.Run(10)
	s.clean()
	opening := s.body(6)["messages"].([]any)[0].(object)["content"].([]any)[0].(object)["text"].(string)
	if !strings.Contains(opening, `3. step 2`) || strings.Contains(opening, "step 4") || len(d.Acts) != 7 {
		t.Errorf("opening %q, did %s", opening, d.Did())
	}
	if n := len(pictures(s.body(6)["messages"].([]any)[0].(object)["content"].([]any))); n != 0 {
		t.Errorf("%d pictures in the first message, want only the newest anywhere", n)
	}
	if n := len(s.body(7)["messages"].([]any)); n != len(s.body(6)["messages"].([]any))+2 {
		t.Error("the next request does not go on from the shortened one")
	}

	s = newStandin(t, append(script[:2:2], long, long)...)
	d = s.desk(opus55)
	var err error
	for err == nil {
		err = d.Step()
	}
	var fault *computer.Fault
	if !errors.As(err, &fault) || fault.Code != vendors.CodeContextTooLong || len(d.Acts) != 2 {
		t.Errorf("%v after %s", err, d.Did())
	}
}

// Old screenshots are dropped in batches, so that between two cuts every
// request begins with the one before it; thinking that a cut makes invalid is
// dropped by the API as it is told to, and never refused.
func TestTrimming(t *testing.T) {
	const turns = 40
	var script []reply
	for i := range turns {
		script = append(script, reply{blocks: []object{call(fmt.Sprint("a", i), "type", object{"text": fmt.Sprint(i)})}})
	}
	script = append(script, reply{blocks: []object{text("Done.")}})
	s := newStandin(t, script...)
	d := s.desk(`{"name":"anthropic","model":"claude-opus-5-5","keepScreenshots":3}`)
	d.Display = computer.Display{Width: 320, Height: 200}
	d.Run(turns + 2)
	s.clean()
	cuts, before := 0, 0
	for n := range turns + 1 {
		messages := s.body(n)["messages"].([]any)
		count := 0
		for _, m := range messages {
			count += len(pictures(m.(object)["content"].([]any)))
		}
		if count > vendors.MaxPictures {
			t.Errorf("request %d has %d pictures", n, count)
		}
		if count < before {
			cuts++
			if count != 3 {
				t.Errorf("request %d was cut to %d pictures", n, count)
			}
		} else if n > 0 {
			earlier := s.body(n - 1)["messages"].([]any)
			if hash(uncached(messages[:len(earlier)])) != hash(uncached(earlier)) {
				t.Errorf("request %d does not begin with the one before", n)
			}
		}
		before = count
	}
	if cuts != 2 || s.dropped == 0 {
		t.Errorf("%d cuts, %d thinking blocks dropped", cuts, s.dropped)
	}
}

// The stand-in itself refuses what the vendor refuses.
func TestStandinRefuses(t *testing.T) {
	s := newStandin(t, reply{blocks: []object{text("Done.")}})
	d := s.desk(opus55)
	d.Run(2)
	good := s.body(0)
	for name, spoil := range map[string]func(b object){
		"unknown field":  func(b object) { b["temperatur"] = 1 },
		"nested field":   func(b object) { b["tools"].([]any)[0].(object)["enable_zoom"] = true },
		"role":           func(b object) { b["messages"].([]any)[0].(object)["role"] = "assistant" },
		"unasked result": func(b object) { spoilContent(b, object{"type": "tool_result", "tool_use_id": "x", "content": []any{}}) },
		"thinking":       func(b object) { b["thinking"] = object{"type": "disabled"} },
	} {
		var body object
		raw, err := json.Marshal(good)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(raw, &body); err != nil {
			t.Fatal(err)
		}
		spoil(body)
		body["stream"] = true
		raw, err = json.Marshal(body)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.try(raw); err == nil {
			t.Errorf("%s: not refused", name)
		}
	}
}

func spoilContent(b object, block object) {
	m := b["messages"].([]any)[0].(object)
	m["content"] = append(m["content"].([]any), block)
}
