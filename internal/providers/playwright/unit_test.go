package playwright

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/internal/computer"
	"berth/internal/providers"
)

func TestAddress(t *testing.T) {
	for target, want := range map[string]string{
		"https://example.com/x?y#z": "https://example.com/x?y#z",
		"HTTP://example.com":        "HTTP://example.com",
		"example.com/x":             "https://example.com/x",
		"example.com:8443":          "https://example.com:8443",
		"localhost:8080/x":          "http://localhost:8080/x",
		"127.0.0.1:8080":            "http://127.0.0.1:8080",
		"[::1]:80/":                 "http://[::1]:80/",
		" example.com ":             "https://example.com",
		"about:blank":               "about:blank",
		"data:text/html,<p>x":       "data:text/html,<p>x",
	} {
		if got, err := address(target); err != nil || got != want {
			t.Errorf("%q: %q, %v; want %q", target, got, err, want)
		}
	}
	for target, want := range map[string]error{
		"/etc/passwd": providers.ErrUnsupported, "./x": providers.ErrUnsupported, "~/x": providers.ErrUnsupported,
		"file:///etc/passwd": providers.ErrUnsupported, "FILE:/etc/passwd": providers.ErrUnsupported,
		"javascript:alert(1)": providers.ErrInvalid, "chrome://settings": providers.ErrInvalid, "view-source:file:///etc/passwd": providers.ErrInvalid,
		"ftp://example.com": providers.ErrInvalid, "http://": providers.ErrInvalid, "two words": providers.ErrInvalid, "": providers.ErrInvalid,
		"devtools://devtools/bundled/inspector.html": providers.ErrInvalid, "about:version": providers.ErrInvalid,
	} {
		if got, err := address(target); !errors.Is(err, want) {
			t.Errorf("%q: %q, %v; want %v", target, got, err, want)
		}
	}
}

func FuzzAddress(f *testing.F) {
	f.Add("example.com/x")
	f.Add("view-source:file:///")
	f.Fuzz(func(t *testing.T, target string) {
		got, err := address(target)
		if err != nil {
			return
		}
		lower := strings.ToLower(got)
		for _, ok := range []string{"http://", "https://", "data:", "about:blank"} {
			if strings.HasPrefix(lower, ok) {
				return
			}
		}
		t.Errorf("%q became %q", target, got)
	})
}

func TestInterpolate(t *testing.T) {
	for name, path := range map[string][]computer.Point{
		"short":      {{X: 10, Y: 10}, {X: 12, Y: 10}},
		"long":       {{}, {X: 3000, Y: 2000}},
		"there back": {{X: 5, Y: 5}, {X: 500, Y: 5}, {X: 5, Y: 5}},
		"no way":     {{X: 5, Y: 5}, {X: 5, Y: 5}},
		"many":       make([]computer.Point, computer.MaxPath),
	} {
		got := interpolate(path)
		if got[len(got)-1] != path[len(path)-1] {
			t.Errorf("%s: it ends at %v", name, got[len(got)-1])
		}
		if len(got) > maxDragSteps+2*len(path) {
			t.Errorf("%s: %d points", name, len(got))
		}
		next := 0
		for _, p := range append([]computer.Point{path[0]}, got...) {
			for next < len(path) && p == path[next] {
				next++
			}
		}
		if next != len(path) {
			t.Errorf("%s: point %d of the path is left out", name, next)
		}
		from, longest := path[0], 0.0
		for _, p := range got {
			longest, from = max(longest, distance(from, p)), p
		}
		if name != "long" && longest > 2*dragStep || math.IsNaN(longest) {
			t.Errorf("%s: a jump of %g px", name, longest)
		}
	}
}

// Every key that the vocabulary knows can be pressed.
func TestEveryKeyResolves(t *testing.T) {
	for _, name := range []string{
		"Alt", "AltGraph", "CapsLock", "Control", "Meta", "NumLock", "ScrollLock", "Shift", "Enter", "Tab",
		"ArrowDown", "ArrowLeft", "ArrowRight", "ArrowUp", "End", "Home", "PageDown", "PageUp",
		"Backspace", "Delete", "Insert", "ContextMenu", "Escape", "Pause", "PrintScreen", "Help",
		"F1", "F12", "F13", "F24", "AudioVolumeMute", "AudioVolumeDown", "AudioVolumeUp",
		"MediaTrackNext", "MediaTrackPrevious", "MediaStop", "MediaPlayPause", "BrowserBack", "BrowserForward", "BrowserRefresh",
		"a", "A", "~", " ", "é", "美", "🎉",
	} {
		key, err := computer.CanonicalKey(name)
		if err != nil {
			t.Errorf("%s is not in the vocabulary: %v", name, err)
			continue
		}
		if st, err := resolve(key, false); err != nil || st.key != key {
			t.Errorf("%s: %+v, %v", key, st, err)
		}
	}
	if _, err := resolve("NoSuchKey", false); !errors.Is(err, providers.ErrInvalid) {
		t.Errorf("an unknown key: %v", err)
	}
	if st, err := resolve("t", true); err != nil || st.name != "KeyT" {
		t.Errorf("Shift+t: %+v, %v", st, err)
	}
}

// What is missing is named, with the way to get it.
func TestMissingPrograms(t *testing.T) {
	_, err := New(t.Context(), Options{StateDir: t.TempDir(), Executable: "/no/such/chromium"})
	if err == nil || !strings.Contains(err.Error(), "apt-get install chromium") || !strings.Contains(err.Error(), "npx playwright install chromium") {
		t.Errorf("without Chromium: %v", err)
	}
	t.Setenv("PATH", t.TempDir())
	t.Setenv("HOME", t.TempDir())
	t.Setenv("BERTH_CHROMIUM", "")
	if _, err := findExecutable(""); err == nil || !strings.Contains(err.Error(), "apt-get install chromium") {
		t.Errorf("without any browser: %v", err)
	}
	t.Setenv(nodeVariable, "")
	if err := locateNode(); err == nil || !strings.Contains(err.Error(), "apt-get install nodejs") {
		t.Errorf("without Node.js: %v", err)
	}
	old := filepath.Join(t.TempDir(), "node")
	if err := os.WriteFile(old, []byte("#!/bin/sh\necho v18.1.0\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv(nodeVariable, old)
	if err := locateNode(); err == nil || !strings.Contains(err.Error(), "v18.1.0") {
		t.Errorf("with an old Node.js: %v", err)
	}
	if _, err := New(t.Context(), Options{}); err == nil || !strings.Contains(err.Error(), "StateDir") {
		t.Errorf("without StateDir: %v", err)
	}
}

func TestCheckSpec(t *testing.T) {
	for what, c := range map[string]struct {
		spec providers.Spec
		want error
	}{
		"env":           {providers.Spec{VM: "vm", Env: map[string]string{"LD_PRELOAD": "x"}}, providers.ErrUnsupported},
		"vm with slash": {providers.Spec{VM: "../vm"}, providers.ErrInvalid},
	} {
		if err := checkSpec(&c.spec); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", what, err, c.want)
		}
	}
	good := providers.Spec{VM: "vm", Env: map[string]string{"TZ": "Asia/Tokyo"}}
	if err := checkSpec(&good); err != nil || good.Display != computer.DefaultDisplay {
		t.Errorf("%+v, %v", good, err)
	}
}

// A create may choose the browser's time zone, and that dialogs are accepted.
func testSpecReachesTheBrowser(t *testing.T, p *Provider) {
	if _, err := p.Create(t.Context(), providers.Spec{VM: "spec", Fence: 1, Env: map[string]string{"TZ": "Asia/Tokyo"}, Metadata: map[string]string{"dialogs": "accept"}}); err != nil {
		t.Fatal(err)
	}
	do(t, p, "spec", computer.Action{Type: computer.Open, Target: `data:text/html,<script>document.title = new Date(0).getHours() + " " + confirm("sure?") + " " + prompt("name?", "nobody")</script>`})
	view, err := p.Observe(t.Context(), "spec")
	if err != nil || view.Observation.Title != "9 true nobody" {
		t.Errorf("the page says %q, %v", view.Observation.Title, err)
	}
	for _, d := range view.Observation.Dialogs {
		if d.Answer != "accepted" {
			t.Errorf("dialog %+v", d)
		}
	}
}
