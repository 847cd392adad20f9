package worker

import (
	"fmt"
	"testing"
	"time"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/providers"
	"berth/internal/providers/providertest"
)

func cancelOf(id string) map[string]any {
	return map[string]any{"command": map[string]any{"source": "/test", "id": id}}
}

// A cancel ends what runs, and what waits, of one command; the sandbox and the
// commands behind it go on.
func TestCancel(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.start("a")
		w.ready("vm-a")
		running := w.publish("vm-a", events.Act, "running", act(click(1, 1), wait(60), click(2, 2)))
		waiting := w.publish("vm-a", events.Act, "waiting", act(click(3, 3)))
		behind := w.publish("vm-a", events.Act, "behind", act(click(4, 4)))
		w.until("the first runs", 10*time.Second, func() bool { return len(w.fake(server1).EffectsOf("vm-a")) > 0 })

		began := time.Now()
		c := w.await(w.publish("vm-a", events.Cancel, "c1", cancelOf("waiting")))
		if c.Outcome != computer.OK {
			t.Fatalf("cancel of what waits: %+v", c)
		}
		if f := w.await(waiting); f.Outcome != computer.Rejected || f.Error == nil || f.Error.Code != events.CodeCancelled || f.Command != events.Act {
			t.Errorf("what waited: %+v", f)
		}
		if _, ended := w.finished(running); ended {
			t.Error("the cancel of another ended what runs")
		}
		if c := w.await(w.publish("vm-a", events.Cancel, "c2", cancelOf("running"))); c.Outcome != computer.OK {
			t.Fatalf("cancel of what runs: %+v", c)
		}
		f := w.await(running)
		if f.Outcome != computer.Unknown || f.Error == nil || f.Error.Code != events.CodeCancelled {
			t.Errorf("what ran: %+v", f)
		}
		if f := w.await(behind); f.Outcome != computer.OK {
			t.Errorf("what came behind: %+v", f)
		}
		if d := time.Since(began); d > 5*time.Second {
			t.Errorf("it took %v", d)
		}
		if got := mustJSON(keys(w.fake(server1), "vm-a")); got != mustJSON([]string{running.token, behind.token}) {
			t.Errorf("effects of %s", got)
		}
		for _, s := range []sent{running, waiting, behind} {
			w.once(s)
		}
		// What has ended already is as good as cancelled; its result stays.
		if c := w.await(w.publish("vm-a", events.Cancel, "c3", cancelOf("behind"))); c.Outcome != computer.OK {
			t.Errorf("cancel of what has ended: %+v", c)
		}
		if f := w.await(behind); f.Outcome != computer.OK {
			t.Errorf("its result is now %+v", f)
		}
	})
}

// A cancel that cannot be says why, and nothing waits for it: not even a kill.
func TestCancelOfNothing(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.start("a")
		w.ready("vm-a")
		none := w.publish("vm-a", events.Cancel, "c1", cancelOf("never-sent"))
		began := time.Now()
		if f := w.await(w.publish("vm-a", events.Kill, "k", map[string]any{})); f.Outcome != computer.OK {
			t.Errorf("kill: %+v", f)
		}
		if d := time.Since(began); d > 2*time.Second {
			t.Errorf("the kill waited %v for the cancel", d)
		}
		if f := w.await(none); f.Outcome != computer.Failed || f.Error.Code != events.CodeNotFound {
			t.Errorf("cancel of nothing: %+v", f)
		}
		for id, data := range map[string]map[string]any{
			"no command":       {},
			"half a command":   {"command": map[string]any{"id": "x"}},
			"with actions":     {"command": map[string]any{"source": "/s", "id": "x"}, "actions": []any{click(1, 1)}},
			"an unknown field": {"command": map[string]any{"source": "/s", "id": "x", "hard": true}},
		} {
			if f := w.await(w.publish("vm-a", events.Cancel, id, data)); f.Outcome != computer.Rejected || f.Error.Code != events.CodeBadInput {
				t.Errorf("%s: %+v", id, f)
			}
		}
		stray := act(click(1, 1))
		stray["command"] = map[string]any{"source": "/s", "id": "x"}
		if f := w.await(w.publish("vm-a", events.Act, "names a command", stray)); f.Outcome != computer.Rejected || f.Error.Code != events.CodeBadInput {
			t.Errorf("an act that names a command: %+v", f)
		}
	})
}

// A create is ended by a kill, never by a cancel.
func TestCancelOfACreate(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.start("a")
		w.holds("a")
		fence := w.place(server1, "vm-a")
		w.create(server1, "vm-a", fence)
		c := w.publish("vm-a", events.Cancel, "c", map[string]any{"command": map[string]any{"source": events.SourceScheduler, "id": events.CreateCommandID("vm-a", fence)}})
		f := w.await(c)
		if f.Outcome == computer.Failed && f.Error.Code != events.CodeUnsupported || f.Outcome != computer.Failed && f.Outcome != computer.OK {
			t.Errorf("cancel of a create: %+v", f)
		}
		if got := w.fake(server1).Lives(); len(got) != 1 || got[0].Why != "" {
			t.Errorf("its sandbox: %+v", got)
		}
	})
}

// A cancel whose worker dies is carried out by the successor, before that runs
// any command, and what it names is never run.
func TestCancelOutlivesItsWorker(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		a := w.start("a")
		w.ready("vm-a")
		running := w.publish("vm-a", events.Act, "running", act(click(1, 1), wait(60)))
		waiting := w.publish("vm-a", events.Act, "waiting", act(click(3, 3)))
		w.until("it runs", 10*time.Second, func() bool { return len(w.fake(server1).EffectsOf("vm-a")) > 0 })
		a.crash()
		c := w.publish("vm-a", events.Cancel, "c", cancelOf("waiting"))
		w.start("b")
		if f := w.await(c); f.Outcome != computer.OK {
			t.Errorf("cancel: %+v", f)
		}
		if f := w.await(waiting); f.Outcome != computer.Rejected {
			t.Errorf("what waited: %+v", f)
		}
		w.await(running)
		if got := mustJSON(keys(w.fake(server1), "vm-a")); got != mustJSON([]string{running.token}) {
			t.Errorf("effects of %s", got)
		}
	})
}

// A snapshot's name says at which server it is, and a create from it gets the
// server's own name of it.
func TestSnapshot(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.start("a")
		w.ready("vm-a")
		f := w.await(w.publish("vm-a", events.Snapshot, "s", map[string]any{}))
		name, server := events.SplitTemplate(f.Template)
		if f.Outcome != computer.OK || name == "" || server != server1 {
			t.Fatalf("snapshot: %+v", f)
		}
		fence := w.place(server1, "vm-b")
		made := w.await(w.publishTo(server1, "vm-b", events.Create, events.SourceScheduler, events.CreateCommandID("vm-b", fence), events.CommandCreate{
			Fence: fence, Tenant: "acme", Role: "default", Template: f.Template, Display: computer.DefaultDisplay, TTLSeconds: 3600, Request: events.Request{Source: "/service", ID: "r"},
		}))
		if lives := w.fake(server1).Lives(); made.Outcome != computer.OK || lives[1].Template != name {
			t.Errorf("create from it: %+v, %+v", made, lives)
		}
		if f := w.await(w.publish("vm-a", events.Snapshot, "with actions", act(click(1, 1)))); f.Outcome != computer.Rejected || f.Error.Code != events.CodeBadInput {
			t.Errorf("a snapshot with actions: %+v", f)
		}
	})
}

// A worker that stops says nothing of a command that it was never sent: the
// successor, which is, cancels it.
func TestCancelIsLeftToTheSuccessor(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		a := w.start("a")
		w.ready("vm-a")
		c := w.publish("vm-a", events.Cancel, "c", cancelOf("late"))
		w.until("the cancel is claimed", 10*time.Second, func() bool { return len(w.history(c)) > 0 })
		a.drain()
		if f, said := w.finished(c); said {
			t.Errorf("the worker that stopped said %+v", f)
		}
		late := w.publish("vm-a", events.Act, "late", act(click(1, 1), wait(60), click(2, 2)))
		w.start("b")
		if f := w.await(c); f.Outcome != computer.OK {
			t.Errorf("cancel: %+v", f)
		}
		if f := w.await(late); f.Error == nil || f.Error.Code != events.CodeCancelled {
			t.Errorf("what it names: %+v", f)
		}
		w.once(c)
		w.once(late)
	})
}

// A command begins no more from the moment its cancel is delivered, whatever
// keeps that from its turn.
func TestCancelThatWaitsForItsTurn(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.start("a")
		w.ready("vm-a")
		before := w.publish("vm-a", events.Cancel, "before", cancelOf("never-sent"))
		c := w.publish("vm-a", events.Cancel, "c", cancelOf("late"))
		w.until("the first is at work", 10*time.Second, func() bool { return len(w.history(before)) > 0 })
		late := w.publish("vm-a", events.Act, "late", act(click(1, 1)))
		if f := w.await(late); f.Outcome != computer.Rejected || f.Error.Code != events.CodeCancelled {
			t.Errorf("what it names: %+v", f)
		}
		if f := w.await(c); f.Outcome != computer.OK {
			t.Errorf("cancel: %+v", f)
		}
	})
}

// What overtakes is not cancelled, and the cancel does not wait to say so.
func TestCancelOfWhatOvertakes(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.start("a")
		w.ready("vm-a")
		defer w.fake(server1).Inject("Kill", "vm-a", 1, providertest.Injection{Latency: 3 * time.Second})()
		k := w.publish("vm-a", events.Kill, "k", map[string]any{})
		w.until("the kill is claimed", 10*time.Second, func() bool { return len(w.history(k)) > 0 })
		for id, of := range map[string]string{"c1": "k", "c2": "c2"} {
			if f := w.await(w.publish("vm-a", events.Cancel, id, cancelOf(of))); f.Outcome != computer.Failed || f.Error.Code != events.CodeUnsupported {
				t.Errorf("cancel of %s: %+v", of, f)
			}
		}
		if f := w.await(k); f.Outcome != computer.OK {
			t.Errorf("kill: %+v", f)
		}
	})
}

// An act that is cancelled while it waits out a rate limit has run nothing, and
// says why.
func TestCancelInARateLimit(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.start("a")
		w.ready("vm-a")
		defer w.fake(server1).Inject("Execute", "vm-a", -1, providertest.Injection{Err: &providers.RateLimitError{RetryAfter: 5 * time.Second}})()
		limited := w.publish("vm-a", events.Act, "limited", act(click(1, 1), wait(30)))
		w.until("it is claimed", 10*time.Second, func() bool { return len(w.history(limited)) > 0 })
		time.Sleep(time.Second)
		if f := w.await(w.publish("vm-a", events.Cancel, "c", cancelOf("limited"))); f.Outcome != computer.OK {
			t.Errorf("cancel: %+v", f)
		}
		if f := w.await(limited); f.Outcome != computer.Rejected || f.Error.Code != events.CodeCancelled {
			t.Errorf("what waited for the rate: %+v", f)
		}
	})
}

// Cancels of one sandbox have a backlog, so that they never keep the server's
// kills from being delivered.
func TestCancelsHaveABacklog(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.start("a")
		w.ready("vm-a")
		var all []sent
		for i := range bus.BacklogPerSandbox + 20 {
			all = append(all, w.publish("vm-a", events.Cancel, fmt.Sprint("c", i), cancelOf("never-sent")))
		}
		began := time.Now()
		busy := 0
		for _, c := range all[bus.BacklogPerSandbox+1:] {
			if f := w.await(c); f.Outcome == computer.Rejected && f.Error.Code == events.CodeBusy {
				busy++
			}
		}
		if d := time.Since(began); busy != 19 || d > 4*time.Second {
			t.Errorf("%d of 19 were refused as too many, in %v", busy, d)
		}
	})
}

// A command of which another copy is at work is not refused, as if its worker
// were gone: that copy decides, and this one comes again.
func TestCancelOfASecondCopy(t *testing.T) {
	copied := &command{item: &item{seq: 7}, CommandPath: events.CommandPath{VM: "vm-a"}, token: "t"}
	at := &tenure{commands: newLanes(0, nil), claims: map[string]bool{"tvm-a": true}}
	at.commands.held[7] = copied.item
	at.refuseInstead(t.Context(), copied, fault(events.CodeCancelled, "cancelled")) // without a bus: it says nothing
	if len(at.commands.held) != 0 || !at.commands.open[7] || !at.claims["tvm-a"] {
		t.Errorf("held %v, open %v, at work %v", at.commands.held, at.commands.open, at.claims)
	}
}

// What was cancelled after it had run, before it was looked at, has run: that it
// lacks its picture is said.
func TestCancelBeforeTheLook(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.startWith(Options{Name: "a", Hook: func(p Point, _ string) {
			if p == AfterExecute {
				w.publish("vm-a", events.Cancel, "c", cancelOf("act"))
				time.Sleep(time.Second) // in virtual time: the cancel is carried out meanwhile
			}
		}}, server1)
		w.ready("vm-a")
		data := act(click(1, 1))
		data["observe"] = true
		f := w.await(w.publish("vm-a", events.Act, "act", data))
		if f.Outcome != computer.OK || f.Observation != nil || f.Error == nil || f.Error.Code != events.CodeNoPicture {
			t.Errorf("%+v", f)
		}
	})
}
