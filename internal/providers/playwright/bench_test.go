package playwright

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
)

// laps are times of one operation each. report gives their median, 99th
// percentile and minimum in milliseconds; the minimum is what the operation
// takes when nothing else runs on the machine.
type laps []time.Duration

func (l laps) report(b *testing.B) {
	slices.Sort(l)
	at := func(q float64) float64 { return float64(l[int(q*float64(len(l)-1))].Microseconds()) / 1000 }
	b.ReportMetric(at(0.5), "p50-ms")
	b.ReportMetric(at(0.99), "p99-ms")
	b.ReportMetric(at(0), "min-ms")
	b.ReportMetric(0, "ns/op")
}

func (l *laps) lap(fn func()) {
	started := time.Now()
	fn()
	*l = append(*l, time.Since(started))
}

func create(b *testing.B, p *Provider, vm string) {
	b.Helper()
	if _, err := p.Create(b.Context(), providers.Spec{VM: vm, Fence: 1}); err != nil {
		b.Fatal(err)
	}
}

func kill(b *testing.B, p *Provider, vm string) {
	b.Helper()
	if err := p.Kill(context.WithoutCancel(b.Context()), vm); err != nil {
		b.Fatal(err)
	}
}

// awaitSpares waits until n spares are warm.
func awaitSpares(t testing.TB, p *Provider, n int) {
	t.Helper()
	deadline := time.NewTimer(60 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		p.mu.Lock()
		have := len(p.spares)
		p.mu.Unlock()
		if have >= n {
			return
		}
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("%d spares after a minute, want %d", have, n)
		}
	}
}

func BenchmarkCreateWarm(b *testing.B) {
	p := start(b, Options{Spares: 1})
	var l laps
	for i := range b.N {
		awaitSpares(b, p, 1)
		vm := fmt.Sprint("vm", i)
		l.lap(func() { create(b, p, vm) })
		kill(b, p, vm)
	}
	l.report(b)
}

func BenchmarkCreateWarmOtherDisplay(b *testing.B) {
	p := start(b, Options{Spares: 1})
	var l laps
	for i := range b.N {
		awaitSpares(b, p, 1)
		vm := fmt.Sprint("vm", i)
		l.lap(func() {
			if _, err := p.Create(b.Context(), providers.Spec{VM: vm, Fence: 1, Display: computer.Display{Width: 1024, Height: 768}}); err != nil {
				b.Fatal(err)
			}
		})
		kill(b, p, vm)
	}
	l.report(b)
}

func BenchmarkCreateCold(b *testing.B) {
	p := start(b, Options{Spares: -1})
	var l laps
	for i := range b.N {
		vm := fmt.Sprint("vm", i)
		l.lap(func() { create(b, p, vm) })
		kill(b, p, vm)
	}
	l.report(b)
}

func BenchmarkKill(b *testing.B) {
	p := start(b, Options{Spares: 1})
	var l laps
	for i := range b.N {
		awaitSpares(b, p, 1)
		vm := fmt.Sprint("vm", i)
		create(b, p, vm)
		l.lap(func() { kill(b, p, vm) })
	}
	l.report(b)
}

// The pages of the benchmarks: one with text and a field, and one whose
// picture hardly compresses.
var (
	benchPage   = benchHTML("white", "black")
	photoLike   = benchHTML("linear-gradient(45deg,rgb(200,30,60),rgb(20,60,200))", "white")
	filler      = strings.Repeat("The quick brown fox jumps over the lazy dog. ", 80)
	benchLayout = `data:text/html,<title>bench</title><body style="background:%s"><textarea style="width:600px;height:200px" autofocus></textarea><p style="color:%s;font-size:20px">%s`
)

func benchHTML(background, colour string) string {
	return fmt.Sprintf(benchLayout, background, colour, filler)
}

func benchActions(b *testing.B, actions ...computer.Action) {
	benchActionsOn(b, benchPage, actions...)
}

func benchActionsOn(b *testing.B, page string, actions ...computer.Action) {
	p := start(b, Options{Spares: -1})
	create(b, p, "vm")
	run := func(actions ...computer.Action) {
		results, err := p.Execute(b.Context(), providers.Batch{VM: "vm", Actions: actions})
		if err != nil {
			b.Fatal(err)
		}
		for _, r := range results {
			if r.Error != nil {
				b.Fatal(r.Error)
			}
		}
	}
	run(computer.Action{Type: computer.Open, Target: page})
	var l laps
	for range b.N {
		l.lap(func() { run(actions...) })
	}
	l.report(b)
	kill(b, p, "vm")
}

func BenchmarkScreenshot(b *testing.B) {
	benchActions(b, computer.Action{Type: computer.Screenshot})
}

func BenchmarkScreenshotOfAPhoto(b *testing.B) {
	benchActionsOn(b, photoLike, computer.Action{Type: computer.Screenshot})
}

func BenchmarkClick(b *testing.B) {
	x, y := 100, 100
	benchActions(b, computer.Action{Type: computer.Click, X: &x, Y: &y})
}

func BenchmarkType25(b *testing.B) {
	text := "abcdefghijklmnopqrstuvwxy"
	benchActions(b, computer.Action{Type: computer.TypeText, Text: &text})
}

func BenchmarkKeyChord(b *testing.B) {
	benchActions(b, computer.Action{Type: computer.Key, Keys: []string{"Control", "a"}})
}

func BenchmarkDrag(b *testing.B) {
	benchActions(b, computer.Action{Type: computer.Drag, Path: []computer.Point{{X: 100, Y: 400}, {X: 400, Y: 600}}})
}

func BenchmarkScroll3(b *testing.B) {
	x, y := 600, 600
	benchActions(b, computer.Action{Type: computer.Scroll, X: &x, Y: &y, DY: 3})
}

func BenchmarkClipboard(b *testing.B) {
	text := "some text"
	benchActions(b, computer.Action{Type: computer.ClipboardWrite, Text: &text}, computer.Action{Type: computer.ClipboardRead})
}

func BenchmarkObserve(b *testing.B) {
	p := start(b, Options{Spares: -1})
	create(b, p, "vm")
	if _, err := p.Execute(b.Context(), providers.Batch{VM: "vm", Actions: []computer.Action{{Type: computer.Open, Target: benchPage}}}); err != nil {
		b.Fatal(err)
	}
	var l laps
	for range b.N {
		l.lap(func() {
			if _, err := p.Observe(b.Context(), "vm"); err != nil {
				b.Fatal(err)
			}
		})
	}
	l.report(b)
	kill(b, p, "vm")
}

// BenchmarkPause pauses and resumes a sandbox that shows a page of the shop,
// with cookies and storage, and keeps it as a template.
func BenchmarkPause(b *testing.B) {
	p, shop := start(b, Options{Spares: -1}), newShop(b)
	create(b, p, "vm")
	visit(b, p, "vm", shop.URL+"/vm")
	shop.await(b, "/vm")
	evaluate(b, p, "vm", `fetch("/cookies").then(() => store("session", "local", "db"))`)
	var pauses, resumes, snapshots laps
	for range b.N {
		snapshots.lap(func() {
			name, err := p.Snapshot(b.Context(), "vm")
			if err == nil {
				err = os.RemoveAll(filepath.Join(p.kept.dir, name)) // there is a limit
			}
			if err != nil {
				b.Fatal(err)
			}
		})
		pauses.lap(func() { pause(b, p, "vm") })
		resumes.lap(func() { resume(b, p, "vm") })
	}
	for name, l := range map[string]laps{"pause": pauses, "resume": resumes, "snapshot": snapshots} {
		slices.Sort(l)
		b.ReportMetric(float64(l[len(l)/2].Microseconds())/1000, name+"-p50-ms")
		b.ReportMetric(float64(l[len(l)*99/100].Microseconds())/1000, name+"-p99-ms")
	}
	b.ReportMetric(0, "ns/op")
	kill(b, p, "vm")
}
