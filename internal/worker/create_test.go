package worker

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/providers"
	"berth/internal/providers/providertest"
)

// e2b#1498: whatever goes wrong in a create, nothing stays at the provider, and
// the outcome says what it was.
func TestCreateFailures(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		w.start("w1")
		for i, c := range []struct {
			name    string
			inject  providertest.Injection
			outcome computer.Outcome
			code    string
		}{
			{"full", providertest.Injection{Err: providers.ErrFull}, computer.Rejected, events.CodeFull},
			{"invalid", providertest.Injection{Err: providers.ErrInvalid}, computer.Rejected, events.CodeBadInput},
			{"unsupported", providertest.Injection{Err: providers.ErrUnsupported}, computer.Rejected, events.CodeUnsupported},
			{"unavailable", providertest.Injection{Err: providers.ErrUnavailable}, computer.Failed, events.CodeUnavailable},
			{"answer lost", providertest.Injection{AnswerErr: providers.ErrTimeout}, computer.Failed, events.CodeTimeout},
			{"hangs", providertest.Injection{Hang: true}, computer.Failed, events.CodeTimeout},
			{"dies", providertest.Injection{Crash: true}, computer.Failed, events.CodeLost},
		} {
			vm := fmt.Sprint("vm", i)
			fence := w.place(server1, vm)
			f.Inject("Create", vm, 1, c.inject)
			r := w.await(w.create(server1, vm, fence))
			if r.Outcome != c.outcome || r.Error == nil || r.Error.Code != c.code || r.Request.ID != "r-"+vm || r.Fence != fence || r.Sandbox != nil {
				t.Errorf("%s: %s", c.name, mustJSON(r))
			}
			for _, l := range f.Lives() {
				if l.VM == vm && l.Ended.IsZero() {
					t.Errorf("%s: the sandbox stays", c.name)
				}
			}
			if r := w.await(w.publish(vm, events.Act, "1", act(click(1, 1)))); r.Outcome != computer.Rejected || r.Error.Code != events.CodeNotFound {
				t.Errorf("%s: act afterwards: %s", c.name, mustJSON(r))
			}
			w.free(server1, vm)
			time.Sleep(time.Minute) // let the breaker close
		}
		// A rate limit is waited out.
		f.Inject("Create", "slow", 3, providertest.Injection{Err: &providers.RateLimitError{RetryAfter: 2 * time.Second}})
		if r := w.await(w.create(server1, "slow", w.place(server1, "slow"))); r.Outcome != computer.OK || r.Timing.RanMs < 6000 {
			t.Errorf("rate limited: %s", mustJSON(r))
		}
		// What cannot be confirmed gone is not said to be gone.
		f.Inject("Create", "stuck", 1, providertest.Injection{AnswerErr: providers.ErrTimeout})
		remove := f.Inject("Kill", "stuck", -1, providertest.Injection{Err: providers.ErrUnavailable})
		if r := w.await(w.create(server1, "stuck", w.place(server1, "stuck"))); r.Outcome != computer.Unknown || r.Error.Code != events.CodeTimeout {
			t.Errorf("unconfirmed: %s", mustJSON(r))
		}
		remove()
	})
}

// A create is idempotent, gives what was asked for, and a leftover of an
// earlier life of the vm is in nobody's way.
func TestCreate(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		w.start("w1")
		first := w.ready("a")
		w.free(server1, "a") // the scheduler believes that it is gone
		fence := w.place(server1, "a")
		c := w.publishTo(server1, "a", events.Create, events.SourceScheduler, events.CreateCommandID("a", fence), events.CommandCreate{
			Fence: fence, Tenant: "acme", Role: "git", Display: computer.Display{Width: 800, Height: 600}, TTLSeconds: 60,
		})
		r := w.await(c)
		if r.Outcome != computer.OK || r.Sandbox == nil || r.Sandbox.Display.Width != 800 || len(r.Sandbox.Capabilities) == 0 {
			t.Errorf("create: %s", mustJSON(r))
		}
		lives := f.Lives()
		if len(lives) != 2 || lives[0].Fence != first || lives[0].Ended.IsZero() || lives[1].Fence != fence || lives[1].Epoch == 0 || lives[1].Role != "git" {
			t.Errorf("lives: %+v", lives)
		}
		if r := w.await(w.publish("a", events.Act, "1", act(click(800, 1)))); r.Error == nil || r.Error.Code != events.CodeOutOfRange {
			t.Errorf("outside its own display: %s", mustJSON(r))
		}
		again := w.create(server1, "a", fence)
		if w.await(again); fmt.Sprint(w.history(again)) != "[started finished]" || len(f.Lives()) != 2 {
			t.Errorf("published again: %v", w.history(again))
		}
	})
}

// daytona#2390: a kill works while the sandbox is made. The create ends failed,
// code killed, and nothing stays.
func TestKillDuringCreate(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		w.start("w1")
		for _, inject := range []providertest.Injection{{Hang: true}, {Latency: 3 * time.Second}} {
			fence := w.place(server1, "a")
			f.Inject("Create", "a", 1, inject)
			c := w.create(server1, "a", fence)
			time.Sleep(time.Second)
			q := w.publish("a", events.Act, fmt.Sprint("q", fence), act(click(1, 1)))
			start := time.Now()
			k := w.publishTo(server1, "a", events.Kill, events.SourceScheduler, events.KillCommandID("a", fence, 1), events.Command{Fence: &fence})
			if r := w.await(k); r.Outcome != computer.OK {
				t.Errorf("kill: %s", mustJSON(r))
			}
			if r := w.await(c); r.Outcome != computer.Failed || r.Error.Code != events.CodeKilled {
				t.Errorf("create: %s", mustJSON(r))
			}
			if r := w.await(q); r.Outcome != computer.Rejected || r.Error.Code != events.CodeKilled {
				t.Errorf("act: %s", mustJSON(r))
			}
			if d := time.Since(start); d > 3*time.Second {
				t.Errorf("it took %s", d)
			}
			for _, l := range f.Lives() {
				if l.Ended.IsZero() {
					t.Errorf("lives on: %+v", l)
				}
			}
			w.free(server1, "a")
		}
		// A kill before the create's turn: it is rejected, and never made.
		fence := w.place(server1, "b")
		f.Inject("Create", "b", 1, providertest.Injection{Latency: time.Hour})
		other := w.publishTo(server1, "b", events.Create, "/test", "x", events.CommandCreate{Fence: fence, Tenant: "t", Role: "r"})
		time.Sleep(100 * time.Millisecond)
		c := w.create(server1, "b", fence)
		w.await(w.publish("b", events.Kill, "kb", struct{}{}))
		if r := w.await(c); r.Outcome != computer.Rejected || r.Error.Code != events.CodeKilled {
			t.Errorf("create that waited: %s", mustJSON(r))
		}
		if r := w.await(other); r.Outcome != computer.Failed || r.Error.Code != events.CodeKilled {
			t.Errorf("create that ran: %s", mustJSON(r))
		}
		// And the vm can live after that, under a new fence.
		w.free(server1, "b")
		w.ready("b")
		if r := w.await(w.publish("b", events.Act, "1", act(click(1, 1)))); r.Outcome != computer.OK {
			t.Errorf("the next life: %s", mustJSON(r))
		}
	})
}

// A worker dies while the server makes a sandbox. A server that goes on makes
// one that the successor finds; at one that does not nothing is left.
func TestCrashDuringCreate(t *testing.T) {
	for _, detached := range []bool{true, false} {
		bubble(t, func(t *testing.T, w *world) {
			f := w.fakeWith(server1, providertest.FakeOptions{Detached: detached})
			one := w.start("w1")
			w.holds("w1")
			f.Inject("Create", "a", 1, providertest.Injection{Latency: 5 * time.Second})
			fence := w.place(server1, "a")
			c := w.create(server1, "a", fence)
			time.Sleep(time.Second)
			one.crash()
			w.start("w2")
			r := w.await(c)
			w.once(c)
			if detached && (r.Outcome != computer.OK || r.Sandbox == nil) || !detached && (r.Outcome != computer.Failed || r.Error.Code != events.CodeWorkerDied) {
				t.Errorf("detached %v: %s", detached, mustJSON(r))
			}
			if l := f.Lives(); len(l) != 1 || l[0].Ended.IsZero() != detached {
				t.Errorf("detached %v: lives %+v", detached, l)
			}
		})
	}
}

// vm0#1838: killed is said only when the provider has confirmed it.
func TestKillIsConfirmed(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		w.start("w1")
		fence := w.ready("a")
		remove := f.Inject("Kill", "a", -1, providertest.Injection{Err: providers.ErrUnavailable})
		r := w.await(w.publishTo(server1, "a", events.Kill, events.SourceScheduler, events.KillCommandID("a", fence, 1), events.Command{Fence: &fence}))
		if r.Outcome != computer.Failed || r.Error.Code != events.CodeUnavailable {
			t.Errorf("kill: %s", mustJSON(r))
		}
		// It lives, so it serves.
		if r := w.await(w.publish("a", events.Act, "1", act(click(1, 1)))); r.Outcome != computer.OK {
			t.Errorf("act: %s", mustJSON(r))
		}
		remove()
		r = w.await(w.publishTo(server1, "a", events.Kill, events.SourceScheduler, events.KillCommandID("a", fence, 2), events.Command{Fence: &fence}))
		if r.Outcome != computer.OK || f.Lives()[0].Ended.IsZero() {
			t.Errorf("second attempt: %s", mustJSON(r))
		}
		// A sandbox that nobody knows can be killed too.
		if _, err := f.Provider().Create(t.Context(), providers.Spec{VM: "stray", Fence: 9}); err != nil {
			t.Fatal(err)
		}
		if r := w.await(w.publish("stray", events.Kill, "s", struct{}{})); r.Outcome != computer.OK || r.Fence != 9 {
			t.Errorf("kill of a stray: %s", mustJSON(r))
		}
	})
}

// Pause and resume reach the provider; a successor looks whether a dead
// worker's took effect.
func TestPause(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		one := w.start("w1")
		w.ready("a")
		state := func() providers.State {
			s, err := f.Provider().Get(t.Context(), "a")
			if err != nil {
				t.Fatal(err)
			}
			return s.State
		}
		if r := w.await(w.publish("a", events.Pause, "1", struct{}{})); r.Outcome != computer.OK || state() != providers.Paused {
			t.Errorf("pause: %s, %s", mustJSON(r), state())
		}
		if r := w.await(w.publish("a", events.Resume, "2", struct{}{})); r.Outcome != computer.OK || state() != providers.Running {
			t.Errorf("resume: %s, %s", mustJSON(r), state())
		}
		// A server that fails is asked once and the requester hears so (L5: uncaged#69).
		var calls atomic.Int32
		f.OnCall(func(c providertest.Call) providertest.Injection {
			if c.Method != "Resume" {
				return providertest.Injection{}
			}
			calls.Add(1)
			return providertest.Injection{Err: providers.ErrUnavailable}
		})
		if r := w.await(w.publish("a", events.Resume, "502", struct{}{})); r.Outcome == computer.OK || calls.Load() != 1 {
			t.Errorf("resume at a server that fails: %s after %d calls", mustJSON(r), calls.Load())
		}
		f.OnCall(nil)
		f.Inject("Pause", "a", 1, providertest.Injection{Hang: true})
		c := w.publish("a", events.Pause, "3", struct{}{})
		time.Sleep(100 * time.Millisecond)
		one.crash()
		w.start("w2")
		if r := w.await(c); r.Outcome != computer.Unknown || r.Error.Code != events.CodeWorkerDied {
			t.Errorf("pause of a dead worker: %s", mustJSON(r))
		}
	})
}
