package screen

// patch is the side of the square that vendors count as one visual token.
const patch = 28

// Size is a picture's size in pixels.
type Size struct {
	Width  int `json:"width"`
	Height int `json:"height"`
}

// Limits are those of a picture that a model takes. Zero means no such limit.
type Limits struct {
	Edge   int // of the longer side, in pixels
	Pixels int // of width × height
	Tokens int // of visual tokens: squares of 28×28 px, begun ones included
	Bytes  int // of the encoded picture
}

func (l Limits) holds(s Size) bool {
	switch {
	case l.Edge > 0 && max(s.Width, s.Height) > l.Edge:
		return false
	case l.Pixels > 0 && s.Width*s.Height > l.Pixels:
		return false
	case l.Tokens > 0 && ((s.Width+patch-1)/patch)*((s.Height+patch-1)/patch) > l.Tokens:
		return false
	}
	return true
}

// Fit returns the largest size of the same shape that is within the limits and
// no larger than s. Each side is at least one pixel.
func (l Limits) Fit(s Size) Size {
	if s.Width < 1 || s.Height < 1 || l.holds(s) {
		return s
	}
	long := max(s.Width, s.Height)
	at := func(edge int) Size {
		return Size{max(1, s.Width*edge/long), max(1, s.Height*edge/long)}
	}
	low, high := 1, long // low fits, high does not
	for low+1 < high {
		if mid := (low + high) / 2; l.holds(at(mid)) {
			low = mid
		} else {
			high = mid
		}
	}
	return at(low)
}
