package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	_ "image/jpeg" // what FRAMES may hold
	_ "image/png"
	"io"
	"os"
	"strings"

	"golang.org/x/image/draw"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/replay"
)

// stepper shows a story's turns on a terminal, one at a time.
type stepper struct {
	*call
	story    *replay.Story
	pictures *pictureStore
	dir      string // where w writes
	at       int    // turn shown; the number of turns: the end
	said     string // about the last key
}

// The keys, as a terminal sends them.
const stepHelp = "→ n space: next   ← p: previous   g G: first, last   w: write the picture   q: quit"

// step steps through the journal until q, Ctrl-C or the end of the keys.
func (c *call) step(ctx context.Context, p *pictureStore, entries []looprunner.Entry, dir string) error {
	story, err := replay.Tell(entries)
	if err != nil {
		return c.print(ctx, "", entries, false) // a rejection, say
	}
	in, out := c.stdin.(*os.File), c.stdout.(*os.File)
	restore, err := keyByKey(in.Fd())
	if err != nil {
		return fmt.Errorf("read keys from the terminal: %w", err)
	}
	// The other screen, so that what was there is there again; no cursor.
	fmt.Fprint(out, "\033[?1049h\033[?25l")
	s := &stepper{call: c, story: story, pictures: p, dir: dir}
	err = s.run(ctx, keys(ctx, in))
	fmt.Fprint(out, "\033[?25h\033[?1049l")
	if e := restore(); e != nil {
		err = errors.Join(err, fmt.Errorf("put the terminal back: %w", e))
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// keys reads what is typed. The goroutine lives as long as the process: a
// read of a terminal cannot be called off.
func keys(ctx context.Context, in io.Reader) <-chan string {
	out := make(chan string)
	go func() {
		defer close(out)
		buf := make([]byte, 256)
		for {
			n, err := in.Read(buf)
			for _, key := range splitKeys(string(buf[:n])) {
				select {
				case out <- key:
				case <-ctx.Done():
					return
				}
			}
			if err != nil {
				return
			}
		}
	}()
	return out
}

// splitKeys parts what came in one read: keys that repeat come together. An
// escape sequence ends with its first letter or tilde.
func splitKeys(s string) []string {
	var out []string
	for len(s) > 0 {
		n := 1
		if len(s) > 2 && s[0] == '\033' && (s[1] == '[' || s[1] == 'O') {
			for n = 3; n < len(s) && (s[n-1] < '@' || s[n-1] > '~'); n++ {
			}
		}
		out = append(out, s[:n])
		s = s[n:]
	}
	return out
}

// run returns io.EOF when q was typed or no key can come any more.
func (s *stepper) run(ctx context.Context, keys <-chan string) error {
	for {
		if err := s.draw(ctx); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case key, ok := <-keys:
			if !ok {
				return io.EOF
			}
			if err := s.press(ctx, key); err != nil {
				return err
			}
		}
	}
}

func (s *stepper) press(ctx context.Context, key string) error {
	last := len(s.story.Turns)
	s.said = ""
	switch key {
	case "q", "Q", "\x04":
		return io.EOF
	case "n", " ", "j", "\r", "\n", "\033[C", "\033OC", "\033[B", "\033OB":
		s.at = min(s.at+1, last)
	case "p", "k", "\x7f", "\b", "\033[D", "\033OD", "\033[A", "\033OA":
		s.at = max(s.at-1, 0)
	case "g", "\033[H", "\033OH", "\033[1~":
		s.at = 0
	case "G", "\033[F", "\033OF", "\033[4~":
		s.at = last
	case "w":
		return s.write(ctx)
	}
	return nil
}

// seen is the observation of the page that is shown.
func (s *stepper) seen() *computer.Observation {
	if s.at < len(s.story.Turns) {
		return s.story.Turns[s.at].Seen
	}
	return s.story.Last
}

func (s *stepper) write(ctx context.Context) error {
	o := s.seen()
	if o == nil || o.Screenshot.Object == "" {
		s.said = "there is no picture here"
		return nil
	}
	name := fmt.Sprintf("%.60s-%03d", s.story.Started.LoopID, s.at+1)
	if s.dir != "" {
		if err := os.MkdirAll(s.dir, 0o755); err != nil {
			return badUsage("--out: %v", err)
		}
	}
	path, err := s.pictures.save(ctx, o.Screenshot.Object, s.dir, name)
	switch {
	case errors.Is(err, replay.ErrExpired):
		s.said = "this picture has expired"
	case err != nil:
		s.said = "not written: " + err.Error()
	default:
		s.said = "written to " + path
	}
	return nil
}

// draw shows the turn, and below it the picture where there is room.
func (s *stepper) draw(ctx context.Context) error {
	width, height := windowSize(s.stdout)
	lines := s.lines(width)
	var picture []string
	if o := s.seen(); o != nil && o.Screenshot.Object != "" {
		lines = append(lines, "picture   FRAMES "+clip(o.Screenshot.Object, 120))
		raw, err := s.pictures.fetch(ctx, o.Screenshot.Object)
		switch {
		case errors.Is(err, replay.ErrExpired):
			lines = append(lines, fmt.Sprintf("          expired: pictures are kept for %g hours", s.pictures.kept.Hours()))
		case err != nil && ctx.Err() == nil:
			lines = append(lines, "          not fetched: "+clip(err.Error(), 200))
		case err == nil:
			picture = preview(raw, width, height-len(lines)-3, colours())
		}
	}
	var b strings.Builder
	b.WriteString("\033[H\033[2J")
	for _, l := range lines {
		b.WriteString(clip(l, width) + "\r\n")
	}
	for _, l := range picture {
		b.WriteString(l + "\r\n")
	}
	if s.said != "" {
		b.WriteString(clip(s.said, width) + "\r\n")
	}
	b.WriteString(clip(stepHelp, width))
	_, err := io.WriteString(s.stdout, b.String())
	return err
}

// lines tell the turn, or the end.
func (s *stepper) lines(width int) []string {
	story := s.story
	head := fmt.Sprintf("loop %s of %s: %s", story.Started.LoopID, story.Started.Tenant, story.Started.Start.Goal)
	if s.at == len(story.Turns) {
		out := []string{head, fmt.Sprintf("the end, after %d turns", len(story.Turns)), ""}
		out = append(out, notes(story.Notes)...)
		switch f := story.Finished; {
		case f == nil:
			out = append(out, "(it has not finished)")
		case f.Code == "":
			out = append(out, fmt.Sprintf("%s after %d steps and %.1f s", f.Outcome, f.Steps, f.Seconds))
		default:
			out = append(out, fmt.Sprintf("%s after %d steps and %.1f s: %s: %s", f.Outcome, f.Steps, f.Seconds, f.Code, f.Message))
		}
		return append(out, looks(story.Last)...)
	}
	t := &story.Turns[s.at]
	d := &t.Decided
	out := []string{head, fmt.Sprintf("turn %d of %d, step %d, %.2f s after the start", s.at+1, len(story.Turns), d.Step, t.StoredAt.Sub(story.StoredAt).Seconds()), ""}
	out = append(out, notes(t.Notes)...)
	add := func(name, text string) {
		if text != "" {
			out = append(out, fmt.Sprintf("%-9s %s", name, clip(text, max(width, 20))))
		}
	}
	add("decided", d.Label)
	for i, a := range d.Actions {
		text := replay.Describe(a)
		if t.Acted != nil && i < len(t.Acted.Actions) {
			r := t.Acted.Actions[i]
			text += "  " + string(r.Outcome)
			if r.Error != nil {
				text += " " + r.Error.Error()
			}
		}
		add("action", text)
	}
	add("asks", d.NeedsInput)
	if d.Failed != nil {
		add("gives up", d.Failed.Error())
	}
	if d.Done {
		add("is done", " ")
	}
	for _, c := range d.Checks {
		add("check", fmt.Sprintf("%s: want %s, got %s", c.Check, c.Want, c.Got))
	}
	if t.Acted != nil {
		text := string(t.Acted.Outcome)
		if t.Acted.Error != nil {
			text += " " + t.Acted.Error.Error()
		}
		add("outcome", text)
	}
	times := fmt.Sprintf("think %.1f ms", d.ThoughtMs)
	if t.LookedMs > 0 {
		times = fmt.Sprintf("look %.1f ms, ", t.LookedMs) + times
	}
	if t.Acted != nil {
		times += fmt.Sprintf(", queued %.1f ms, act %.1f ms", t.Acted.Timing.QueuedMs, t.Acted.Timing.RanMs)
	}
	if u := d.Usage; u != (events.LoopUsage{}) {
		times += fmt.Sprintf("; tokens: %d in, %d out", u.InputTokens, u.OutputTokens)
	}
	add("time", times)
	return append(out, looks(t.Seen)...)
}

func notes(all []replay.Note) []string {
	out := make([]string, len(all))
	for i, n := range all {
		out[i] = fmt.Sprintf("%-9s %s", n.What, n.Text)
	}
	return out
}

func looks(o *computer.Observation) []string {
	if o == nil {
		return nil
	}
	var out []string
	for _, l := range []struct{ name, text string }{{"title", o.Title}, {"url", o.URL}} {
		if l.text != "" {
			out = append(out, fmt.Sprintf("%-9s %s", l.name, l.text))
		}
	}
	return out
}

// depth is how many colours a terminal has.
type depth int

const (
	fewColours depth = iota
	palette          // of 256
	trueColour
)

// colours goes by what the environment says, as terminals announce it.
func colours() depth {
	switch term := os.Getenv("TERM"); {
	case os.Getenv("NO_COLOR") != "" || term == "dumb":
		return fewColours
	case os.Getenv("COLORTERM") == "truecolor" || os.Getenv("COLORTERM") == "24bit":
		return trueColour
	case strings.Contains(term, "256color"):
		return palette
	default:
		return fewColours
	}
}

// maxPreview bounds a preview's width in characters.
const maxPreview = 120

// preview draws a picture with half blocks, two pixels to a character, no
// wider and higher than it may be; nil where there are no colours or no room.
func preview(raw []byte, width, height int, d depth) []string {
	if d == fewColours || width < 10 || height < 4 {
		return nil
	}
	src, _, err := image.Decode(bytes.NewReader(raw))
	if err != nil || src.Bounds().Empty() {
		return nil
	}
	size := src.Bounds().Size()
	w := min(width, maxPreview, size.X)
	h := w * size.Y / size.X
	if h > 2*height {
		h = 2 * height
		w = max(1, h*size.X/size.Y)
	}
	h = max(2, h/2*2)
	small := image.NewRGBA(image.Rect(0, 0, w, h))
	draw.ApproxBiLinear.Scale(small, small.Bounds(), src, src.Bounds(), draw.Src, nil)
	out := make([]string, 0, h/2)
	for y := 0; y < h; y += 2 {
		var b strings.Builder
		for x := range w {
			up, low := small.RGBAAt(x, y), small.RGBAAt(x, y+1)
			if d == trueColour {
				fmt.Fprintf(&b, "\033[38;2;%d;%d;%dm\033[48;2;%d;%d;%dm▀", up.R, up.G, up.B, low.R, low.G, low.B)
			} else {
				fmt.Fprintf(&b, "\033[38;5;%dm\033[48;5;%dm▀", cube(up.R, up.G, up.B), cube(low.R, low.G, low.B))
			}
		}
		out = append(out, b.String()+"\033[0m")
	}
	return out
}

// cube is the nearest of the 216 colours of xterm's 6×6×6 cube.
func cube(r, g, b uint8) int {
	level := func(v uint8) int { return (int(v)*5 + 127) / 255 }
	return 16 + 36*level(r) + 6*level(g) + level(b)
}
