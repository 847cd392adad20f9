package script

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
)

func TestParse(t *testing.T) {
	s, err := Parse(json.RawMessage(`[
		{"type":"click","x":0,"y":0,"name":"corner","unknown":"continue"},
		{"check":"title","contains":"","name":"any title"},
		{"check":"url","matches":"^https?://"},
		{"check":"pixel","x":1,"y":2,"color":"#0aF0b1","tolerance":0,"within":0},
		{"check":"value","equals":"x"},
		{"check":"dialog","equals":"hi","within":300},
		{"check":"download","contains":".csv"},
		{"check":"pages","count":0}
	]`))
	if err != nil {
		t.Fatal(err)
	}
	if a := s[0]; a.Name != "corner" || !a.UnknownContinue || a.Action.Button != computer.Left || *a.Action.X != 0 {
		t.Errorf("item 0: %+v", a)
	}
	if c := s[1].Check; c.Within != 5*time.Second || *c.Contains != "" || s[1].Name != "any title" {
		t.Errorf("item 1: %+v", c)
	}
	if c := s[3].Check; c.Color != [3]uint8{0x0a, 0xf0, 0xb1} || c.Tolerance != 0 || c.Within != 0 {
		t.Errorf("item 3: %+v", c)
	}
	if s[4].Check.Within != 0 || s[5].Check.Within != 5*time.Minute {
		t.Error("within of value and dialog")
	}
}

// Every fault is refused with its code, the item and the field.
func TestParseRefuses(t *testing.T) {
	for _, c := range []struct{ script, code, want string }{
		{``, events.CodeBadInput, "not a JSON array"},
		{`{}`, events.CodeBadInput, "not a JSON array"},
		{`null`, events.CodeBadInput, "at least one"},
		{`[]`, events.CodeBadInput, "at least one"},
		{`[{"type":"cursor"}] x`, events.CodeBadInput, "text after"},
		{`[1]`, events.CodeBadInput, "script item 0"},
		{`[null]`, events.CodeBadInput, "script item 0"},
		{`[{}]`, events.CodeBadInput, `"type"`},
		{`[{"type":"cursor"},{"type":"clik"}]`, events.CodeBadInput, "script item 1"},
		{`[{"type":"click","x":1}]`, events.CodeBadInput, `"y"`},
		{`[{"type":"click","x":1,"y":1,"z":1}]`, events.CodeBadInput, `"z"`},
		{`[{"type":"key","keys":["Contrl"]}]`, events.CodeUnknownKey, `field "keys"`},
		{`[{"type":"type","text":"` + strings.Repeat("x", 65<<10) + `"}]`, events.CodeTooLarge, "bytes"},
		{`[{"type":"cursor","name":1}]`, events.CodeBadInput, `"name"`},
		{`[{"type":"cursor","unknown":"retry"}]`, events.CodeBadInput, `"unknown"`},
		{`[{"type":"cursor","unknown":true}]`, events.CodeBadInput, `"unknown"`},
		{`[{"check":1}]`, events.CodeBadInput, `"check"`},
		{`[{"check":"titel","equals":"x"}]`, events.CodeBadInput, `"titel"`},
		{`[{"check":"title"}]`, events.CodeBadInput, "exactly one"},
		{`[{"check":"title","equals":"a","matches":"b"}]`, events.CodeBadInput, "exactly one"},
		{`[{"check":"title","equals":null}]`, events.CodeBadInput, "exactly one"},
		{`[{"check":"title","equals":1}]`, events.CodeBadInput, `"equals"`},
		{`[{"check":"title","matches":"("}]`, events.CodeBadInput, `"matches"`},
		{`[{"check":"title","equals":"a","type":"click"}]`, events.CodeBadInput, `"type"`},
		{`[{"check":"title","equals":"a","within":-1}]`, events.CodeBadInput, `"within"`},
		{`[{"check":"title","equals":"a","within":301}]`, events.CodeBadInput, `"within"`},
		{`[{"check":"title","equals":"a","whitin":3}]`, events.CodeBadInput, `"whitin"`},
		{`[{"check":"value","equals":"a","within":3}]`, events.CodeBadInput, `"within"`},
		{`[{"check":"pixel","x":1,"color":"#000000"}]`, events.CodeBadInput, "x and y"},
		{`[{"check":"pixel","x":-1,"y":0,"color":"#000000"}]`, events.CodeBadInput, "x and y"},
		{`[{"check":"pixel","x":1,"y":1}]`, events.CodeBadInput, `"color"`},
		{`[{"check":"pixel","x":1,"y":1,"color":"red"}]`, events.CodeBadInput, `"color"`},
		{`[{"check":"pixel","x":1,"y":1,"color":"#+12345"}]`, events.CodeBadInput, `"color"`},
		{`[{"check":"pixel","x":1,"y":1,"color":"#000000","tolerance":256}]`, events.CodeBadInput, `"tolerance"`},
		{`[{"check":"pixel","x":1,"y":1,"color":"#000000","equals":"x"}]`, events.CodeBadInput, `"equals"`},
		{`[{"check":"pages"}]`, events.CodeBadInput, `"count"`},
		{`[{"check":"pages","count":-1}]`, events.CodeBadInput, `"count"`},
		{`[{"check":"pages","count":1.5}]`, events.CodeBadInput, `"count"`},
		{`[` + strings.Repeat(`{"type":"cursor"},`, MaxItems) + `{"type":"cursor"}]`, events.CodeTooLarge, "items"},
	} {
		s, err := Parse(json.RawMessage(c.script))
		var d *events.DataError
		if s != nil || !errors.As(err, &d) {
			t.Errorf("%.80s: %v, %v", c.script, s, err)
			continue
		}
		if d.Code != c.code || !strings.Contains(d.Message, c.want) || len(d.Message) > 600 {
			t.Errorf("%.80s: %s: %s; want %s with %s", c.script, d.Code, d.Message, c.code, c.want)
		}
	}
}

func TestCheckBounds(t *testing.T) {
	s, err := Parse(json.RawMessage(`[{"type":"click","x":639,"y":479},{"check":"pixel","x":639,"y":479,"color":"#000000"}]`))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.CheckBounds(computer.Display{Width: 640, Height: 480}); err != nil {
		t.Error(err)
	}
	for _, d := range []computer.Display{{Width: 639, Height: 480}, {Width: 640, Height: 479}} {
		var e *events.DataError
		if err := s.CheckBounds(d); !errors.As(err, &e) || e.Code != events.CodeOutOfRange || !strings.Contains(e.Message, "script item 0") {
			t.Errorf("%v: %v", d, err)
		}
	}
	if err := s[1:].CheckBounds(computer.Display{Width: 639, Height: 480}); err == nil || !strings.Contains(err.Error(), "639,479") {
		t.Errorf("pixel: %v", err)
	}
}

// Whatever it is given, Parse answers with a script that may run or with a
// typed error, and the actions it lets through are in normal form.
func FuzzParse(f *testing.F) {
	f.Add([]byte(`[{"type":"click","x":0,"y":0,"name":"n"},{"check":"pixel","x":1,"y":2,"color":"#000000"}]`))
	f.Add([]byte(`[{"check":"title","matches":"(a"}]`))
	f.Add([]byte(`[{"type":"type","text":"x","unknown":"continue"}]`))
	f.Add([]byte(`[{"check":"pages","count":1e9,"within":0.0001}]`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		s, err := Parse(raw)
		if err != nil {
			var d *events.DataError
			if !errors.As(err, &d) || d.Code == "" || d.Message == "" || s != nil {
				t.Fatalf("%v %v", s, err)
			}
			return
		}
		if len(s) == 0 {
			t.Fatal("an empty script")
		}
		for i, it := range s {
			if (it.Action == nil) == (it.Check == nil) {
				t.Fatalf("item %d: %+v", i, it)
			}
			if it.Action != nil {
				if _, err := computer.Normalize([]computer.Action{*it.Action}); err != nil {
					t.Fatalf("item %d: %v", i, err)
				}
			}
			if c := it.Check; c != nil && (c.Within < 0 || c.Within > 5*time.Minute) {
				t.Fatalf("item %d: %+v", i, c)
			}
		}
	})
}
