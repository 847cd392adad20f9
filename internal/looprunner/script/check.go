package script

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"image"
	_ "image/png" // what FRAMES holds
	"strconv"
	"strings"

	"berth/internal/computer"
)

// seen is what checks look at.
type seen struct {
	observation computer.Observation
	dialogs     []computer.Dialog
	downloads   []computer.Download
	value       json.RawMessage // the last action's answer, or nil
	frame       func(ctx context.Context, object string) ([]byte, error)
}

// eval says whether a check holds, and what was seen. The error is one of
// fetching or reading the picture.
func (c *Check) eval(ctx context.Context, s seen) (ok bool, got string, err error) {
	switch c.Kind {
	case Title:
		return c.match(s.observation.Title), quote(s.observation.Title), nil
	case URL:
		return c.match(s.observation.URL), quote(s.observation.URL), nil
	case Value:
		text, has := valueText(s.value)
		if !has {
			return false, "no answer", nil
		}
		return c.match(text), quote(text), nil
	case Dialog:
		all := make([]string, len(s.dialogs))
		for i, d := range s.dialogs {
			all[i] = d.Message
		}
		ok, got = c.any(all, "dialog")
		return ok, got, nil
	case Download:
		all := make([]string, len(s.downloads))
		for i, d := range s.downloads {
			all[i] = d.Name
		}
		ok, got = c.any(all, "download")
		return ok, got, nil
	case Pages:
		n := len(s.observation.Pages)
		return n == c.Count, strconv.Itoa(n), nil
	default:
		return c.pixel(ctx, s)
	}
}

func (c *Check) match(text string) bool {
	switch {
	case c.Equals != nil:
		return text == *c.Equals
	case c.Contains != nil:
		return strings.Contains(text, *c.Contains)
	default:
		return c.Matches.MatchString(text)
	}
}

func (c *Check) any(all []string, what string) (bool, string) {
	if len(all) == 0 {
		return false, "no " + what
	}
	got := make([]string, len(all))
	held := false
	for i, text := range all {
		held = held || c.match(text)
		got[i] = quote(text)
	}
	return held, strings.Join(got, ", ")
}

// pixel reads the picture that the observation names.
func (c *Check) pixel(ctx context.Context, s seen) (bool, string, error) {
	raw, err := s.frame(ctx, s.observation.Screenshot.Object)
	if err != nil {
		return false, "", err
	}
	img, _, err := image.Decode(bytes.NewReader(raw))
	if err != nil {
		return false, "", fmt.Errorf("picture %s: %w", s.observation.Screenshot.Object, err)
	}
	p := image.Pt(c.X, c.Y).Add(img.Bounds().Min)
	if !p.In(img.Bounds()) {
		return false, fmt.Sprintf("a picture of %d×%d", img.Bounds().Dx(), img.Bounds().Dy()), nil
	}
	r, g, b, _ := img.At(p.X, p.Y).RGBA()
	rgb := [3]uint8{uint8(r >> 8), uint8(g >> 8), uint8(b >> 8)}
	ok := true
	for i := range rgb {
		d := int(rgb[i]) - int(c.Color[i])
		ok = ok && max(d, -d) <= c.Tolerance
	}
	return ok, hexColor(rgb), nil
}

// want describes what a check expects.
func (c *Check) want() string {
	switch {
	case c.Kind == Pixel:
		return fmt.Sprintf("%s ±%d at %d,%d", hexColor(c.Color), c.Tolerance, c.X, c.Y)
	case c.Kind == Pages:
		return strconv.Itoa(c.Count)
	case c.Equals != nil:
		return "equal to " + quote(*c.Equals)
	case c.Contains != nil:
		return "containing " + quote(*c.Contains)
	default:
		return "matching " + quote(c.Matches.String())
	}
}

// valueText is a JSON string's text, or other JSON in compact form.
func valueText(raw json.RawMessage) (string, bool) {
	if len(raw) == 0 {
		return "", false
	}
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return s, true
	}
	var buf bytes.Buffer
	if json.Compact(&buf, raw) != nil {
		return "", false
	}
	return buf.String(), true
}

func hexColor(c [3]uint8) string { return fmt.Sprintf("#%02x%02x%02x", c[0], c[1], c[2]) }

// quote keeps what was seen readable in one line.
func quote(s string) string {
	const limit = 300
	if len(s) > limit {
		s = strings.ToValidUTF8(s[:limit], "") + "…"
	}
	return strconv.Quote(s)
}
