package scheduler

import (
	"fmt"
	"testing"
	"time"

	"berth/internal/kv"
)

// watched drives one monitor by a script of seconds.
type watched struct {
	monitor
	now time.Time
}

func watch() *watched {
	now := time.Unix(1000, 0)
	return &watched{newMonitor(now), now}
}

func good() kv.Heartbeat { return kv.Heartbeat{Synced: true, Breaker: "closed"} }

// pass lets time pass in half seconds, with a heartbeat every 2 s unless beat
// is nil, and returns the states that were reached.
func (w *watched) pass(d time.Duration, beat *kv.Heartbeat) []kv.HealthState {
	var reached []kv.HealthState
	for i := range int(d / (500 * time.Millisecond)) {
		w.now = w.now.Add(500 * time.Millisecond)
		if beat != nil && i%4 == 0 {
			w.beat(w.now, *beat)
		}
		if w.change(w.now) != "" {
			reached = append(reached, w.state)
		}
	}
	return reached
}

func expect(t *testing.T, what string, got []kv.HealthState, want ...kv.HealthState) {
	t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

func TestMonitor(t *testing.T) {
	beat, bad := good(), good()
	bad.Probe = "no answer in 1 s"
	unsynced := kv.Heartbeat{Breaker: "closed"}
	open := good()
	open.Breaker = "open"

	w := watch()
	expect(t, "first heartbeats", w.pass(10*time.Second, &beat), kv.Healthy)
	expect(t, "4 s of silence", w.pass(2*time.Second, nil))
	expect(t, "heard in time", w.pass(10*time.Second, &beat))
	expect(t, "silence", w.pass(40*time.Second, nil), kv.Degraded, kv.Down)
	expect(t, "one heartbeat is not enough", w.pass(2*time.Second, &beat))
	expect(t, "three over 6 s are", w.pass(8*time.Second, &beat), kv.Healthy)
	expect(t, "probes fail", w.pass(14*time.Second, &bad), kv.Degraded)
	expect(t, "for 15 s", w.pass(3*time.Second, &bad), kv.Down)

	w = watch()
	expect(t, "never heard", w.pass(60*time.Second, nil), kv.Down)
	w = watch()
	expect(t, "inventory unread", w.pass(20*time.Second, &unsynced))
	expect(t, "then read", w.pass(3*time.Second, &beat), kv.Healthy)
	expect(t, "breaker opens", w.pass(20*time.Second, &open), kv.Degraded)
	expect(t, "and closes", w.pass(3*time.Second, &beat), kv.Healthy)
}

// A server that keeps falling is held down longer each time, and a long health
// is rewarded (H8: daytona#5141).
func TestFlappingIsHeld(t *testing.T) {
	beat := good()
	w := watch()
	w.pass(10*time.Second, &beat)
	var holds []time.Duration
	for range 7 {
		w.pass(35*time.Second, nil)
		if w.state != kv.Down {
			t.Fatalf("%s after 35 s of silence", w.state)
		}
		down := w.since
		for w.state == kv.Down {
			w.pass(2*time.Second, &beat)
		}
		holds = append(holds, w.now.Sub(down).Round(5*time.Second))
	}
	if holds[0] > 15*time.Second || holds[6] < 295*time.Second || holds[6] > 320*time.Second {
		t.Errorf("times down %v: want about 10 s at first and 300 s at last", holds)
	}
	for range 8 {
		w.pass(flapForget, &beat)
	}
	if w.falls != 0 {
		t.Errorf("%d falls remembered after %s of health", w.falls, 8*flapForget)
	}
}

// A server that was down fills up slowly.
func TestRamp(t *testing.T) {
	beat := good()
	w := watch()
	w.pass(10*time.Second, &beat)
	if got := w.room(w.now, 0, 100); got != 100 {
		t.Errorf("a new server has room for %d", got)
	}
	w.pass(40*time.Second, nil)
	w.pass(10*time.Second, &beat)
	at := w.recovered
	for after, want := range map[time.Duration]int{0: 11, 30 * time.Second: 56, 60 * time.Second: 100} {
		if got := w.room(at.Add(after), 0, 100); got != want {
			t.Errorf("%s after recovery: room for %d, want %d", after, got, want)
		}
	}
	if got := w.room(at, 0, 1); got != 1 {
		t.Errorf("a server for one has room for %d", got)
	}
}

// When most fall silent at once nobody is taken for down; when one does, it is
// (H4: k8s#24200, #131182). After the observer's own pause everyone has full
// grace (H2: SeleniumHQ/selenium#11948).
func TestMassBrake(t *testing.T) {
	now := time.Unix(1000, 0)
	servers := map[string]*serverState{}
	for i := range 6 {
		s := &serverState{health: newMonitor(now)}
		s.health.beat(now, good())
		servers[fmt.Sprint(i)] = s
	}
	var b brake
	run := func(d time.Duration, heard int) (down int) {
		for end := now.Add(d); now.Before(end); now = now.Add(500 * time.Millisecond) {
			for i := range heard {
				servers[fmt.Sprint(i)].health.beat(now, good())
			}
			b.judge(now, servers)
			for _, s := range servers {
				s.health.frozen = b.on
				s.health.change(now)
			}
		}
		for _, s := range servers {
			if s.health.state == kv.Down {
				down++
			}
		}
		return down
	}
	if down := run(60*time.Second, 2); down != 0 || !b.on {
		t.Errorf("4 of 6 silent: %d down, brake %v", down, b.on)
	}
	if down := run(60*time.Second, 6); down != 0 || b.on {
		t.Errorf("all heard again: %d down, brake %v", down, b.on)
	}
	if down := run(60*time.Second, 5); down != 1 || b.on {
		t.Errorf("1 of 6 silent: %d down, brake %v", down, b.on)
	}
	if down := run(60*time.Second, 4); down != 2 {
		t.Errorf("another silent: %d down", down)
	}
	now = now.Add(10 * time.Minute) // the observer was asleep
	for _, s := range servers {
		s.health.pardon(now)
	}
	if down := run(4*time.Second, 0); down != 2 {
		t.Errorf("just after a pause: %d down", down)
	}
}
