package e2b

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"image/png"
	"math/rand/v2"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
	"berth/internal/providers/httpapi"
)

// bench is a sandbox of a test, in which real X11 programs record what reaches
// them.
type bench struct {
	*Provider
	vm string
}

func newBench(t *testing.T, p *Provider) *bench {
	t.Helper()
	b := &bench{p, fmt.Sprintf("vm-%08x", rand.Uint32())}
	if _, err := p.Create(t.Context(), providers.Spec{VM: b.vm, Fence: 7, Env: map[string]string{"GIVEN": "by the spec"}}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Kill(context.Background(), b.vm); err != nil {
			t.Error(err)
		}
	})
	return b
}

func (b *bench) batch(actions ...computer.Action) providers.Batch {
	return providers.Batch{VM: b.vm, Fence: 7, Epoch: 1, Key: fmt.Sprintf("k%08x", rand.Uint32()), Actions: actions}
}

// do runs actions that must all be ok.
func (b *bench) do(t *testing.T, actions ...computer.Action) []providers.Result {
	t.Helper()
	results, err := b.Execute(t.Context(), b.batch(actions...))
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

func sh(command string) computer.Action {
	return computer.Action{Type: computer.Run, Argv: []string{"bash", "-c", command}}
}

func (b *bench) sh(t *testing.T, command string) computer.RunValue {
	t.Helper()
	var v computer.RunValue
	if err := json.Unmarshal(b.do(t, sh(command))[0].Value, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// until runs a command until it says what is wanted.
func (b *bench) until(t *testing.T, what, command string, enough func(string) bool) string {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		said := b.sh(t, command).Stdout
		if enough(said) {
			return said
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within 20 s: %s; %s says %q", what, command, said)
		}
	}
}

func at(typ computer.Type, x, y int) computer.Action {
	return computer.Action{Type: typ, X: &x, Y: &y}
}

func text(s string) computer.Action { return computer.Action{Type: computer.TypeText, Text: &s} }

func press(keys ...string) computer.Action { return computer.Action{Type: computer.Key, Keys: keys} }

// xev shows a window that covers the screen but its first pixels and records its
// events.
func (b *bench) xev(t *testing.T) {
	t.Helper()
	b.do(t, sh("pkill -x xev; cd; setsid stdbuf -oL xev -geometry 1200x700+20+20 >>xev.log 2>&1 </dev/null &"))
	b.until(t, "xev is shown", "xdotool search --onlyvisible --name 'Event Tester' && grep -c Expose xev.log", func(s string) bool { return strings.Contains(s, "\n") })
	b.do(t, at(computer.Click, 600, 400))
	b.until(t, "xev has the focus", "grep -c ButtonRelease xev.log", func(s string) bool { return strings.TrimSpace(s) != "0" })
	b.sh(t, "sleep 0.3; : > xev.log")
}

// event is one that xev has seen.
type xevent struct {
	kind, root, state, what string // what: button, or key symbol
}

var xevPattern = regexp.MustCompile(`(?m)^(\w+) event, .*\n.*root:\((-?\d+,-?\d+)\),\n\s+state (0x[0-9a-f]+), (?:button (\d+)|keycode \d+ \(keysym (0x[0-9a-f]+)|is_hint)`)

// events are the pointer's and the keyboard's, in their order. F9 marks the end.
func (b *bench) events(t *testing.T) []xevent {
	t.Helper()
	b.do(t, press("F9"))
	log := b.until(t, "xev sees F9", "cat xev.log", func(s string) bool {
		_, after, ok := strings.Cut(s, "F9), same_screen")
		return ok && strings.Contains(after, "F9), same_screen")
	})
	b.sh(t, ": > xev.log")
	var out []xevent
	for _, m := range xevPattern.FindAllStringSubmatch(log, -1) {
		e := xevent{m[1], m[2], m[3], m[4] + m[5]}
		if e.what == "0xffc6" {
			break
		}
		out = append(out, e)
	}
	return out
}

func only(events []xevent, kinds ...string) []xevent {
	return slices.DeleteFunc(slices.Clone(events), func(e xevent) bool { return !slices.Contains(kinds, e.kind) })
}

func expect(t *testing.T, got []xevent, want ...string) {
	t.Helper()
	var said []string
	for _, e := range got {
		said = append(said, strings.TrimSuffix(e.kind, "Press")+" "+e.what+" "+e.root)
	}
	for i := range said {
		said[i] = strings.Replace(strings.Replace(said[i], "Button ", "down ", 1), "ButtonRelease", "up", 1)
		said[i] = strings.Replace(strings.Replace(said[i], "Key ", "press ", 1), "KeyRelease", "release", 1)
		if strings.HasPrefix(said[i], "press") || strings.HasPrefix(said[i], "release") {
			said[i] = said[i][:strings.LastIndex(said[i], " ")]
		}
	}
	if !slices.Equal(said, want) {
		t.Errorf("the program saw\n%s\nwant\n%s", strings.Join(said, "\n"), strings.Join(want, "\n"))
	}
}

// TestEffects: a click is a click.
func TestEffects(t *testing.T) {
	t.Parallel()
	p := connect(t, startStandin(t))
	b := newBench(t, p)
	b.xev(t)
	t.Run("clicks", func(t *testing.T) {
		right := at(computer.Click, 300, 200)
		right.Button, right.Modifiers = computer.Right, []string{"Control", "Shift"}
		double := at(computer.Click, 310, 210)
		double.Count = 2
		back := at(computer.Click, 320, 220)
		back.Button = computer.Back
		b.do(t, right, double, back)
		events := b.events(t)
		buttons := only(events, "ButtonPress", "ButtonRelease")
		expect(t, buttons, "down 3 300,200", "up 3 300,200", "down 1 310,210", "up 1 310,210", "down 1 310,210", "up 1 310,210", "down 8 320,220", "up 8 320,220")
		if len(buttons) > 2 && (buttons[0].state != "0x5" || buttons[2].state != "0x0") {
			t.Errorf("modifiers at the clicks: %s, then %s", buttons[0].state, buttons[2].state)
		}
		expect(t, only(events, "KeyPress", "KeyRelease"), "press 0xffe3", "press 0xffe1", "release 0xffe1", "release 0xffe3")
	})
	t.Run("S10 zero", func(t *testing.T) {
		b.do(t, at(computer.Move, 0, 0))
		if got := string(b.do(t, computer.Action{Type: computer.Cursor})[0].Value); got != `{"x":0,"y":0}` {
			t.Errorf("the pointer is at %s", got)
		}
		b.do(t, at(computer.Click, 600, 400))
		b.events(t)
	})
	t.Run("wheel", func(t *testing.T) {
		a := at(computer.Scroll, 300, 200)
		a.DX, a.DY = -1, 3
		b.do(t, a)
		expect(t, only(b.events(t), "ButtonPress"), "down 6 300,200", "down 5 300,200", "down 5 300,200", "down 5 300,200")
	})
	t.Run("S1 a drag", func(t *testing.T) {
		b.do(t, at(computer.Move, 900, 600), computer.Action{Type: computer.Drag, Path: []computer.Point{{X: 200, Y: 200}, {X: 400, Y: 300}}, Modifiers: []string{"Shift"}})
		events := b.events(t)
		expect(t, only(events, "ButtonPress", "ButtonRelease"), "down 1 200,200", "up 1 400,300")
		if moves := only(events, "MotionNotify"); len(moves) < 6 {
			t.Errorf("%d moves; a program may take that for no drag", len(moves))
		}
		expect(t, only(events, "KeyPress", "KeyRelease"), "press 0xffe1", "release 0xffe1")
	})
	t.Run("S4 a chord is held together", func(t *testing.T) {
		a := press("Control", "Shift", "k")
		a.Repeat = 2
		b.do(t, a)
		one := []string{"press 0xffe3", "press 0xffe1", "press 0x4b", "release 0x4b", "release 0xffe1", "release 0xffe3"}
		expect(t, only(b.events(t), "KeyPress", "KeyRelease"), append(slices.Clone(one), one...)...)
	})
	t.Run("keys that the layout lacks", func(t *testing.T) {
		b.do(t, press("F13"), press("ñ"), press("美"), press("MediaPlayPause"))
		expect(t, only(b.events(t), "KeyPress"), "press 0xffca", "press 0xf1", "press 0x1007f8e", "press 0x1008ff14")
	})
	// https://github.com/jordansissel/xdotool/issues/43
	t.Run("S3 released when ctx ends", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		seconds := 60.0
		go func() {
			_, err := b.Execute(ctx, b.batch(at(computer.Move, 300, 300), computer.Action{Type: computer.MouseDown}, computer.Action{Type: computer.Hold, Keys: []string{"Control", "x"}, Seconds: &seconds}))
			done <- err
		}()
		for down := false; !down; { // beside the batch: Observe does not wait for it
			said, err := p.ask(t.Context(), must(p.box(t.Context(), b.vm)), time.Second, "state")
			if err != nil || said != "Z" {
				t.Fatalf("%q, %v", said, err)
			}
			var out bytes.Buffer
			if _, err := p.talk(t.Context(), must(p.box(t.Context(), b.vm)), process{args: []string{"-c", "grep -c 'KeyPress' xev.log"}}, func(raw []byte) error { out.Write(raw); return nil }); err != nil {
				t.Fatal(err)
			}
			down = strings.TrimSpace(out.String()) == "2"
		}
		cancel()
		if err := <-done; err == nil {
			t.Error("a cancelled batch succeeded")
		}
		events := b.events(t)
		expect(t, only(events, "ButtonPress", "ButtonRelease"), "down 1 300,300", "up 1 300,300")
		if up := only(events, "KeyRelease"); len(up) < 2 {
			t.Errorf("released: %v", up)
		}
	})
	// A batch that was killed outright leaves what it holds to the next.
	t.Run("S3 released after a crash of the batch", func(t *testing.T) {
		held := b.batch()
		held.Actions = []computer.Action{at(computer.Move, 300, 300), {Type: computer.MouseDown}, sh("kill -KILL $(cat /tmp/.berth/keys/" + held.Key + "/pid); sleep 60")}
		results, err := b.Execute(t.Context(), held)
		if err == nil || len(results) != 3 || results[1].Outcome != computer.OK || results[2].Outcome != computer.Unknown {
			t.Fatalf("a batch whose script was killed: %+v, %v", results, err)
		}
		rec, err := b.Recall(t.Context(), b.vm, held.Key)
		if err != nil || !rec.Finished || rec.Results[1].Outcome != computer.OK || rec.Results[2].Outcome != computer.Unknown {
			t.Errorf("recalled: %+v, %v", rec, err)
		}
		b.do(t, at(computer.Move, 310, 300))
		expect(t, only(b.events(t), "ButtonPress", "ButtonRelease"), "down 1 300,300", "up 1 300,300")
	})
	b.sh(t, "pkill -x xev; true")
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// TestTyping: any Unicode text arrives exactly (S2, bytebot#132, bytebot#137; S8,
// docker-baseimage-selkies#183).
func TestTyping(t *testing.T) {
	t.Parallel()
	b := newBench(t, connect(t, startStandin(t)))
	b.do(t, sh("setsid xterm -u8 -geometry 100x30+50+50 -e sh -c 'stty -icanon -echo; cat >>typed' </dev/null >/dev/null 2>&1 &"))
	b.until(t, "a terminal is shown", "xdotool search --onlyvisible --class xterm", func(s string) bool { return s != "" })
	b.do(t, at(computer.Click, 300, 200))
	for name, typed := range map[string]string{
		"any script":     "ñandú 美 Ελλάς עברית हिन्दी",
		"emoji":          "🎉 é ü",
		"upper case":     "HELLO World ÄÖÜ",
		"lines and tabs": "first\n\tsecond\n\nlast\t.",
		"punctuation":    "~!@#$%^&*()_+`-={}|[]\\:\";'<>?,./ -- --delay 5",
		"long":           strings.Repeat("The quick brown fox. ", 40),
		"many new":       "абвгдежзиклмнопрстуфхцчшщъыьэюя αβγδεζηθικλμ",
	} {
		t.Run(name, func(t *testing.T) {
			b.sh(t, ": > typed")
			b.do(t, text(typed))
			if got := b.until(t, "the text", "cat typed", func(s string) bool { return len(s) >= len(typed) }); got != typed {
				t.Errorf("typed %q, the program read %q", typed, got)
			}
		})
	}
	t.Run("the empty text", func(t *testing.T) { b.do(t, text("")) })
}

func TestPrograms(t *testing.T) {
	t.Parallel()
	p := connect(t, startStandin(t))
	b := newBench(t, p)
	t.Run("run", func(t *testing.T) {
		seconds := 0.5
		for name, c := range map[string]struct {
			action  computer.Action
			want    computer.RunValue
			outcome computer.Outcome
			code    string
		}{
			"argv is never parsed": {computer.Action{Type: computer.Run, Argv: []string{"printf", "%s|", "a b", "$HOME", "`id`", "'\"", "", "-n"}}, computer.RunValue{Stdout: "a b|$HOME|`id`|'\"||-n|"}, computer.OK, ""},
			"cwd, env, stdin": {computer.Action{Type: computer.Run, Argv: []string{"sh", "-c", "pwd; echo $A $GIVEN; cat; echo oops >&2; exit 5"}, Cwd: "/tmp", Env: map[string]string{"A": "b c"}, Stdin: "in\x00put"},
				computer.RunValue{ExitCode: 5, Stdout: "/tmp\nb c by the spec\nin\x00put", Stderr: "oops\n"}, computer.OK, ""},
			"no program":        {computer.Action{Type: computer.Run, Argv: []string{"no-such-program"}}, computer.RunValue{}, computer.Failed, codeNotFound},
			"no directory":      {computer.Action{Type: computer.Run, Argv: []string{"true"}, Cwd: "/no/such"}, computer.RunValue{}, computer.Failed, codeNotFound},
			"too long":          {computer.Action{Type: computer.Run, Argv: []string{"sh", "-c", "echo begun; sleep 60"}, Seconds: &seconds}, computer.RunValue{ExitCode: 137, Stdout: "begun\n"}, computer.Failed, codeTimeout},
			"much output":       {computer.Action{Type: computer.Run, Argv: []string{"sh", "-c", "head -c 200000 /dev/zero | tr '\\0' x"}}, computer.RunValue{Stdout: strings.Repeat("x", computer.MaxRunOutput), Truncated: true}, computer.OK, ""},
			"in the background": {sh("sleep 100 & echo on"), computer.RunValue{Stdout: "on\n"}, computer.OK, ""},
		} {
			t.Run(name, func(t *testing.T) {
				results, err := b.Execute(t.Context(), b.batch(c.action))
				if err != nil {
					t.Fatal(err)
				}
				r := results[0]
				if r.Outcome != c.outcome || (r.Error != nil) != (c.code != "") || r.Error != nil && r.Error.Code != c.code {
					t.Fatalf("%s, %v", r.Outcome, r.Error)
				}
				var got computer.RunValue
				if r.Value != nil {
					if err := json.Unmarshal(r.Value, &got); err != nil {
						t.Fatal(err)
					}
				}
				if got != c.want {
					t.Errorf("got %.300q, want %.300q", fmt.Sprint(got), fmt.Sprint(c.want))
				}
			})
		}
		for _, a := range []computer.Action{{Type: computer.Run, Argv: []string{"a=b"}}, {Type: computer.Run, Argv: []string{"a", "b\x00"}}, {Type: computer.Run, Argv: []string{"a"}, Env: map[string]string{"A=B": "c"}}} {
			if _, err := b.Execute(t.Context(), b.batch(a)); !providers.NothingRan(err) {
				t.Errorf("%v: %v", a, err)
			}
		}
	})
	t.Run("clipboard", func(t *testing.T) {
		read := func(want string) {
			t.Helper()
			var got string
			if err := json.Unmarshal(b.do(t, computer.Action{Type: computer.ClipboardRead})[0].Value, &got); err != nil || got != want {
				t.Errorf("the clipboard holds %q, %v; want %q", got, err, want)
			}
		}
		read("")
		for _, s := range []string{"美 ñ 🎉\nsecond line\tend", "$(id) 'x'", ""} {
			b.do(t, computer.Action{Type: computer.ClipboardWrite, Text: &s})
			read(s)
		}
	})
	t.Run("open", func(t *testing.T) {
		site := "data:text/html,<title>harbour</title><body style='background:%23336699'>"
		b.do(t, computer.Action{Type: computer.Open, Target: site})
		b.until(t, "the page is shown", "xdotool search --onlyvisible --name harbour getwindowname", func(s string) bool { return strings.Contains(s, "harbour") })
		results, err := b.Execute(t.Context(), b.batch(computer.Action{Type: computer.Open, Target: "/no/such"}, at(computer.Move, 1, 1)))
		if err != nil || results[0].Outcome != computer.Failed || results[0].Error.Code != codeNotFound || results[1].Outcome != computer.Skipped {
			t.Errorf("open of a file that is not there: %+v, %v", results, err)
		}
		for _, target := range []string{"javascript:alert(1)", "http://", "about:"} {
			if _, err := b.Execute(t.Context(), b.batch(computer.Action{Type: computer.Open, Target: target})); !providers.NothingRan(err) {
				t.Errorf("open %s: %v", target, err)
			}
		}
		view, err := b.Observe(t.Context(), b.vm)
		if err != nil || !strings.Contains(view.Observation.Title, "harbour") {
			t.Errorf("observed the title %q, %v", view.Observation.Title, err)
		}
	})
	t.Run("zoom", func(t *testing.T) {
		a := computer.Action{Type: computer.Zoom, Region: &computer.Rect{X: 600, Y: 400, Width: 30, Height: 20}}
		img, err := png.Decode(bytes.NewReader(b.do(t, a)[0].Image))
		if err != nil || img.Bounds().Dx() != 30 || img.Bounds().Dy() != 20 {
			t.Fatalf("the zoom: %v", err)
		}
	})
	t.Run("the live view", func(t *testing.T) {
		for range 2 { // it may be asked for again
			page, err := p.StreamURL(t.Context(), b.vm)
			if err != nil {
				t.Fatal(err)
			}
			s, err := p.Get(t.Context(), b.vm)
			if err != nil || !strings.HasPrefix(page, "https://6080-"+s.ID+".e2b.app/vnc.html?") || strings.Contains(page, testKey) {
				t.Fatalf("%s, %v", page, err)
			}
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.opts.SandboxURL+"/vnc.html", nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Host = "6080-" + s.ID + ".e2b.app"
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			body, err := httpapi.ReadAll(resp, 1<<20)
			if err != nil || resp.StatusCode != http.StatusOK || !bytes.Contains(body, []byte("noVNC")) {
				t.Errorf("%d %v", resp.StatusCode, err)
			}
		}
	})
}
