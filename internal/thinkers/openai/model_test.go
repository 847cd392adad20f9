package openai

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/thinkers/vendors"
)

const gpt = `{"name":"openai","model":"gpt-5.5"}`

// A conversation that uses every action of the computer tool and every
// function, in the shapes that the API sends, ends with each action done once,
// in order (stagehand#2266, openai-cua-sample-app#22: a chord is held together).
func TestEveryAction(t *testing.T) {
	s := newStandin(t,
		reply{items: []object{calls("c1", object{"type": "screenshot"})}},
		reply{items: []object{calls("c2",
			object{"type": "click", "button": "left", "x": 0, "y": 0},
			object{"type": "click", "button": "wheel", "x": 1279, "y": 799, "keys": []string{"CTRL", "SHIFT"}},
			object{"type": "click", "button": "back", "x": 5, "y": 5, "keys": nil},
			object{"type": "double_click", "x": 7, "y": 8, "keys": []string{}},
			object{"type": "drag", "path": []object{{"x": 1, "y": 2}, {"x": 3, "y": 4}, {"x": 5, "y": 6}}, "keys": []string{"ALT"}},
			object{"type": "move", "x": 9, "y": 9},
			object{"type": "scroll", "x": 10, "y": 11, "scroll_x": 0, "scroll_y": 250},
			object{"type": "scroll", "x": 10, "y": 11, "scroll_x": -90000, "scroll_y": 0},
			object{"type": "type", "text": "美 ñ"},
			object{"type": "keypress", "keys": []string{"CTRL", "A"}},
			object{"type": "keypress", "keys": []string{"ENTER"}},
			object{"type": "keypress", "keys": []string{"DOWN", "DOWN"}},
			object{"type": "wait"},
			object{"type": "screenshot"})}},
		reply{items: []object{function("f1", "open", `{"target":"https://example.org/"}`), function("f2", "clipboardRead", `{}`)}},
		reply{items: []object{function("f3", "askUser", `{"question":"Which account?"}`)}},
		reply{items: []object{message("Saved.")}})
	d := s.desk(gpt)
	d.Capabilities = []string{"clipboard"}
	d.Say = map[int][]string{5: {"the second one"}}
	d.Crash = true
	last := d.Run(10)
	s.clean()
	if !last.Done || last.Label != "Saved." {
		t.Errorf("ended %+v", last)
	}
	want := `{"type":"click","x":0,"y":0,"button":"left","count":1} {"type":"click","x":1279,"y":799,"button":"middle","count":1,"modifiers":["Control","Shift"]} ` +
		`{"type":"click","x":5,"y":5,"button":"back","count":1} {"type":"click","x":7,"y":8,"button":"left","count":2} ` +
		`{"type":"drag","button":"left","modifiers":["Alt"],"path":[{"x":1,"y":2},{"x":3,"y":4},{"x":5,"y":6}]} {"type":"move","x":9,"y":9} ` +
		`{"type":"scroll","x":10,"y":11,"dy":2.5} {"type":"scroll","x":10,"y":11,"dx":-100} {"type":"type","text":"美 ñ"} ` +
		`{"type":"key","keys":["Control","a"],"repeat":1} {"type":"key","keys":["Enter"],"repeat":1} {"type":"key","keys":["ArrowDown"],"repeat":1} {"type":"key","keys":["ArrowDown"],"repeat":1} ` +
		`{"type":"wait","seconds":2} {"type":"open","target":"https://example.org/"} {"type":"clipboardRead"}`
	if got := d.Did(); got != want {
		t.Errorf("did\n%s\nwant\n%s", got, want)
	}
	if got := words(s.input(2)); !strings.Contains(got, "About call c2: scrolled 100 ticks") {
		t.Errorf("a clamped scroll is told as %q (kernel/cli#154, cua#147)", got)
	}
	if got := words(s.input(3)); !strings.Contains(got, "OK|") && !strings.Contains(got, "copied") {
		t.Errorf("functions are answered %q", got)
	}
	if got := words(s.input(4)); !strings.Contains(got, "A person answers: the second one") {
		t.Errorf("the person's answer is told as %q", got)
	}
	if d.Usage != (events.LoopUsage{InputTokens: 1000, OutputTokens: 150}) {
		t.Errorf("usage %+v", d.Usage)
	}
}

// The older tool has one action a call, and its own request.
func TestPreview(t *testing.T) {
	one := func(id string, action object) object {
		return object{"type": "computer_call", "id": "cu_" + id, "call_id": id, "status": "completed", "pending_safety_checks": []any{}, "action": action}
	}
	s := newStandin(t, reply{items: []object{one("a", object{"type": "click", "button": "right", "x": 800, "y": 500})}},
		reply{items: []object{one("b", object{"type": "screenshot"})}}, reply{items: []object{message("Done.")}})
	d := s.desk(`{"name":"openai","model":"computer-use-preview"}`)
	d.Display = computer.Display{Width: 2560, Height: 1600}
	d.Capabilities = []string{"browser"}
	d.Run(4)
	s.clean()
	tool := s.bodies[0]["tools"].([]any)[0].(object)
	if tool["display_width"] != 1600.0 || tool["environment"] != "browser" || d.Acts[0].Point() != (computer.Point{X: 1280, Y: 800}) {
		t.Errorf("tool %v, did %s", tool, d.Did())
	}
}

func checked(id string, actions ...object) object {
	c := calls(id, actions...)
	c["pending_safety_checks"] = []any{object{"id": "sc_1", "code": "malicious_instructions", "message": "The page gives instructions."}}
	return c
}

// A call with safety checks is not carried out before a person, or policy, has
// acknowledged them.
func TestSafetyChecks(t *testing.T) {
	click := object{"type": "click", "button": "left", "x": 3, "y": 4}
	script := []reply{{items: []object{checked("a", click)}}, {items: []object{message("Done.")}}}
	for name, say := range map[string]map[int][]string{"by word": {2: {"Yes, go on"}}, "by resuming": nil} {
		t.Run(name, func(t *testing.T) {
			s := newStandin(t, script...)
			d := s.desk(gpt)
			d.Say = say
			d.Crash = true
			if err := d.Step(); err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(d.Last.NeedsInput, "malicious_instructions: The page gives instructions.") || !strings.Contains(d.Last.NeedsInput, "click 3,4") || len(d.Acts) > 0 {
				t.Errorf("asked %q, did %s", d.Last.NeedsInput, d.Did())
			}
			d.Run(4)
			s.clean()
			if d.Did() != `{"type":"click","x":3,"y":4,"button":"left","count":1}` || len(s.bodies) != 2 {
				t.Errorf("did %s in %d requests", d.Did(), len(s.bodies))
			}
			output := s.input(1)[3].(object)
			if got := fmt.Sprint(output["acknowledged_safety_checks"]); !strings.Contains(got, "sc_1") {
				t.Errorf("output %v", got)
			}
		})
	}
	t.Run("refused", func(t *testing.T) {
		s := newStandin(t, script[0], reply{items: []object{calls("b", object{"type": "keypress", "keys": []string{"ESC"}})}}, script[1])
		d := s.desk(gpt)
		d.Say = map[int][]string{2: {"No! That is a scam."}}
		d.Crash = true
		d.Run(5)
		s.clean()
		if got := words(s.input(1)); !strings.Contains(got, "A person did not allow") || !strings.Contains(got, "That is a scam") {
			t.Errorf("told %q", got)
		}
		if d.Did() != `{"type":"key","keys":["Escape"],"repeat":1}` {
			t.Errorf("did %s", d.Did())
		}
	})
	t.Run("by policy", func(t *testing.T) {
		s := newStandin(t, script...)
		d := s.desk(`{"name":"openai","acknowledgeSafetyChecks":["malicious_instructions"]}`)
		d.Run(3)
		s.clean()
		if len(d.History) != 2 || len(d.Acts) != 1 {
			t.Errorf("%d turns, did %s", len(d.History), d.Did())
		}
	})
}

func TestFaultyCalls(t *testing.T) {
	for name, c := range map[string]struct {
		item object
		want string
		did  int
	}{
		"out of range":  {item: calls("a", object{"type": "click", "button": "left", "x": 1280, "y": 0}), want: "outOfRange: coordinate: 1280,0"},
		"second action": {item: calls("a", object{"type": "type", "text": "x"}, object{"type": "click", "button": "left", "x": -1, "y": 0}, object{"type": "type", "text": "y"}), want: "action 2 of this call: outOfRange", did: 1},
		"move and keys": {item: calls("a", object{"type": "move", "x": 1, "y": 1, "keys": []string{"SHIFT"}}), want: "unsupported: keys cannot be held"},
		"no action":     {item: calls("a", object{"type": "teleport"}), want: `unsupported: there is no action "teleport"`},
		"no actions":    {item: calls("a"), want: "malformed: the call has no actions"},
		"no place":      {item: calls("a", object{"type": "click", "button": "left"}), want: "malformed: click needs x and y"},
		"button":        {item: calls("a", object{"type": "click", "button": "fourth", "x": 1, "y": 1}), want: "unsupported: there is no button"},
		"bad key":       {item: calls("a", object{"type": "keypress", "keys": []string{"FROB"}}), want: "unknownKey"},
		"short drag":    {item: calls("a", object{"type": "drag", "path": []object{{"x": 1, "y": 1}}}), want: "badInput: path"},
		"field":         {item: calls("a", object{"type": "wait", "hours": 3}), want: `malformed: wait takes no "hours"`},
		"arguments":     {item: function("a", "open", `{"target":`), want: "malformed: the arguments of open"},
		"function":      {item: function("a", "shell", `{}`), want: `unsupported: there is no tool "shell"`},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStandin(t, reply{items: []object{c.item}}, reply{items: []object{message("Done.")}})
			d := s.desk(gpt)
			d.Run(3)
			s.clean()
			if got := words(s.input(1)); !strings.Contains(got, c.want) || len(d.Acts) != c.did {
				t.Errorf("told %q, did %s; want %q", got, d.Did(), c.want)
			}
		})
	}
	t.Run("patience", func(t *testing.T) {
		var script []reply
		for i := range 6 {
			script = append(script, reply{items: []object{calls(fmt.Sprint("a", i), object{"type": "teleport"})}})
		}
		last := newStandin(t, script...).desk(gpt).Run(6)
		if last.Failed == nil || last.Failed.Code != vendors.CodeMalformed {
			t.Errorf("%+v", last.Failed)
		}
	})
}

// An unknown outcome is shown with the fresh screenshot.
func TestUnknownOutcome(t *testing.T) {
	s := newStandin(t, reply{items: []object{calls("a", object{"type": "type", "text": "x"})}}, reply{items: []object{message("Done.")}})
	d := s.desk(gpt)
	d.Act = func(int, []computer.Action) *looprunner.Acted {
		return &looprunner.Acted{Outcome: computer.Unknown, Error: &computer.Fault{Code: "timeout", Message: "the provider timed out"}}
	}
	d.Run(3)
	s.clean()
	if got := words(s.input(1)); !strings.Contains(got, "About call a: Unknown: it may have been executed") || !strings.Contains(got, "the provider timed out") {
		t.Errorf("told %q", got)
	}
}

func TestEnds(t *testing.T) {
	refusal := object{"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": []any{object{"type": "refusal", "refusal": "I can't."}}}
	for name, c := range map[string]struct {
		r    reply
		code string
	}{
		"refusal": {reply{items: []object{refusal}}, vendors.CodeRefused},
		"filter":  {reply{incomplete: "content_filter"}, vendors.CodeRefused},
		"give up": {reply{items: []object{function("a", "giveUp", `{"reason":"no such page"}`)}}, "gaveUp"},
	} {
		t.Run(name, func(t *testing.T) {
			last := newStandin(t, c.r).desk(gpt).Run(2)
			if last.Failed == nil || last.Failed.Code != c.code || last.Usage.OutputTokens != 30 {
				t.Errorf("%+v %+v", last.Failed, last.Usage)
			}
		})
	}
	t.Run("cut off", func(t *testing.T) {
		s := newStandin(t, reply{incomplete: "max_output_tokens"}, reply{items: []object{message("Done.")}})
		s.desk(gpt).Run(3)
		s.clean()
		if got := words(s.input(1)); !strings.Contains(got, "cut off (max_output_tokens)") {
			t.Errorf("told %q", got)
		}
	})
}

// Each error has its documented end, and what passes is tried again.
func TestErrors(t *testing.T) {
	ok := reply{items: []object{message("Done.")}}
	for name, c := range map[string]struct {
		script []reply
		model  string
		code   string // "": succeeds
	}{
		"429 with retry-after":   {script: []reply{{status: 429, code: "rate_limit_exceeded", after: "0.01"}, ok}},
		"500":                    {script: []reply{{status: 500, code: "server_error"}, ok}},
		"503":                    {script: []reply{{status: 503}, ok}},
		"429 for ever":           {script: []reply{{status: 429, code: "rate_limit_exceeded"}, {status: 429, code: "rate_limit_exceeded"}}, model: `"retries":1`, code: vendors.CodeRateLimited},
		"500 for ever":           {script: []reply{{status: 500}}, model: `"retries":0`, code: vendors.CodeUnavailable},
		"403":                    {script: []reply{{status: 403}}, code: vendors.CodeBadCredentials},
		"400":                    {script: []reply{{status: 400, code: "invalid_value"}}, code: vendors.CodeRejected},
		"cut":                    {script: []reply{{items: ok.items, cut: 2}, ok}},
		"cut for ever":           {script: []reply{{items: ok.items, cut: 2}, {items: ok.items, cut: 1}}, model: `"retries":1`, code: vendors.CodeUnavailable},
		"inline":                 {script: []reply{{items: ok.items, cut: 2, inline: "server_error"}, ok}},
		"failed":                 {script: []reply{{failed: "server_error"}, ok}},
		"failed by policy":       {script: []reply{{failed: "bio_policy"}}, code: vendors.CodeRefused},
		"failed by its limit":    {script: []reply{{failed: "rate_limit_exceeded"}, {failed: "rate_limit_exceeded"}}, model: `"retries":1`, code: vendors.CodeRateLimited},
		"failed by an odd image": {script: []reply{{failed: "invalid_image"}}, code: vendors.CodeRejected},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStandin(t, c.script...)
			model := gpt
			if c.model != "" {
				model = strings.TrimSuffix(gpt, "}") + "," + c.model + "}"
			}
			d := s.desk(model)
			err := d.Step()
			s.clean()
			var fault *computer.Fault
			switch {
			case c.code == "" && (err != nil || !d.Last.Done):
				t.Errorf("%v, %+v", err, d.Last)
			case c.code != "" && (!errors.As(err, &fault) || fault.Code != c.code):
				t.Errorf("%v, want %s", err, c.code)
			}
			if fault != nil && strings.Contains(fault.Message, "sk-test") {
				t.Errorf("a secret in %q", fault.Message)
			}
		})
	}
}

// A request that is too long is shortened and sent once more.
func TestContextTooLong(t *testing.T) {
	long := reply{status: 400, code: "context_length_exceeded", say: "Your input exceeds the context window of this model."}
	var script []reply
	for i := range 6 {
		script = append(script, reply{items: []object{calls(fmt.Sprint("a", i), object{"type": "type", "text": fmt.Sprint(i)})}})
	}
	s := newStandin(t, append(append([]reply{}, script...), long, reply{items: []object{message("Done.")}})...)
	d := s.desk(gpt)
	d.Run(9)
	s.clean()
	if got := len(s.input(6)); got != 1+3*4 || len(d.Acts) != 6 {
		t.Errorf("%d items after shortening", got)
	}
	s = newStandin(t, append(script[:1:1], long, long)...)
	d = s.desk(gpt)
	var err error
	for err == nil {
		err = d.Step()
	}
	var fault *computer.Fault
	if !errors.As(err, &fault) || fault.Code != vendors.CodeContextTooLong {
		t.Errorf("%v", err)
	}
}

// Old steps give way to a list, in batches, since every computer_call_output
// must have its screenshot.
func TestTrimming(t *testing.T) {
	const turns = 45
	var script []reply
	for i := range turns {
		r := reply{items: []object{calls(fmt.Sprint("a", i), object{"type": "type", "text": fmt.Sprint(i)})}}
		if i%7 == 3 { // some wait for a person
			r.items = []object{checked(fmt.Sprint("a", i), object{"type": "type", "text": fmt.Sprint(i)})}
		}
		script = append(script, r)
	}
	script = append(script, reply{items: []object{message("Done.")}})
	s := newStandin(t, script...)
	d := s.desk(`{"name":"openai","keepScreenshots":4}`)
	d.Display = computer.Display{Width: 320, Height: 200}
	d.Run(2 * turns)
	s.clean()
	if len(d.Acts) != turns {
		t.Errorf("%d acts", len(d.Acts))
	}
	most := 0
	for n := range turns + 1 {
		raw, err := json.Marshal(s.input(n))
		if err != nil {
			t.Fatal(err)
		}
		most = max(most, strings.Count(string(raw), "data:image/png"))
	}
	if most > vendors.MaxPictures+1 || most < 15 {
		t.Errorf("%d pictures in one request", most)
	}
}

// The stand-in itself refuses what the vendor refuses.
func TestStandinRefuses(t *testing.T) {
	s := newStandin(t, reply{items: []object{calls("a", object{"type": "wait"})}}, reply{items: []object{message("Done.")}})
	s.desk(gpt).Run(3)
	s.clean()
	for name, spoil := range map[string]func(b object){
		"unknown field": func(b object) { b["temperatur"] = 1 },
		"no screenshot": func(b object) { delete(b["input"].([]any)[3].(object)["output"].(object), "image_url") },
		"no output":     func(b object) { b["input"] = append(b["input"].([]any)[:3:3], b["input"].([]any)[4:]...) },
		"no call":       func(b object) { b["input"] = b["input"].([]any)[3:] },
		"nested field":  func(b object) { b["input"].([]any)[3].(object)["output"].(object)["current_url"] = "x" },
	} {
		raw, err := json.Marshal(s.bodies[1])
		if err != nil {
			t.Fatal(err)
		}
		var body object
		if err := json.Unmarshal(raw, &body); err != nil {
			t.Fatal(err)
		}
		spoil(body)
		body["stream"] = true
		if raw, err = json.Marshal(body); err != nil {
			t.Fatal(err)
		}
		if _, err := s.check(httptest.NewRequest(http.MethodPost, "/v1/responses", nil), raw); err == nil {
			t.Errorf("%s: not refused", name)
		}
	}
}
