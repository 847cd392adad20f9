package worker

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
	"berth/internal/providers/providertest"
	"berth/internal/virtualtime"
)

// A command that is published again, while it runs, while it waits and after
// it has finished, runs once.
func TestDuplicatesRunOnce(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.start("w1")
		w.ready("a")
		var all []sent
		for range 3 {
			all = append(all, w.publish("a", events.Act, "1", act(click(1, 1), wait(2))))
			all = append(all, w.publish("a", events.Act, "2", act(click(2, 2))))
		}
		w.await(all[0])
		w.await(all[1])
		again := w.publish("a", events.Act, "1", act(click(9, 9)))
		w.until("all is acknowledged", time.Minute, func() bool { return w.unfinished() == 0 })
		if n := len(w.fake(server1).EffectsOf("a")); n != 3 {
			t.Errorf("%d effects, want 3: %v", n, keys(w.fake(server1), "a"))
		}
		for _, c := range append(all, again) {
			w.once(c)
		}
		// Two sources may use one id.
		other := w.publishTo(server1, "a", events.Act, "/other", "1", act(click(3, 3)))
		if f := w.await(other); f.Outcome != computer.OK || len(w.fake(server1).EffectsOf("a")) != 4 {
			t.Errorf("the same id of another source: %s", mustJSON(f))
		}
	})
}

// unfinished counts what the server's consumers have not had acknowledged.
func (w *world) unfinished() int {
	w.Helper()
	n := 0
	for _, spec := range bus.ServerConsumers(server1, 10) {
		c, err := w.js.Consumer(context.Background(), spec.Stream, spec.Durable)
		if err != nil {
			w.Fatal(err)
		}
		n += c.CachedInfo().NumAckPending + int(c.CachedInfo().NumPending)
	}
	return n
}

// Deliveries that come again, because the consumer was reset under the worker
// or made anew, or deliveries that somebody else got, change nothing.
func TestRedeliveryRunsOnce(t *testing.T) {
	for _, disturb := range []struct {
		name string
		fn   func(w *world)
	}{
		{"reset", func(w *world) {
			if _, err := w.js.ResetConsumer(context.Background(), bus.Commands, server1); err != nil {
				w.Error(err)
			}
		}},
		{"deleted", func(w *world) {
			if err := w.js.DeleteConsumer(context.Background(), bus.Commands, server1); err != nil {
				w.Error(err)
			}
		}},
		{"stolen", func(w *world) {
			// Two that pull take turns: it gets some of what comes next.
			c, err := w.js.Consumer(context.Background(), bus.Commands, server1)
			if err != nil {
				w.Error(err)
				return
			}
			batch, err := c.Fetch(2, jetstream.FetchMaxWait(20*time.Second))
			if err != nil {
				w.Error(err)
				return
			}
			go func() {
				n := 0
				for range batch.Messages() {
					n++
				}
				w.stolen.Add(int64(n))
			}()
		}},
		{"reconnect", func(w *world) {
			w.workers[0].gate.set("cut")
			time.Sleep(time.Second)
			w.workers[0].gate.set("")
		}},
	} {
		t.Run(disturb.name, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				w.start("w1")
				w.ready("a")
				var all []sent
				for i := range 12 {
					all = append(all, w.publish("a", events.Act, fmt.Sprint(i), act(click(i, i), wait(0.5))))
					if i%4 == 1 {
						disturb.fn(w)
						time.Sleep(200 * time.Millisecond)
					}
				}
				var want []string
				for i, c := range all {
					if f := w.await(c); f.Outcome != computer.OK {
						t.Errorf("command %d: %s", i, mustJSON(f))
					}
					w.once(c)
					want = append(want, c.token)
				}
				if got := keys(w.fake(server1), "a"); !slices.Equal(got, want) {
					t.Errorf("ran %v\nwant %v", got, want)
				}
				w.until("all is acknowledged", 2*time.Minute, func() bool { return w.unfinished() == 0 })
				time.Sleep(30 * time.Second)
				if disturb.name == "stolen" && w.stolen.Load() == 0 {
					t.Error("nothing was stolen: this tests nothing")
				}
			})
		})
	}
}

// nats-server#6114: a worker held 1 to 4 and died; redelivery alone gives its
// successor 5, 6, 1, 2, 4, 3. The successor runs them in order, and what the
// dead one had begun not again.
func TestOrderAcrossTakeover(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		one := w.start("w1")
		w.ready("a")
		w.start("w2")
		var all []sent
		deadline := time.Now().Add(10 * time.Minute)
		send := func(i int, seconds float64) {
			data := act(click(i, i), wait(seconds))
			data["deadline"] = deadline
			all = append(all, w.publish("a", events.Act, fmt.Sprint(i), data))
		}
		send(1, 30)
		for i := 2; i <= 4; i++ {
			send(i, 0.1)
		}
		if _, err := w.fake(server1).WaitEffects(context.Background(), 1); err != nil {
			t.Fatal(err)
		}
		one.crash()
		send(5, 0.1)
		send(6, 0.1)
		var want []string
		for i, c := range all {
			f := w.await(c)
			w.once(c)
			want = append(want, c.token)
			switch {
			case i == 0 && (f.Outcome != computer.Unknown || f.Error.Code != events.CodeWorkerDied || f.Observation == nil):
				t.Errorf("the act that ran: %s", mustJSON(f))
			case i > 0 && f.Outcome != computer.OK:
				t.Errorf("act %d: %s", i+1, mustJSON(f))
			}
		}
		if got := keys(w.fake(server1), "a"); !slices.Equal(got, want) {
			t.Errorf("ran %v\nwant %v", got, want)
		}
	})
}

// e2b#424: calls in flight hung after a kill. The kill overtakes: the act that
// runs ends unknown, what waits ends rejected, both at once, code killed.
func TestKillOvertakes(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.start("w1")
		fence := w.ready("a")
		w.ready("b")
		w.fake(server1).Inject("Action", "a", 1, providertest.Injection{Hang: true})
		running := w.publish("a", events.Act, "1", act(click(1, 1)))
		var waiting []sent
		for i := range 5 {
			waiting = append(waiting, w.publish("a", events.Act, fmt.Sprint("q", i), act(click(2, 2))))
		}
		time.Sleep(100 * time.Millisecond)
		start := time.Now()
		k := w.publish("a", events.Kill, "k", events.Command{Fence: &fence})
		late := w.publish("a", events.Act, "late", act(click(3, 3)))
		if f := w.await(k); f.Outcome != computer.OK {
			t.Errorf("kill: %s", mustJSON(f))
		}
		if f := w.await(running); f.Outcome != computer.Unknown || f.Error.Code != events.CodeKilled || len(f.Actions) != 1 {
			t.Errorf("the act that ran: %s", mustJSON(f))
		}
		for _, c := range waiting {
			if f := w.await(c); f.Outcome != computer.Rejected || f.Error.Code != events.CodeKilled {
				t.Errorf("an act that waited: %s", mustJSON(f))
			}
		}
		if f := w.await(late); f.Outcome != computer.Rejected || f.Error.Code != events.CodeNotFound {
			t.Errorf("an act after the kill: %s", mustJSON(f))
		}
		if d := time.Since(start); d > 3*time.Second {
			t.Errorf("all that took %s", d)
		}
		if n := len(w.fake(server1).EffectsOf("a")); n != 0 {
			t.Errorf("%d effects", n)
		}
		if f := w.await(w.publish("b", events.Act, "b", act(click(1, 1)))); f.Outcome != computer.OK {
			t.Errorf("another vm: %s", mustJSON(f))
		}
		// daytona#3294: kill is idempotent.
		if f := w.await(w.publish("a", events.Kill, "k2", struct{}{})); f.Outcome != computer.OK {
			t.Errorf("kill again, the allocation stands: %s", mustJSON(f))
		}
		w.free(server1, "a")
		w.editVM("a", func(p *kv.Placement) { p.Phase, p.Outcome, p.Code = kv.Ended, "killed", "killed" })
		if f := w.await(w.publish("a", events.Kill, "k3", struct{}{})); f.Outcome != computer.Rejected || f.Error.Code != events.CodeNotFound {
			t.Errorf("kill of an ended vm: %s", mustJSON(f))
		}
		stale := fence - 1
		fb := w.record(server1).Allocs["b"].Fence
		if f := w.await(w.publish("b", events.Kill, "k4", events.Command{Fence: &stale})); f.Outcome != computer.Rejected || f.Error.Code != events.CodeFenceStale {
			t.Errorf("kill of another life: %s (b has %d)", mustJSON(f), fb)
		}
	})
}

// sel#13723, nats.md pitfall 15: a sandbox that hangs delays no other, and no
// kill; its act ends unknown in bounded time.
func TestHungSandboxDelaysNoOther(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.start("w1")
		w.ready("a")
		w.ready("b")
		f := w.fake(server1)
		f.Inject("Execute", "a", 1, providertest.Injection{Hang: true})
		hung := w.publish("a", events.Act, "1", act(click(1, 1)))
		time.Sleep(50 * time.Millisecond)
		for i := range 20 {
			start := time.Now()
			c := w.publish("b", events.Act, fmt.Sprint("b", i), act(click(1, 1)))
			if f := w.await(c); f.Outcome != computer.OK || time.Since(start) > time.Second {
				t.Fatalf("another vm after %s: %s", time.Since(start), mustJSON(f))
			}
		}
		start := time.Now()
		if f := w.await(hung); f.Outcome != computer.Unknown || f.Error.Code != events.CodeTimeout {
			t.Errorf("hung act: %s", mustJSON(f))
		}
		if d := time.Since(start); d > 2*time.Minute {
			t.Errorf("a hung act took %s", d)
		}
		if f := w.await(w.publish("a", events.Act, "2", act(click(1, 1)))); f.Outcome != computer.OK {
			t.Errorf("afterwards: %s", mustJSON(f))
		}
	})
}

// A sandbox's backlog is bounded; what is over it is busy, at once, while the
// backlog waits.
func TestBacklogIsBounded(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.start("w1")
		w.ready("a")
		deadline := time.Now().Add(time.Hour)
		send := func(id string, seconds float64) sent {
			data := act(click(1, 1), wait(seconds))
			data["deadline"] = deadline
			return w.publish("a", events.Act, id, data)
		}
		running := send("run", 20)
		time.Sleep(100 * time.Millisecond)
		var waiting, over []sent
		for i := range bus.BacklogPerSandbox {
			waiting = append(waiting, send(fmt.Sprint("w", i), 0))
		}
		for i := range 3 {
			over = append(over, send(fmt.Sprint("o", i), 0))
		}
		for _, c := range over {
			if f := w.await(c); f.Outcome != computer.Rejected || f.Error.Code != events.CodeBusy {
				t.Errorf("over the backlog: %s", mustJSON(f))
			}
		}
		if _, done := w.finished(running); done {
			t.Error("busy was said only after the backlog had moved")
		}
		for _, c := range append(waiting, running) {
			if f := w.await(c); f.Outcome != computer.OK {
				t.Errorf("in the backlog: %s", mustJSON(f))
			}
		}
	})
}

// Only what came since the consumer was read counts for the backlog; a lane
// runs in order and takes nothing twice.
func TestLanes(t *testing.T) {
	var ran, busy []uint64
	var mu sync.Mutex
	begin := make(chan struct{})
	l := newLanes(2, func(_ context.Context, it *item) {
		<-begin
		mu.Lock()
		defer mu.Unlock()
		if it.busy {
			busy = append(busy, it.seq)
		} else {
			ran = append(ran, it.seq)
		}
		it.acked = it.seq != 7
	})
	put := func(seq uint64, fresh bool) bool { return l.put(t.Context(), "a", &item{seq: seq, fresh: fresh}) }
	for seq := range uint64(100) {
		if !put(seq+1, false) {
			t.Errorf("%d was not taken", seq+1)
		}
	}
	for seq := uint64(101); seq <= 104; seq++ {
		put(seq, true)
	}
	if !put(50, false) || !put(104, true) {
		t.Error("what is held was taken for handled")
	}
	if n := len(l.held); n != 104 {
		t.Errorf("%d held", n)
	}
	close(begin)
	l.wg.Wait()
	if !slices.IsSorted(ran) || len(ran) != 102 || !slices.Equal(busy, []uint64{103, 104}) {
		t.Errorf("ran %v, busy %v", ran, busy)
	}
	if len(l.boxes) != 0 || len(l.held) != 0 {
		t.Errorf("left: %v, %v", l.boxes, l.held)
	}
	// What was handled and could not be finished is taken again, also while the
	// lane has gone on.
	l.boxes["a"] = &mailbox{last: 104, running: &item{}}
	if put(6, false) || !put(7, false) {
		t.Error("of 6, finished, and 7, unfinished, the second is to be taken again")
	}
	delete(l.boxes, "a")
	l.stop()
	if put(200, true); len(l.boxes) != 0 {
		t.Error("taken after the stop")
	}
}

// A pause that is taken back goes on in order: what ran and what waits behind it
// is held, what else waited is dropped and put again.
func TestLanesPauseAndResume(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		ran := map[bool][]uint64{} // by whether the sequence is even, as its lane
		var mu sync.Mutex
		times := map[uint64]time.Duration{1: 5 * time.Second, 2: time.Second}
		l := newLanes(0, func(_ context.Context, it *item) {
			time.Sleep(times[it.seq])
			mu.Lock()
			defer mu.Unlock()
			ran[it.seq%2 == 0] = append(ran[it.seq%2 == 0], it.seq)
			it.acked = true
		})
		put := func(seq uint64) bool { return l.put(t.Context(), fmt.Sprint(seq%2), &item{seq: seq}) }
		for seq := uint64(1); seq <= 6; seq++ {
			put(seq)
		}
		synctest.Wait()
		start := time.Now()
		if l.pause(t.Context(), t.Context(), 2*time.Second) || time.Since(start) != 2*time.Second {
			t.Errorf("paused after %s with something running", time.Since(start))
		}
		if n := l.load(); n != 3 {
			t.Errorf("%d held in the pause, want 1, 3 and 5", n)
		}
		l.resume()
		for seq := uint64(1); seq <= 8; seq++ {
			if seq != 2 && !put(seq) { // 2 is acknowledged and does not come again
				t.Errorf("%d was not taken", seq)
			}
		}
		time.Sleep(10 * time.Second)
		mu.Lock()
		if want := []uint64{1, 3, 5, 7}; !slices.Equal(ran[false], want) {
			t.Errorf("ran %v, want %v", ran[false], want)
		}
		if want := []uint64{2, 4, 6, 8}; !slices.Equal(ran[true], want) {
			t.Errorf("ran %v, want %v", ran[true], want)
		}
		mu.Unlock()
		put(9)
		if !l.pause(t.Context(), t.Context(), 2*time.Second) || l.load() != 0 {
			t.Error("not paused with nothing running")
		}
	})
}

// What was admitted by a worker that died is not busy for its successor,
// however much of it comes again.
func TestTakeoverIsNotBusy(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		one := w.start("w1")
		w.ready("a")
		deadline := time.Now().Add(time.Hour)
		// A long act holds the ack floor, so all that follows on another vm is
		// delivered again.
		hold := act(wait(300))
		hold["deadline"] = deadline
		w.publish("a", events.Act, "hold", hold)
		w.ready("b")
		var all []sent
		for i := range 100 {
			all = append(all, w.publish("b", events.Act, fmt.Sprint("d", i), act(click(1, 1))))
			w.await(all[i])
		}
		long := act(click(5, 5), wait(5))
		long["deadline"] = deadline
		for i := range 40 {
			all = append(all, w.publish("b", events.Act, fmt.Sprint("l", i), long))
		}
		time.Sleep(time.Second)
		one.crash()
		w.start("w2")
		for i, c := range all {
			f := w.await(c)
			w.once(c)
			if i != 100 && f.Outcome != computer.OK {
				t.Errorf("act %d: %s", i, mustJSON(f))
			}
		}
	})
}

// Nor is what was published before the server had a worker at all.
func TestFirstWorkerIsNotBusy(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		fence := w.place(server1, "a")
		if _, err := w.fake(server1).Provider().Create(t.Context(), providers.Spec{VM: "a", Fence: fence}); err != nil {
			t.Fatal(err)
		}
		var all []sent
		for i := range bus.BacklogPerSandbox + 20 {
			all = append(all, w.publish("a", events.Act, fmt.Sprint(i), act(click(i, i))))
		}
		w.start("w1")
		for i, c := range all {
			if f := w.await(c); f.Outcome != computer.OK {
				t.Errorf("act %d: %s", i, mustJSON(f))
			}
		}
	})
}

// A message that is no CloudEvent names nobody to answer: it is dead-lettered
// with the reason, and stops nobody else (I7).
func TestMalformedIsDeadLettered(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.start("w1")
		w.ready("a")
		for i, bad := range []*nats.Msg{
			{Subject: events.CommandSubject(server1, "a", events.Act), Data: []byte("click here")},
			{Subject: events.CommandSubject(server1, "a", events.Kill), Data: []byte(`{"specversion":"1.0"}`)},
			{Subject: events.CommandSubject(server1, "b!", events.Act), Data: []byte(`{}`)},
		} {
			ack, err := w.js.PublishMsg(context.Background(), bad)
			if err != nil {
				t.Fatal(err)
			}
			if f := w.await(w.publish("a", events.Act, fmt.Sprint(i), act(click(1, 1)))); f.Outcome != computer.OK {
				t.Errorf("a good command after it: %s", mustJSON(f))
			}
			w.until("it is acknowledged", time.Minute, func() bool { return w.unfinished() == 0 })
			s, err := w.js.Stream(context.Background(), bus.DeadLetter)
			if err != nil {
				t.Fatal(err)
			}
			letter, err := s.GetMsg(context.Background(), uint64(i+1))
			if err != nil {
				t.Fatal(err)
			}
			want := events.DeadLetterSubject(bus.Commands, server1)
			if i == 1 {
				want += "-kill"
			}
			if letter.Subject != want || string(letter.Data) != string(bad.Data) || letter.Header.Get(bus.HeaderSubject) != bad.Subject ||
				letter.Header.Get(bus.HeaderStreamSeq) != fmt.Sprint(ack.Sequence) || letter.Header.Get(bus.HeaderReason) == "" {
				t.Errorf("dead letter: %+v", letter)
			}
		}
	})
}
