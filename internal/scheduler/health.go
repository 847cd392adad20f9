package scheduler

import (
	"fmt"
	"time"

	"berth/internal/kv"
)

// Rules of a server's health; heartbeats come every 2 s ± 10 %.
const (
	silentDegraded = 5 * time.Second  // no heartbeat: degraded
	silentDown     = 30 * time.Second // no worker has held its lease for so long: down
	probesDown     = 15 * time.Second // its worker's probes of it have failed for so long: down
	recoverBeats   = 3                // heartbeats in a row that bring it up again
	recoverFor     = 6 * time.Second  // over at least so long

	rampFrom = 0.1              // share of its free room that a recovered server gets at once
	rampFor  = 60 * time.Second // until it has all of it

	flapHold    = 15 * time.Second  // a server that goes down again is held down, doubling
	flapHoldMax = 300 * time.Second //
	flapForget  = 600 * time.Second // of health, for each time that is forgotten
)

// monitor judges one server from the heartbeats that are heard and the time
// that passes between them, on the observer's own monotonic clock. It is pure:
// the caller says what time it is.
type monitor struct {
	state  kv.HealthState
	reason string
	since  time.Time // of the present state

	heard     time.Time // last heartbeat, or when watching began: everyone has full grace then (H3)
	ever      bool      // a heartbeat has been heard
	badProbe  time.Time // first of the failing probes; zero: passing
	goodBeats int       // in a row since it went down
	goodSince time.Time
	last      kv.Heartbeat

	falls     int       // times it went down and not forgotten: each doubles the hold
	fellAt    time.Time // last of them, or last forgetting
	recovered time.Time // from down; zero: long ago
	frozen    bool      // mass brake: it does not go down
}

func newMonitor(now time.Time) monitor {
	return monitor{state: kv.Degraded, reason: "no heartbeat yet", since: now, heard: now}
}

// resume takes over how the term before judged the server; it keeps its state
// until heartbeats or silence say otherwise.
func (m *monitor) resume(state kv.HealthState, reason string) {
	if state != "" {
		m.state, m.reason = state, reason
	}
}

// handedOver is the monitor of one that becomes active, which has heard the
// heartbeats while it stood by but judged nothing: it goes on from how the term
// before judged the server, and everyone has full grace (H3).
func (m *monitor) handedOver(now time.Time, view kv.ServerView) monitor {
	next := newMonitor(now)
	next.resume(view.Health, view.Reason)
	if m.ever && now.Sub(m.heard) < silentDegraded {
		next.beat(now, m.last)
	}
	return next
}

// beat takes in a heartbeat.
func (m *monitor) beat(now time.Time, b kv.Heartbeat) {
	m.heard, m.ever, m.last = now, true, b
	switch {
	case b.Probe == "":
		m.badProbe = time.Time{}
	case m.badProbe.IsZero():
		m.badProbe = now
	}
	if b.Probe != "" || !b.Synced {
		m.goodBeats = 0
		return
	}
	if m.goodBeats++; m.goodBeats == 1 {
		m.goodSince = now
	}
}

// pardon gives full grace anew: the observer itself was not looking for a
// while (H2).
func (m *monitor) pardon(now time.Time) {
	m.heard = now
	if !m.badProbe.IsZero() {
		m.badProbe = now
	}
}

// hold is how long a server that has fallen so often stays down.
func (m *monitor) hold() time.Duration {
	if m.falls < 2 {
		return 0
	}
	return min(flapHold<<min(m.falls-2, 5), flapHoldMax)
}

// judge returns the state that the rules give now, and why.
func (m *monitor) judge(now time.Time) (kv.HealthState, string) {
	silent := now.Sub(m.heard)
	down, why := silent >= silentDown, fmt.Sprintf("no heartbeat for %s", silentDown)
	if !down && !m.badProbe.IsZero() && now.Sub(m.badProbe) >= probesDown {
		down, why = true, fmt.Sprintf("probes have failed for %s: %s", probesDown, m.last.Probe)
	}
	switch {
	case m.state == kv.Down && (down || silent >= silentDegraded || m.goodBeats < recoverBeats || now.Sub(m.goodSince) < recoverFor):
		return kv.Down, m.reason
	case m.state == kv.Down && now.Sub(m.since) < m.hold():
		return kv.Down, fmt.Sprintf("held down for %s: it went down %d times lately", m.hold(), m.falls)
	case down && m.frozen:
		return kv.Degraded, why + "; not taken for down, since most of the fleet fell silent at once"
	case down:
		return kv.Down, why
	case silent >= silentDegraded:
		return kv.Degraded, fmt.Sprintf("no heartbeat for %s", silentDegraded)
	case !m.ever:
		return m.state, m.reason
	case m.last.Probe != "":
		return kv.Degraded, "probe failed: " + m.last.Probe
	case !m.last.Synced:
		return kv.Degraded, "its worker has not read the inventory yet"
	case m.last.Breaker == "open":
		return kv.Degraded, "breaker is open: commands have been failing"
	}
	return kv.Healthy, "heartbeats and probes are good"
}

// change moves to the state that the rules give now; from is "" when nothing
// changed.
func (m *monitor) change(now time.Time) (from kv.HealthState) {
	for m.falls > 0 && m.state != kv.Down && now.Sub(m.fellAt) >= flapForget {
		m.falls--
		m.fellAt = m.fellAt.Add(flapForget)
	}
	state, reason := m.judge(now)
	m.reason = reason
	if state == m.state {
		return ""
	}
	from, m.state, m.since = m.state, state, now
	switch {
	case state == kv.Down:
		m.goodBeats = 0
		m.falls++
		m.fellAt = now
	case from == kv.Down:
		m.recovered = now
	}
	return from
}

// room is how many sandboxes a server with max places, of which used are
// taken, may hold now: a server that was down comes back slowly.
func (m *monitor) room(now time.Time, used, max int) int {
	since := now.Sub(m.recovered)
	if m.recovered.IsZero() || since >= rampFor || used >= max {
		return max
	}
	share := rampFrom + (1-rampFrom)*float64(since)/float64(rampFor)
	return min(max, int(share*float64(max))+1)
}

// ramping reports whether room still grows by itself.
func (m *monitor) ramping(now time.Time) bool {
	return !m.recovered.IsZero() && now.Sub(m.recovered) < rampFor
}

// brake decides the mass brake: when more than half of the fleet, and at least
// three, fell silent within silentDown, the observer is the likelier fault, and
// nobody is taken for down until most are heard again (H4).
type brake struct{ on bool }

// judge looks at all servers; changed says that the brake went on or off.
func (b *brake) judge(now time.Time, servers map[string]*serverState) (changed bool, silent, all int) {
	for _, s := range servers {
		if !s.health.ever {
			continue
		}
		all++
		quiet := now.Sub(s.health.heard)
		if quiet >= silentDegraded && (b.on || quiet <= silentDown+silentDegraded) {
			silent++
		}
	}
	on := silent >= 3 && 2*silent > all
	changed = on != b.on
	b.on = on
	return changed, silent, all
}
