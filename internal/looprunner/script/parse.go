package script

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
)

// Bounds of a script.
const (
	MaxItems      = 10000
	MaxWithin     = 300.0 // seconds
	DefaultWithin = 5.0
	maxName       = 200
)

// Script is a parsed script. It is immutable.
type Script []Item

// Item is one action or one check.
type Item struct {
	Name            string
	Action          *computer.Action // nil: a check
	UnknownContinue bool             // an action whose outcome is unknown does not end the loop
	Check           *Check
}

// Kind of a check.
type Kind string

// The checks.
const (
	Title    Kind = "title"
	URL      Kind = "url"
	Pixel    Kind = "pixel"
	Value    Kind = "value"
	Dialog   Kind = "dialog"
	Download Kind = "download"
	Pages    Kind = "pages"
)

// Check is one check. The matcher is one of Equals, Contains and Matches, for
// pixel the place and colour, for pages the count.
type Check struct {
	Kind      Kind
	Equals    *string
	Contains  *string
	Matches   *regexp.Regexp
	X, Y      int
	Color     [3]uint8
	Tolerance int
	Count     int
	Within    time.Duration
}

// rawCheck is a check as it is written.
type rawCheck struct {
	Check     Kind     `json:"check"`
	Name      string   `json:"name"`
	Equals    *string  `json:"equals"`
	Contains  *string  `json:"contains"`
	Matches   *string  `json:"matches"`
	X         *int     `json:"x"`
	Y         *int     `json:"y"`
	Color     *string  `json:"color"`
	Tolerance *int     `json:"tolerance"`
	Count     *int     `json:"count"`
	Within    *float64 `json:"within"`
}

// checkFields says which fields each check may have, beside check and name.
var checkFields = map[Kind][]string{
	Title:    {"equals", "contains", "matches", "within"},
	URL:      {"equals", "contains", "matches", "within"},
	Value:    {"equals", "contains", "matches"},
	Dialog:   {"equals", "contains", "matches", "within"},
	Download: {"equals", "contains", "matches", "within"},
	Pixel:    {"x", "y", "color", "tolerance", "within"},
	Pages:    {"count", "within"},
}

// Parse reads a script and checks all of it. The error is an
// *events.DataError that names the item at fault by its index, from 0.
func Parse(raw json.RawMessage) (Script, error) {
	var items []json.RawMessage
	dec := json.NewDecoder(bytes.NewReader(raw))
	if err := dec.Decode(&items); err != nil {
		return nil, events.BadInput("script: not a JSON array of items: %v", err)
	}
	if dec.More() {
		return nil, events.BadInput("script: text after the JSON array")
	}
	if len(items) == 0 {
		return nil, events.BadInput("script: needs at least one item")
	}
	if len(items) > MaxItems {
		return nil, &events.DataError{Code: events.CodeTooLarge, Message: fmt.Sprintf("script: %d items, at most %d", len(items), MaxItems)}
	}
	out := make(Script, len(items))
	for i, item := range items {
		it, err := parseItem(item)
		if err != nil {
			return nil, at(i, err)
		}
		out[i] = it
	}
	return out, nil
}

// CheckBounds returns a *events.DataError for the first item with a place
// outside the display.
func (s Script) CheckBounds(d computer.Display) error {
	for i, it := range s {
		if c := it.Check; c != nil && c.Kind == Pixel && (c.X >= d.Width || c.Y >= d.Height) {
			return at(i, &events.DataError{Code: events.CodeOutOfRange,
				Message: fmt.Sprintf("%d,%d is outside the display of %d×%d", c.X, c.Y, d.Width, d.Height)})
		}
		if it.Action != nil {
			if err := computer.CheckBounds([]computer.Action{*it.Action}, d); err != nil {
				return at(i, err)
			}
		}
	}
	return nil
}

// at says which item an error is about.
func at(i int, err error) error {
	code, message := events.CodeBadInput, err.Error()
	var d *events.DataError
	var a *computer.InvalidError
	switch {
	case errors.As(err, &d):
		code = d.Code
	case errors.As(err, &a):
		code, message = a.Code, a.Message
		if a.Field != "" {
			message = fmt.Sprintf("field %q: %s", a.Field, a.Message)
		}
	}
	return &events.DataError{Code: code, Message: fmt.Sprintf("script item %d: %s", i, message)}
}

func parseItem(raw json.RawMessage) (Item, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil || fields == nil {
		return Item{}, events.BadInput(`an item is an object with a field "type" (an action) or "check"`)
	}
	if _, ok := fields["check"]; ok {
		return parseCheck(raw, fields)
	}
	return parseAction(fields)
}

func parseAction(fields map[string]json.RawMessage) (Item, error) {
	var it Item
	if raw, ok := fields["name"]; ok {
		if json.Unmarshal(raw, &it.Name) != nil || len(it.Name) > maxName {
			return it, events.BadInput("field %q: a string of at most %d bytes", "name", maxName)
		}
		delete(fields, "name")
	}
	if raw, ok := fields["unknown"]; ok {
		var mode string
		if json.Unmarshal(raw, &mode) != nil || (mode != "fail" && mode != "continue") {
			return it, events.BadInput(`field "unknown": "fail" or "continue"`)
		}
		it.UnknownContinue = mode == "continue"
		delete(fields, "unknown")
	}
	raw, err := json.Marshal([]any{fields})
	if err != nil {
		return it, events.BadInput("%v", err)
	}
	actions, err := computer.DecodeActions(raw)
	if err != nil {
		return it, err
	}
	it.Action = &actions[0]
	return it, nil
}

func parseCheck(raw json.RawMessage, fields map[string]json.RawMessage) (Item, error) {
	var c rawCheck
	if err := json.Unmarshal(fields["check"], &c.Check); err != nil {
		return Item{}, events.BadInput(`field "check": not a string`)
	}
	allowed, ok := checkFields[c.Check]
	if !ok {
		return Item{}, events.BadInput("field \"check\": unknown check %q; known are dialog, download, pages, pixel, title, url, value", clip(string(c.Check)))
	}
	var unknown []string
	for f := range fields {
		if f != "check" && f != "name" && !slices.Contains(allowed, f) {
			unknown = append(unknown, f)
		}
	}
	if len(unknown) > 0 {
		slices.Sort(unknown)
		return Item{}, events.BadInput("field %q: check %q has no such field; it has %s", clip(unknown[0]), c.Check, strings.Join(allowed, ", "))
	}
	if err := json.Unmarshal(raw, &c); err != nil {
		var te *json.UnmarshalTypeError
		if errors.As(err, &te) {
			return Item{}, events.BadInput("field %q: a JSON %s does not fit here", te.Field, te.Value)
		}
		return Item{}, events.BadInput("%v", err)
	}
	if len(c.Name) > maxName {
		return Item{}, events.BadInput("field %q: a string of at most %d bytes", "name", maxName)
	}
	out, err := c.compile()
	return Item{Name: c.Name, Check: out}, err
}

func (c rawCheck) compile() (*Check, error) {
	out := &Check{Kind: c.Check, Within: events.Seconds(DefaultWithin)}
	if c.Within != nil {
		if s := *c.Within; math.IsNaN(s) || s < 0 || s > MaxWithin {
			return nil, events.BadInput("field %q: %v is outside 0 to %v seconds", "within", s, MaxWithin)
		}
		out.Within = events.Seconds(*c.Within)
	}
	switch c.Check {
	case Pixel:
		return out, c.compilePixel(out)
	case Pages:
		if c.Count == nil || *c.Count < 0 {
			return nil, events.BadInput("field %q: check pages needs it, 0 or more", "count")
		}
		out.Count = *c.Count
		return out, nil
	case Value:
		out.Within = 0
	}
	n := 0
	for _, m := range []*string{c.Equals, c.Contains, c.Matches} {
		if m != nil {
			n++
		}
	}
	if n != 1 {
		return nil, events.BadInput("check %q needs exactly one of equals, contains, matches", c.Check)
	}
	out.Equals, out.Contains = c.Equals, c.Contains
	if c.Matches != nil {
		re, err := regexp.Compile(*c.Matches)
		if err != nil {
			return nil, events.BadInput("field %q: %v", "matches", err)
		}
		out.Matches = re
	}
	return out, nil
}

func (c rawCheck) compilePixel(out *Check) error {
	if c.X == nil || c.Y == nil || *c.X < 0 || *c.Y < 0 {
		return events.BadInput("check pixel needs x and y, 0 or more")
	}
	if c.Color == nil {
		return events.BadInput("field %q: check pixel needs it", "color")
	}
	hex, ok := strings.CutPrefix(*c.Color, "#")
	n, err := strconv.ParseUint(hex, 16, 32)
	if !ok || len(hex) != 6 || err != nil {
		return events.BadInput("field %q: %q is not #rrggbb", "color", clip(*c.Color))
	}
	out.X, out.Y, out.Tolerance = *c.X, *c.Y, 8
	out.Color = [3]uint8{uint8(n >> 16), uint8(n >> 8), uint8(n)}
	if c.Tolerance != nil {
		if *c.Tolerance < 0 || *c.Tolerance > 255 {
			return events.BadInput("field %q: 0 to 255", "tolerance")
		}
		out.Tolerance = *c.Tolerance
	}
	return nil
}

// clip keeps echoed input short.
func clip(s string) string {
	if len(s) > 80 {
		return strings.ToValidUTF8(s[:80], "") + "…"
	}
	return s
}
