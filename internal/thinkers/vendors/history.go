package vendors

// LeftOut says how many of n pictures, from the oldest on, are left out of a
// request that may hold limit and, once it would hold more, is cut down to
// keep. Between two cuts the beginning of the conversation stays the same byte
// for byte, which is what a vendor's prompt cache needs. It depends on the
// numbers alone, so a process that takes over cuts at the same place.
func LeftOut(n, keep, limit int) int {
	keep = min(keep, limit)
	if n <= limit {
		return 0
	}
	step := limit + 1 - keep
	return (n - limit + step - 1) / step * step
}

// State is what a model carries from turn to turn, beside the journal's own
// history.
type State struct {
	From int  `json:"from,omitempty"` // exchanges before it are told as a list only
	Few  bool `json:"few,omitempty"`  // the request was too long: only the newest picture is sent
}

// Shorten halves what is told of n exchanges, after a request was too long.
// It reports false where there is nothing left to leave out.
func (s *State) Shorten(n int) bool {
	left := n - s.From
	if left < 1 && s.Few {
		return false
	}
	s.Few = true
	s.From += (left + 1) / 2
	return true
}
