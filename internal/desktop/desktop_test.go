package desktop

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"image"
	"image/color"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"berth/internal/computer"
)

// start starts a desktop for the test. Its programs run as this process, with
// a home of its own.
func start(t testing.TB) *Session {
	t.Helper()
	if err := Missing(); err != nil {
		t.Fatal(err)
	}
	home, err := os.MkdirTemp("", "desktop")
	if err != nil {
		t.Fatal(err)
	}
	s, err := Start(t.Context(), Options{Display: computer.DefaultDisplay, Person: Person{Home: home}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		for deadline := time.Now().Add(10 * time.Second); os.RemoveAll(home) != nil; { // Chromium's processes end by themselves
			if time.Now().After(deadline) {
				t.Errorf("%s cannot be removed", home)
				return
			}
		}
	})
	return s
}

func at(typ computer.Type, x, y int) computer.Action {
	return computer.Action{Type: typ, X: &x, Y: &y}
}
func press(keys ...string) computer.Action { return computer.Action{Type: computer.Key, Keys: keys} }
func text(typ computer.Type, s string) computer.Action {
	return computer.Action{Type: typ, Text: &s}
}
func lasting(typ computer.Type, sec float64, keys ...string) computer.Action {
	return computer.Action{Type: typ, Seconds: &sec, Keys: keys}
}
func running(argv ...string) computer.Action { return computer.Action{Type: computer.Run, Argv: argv} }

// try runs actions as they come from outside.
func try(ctx context.Context, s *Session, actions ...computer.Action) ([]Result, error) {
	actions, err := computer.Normalize(actions)
	if err == nil {
		err = Check(actions, s.screen.Size())
	}
	if err != nil {
		return nil, err
	}
	return s.Execute(ctx, actions)
}

// do runs actions that must all be ok.
func do(t testing.TB, s *Session, actions ...computer.Action) []Result {
	t.Helper()
	results, err := try(t.Context(), s, actions...)
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range results {
		if r.Outcome != computer.OK {
			t.Fatalf("action %d (%s): %s, %v", i, actions[i].Type, r.Outcome, r.Error)
		}
	}
	return results
}

func decode(t testing.TB, raw []byte) image.Image {
	t.Helper()
	img, err := png.Decode(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// TestMouse: S1, S9, S10 of cases.md, and that every button and tick arrives.
func TestMouse(t *testing.T) {
	t.Parallel()
	s := start(t)
	r := record(t, s)
	t.Run("every button, count and modifiers", func(t *testing.T) {
		for button, code := range buttonCodes {
			a := at(computer.Click, 100, 300)
			a.Button, a.Count, a.Modifiers = button, 2, []string{"Control", "Shift"}
			do(t, s, a)
			events := r.settle(t, s)
			down, up := of(events, "down"), of(events, "up")
			if len(down) != 2 || len(up) != 2 || down[0].which != code || down[0].at != (computer.Point{X: 100, Y: 300}) || down[0].mods&0xff != 5 {
				t.Errorf("%s:\n%s", button, list(events))
			}
			if !released(events) {
				t.Errorf("a modifier stayed down:\n%s", list(events))
			}
		}
	})
	t.Run("S10 zero, and the last pixel", func(t *testing.T) { // 0 is a coordinate
		for _, p := range []computer.Point{{}, {X: 1279, Y: 799}, {X: 5}} {
			do(t, s, at(computer.Click, p.X, p.Y))
			if down := of(r.settle(t, s), "down"); len(down) != 1 || down[0].at != p {
				t.Errorf("click at %v: %s", p, list(down))
			}
		}
	})
	t.Run("S9 moving to where the pointer is", func(t *testing.T) { // https://github.com/Mudlet/Mudlet/issues/9870
		began := time.Now()
		got := do(t, s, at(computer.Move, 7, 9), at(computer.Move, 7, 9), computer.Action{Type: computer.Cursor})
		if d := time.Since(began); d > time.Second || string(got[2].Value) != `{"x":7,"y":9}` {
			t.Errorf("after %v at %s", d, got[2].Value)
		}
	})
	t.Run("S1 a drag starts where its path does", func(t *testing.T) { // https://github.com/anthropics/claude-quickstarts/issues/263
		do(t, s, at(computer.Move, 900, 700))
		r.settle(t, s)
		path := []computer.Point{{X: 370, Y: 310}, {X: 500, Y: 400}, {X: 470, Y: 560}}
		do(t, s, computer.Action{Type: computer.Drag, Path: path, Modifiers: []string{"Shift"}})
		events := r.settle(t, s)
		down, up, moves := of(events, "down"), of(events, "up"), of(events, "move")
		if len(down) != 1 || down[0].at != path[0] || down[0].mods&1 == 0 || len(up) != 1 || up[0].at != path[2] || len(moves) < 6 || !released(events) {
			t.Errorf("the program saw\n%s", list(events))
		}
		if !slices.ContainsFunc(moves, func(e input) bool { return e.at == path[1] }) {
			t.Error("the path's middle was left out")
		}
	})
	t.Run("S6 ticks", func(t *testing.T) { // https://github.com/trycua/cua/issues/147
		a := at(computer.Scroll, 50, 60)
		a.DX, a.DY = -2, 3
		do(t, s, a)
		count := map[byte]int{}
		for _, e := range of(r.settle(t, s), "down") {
			count[e.which]++
		}
		if count[wheelLeft] != 2 || count[wheelDown] != 3 || len(count) != 2 {
			t.Errorf("notches %v", count)
		}
	})
	t.Run("a button stays down between batches, until one fails", func(t *testing.T) {
		do(t, s, at(computer.Move, 10, 10), computer.Action{Type: computer.MouseDown})
		do(t, s, at(computer.Move, 20, 20))
		if up := of(r.settle(t, s), "up"); len(up) != 0 {
			t.Fatalf("released: %s", list(up))
		}
		results, err := try(t.Context(), s, running("/no/such/program"), at(computer.Move, 1, 1))
		if err != nil || results[0].Outcome != computer.Failed || results[1].Outcome != computer.Skipped {
			t.Fatalf("%+v, %v", results, err)
		}
		if up := of(r.settle(t, s), "up"); len(up) != 1 || up[0].at != (computer.Point{X: 20, Y: 20}) {
			t.Errorf("after the failure: %s", list(up))
		}
	})
}

// TestKeyboard: S2, S3, S4, S8 of cases.md.
func TestKeyboard(t *testing.T) {
	t.Parallel()
	s := start(t)
	r := record(t, s)
	var han strings.Builder // more new characters than the keymap has room for
	for c := '一'; c < '一'+300; c++ {
		han.WriteRune(c)
	}
	for name, want := range map[string]string{
		"S2 any script":              "ñandú 美 Ελλάς עברית हिन्दी", // https://github.com/bytebot-ai/bytebot/issues/132
		"S2 emoji":                   "🎉 👩‍👩‍👧 é é",
		"S8 upper case":              "HELLO World ÄÖÜ",
		"lines and tabs":             "first\n\tsecond\n\nlast\t.",
		"punctuation":                "~!@#$%^&*()_+`-={}|[]\\:\";'<>?,./",
		"long":                       strings.Repeat("The quick brown fox. ", 200),
		"more than the keymap holds": han.String(),
	} {
		t.Run(name, func(t *testing.T) {
			do(t, s, text(computer.TypeText, want))
			events := r.settle(t, s)
			if got := typed(events); got != want {
				t.Errorf("typed %.200q, arrived %.200q", want, got)
			}
			if !released(events) {
				t.Error("a key stayed down")
			}
		})
	}
	t.Run("S8 with Caps Lock on", func(t *testing.T) { // https://github.com/linuxserver/docker-baseimage-selkies/issues/183
		do(t, s, press("CapsLock"), text(computer.TypeText, "aB"), press("CapsLock"))
		if got := typed(r.settle(t, s)); got != "aB" {
			t.Errorf("arrived %q", got)
		}
	})
	t.Run("S4 a chord is held together", func(t *testing.T) { // https://github.com/browserbase/stagehand/issues/2266
		do(t, s, press("Control", "Shift", "k"))
		events := of(r.settle(t, s), "press", "release")
		if len(events) != 6 || events[2].mods&0xff != 5 || !released(events) || events[2].key != 'K' {
			t.Errorf("the program saw\n%s", list(events))
		}
		do(t, s, press("ctrl", "A"), press("A"), press("+"))
		if got := of(r.settle(t, s), "press"); len(got) != 6 || got[1].mods&0xff != 4 || got[3].key != 'A' || got[5].key != '+' {
			t.Errorf("the program saw\n%s", list(got))
		}
	})
	t.Run("every named key", func(t *testing.T) {
		for name, sym := range keysyms {
			if name == "F9" {
				continue
			}
			do(t, s, press(name))
			events := r.settle(t, s)
			down := of(events, "press")
			if len(down) == 2 && down[0].key == keysyms["Shift"] { // the tap that announces a new entry of the keymap
				down = down[1:]
			}
			if len(down) != 1 || down[0].key != sym || !released(events) {
				t.Errorf("%s:\n%s", name, list(events))
			}
			if strings.HasSuffix(name, "Lock") {
				do(t, s, press(name))
				r.settle(t, s)
			}
		}
	})
	t.Run("S3 released when ctx ends", func(t *testing.T) { // https://github.com/jordansissel/xdotool/issues/43
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := try(ctx, s, lasting(computer.Hold, 60, "Control", "Shift", "x"))
			done <- err
		}()
		r.await(t, "three keys", func(es []input) bool { return len(of(es, "press")) >= 3 })
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("a cancelled hold: %v", err)
		}
		if events := r.settle(t, s); !released(of(events, "press", "release")) {
			t.Errorf("the program saw\n%s", list(events))
		}
	})
}

func TestPictures(t *testing.T) {
	t.Parallel()
	s := start(t)
	shot, err := s.Picture(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	img := decode(t, shot.PNG)
	want := color.RGBA{R: background >> 16, G: background >> 8 & 0xff, B: background & 0xff, A: 0xff}
	if img.Bounds().Size() != (image.Point{X: 1280, Y: 800}) || color.RGBAModel.Convert(img.At(1279, 799)) != color.Color(want) {
		t.Fatalf("S7: the first picture is %v, its corner %v", img.Bounds(), img.At(1279, 799)) // opengeni#245
	}
	record(t, s)
	pad := color.RGBA{R: 0x33, G: 0x66, B: 0x99, A: 0xff}
	is := func(img image.Image, x, y int) bool {
		return color.RGBAModel.Convert(img.At(x, y)) == color.Color(pad)
	}
	results := do(t, s, at(computer.Move, 100, 300), computer.Action{Type: computer.Screenshot}, at(computer.Move, 1279, 799),
		computer.Action{Type: computer.Screenshot}, computer.Action{Type: computer.Zoom, Region: &computer.Rect{X: 1270, Y: 790, Width: 10, Height: 10}})
	with, without, zoom := decode(t, results[1].Image), decode(t, results[3].Image), decode(t, results[4].Image)
	changed := 0
	for y := 290; y < 330; y++ {
		for x := 90; x < 130; x++ {
			if !is(without, x, y) {
				t.Fatalf("something is drawn at %d,%d", x, y)
			}
			if !is(with, x, y) {
				changed++
			}
		}
	}
	if changed < 20 {
		t.Errorf("%d pixels are the pointer's", changed)
	}
	if zoom.Bounds().Size() != (image.Point{X: 10, Y: 10}) || !is(zoom, 0, 0) || is(zoom, 9, 9) {
		t.Errorf("zoom %v: %v and, below the pointer, %v", zoom.Bounds(), zoom.At(0, 0), zoom.At(9, 9))
	}
}

// TestEncoder: what the encoder writes, Go's decoder reads.
func TestEncoder(t *testing.T) {
	for _, d := range []computer.Rect{{Width: 1, Height: 1}, {Width: 5, Height: 3}, {X: 3, Y: 2, Width: 300, Height: 211}, {Width: 640, Height: 480}} {
		width := d.X + d.Width + 7
		pixels := make([]byte, 4*width*(d.Y+d.Height+3))
		for i := range pixels {
			pixels[i] = byte(i * i >> 3)
		}
		raw, err := encodePNG(pixels, width, d)
		if err != nil {
			t.Fatal(err)
		}
		img := decode(t, raw)
		for y := range d.Height {
			for x := range d.Width {
				px := pixels[4*((y+d.Y)*width+x+d.X):]
				if got := color.RGBAModel.Convert(img.At(x, y)); got != color.Color(color.RGBA{px[2], px[1], px[0], 0xff}) {
					t.Fatalf("%v: pixel %d,%d is %v, want %v", d, x, y, got, px[:3])
				}
			}
		}
	}
}

func TestRun(t *testing.T) {
	t.Parallel()
	s := start(t)
	value := func(r Result) (v computer.RunValue) {
		t.Helper()
		if err := json.Unmarshal(r.Value, &v); err != nil {
			t.Fatal(err)
		}
		return v
	}
	a := running("sh", "-c", `cat; echo "$0 $FOO $PWD" >&2; exit 3`, "a b;$(x)")
	a.Stdin, a.Env = "ñ in", map[string]string{"FOO": "bar"}
	if v := value(do(t, s, a)[0]); v.ExitCode != 3 || v.Stdout != "ñ in" || v.Stderr != "a b;$(x) bar "+s.person.Home+"\n" || v.Truncated {
		t.Errorf("%+v", v)
	}
	if v := value(do(t, s, running("sh", "-c", "yes | head -c 1000000"))[0]); len(v.Stdout) != computer.MaxRunOutput || !v.Truncated {
		t.Errorf("%d bytes, truncated %v", len(v.Stdout), v.Truncated)
	}
	if v := value(do(t, s, running("sh", "-c", "sleep 100 & echo done"))[0]); v.Stdout != "done\n" {
		t.Errorf("a program left in the background: %+v", v)
	}
	slow := running("sh", "-c", "echo $$; sleep 100; echo never")
	slow.Seconds = new(float64)
	*slow.Seconds = 0.3
	results, err := try(t.Context(), s, slow)
	if err != nil || results[0].Outcome != computer.Failed || results[0].Error.Code != codeTimeout || value(results[0]).Stdout == "" {
		t.Errorf("after its time: %+v, %v", results, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	results, err = try(ctx, s, running("sleep", "100"))
	if !errors.Is(err, context.DeadlineExceeded) || results[0].Outcome != computer.Unknown {
		t.Errorf("cancelled: %+v, %v", results, err)
	}
	results, err = try(t.Context(), s, running("no-such-program"))
	if err != nil || results[0].Error == nil || results[0].Error.Code != codeNotFound {
		t.Errorf("no program: %+v, %v", results, err)
	}
}

// TestPrograms types into real programs: the terminal, and the editor that
// `open` starts, which saves what was typed.
func TestPrograms(t *testing.T) {
	t.Parallel()
	s := start(t)
	const words = "Grüße, 美 ñ HELLO 🎉 ~end"
	file := filepath.Join(s.person.Home, "note.txt")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	do(t, s, computer.Action{Type: computer.Open, Target: "note.txt"}, text(computer.TypeText, words+"\nsecond line"), press("Control", "s"))
	awaitFile(t, file, words+"\nsecond line")
	do(t, s, press("Control", "a"), press("Control", "c"))
	read := func() string {
		var got string
		if err := json.Unmarshal(do(t, s, computer.Action{Type: computer.ClipboardRead})[0].Value, &got); err != nil {
			t.Fatal(err)
		}
		return got
	}
	eventually(t, func() string {
		if got := read(); got != words+"\nsecond line" {
			return "the clipboard holds " + got
		}
		return ""
	})
	const foreign = "clip 美 🎉\nend"
	do(t, s, text(computer.ClipboardWrite, foreign), press("Control", "a"), press("Control", "v"))
	eventually(t, func() string { // the editor asks for the text and goes on meanwhile
		do(t, s, press("Control", "s"))
		raw, err := os.ReadFile(file)
		if err == nil && string(raw) == foreign {
			return ""
		}
		return "after pasting: " + string(raw)
	})
	do(t, s, text(computer.ClipboardWrite, ""))
	if got := read(); got != "" {
		t.Errorf("the clipboard holds %q", got)
	}
	do(t, s, running("sh", "-c", "setsid xterm -u8 -e sh -c 'cat > typed' >/dev/null 2>&1 &"))
	awaitWindow(t, s, "sh")
	do(t, s, text(computer.TypeText, words+"\n"), press("Control", "d"))
	awaitFile(t, filepath.Join(s.person.Home, "typed"), words+"\n")
}

// Who looks after input sees what it did, also where the program in front is
// slow to handle it.
func TestLookingWaitsForInput(t *testing.T) {
	t.Parallel()
	s := start(t)
	const words = "what was typed"
	if err := os.WriteFile(filepath.Join(s.person.Home, "note.txt"), []byte(words), 0o600); err != nil {
		t.Fatal(err)
	}
	do(t, s, computer.Action{Type: computer.Open, Target: "note.txt"})
	eventually(t, func() string { // its window may be there before it takes keys
		results := do(t, s, press("Control", "a"), press("Control", "c"), computer.Action{Type: computer.ClipboardRead})
		if got := string(results[2].Value); got != `"`+words+`"` {
			return "the clipboard holds " + got
		}
		return ""
	})
	do(t, s, text(computer.ClipboardWrite, "old"))
	for group := range s.opened {
		if err := syscall.Kill(-group, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		defer time.AfterFunc(lookWithin/10, func() {
			if err := syscall.Kill(-group, syscall.SIGCONT); err != nil {
				t.Error(err)
			}
		}).Stop()
	}
	results := do(t, s, press("Control", "c"), computer.Action{Type: computer.ClipboardRead})
	if got := string(results[1].Value); got != `"`+words+`"` {
		t.Errorf("the clipboard holds %s", got)
	}
}

func awaitFile(t *testing.T, file, want string) {
	t.Helper()
	eventually(t, func() string {
		raw, err := os.ReadFile(file)
		if err == nil && string(raw) == want {
			return ""
		}
		return string(raw) + " instead of " + want
	})
}

func awaitWindow(t *testing.T, s *Session, title string) {
	t.Helper()
	eventually(t, func() string {
		now, err := s.screen.shown()
		if err != nil || now.title == title {
			return ""
		}
		return "the active window is " + now.title
	})
}

// eventually polls until wrong says nothing.
func eventually(t *testing.T, wrong func() string) {
	t.Helper()
	deadline, tick := time.After(60*time.Second), time.NewTicker(20*time.Millisecond)
	defer tick.Stop()
	for {
		message := wrong()
		if message == "" {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal(message)
		}
	}
}

// TestBrowser: Chromium opens an address, and typed text reaches its page.
func TestBrowser(t *testing.T) {
	t.Parallel()
	s := start(t)
	page := `<!doctype html><meta charset=utf-8><title>empty</title><textarea id=a style="position:fixed;inset:0;width:100%;height:100%;background:#c33" autofocus></textarea>
<script>a.oninput = () => document.title = "got:" + a.value</script>`
	if err := os.WriteFile(filepath.Join(s.person.Home, "page.html"), []byte(page), 0o600); err != nil {
		t.Fatal(err)
	}
	const words = "Hé 美 ñ 🎉 é"
	do(t, s, computer.Action{Type: computer.Open, Target: "page.html"})
	awaitTitle(t, s, "empty")
	find(t, s, color.RGBA{R: 0xcc, G: 0x33, B: 0x33, A: 0xff}) // Chromium drops keys for a page that it has not painted
	do(t, s, at(computer.Click, 640, 500), text(computer.TypeText, words))
	awaitTitle(t, s, "got:"+words)
	do(t, s, press("Control", "a"), press("Control", "c"), press("End"), press("Control", "v"))
	awaitTitle(t, s, "got:"+words+words)
	do(t, s, computer.Action{Type: computer.Open, Target: "data:text/html,<title>next</title>"})
	awaitTitle(t, s, "next")
}

// TestBrowserEvents: what a page sees of drags, double clicks and keys that the
// layout lacks. Each goes through more than one process of Chromium's.
func TestBrowserEvents(t *testing.T) {
	t.Parallel()
	s := start(t)
	page := `<!doctype html><meta charset=utf-8><title>empty</title><style>div{position:fixed;width:100px;height:100px;background:#c33}</style>
<div id=src draggable=true style="left:100px;top:300px"></div><div id=dst style="left:600px;top:300px"></div>
<script>const say = x => document.title += " " + x;
src.ondragstart = e => e.dataTransfer.setData("text/plain", "cargo"); dst.ondragover = e => e.preventDefault();
dst.ondrop = e => { e.preventDefault(); say(e.dataTransfer.getData("text/plain")); };
onclick = e => say("click" + e.detail); ondblclick = () => say("double"); onkeydown = e => { if (e.key != "Shift") say(e.key); };</script>`
	if err := os.WriteFile(filepath.Join(s.person.Home, "page.html"), []byte(page), 0o600); err != nil {
		t.Fatal(err)
	}
	do(t, s, computer.Action{Type: computer.Open, Target: "page.html"})
	awaitTitle(t, s, "empty")
	pad := find(t, s, color.RGBA{R: 0xcc, G: 0x33, B: 0x33, A: 0xff})
	src, dst := computer.Point{X: pad.Min.X + 50, Y: pad.Min.Y + 50}, computer.Point{X: pad.Max.X - 50, Y: pad.Min.Y + 50}
	do(t, s, computer.Action{Type: computer.Drag, Path: []computer.Point{src, dst}})
	awaitTitle(t, s, "empty cargo")
	two := at(computer.Click, pad.Min.X+50, pad.Max.Y+100)
	two.Count = 2
	do(t, s, two)
	awaitTitle(t, s, "empty cargo click1 click2 double")
	do(t, s, press("F13"), press("美"), press("é"), press("x"))
	awaitTitle(t, s, "empty cargo click1 click2 double F13 美 é x")
}

// find returns the bounds of a colour on the screen.
func find(t *testing.T, s *Session, want color.RGBA) (found image.Rectangle) {
	t.Helper()
	eventually(t, func() string {
		img := decode(t, do(t, s, computer.Action{Type: computer.Screenshot})[0].Image)
		for y := range img.Bounds().Dy() {
			for x := range img.Bounds().Dx() {
				if color.RGBAModel.Convert(img.At(x, y)) == color.Color(want) {
					found = found.Union(image.Rect(x, y, x+1, y+1))
				}
			}
		}
		if found.Empty() {
			return "the colour is not on the screen"
		}
		return ""
	})
	return found
}

func awaitTitle(t *testing.T, s *Session, want string) {
	t.Helper()
	eventually(t, func() string {
		now, err := s.screen.shown()
		if err == nil && strings.HasPrefix(now.title, want+" - ") {
			return ""
		}
		return "the title is " + now.title + ", want " + want
	})
}

// TestServerDies: batches end at once, and the session says why.
func TestServerDies(t *testing.T) {
	t.Parallel()
	s := start(t)
	done := make(chan error, 1)
	go func() {
		_, err := try(t.Context(), s, lasting(computer.Wait, 60))
		done <- err
	}()
	if err := syscall.Kill(s.server.Process.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, ErrDown) {
		t.Errorf("a batch in a dead desktop: %v", err)
	}
	<-s.Down()
	if _, err := s.Picture(t.Context()); !errors.Is(err, ErrDown) {
		t.Errorf("a picture: %v", err)
	}
}

// TestServerHangs: an X server that answers nothing is given up soon after ctx.
func TestServerHangs(t *testing.T) {
	t.Parallel()
	s := start(t)
	if err := syscall.Kill(s.server.Process.Pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := try(ctx, s, at(computer.Click, 1, 1)); !errors.Is(err, ErrDown) {
		t.Errorf("a click: %v", err)
	}
}
