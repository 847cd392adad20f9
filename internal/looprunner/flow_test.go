package looprunner_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
	"berth/internal/providers/providertest"
	"berth/internal/scheduler"
	"berth/internal/worker"
)

// service runs a role on a connection of its own until it is killed.
type service struct {
	kill func()
	done chan struct{}
}

func (g *rig) service(name string, setUp func(js jetstream.JetStream) (func(context.Context) error, error)) *service {
	g.t.Helper()
	nc, js := g.connect(name)
	run, err := setUp(js)
	if err != nil {
		g.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(g.t.Context()))
	s := &service{kill: func() { nc.Close(); cancel() }, done: make(chan struct{})}
	go func() {
		defer close(s.done)
		_ = run(ctx)
	}()
	return s
}

func (g *rig) scheduler(name string) *service {
	return g.service(name, func(js jetstream.JetStream) (func(context.Context) error, error) {
		s, err := scheduler.New(scheduler.Options{JS: js, Name: name, Log: quiet})
		if err != nil {
			return nil, err
		}
		return s.Run, nil
	})
}

func (g *rig) worker(name string, fake *providertest.Fake) *service {
	return g.service(name, func(js jetstream.JetStream) (func(context.Context) error, error) {
		w, err := worker.New(worker.Options{JS: js, Name: name, Log: quiet, Servers: []worker.Server{{ID: "fake-01",
			Config: kv.ServerConfig{Provider: "fake", Roles: []string{"default"}, MaxContainers: 20, Isolation: kv.IsolationNone},
			Open:   func(context.Context) (providers.Provider, error) { return fake.Provider(), nil }}}})
		if err != nil {
			return nil, err
		}
		return w.Run, nil
	})
}

// A loop whose sandbox was paused by its idle clock, while the loop itself was
// paused, resumes it and goes on.
func TestPausedSandboxIsResumed(t *testing.T) {
	bubbleWithout(t, func(g *rig) {
		fake := providertest.NewFake(providertest.FakeOptions{ServerID: "fake-01", Recall: true, CheckFences: true})
		services := []*service{g.scheduler("scheduler"), g.worker("worker", fake)}
		a := g.runner("a", nil)
		time.Sleep(10 * time.Second)
		g.start("l", `[{"type":"type","text":"before"},{"type":"wait","seconds":5},{"type":"type","text":"after"}]`,
			object{"sandbox": object{"idleTimeoutSeconds": 20, "idlePolicy": "pause"}})
		g.until("l", "acted")
		g.request(events.Pause, "p", object{"loopId": "l"})
		g.until("l", "paused")
		paused := func() bool {
			s, err := fake.Provider().Get(g.t.Context(), vmOf("l"))
			return err == nil && s.State == providers.Paused
		}
		for began := time.Now(); !paused(); time.Sleep(time.Second) {
			if time.Since(began) > 2*time.Minute {
				t.Fatal("the idle clock did not pause the sandbox")
			}
		}
		g.request(events.Resume, "r", object{"loopId": "l"})
		g.finished("l", events.LoopSucceeded, "")
		var typed []string
		for _, e := range fake.EffectsOf(vmOf("l")) {
			if e.Action.Text != nil {
				typed = append(typed, *e.Action.Text)
			}
		}
		if fmt.Sprint(typed) != "[before after]" {
			t.Errorf("typed %q", typed)
		}
		a.close()
		for _, s := range services {
			s.kill()
			<-s.done
		}
		fake.Shutdown()
	})
}

// The whole flow with the real scheduler and worker, one of each pair killed
// in the middle: every act once, and the loops succeed.
func TestRealFleetWithDeaths(t *testing.T) {
	bubbleWithout(t, func(g *rig) {
		fake := providertest.NewFake(providertest.FakeOptions{ServerID: "fake-01", Recall: true, CheckFences: true, Detached: true})
		services := map[string]*service{}
		for _, n := range []string{"a", "b"} {
			services["scheduler-"+n] = g.scheduler("scheduler-" + n)
			services["worker-"+n] = g.worker("worker-"+n, fake)
			time.Sleep(3 * time.Second)
		}
		a, b := g.runner("a", nil), g.runner("b", nil)
		time.Sleep(time.Second)
		const loops, steps = 6, 12
		var items []string
		for i := range steps {
			items = append(items, fmt.Sprintf(`{"type":"type","text":"<%d>"},{"check":"title","contains":"<%d>"},{"type":"wait","seconds":1}`, i, i))
		}
		for i := range loops {
			g.start(fmt.Sprintf("l%d", i), "["+strings.Join(items, ",")+"]", nil)
		}
		time.Sleep(5 * time.Second)
		for _, kill := range []func(){services["worker-a"].kill, services["scheduler-a"].kill, a.kill} {
			kill()
			time.Sleep(4 * time.Second)
		}
		for i := range loops {
			loop := fmt.Sprintf("l%d", i)
			j, f := g.finished(loop, events.LoopSucceeded, "")
			seen := map[string]int{}
			for _, e := range fake.EffectsOf(vmOf(loop)) {
				if e.Action.Text != nil {
					seen[*e.Action.Text]++
				}
			}
			for n := range steps {
				if k := seen[fmt.Sprintf("<%d>", n)]; k != 1 {
					t.Errorf("%s: text %d was typed %d times", loop, n, k)
				}
			}
			if f.Steps != 2*steps {
				t.Errorf("%s: %d steps, journal %s", loop, f.Steps, names(j))
			}
			if f.Seconds > 90 {
				t.Errorf("%s took %v s", loop, f.Seconds)
			}
		}
		time.Sleep(30 * time.Second)
		for _, l := range fake.Lives() {
			if l.Ended.IsZero() {
				t.Errorf("sandbox %s lives on", l.VM)
			}
		}
		b.close()
		for _, s := range services {
			s.kill()
			<-s.done
		}
		fake.Shutdown()
	})
}
