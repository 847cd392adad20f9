package computer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"sort"
	"strings"
	"unicode/utf8"
)

// Type names an action; it is the JSON field "type".
type Type string

// The actions of the vocabulary.
const (
	Screenshot     Type = "screenshot"
	Zoom           Type = "zoom"
	Click          Type = "click"
	Move           Type = "move"
	Drag           Type = "drag"
	Scroll         Type = "scroll"
	MouseDown      Type = "mouseDown"
	MouseUp        Type = "mouseUp"
	TypeText       Type = "type"
	Key            Type = "key"
	Hold           Type = "hold"
	Wait           Type = "wait"
	Cursor         Type = "cursor"
	Open           Type = "open"
	Run            Type = "run"
	ClipboardRead  Type = "clipboardRead"
	ClipboardWrite Type = "clipboardWrite"
)

// Limits of one command, chosen so that a command and its result fit a 1 MiB
// NATS message and a stuck sandbox is noticed within minutes.
const (
	MaxActions    = 100       // actions in one command
	MaxTextBytes  = 64 << 10  // UTF-8 bytes of `text` or `stdin`
	MaxPath       = 1000      // points of a drag
	MaxTicks      = 100       // wheel ticks of one scroll, each axis
	MaxRepeat     = 100       // repeats of a chord
	MaxKeys       = 10        // keys held together
	MaxWait       = 300.0     // seconds of wait
	MaxHold       = 60.0      // seconds of hold
	MaxRun        = 600.0     // seconds of run
	DefaultRun    = 60.0      // seconds of run when it gives none
	MaxRunOutput  = 64 << 10  // bytes kept of stdout and of stderr, each
	MaxActionsRaw = 512 << 10 // bytes of the JSON array of actions
)

// Button names a mouse button.
type Button string

// The mouse buttons.
const (
	Left    Button = "left"
	Right   Button = "right"
	Middle  Button = "middle"
	Back    Button = "back"
	Forward Button = "forward"
)

var buttons = []Button{Left, Right, Middle, Back, Forward}

// Point is a place on the display in pixels, origin top left.
type Point struct {
	X int `json:"x"`
	Y int `json:"y"`
}

// Rect is a region of the display in pixels.
type Rect struct {
	X      int `json:"x"`
	Y      int `json:"y"`
	Width  int `json:"width"`
	Height int `json:"height"`
}

// Display is the size of a sandbox's screen in pixels.
type Display struct {
	Width  int `json:"width"`
	Height int `json:"height"`
}

// DefaultDisplay is used where a create request names none.
var DefaultDisplay = Display{Width: 1280, Height: 800}

// Validate reports whether a display of this size can be made: 320×200 to
// 3840×2160 pixels.
func (d Display) Validate() error {
	if d.Width < 320 || d.Width > 3840 || d.Height < 200 || d.Height > 2160 {
		return fmt.Errorf("display %d×%d is outside 320×200 to 3840×2160", d.Width, d.Height)
	}
	return nil
}

// Action is one thing to do. Which fields are meaningful depends on Type;
// DecodeActions guarantees that the needed ones are present, no other is, and
// that keys, modifiers and buttons are in their canonical names.
type Action struct {
	Type      Type              `json:"type"`
	X         *int              `json:"x,omitempty"`
	Y         *int              `json:"y,omitempty"`
	Button    Button            `json:"button,omitempty"`    // click, drag, mouseDown, mouseUp; default left
	Count     int               `json:"count,omitempty"`     // click; 1..3, default 1
	Modifiers []string          `json:"modifiers,omitempty"` // click, drag, scroll: Control, Shift, Alt, Meta
	Path      []Point           `json:"path,omitempty"`      // drag; at least two points
	DX        float64           `json:"dx,omitempty"`        // scroll; wheel ticks, positive = right
	DY        float64           `json:"dy,omitempty"`        // scroll; wheel ticks, positive = down
	Text      *string           `json:"text,omitempty"`      // type, clipboardWrite
	Keys      []string          `json:"keys,omitempty"`      // key, hold: one chord, W3C names
	Repeat    int               `json:"repeat,omitempty"`    // key; default 1
	Seconds   *float64          `json:"seconds,omitempty"`   // hold, wait, run
	Region    *Rect             `json:"region,omitempty"`    // zoom
	Target    string            `json:"target,omitempty"`    // open: URL, or a file in the sandbox
	Argv      []string          `json:"argv,omitempty"`      // run
	Cwd       string            `json:"cwd,omitempty"`       // run
	Env       map[string]string `json:"env,omitempty"`       // run
	Stdin     string            `json:"stdin,omitempty"`     // run
}

// Point returns the action's x,y. It must only be called for click, move and
// scroll, whose x and y DecodeActions has required.
func (a Action) Point() Point { return Point{X: *a.X, Y: *a.Y} }

// Duration returns Seconds, or def where the action gives none.
func (a Action) Duration(def float64) float64 {
	if a.Seconds == nil {
		return def
	}
	return *a.Seconds
}

type fields struct{ required, optional []string }

// vocabulary says which fields each action needs and may have, beside "type".
var vocabulary = map[Type]fields{
	Screenshot:     {},
	Zoom:           {required: []string{"region"}},
	Click:          {required: []string{"x", "y"}, optional: []string{"button", "count", "modifiers"}},
	Move:           {required: []string{"x", "y"}},
	Drag:           {required: []string{"path"}, optional: []string{"button", "modifiers"}},
	Scroll:         {required: []string{"x", "y"}, optional: []string{"dx", "dy", "modifiers"}},
	MouseDown:      {optional: []string{"button"}},
	MouseUp:        {optional: []string{"button"}},
	TypeText:       {required: []string{"text"}},
	Key:            {required: []string{"keys"}, optional: []string{"repeat"}},
	Hold:           {required: []string{"keys", "seconds"}},
	Wait:           {required: []string{"seconds"}},
	Cursor:         {},
	Open:           {required: []string{"target"}},
	Run:            {required: []string{"argv"}, optional: []string{"cwd", "env", "stdin", "seconds"}},
	ClipboardRead:  {},
	ClipboardWrite: {required: []string{"text"}},
}

// Types lists the vocabulary in alphabetical order.
func Types() []Type {
	out := make([]Type, 0, len(vocabulary))
	for t := range vocabulary {
		out = append(out, t)
	}
	slices.Sort(out)
	return out
}

// Requires names the capability that a server must declare to run actions of
// this type, or "" where every sandbox can.
func (t Type) Requires() string {
	switch t {
	case Run:
		return "shell"
	case ClipboardRead, ClipboardWrite:
		return "clipboard"
	default:
		return ""
	}
}

// Codes of an InvalidError.
const (
	CodeBadInput   = "badInput"   // malformed, missing, unknown or negative field
	CodeUnknownKey = "unknownKey" // a key that has no name here
	CodeOutOfRange = "outOfRange" // a coordinate outside the display
	CodeTooLarge   = "tooLarge"   // over one of the limits above
)

// InvalidError says which action and field of a command is at fault. Nothing
// of a command that has one may run.
type InvalidError struct {
	Code    string // one of the codes above
	Index   int    // position of the action in the command, from 0; -1: the command itself
	Field   string // JSON field, or ""
	Message string
}

func (e *InvalidError) Error() string {
	var b strings.Builder
	if e.Index >= 0 {
		fmt.Fprintf(&b, "action %d", e.Index)
	} else {
		b.WriteString("actions")
	}
	if e.Field != "" {
		fmt.Fprintf(&b, ", field %q", e.Field)
	}
	return b.String() + ": " + e.Message
}

// DecodeActions parses a JSON array of actions strictly: an unknown type, an
// unknown, missing or superfluous field, a negative time, an unknown key, or
// anything over a limit is an *InvalidError, and then no action is returned.
// The actions come back normalised. Coordinates still need CheckBounds.
func DecodeActions(raw []byte) ([]Action, error) {
	if len(raw) > MaxActionsRaw {
		return nil, &InvalidError{CodeTooLarge, -1, "", fmt.Sprintf("%d bytes of actions, at most %d", len(raw), MaxActionsRaw)}
	}
	var items []json.RawMessage
	if err := strictUnmarshal(raw, &items); err != nil {
		return nil, &InvalidError{CodeBadInput, -1, "", "not a JSON array of actions: " + brief(err.Error())}
	}
	if len(items) == 0 {
		return nil, &InvalidError{CodeBadInput, -1, "", "a command needs at least one action"}
	}
	if len(items) > MaxActions {
		return nil, &InvalidError{CodeTooLarge, -1, "", fmt.Sprintf("%d actions in one command, at most %d", len(items), MaxActions)}
	}
	out := make([]Action, len(items))
	for i, item := range items {
		a, err := decodeAction(item)
		if err != nil {
			err.Index = i
			return nil, err
		}
		out[i] = a
	}
	return out, nil
}

// Normalize validates actions that were made in Go rather than decoded, by
// the same rules as DecodeActions.
func Normalize(actions []Action) ([]Action, error) {
	raw, err := json.Marshal(actions)
	if err != nil {
		return nil, fmt.Errorf("encode actions: %w", err)
	}
	return DecodeActions(raw)
}

func decodeAction(raw json.RawMessage) (Action, *InvalidError) {
	bad := func(field, format string, args ...any) (Action, *InvalidError) {
		return Action{}, &InvalidError{CodeBadInput, 0, field, fmt.Sprintf(format, args...)}
	}
	var present map[string]json.RawMessage
	if err := json.Unmarshal(raw, &present); err != nil || present == nil {
		return bad("", `an action is an object with a field "type"`)
	}
	var typ Type
	if t, ok := present["type"]; !ok || json.Unmarshal(t, &typ) != nil {
		return bad("type", "missing, or not a string")
	}
	spec, ok := vocabulary[typ]
	if !ok {
		return bad("type", "unknown action %q; known are %s", brief(string(typ)), joinTypes())
	}
	var unknown []string
	for name := range present {
		if name != "type" && !slices.Contains(spec.required, name) && !slices.Contains(spec.optional, name) {
			unknown = append(unknown, name)
		}
	}
	if len(unknown) > 0 {
		sort.Strings(unknown)
		return bad(brief(unknown[0]), "unknown field of action %q; it has %s", typ, describeFields(spec))
	}
	for _, name := range spec.required {
		if v, ok := present[name]; !ok || bytes.Equal(bytes.TrimSpace(v), []byte("null")) {
			return bad(name, "action %q needs it", typ)
		}
	}
	var a Action
	if err := json.Unmarshal(raw, &a); err != nil {
		var te *json.UnmarshalTypeError
		if errors.As(err, &te) {
			return bad(te.Field, "a JSON %s does not fit here", te.Value)
		}
		return bad("", "%s", brief(err.Error()))
	}
	if err := a.normalize(present); err != nil {
		return Action{}, err
	}
	return a, nil
}

// normalize fills defaults, canonicalises names and checks limits.
func (a *Action) normalize(present map[string]json.RawMessage) *InvalidError {
	spec := vocabulary[a.Type]
	has := func(f string) bool { return slices.Contains(spec.required, f) || slices.Contains(spec.optional, f) }
	if has("button") {
		if a.Button == "" {
			a.Button = Left
		}
		if !slices.Contains(buttons, a.Button) {
			return &InvalidError{CodeBadInput, 0, "button", fmt.Sprintf("unknown button %q; known are left, right, middle, back, forward", brief(string(a.Button)))}
		}
	}
	if has("count") {
		if _, given := present["count"]; !given {
			a.Count = 1
		}
		if a.Count < 1 || a.Count > 3 {
			return &InvalidError{CodeBadInput, 0, "count", "1, 2 or 3"}
		}
	}
	if len(a.Modifiers) == 0 {
		a.Modifiers = nil
	}
	if len(a.Env) == 0 {
		a.Env = nil
	}
	for i, m := range a.Modifiers {
		key, err := CanonicalKey(m)
		if err != nil || !IsModifier(key) {
			return &InvalidError{CodeUnknownKey, 0, "modifiers", fmt.Sprintf("%q is no modifier; known are Control, Shift, Alt, Meta", brief(m))}
		}
		a.Modifiers[i] = key
	}
	if has("keys") {
		if len(a.Keys) == 0 || len(a.Keys) > MaxKeys {
			return &InvalidError{CodeBadInput, 0, "keys", fmt.Sprintf("a chord has 1 to %d keys", MaxKeys)}
		}
		for i, k := range a.Keys {
			key, err := CanonicalKey(k)
			if err != nil {
				return &InvalidError{CodeUnknownKey, 0, "keys", err.Error()}
			}
			a.Keys[i] = key
		}
	}
	if has("repeat") {
		if _, given := present["repeat"]; !given {
			a.Repeat = 1
		}
		if a.Repeat < 1 || a.Repeat > MaxRepeat {
			return &InvalidError{CodeBadInput, 0, "repeat", fmt.Sprintf("1 to %d", MaxRepeat)}
		}
	}
	if a.Seconds != nil {
		limit := map[Type]float64{Wait: MaxWait, Hold: MaxHold, Run: MaxRun}[a.Type]
		if s := *a.Seconds; math.IsNaN(s) || s < 0 || s > limit {
			return &InvalidError{CodeBadInput, 0, "seconds", fmt.Sprintf("%v is outside 0 to %v seconds", s, limit)}
		}
	}
	return a.checkContent()
}

func (a *Action) checkContent() *InvalidError {
	tooLarge := func(field string, n, limit int, unit string) *InvalidError {
		return &InvalidError{CodeTooLarge, 0, field, fmt.Sprintf("%d %s, at most %d", n, unit, limit)}
	}
	if a.Text != nil {
		if len(*a.Text) > MaxTextBytes {
			return tooLarge("text", len(*a.Text), MaxTextBytes, "bytes")
		}
		if !utf8.ValidString(*a.Text) || strings.ContainsRune(*a.Text, 0) {
			return &InvalidError{CodeBadInput, 0, "text", "not valid Unicode text without NUL"}
		}
	}
	switch a.Type {
	case Scroll:
		if math.Abs(a.DX) > MaxTicks || math.Abs(a.DY) > MaxTicks {
			return &InvalidError{CodeBadInput, 0, "dy", fmt.Sprintf("dx and dy are wheel ticks, at most %d each way; one tick is about 100 px", MaxTicks)}
		}
	case Drag:
		if len(a.Path) < 2 {
			return &InvalidError{CodeBadInput, 0, "path", "a drag has at least a start and an end"}
		}
		if len(a.Path) > MaxPath {
			return tooLarge("path", len(a.Path), MaxPath, "points")
		}
	case Zoom:
		if a.Region.Width < 1 || a.Region.Height < 1 {
			return &InvalidError{CodeBadInput, 0, "region", "width and height are at least 1 px"}
		}
	case Open:
		if strings.TrimSpace(a.Target) == "" {
			return &InvalidError{CodeBadInput, 0, "target", "empty"}
		}
		if len(a.Target) > 8<<10 {
			return tooLarge("target", len(a.Target), 8<<10, "bytes")
		}
	case Run:
		if len(a.Argv) == 0 || a.Argv[0] == "" {
			return &InvalidError{CodeBadInput, 0, "argv", "needs a program name"}
		}
		if len(a.Stdin) > MaxTextBytes {
			return tooLarge("stdin", len(a.Stdin), MaxTextBytes, "bytes")
		}
	}
	return nil
}

// CheckBounds reports the first action with a coordinate outside the display
// as an *InvalidError with CodeOutOfRange. Coordinates are never clamped.
func CheckBounds(actions []Action, d Display) error {
	inside := func(x, y int) bool { return x >= 0 && y >= 0 && x < d.Width && y < d.Height }
	for i, a := range actions {
		out := func(field string, x, y int) error {
			return &InvalidError{CodeOutOfRange, i, field, fmt.Sprintf("%d,%d is outside the display of %d×%d", x, y, d.Width, d.Height)}
		}
		if a.X != nil && a.Y != nil && !inside(*a.X, *a.Y) {
			return out("x", *a.X, *a.Y)
		}
		for _, p := range a.Path {
			if !inside(p.X, p.Y) {
				return out("path", p.X, p.Y)
			}
		}
		if r := a.Region; r != nil && (!inside(r.X, r.Y) || r.Width > d.Width-r.X || r.Height > d.Height-r.Y) {
			return out("region", r.X+r.Width, r.Y+r.Height)
		}
	}
	return nil
}

// strictUnmarshal decodes one JSON value and refuses trailing text.
func strictUnmarshal(raw []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(raw))
	if err := dec.Decode(v); err != nil {
		return err
	}
	if dec.More() {
		return errors.New("text after the JSON value")
	}
	return nil
}

func joinTypes() string {
	names := make([]string, 0, len(vocabulary))
	for _, t := range Types() {
		names = append(names, string(t))
	}
	return strings.Join(names, ", ")
}

func describeFields(f fields) string {
	all := append(slices.Clone(f.required), f.optional...)
	if len(all) == 0 {
		return "no fields beside type"
	}
	return strings.Join(all, ", ")
}

// brief keeps echoed input short enough for an error message.
func brief(s string) string {
	const limit = 80
	if len(s) <= limit {
		return s
	}
	cut := limit
	for cut > 0 && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + "…"
}
