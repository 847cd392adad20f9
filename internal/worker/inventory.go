package worker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
)

// Times of the inventory.
const (
	inventoryEvery = 5 * time.Second
	inventoryPause = 250 * time.Millisecond // between two looks that are asked for
	orphanAge      = 5 * time.Second        // between the two looks that make an orphan
	killMemory     = time.Hour              // for commands that were published before a kill and come after it
)

// stray is a sandbox without allocation.
type stray struct {
	since time.Time // first seen so
}

// inventory compares the provider's sandboxes with the record every few
// seconds, and when asked.
func (t *tenure) inventory(ctx context.Context) {
	for {
		timer := time.NewTimer(inventoryEvery)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		case <-t.look:
			timer.Stop()
		}
		t.takeStock(ctx)
		sleep(ctx, inventoryPause)
	}
}

// takeStock looks once. When the provider or the bus does not answer nothing
// is concluded.
func (t *tenure) takeStock(ctx context.Context) {
	look, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	list, err := bounded(look, t.provider.List)
	if err != nil {
		if ctx.Err() == nil {
			t.log.Warn("inventory not readable", "err", err)
		}
		return
	}
	// After the list, so that an allocation that is missing here was missing
	// when the list was made, or is of a sandbox that is gone since.
	record, _, err := kv.Get[kv.Server](look, t.placements, kv.ServerKey(t.server.ID))
	if err != nil && !errors.Is(err, kv.ErrNotFound) {
		if ctx.Err() == nil {
			t.log.Warn("server record not readable", "err", err)
		}
		return
	}
	here := make(map[placement]providers.Sandbox, len(list))
	for _, s := range list {
		here[placement{s.VM, s.Fence}] = s
	}
	t.serveListed(here, record)
	t.reap(ctx, here, record)
	t.renewLives(ctx, here, record)
	gone, known := t.findGone(ctx, here, record)
	if !known {
		return
	}
	t.setStock(len(list), gone, t.watchedSince(here))
}

// maxWatched bounds the ids in a heartbeat. Each is a person's open window.
const maxWatched = 200

// watchedSince lists the sandboxes whose live view somebody saw after the last
// inventory. The first one of a tenure takes them all for seen.
func (t *tenure) watchedSince(here map[placement]providers.Sandbox) []string {
	var seen []string
	before := t.watched
	t.watched = make(map[placement]time.Time, len(before))
	for at, s := range here {
		if s.WatchedAt.IsZero() {
			continue
		}
		t.watched[at] = s.WatchedAt
		if s.WatchedAt.After(before[at]) && len(seen) < maxWatched {
			seen = append(seen, at.vm)
		}
	}
	slices.Sort(seen)
	return seen
}

// serveListed takes into service what the provider holds and the record knows,
// as at the begin of a tenure.
func (t *tenure) serveListed(here map[placement]providers.Sandbox, record kv.Server) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for at, s := range here {
		if a, ok := record.Allocs[at.vm]; ok && a.Fence == at.fence && s.State != providers.Starting && t.boxes[at.vm].fence < at.fence && !t.killed[at.vm].ended(at.fence) {
			t.boxes[at.vm] = boxOf(s)
		}
	}
	for vm, b := range t.boxes {
		_, listed := here[placement{vm, b.fence}]
		if a, ok := record.Allocs[vm]; !listed && (!ok || a.Fence != b.fence) {
			delete(t.boxes, vm)
			t.breaker.forget(vm)
		}
	}
	for vm, k := range t.killed {
		if _, ok := record.Allocs[vm]; !ok && time.Since(k.at) > killMemory {
			delete(t.killed, vm)
		}
	}
	for at := range t.ready {
		if a, ok := record.Allocs[at.vm]; !ok || a.Fence != at.fence {
			delete(t.ready, at)
		}
	}
}

// reap kills sandboxes that had no allocation in two looks.
func (t *tenure) reap(ctx context.Context, here map[placement]providers.Sandbox, record kv.Server) {
	now := time.Now()
	var due []placement
	t.mu.Lock()
	for at := range t.orphan {
		if _, ok := here[at]; !ok {
			delete(t.orphan, at)
		}
	}
	for at := range here {
		if a, ok := record.Allocs[at.vm]; ok && a.Fence == at.fence {
			delete(t.orphan, at)
			continue
		}
		o, seen := t.orphan[at]
		if !seen {
			t.orphan[at] = stray{since: now}
		} else if now.Sub(o.since) >= orphanAge {
			due = append(due, at)
		}
	}
	t.mu.Unlock()
	slices.SortFunc(due, func(a, b placement) int { return strings.Compare(a.vm, b.vm) })
	for _, at := range due {
		t.reapOne(ctx, at)
	}
}

// reapOne kills one orphan, if it still is what was seen.
func (t *tenure) reapOne(ctx context.Context, at placement) {
	unlock := t.tryLock(at.vm)
	if unlock == nil {
		return // it is being made or ended; the next look shows
	}
	defer unlock()
	look, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	s, err := bounded(look, func(ctx context.Context) (providers.Sandbox, error) { return t.provider.Get(ctx, at.vm) })
	if err != nil || s.Fence != at.fence || !t.lease.Trusted() {
		return
	}
	t.log.Warn("killing a sandbox without allocation", "vm", at.vm, "fence", at.fence)
	_, err = watched(look, t, at.vm, func(ctx context.Context) (struct{}, error) { return struct{}{}, t.provider.Kill(ctx, at.vm) })
	if err != nil {
		t.log.Warn("orphan not killed; trying again", "vm", at.vm, "err", err)
		return
	}
	t.forget(at.vm, at.fence)
	t.w.inst.orphans.Add(ctx, 1)
	t.mu.Lock()
	delete(t.orphan, at)
	t.mu.Unlock()
}

// renewLives moves the provider's own end of life on for sandboxes whose
// allocation stands: Berth's clocks decide, the provider's is a safety net.
func (t *tenure) renewLives(ctx context.Context, here map[placement]providers.Sandbox, record kv.Server) {
	for at, s := range here {
		if a, ok := record.Allocs[at.vm]; !ok || a.Fence != at.fence || s.ExpiresAt.IsZero() || time.Until(s.ExpiresAt) > lifeMargin {
			continue
		}
		call, cancel := context.WithTimeout(ctx, lookTime)
		_, err := bounded(call, func(ctx context.Context) (struct{}, error) {
			return struct{}{}, t.provider.SetTimeout(ctx, at.vm, lifeRenewal)
		})
		cancel()
		if err != nil && ctx.Err() == nil {
			t.log.Warn("end of life at the provider not moved", "vm", at.vm, "err", err)
		}
	}
}

// findGone lists the allocations whose sandbox was made and is no more. known
// is false where that could not be found out.
func (t *tenure) findGone(ctx context.Context, here map[placement]providers.Sandbox, record kv.Server) (gone []kv.Gone, known bool) {
	for _, vm := range slices.Sorted(maps.Keys(record.Allocs)) {
		at := placement{vm, record.Allocs[vm].Fence}
		if _, ok := here[at]; ok {
			continue
		}
		made, err := t.made(ctx, at)
		if err != nil {
			return nil, false
		}
		t.mu.Lock()
		killed := t.killed[vm].ended(at.fence)
		t.mu.Unlock()
		if !made || killed {
			continue // not yet, never, or the kill's result says it
		}
		p, _, err := kv.Get[kv.Placement](ctx, t.placements, kv.VMKey(vm))
		if err != nil && !errors.Is(err, kv.ErrNotFound) {
			return nil, false
		}
		if err == nil && p.Fence == at.fence && p.Ending != nil {
			continue // likewise: its kill is out, or was done by a predecessor
		}
		look, cancel := context.WithTimeout(ctx, lookTime)
		s, err := bounded(look, func(ctx context.Context) (providers.Sandbox, error) { return t.provider.Get(ctx, vm) })
		cancel()
		switch {
		case errors.Is(err, providers.ErrNotFound) || err == nil && s.Fence != at.fence:
			t.forget(vm, at.fence)
			gone = append(gone, kv.Gone{VM: vm, Fence: at.fence, Code: events.CodeLost, Message: fmt.Sprintf("server %s no longer has the sandbox", t.server.ID)})
		case err != nil:
			return nil, false
		}
	}
	return gone, true
}

// made reports whether a placement's create has finished ok.
func (t *tenure) made(ctx context.Context, at placement) (bool, error) {
	t.mu.Lock()
	known := t.ready[at]
	t.mu.Unlock()
	if known {
		return true, nil
	}
	token := events.Token(events.SourceScheduler, events.CreateCommandID(at.vm, at.fence))
	e, raw, err := bus.Last(ctx, t.results, events.ResultSubject(t.server.ID, at.vm, token))
	if err != nil {
		return false, err
	}
	var f events.Finished
	if raw == nil || e.Type() != events.TypeFinished || events.DecodeTolerant(e, &f) != nil || f.Outcome != computer.OK {
		return false, nil
	}
	t.mu.Lock()
	t.ready[at] = true
	t.mu.Unlock()
	return true, nil
}
