package screen

import (
	"fmt"
	"math"

	"berth/internal/computer"
)

// View is a display as a model sees it: through a picture of size Sent.
type View struct {
	Sent    Size
	Display computer.Display
	// Inclusive takes a coordinate that equals the size for the last pixel, as
	// models with a scale of 0 to 1000 mean it.
	Inclusive bool
}

// Point leads a place in the picture to the display's pixel under its middle.
// A place outside the picture is a *computer.InvalidError with CodeOutOfRange.
func (v View) Point(x, y float64) (computer.Point, error) {
	px, okX := v.axis(x, v.Sent.Width, v.Display.Width)
	py, okY := v.axis(y, v.Sent.Height, v.Display.Height)
	if !okX || !okY {
		return computer.Point{}, &computer.InvalidError{Code: computer.CodeOutOfRange, Index: -1, Field: "coordinate",
			Message: fmt.Sprintf("%v,%v is outside the screenshot of %d×%d; nothing was clamped", x, y, v.Sent.Width, v.Sent.Height)}
	}
	return computer.Point{X: px, Y: py}, nil
}

func (v View) axis(n float64, sent, display int) (int, bool) {
	limit := float64(sent)
	if v.Inclusive && n == limit {
		return display - 1, true
	}
	if math.IsNaN(n) || n < 0 || n >= limit {
		return 0, false
	}
	if sent == display {
		return int(n), true
	}
	return min(display-1, int((n+0.5)*float64(display)/limit)), true
}

// Rect leads the corners of a region to the display. The lower right corner
// belongs to the region up to, and not with, its own pixel, so it may lie on
// the picture's edge.
func (v View) Rect(x0, y0, x1, y1 float64) (computer.Rect, error) {
	w, h := float64(v.Sent.Width), float64(v.Sent.Height)
	inside := x0 >= 0 && y0 >= 0 && x1 <= w && y1 <= h
	if !inside || x1 <= x0 || y1 <= y0 {
		return computer.Rect{}, &computer.InvalidError{Code: computer.CodeOutOfRange, Index: -1, Field: "region",
			Message: fmt.Sprintf("%v,%v to %v,%v is no region of the screenshot of %d×%d", x0, y0, x1, y1, v.Sent.Width, v.Sent.Height)}
	}
	sx, sy := float64(v.Display.Width)/w, float64(v.Display.Height)/h
	left, top := int(math.Floor(x0*sx)), int(math.Floor(y0*sy))
	right, bottom := int(math.Ceil(x1*sx)), int(math.Ceil(y1*sy))
	return computer.Rect{X: left, Y: top, Width: min(right, v.Display.Width) - left, Height: min(bottom, v.Display.Height) - top}, nil
}

// Shown is where a pixel of the display lies in the picture.
func (v View) Shown(p computer.Point) (x, y int) {
	if v.Display.Width < 1 || v.Display.Height < 1 {
		return p.X, p.Y
	}
	scale := func(n, sent, display int) int {
		return min(max(0, sent-1), int((float64(n)+0.5)*float64(sent)/float64(display)))
	}
	return scale(p.X, v.Sent.Width, v.Display.Width), scale(p.Y, v.Sent.Height, v.Display.Height)
}
