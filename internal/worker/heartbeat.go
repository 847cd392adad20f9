package worker

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"slices"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
)

// Times of heartbeats and probes.
const (
	beatEvery  = 2 * time.Second
	probeEvery = 2 * time.Second
	probeTime  = time.Second
	beatTime   = 2 * time.Second  // for one write
	probesDown = 15 * time.Second // of failing probes: the server is down, as schedulers have it
)

// beats writes heartbeats until ctx ends.
func (t *tenure) beats(ctx context.Context) {
	for {
		t.sendBeat(ctx)
		timer := time.NewTimer(beatEvery*9/10 + rand.N(beatEvery/5))
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		case <-t.beat:
			timer.Stop()
		}
	}
}

func (t *tenure) sendBeat(ctx context.Context) {
	t.mu.Lock()
	t.state.Sequence++
	t.state.SentAt = time.Now().UTC()
	t.state.Breaker = t.breaker.String()
	state := t.state
	t.mu.Unlock()
	raw, err := json.Marshal(state)
	if err != nil {
		t.log.Error("heartbeat not encoded", "err", err)
		return
	}
	ctx, cancel := context.WithTimeout(ctx, beatTime)
	defer cancel()
	if _, err := t.heartbeats.Put(ctx, t.server.ID, raw); err != nil && ctx.Err() == nil {
		t.log.Warn("heartbeat not written", "err", err)
	}
}

// probes asks the server whether it serves, until ctx ends.
func (t *tenure) probes(ctx context.Context) {
	for {
		t.probe(ctx)
		if !sleep(ctx, probeEvery) {
			return
		}
	}
}

func (t *tenure) probe(ctx context.Context) {
	call, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	h, err := bounded(call, t.provider.Health)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		t.mu.Lock()
		t.badProbes.last = time.Now()
		if t.badProbes.first.IsZero() {
			t.badProbes.first = t.badProbes.last
		}
		t.mu.Unlock()
		t.setProbe(clip(err.Error(), 512))
		return
	}
	t.mu.Lock()
	t.badProbes = span{}
	rebooted := t.state.BootID != "" && t.state.BootID != h.BootID
	changed := t.state.BootID != h.BootID || t.state.Probe != ""
	t.state.BootID, t.state.Probe = h.BootID, ""
	t.mu.Unlock()
	if rebooted {
		t.log.Warn("the server has another boot id: it has lost its sandboxes", "bootId", h.BootID)
		ask(t.look)
	}
	if changed {
		ask(t.beat)
	}
}

// down says why nothing but a kill may begin: the probes have failed for
// probesDown, first and last included, so that a worker that was frozen does
// not take its own sleep for the server's.
func (t *tenure) down() *computer.Fault {
	t.mu.Lock()
	defer t.mu.Unlock()
	if d := t.badProbes.last.Sub(t.badProbes.first); d >= probesDown {
		return fault(events.CodeServerDown, "server %s has failed its probes for %s: %s", t.server.ID, d.Round(time.Second), t.state.Probe)
	}
	return nil
}

// span is a stretch of time; zero where there is none.
type span struct{ first, last time.Time }

// setProbe notes why the last probe failed.
func (t *tenure) setProbe(why string) {
	t.mu.Lock()
	changed := (t.state.Probe == "") != (why == "")
	t.state.Probe = why
	t.mu.Unlock()
	if changed {
		t.log.Warn("probe failed", "err", why)
		ask(t.beat)
	}
}

// setStock notes what an inventory has shown.
func (t *tenure) setStock(running int, gone []kv.Gone, watched []string) {
	t.mu.Lock()
	changed := !t.state.Synced || t.state.Running != running || !slices.Equal(t.state.Gone, gone)
	t.state.Synced, t.state.Running, t.state.Gone, t.state.Watched = true, running, gone, watched
	t.mu.Unlock()
	if changed {
		ask(t.beat)
	}
}
