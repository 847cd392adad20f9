package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"berth/internal/computer"
	"berth/internal/thinkers/screen"
	"berth/internal/thinkers/toolcall"
)

// waitSeconds is how long a wait action means: the vendor gives no number, and
// its own examples take two.
const waitSeconds = 2.0

// action is what an action of a computer call may have.
type action struct {
	Type    string   `json:"type"`
	Button  string   `json:"button"`
	X       *float64 `json:"x"`
	Y       *float64 `json:"y"`
	ScrollX *float64 `json:"scroll_x"`
	ScrollY *float64 `json:"scroll_y"`
	Path    []place  `json:"path"`
	Keys    []string `json:"keys"`
	Text    *string  `json:"text"`
}

type place struct {
	X *float64 `json:"x"`
	Y *float64 `json:"y"`
}

// takes says which fields each action may have, beside type.
var takes = map[string][]string{
	"screenshot": {}, "wait": {},
	"click": {"button", "x", "y", "keys"}, "double_click": {"x", "y", "keys", "button"},
	"move": {"x", "y", "keys"}, "drag": {"path", "keys"}, "scroll": {"x", "y", "scroll_x", "scroll_y", "keys"},
	"type": {"text"}, "keypress": {"keys"},
}

// computerCall understands a call: its actions in order, up to the first that
// is not understood. A screenshot among them needs no action, since the answer
// is one.
func computerCall(id string, raw []json.RawMessage, view screen.View) toolcall.Parsed {
	p := toolcall.Parsed{ID: id, Tool: "computer"}
	if len(raw) == 0 {
		p.Err = fmt.Errorf("malformed: the call has no actions")
		return p
	}
	for _, item := range raw {
		actions, note, err := one(item, view)
		if err != nil {
			p.Err = err
			return p
		}
		if note != "" {
			p.Note = note
		}
		p.Actions = append(p.Actions, actions...)
	}
	p.Look = len(p.Actions) == 0
	return p
}

func one(raw json.RawMessage, view screen.View) ([]computer.Action, string, error) {
	a, err := decode(raw)
	if err != nil {
		return nil, "", err
	}
	switch a.Type {
	case "screenshot":
		return nil, "", nil
	case "wait":
		s := waitSeconds
		return []computer.Action{{Type: computer.Wait, Seconds: &s}}, "", nil
	case "type":
		if a.Text == nil {
			return nil, "", fmt.Errorf("malformed: type needs text")
		}
		return []computer.Action{{Type: computer.TypeText, Text: a.Text}}, "", nil
	case "keypress":
		if len(a.Keys) == 0 {
			return nil, "", fmt.Errorf("malformed: keypress needs keys")
		}
		var out []computer.Action
		for _, chord := range toolcall.Press(a.Keys) {
			out = append(out, computer.Action{Type: computer.Key, Keys: chord, Repeat: 1})
		}
		return out, "", nil
	case "drag":
		out, err := drag(a, view)
		return out, "", err
	default:
		return mouse(a, view)
	}
}

func decode(raw json.RawMessage) (action, error) {
	var a action
	var present map[string]json.RawMessage
	if err := json.Unmarshal(raw, &present); err != nil || present == nil {
		return a, fmt.Errorf("malformed: an action is not a JSON object")
	}
	if err := json.Unmarshal(raw, &a); err != nil {
		return a, fmt.Errorf("malformed: %w", err)
	}
	fields, ok := takes[a.Type]
	if !ok {
		return a, fmt.Errorf("unsupported: there is no action %.80q here", a.Type)
	}
	var unknown []string
	for k, v := range present {
		if k != "type" && !slices.Contains(fields, k) && !bytes.Equal(bytes.TrimSpace(v), []byte("null")) {
			unknown = append(unknown, k)
		}
	}
	if len(unknown) > 0 {
		slices.Sort(unknown)
		return a, fmt.Errorf("malformed: %s takes no %.80q", a.Type, unknown[0])
	}
	return a, nil
}

func drag(a action, view screen.View) ([]computer.Action, error) {
	out := computer.Action{Type: computer.Drag, Button: computer.Left, Modifiers: a.Keys}
	for _, p := range a.Path {
		if p.X == nil || p.Y == nil {
			return nil, fmt.Errorf("malformed: a point of the path needs x and y")
		}
		at, err := view.Point(*p.X, *p.Y)
		if err != nil {
			return nil, err
		}
		out.Path = append(out.Path, at)
	}
	return []computer.Action{out}, nil
}

func mouse(a action, view screen.View) ([]computer.Action, string, error) {
	if a.X == nil || a.Y == nil {
		return nil, "", fmt.Errorf("malformed: %s needs x and y", a.Type)
	}
	at, err := view.Point(*a.X, *a.Y)
	if err != nil {
		return nil, "", err
	}
	switch a.Type {
	case "move":
		if len(a.Keys) > 0 {
			return nil, "", fmt.Errorf("unsupported: keys cannot be held during a move (%s); use them with a click, drag or scroll", strings.Join(a.Keys, "+"))
		}
		return []computer.Action{{Type: computer.Move, X: &at.X, Y: &at.Y}}, "", nil
	case "scroll":
		if a.ScrollX == nil && a.ScrollY == nil {
			return nil, "", fmt.Errorf("malformed: scroll needs scroll_x and scroll_y")
		}
		out := computer.Action{Type: computer.Scroll, X: &at.X, Y: &at.Y, Modifiers: a.Keys}
		var noteX, noteY string
		if a.ScrollX != nil {
			out.DX, noteX = toolcall.Ticks(*a.ScrollX)
		}
		if a.ScrollY != nil {
			out.DY, noteY = toolcall.Ticks(*a.ScrollY)
		}
		return []computer.Action{out}, max(noteX, noteY), nil
	}
	out := computer.Action{Type: computer.Click, X: &at.X, Y: &at.Y, Count: 1, Modifiers: a.Keys}
	if a.Type == "double_click" {
		out.Count = 2
	}
	switch a.Button {
	case "left", "right", "back", "forward":
		out.Button = computer.Button(a.Button)
	case "wheel":
		out.Button = computer.Middle
	case "":
		out.Button = computer.Left
	default:
		return nil, "", fmt.Errorf("unsupported: there is no button %.40q", a.Button)
	}
	return []computer.Action{out}, "", nil
}
