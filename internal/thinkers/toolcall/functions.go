package toolcall

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"berth/internal/computer"
	"berth/internal/thinkers/screen"
)

// Names of the functions that are no actions.
const (
	AskUser = "askUser"
	GiveUp  = "giveUp"
	Done    = "done"
)

// CodeGaveUp is what a loop ends with whose model called GiveUp.
const CodeGaveUp = "gaveUp"

// Function is a tool that a model is offered by name, description and JSON
// Schema of its arguments, an object.
type Function struct {
	Name        string
	Description string
	Properties  map[string]any
	Required    []string
}

// Schema is the JSON Schema of the arguments.
func (f Function) Schema() map[string]any {
	s := map[string]any{"type": "object", "properties": f.Properties, "additionalProperties": false}
	if len(f.Required) > 0 {
		s["required"] = f.Required
	}
	return s
}

type object = map[string]any

func text(description string) object { return object{"type": "string", "description": description} }
func number(description string) object {
	return object{"type": "number", "description": description}
}
func texts(description string) object {
	return object{"type": "array", "items": object{"type": "string"}, "description": description}
}

// Extras are the functions beside a vendor's own computer tool: what Berth can
// do and that tool cannot.
func Extras(rules Rules) []Function {
	types := []computer.Type{computer.Open, computer.ClipboardRead, computer.ClipboardWrite, computer.Run}
	return append(actions(rules, types, ""), askUser(), giveUp())
}

// All are functions for the whole vocabulary, for models without a computer
// tool. grid describes the coordinates, such as "pixels of the screenshot".
func All(rules Rules, grid string) []Function {
	return append(actions(rules, computer.Types(), grid), askUser(), giveUp(), Function{Name: Done,
		Description: "The goal is reached, and you have seen it on the screen. Ends the work.",
		Properties:  object{"summary": text("what was done, in a sentence or two")}, Required: []string{"summary"}})
}

func actions(rules Rules, types []computer.Type, grid string) []Function {
	var out []Function
	for _, t := range types {
		if rules.May(t) == nil {
			out = append(out, described(t, grid))
		}
	}
	return out
}

func askUser() Function {
	return Function{Name: AskUser, Description: "Ask a person, and wait for the answer. Only for what you cannot find out yourself, or may not decide: payments, consent, passwords, one-time codes.",
		Properties: object{"question": text("the question, with all that the person needs to answer it")}, Required: []string{"question"}}
}

func giveUp() Function {
	return Function{Name: GiveUp, Description: "The goal cannot be reached. Ends the work as failed.",
		Properties: object{"reason": text("why, and what was done so far")}, Required: []string{"reason"}}
}

// described is the function of one action type; its arguments are the
// action's fields.
func described(t computer.Type, grid string) Function {
	x, y := number("from the left, in "+grid), number("from the top, in "+grid)
	modifiers := object{"type": "array", "items": object{"type": "string", "enum": []string{"Control", "Shift", "Alt", "Meta"}}, "description": "held meanwhile"}
	button := object{"type": "string", "enum": []string{"left", "right", "middle", "back", "forward"}, "description": "default left"}
	point := object{"type": "object", "properties": object{"x": x, "y": y}, "required": []string{"x", "y"}, "additionalProperties": false}
	f := Function{Name: string(t)}
	set := func(description string, required []string, properties object) Function {
		f.Description, f.Required, f.Properties = description, required, properties
		return f
	}
	switch t {
	case computer.Screenshot:
		return set("Look at the screen again.", nil, object{})
	case computer.Zoom:
		return set("Look at a region of the screen in full resolution, to read what is small. Coordinates of later actions still mean the whole screen.", []string{"region"},
			object{"region": object{"type": "object", "properties": object{"x": x, "y": y, "width": number("in " + grid), "height": number("in " + grid)},
				"required": []string{"x", "y", "width", "height"}, "additionalProperties": false}})
	case computer.Click:
		return set("Click at a place.", []string{"x", "y"}, object{"x": x, "y": y, "button": button,
			"count": object{"type": "integer", "minimum": 1, "maximum": 3, "description": "2 is a double click; default 1"}, "modifiers": modifiers})
	case computer.Move:
		return set("Move the pointer without clicking.", []string{"x", "y"}, object{"x": x, "y": y})
	case computer.Drag:
		return set("Press the button at the first point, move along the path, release at the last.", []string{"path"},
			object{"path": object{"type": "array", "items": point, "minItems": 2}, "button": button, "modifiers": modifiers})
	case computer.Scroll:
		return set("Turn the mouse wheel at a place. One tick is about 100 pixels.", []string{"x", "y"}, object{"x": x, "y": y,
			"dx": number("ticks, positive to the right"), "dy": number("ticks, positive downwards"), "modifiers": modifiers})
	case computer.MouseDown, computer.MouseUp:
		verb := map[computer.Type]string{computer.MouseDown: "Press", computer.MouseUp: "Release"}[t]
		return set(verb+" a mouse button where the pointer is.", nil, object{"button": button})
	case computer.TypeText:
		return set("Type text where the keyboard focus is, exactly as it stands.", []string{"text"}, object{"text": text("any Unicode; a newline presses Enter")})
	case computer.Key:
		return set("Press keys together, as one chord.", []string{"keys"}, object{"keys": texts(`such as ["Enter"] or ["Control","a"]`),
			"repeat": object{"type": "integer", "minimum": 1, "maximum": computer.MaxRepeat}})
	case computer.Hold:
		return set("Hold keys down for a while.", []string{"keys", "seconds"}, object{"keys": texts("held together"), "seconds": number(fmt.Sprintf("at most %v", computer.MaxHold))})
	case computer.Wait:
		return set("Wait, for something to load.", []string{"seconds"}, object{"seconds": number(fmt.Sprintf("at most %v", computer.MaxWait))})
	case computer.Cursor:
		return set("Where the pointer is.", nil, object{})
	case computer.Open:
		return set("Open a URL in the browser, or a file of the sandbox. The way to reach a page by its address.", []string{"target"}, object{"target": text("a URL with its scheme, or a path")})
	case computer.Run:
		return set("Run a program in the sandbox and get its exit code and output. No shell is between: give the program and its arguments one by one.", []string{"argv"},
			object{"argv": texts("the program and its arguments"), "cwd": text("working directory"), "stdin": text("standard input"),
				"env": object{"type": "object", "additionalProperties": object{"type": "string"}}, "seconds": number(fmt.Sprintf("until it is killed; default %v, at most %v", computer.DefaultRun, computer.MaxRun))})
	case computer.ClipboardRead:
		return set("Read the text in the clipboard.", nil, object{})
	default: // ClipboardWrite
		return set("Put text into the clipboard.", []string{"text"}, object{"text": text("the text")})
	}
}

// Known reports whether name is one of fs.
func Known(fs []Function, name string) bool {
	return slices.ContainsFunc(fs, func(f Function) bool { return f.Name == name })
}

// Parse understands a call of one of fs. Coordinates are led to the display
// by view.
func Parse(fs []Function, id, name string, args []byte, view screen.View) Parsed {
	p := Parsed{ID: id, Tool: name}
	if !Known(fs, name) {
		names := make([]string, len(fs))
		for i, f := range fs {
			names[i] = f.Name
		}
		p.Err = fmt.Errorf("unsupported: there is no tool %q; there are %s", clip(name), strings.Join(names, ", "))
		return p
	}
	if len(bytes.TrimSpace(args)) == 0 {
		args = []byte("{}")
	}
	var fields map[string]any
	if err := json.Unmarshal(args, &fields); err != nil || fields == nil {
		p.Err = fmt.Errorf("malformed: the arguments of %s are not one JSON object", name)
		return p
	}
	switch name {
	case AskUser:
		p.Ask, p.Err = only(fields, "question")
	case GiveUp:
		why, err := only(fields, "reason")
		p.GiveUp, p.Err = &why, err
		if err != nil {
			p.GiveUp = nil
		}
	case Done:
		summary, err := only(fields, "summary")
		p.Done, p.Err = &summary, err
		if err != nil {
			p.Done = nil
		}
	case string(computer.Screenshot):
		p.Look = true
	default:
		p.action(name, fields, view)
	}
	return p
}

// only is the one text that a function takes.
func only(fields map[string]any, name string) (string, error) {
	v, ok := fields[name].(string)
	if !ok || strings.TrimSpace(v) == "" {
		return "", fmt.Errorf("malformed: %s must be a text that is not empty", name)
	}
	if len(fields) > 1 {
		return "", fmt.Errorf("malformed: there is no argument but %s", name)
	}
	return v, nil
}

// action decodes the arguments as the action's fields.
func (p *Parsed) action(name string, fields map[string]any, view screen.View) {
	if err := toDisplay(fields, view); err != nil {
		p.Err = err
		return
	}
	for _, f := range []string{"dx", "dy"} {
		if n, ok := fields[f].(float64); ok && name == string(computer.Scroll) {
			fields[f], p.Note = clampNote(n, p.Note)
		}
	}
	fields["type"] = name
	raw, err := json.Marshal([]any{fields})
	if err != nil {
		p.Err = fmt.Errorf("malformed: %w", err)
		return
	}
	actions, err := computer.DecodeActions(raw)
	if err != nil {
		p.Err = err
		return
	}
	p.Actions = actions
	if name == string(computer.Key) {
		p.Actions[0].Keys = lower(p.Actions[0].Keys)
	}
}

func clampNote(n float64, had string) (float64, string) {
	n, note := Clamp(n)
	return n, nonEmpty(note, had)
}

// toDisplay replaces the coordinates among fields. What is not a number is
// left for the decoder to refuse.
func toDisplay(fields map[string]any, view screen.View) error {
	place := func(o map[string]any) error {
		x, okX := o["x"].(float64)
		y, okY := o["y"].(float64)
		if !okX || !okY {
			return nil
		}
		at, err := view.Point(x, y)
		if err == nil {
			o["x"], o["y"] = at.X, at.Y
		}
		return err
	}
	if r, ok := fields["region"].(map[string]any); ok {
		x, okX := r["x"].(float64)
		y, okY := r["y"].(float64)
		w, okW := r["width"].(float64)
		h, okH := r["height"].(float64)
		if okX && okY && okW && okH {
			rect, err := view.Rect(x, y, x+w, y+h)
			if err != nil {
				return err
			}
			fields["region"] = map[string]any{"x": rect.X, "y": rect.Y, "width": rect.Width, "height": rect.Height}
		}
	}
	if path, ok := fields["path"].([]any); ok {
		for _, item := range path {
			if o, ok := item.(map[string]any); ok {
				if err := place(o); err != nil {
					return err
				}
			}
		}
	}
	return place(fields)
}

// clip keeps echoed input short.
func clip(s string) string {
	if len(s) > 80 {
		return strings.ToValidUTF8(s[:80], "") + "…"
	}
	return s
}
