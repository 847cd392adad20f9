package replay_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	pw "github.com/mxschmitt/playwright-go"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/providers/playwright/browsertest"
	"berth/internal/replay"
)

// hostile is what a page, a model or a person may write.
const hostile = `</title></script><script>window.hacked=1</script><img src=x onerror="window.hacked=1">'"` + "`${window.hacked=1}`" + `<!--`

func picture(t testing.TB, d computer.Display, c color.RGBA) []byte {
	t.Helper()
	img := image.NewPaletted(image.Rect(0, 0, d.Width, d.Height), color.Palette{c})
	var buf bytes.Buffer
	if err := png.Encode(&buf, img); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// entry makes a journal entry as it is read from LOOPS.
func entry(t testing.TB, seq int, name string, data any) looprunner.Entry {
	t.Helper()
	raw, err := json.Marshal(data)
	if err != nil {
		t.Fatal(err)
	}
	e := looprunner.Entry{Name: name, Sequence: uint64(seq), Stored: time.Date(2026, 11, 30, 12, 0, seq, 0, time.UTC), Type: events.LoopType(name), Data: raw}
	if err := e.Decode(&e.Head); err != nil {
		t.Fatal(err)
	}
	return e
}

var display = computer.Display{Width: 1000, Height: 700}

// journal is a loop whose every text is hostile. Its second picture has
// expired, its third is none.
func journal(t testing.TB) ([]looprunner.Entry, replay.Frames) {
	seen := func(object string) *computer.Observation {
		return &computer.Observation{Screenshot: computer.Picture{Object: object, MediaType: hostile, Width: 1000, Height: 700}, Title: hostile, URL: "javascript:window.hacked=1",
			Cursor: &computer.Point{X: 20, Y: 30}, Dialogs: []computer.Dialog{{Kind: "alert", Message: hostile, Answer: "accepted"}}}
	}
	num := func(n int) *int { return &n }
	text := func(s string) *string { return &s }
	head := func(step int) events.LoopEntry { return events.LoopEntry{LoopID: "l", Step: step} }
	actions := []computer.Action{
		{Type: computer.Click, X: num(250), Y: num(125), Button: computer.Left, Count: 2, Modifiers: []string{"Shift"}},
		{Type: computer.TypeText, Text: text(hostile)},
		{Type: computer.Key, Keys: []string{"Control", "a"}, Repeat: 1},
		{Type: computer.Drag, Path: []computer.Point{{X: 100, Y: 600}, {X: 300, Y: 650}, {X: 900, Y: 600}}},
		{Type: computer.Scroll, X: num(500), Y: num(350), DY: 3},
	}
	results := make([]computer.ActionResult, len(actions))
	for i := range results {
		results[i] = computer.ActionResult{Outcome: computer.OK}
	}
	results[1].Value = json.RawMessage(fmt.Sprintf("%q", hostile))
	list := []struct {
		name string
		data any
	}{
		{events.LoopStartedName, events.LoopStarted{LoopEntry: head(0), Tenant: "default", VMID: "v", Start: events.LoopStart{Goal: hostile, Model: json.RawMessage(`{"name":"anthropic","model":"m<b>"}`)}}},
		{events.LoopSandboxName, events.LoopSandbox{LoopEntry: head(0), VMID: "v", ServerID: "s-01", Display: display}},
		{events.LoopObservedName, events.LoopObserved{LoopEntry: head(0), Observation: *seen("v/1"), Timing: events.Timing{RanMs: 12}}},
		{events.LoopThinkingName, events.LoopThinking{LoopEntry: head(1)}},
		{events.LoopDecidedName, events.LoopDecided{LoopEntry: head(1), Label: hostile, Actions: actions, ThoughtMs: 34.5, Usage: events.LoopUsage{InputTokens: 1200, OutputTokens: 34},
			Reply: json.RawMessage(fmt.Sprintf("{%q:%q}", hostile, hostile))}},
		{events.LoopActedName, events.LoopActed{LoopEntry: head(1), Outcome: computer.OK, Actions: results, Observation: seen("v/2"), Timing: events.Timing{QueuedMs: 1.5, RanMs: 56}}},
		{events.LoopMessageName, events.LoopControl{LoopEntry: head(1), Text: hostile}},
		{events.LoopThinkingName, events.LoopThinking{LoopEntry: head(2)}},
		{events.LoopDecidedName, events.LoopDecided{LoopEntry: head(2), NeedsInput: hostile}},
		{events.LoopObservedName, events.LoopObserved{LoopEntry: head(3), Observation: *seen("v/3")}},
		{events.LoopThinkingName, events.LoopThinking{LoopEntry: head(3)}},
		{events.LoopDecidedName, events.LoopDecided{LoopEntry: head(3), Failed: &computer.Fault{Code: hostile, Message: hostile}}},
		{events.LoopFinishedName, events.LoopFinished{LoopEntry: head(3), Outcome: hostile, Code: hostile, Message: hostile}},
	}
	var out []looprunner.Entry
	for i, e := range list {
		out = append(out, entry(t, i+1, e.name, e.data))
	}
	frames := func(_ context.Context, object string) ([]byte, error) {
		switch object {
		case "v/1":
			return picture(t, display, color.RGBA{10, 120, 200, 255}), nil
		case "v/2":
			return nil, replay.ErrExpired
		case "v/3":
			return []byte("<svg xmlns='http://www.w3.org/2000/svg' onload='window.hacked=1'/>"), nil
		}
		return nil, errors.New("no such picture: " + object)
	}
	return out, frames
}

// browse opens a page in a real Chromium and returns what it asks for over
// the network and what it complains of.
func browse(t *testing.T, html []byte) (_ pw.Page, seen func() (requests, complaints []string)) {
	t.Helper()
	page, err := browsertest.Start(t).NewPage(pw.BrowserNewPageOptions{Viewport: &pw.Size{Width: 900, Height: 900}})
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var requests, complaints []string
	page.OnConsole(func(m pw.ConsoleMessage) {
		mu.Lock()
		defer mu.Unlock()
		complaints = append(complaints, m.Type()+": "+m.Text())
	})
	page.OnPageError(func(err error) {
		mu.Lock()
		defer mu.Unlock()
		complaints = append(complaints, err.Error())
	})
	page.OnRequest(func(r pw.Request) {
		if !strings.HasPrefix(r.URL(), "data:") {
			mu.Lock()
			defer mu.Unlock()
			requests = append(requests, r.URL())
		}
	})
	file := filepath.Join(t.TempDir(), "page.html")
	if err := os.WriteFile(file, html, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := page.Goto("file://" + file); err != nil {
		t.Fatal(err)
	}
	return page, func() ([]string, []string) {
		mu.Lock()
		defer mu.Unlock()
		return requests, complaints
	}
}

func evaluate[T any](t *testing.T, page pw.Page, script string) T {
	t.Helper()
	v, err := page.Evaluate(`() => JSON.stringify((` + script + `)())`)
	if err != nil {
		t.Fatalf("%v in %s", err, script)
	}
	var out T
	text, _ := v.(string)
	if err := json.Unmarshal([]byte(text), &out); err != nil {
		t.Fatalf("%v: %q", err, text)
	}
	return out
}

func TestPageInChromium(t *testing.T) {
	entries, frames := journal(t)
	story, err := replay.Tell(entries)
	if err != nil {
		t.Fatal(err)
	}
	var html bytes.Buffer
	if err := replay.HTML(t.Context(), &html, story, frames, 24*time.Hour); err != nil {
		t.Fatal(err)
	}
	page, seen := browse(t, html.Bytes())

	if hacked := evaluate[bool](t, page, `() => 'hacked' in window`); hacked {
		t.Error("a script of the journal's ran")
	}
	type state struct {
		Scripts, Styles, Strange int
		Titles                   []string
		Shown                    []string
		Pictures                 []string
		Text                     string
	}
	got := evaluate[state](t, page, `() => ({
		Scripts: document.scripts.length, Styles: document.querySelectorAll('style,link[rel=stylesheet]').length,
		Strange: document.querySelectorAll('iframe,object,embed,form,a,base,[onerror],[onload],[style]').length,
		Titles: Array.from(document.querySelectorAll('.title'), e => e.textContent),
		Shown: Array.from(document.querySelectorAll('.page.shown'), e => e.id),
		Pictures: Array.from(document.images, i => i.complete + ' ' + i.naturalWidth + 'x' + i.naturalHeight),
		Text: document.body.textContent})`)
	if got.Scripts != 1 || got.Styles != 1 || got.Strange != 0 {
		t.Errorf("%d scripts, %d styles, %d other elements that it should not have", got.Scripts, got.Styles, got.Strange)
	}
	if len(got.Titles) < 2 || got.Titles[0] != hostile {
		t.Errorf("titles %q, want them as they were written", got.Titles)
	}
	if fmt.Sprint(got.Pictures) != "[true 1000x700]" {
		t.Errorf("pictures %v, want the one that is there, decoded", got.Pictures)
	}
	for _, want := range []string{"This picture has expired: FRAMES keeps pictures for 24 hours.", "is no picture", "1200", "34.5 ms", "56.0 ms", "asks:"} {
		if !strings.Contains(got.Text, want) {
			t.Errorf("the page does not say %q", want)
		}
	}

	// Marks are where the actions are, though the page shows the picture smaller.
	type marks struct {
		Scale                      float64
		Click, Start, Tip, Shaft   [2]float64
		Typed, Chord, Scrolled     string
		TypedLeft, TypedTop, Width float64
	}
	m := evaluate[marks](t, page, `() => {
		const img = document.images[0].getBoundingClientRect(), scale = img.width / 1000, s = document.getElementById('turn-1');
		const center = e => { const r = e.getBoundingClientRect(); return [(r.x + r.width / 2 - img.x) / scale, (r.y + r.height / 2 - img.y) / scale]; };
		const end = e => { const p = e.points[e.points.length - 1].matrixTransform(e.getScreenCTM()); return [(p.x - img.x) / scale, (p.y - img.y) / scale]; };
		const typed = s.querySelector('.mark.type text');
		return {Scale: scale, Width: img.width, Click: center(s.querySelector('.mark.click .dot')), Start: center(s.querySelector('.mark.drag .dot')),
			Tip: end(s.querySelector('.mark.drag polyline.line')), Shaft: end(s.querySelector('.mark.scroll polyline.line')),
			Typed: typed.textContent, Chord: s.querySelector('.mark.key text').textContent, Scrolled: s.querySelector('.mark.scroll text').textContent,
			TypedLeft: (typed.getBoundingClientRect().x - img.x) / scale, TypedTop: (typed.getBoundingClientRect().y - img.y) / scale};
	}`)
	if m.Scale >= 1 || m.Width < 200 {
		t.Errorf("the picture is shown at %.2f of its size, %g px wide; want it to fit the window", m.Scale, m.Width)
	}
	for _, p := range []struct {
		what string
		got  [2]float64
		x, y float64
	}{{"click", m.Click, 250, 125}, {"start of the drag", m.Start, 100, 600}, {"end of the drag", m.Tip, 900, 600}, {"end of the scroll's arrow", m.Shaft, 500, 440}} {
		if math.Abs(p.got[0]-p.x) > 1 || math.Abs(p.got[1]-p.y) > 1 {
			t.Errorf("%s is drawn at %.1f,%.1f, want %g,%g", p.what, p.got[0], p.got[1], p.x, p.y)
		}
	}
	if !strings.HasPrefix(m.Typed, "“</title></script>") || m.Chord != "key Control+a" || m.Scrolled != "scroll 0,3" {
		t.Errorf("captions %q, %q, %q", m.Typed, m.Chord, m.Scrolled)
	}
	if math.Abs(m.TypedLeft-270) > 12 || m.TypedTop < 125 || m.TypedTop > 200 {
		t.Errorf("what is typed is written at %.0f,%.0f, want it beside the click", m.TypedLeft, m.TypedTop)
	}

	// The keyboard leads through the turns.
	if fmt.Sprint(got.Shown) != "[turn-1]" {
		t.Errorf("at first it shows %v", got.Shown)
	}
	for _, key := range []struct{ press, shows string }{
		{"ArrowRight", "turn-2"}, {"j", "turn-3"}, {"ArrowRight", "end"}, {"ArrowRight", "end"}, {"ArrowLeft", "turn-3"}, {"Home", "turn-1"}, {"End", "end"}, {"k", "turn-3"},
	} {
		if err := page.Keyboard().Press(key.press); err != nil {
			t.Fatal(err)
		}
		if shown := evaluate[[]string](t, page, `() => Array.from(document.querySelectorAll('.page'), e => e).filter(e => e.offsetParent !== null).map(e => e.id)`); fmt.Sprint(shown) != "["+key.shows+"]" {
			t.Errorf("after %s it shows %v, want %s", key.press, shown, key.shows)
		}
	}
	requests, complaints := seen()
	if len(requests) != 1 || !strings.HasPrefix(requests[0], "file://") {
		t.Errorf("the page asked for %v, want nothing but itself", requests)
	}
	if len(complaints) > 0 {
		t.Errorf("the console says %v", complaints)
	}
}

// The policy is not an ornament: a script that came in after all would not run.
func TestPolicyForbidsOtherScripts(t *testing.T) {
	entries, frames := journal(t)
	story, err := replay.Tell(entries)
	if err != nil {
		t.Fatal(err)
	}
	var html bytes.Buffer
	if err := replay.HTML(t.Context(), &html, story, frames, 0); err != nil {
		t.Fatal(err)
	}
	broken := bytes.Replace(html.Bytes(), []byte("<main>"), []byte(`<main><script>window.hacked=1</script><img src="http://127.0.0.1:9/x.png" onerror="window.hacked=2">`), 1)
	page, seen := browse(t, broken)
	if hacked := evaluate[bool](t, page, `() => 'hacked' in window`); hacked {
		t.Error("a script that is not the page's ran")
	}
	if _, complaints := seen(); len(complaints) < 3 {
		t.Errorf("the browser refused only %v", complaints)
	}
}

// What cannot be fetched for another reason than its age ends the export.
func TestFaultOfFramesEndsThePage(t *testing.T) {
	entries, _ := journal(t)
	story, err := replay.Tell(entries)
	if err != nil {
		t.Fatal(err)
	}
	away := errors.New("the bus is away")
	err = replay.HTML(t.Context(), &bytes.Buffer{}, story, func(context.Context, string) ([]byte, error) { return nil, away }, 0)
	if !errors.Is(err, away) {
		t.Errorf("error %v, want %v", err, away)
	}
}

func TestTellNeedsAStart(t *testing.T) {
	if _, err := replay.Tell(nil); !errors.Is(err, replay.ErrNoLoop) {
		t.Errorf("error %v, want ErrNoLoop", err)
	}
}
