package providertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	"image/png"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
)

// Options tell Exercise about a provider what Info does not.
type Options struct {
	// NoPages: the sandboxes show no web page (Fake). Effects are then not
	// checked; everything that the provider answers still is.
	NoPages bool
	// PagesOnly: only what a page sees is tested.
	PagesOnly bool
	// Window: the page is in a window of a desktop. Its browser is a program like
	// any other: it tells neither address nor dialogs, and it may not tell why
	// an address failed.
	Window bool
	// Reach turns an address of this process into one that sandboxes reach;
	// nil: they share the loopback interface.
	Reach func(local string) string
	// NewLimited returns a provider that holds at most two sandboxes; nil:
	// there is no limit to test.
	NewLimited func(t *testing.T) providers.Provider
	// ChecksFences: batches with a stale fence or lease epoch are refused.
	ChecksFences bool
	// Recalls: batches can be recalled by their key.
	Recalls bool
	// Fleet: the provider is the bus. There an observation waits for its own
	// sandbox's batch, a vm id that has ended names no other sandbox, and a crash
	// is on record a while after its calls have ended.
	Fleet bool
	// Crash makes a sandbox die from outside; nil: not tested.
	Crash func(t *testing.T, p providers.Provider, vm string)
	// Goroutines counts those of the provider, where others of this process come
	// and go beside it; nil: all.
	Goroutines func() int
	// Strays lists what the provider has left behind after Close, such as
	// processes; nil: nothing to look for.
	Strays func(t *testing.T) []string
}

// prompt is how soon a call returns once its ctx has ended, or its sandbox was
// killed; half of it is the machine's.
const prompt = 4 * time.Second

// suite is one run of Exercise.
type suite struct {
	p      providers.Provider
	opts   Options
	info   providers.Info
	oracle *oracle
}

// Exercise holds a provider to the contract. newProvider starts one and closes
// it with t.Cleanup; it is called a few times, for a fresh one each time. The
// sandboxes of the suite are killed when their tests end.
func Exercise(t *testing.T, newProvider func(t *testing.T) providers.Provider, opts Options) {
	if !opts.PagesOnly {
		t.Run("leaks nothing", func(t *testing.T) { leaks(t, newProvider, opts) }) // first: alone
	}
	p := newProvider(t)
	s := &suite{p: p, opts: opts, info: p.Info()}
	if !opts.NoPages {
		s.oracle = newOracle(t, opts.Reach)
	}
	t.Run("contract", func(t *testing.T) {
		tests := map[string]func(*testing.T){
			"info and health": s.infoAndHealth, "lifecycle": s.lifecycle, "create": s.create, "kill": s.kill, "not found": s.notFound,
			"basics": s.together(map[string]func(*testing.T, *box){"refusals": s.refusals, "fences": s.fences, "recall": s.recall, "results": s.results}),
			"pause":  s.pause, "snapshot": s.snapshot, "cancel": s.cancel, "concurrency": s.concurrency, "crash": s.crash, "full": s.full,
		}
		if opts.PagesOnly {
			clear(tests)
		}
		if !opts.NoPages {
			maps.Copy(tests, s.pageTests())
		}
		for name, test := range tests {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				test(t)
			})
		}
	})
	t.Run("inventory is empty at the end", func(t *testing.T) {
		if list, err := p.List(t.Context()); err != nil || len(list) != 0 {
			t.Errorf("List: %v, %v", list, err)
		}
	})
}

// together runs tests one after the other in one sandbox, which costs less
// than one for each.
func (s *suite) together(tests map[string]func(*testing.T, *box)) func(*testing.T) {
	return func(t *testing.T) {
		b := s.sandbox(t)
		for name, test := range tests {
			t.Run(name, func(t *testing.T) { test(t, b) })
		}
	}
}

func (s *suite) has(capability string) bool { return slices.Contains(s.info.Capabilities, capability) }

// box is a sandbox of one test.
type box struct {
	*suite
	vm      string
	fence   uint64
	display computer.Display
}

func newVM() string { return fmt.Sprintf("vm-%08x", rand.Uint32()) }

// sandbox makes a sandbox that is killed with the test.
func (s *suite) sandbox(t *testing.T) *box { return s.sandboxOf(t, computer.DefaultDisplay) }

func (s *suite) sandboxOf(t *testing.T, d computer.Display) *box {
	t.Helper()
	b := &box{suite: s, vm: newVM(), fence: rand.Uint64N(1000) + 1000, display: d}
	if _, err := s.p.Create(t.Context(), providers.Spec{VM: b.vm, Fence: b.fence, Tenant: "acme", Role: "default", Display: d}); err != nil {
		t.Fatalf("create: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
		defer cancel()
		if err := s.p.Kill(ctx, b.vm); err != nil {
			t.Errorf("kill: %v", err)
		}
	})
	return b
}

func (b *box) try(ctx context.Context, actions ...computer.Action) ([]providers.Result, error) {
	return b.p.Execute(ctx, providers.Batch{VM: b.vm, Fence: b.fence, Key: newVM(), Actions: actions})
}

// do runs actions that must all be ok.
func (b *box) do(t *testing.T, actions ...computer.Action) []providers.Result {
	t.Helper()
	results, err := b.try(t.Context(), actions...)
	if err != nil {
		t.Fatalf("execute: %v", err)
	}
	if len(results) != len(actions) {
		t.Fatalf("%d results for %d actions", len(results), len(actions))
	}
	for i, r := range results {
		if r.Outcome != computer.OK {
			t.Fatalf("action %d (%s): %s, %v", i, actions[i].Type, r.Outcome, r.Error)
		}
	}
	return results
}

func (b *box) observe(t *testing.T) providers.View {
	t.Helper()
	v, err := b.p.Observe(t.Context(), b.vm)
	if err != nil {
		t.Fatalf("observe: %v", err)
	}
	return v
}

func decode(t *testing.T, raw []byte) image.Image {
	t.Helper()
	img, err := png.Decode(bytes.NewReader(raw))
	if err != nil {
		t.Fatalf("decode the picture: %v", err)
	}
	return img
}

// wantErr fails unless err is want.
func wantErr(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: %v; want %v", what, err, want)
	}
}

// eventually polls until ok, for at most ten seconds.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(60 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("not within 10 s: %s", what)
		}
	}
}

// Actions, in short.

func act(typ computer.Type) computer.Action { return computer.Action{Type: typ} }

func at(typ computer.Type, x, y int) computer.Action {
	return computer.Action{Type: typ, X: &x, Y: &y}
}

func press(keys ...string) computer.Action { return computer.Action{Type: computer.Key, Keys: keys} }

func text(typ computer.Type, s string) computer.Action { return computer.Action{Type: typ, Text: &s} }

func lasting(typ computer.Type, seconds float64, keys ...string) computer.Action {
	return computer.Action{Type: typ, Seconds: &seconds, Keys: keys}
}

func drag(points ...computer.Point) computer.Action {
	return computer.Action{Type: computer.Drag, Path: points}
}

func opening(target string) computer.Action {
	return computer.Action{Type: computer.Open, Target: target}
}

// leaks starts a provider, uses it, closes it, and looks for what is left.
func leaks(t *testing.T, newProvider func(t *testing.T) providers.Provider, opts Options) {
	count := runtime.NumGoroutine
	if opts.Goroutines != nil {
		count = opts.Goroutines
	}
	before := count()
	t.Run("use", func(t *testing.T) {
		p := newProvider(t)
		s := &suite{p: p, opts: opts, info: p.Info()}
		b := s.sandbox(t)
		b.do(t, at(computer.Click, 5, 5), act(computer.Screenshot))
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if _, err := b.try(ctx, lasting(computer.Hold, 5, "Shift")); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("cancelled hold: %v", err)
		}
		b.observe(t)
	})
	deadline := time.Now().Add(30 * time.Second)
	for count() > before && time.Now().Before(deadline) {
		runtime.Gosched()
		<-time.After(5 * time.Millisecond)
	}
	if n := count(); n > before {
		buf := make([]byte, 1<<20)
		t.Errorf("%d goroutines, %d before; all stacks:\n%s", n, before, buf[:runtime.Stack(buf, true)])
	}
	if opts.Strays != nil {
		if strays := opts.Strays(t); len(strays) > 0 {
			t.Errorf("left behind: %s", strings.Join(strays, "; "))
		}
	}
}
