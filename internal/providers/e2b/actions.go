package e2b

import (
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"berth/internal/computer"
)

// step is one program, or one built-in of the script, that an action takes.
type step struct {
	action int
	kind   string // how the script runs it and what its output means; see script.sh
	ms     int    // its time
	input  string // of the program, as it is
	words  []string
}

// Kinds of steps.
const (
	doIt      = "do"    // its output means nothing
	cursorIt  = "at"    // says where the pointer is
	runIt     = "run"   // a program of the caller's
	shootIt   = "shot"  // makes a picture
	pointIt   = "point" // moves the pointer, and when it is there does the rest
	mapIt     = "map"   // gives key symbols a key
	openIt    = "open"  // shows a target
	readClip  = "clip"  // says what the clipboard holds
	writeClip = "put"   // its output is not read: it stays in the background
)

// buttonCodes are X11's numbers; 4 to 7 are the wheel.
var buttonCodes = map[computer.Button]string{computer.Left: "1", computer.Middle: "2", computer.Right: "3", computer.Back: "8", computer.Forward: "9"}

// Times of the script's steps, in ms, beside what an action asks for.
const (
	inputTime   = 20_000
	pictureTime = 20_000
	openTime    = 30_000
	clipTime    = 10_000
	charTime    = 15 // for each byte of a text
	typeDelay   = 2  // between keys
)

// How a drag is drawn out, in seconds and pixels: toolkits begin one after a
// few pixels of movement and a moment, and ask what is below before a drop.
const (
	dragPress = "0.05"
	dragBegin = "0.2"
	dragPace  = "0.006"
	dragDrop  = "0.12"
	dragStep  = 25.0
	dragSteps = 200 // at most, interpolated
)

// settlePointer is how long a program has to look up what is below the pointer
// before keys follow it, in seconds.
const settlePointer = "0.05"

// clickRest is what a click waits, in milliseconds, after each release. A window
// manager that looks at a press holds up what follows it, and a release that is
// held up gets the place where the pointer is by then: it must not move on before.
const clickRest = "50"

// mostNew is how many characters that the layout lacks a step maps at once; an
// X server's keymap has about eighteen unused keys.
const mostNew = 12

// plan is a batch as steps.
type plan struct {
	steps   []step
	letgo   []string // words of xdotool that release all that it may hold
	pointer bool     // the last step moved or pressed the pointer
}

// planOf turns checked actions into steps. What cannot be expressed is refused,
// and nothing has run.
func planOf(actions []computer.Action, clipboard string) (plan, error) {
	var pl plan
	var held []string
	for i, a := range actions {
		keys, err := pl.add(i, a, clipboard)
		if err != nil {
			return plan{}, fmt.Errorf("action %d (%s): %w", i, a.Type, err)
		}
		for _, k := range keys {
			if !slices.Contains(held, k) {
				held = append(held, k)
			}
		}
	}
	for _, k := range slices.Backward(held) {
		pl.letgo = append(pl.letgo, "keyup", k)
	}
	for _, b := range []string{"1", "2", "3", "8", "9"} { // also what an earlier mouseDown holds
		pl.letgo = append(pl.letgo, "mouseup", b)
	}
	return pl, nil
}

func (pl *plan) step(i int, kind string, ms int, input string, words ...string) {
	pl.steps = append(pl.steps, step{i, kind, ms, input, words})
}

// add plans one action and returns the keys that it may hold.
func (pl *plan) add(i int, a computer.Action, clipboard string) (held []string, err error) {
	wasPointer := pl.pointer
	pl.pointer = false
	switch a.Type {
	case computer.Screenshot, computer.Zoom:
		pl.step(i, shootIt, pictureTime, "")
	case computer.Wait:
		pl.step(i, doIt, millis(a.Duration(0))+5_000, "", "sleep", decimal(a.Duration(0)))
	case computer.Cursor:
		pl.step(i, cursorIt, inputTime, "", "xdotool", "getmouselocation")
	case computer.Click, computer.Move, computer.Scroll, computer.Drag, computer.MouseDown, computer.MouseUp:
		return pl.mouse(i, a)
	case computer.Key, computer.Hold:
		return pl.chord(i, a, wasPointer)
	case computer.TypeText:
		pl.text(i, *a.Text, wasPointer)
	case computer.Open:
		kind, target, err := targetOf(a.Target)
		if err != nil {
			return nil, err
		}
		pl.step(i, openIt, openTime, "", kind, target)
	case computer.Run:
		return nil, pl.run(i, a)
	case computer.ClipboardRead:
		words := []string{XClip, "-o", "-selection", "clipboard", "-t", "UTF8_STRING"}
		if clipboard == XSel {
			words = []string{XSel, "--clipboard", "--output"}
		}
		pl.step(i, readClip, clipTime, "", words...)
	case computer.ClipboardWrite:
		words := []string{XClip, "-i", "-selection", "clipboard"}
		if clipboard == XSel {
			words = []string{XSel, "--clipboard", "--input"}
		}
		pl.step(i, writeClip, clipTime, *a.Text, words...)
	default:
		return nil, fmt.Errorf("unknown action %q", a.Type)
	}
	return nil, nil
}

// symbols are the words of keys; those that the layout lacks get a key in a
// step of their own.
func (pl *plan) symbols(i int, keys []string) ([]string, error) {
	var words, fresh []string
	for _, k := range keys {
		sym, err := keySym(k)
		if err != nil {
			return nil, err
		}
		words = append(words, word(sym))
		if !inLayout(sym) && !slices.Contains(fresh, word(sym)) {
			fresh = append(fresh, word(sym))
		}
	}
	if len(fresh) > 0 {
		pl.step(i, mapIt, inputTime, "", fresh...)
	}
	return words, nil
}

// around puts words between the press and the release of keys.
func around(keys, words []string) []string {
	var out []string
	for _, k := range keys {
		out = append(out, "keydown", k)
	}
	out = append(out, words...)
	for _, k := range slices.Backward(keys) {
		out = append(out, "keyup", k)
	}
	return out
}

func moveTo(p computer.Point) []string {
	return []string{"mousemove", strconv.Itoa(p.X), strconv.Itoa(p.Y)}
}

func (pl *plan) mouse(i int, a computer.Action) ([]string, error) {
	mods, err := pl.symbols(i, a.Modifiers)
	if err != nil {
		return nil, err
	}
	point := func(to computer.Point, ms int, words []string) {
		pl.step(i, pointIt, ms, "", append([]string{strconv.Itoa(to.X), strconv.Itoa(to.Y)}, words...)...)
	}
	switch a.Type {
	case computer.Move:
		point(a.Point(), inputTime, nil)
	case computer.Click:
		click := []string{"click", "--repeat", strconv.Itoa(max(a.Count, 1)), "--delay", clickRest, buttonCodes[a.Button]}
		point(a.Point(), inputTime, around(mods, click))
	case computer.Scroll:
		var wheel []string
		for _, axis := range []struct {
			ticks       float64
			back, forth string
		}{{a.DX, "6", "7"}, {a.DY, "4", "5"}} {
			n, button := notches(axis.ticks), axis.forth
			if n < 0 {
				n, button = -n, axis.back
			}
			if n > 0 {
				wheel = append(wheel, "click", "--repeat", strconv.Itoa(n), "--delay", "4", button)
			}
		}
		if len(wheel) > 0 {
			wheel = around(mods, wheel)
		}
		point(a.Point(), inputTime, wheel)
	case computer.MouseDown:
		pl.step(i, doIt, inputTime, "", "xdotool", "mousedown", buttonCodes[a.Button])
	case computer.MouseUp:
		pl.step(i, doIt, inputTime, "", "xdotool", "mouseup", buttonCodes[a.Button])
	case computer.Drag:
		var press []string
		for _, m := range mods {
			press = append(press, "keydown", m)
		}
		point(a.Path[0], inputTime, append(press, "mousedown", buttonCodes[a.Button], "sleep", dragPress))
		first, words := drag(a)
		for _, m := range slices.Backward(mods) {
			words = append(words, "keyup", m)
		}
		point(first, inputTime+len(a.Path)*10+10_000, words)
	}
	pl.pointer = true
	return mods, nil
}

// notches rounds wheel ticks, to at least one: X11 has no part of a notch.
func notches(ticks float64) int {
	n := int(math.Round(ticks))
	switch {
	case n == 0 && ticks > 0:
		return 1
	case n == 0 && ticks < 0:
		return -1
	}
	return n
}

// drag returns where to move first with the button down, and the rest: along the path through
// interpolated points, a rest at its end with a nudge of one pixel, and the release.
func drag(a computer.Action) (first computer.Point, words []string) {
	points := interpolate(a.Path)
	words = []string{"sleep", dragBegin}
	for _, p := range points[1:] {
		words = append(append(words, moveTo(p)...), "sleep", dragPace)
	}
	end := a.Path[len(a.Path)-1]
	nudge := computer.Point{X: end.X - 1, Y: end.Y}
	if end.X == 0 {
		nudge.X = 1
	}
	for _, p := range []computer.Point{nudge, end} {
		words = append(append(words, moveTo(p)...), "sleep", dragDrop)
	}
	return points[0], append(words, "mouseup", buttonCodes[a.Button], "sleep", dragPress)
}

// interpolate returns the points of a path after its first, and between them
// ones that are dragStep apart, at least six and at most dragSteps in all.
func interpolate(path []computer.Point) []computer.Point {
	total := 0.0
	for i, p := range path[1:] {
		total += math.Hypot(float64(p.X-path[i].X), float64(p.Y-path[i].Y))
	}
	every := min(max(total/dragSteps, dragStep), max(total/6, 1))
	var out []computer.Point
	for i, p := range path[1:] {
		from := path[i]
		n := int(math.Hypot(float64(p.X-from.X), float64(p.Y-from.Y)) / every)
		for k := 1; k <= n; k++ {
			f := float64(k) / float64(n+1)
			out = append(out, computer.Point{X: from.X + int(float64(p.X-from.X)*f), Y: from.Y + int(float64(p.Y-from.Y)*f)})
		}
		out = append(out, p)
	}
	return out
}

// yield lets programs look up what the pointer is on before keys follow.
func yield(wasPointer bool) []string {
	if wasPointer {
		return []string{"xdotool", "sleep", settlePointer}
	}
	return []string{"xdotool"}
}

// chord presses keys in their order and releases them in the reverse, repeat
// times, or holds them.
func (pl *plan) chord(i int, a computer.Action, wasPointer bool) ([]string, error) {
	keys, err := pl.symbols(i, a.Keys)
	if err != nil {
		return nil, err
	}
	words, ms := yield(wasPointer), inputTime
	if a.Type == computer.Hold {
		words = append(words, around(keys, []string{"sleep", decimal(a.Duration(0))})...)
		ms += millis(a.Duration(0))
	} else {
		for range a.Repeat {
			words = append(words, around(keys, nil)...)
		}
	}
	pl.step(i, doIt, ms, "", words...)
	return keys, nil
}

// text types any Unicode text: what the layout has through `xdotool type`, line
// ends, tabs and all else by key symbols, which get keys of their own a few at a
// time.
func (pl *plan) text(i int, text string, wasPointer bool) {
	words := yield(wasPointer)
	var fresh []string
	var bytes int
	flush := func() {
		if len(fresh) > 0 {
			pl.step(i, mapIt, inputTime, "", fresh...)
		}
		if len(words) > 1 {
			pl.step(i, doIt, inputTime+bytes*charTime, "", words...)
		}
		words, fresh, bytes = []string{"xdotool"}, nil, 0
	}
	delay := strconv.Itoa(typeDelay)
	run, plain := strings.Builder{}, true // what gathers: characters, or symbols already in words
	end := func() {
		if run.Len() > 0 {
			words = append(words, "type", "--delay", delay, "--args", "1", "--", run.String())
			run.Reset()
		}
	}
	for _, r := range text {
		bytes += len(string(r))
		if r >= 0x20 && r <= 0x7e {
			run.WriteRune(r)
			plain = true
			continue
		}
		end()
		sym := word(runeSym(r))
		if !inLayout(runeSym(r)) && !slices.Contains(fresh, sym) {
			if len(fresh) == mostNew {
				flush()
				plain = true
			}
			fresh = append(fresh, sym)
		}
		if plain {
			words = append(words, "key", "--delay", delay)
			plain = false
		}
		words = append(words, sym)
	}
	end()
	flush()
	if len(pl.steps) == 0 || pl.steps[len(pl.steps)-1].action != i { // an empty text
		pl.step(i, doIt, inputTime, "", "true")
	}
}

func (pl *plan) run(i int, a computer.Action) error {
	words := []string{"/home/user"}
	if a.Cwd != "" {
		words[0] = a.Cwd
		if !strings.HasPrefix(a.Cwd, "/") {
			words[0] = "/home/user/" + a.Cwd
		}
	}
	words = append(words, strconv.Itoa(len(a.Env)))
	for name, value := range a.Env {
		if name == "" || strings.Contains(name, "=") {
			return fmt.Errorf("env: %.80q is no name of a variable", name)
		}
		words = append(words, name+"="+value)
	}
	if strings.Contains(a.Argv[0], "=") {
		return errors.New("argv: a program whose name has a = cannot be run here")
	}
	words = append(words, a.Argv...)
	for _, w := range words {
		if strings.ContainsRune(w, 0) {
			return errors.New("argv, cwd and env have no NUL")
		}
		if len(w) > 100_000 { // Linux takes 128 KiB in one argument
			return errors.New("argv: an argument of more than 100,000 bytes")
		}
	}
	pl.step(i, runIt, millis(a.Duration(computer.DefaultRun)), a.Stdin, words...)
	return nil
}

func millis(seconds float64) int { return int(math.Ceil(seconds * 1000)) }

func decimal(seconds float64) string { return strconv.FormatFloat(seconds, 'f', 3, 64) }

// targetOf tells what open shows: a web address, or a file of the sandbox.
func targetOf(target string) (kind, what string, err error) {
	scheme, rest, ok := strings.Cut(target, ":")
	if strings.ContainsRune(target, 0) {
		return "", "", errors.New("target: has a NUL")
	}
	if !ok || scheme == "" || strings.ContainsAny(scheme, "/ ") {
		return "file", target, nil
	}
	switch strings.ToLower(scheme) {
	case "http", "https":
		if u, err := url.Parse(target); err != nil || u.Host == "" {
			return "", "", errors.New("target: no address of the form https://host/path")
		}
		return "address", target, nil
	case "about", "data":
		if rest == "" {
			return "", "", errors.New("target: an address with nothing behind its scheme")
		}
		return "address", target, nil
	case "file":
		u, err := url.Parse(target)
		if err != nil || u.Path == "" || u.Host != "" && u.Host != "localhost" {
			return "", "", errors.New("target: a file URL has the form file:///path")
		}
		return "file", u.Path, nil
	}
	return "", "", fmt.Errorf("target: cannot open %.20q addresses; known are http, https, about, data, file, and paths", scheme)
}

// words are the arguments of the script's act.
func (pl plan) words(epoch uint64, actions int) []string {
	out := []string{strconv.FormatUint(epoch, 10), strconv.Itoa(actions), strconv.Itoa(len(pl.letgo))}
	out = append(out, pl.letgo...)
	for _, s := range pl.steps {
		input := ""
		if s.input != "" {
			input = base64.StdEncoding.EncodeToString([]byte(s.input))
		}
		out = append(out, strconv.Itoa(s.action), s.kind, strconv.Itoa(s.ms), input, strconv.Itoa(len(s.words)))
		out = append(out, s.words...)
	}
	return out
}

// millis is what the steps may take in all.
func (pl plan) millis() int {
	total := 0
	for _, s := range pl.steps {
		total += s.ms + 3_000
	}
	return total
}
