package providertest

import (
	"slices"
	"strings"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
)

// namedKeys are pressed one by one. Those that the browser itself acts on by
// leaving the page are not among them.
var namedKeys = []string{
	"Alt", "AltGraph", "CapsLock", "CapsLock", "Control", "Meta", "NumLock", "NumLock", "ScrollLock", "ScrollLock", "Shift", "Enter", "Tab",
	"ArrowDown", "ArrowLeft", "ArrowRight", "ArrowUp", "End", "Home", "PageDown", "PageUp", "Backspace", "Delete", "Insert",
	"ContextMenu", "Escape", "Pause", "PrintScreen", "Help", "F1", "F2", "F10", "F12", "F13", "F24",
	"AudioVolumeMute", "AudioVolumeDown", "AudioVolumeUp", "MediaTrackNext", "MediaTrackPrevious", "MediaStop", "MediaPlayPause",
	"a", "Z", "7", " ", "+", "?", "ñ", "€", "美",
}

// windowKeys are those of namedKeys that a browser in a window takes for itself,
// and those that are pressed together with others where the keyboard's layout
// has these on another level.
var windowKeys = map[string]bool{"F1": true, "F10": true, "F12": true, "Shift": true, "AltGraph": true}

func (s *suite) keyboard(t *testing.T, b *box) {
	page := b.opened(t)
	b.do(t, at(computer.Click, 100, 300))
	t.Run("every key has its name", func(t *testing.T) {
		b.settle(t, page)
		var named []string
		var actions []computer.Action
		for _, key := range namedKeys {
			if !s.opts.Window || !windowKeys[key] {
				named, actions = append(named, key), append(actions, press(key))
			}
		}
		b.do(t, actions...)
		events := b.settle(t, page)
		downs, ups := only(events, "keydown"), only(events, "keyup")
		if s.opts.Window {
			level := func(e event) bool { return e.Key == "Shift" || e.Key == "AltGraph" }
			downs, ups = slices.DeleteFunc(downs, level), slices.DeleteFunc(ups, level)
		}
		if len(downs) != len(named) || len(ups) != len(named) {
			t.Fatalf("%d keys, %d keydown, %d keyup:\n%s", len(named), len(downs), len(ups), list(events))
		}
		for i, key := range named {
			if downs[i].Key != key || ups[i].Key != key || !downs[i].Trusted {
				t.Errorf("%s: the page saw %s and %s", key, downs[i], ups[i])
			}
		}
	})
	// https://github.com/browserbase/stagehand/issues/2266
	t.Run("S4 a chord is held together", func(t *testing.T) {
		b.do(t, press("Control", "Shift", "k"))
		keys := only(b.settle(t, page), "keydown", "keyup")
		want := []string{"keydown Control Control", "keydown Shift Control+Shift", "keydown K Control+Shift", "keyup K Control+Shift", "keyup Shift Control", "keyup Control "}
		if len(keys) != len(want) {
			t.Fatalf("the page saw\n%s", list(keys))
		}
		for i, k := range keys {
			if got := k.Type + " " + k.Key + " " + k.Mods; got != want[i] {
				t.Errorf("event %d: %q, want %q", i, got, want[i])
			}
		}
	})
	t.Run("repeat", func(t *testing.T) {
		a := press("Shift", "ArrowLeft")
		a.Repeat = 3
		b.do(t, a)
		keys := only(b.settle(t, page), "keydown", "keyup")
		if len(keys) != 12 || !released(keys) || keys[5].Mods != "Shift" {
			t.Errorf("the page saw\n%s", list(keys))
		}
	})
	t.Run("hold", func(t *testing.T) {
		done := make(chan time.Time, 1)
		started := time.Now()
		go func() {
			b.do(t, lasting(computer.Hold, 0.5, "Alt", "x"))
			done <- time.Now()
		}()
		page.awaitType(t, "keydown")
		if ended := <-done; ended.Sub(started) < 500*time.Millisecond {
			t.Errorf("held for %v", ended.Sub(started))
		}
		if keys := only(b.settle(t, page), "keydown", "keyup"); !released(keys) || len(keys) < 4 {
			t.Errorf("the page saw\n%s", list(keys))
		}
	})
}

// Any Unicode text arrives exactly: S2, bytebot#132, bytebot#137; upper case
// too: S8, docker-baseimage-selkies#183.
func (s *suite) typing(t *testing.T, b *box) {
	for name, typed := range map[string]string{
		"S2 any script":  "ñandú 美 Ελλάς עברית हिन्दी",
		"S2 emoji":       "🎉 👩‍👩‍👧 é é",
		"S8 upper case":  "HELLO World ÄÖÜ",
		"lines and tabs": "first\n\tsecond\n\nlast\t.",
		"punctuation":    "~!@#$%^&*()_+`-={}|[]\\:\";'<>?,./",
		"long":           strings.Repeat("The quick brown fox. ", 20),
	} {
		if s.opts.Window && strings.Contains(typed, "\t") {
			continue // there a tab is a press of Tab, which leaves the field
		}
		t.Run(name, func(t *testing.T) {
			page := b.opened(t)
			b.do(t, at(computer.Click, 100, 60))
			page.awaitType(t, "focusin")
			b.do(t, text(computer.TypeText, typed))
			var value string
			page.await(t, name, func(es []event) bool {
				if in := only(es, "input"); len(in) > 0 {
					value = in[len(in)-1].Value
				}
				return len(value) >= len(typed)
			})
			if value != typed {
				t.Errorf("typed %q, the field holds %q", typed, value)
			}
			if keys := only(b.settle(t, page), "keydown", "keyup"); !released(keys) {
				t.Errorf("a key is still down:\n%s", list(keys))
			}
		})
	}
}

// editing: the usual shortcuts do what they do for a person, and the clipboard
// actions use the same clipboard.
func (s *suite) editing(t *testing.T, b *box) {
	page := b.opened(t)
	value := func(want string) {
		t.Helper()
		page.await(t, "the text "+want, func(es []event) bool {
			in := only(es, "input")
			return len(in) > 0 && in[len(in)-1].Value == want
		})
	}
	b.do(t, at(computer.Click, 100, 60))
	page.awaitType(t, "focusin")
	b.do(t, text(computer.TypeText, "one two"))
	value("one two")
	b.do(t, press("Control", "a"), press("Control", "c"), press("End"), press("Control", "v"))
	value("one twoone two")
	b.do(t, press("Control", "a"), press("Control", "x"))
	value("")
	b.do(t, press("Control", "v"), press("Control", "v"))
	value("one twoone twoone twoone two")
	b.do(t, press("Control", "z"))
	value("one twoone two")
	b.do(t, press("ctrl", "A"), press("BackSpace"))
	value("")
	if !s.has(providers.Clipboard) {
		return
	}
	const foreign = "美 ñ 🎉\nsecond line\tend"
	read := func(want string) {
		t.Helper()
		if got := string(b.do(t, act(computer.ClipboardRead))[0].Value); got != jsonText(want) {
			t.Errorf("the clipboard holds %s, want %s", got, jsonText(want))
		}
	}
	read("one twoone two")
	b.do(t, text(computer.ClipboardWrite, foreign))
	read(foreign)
	b.do(t, press("Control", "v"))
	value(foreign)
	b.do(t, opening("about:blank"))
	read(foreign)
	b.do(t, text(computer.ClipboardWrite, ""))
	read("")
}

func jsonText(s string) string { return string(mustJSON(s)) }

// Whatever is pressed is released on every way out: S3, xdotool#43.
func (s *suite) release(t *testing.T, b *box) {
	page := b.opened(t)
	t.Run("S3 when ctx ends", func(t *testing.T) {
		ctx, cancel := contextWithCancel(t)
		done := make(chan error, 1)
		go func() {
			_, err := b.try(ctx, lasting(computer.Hold, 60, "Control", "Shift", "x"))
			done <- err
		}()
		page.await(t, "three keys down", func(es []event) bool { return len(only(es, "keydown")) >= 3 })
		cancel()
		if err := <-done; err == nil {
			t.Error("a cancelled hold succeeded")
		}
		if keys := only(b.settle(t, page), "keydown", "keyup"); !released(keys) {
			t.Errorf("the page saw\n%s", list(keys))
		}
	})
	t.Run("S3 when the batch fails", func(t *testing.T) {
		fails := opening("http://127.0.0.1:1/")
		if s.opts.Window {
			fails = opening("/no/such/file")
		}
		results, err := b.try(t.Context(), at(computer.Move, 100, 300), act(computer.MouseDown), fails, at(computer.Click, 5, 5))
		if err != nil || results[2].Outcome != computer.Failed {
			t.Fatalf("%v, %v", results, err)
		}
		page := b.opened(t)
		b.do(t, at(computer.Move, 120, 320))
		if m := only(b.settle(t, page), "mousemove"); len(m) == 0 || m[len(m)-1].Buttons != 0 {
			t.Errorf("a button is still down: %v", m)
		}
	})
}
