package worker

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
	"berth/internal/providers/providertest"
)

// A provider that is deaf where a vm is looked for that no inventory showed
// holds up neither that vm's lane nor the drain.
func TestDeafLook(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		one := w.start("w1")
		w.holds("w1")
		release := make(chan struct{})
		defer close(release)
		f.OnCall(func(c providertest.Call) providertest.Injection {
			if c.Method == "Get" && c.VM == "ghost" { //nolint:usestdlibvars // a provider's method, not HTTP's
				<-release
			}
			return providertest.Injection{}
		})
		w.place(server1, "ghost")
		start := time.Now()
		r := w.await(w.publish("ghost", events.Act, "1", act(click(1, 1))))
		if d := time.Since(start); r.Outcome != computer.Rejected || r.Error.Code != events.CodeTimeout || d > 20*time.Second {
			t.Errorf("after %s: %s", d, mustJSON(r))
		}
		w.publish("ghost", events.Act, "2", act(click(1, 1)))
		time.Sleep(time.Second)
		start = time.Now()
		one.drain()
		if d := time.Since(start); d > drainGrace+5*time.Second {
			t.Errorf("drain took %s", d)
		}
	})
}

// A worker whose server has failed its probes for 15 s begins nothing there but
// kills, and serves again with the first probe that passes.
func TestDownFailsFast(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		f := w.fake(server1)
		w.start("w1")
		w.ready("a")
		w.ready("b")
		heal := f.Inject("Health", "", -1, providertest.Injection{Err: providers.ErrUnavailable})
		time.Sleep(10 * time.Second)
		if r := w.await(w.publish("a", events.Act, "soon", act(click(1, 1)))); r.Outcome != computer.OK {
			t.Errorf("before 15 s: %s", mustJSON(r))
		}
		time.Sleep(10 * time.Second)
		hang := f.Inject("", "", -1, providertest.Injection{Hang: true})
		fence := w.place(server1, "c")
		start := time.Now()
		for _, c := range []sent{
			w.publish("a", events.Act, "act", act(click(1, 1))),
			w.publish("a", events.Observe, "observe", struct{}{}),
			w.publish("a", events.Pause, "pause", struct{}{}),
			w.create(server1, "c", fence),
		} {
			if r := w.await(c); r.Outcome != computer.Rejected || r.Error.Code != events.CodeServerDown || !strings.Contains(r.Error.Message, "probes") {
				t.Errorf("down: %s", mustJSON(r))
			}
			w.once(c)
		}
		if d := time.Since(start); d > time.Second {
			t.Errorf("said after %s", d)
		}
		hang()
		if r := w.await(w.publish("b", events.Kill, "kill", struct{}{})); r.Outcome != computer.OK {
			t.Errorf("kill: %s", mustJSON(r))
		}
		heal()
		w.until("the probe passes", 5*time.Second, func() bool { h, _ := w.beat(server1); return h.Probe == "" })
		if r := w.await(w.publish("a", events.Act, "again", act(click(1, 1)))); r.Outcome != computer.OK {
			t.Errorf("again: %s", mustJSON(r))
		}
		// One probe that fails now and then is no server that is down.
		for range 10 {
			f.Inject("Health", "", 1, providertest.Injection{Err: providers.ErrUnavailable})
			time.Sleep(3 * time.Second)
		}
		if r := w.await(w.publish("a", events.Act, "flaky", act(click(1, 1)))); r.Outcome != computer.OK {
			t.Errorf("flaky: %s", mustJSON(r))
		}
	})
}

// Where two workers' registries disagree on a server, the entry of the one that
// takes the lease holds, and one alert per takeover says so.
func TestRegistriesDisagree(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		s, err := w.js.Stream(t.Context(), bus.Events)
		if err != nil {
			t.Fatal(err)
		}
		alert := func() (string, events.ServerEvent, uint64) {
			e, raw, err := bus.Last(t.Context(), s, "event._."+server1+".alert")
			if err != nil {
				t.Fatal(err)
			}
			var d events.ServerEvent
			if raw == nil {
				return "", d, 0
			}
			if err := json.Unmarshal(e.Data(), &d); err != nil {
				t.Fatal(err)
			}
			return e.Type(), d, raw.Sequence
		}
		one := w.start("w1")
		w.holds("w1")
		two := w.start("w2") // of one mind
		one.drain()
		w.holds("w2")
		time.Sleep(10 * time.Second)
		if typ, _, _ := alert(); typ != "" {
			t.Errorf("%s of workers that agree", typ)
		}
		w.startWith(Options{Name: "w3", Servers: []Server{{ID: server1, Config: kv.ServerConfig{MaxContainers: 3, Roles: []string{"git"}},
			Open: func(context.Context) (providers.Provider, error) { return w.fake(server1).Provider(), nil }}}})
		two.drain()
		w.holds("w3")
		time.Sleep(10 * time.Second)
		typ, d, seq := alert()
		if typ != "berth.server.alert.v1" || d.ServerID != server1 || !strings.Contains(d.Reason, "workers w2 and w3 disagree on roles, maxContainers") {
			t.Errorf("%q %+v", typ, d)
		}
		if c := w.record(server1).Config; c.MaxContainers != 3 {
			t.Errorf("the record has %+v", c)
		}
		time.Sleep(time.Minute)
		if _, _, again := alert(); again != seq {
			t.Error("said again")
		}
	})
}
