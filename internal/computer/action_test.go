package computer

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
)

func TestDecodeActions(t *testing.T) {
	actions, err := DecodeActions([]byte(`[
		{"type":"click","x":0,"y":0},
		{"type":"click","x":10,"y":20,"button":"right","count":2,"modifiers":["ctrl","SHIFT"]},
		{"type":"scroll","x":1,"y":1,"dy":-3},
		{"type":"drag","path":[{"x":0,"y":0},{"x":5,"y":5}]},
		{"type":"key","keys":["cmd","Page_Down"]},
		{"type":"type","text":""},
		{"type":"hold","keys":["a"],"seconds":0},
		{"type":"run","argv":["ls"]},
		{"type":"mouseDown"}, {"type":"cursor"}, {"type":"clipboardRead"}
	]`))
	if err != nil {
		t.Fatal(err)
	}
	if a := actions[0]; a.Point() != (Point{}) || a.Button != Left || a.Count != 1 {
		t.Errorf("click at 0,0: %+v", a)
	}
	if a := actions[1]; a.Count != 2 || !reflect.DeepEqual(a.Modifiers, []string{"Control", "Shift"}) {
		t.Errorf("click with modifiers: %+v", a)
	}
	if a := actions[4]; a.Repeat != 1 || !reflect.DeepEqual(a.Keys, []string{"Meta", "PageDown"}) {
		t.Errorf("chord: %+v", a)
	}
	if again, err := Normalize(actions); err != nil || !reflect.DeepEqual(again, actions) {
		t.Errorf("normalised twice: %v %+v", err, again)
	}
}

func TestDecodeActionsRefuses(t *testing.T) {
	many := strings.Repeat(`{"type":"cursor"},`, MaxActions) + `{"type":"cursor"}`
	for raw, want := range map[string]InvalidError{
		``:                                  {CodeBadInput, -1, "", "array"},
		`{}`:                                {CodeBadInput, -1, "", "array"},
		`[]`:                                {CodeBadInput, -1, "", "at least one"},
		`[null]`:                            {CodeBadInput, 0, "", "object"},
		`[{"type":"tap"}]`:                  {CodeBadInput, 0, "type", "tap"},
		`[{"x":1}]`:                         {CodeBadInput, 0, "type", "missing"},
		`[{"type":"click","x":1}]`:          {CodeBadInput, 0, "y", "needs"},
		`[{"type":"click","x":1,"y":null}]`: {CodeBadInput, 0, "y", "needs"},
		`[{"type":"click","x":"1","y":2}]`:  {CodeBadInput, 0, "x", "string"},
		`[{"type":"click","x":1.5,"y":2}]`:  {CodeBadInput, 0, "x", "number"},
		`[{"type":"cursor"},{"type":"click","x":1,"y":2,"z":3}]`:                 {CodeBadInput, 1, "z", "unknown field"},
		`[{"type":"click","x":1,"y":2,"count":4}]`:                               {CodeBadInput, 0, "count", ""},
		`[{"type":"click","x":1,"y":2,"count":0}]`:                               {CodeBadInput, 0, "count", ""},
		`[{"type":"click","x":1,"y":2,"button":"thumb"}]`:                        {CodeBadInput, 0, "button", "thumb"},
		`[{"type":"click","x":1,"y":2,"modifiers":["Enter"]}]`:                   {CodeUnknownKey, 0, "modifiers", "Enter"},
		`[{"type":"key","keys":["FooBar"]}]`:                                     {CodeUnknownKey, 0, "keys", "FooBar"},
		`[{"type":"key","keys":[]}]`:                                             {CodeBadInput, 0, "keys", ""},
		`[{"type":"key","keys":["a"],"repeat":0}]`:                               {CodeBadInput, 0, "repeat", ""},
		`[{"type":"wait","seconds":-1}]`:                                         {CodeBadInput, 0, "seconds", "-1"},
		`[{"type":"wait","seconds":1e9}]`:                                        {CodeBadInput, 0, "seconds", ""},
		`[{"type":"scroll","x":1,"y":1,"dy":400}]`:                               {CodeBadInput, 0, "dy", "ticks"},
		`[{"type":"drag","path":[{"x":1,"y":1}]}]`:                               {CodeBadInput, 0, "path", ""},
		`[{"type":"zoom","region":{"x":0,"y":0,"width":0,"height":1}}]`:          {CodeBadInput, 0, "region", ""},
		`[{"type":"open","target":" "}]`:                                         {CodeBadInput, 0, "target", ""},
		`[{"type":"run","argv":[]}]`:                                             {CodeBadInput, 0, "argv", ""},
		`[{"type":"cursor"}] trailing`:                                           {CodeBadInput, -1, "", "after"},
		`[` + many + `]`:                                                         {CodeTooLarge, -1, "", "101 actions"},
		`[{"type":"type","text":"` + strings.Repeat("x", MaxTextBytes+1) + `"}]`: {CodeTooLarge, 0, "text", "65537"},
	} {
		actions, err := DecodeActions([]byte(raw))
		var got *InvalidError
		if !errors.As(err, &got) || got.Code != want.Code || got.Index != want.Index || got.Field != want.Field || !strings.Contains(got.Message, want.Message) {
			t.Errorf("%.80s: %#v, want %+v", raw, err, want)
		}
		if actions != nil {
			t.Errorf("%.80s: actions came back", raw)
		}
	}
}

func TestCheckBounds(t *testing.T) {
	d := Display{Width: 100, Height: 50}
	for raw, ok := range map[string]bool{
		`{"type":"click","x":0,"y":0}`:                                                  true,
		`{"type":"click","x":99,"y":49}`:                                                true,
		`{"type":"click","x":100,"y":0}`:                                                false,
		`{"type":"move","x":0,"y":-1}`:                                                  false,
		`{"type":"drag","path":[{"x":0,"y":0},{"x":0,"y":50}]}`:                         false,
		`{"type":"zoom","region":{"x":0,"y":0,"width":100,"height":50}}`:                true,
		`{"type":"zoom","region":{"x":1,"y":0,"width":100,"height":50}}`:                false,
		`{"type":"zoom","region":{"x":1,"y":0,"width":9223372036854775807,"height":1}}`: false,
	} {
		actions, err := DecodeActions([]byte("[" + raw + "]"))
		if err != nil {
			t.Fatal(err)
		}
		err = CheckBounds(actions, d)
		var got *InvalidError
		if ok != (err == nil) || err != nil && (!errors.As(err, &got) || got.Code != CodeOutOfRange) {
			t.Errorf("%s: %v", raw, err)
		}
	}
}

func TestCanonicalKey(t *testing.T) {
	for name, want := range map[string]string{
		"Enter": "Enter", "return": "Enter", "KP_Enter": "Enter", "\n": "Enter", "esc": "Escape", "ESC": "Escape", "Page_Down": "PageDown", "pgdn": "PageDown",
		"ctrl": "Control", "Control_L": "Control", "cmd": "Meta", "super": "Meta", "alt": "Alt", "F1": "F1", "f24": "F24", "space": " ", "plus": "+",
		"a": "a", "A": "A", "ñ": "ñ", "美": "美", "😀": "😀", "ArrowUp": "ArrowUp", "up": "ArrowUp", "BackSpace": "Backspace",
	} {
		if got, err := CanonicalKey(name); err != nil || got != want {
			t.Errorf("%q: %q %v, want %q", name, got, err, want)
		}
	}
	for _, name := range []string{"", "FooBar", "ctrl+c", "F25", "\x00", "\x1b", "ab"} {
		if got, err := CanonicalKey(name); err == nil {
			t.Errorf("%q was taken as %q", name, got)
		}
	}
}

func FuzzDecodeActions(f *testing.F) {
	for typ := range vocabulary {
		f.Add(fmt.Appendf(nil, `[{"type":%q,"x":1,"y":2,"text":"a","keys":["a"],"seconds":1,"argv":["ls"],"target":"a","path":[{"x":1,"y":1},{"x":2,"y":2}]}]`, typ))
	}
	f.Add([]byte(`[{"type":"click","x":1,"y":2,"modifiers":["ctrl"]}]`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		actions, err := DecodeActions(raw)
		if err != nil {
			var invalid *InvalidError
			if !errors.As(err, &invalid) || len(err.Error()) > 1000 {
				t.Fatalf("%T of %d bytes", err, len(err.Error()))
			}
			return
		}
		again, err := Normalize(actions)
		if err != nil || !reflect.DeepEqual(again, actions) {
			out, _ := json.Marshal(actions)
			t.Fatalf("not stable: %s: %v", out, err)
		}
		if err := CheckBounds(actions, DefaultDisplay); err != nil {
			var invalid *InvalidError
			if !errors.As(err, &invalid) {
				t.Fatal(err)
			}
		}
	})
}

func FuzzCanonicalKey(f *testing.F) {
	f.Add("ctrl")
	f.Add("美")
	f.Fuzz(func(t *testing.T, name string) {
		key, err := CanonicalKey(name)
		if err != nil {
			return
		}
		if again, err := CanonicalKey(key); err != nil || again != key {
			t.Fatalf("%q → %q → %q, %v", name, key, again, err)
		}
	})
}
