package toolcall

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"berth/internal/computer"
	"berth/internal/looprunner"
	"berth/internal/thinkers/screen"
)

var (
	rules = Rules{Display: computer.Display{Width: 1280, Height: 800}, Capabilities: []string{"clipboard", "shell"}, Allow: []computer.Type{computer.Run}}
	view  = screen.View{Sent: screen.Size{Width: 1280, Height: 800}, Display: rules.Display}
)

func TestChords(t *testing.T) {
	for in, want := range map[string]string{
		"Return": "Return", "ctrl+s": "ctrl,s", "ctrl+S": "ctrl,s", "ctrl+shift+T": "ctrl,shift,T", "A": "A", "ctrl++": "ctrl,+", "+": "+",
		" ": " ", "Down Down": "Down|Down", "ctrl+a Delete": "ctrl,a|Delete", "alt+F4": "alt,F4",
	} {
		chords, err := Chords(in)
		parts := make([]string, len(chords))
		for i, c := range chords {
			parts[i] = strings.Join(c, ",")
		}
		if got := strings.Join(parts, "|"); err != nil || got != want {
			t.Errorf("%q: %q, want %q (%v)", in, got, want, err)
		}
	}
	if _, err := Chords(""); err == nil {
		t.Error("no key")
	}
	for _, c := range []struct{ in, want string }{{"CTRL A", "[[CTRL a]]"}, {"CTRL K S", "[[CTRL k] [CTRL s]]"}, {"DOWN DOWN", "[[DOWN] [DOWN]]"}, {"SHIFT", "[[SHIFT]]"}, {"CTRL SHIFT T", "[[CTRL SHIFT T]]"}} {
		if got := fmt.Sprint(Press(strings.Fields(c.in))); got != c.want {
			t.Errorf("%s: %s, want %s", c.in, got, c.want)
		}
	}
}

// Case S6: kernel/cli#154, cua#147.
func TestTicks(t *testing.T) {
	for px, want := range map[float64]float64{0: 0, 100: 1, -250: -2.5, 40000: 100, -1e9: -100} {
		got, note := Ticks(px)
		if got != want || (note != "") != (px > 10000 || px < -10000) {
			t.Errorf("%v px: %v ticks, %q", px, got, note)
		}
	}
}

// Every action of the vocabulary is a function, unless it is off, denied or
// beyond the sandbox.
func TestFunctions(t *testing.T) {
	have := map[string]bool{}
	for _, f := range All(rules, "pixels") {
		have[f.Name] = true
		raw, err := json.Marshal(f.Schema())
		if err != nil || f.Description == "" || !json.Valid(raw) {
			t.Errorf("%s: %v", f.Name, err)
		}
		for _, r := range f.Required {
			if _, ok := f.Properties[r]; !ok {
				t.Errorf("%s requires %s, which it has not", f.Name, r)
			}
		}
	}
	for _, typ := range computer.Types() {
		if !have[string(typ)] {
			t.Errorf("no function for %s", typ)
		}
	}
	bare := Rules{Display: rules.Display, Deny: []computer.Type{computer.Open}}
	for _, name := range []computer.Type{computer.Run, computer.ClipboardRead, computer.ClipboardWrite, computer.Open} {
		if Known(All(bare, ""), string(name)) || Known(Extras(bare), string(name)) {
			t.Errorf("%s is offered", name)
		}
	}
}

// Whatever calls come: each is answered once, in order, the actions are valid,
// and nothing after a fault is carried out.
func TestPlanProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 6).Draw(t, "calls")
		parsed := make([]Parsed, n)
		for i := range parsed {
			x := rapid.IntRange(-5, 1300).Draw(t, "x")
			parsed[i] = Parsed{ID: fmt.Sprint(i), Tool: "t"}
			switch rapid.IntRange(0, 5).Draw(t, "kind") {
			case 0:
				parsed[i].Look = true
			case 1:
				parsed[i].Err = fmt.Errorf("malformed")
			case 2:
				parsed[i].Ask = "why?"
			default:
				y := 5
				for range rapid.IntRange(1, 3).Draw(t, "actions") {
					parsed[i].Actions = append(parsed[i].Actions, computer.Action{Type: computer.Move, X: &x, Y: &y})
				}
			}
		}
		p := Make(rules, parsed)
		if len(p.Calls) != n {
			t.Fatalf("%d calls of %d", len(p.Calls), n)
		}
		if len(p.Actions) > 0 {
			if _, err := computer.Normalize(p.Actions); err != nil {
				t.Fatal(err)
			}
			if err := computer.CheckBounds(p.Actions, rules.Display); err != nil {
				t.Fatal(err)
			}
		}
		mine, stopped := 0, false
		for i, c := range p.Calls {
			mine += c.Actions
			if c.Skipped != stopped || stopped && c.Actions > 0 {
				t.Fatalf("call %d: %+v", i, c)
			}
			stopped = stopped || c.Fault != "" || c.Ask
		}
		if mine != len(p.Actions) {
			t.Fatalf("%d actions of the calls, %d of the plan", mine, len(p.Actions))
		}
		outcome := rapid.SampledFrom([]computer.Outcome{computer.OK, computer.Failed, computer.Rejected, computer.Unknown}).Draw(t, "outcome")
		acted := &looprunner.Acted{Outcome: outcome}
		if outcome == computer.Failed || outcome == computer.Unknown { // some ran, one did not
			for range rapid.IntRange(0, max(0, len(p.Actions)-1)).Draw(t, "ran") {
				acted.Actions = append(acted.Actions, computer.ActionResult{Outcome: computer.OK})
			}
			acted.Actions = append(acted.Actions, computer.ActionResult{Outcome: outcome})
		}
		answers := Answers(p.Calls, looprunner.Exchange{Decision: p.Decide(""), Acted: acted}, view, nil)
		failed := false
		for i, a := range answers {
			if a.ID != fmt.Sprint(i) || a.Text == "" || failed && !a.Failed {
				t.Fatalf("answer %d: %+v", i, a)
			}
			failed = failed || a.Failed
		}
	})
}

// Whatever arguments a model gives, Parse answers with valid actions or an error.
func FuzzParse(f *testing.F) {
	for _, t := range computer.Types() {
		f.Add(string(t), `{"x":1,"y":2,"dx":1e300,"dy":-3,"region":{"x":1,"y":1,"width":5,"height":5},"path":[{"x":1,"y":1},{"x":2}],"keys":["ctrl","A"],"text":"x","seconds":1,"argv":["a"],"target":"t"}`)
		f.Add(string(t), `{"x":1,"y":2}`)
	}
	f.Add(AskUser, `{"question":"x"}`)
	f.Add(Done, `{"summary":""}`)
	f.Add("none", `[]`)
	fs := All(rules, "pixels")
	f.Fuzz(func(t *testing.T, name, args string) {
		p := Parse(fs, "id", name, []byte(args), view)
		plan := Make(rules, []Parsed{p})
		if len(plan.Calls) != 1 {
			t.Fatal(plan)
		}
		if len(plan.Actions) > 0 {
			if _, err := computer.Normalize(plan.Actions); err != nil {
				t.Fatal(err)
			}
			if err := computer.CheckBounds(plan.Actions, rules.Display); err != nil {
				t.Fatal(err)
			}
		} else if plan.Calls[0].Fault == "" && !plan.Calls[0].Look && plan.Ask == "" && plan.Done == nil && plan.GiveUp == nil {
			t.Fatalf("%s %s came to nothing without a word", name, args)
		}
	})
}
