package replay

import (
	"fmt"
	"math"
	"strings"

	"berth/internal/computer"
)

// mark is one action as it is drawn over a picture, in pixels of the display.
type mark struct {
	N       int    // of the action in its command, from 1
	Kind    string // the action's type
	X, Y    int    // where the pointer is
	Place   bool   // X and Y mean something
	Points  string // a drag's path, or a scroll's shaft: "x,y x,y …"
	Head    string // the arrow's head at its end, likewise
	Region  *computer.Rect
	Caption string // what is typed, pressed or opened
	CX, CY  int    // where the caption is
	Anchor  string // which end of it is there
}

const (
	captionRunes  = 60
	captionLine   = 24 // px between captions
	captionAside  = 20 // px from the pointer
	scrollTick    = 30 // px of arrow per tick, at most scrollLongest
	scrollLongest = 200.0
	headLength    = 16.0
)

// marks draws a command's actions. The pointer begins where the observation
// has it, and what goes to the keyboard is written beside it.
func marks(actions []computer.Action, cursor *computer.Point, d computer.Display) []mark {
	at := computer.Point{X: d.Width / 2, Y: d.Height / 2}
	if cursor != nil {
		at = clampPoint(*cursor, d)
	}
	below := 0 // captions at this place so far
	out := make([]mark, 0, len(actions))
	for i, a := range actions {
		m := mark{N: i + 1, Kind: string(a.Type), Region: a.Region}
		moved := at
		switch {
		case a.Type == computer.Drag && len(a.Path) > 1:
			m.Place, m.X, m.Y = true, a.Path[0].X, a.Path[0].Y
			m.Points = points(a.Path)
			m.Head = head(a.Path[len(a.Path)-2], a.Path[len(a.Path)-1])
			moved = a.Path[len(a.Path)-1]
		case a.X != nil && a.Y != nil:
			m.Place, m.X, m.Y = true, *a.X, *a.Y
			moved = a.Point()
			if a.Type == computer.Scroll {
				end := scrollEnd(moved, a.DX, a.DY)
				m.Points, m.Head = points([]computer.Point{moved, end}), head(moved, end)
			}
		}
		if moved != at {
			at, below = moved, 0
		}
		if m.Caption = caption(a); m.Caption != "" {
			m.CX, m.CY, m.Anchor = beside(at, below, d)
			below++
		}
		out = append(out, m)
	}
	return out
}

// caption is what the drawing itself does not tell.
func caption(a computer.Action) string {
	s := ""
	switch a.Type {
	case computer.Click:
		s = strings.TrimSuffix(Describe(computer.Action{Type: a.Type, Button: a.Button, Count: a.Count, Modifiers: a.Modifiers}), "click")
		s = strings.TrimSpace(s)
	case computer.Drag:
		s = strings.Join(a.Modifiers, "+")
	case computer.Move, computer.Zoom, computer.Screenshot:
	case computer.Scroll:
		s = fmt.Sprintf("scroll %g,%g", a.DX, a.DY)
	case computer.TypeText:
		if a.Text != nil {
			s = "“" + *a.Text + "”"
		}
	default:
		s = Describe(a)
	}
	r := []rune(strings.Join(strings.Fields(printable(s)), " "))
	if len(r) > captionRunes {
		r = append(r[:captionRunes-1], '…')
	}
	return string(r)
}

// beside finds the n-th caption's place next to the pointer, on the side and
// in the direction that has room.
func beside(at computer.Point, n int, d computer.Display) (x, y int, anchor string) {
	x, anchor = at.X+captionAside, "start"
	if at.X > d.Width*6/10 {
		x, anchor = at.X-captionAside, "end"
	}
	y = at.Y + captionLine*(n+1)
	if at.Y > d.Height*8/10 {
		y = at.Y - captionLine*(n+1)
	}
	return x, min(max(y, captionLine), d.Height-4), anchor
}

func points(path []computer.Point) string {
	parts := make([]string, len(path))
	for i, p := range path {
		parts[i] = fmt.Sprintf("%d,%d", p.X, p.Y)
	}
	return strings.Join(parts, " ")
}

// scrollEnd is where a scroll's arrow ends: in the direction of the wheel.
func scrollEnd(at computer.Point, dx, dy float64) computer.Point {
	length := math.Hypot(dx, dy) * scrollTick
	if length == 0 {
		return at
	}
	k := scrollTick * math.Min(1, scrollLongest/length)
	return computer.Point{X: at.X + int(math.Round(dx*k)), Y: at.Y + int(math.Round(dy*k))}
}

// head is the triangle at the end of an arrow; "" where it has no direction.
func head(from, to computer.Point) string {
	dx, dy := float64(to.X-from.X), float64(to.Y-from.Y)
	length := math.Hypot(dx, dy)
	if length == 0 {
		return ""
	}
	ux, uy := dx/length*headLength, dy/length*headLength
	x, y := float64(to.X), float64(to.Y)
	return fmt.Sprintf("%d,%d %.0f,%.0f %.0f,%.0f", to.X, to.Y, x-ux-uy/2, y-uy+ux/2, x-ux+uy/2, y-uy-ux/2)
}

func clampPoint(p computer.Point, d computer.Display) computer.Point {
	return computer.Point{X: min(max(p.X, 0), d.Width-1), Y: min(max(p.Y, 0), d.Height-1)}
}

// printable makes control characters visible, and those that turn the
// direction of text, so that no text is shown as another.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\n' || r == '\t':
			return r
		case r < 0x20:
			return 0x2400 + r
		case r == 0x7f:
			return 0x2421
		case r >= 0x80 && r < 0xa0, r >= 0x202a && r <= 0x202e, r >= 0x2066 && r <= 0x2069, r == 0x200e, r == 0x200f:
			return 0xfffd
		}
		return r
	}, s)
}
