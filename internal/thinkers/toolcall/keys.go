package toolcall

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"berth/internal/computer"
)

// pixelsPerTick is how many of a model's wheel pixels make one tick, as the
// vocabulary states it. A mouse wheel in X11 moves about 120 px and one in a
// browser 60 to 100 px, so a distance in pixels is kept to about a tick only.
const pixelsPerTick = 100

// Ticks turns a wheel distance in pixels into ticks.
func Ticks(pixels float64) (ticks float64, note string) { return Clamp(pixels / pixelsPerTick) }

// Clamp holds a number of ticks to what one scroll may have. The note, where
// there is one, is for the model.
func Clamp(ticks float64) (float64, string) {
	if math.Abs(ticks) <= computer.MaxTicks {
		return ticks, ""
	}
	return math.Copysign(computer.MaxTicks, ticks), fmt.Sprintf("scrolled %d ticks of the wheel only, the most of one action", computer.MaxTicks)
}

// Chords reads keys as xdotool writes them: names joined by + are held
// together, and blanks part one chord from the next.
func Chords(text string) ([][]string, error) {
	var out [][]string
	for _, word := range strings.Fields(text) {
		out = append(out, lower(splitChord(word)))
	}
	if len(out) == 0 {
		if text != "" { // a blank itself
			return [][]string{{" "}}, nil
		}
		return nil, fmt.Errorf("no key is named")
	}
	return out, nil
}

// splitChord parts "ctrl++" into ctrl and +.
func splitChord(word string) []string {
	if word == "+" {
		return []string{"+"}
	}
	rest, plus := strings.CutSuffix(word, "++")
	keys := strings.FieldsFunc(rest, func(r rune) bool { return r == '+' })
	if plus {
		keys = append(keys, "+")
	}
	if len(keys) == 0 {
		return []string{word}
	}
	return keys
}

// Modifiers reads the keys held during a mouse action.
func Modifiers(text string) []string {
	if strings.TrimSpace(text) == "" {
		return nil
	}
	return strings.FieldsFunc(text, func(r rune) bool { return r == '+' || r == ' ' || r == ',' })
}

// Press parts a list of keys into chords: the modifiers in it are held while
// the other keys are pressed one after the other.
func Press(keys []string) [][]string {
	var held, others []string
	for _, k := range keys {
		if isModifier(k) {
			held = append(held, k)
		} else {
			others = append(others, k)
		}
	}
	if len(others) == 0 {
		return [][]string{held}
	}
	out := make([][]string, len(others))
	for i, k := range others {
		out[i] = lower(append(slices.Clone(held), k))
	}
	return out
}

func isModifier(name string) bool {
	key, err := computer.CanonicalKey(name)
	return err == nil && computer.IsModifier(key)
}

// lower makes a letter beside a modifier a small one: ctrl+S means the key S,
// and Berth takes a capital for the character.
func lower(keys []string) []string {
	modified := slices.ContainsFunc(keys, isModifier)
	shifted := slices.ContainsFunc(keys, func(k string) bool { c, err := computer.CanonicalKey(k); return err == nil && c == "Shift" })
	if !modified || shifted {
		return keys
	}
	for i, k := range keys {
		if len(k) == 1 {
			keys[i] = strings.ToLower(k)
		}
	}
	return keys
}
