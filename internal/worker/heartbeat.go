package worker

import (
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/sony/gobreaker/v2"

	"berth/internal/kv"
	"berth/internal/providers"
)

// Times of heartbeats and probes.
const (
	beatEvery  = 2 * time.Second
	probeEvery = 2 * time.Second
	probeTime  = time.Second
	beatTime   = 2 * time.Second // for one write
)

// The breaker opens after 3 failures in a row that are the server's fault, or
// where at least half of at least 10 calls in 30 s failed so; it lets one call
// through after 15 s.
const (
	breakerRow     = 3
	breakerCalls   = 10
	breakerWindow  = 30 * time.Second
	breakerOpenFor = 15 * time.Second
)

func newBreaker(server string, changed func()) *gobreaker.TwoStepCircuitBreaker[struct{}] {
	return gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		Name: server, MaxRequests: 1, Interval: breakerWindow, BucketPeriod: breakerWindow / 10, Timeout: breakerOpenFor,
		ReadyToTrip: func(c gobreaker.Counts) bool {
			return c.ConsecutiveFailures >= breakerRow || c.Requests >= breakerCalls && 2*c.TotalFailures >= c.Requests
		},
		OnStateChange: func(string, gobreaker.State, gobreaker.State) { changed() },
		IsSuccessful:  func(err error) bool { return !serverFault(err) },
		// An answer that is nobody's merit or fault says nothing.
		IsExcluded: func(err error) bool {
			var limited *providers.RateLimitError
			return errors.As(err, &limited) || errors.Is(err, context.Canceled) || errors.Is(err, errKilled) ||
				errors.Is(err, errStopping) || errors.Is(err, errAbandoned) || errors.Is(err, kv.ErrLeaseLost)
		},
	})
}

// serverFault also counts the time-outs that the worker sets.
func serverFault(err error) bool {
	return providers.ServerFault(err) || errors.Is(err, errTimedOut) || errors.Is(err, context.DeadlineExceeded)
}

// report feeds the breaker with a call that it does not hold up.
func (t *tenure) report(err error) {
	var p *panicError
	if errors.As(err, &p) {
		t.log.Error("provider panicked", "panic", p.value, "stack", string(p.stack))
	}
	if done, open := t.breaker.Allow(); open == nil {
		done(err)
	}
}

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
	t.state.Breaker = t.breaker.State().String()
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
		t.setProbe(clip(err.Error(), 512))
		return
	}
	t.mu.Lock()
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
func (t *tenure) setStock(running int, gone []kv.Gone) {
	t.mu.Lock()
	changed := !t.state.Synced || t.state.Running != running || !slices.Equal(t.state.Gone, gone)
	t.state.Synced, t.state.Running, t.state.Gone = true, running, gone
	t.mu.Unlock()
	if changed {
		ask(t.beat)
	}
}
