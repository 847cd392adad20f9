package worker

import (
	"fmt"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/providers"
	"berth/internal/providers/providertest"
	"berth/internal/virtualtime"
)

// opened returns a breaker that has just opened.
func opened() *breaker {
	b := newBreaker(server1, func() {})
	for range breakerRow {
		b.begin("a")(providers.ErrUnavailable)
	}
	return b
}

// termite#27: an answer of an older generation changes nothing, neither in
// half-open nor once it has closed; one call decides, and which fails or says
// nothing leaves no breaker half-open for ever.
func TestBreakerGenerations(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		b := newBreaker(server1, func() {})
		is := func(when, want string) {
			t.Helper()
			if got := b.String(); got != want {
				t.Fatalf("%s: %s, want %s", when, got, want)
			}
		}
		good, bad, create := b.begin("a"), b.begin("a"), b.begin("a")
		early, err := b.allow()
		if err != nil {
			t.Fatal(err)
		}
		for range breakerRow {
			b.begin("a")(providers.ErrUnavailable)
		}
		is("after three failures", "open")
		whileOpen := b.begin("a")
		if _, err := b.allow(); err == nil {
			t.Error("an open breaker allows a create")
		}
		time.Sleep(breakerOpenFor + time.Second)
		is("after its time", "half-open")
		good(nil)
		early(nil)
		whileOpen(nil)
		is("after late successes", "half-open")
		bad(providers.ErrTimeout)
		is("after a late failure", "half-open")
		probe, err := b.allow()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.allow(); err == nil {
			t.Error("a half-open breaker allows a second create")
		}
		probe(errKilled)
		is("after a probe that says nothing", "half-open")
		if probe, err = b.allow(); err != nil {
			t.Fatal(err)
		}
		probe(providers.ErrUnavailable)
		is("after a probe that fails", "open")
		time.Sleep(breakerOpenFor + time.Second)
		long := b.begin("a") // is waited for by nobody
		time.Sleep(time.Hour)
		b.begin("a")(nil)
		is("after an act that succeeds", "closed")
		for range breakerRow {
			create(providers.ErrUnavailable)
			long(providers.ErrUnavailable)
		}
		is("after late failures", "closed")
	})
}

// Calls that hang for longer than the window count all the same.
func TestBreakerCountsTimeouts(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		b := newBreaker(server1, func() {})
		var calls []func(error)
		for range breakerRow {
			done, err := b.allow()
			if err != nil {
				t.Fatal(err)
			}
			calls = append(calls, done)
		}
		time.Sleep(createTime)
		for _, done := range calls {
			done(errTimedOut)
		}
		if b.String() != "open" {
			t.Errorf("%s after creates that hang", b)
		}
		if b := opened(); b.String() != "open" {
			t.Errorf("%s after failures", b)
		}
	})
}

// One sandbox that hangs does not open the breaker of its server, however often
// it is tried; several do.
func TestHungSandboxOpensNoBreaker(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		w.start("w1")
		for _, vm := range []string{"a", "b", "c", "d"} {
			w.ready(vm)
		}
		state := func() string { time.Sleep(time.Second); h, _ := w.beat(server1); return h.Breaker }
		heal := f.Inject("Execute", "a", -1, providertest.Injection{Hang: true})
		blind := f.Inject("Observe", "a", -1, providertest.Injection{Err: providers.ErrTimeout})
		for i := range 5 {
			w.await(w.publish("a", events.Act, fmt.Sprint("act", i), act(click(1, 1))))
			for j := range 5 {
				w.await(w.publish("a", events.Observe, fmt.Sprint("observe", i, j), struct{}{}))
			}
			if s := state(); s != "closed" {
				t.Fatalf("%s after %d acts and observations of one sandbox that hangs", s, i+1)
			}
		}
		blind()
		heal()
		if r := w.await(w.publish("a", events.Act, "well", act(click(1, 1)))); r.Outcome != computer.OK {
			t.Errorf("%s", mustJSON(r))
		}
		f.Inject("Execute", "", -1, providertest.Injection{Hang: true})
		var all []sent
		for _, vm := range []string{"b", "c", "d"} {
			all = append(all, w.publish(vm, events.Act, "2", act(click(1, 1))))
		}
		for _, c := range all {
			w.await(c)
		}
		if s := state(); s != "open" {
			t.Errorf("%s after three sandboxes have hung", s)
		}
	})
}

// What counts of the answers of one sandbox.
func TestBreakerCountsASandboxOnce(t *testing.T) {
	b := newBreaker(server1, func() {})
	tell := func(vm string, errs ...error) {
		for _, err := range errs {
			b.begin(vm)(err)
		}
	}
	tell("a", errTimedOut, providers.ErrTimeout, errTimedOut, errKilled, errTimedOut)
	tell("b", errTimedOut, errTimedOut)
	if b.String() != "closed" {
		t.Fatalf("%s after time-outs of two sandboxes", b)
	}
	tell("a", nil, errTimedOut, errTimedOut) // it has answered in between: counts again, from the start
	b.forget("b")
	tell("b", errTimedOut)
	if b.String() != "closed" {
		t.Fatalf("%s after two more", b)
	}
	tell("a", fmt.Errorf("%w: %w", providers.ErrUnavailable, providers.ErrTimeout))
	if b.String() != "open" {
		t.Errorf("%s after three in a row, the last of a server that is not there", b)
	}
}

// An act that began before the breaker opened does not close it, and is served
// to its end.
func TestLateActClosesNoBreaker(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		w.start("w1")
		w.ready("a")
		state := func() string { h, _ := w.beat(server1); return h.Breaker }
		long := w.publish("a", events.Act, "long", act(wait(40)))
		time.Sleep(time.Second)
		f.Inject("Create", "", 3, providertest.Injection{Err: providers.ErrUnavailable})
		f.Inject("Kill", "", 3, providertest.Injection{Err: providers.ErrUnavailable})
		if r := w.await(w.create(server1, "u1", w.place(server1, "u1"))); r.Outcome != computer.Failed {
			t.Errorf("create: %s", mustJSON(r))
		}
		w.free(server1, "u1")
		w.until("open", 3*time.Second, func() bool { return state() == "open" })
		w.until("half-open", 20*time.Second, func() bool { return state() == "half-open" })
		if r := w.await(long); r.Outcome != computer.OK {
			t.Errorf("act: %s", mustJSON(r))
		}
		time.Sleep(5 * time.Second)
		if s := state(); s != "half-open" {
			t.Errorf("%s after an act that began before it opened", s)
		}
		if r := w.await(w.publish("a", events.Act, "short", act(click(1, 1)))); r.Outcome != computer.OK {
			t.Errorf("act: %s", mustJSON(r))
		}
		w.until("closed", 3*time.Second, func() bool { return state() == "closed" })
	})
}
