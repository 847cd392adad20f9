package demoapp

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// Event is a DOM event as the page saw it. Button, Detail and the modifiers
// are those of the event; DX and DY are wheel pixels, positive = right and
// down; Text is a field's whole value after an input event.
type Event struct {
	Kind    string    `json:"kind"`
	Target  string    `json:"target,omitempty"`
	Key     string    `json:"key,omitempty"`
	Code    string    `json:"code,omitempty"`
	Repeat  bool      `json:"repeat,omitempty"`
	Button  int       `json:"button,omitempty"`
	Detail  int       `json:"detail,omitempty"`
	Mods    []string  `json:"mods,omitempty"`
	X       int       `json:"x,omitempty"`
	Y       int       `json:"y,omitempty"`
	DX      float64   `json:"dx,omitempty"`
	DY      float64   `json:"dy,omitempty"`
	Text    string    `json:"text,omitempty"`
	Trusted bool      `json:"trusted"` // by the browser: an input device, not a page's script
	At      time.Time `json:"at"`      // when the server got it
}

// EventsState counts since the page was cleared, and keeps the latest events.
// Only trusted events count.
type EventsState struct {
	Count   int      `json:"count"`   // events that arrived
	Dropped int      `json:"dropped"` // of these, no longer in Log
	Click   int      `json:"click"`   // plain left clicks on target click
	Single  int      `json:"single"`  // plain left clicks on target double
	Double  int      `json:"double"`  // double clicks on target double
	Right   int      `json:"right"`   // right clicks on target right
	Shift   int      `json:"shift"`   // left clicks with Shift on target shift
	Stray   int      `json:"stray"`   // other clicks on these four
	WheelX  float64  `json:"wheelX"`  // pixels over target wheel
	WheelY  float64  `json:"wheelY"`
	Chord   string   `json:"chord"`  // the last chord with Control, Alt or Meta
	Chords  int      `json:"chords"` // how often wantChord came
	Text    string   `json:"text"`   // the text field's value
	Held    []string `json:"held"`   // keys down now, as KeyboardEvent.code
	Log     []Event  `json:"log"`
}

// What the page asks for.
const (
	wantChord = "Control+Shift+K"
	wantText  = "ahoy, Zoë 😀"
)

// One wheel tick is about 100 pixels and some browsers scroll half as far, so
// three ticks down are accepted in this range; six are not.
const (
	minWheel = 120
	maxWheel = 480
)

const maxHeld = 16

var (
	eventKinds   = []string{"keydown", "keyup", "mousedown", "mouseup", "click", "auxclick", "contextmenu", "dblclick", "wheel", "input", "blur"}
	eventTargets = []string{"click", "double", "right", "shift", "wheel", "keys", "text", "page"}
	modifiers    = []string{"Control", "Alt", "Shift", "Meta"}
)

func newEvents() EventsState { return EventsState{Held: []string{}, Log: []Event{}} }

func (e *Event) validate() error {
	if !slices.Contains(eventKinds, e.Kind) {
		return fmt.Errorf("field %q: unknown; known are %s", "kind", strings.Join(eventKinds, ", "))
	}
	if e.Target == "" {
		e.Target = "page"
	}
	if !slices.Contains(eventTargets, e.Target) {
		return fmt.Errorf("field %q: unknown; known are %s", "target", strings.Join(eventTargets, ", "))
	}
	for _, m := range e.Mods {
		if !slices.Contains(modifiers, m) {
			return fmt.Errorf("field %q: unknown; known are %s", "mods", strings.Join(modifiers, ", "))
		}
	}
	switch {
	case len(e.Mods) > len(modifiers):
		return fmt.Errorf("field %q: at most %d", "mods", len(modifiers))
	case len(e.Key) > 40 || len(e.Code) > 40:
		return fmt.Errorf("field %q: at most 40 bytes", "key")
	case len(e.Text) > 1000:
		return fmt.Errorf("field %q: %d bytes, at most 1000", "text", len(e.Text))
	case e.Button < 0 || e.Button > 4:
		return fmt.Errorf("field %q: 0 to 4", "button")
	case e.Detail < 0 || e.Detail > 1000:
		return fmt.Errorf("field %q: 0 to 1000", "detail")
	case math.Abs(e.DX) > 1e6 || math.Abs(e.DY) > 1e6:
		return fmt.Errorf("field %q: at most 1000000 pixels each way", "dy")
	}
	return nil
}

// add records one validated event.
func (s *EventsState) add(e Event) {
	s.Count++
	s.Log = append(s.Log, e)
	if extra := len(s.Log) - maxEvents; extra > 0 {
		s.Log = slices.Delete(s.Log, 0, extra)
		s.Dropped += extra
	}
	if !e.Trusted {
		return
	}
	switch e.Kind {
	case "click", "auxclick", "contextmenu":
		s.addClick(e)
	case "dblclick":
		if e.Target == "double" {
			s.Double++
		}
	case "wheel":
		if e.Target == "wheel" {
			s.WheelX += e.DX
			s.WheelY += e.DY
		}
	case "input":
		if e.Target == "text" {
			s.Text = e.Text
		}
	case "keydown":
		if len(s.Held) < maxHeld && e.Code != "" && !slices.Contains(s.Held, e.Code) {
			s.Held = append(s.Held, e.Code)
		}
		if c := chord(e); c != "" && !e.Repeat {
			s.Chord = c
			if c == wantChord {
				s.Chords++
			}
		}
	case "keyup":
		s.Held = slices.DeleteFunc(s.Held, func(c string) bool { return c == e.Code })
	case "blur": // the page can not see a key-up any more
		s.Held = s.Held[:0]
	}
}

// addClick counts a click on one of the four targets. A right click comes as
// auxclick and contextmenu; the first counts.
func (s *EventsState) addClick(e Event) {
	if e.Kind == "contextmenu" {
		return
	}
	mods := strings.Join(e.Mods, "+")
	switch {
	case e.Target == "click" && e.Button == 0 && mods == "":
		s.Click++
	case e.Target == "double" && e.Button == 0 && mods == "":
		s.Single++
	case e.Target == "right" && e.Button == 2 && mods == "":
		s.Right++
	case e.Target == "shift" && e.Button == 0 && mods == "Shift":
		s.Shift++
	case slices.Contains([]string{"click", "double", "right", "shift"}, e.Target):
		s.Stray++
	}
}

// chord names a key pressed with Control, Alt or Meta, or "" for anything
// else: letters in upper case, modifiers in one order.
func chord(e Event) string {
	if slices.Contains(modifiers, e.Key) || e.Key == "" {
		return ""
	}
	var names []string
	plain := true
	for _, m := range modifiers {
		if slices.Contains(e.Mods, m) {
			names = append(names, m)
			plain = plain && m == "Shift"
		}
	}
	if plain {
		return ""
	}
	key := e.Key
	if len([]rune(key)) == 1 {
		key = strings.ToUpper(key)
	}
	return strings.Join(append(names, key), "+")
}

// Task is one line of the page's check list.
type Task struct {
	Name   string `json:"name"`
	Status Status `json:"status"`
	Got    string `json:"got"`
}

func (s *EventsState) tasks() []Task {
	once := func(n int) Status {
		switch n {
		case 0:
			return None
		case 1:
			return OK
		}
		return Wrong
	}
	double := once(s.Double)
	if s.Single > 2 {
		double = Wrong
	}
	wheel := None
	switch {
	case s.WheelX != 0 || s.WheelY < 0 || s.WheelY > maxWheel:
		wheel = Wrong
	case s.WheelY >= minWheel:
		wheel = OK
	case s.WheelY > 0:
		wheel = Begun
	}
	text := None
	switch {
	case s.Text == wantText:
		text = OK
	case s.Text != "" && strings.HasPrefix(wantText, s.Text):
		text = Begun
	case s.Text != "":
		text = Wrong
	}
	times := func(n int) string { return fmt.Sprintf("%d×", n) }
	return []Task{
		{"Click once", once(s.Click), times(s.Click)},
		{"Double-click once", double, times(s.Double)},
		{"Right-click once", once(s.Right), times(s.Right)},
		{"Shift-click once", once(s.Shift), times(s.Shift)},
		{"Scroll down three ticks", wheel, fmt.Sprintf("%+.0f px", s.WheelY)},
		{"Press " + wantChord + " once", once(s.Chords), times(s.Chords)},
		{"Type “" + wantText + "”", text, fmt.Sprintf("%d chars", len([]rune(s.Text)))},
	}
}

func (s *EventsState) judge() Part {
	if s.Count == 0 {
		return Part{None, "events: nothing yet", "Nothing arrived yet."}
	}
	or := func(v string) string {
		if v == "" {
			return "none"
		}
		return v
	}
	title := fmt.Sprintf("events: click=%d double=%d right=%d shift=%d wheel=%+.0f chord=%s text=%s held=%s",
		s.Click, s.Double, s.Right, s.Shift, s.WheelY, or(s.Chord), or(inTitle(s.Text)), or(strings.Join(s.Held, "+")))
	done, tasks := 0, s.tasks()
	for _, t := range tasks {
		switch t.Status {
		case Wrong:
			return Part{Wrong, title + " wrong", t.Name + ": got " + t.Got + "."}
		case OK:
			done++
		}
	}
	switch {
	case s.Stray > 0:
		return Part{Wrong, title + " wrong", fmt.Sprintf("%d clicks with another button or modifier than asked.", s.Stray)}
	case done == len(tasks) && len(s.Held) == 0:
		return Part{OK, title + " ok", "Every signal arrived, each exactly once."}
	default:
		return Part{Begun, title, fmt.Sprintf("%d of %d signals arrived.", done, len(tasks))}
	}
}

func (s *EventsState) clone() EventsState {
	out := *s
	out.Held = slices.Clone(s.Held)
	out.Log = slices.Clone(s.Log)
	return out
}
