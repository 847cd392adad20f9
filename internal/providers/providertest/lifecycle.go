package providertest

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
)

func (s *suite) infoAndHealth(t *testing.T) {
	if s.info.Kind == "" || len(s.info.Capabilities) == 0 || !slices.IsSorted(s.info.Capabilities) {
		t.Errorf("Info: %+v; want a kind and sorted capabilities", s.info)
	}
	first, err := s.p.Health(t.Context())
	if err != nil || first.BootID == "" {
		t.Fatalf("Health: %+v, %v", first, err)
	}
	if again, err := s.p.Health(t.Context()); err != nil || again != first {
		t.Errorf("the boot id changed by itself: %+v, then %+v, %v", first, again, err)
	}
	s.p.Info().Capabilities[0] = "changed by the caller"
	if s.p.Info().Capabilities[0] == "changed by the caller" {
		t.Error("Info hands out its own slice")
	}
}

func (s *suite) lifecycle(t *testing.T) {
	spec := providers.Spec{
		VM: newVM(), Fence: 41, Tenant: "acme", Role: "sales", Owner: "ann", Session: "s-1", Display: computer.Display{Width: 1000, Height: 700},
		Metadata: map[string]string{"why": "test"},
	}
	if !s.info.Displays {
		spec.Display = computer.DefaultDisplay
	}
	started := time.Now()
	made, err := s.p.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // t's own ctx has ended by then
		if err := s.p.Kill(context.Background(), spec.VM); err != nil {
			t.Error(err)
		}
	})
	if made.VM != spec.VM || made.Fence != 41 || made.Tenant != "acme" || made.Role != "sales" || made.Owner != "ann" || made.Session != "s-1" ||
		made.ID == "" || made.State != providers.Running || made.Display != spec.Display || !slices.Equal(made.Capabilities, s.info.Capabilities) {
		t.Errorf("created %+v", made)
	}
	if made.CreatedAt.Before(started.Add(-time.Minute)) || made.CreatedAt.After(time.Now().Add(time.Minute)) {
		t.Errorf("created at %v", made.CreatedAt)
	}
	got, err := s.p.Get(t.Context(), spec.VM)
	if err != nil || got.ID != made.ID || got.Fence != 41 || got.Display != spec.Display {
		t.Errorf("Get: %+v, %v", got, err)
	}
	list, err := s.p.List(t.Context())
	if err != nil || !slices.ContainsFunc(list, func(o providers.Sandbox) bool { return o.VM == spec.VM && o.Fence == 41 && o.Tenant == "acme" }) {
		t.Errorf("List: %+v, %v", list, err)
	}
	if err := s.p.SetTimeout(t.Context(), spec.VM, time.Hour); err != nil {
		t.Errorf("SetTimeout: %v", err)
	}
	view, err := s.p.Observe(t.Context(), spec.VM)
	if err != nil {
		t.Fatal(err)
	}
	if size := decode(t, view.PNG).Bounds().Size(); size.X != spec.Display.Width || size.Y != spec.Display.Height {
		t.Errorf("the picture is %v, the display %v", size, spec.Display)
	}
}

// create: idempotent by (vm, fence), one sandbox also for calls at the same
// time, and a conflict under another fence (agent-sandbox#418).
func (s *suite) create(t *testing.T) {
	b := s.sandbox(t)
	spec := providers.Spec{VM: b.vm, Fence: b.fence}
	first, err := s.p.Get(t.Context(), b.vm)
	if err != nil {
		t.Fatal(err)
	}
	again, err := s.p.Create(t.Context(), spec)
	if err != nil || again.ID != first.ID || !again.CreatedAt.Equal(first.CreatedAt) || again.Tenant != first.Tenant {
		t.Errorf("the same create again: %+v, %v; the first was %+v", again, err, first)
	}
	spec.Fence++
	_, err = s.p.Create(t.Context(), spec)
	wantErr(t, "create under another fence", err, providers.ErrConflict)

	spec = providers.Spec{VM: newVM(), Fence: 7}
	t.Cleanup(func() {
		if err := s.p.Kill(context.Background(), spec.VM); err != nil {
			t.Error(err)
		}
	})
	var wg sync.WaitGroup
	made := make([]providers.Sandbox, 3)
	for i := range made {
		wg.Go(func() {
			var err error
			if made[i], err = s.p.Create(t.Context(), spec); err != nil {
				t.Errorf("create at the same time: %v", err)
			}
		})
	}
	wg.Wait()
	for _, m := range made {
		if m.ID != made[0].ID || !m.CreatedAt.Equal(made[0].CreatedAt) {
			t.Errorf("two sandboxes of one vm: %+v and %+v", m, made[0])
		}
	}
	for what, spec := range map[string]providers.Spec{
		"no vm":           {Fence: 1},
		"a tiny display":  {VM: newVM(), Fence: 1, Display: computer.Display{Width: 10, Height: 10}},
		"half a display":  {VM: newVM(), Fence: 1, Display: computer.Display{Width: 800}},
		"a giant display": {VM: newVM(), Fence: 1, Display: computer.Display{Width: 100000, Height: 800}},
	} {
		_, err := s.p.Create(t.Context(), spec)
		wantErr(t, "create with "+what, err, providers.ErrInvalid)
	}
}

// kill is idempotent, works while the sandbox starts (daytona#2390), and a vm
// that is gone is gone (vm0#1838).
func (s *suite) kill(t *testing.T) {
	b := s.sandbox(t)
	for range 2 {
		if err := s.p.Kill(t.Context(), b.vm); err != nil {
			t.Errorf("kill: %v", err)
		}
	}
	_, err := s.p.Get(t.Context(), b.vm)
	wantErr(t, "Get after a kill", err, providers.ErrNotFound)

	spec := providers.Spec{VM: newVM(), Fence: 3, Display: computer.Display{Width: 900, Height: 650}}
	done := make(chan error, 1)
	go func() {
		_, err := s.p.Create(t.Context(), spec)
		done <- err
	}()
	var killed error
	eventually(t, "the starting sandbox is listed", func() bool {
		_, err := s.p.Get(t.Context(), spec.VM)
		return err == nil
	})
	killed = s.p.Kill(t.Context(), spec.VM)
	if killed != nil {
		t.Errorf("kill while it starts: %v", killed)
	}
	if err := <-done; err != nil && !errors.Is(err, providers.ErrLost) {
		t.Errorf("the create that was killed: %v; want ErrLost, or none if it was quicker", err)
	}
	_, err = s.p.Get(t.Context(), spec.VM)
	wantErr(t, "Get after the kill", err, providers.ErrNotFound)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.p.Create(ctx, spec); err == nil {
		t.Error("a create that was cancelled beforehand succeeded")
	}
	eventually(t, "a create that failed leaves nothing", func() bool {
		_, err := s.p.Get(t.Context(), spec.VM)
		return errors.Is(err, providers.ErrNotFound)
	})
}

func (s *suite) notFound(t *testing.T) {
	vm, ctx := newVM(), t.Context()
	_, err := s.p.Get(ctx, vm)
	wantErr(t, "Get", err, providers.ErrNotFound)
	_, err = s.p.Execute(ctx, providers.Batch{VM: vm, Actions: []computer.Action{at(computer.Click, 1, 1)}})
	wantErr(t, "Execute", err, providers.ErrNotFound)
	_, err = s.p.Observe(ctx, vm)
	wantErr(t, "Observe", err, providers.ErrNotFound)
	if err := s.p.Kill(ctx, vm); err != nil {
		t.Errorf("Kill of none: %v", err)
	}
}

// refusals: what a server does not declare it refuses, and nothing runs.
func (s *suite) refusals(t *testing.T, b *box) {
	ctx := t.Context()
	page := b.opened(t)
	refused := func(what string, want error, actions ...computer.Action) {
		t.Helper()
		results, err := b.try(ctx, append([]computer.Action{at(computer.Click, 30, 170)}, actions...)...)
		wantErr(t, what, err, want)
		if len(results) > 0 && results[0].Outcome == computer.OK {
			t.Errorf("%s: the action before it ran", what)
		}
		if !providers.NothingRan(err) {
			t.Errorf("%s: NothingRan(%v) is false", what, err)
		}
	}
	if !s.has(providers.Shell) {
		refused("run without a shell", providers.ErrUnsupported, computer.Action{Type: computer.Run, Argv: []string{"true"}})
	}
	if !s.has(providers.Clipboard) {
		refused("clipboard", providers.ErrUnsupported, act(computer.ClipboardRead))
	}
	if !s.has(providers.PauseCap) {
		wantErr(t, "Pause", s.p.Pause(ctx, b.vm), providers.ErrUnsupported)
		wantErr(t, "Resume", s.p.Resume(ctx, b.vm), providers.ErrUnsupported)
	}
	if !s.has(providers.Snapshot) {
		_, err := s.p.Snapshot(ctx, b.vm)
		wantErr(t, "Snapshot", err, providers.ErrUnsupported)
	}
	if !s.has(providers.Stream) {
		_, err := s.p.StreamURL(ctx, b.vm)
		wantErr(t, "StreamURL", err, providers.ErrUnsupported)
	}
	refused("an unknown key", providers.ErrInvalid, press("NoSuchKey"))
	refused("an unknown action", providers.ErrInvalid, act("dance"))
	refused("x at the width", providers.ErrInvalid, at(computer.Click, b.display.Width, 5))
	refused("y at the height", providers.ErrInvalid, at(computer.Move, 5, b.display.Height))
	refused("a negative x", providers.ErrInvalid, at(computer.Click, -1, 5))
	refused("a drag that leaves the display", providers.ErrInvalid, drag(computer.Point{X: 1, Y: 1}, computer.Point{X: 1, Y: 5000}))
	refused("a region that leaves the display", providers.ErrInvalid, computer.Action{Type: computer.Zoom, Region: &computer.Rect{X: 1200, Y: 1, Width: 100, Height: 10}})
	refused("too many ticks", providers.ErrInvalid, computer.Action{Type: computer.Scroll, X: new(int), Y: new(int), DY: 400}) // kernel/cli#154
	_, err := b.try(ctx)
	wantErr(t, "an empty batch", err, providers.ErrInvalid)
	if page != nil {
		if got := only(b.settle(t, page), "mousedown", "pointerdown"); len(got) > 0 {
			t.Errorf("something ran all the same: %s", list(got))
		}
	}
}

// fences: a command never reaches another placement than the one it names.
func (s *suite) fences(t *testing.T, b *box) {
	if !s.opts.ChecksFences {
		return
	}
	batch := providers.Batch{VM: b.vm, Actions: []computer.Action{at(computer.Move, 5, 5)}}
	batch.Fence = b.fence - 1
	_, err := s.p.Execute(t.Context(), batch)
	wantErr(t, "an older fence", err, providers.ErrFenceStale)
	batch.Fence = b.fence + 1
	_, err = s.p.Execute(t.Context(), batch)
	wantErr(t, "a fence that is not here", err, providers.ErrConflict)
	batch.Fence = 0
	if _, err := s.p.Execute(t.Context(), batch); err != nil {
		t.Errorf("without a fence: %v", err)
	}
}

func (s *suite) recall(t *testing.T, b *box) {
	key := newVM()
	_, err := s.p.Recall(t.Context(), b.vm, key)
	if !s.opts.Recalls {
		wantErr(t, "Recall", err, providers.ErrUnsupported)
		return
	}
	wantErr(t, "Recall of an unknown key", err, providers.ErrNotFound)
	batch := providers.Batch{VM: b.vm, Fence: b.fence, Key: key, Actions: []computer.Action{at(computer.Move, 5, 5), act(computer.Cursor)}}
	if _, err := s.p.Execute(t.Context(), batch); err != nil {
		t.Fatal(err)
	}
	rec, err := s.p.Recall(t.Context(), b.vm, key)
	if err != nil || !rec.Finished || len(rec.Results) != 2 || rec.Results[1].Outcome != computer.OK {
		t.Errorf("Recall: %+v, %v", rec, err)
	}
	again, err := s.p.Execute(t.Context(), batch)
	if err != nil || len(again) != 2 {
		t.Errorf("the same key again: %v, %v", again, err)
	}
}

// results: every action answers what the vocabulary says.
func (s *suite) results(t *testing.T, b *box) {
	zoom := computer.Action{Type: computer.Zoom, Region: &computer.Rect{X: 0, Y: 0, Width: 200, Height: 100}}
	rs := b.do(t, at(computer.Move, 0, 0), act(computer.Cursor), act(computer.Screenshot), zoom, at(computer.Click, 7, 9), act(computer.Cursor), lasting(computer.Wait, 0))
	if string(rs[1].Value) != `{"x":0,"y":0}` || string(rs[5].Value) != `{"x":7,"y":9}` {
		t.Errorf("cursor: %s, then %s", rs[1].Value, rs[5].Value)
	}
	if size := decode(t, rs[2].Image).Bounds().Size(); size.X != b.display.Width || size.Y != b.display.Height {
		t.Errorf("the screenshot is %v", size)
	}
	if size := decode(t, rs[3].Image).Bounds().Size(); size.X < 200 || size.X != 2*size.Y {
		t.Errorf("the zoom of 200×100 is %v", size)
	}
	for i, r := range rs {
		if r.Error != nil || (i == 2 || i == 3) != (r.Image != nil) || r.Image != nil && r.Value != nil {
			t.Errorf("result %d: %+v", i, r.ActionResult)
		}
	}
	v := b.observe(t)
	if c := v.Observation.Cursor; c == nil || *c != (computer.Point{X: 7, Y: 9}) {
		t.Errorf("observed cursor %v", c)
	}
	if age := time.Since(v.Observation.TakenAt); age < -time.Minute || age > time.Minute {
		t.Errorf("taken %v ago", age)
	}
	started := time.Now()
	b.do(t, lasting(computer.Wait, 0.3))
	if d := time.Since(started); d < 300*time.Millisecond {
		t.Errorf("wait of 0.3 s took %v", d)
	}
}

// furnished shows a page that stores something in every way that pages can, and
// fills the clipboard.
func (b *box) furnished(t *testing.T) *record {
	t.Helper()
	page := b.opened(t)
	if page != nil {
		b.do(t, press("Control", "F2"))
		page.awaitType(t, "stored")
		page.forget()
	}
	if b.has(providers.Clipboard) {
		b.do(t, text(computer.ClipboardWrite, "kept ☕"))
	}
	return page
}

// wantFurnished asks a furnished page, without opening it again, and the
// clipboard, for what there was.
func (b *box) wantFurnished(t *testing.T, page *record) {
	t.Helper()
	if page != nil {
		page.forget()
		b.do(t, press("Control", "F8"))
		here := strings.TrimPrefix(page.url, b.oracle.base)
		want := strings.Join([]string{here, here, here, here}, " ")
		if got := page.awaitType(t, "kept"); got.Data != want {
			t.Errorf("cookie, localStorage, sessionStorage and database have %q; want %q", got.Data, want)
		}
		if o := b.observe(t).Observation; o.URL != "" && o.URL != page.url {
			t.Errorf("the page is %s; want %s", o.URL, page.url)
		}
	}
	if b.has(providers.Clipboard) {
		if rs := b.do(t, act(computer.ClipboardRead)); string(rs[0].Value) != `"kept ☕"` {
			t.Errorf("the clipboard holds %s", rs[0].Value)
		}
	}
}

// pause: a paused sandbox is listed as such, keeps what was in it, and ends when
// it is killed. What is not declared is in refusals.
func (s *suite) pause(t *testing.T) {
	if !s.has(providers.PauseCap) {
		return
	}
	ctx := t.Context()
	b := s.sandbox(t)
	page := b.furnished(t)
	b.do(t, at(computer.Move, 31, 32))
	state := func(want providers.State) {
		t.Helper()
		if got, err := s.p.Get(ctx, b.vm); err != nil || got.State != want || got.Fence != b.fence {
			t.Errorf("it is %+v, %v; want state %s", got, err, want)
		}
	}
	for range 2 { // the second changes nothing
		if err := s.p.Pause(ctx, b.vm); err != nil {
			t.Fatalf("Pause: %v", err)
		}
		state(providers.Paused)
	}
	_, err := b.try(ctx, at(computer.Move, 1, 1))
	wantErr(t, "a batch in a paused sandbox", err, providers.ErrPaused)
	_, err = s.p.Observe(ctx, b.vm)
	wantErr(t, "a look at a paused sandbox", err, providers.ErrPaused)
	if list, err := s.p.List(ctx); err != nil || !slices.ContainsFunc(list, func(o providers.Sandbox) bool { return o.VM == b.vm && o.State == providers.Paused }) {
		t.Errorf("List: %+v, %v", list, err)
	}
	if page != nil { // the fake does not stand still
		results, err := b.try(ctx, at(computer.Click, 5, 5))
		if err == nil || !providers.NothingRan(err) || len(results) > 0 && results[0].Outcome == computer.OK {
			t.Errorf("a click in a paused sandbox: %v, %v", results, err)
		}
	}
	for range 2 {
		if err := s.p.Resume(ctx, b.vm); err != nil {
			t.Fatalf("Resume: %v", err)
		}
		state(providers.Running)
	}
	if rs := b.do(t, act(computer.Cursor)); string(rs[0].Value) != `{"x":31,"y":32}` {
		t.Errorf("after the pause the pointer is at %s", rs[0].Value)
	}
	b.wantFurnished(t, page)
	if err := s.p.Pause(ctx, b.vm); err != nil {
		t.Fatalf("Pause: %v", err)
	}
	if err := s.p.Kill(ctx, b.vm); err != nil {
		t.Errorf("Kill of a paused sandbox: %v", err)
	}
	_, err = s.p.Get(ctx, b.vm)
	wantErr(t, "Get after that", err, providers.ErrNotFound)
	wantErr(t, "Pause of an unknown vm", s.p.Pause(ctx, newVM()), providers.ErrNotFound)
	wantErr(t, "Resume of an unknown vm", s.p.Resume(ctx, newVM()), providers.ErrNotFound)
}

// snapshot: its name is a template for another sandbox, and the first goes on.
func (s *suite) snapshot(t *testing.T) {
	if !s.has(providers.Snapshot) {
		return
	}
	b := s.sandbox(t)
	page := b.furnished(t)
	name, err := s.p.Snapshot(t.Context(), b.vm)
	if err != nil || name == "" {
		t.Fatalf("Snapshot: %q, %v", name, err)
	}
	if page != nil {
		if again := only(b.settle(t, page), "load"); len(again) > 0 {
			t.Error("the page was loaded anew by a snapshot")
		}
	}
	b.wantFurnished(t, page)
	other := &box{suite: s, vm: newVM(), fence: 3, display: b.display}
	t.Cleanup(func() {
		if err := s.p.Kill(context.Background(), other.vm); err != nil {
			t.Error(err)
		}
	})
	if _, err := s.p.Create(t.Context(), providers.Spec{VM: other.vm, Fence: 3, Tenant: "acme", Role: "default", Template: name, Display: b.display}); err != nil {
		t.Fatalf("create from it: %v", err)
	}
	other.do(t, at(computer.Click, 5, 5))
	if page != nil { // a stand-in copies no memory
		other.wantFurnished(t, page)
	}
	_, err = s.p.Create(t.Context(), providers.Spec{VM: newVM(), Fence: 3, Tenant: "rival", Role: "default", Template: name, Display: b.display})
	wantErr(t, "create from another tenant's template", err, providers.ErrInvalid)
	_, err = s.p.Create(t.Context(), providers.Spec{VM: newVM(), Fence: 3, Tenant: "acme", Role: "default", Template: "no-such-template", Display: b.display})
	wantErr(t, "create from an unknown template", err, providers.ErrInvalid)
	_, err = s.p.Snapshot(t.Context(), newVM())
	wantErr(t, "Snapshot of an unknown vm", err, providers.ErrNotFound)
}

// cancel: a call returns soon after its ctx has ended, and a kill frees what
// hangs in the sandbox (e2b#424).
func (s *suite) cancel(t *testing.T) {
	b := s.sandbox(t)
	for _, action := range []computer.Action{lasting(computer.Wait, 60), lasting(computer.Hold, 60, "Shift", "x")} {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		started := time.Now()
		_, err := b.try(ctx, action)
		cancel()
		wantErr(t, "cancelled "+string(action.Type), err, context.DeadlineExceeded)
		if d := time.Since(started); d > 200*time.Millisecond+prompt {
			t.Errorf("%s returned %v after it began", action.Type, d)
		}
	}
	b.do(t, at(computer.Click, 5, 5)) // it lives on
	done := make(chan error, 1)
	go func() {
		_, err := b.try(t.Context(), lasting(computer.Wait, 60))
		done <- err
	}()
	eventually(t, "a batch waits for its turn behind the wait, and not longer than its ctx", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		_, err := b.try(ctx, at(computer.Move, 1, 1))
		return errors.Is(err, context.DeadlineExceeded)
	})
	started := time.Now()
	if err := s.p.Kill(t.Context(), b.vm); err != nil {
		t.Fatal(err)
	}
	wantErr(t, "a call in a killed sandbox", <-done, providers.ErrLost)
	if d := time.Since(started); d > prompt {
		t.Errorf("the kill and the call's end took %v", d)
	}
}

// concurrency: sandboxes do not wait for each other.
func (s *suite) concurrency(t *testing.T) {
	slow, quick := s.sandbox(t), s.sandbox(t)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, err := slow.try(ctx, lasting(computer.Wait, 60))
		wantErr(t, "the stopped wait", err, context.Canceled)
	}()
	quick.do(t, at(computer.Click, 3, 3), act(computer.Screenshot))
	if !s.opts.Fleet {
		slow.observe(t) // an observation does not wait for its own sandbox's batch either
	}
	select {
	case <-done:
		t.Error("the wait ended early")
	default:
	}
	stop()
	<-done
}

// crash: a sandbox that dies is no longer listed, and its calls end.
func (s *suite) crash(t *testing.T) {
	if s.opts.Crash == nil {
		return
	}
	b, other := s.sandbox(t), s.sandbox(t)
	done := make(chan error, 1)
	go func() {
		_, err := b.try(t.Context(), lasting(computer.Wait, 60))
		done <- err
	}()
	other.observe(t)
	started := time.Now()
	s.opts.Crash(t, s.p, b.vm)
	if err := <-done; !errors.Is(err, providers.ErrLost) && !errors.Is(err, providers.ErrNotFound) {
		t.Errorf("the call in a crashed sandbox: %v", err)
	}
	if d := time.Since(started); d > prompt {
		t.Errorf("the call ended %v after the crash", d)
	}
	gone := func() bool {
		_, err := s.p.Get(t.Context(), b.vm)
		return errors.Is(err, providers.ErrNotFound)
	}
	if s.opts.Fleet {
		eventually(t, "the crash is on record", gone)
	} else if !gone() {
		t.Error("a crashed sandbox is found")
	}
	other.do(t, at(computer.Click, 3, 3))
	_, err := s.p.Create(t.Context(), providers.Spec{VM: b.vm, Fence: b.fence + 1})
	if s.opts.Fleet {
		wantErr(t, "create after the crash", err, providers.ErrConflict)
	} else if err != nil {
		t.Errorf("create after the crash: %v", err)
	}
}

// full: a server that is full refuses at once, and a kill makes room
// (aerokube/selenoid#120, browserless#1423).
func (s *suite) full(t *testing.T) {
	if s.opts.NewLimited == nil {
		return
	}
	p := s.opts.NewLimited(t)
	limited := &suite{p: p, opts: s.opts, info: p.Info()}
	first := limited.sandbox(t)
	limited.sandbox(t)
	started := time.Now()
	_, err := p.Create(t.Context(), providers.Spec{VM: newVM(), Fence: 1})
	wantErr(t, "the third of two", err, providers.ErrFull)
	if d := time.Since(started); d > time.Second {
		t.Errorf("the refusal took %v", d)
	}
	if err := p.Kill(t.Context(), first.vm); err != nil {
		t.Fatal(err)
	}
	limited.sandbox(t)
}
