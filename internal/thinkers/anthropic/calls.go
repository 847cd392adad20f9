package anthropic

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"

	"berth/internal/computer"
	"berth/internal/thinkers/screen"
	"berth/internal/thinkers/toolcall"
)

// input is what a computer call may have, over all versions.
type input struct {
	Action          string    `json:"action"` // of the single tool; a member's name says it
	Coordinate      []float64 `json:"coordinate"`
	StartCoordinate []float64 `json:"start_coordinate"`
	Text            *string   `json:"text"`
	Duration        *float64  `json:"duration"`
	Repeat          *int      `json:"repeat"`
	ScrollDirection string    `json:"scroll_direction"`
	ScrollAmount    *float64  `json:"scroll_amount"`
	Region          []float64 `json:"region"`
}

// takes says which fields each action may have, beside action.
var takes = map[string][]string{
	"screenshot": {}, "cursor_position": {},
	"left_click": {"coordinate", "text"}, "right_click": {"coordinate", "text"}, "middle_click": {"coordinate", "text"},
	"double_click": {"coordinate", "text"}, "triple_click": {"coordinate", "text"},
	"left_click_drag": {"start_coordinate", "coordinate", "text"},
	"mouse_move":      {"coordinate"},
	"left_mouse_down": {"coordinate"}, "left_mouse_up": {"coordinate"},
	"scroll": {"coordinate", "scroll_direction", "scroll_amount", "text"},
	"type":   {"text"}, "key": {"text", "repeat"}, "hold_key": {"text", "duration"},
	"wait": {"duration"}, "zoom": {"region"},
}

// reader understands the calls of one answer, in order. It follows where the
// pointer will be, since a click without a place means there.
type reader struct {
	view screen.View
	at   *computer.Point // nil: nobody knows
}

// call understands one computer call.
func (r *reader) call(id, name string, raw json.RawMessage) toolcall.Parsed {
	p := toolcall.Parsed{ID: id, Tool: name}
	in, action, err := decode(name, raw)
	if err != nil {
		p.Err = err
		return p
	}
	p.Tool = action
	switch action {
	case "screenshot":
		p.Look = true
	case "zoom":
		p.Actions, p.Err = r.zoom(in)
	case "key", "hold_key", "type", "wait", "cursor_position":
		p.Actions, p.Err = plain(action, in)
	default:
		p.Actions, p.Note, p.Err = r.mouse(action, in)
	}
	return p
}

// decode reads the input strictly, so that a mistaken field is told and not
// passed over.
func decode(name string, raw json.RawMessage) (input, string, error) {
	var in input
	var present map[string]json.RawMessage
	if err := json.Unmarshal(raw, &present); err != nil || present == nil {
		return in, name, fmt.Errorf("malformed: the input is not a JSON object")
	}
	for k, v := range present {
		if bytes.Equal(bytes.TrimSpace(v), []byte("null")) {
			delete(present, k)
		}
	}
	if err := json.Unmarshal(raw, &in); err != nil {
		return in, name, fmt.Errorf("malformed: %w", err)
	}
	if in.Action != "" {
		name = in.Action
		delete(present, "action")
	}
	fields, ok := takes[name]
	if !ok {
		return in, name, fmt.Errorf("unsupported: there is no action %.80q here", name)
	}
	unknown := make([]string, 0, len(present))
	for k := range present {
		if !slices.Contains(fields, k) {
			unknown = append(unknown, k)
		}
	}
	if len(unknown) > 0 {
		slices.Sort(unknown)
		return in, name, fmt.Errorf("malformed: %s takes no %.80q", name, unknown[0])
	}
	return in, name, nil
}

func (r *reader) point(field string, c []float64) (computer.Point, error) {
	if len(c) != 2 {
		return computer.Point{}, fmt.Errorf("malformed: %s must be [x, y]", field)
	}
	return r.view.Point(c[0], c[1])
}

// place is the coordinate, or where the pointer is.
func (r *reader) place(in input) (computer.Point, error) {
	if in.Coordinate == nil {
		if r.at == nil {
			return computer.Point{}, fmt.Errorf("nobody knows where the pointer is; give a coordinate")
		}
		return *r.at, nil
	}
	return r.point("coordinate", in.Coordinate)
}

func (r *reader) mouse(action string, in input) ([]computer.Action, string, error) {
	switch action {
	case "left_click_drag":
		a, err := r.drag(in)
		return a, "", err
	case "left_mouse_down", "left_mouse_up":
		a, err := r.button(action, in)
		return a, "", err
	}
	if action == "mouse_move" && in.Coordinate == nil {
		return nil, "", fmt.Errorf("malformed: mouse_move needs a coordinate")
	}
	at, err := r.place(in)
	if err != nil {
		return nil, "", err
	}
	a := computer.Action{Type: computer.Click, X: &at.X, Y: &at.Y, Button: computer.Left, Count: 1}
	if in.Text != nil {
		a.Modifiers = toolcall.Modifiers(*in.Text)
	}
	note := ""
	switch action {
	case "left_click":
	case "right_click":
		a.Button = computer.Right
	case "middle_click":
		a.Button = computer.Middle
	case "double_click":
		a.Count = 2
	case "triple_click":
		a.Count = 3
	case "mouse_move":
		a = computer.Action{Type: computer.Move, X: a.X, Y: a.Y}
	case "scroll":
		a, note, err = scroll(a, in)
	default:
		err = fmt.Errorf("unsupported: there is no action %q here", action)
	}
	if err != nil {
		return nil, "", err
	}
	r.at = &at
	return []computer.Action{a}, note, nil
}

func scroll(a computer.Action, in input) (computer.Action, string, error) {
	out := computer.Action{Type: computer.Scroll, X: a.X, Y: a.Y, Modifiers: a.Modifiers}
	if in.ScrollAmount == nil || *in.ScrollAmount < 0 {
		return out, "", fmt.Errorf("malformed: scroll_amount must be a number of ticks, 0 or more")
	}
	ticks, note := toolcall.Clamp(*in.ScrollAmount)
	switch in.ScrollDirection {
	case "up":
		out.DY = -ticks
	case "down":
		out.DY = ticks
	case "left":
		out.DX = -ticks
	case "right":
		out.DX = ticks
	default:
		return out, "", fmt.Errorf("malformed: scroll_direction must be up, down, left or right")
	}
	return out, note, nil
}

func (r *reader) drag(in input) ([]computer.Action, error) {
	if in.Coordinate == nil {
		return nil, fmt.Errorf("malformed: left_click_drag needs a coordinate")
	}
	start, err := r.place(input{Coordinate: in.StartCoordinate})
	if err != nil {
		return nil, err
	}
	end, err := r.point("coordinate", in.Coordinate)
	if err != nil {
		return nil, err
	}
	a := computer.Action{Type: computer.Drag, Path: []computer.Point{start, end}, Button: computer.Left}
	if in.Text != nil {
		a.Modifiers = toolcall.Modifiers(*in.Text)
	}
	r.at = &end
	return []computer.Action{a}, nil
}

// button presses or releases, after moving where a place is given.
func (r *reader) button(action string, in input) ([]computer.Action, error) {
	var out []computer.Action
	if in.Coordinate != nil {
		at, err := r.point("coordinate", in.Coordinate)
		if err != nil {
			return nil, err
		}
		out = append(out, computer.Action{Type: computer.Move, X: &at.X, Y: &at.Y})
		r.at = &at
	}
	t := computer.MouseDown
	if action == "left_mouse_up" {
		t = computer.MouseUp
	}
	return append(out, computer.Action{Type: t, Button: computer.Left}), nil
}

func (r *reader) zoom(in input) ([]computer.Action, error) {
	if len(in.Region) != 4 {
		return nil, fmt.Errorf("malformed: region must be [x0, y0, x1, y1]")
	}
	rect, err := r.view.Rect(in.Region[0], in.Region[1], in.Region[2], in.Region[3])
	if err != nil {
		return nil, err
	}
	return []computer.Action{{Type: computer.Zoom, Region: &rect}}, nil
}

// plain are the actions without a place.
func plain(action string, in input) ([]computer.Action, error) {
	text := func() (string, error) {
		if in.Text == nil {
			return "", fmt.Errorf("malformed: %s needs text", action)
		}
		return *in.Text, nil
	}
	switch action {
	case "cursor_position":
		return []computer.Action{{Type: computer.Cursor}}, nil
	case "wait":
		if in.Duration == nil {
			return nil, fmt.Errorf("malformed: wait needs a duration")
		}
		return []computer.Action{{Type: computer.Wait, Seconds: in.Duration}}, nil
	case "type":
		t, err := text()
		if err != nil {
			return nil, err
		}
		return []computer.Action{{Type: computer.TypeText, Text: &t}}, nil
	}
	t, err := text()
	if err != nil {
		return nil, err
	}
	chords, err := toolcall.Chords(t)
	if err != nil {
		return nil, fmt.Errorf("malformed: %w", err)
	}
	if action == "hold_key" {
		if in.Duration == nil || len(chords) != 1 {
			return nil, fmt.Errorf("malformed: hold_key needs one key or combination and a duration")
		}
		return []computer.Action{{Type: computer.Hold, Keys: chords[0], Seconds: in.Duration}}, nil
	}
	repeat := 1
	if in.Repeat != nil {
		repeat = *in.Repeat
	}
	if repeat < 1 || repeat > computer.MaxRepeat {
		return nil, fmt.Errorf("malformed: repeat must be 1 to %d", computer.MaxRepeat)
	}
	if len(chords) == 1 {
		return []computer.Action{{Type: computer.Key, Keys: chords[0], Repeat: repeat}}, nil
	}
	var out []computer.Action
	for range repeat {
		for _, c := range chords {
			out = append(out, computer.Action{Type: computer.Key, Keys: slices.Clone(c), Repeat: 1})
		}
	}
	return out, nil
}
