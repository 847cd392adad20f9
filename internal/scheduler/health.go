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
)

// monitor judges one server from the heartbeats that are heard and the time
// that passes between them, on the observer's own monotonic clock. It is pure:
// the caller says what time it is.
type monitor struct {
	state  kv.HealthState
	reason string
	since  time.Time // of the present state

	heard     time.Time // last heartbeat, or when watching began: everyone has full grace then
	ever      bool      // a heartbeat has been heard
	badProbe  time.Time // first of the failing probes; zero: passing
	goodBeats int       // in a row since it went down
	goodSince time.Time
	last      kv.Heartbeat
}

func newMonitor(now time.Time) monitor {
	return monitor{state: kv.Degraded, reason: "no heartbeat yet", since: now, heard: now}
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

// judge returns the state that the rules give now, and why.
func (m *monitor) judge(now time.Time) (kv.HealthState, string) {
	silent := now.Sub(m.heard)
	switch {
	case silent >= silentDown:
		return kv.Down, fmt.Sprintf("no heartbeat for %s", silentDown)
	case !m.badProbe.IsZero() && now.Sub(m.badProbe) >= probesDown:
		return kv.Down, fmt.Sprintf("probes have failed for %s: %s", probesDown, m.last.Probe)
	case m.state == kv.Down && (silent >= silentDegraded || m.goodBeats < recoverBeats || now.Sub(m.goodSince) < recoverFor):
		return kv.Down, m.reason
	case silent >= silentDegraded:
		return kv.Degraded, fmt.Sprintf("no heartbeat for %s", silentDegraded)
	case !m.ever:
		return kv.Degraded, m.reason
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
	state, reason := m.judge(now)
	m.reason = reason
	if state == m.state {
		return ""
	}
	from, m.state, m.since = m.state, state, now
	if state == kv.Down {
		m.goodBeats = 0
	}
	return from
}

// wait is how long the state can last without a heartbeat.
func (m *monitor) wait(now time.Time) time.Duration {
	next := silentDegraded - now.Sub(m.heard)
	if next <= 0 {
		next = silentDown - now.Sub(m.heard)
	}
	if next <= 0 || next > time.Second {
		return time.Second
	}
	return next
}
