package scheduler

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/placement"
)

// vmState is what a term knows of one sandbox.
type vmState struct {
	rec    kv.Placement
	rev    uint64
	slim   bool          // rec lacks what only a write or an announcement needs, see slimmed
	idle   time.Duration // idle time-out; 0: none
	pauses bool          // when it is idle, instead of ending
	timer  *time.Timer   // wakes step at the next clock that matters
	wakeAt time.Time     // when; zero: it is not running

	kind        string    // of a queued sandbox, see kindOf
	committing  bool      // a reservation is being written
	refused     int       // commits in a row that did not succeed
	createSent  uint64    // fence of the create command that this term has published
	answered    bool      // a claim or a result of a create has come, for the present fence or an earlier one
	killSent    int       // attempt of the kill command that this term has published
	killSentAt  time.Time // when
	killAgainAt time.Time // not before
	gone        *kv.Gone  // the worker's word, for the present fence
	active      time.Time // last use seen
	queuedSaid  string    // explanation last announced

	underWay map[string]time.Time // commands claimed and not finished, where there is an idle clock
}

// serverState is what a term knows of one server.
type serverState struct {
	rec        kv.Server
	rev        uint64
	base       placement.Server // of rec
	beat       kv.Heartbeat
	health     monitor
	assumed    map[string]kv.Alloc // decided, not yet written
	view       kv.ServerView       // last written to SERVERS
	viewAt     time.Time
	viewDue    bool           // it has changed since, and the write waits
	consumers  bool           // its consumers exist
	unsaid     []healthChange // in order
	drainedFor time.Time
	refusals   int       // creates in a row that it refused although they fit its record
	asideAt    time.Time // when it was set aside last
	aside      time.Time // until when it counts as degraded for that; zero: it does not
}

// snapshot is the server as placement sees it.
func (s *serverState) snapshot(creating int, now time.Time) placement.Server {
	p := s.base
	judge(&p, &s.health, now)
	if p.Health == placement.Healthy && now.Before(s.aside) {
		p.Health = placement.Degraded
	}
	p.Creating = creating
	for vm, a := range s.assumed {
		if _, written := s.rec.Allocs[vm]; !written {
			p.Occupy(a.Role, a.Tenant)
			p.Creating++
		}
	}
	return p
}

// snapshotOf turns a record, but for the slot of one sandbox, into what
// placement.Fits judges; the plan and the commit both use it.
func snapshotOf(rec *kv.Server, except string, health *monitor, now time.Time) placement.Server {
	p := baseOf(rec, except)
	judge(&p, health, now)
	return p
}

// baseOf is what the record alone says.
func baseOf(rec *kv.Server, except string) placement.Server {
	p := placement.Server{
		ID: rec.ID, Roles: rec.Config.Roles, Priority: rec.Config.Priority, Max: rec.Config.MaxContainers,
		Isolation: placement.Isolation(rec.Config.Isolation), Attributes: rec.Config.Attributes, Capabilities: rec.Config.Capabilities,
	}
	if rec.Admin != kv.Active {
		p.Closed = string(rec.Admin)
	}
	for vm, a := range rec.Allocs {
		if vm != except {
			p.Occupy(a.Role, a.Tenant)
		}
	}
	return p
}

// judge adds what the server's health allows.
func judge(p *placement.Server, health *monitor, now time.Time) {
	switch health.state {
	case kv.Healthy:
		p.Health = placement.Healthy
	case kv.Degraded:
		p.Health = placement.Degraded
	default:
		p.Health = placement.Down
	}
	p.Max = health.room(now, p.Used, p.Max)
}

// applyVM takes a newer record into the mirror and has step look at it.
func (t *term) applyVM(rec kv.Placement, rev uint64) {
	t.mu.Lock()
	v := t.vms[rec.VMID]
	if v == nil {
		v = &vmState{}
		t.vms[rec.VMID] = v
	}
	if rev <= v.rev {
		t.mu.Unlock()
		return
	}
	if t.serving && rec.Phase != v.rec.Phase && rec.Phase != kv.Queued {
		// Whoever wrote it may not live to announce it, or may not know that
		// the write succeeded; step announces it, once.
		t.unsaid[rev] = true
		t.newest = max(t.newest, rev)
	}
	if v.rec.Fence != rec.Fence {
		v.gone, v.answered, v.killSent, v.killAgainAt = nil, false, 0, time.Time{}
	}
	t.countCreating(v.rec, -1)
	t.countCreating(rec, +1)
	t.quotas.count(v.rec, -1)
	t.quotas.count(rec, +1)
	v.idle, v.pauses = 0, false
	if rec.Spec != nil && rec.Spec.IdleTimeoutSeconds != nil {
		v.idle, v.pauses = events.Seconds(*rec.Spec.IdleTimeoutSeconds), rec.Spec.IdlePolicy == events.IdlePause
	}
	v.rec, v.rev, v.slim = t.slimmed(rec), rev, rec.Phase == kv.Ready || rec.Phase == kv.Ended
	if rec.Phase != kv.Queued {
		t.waiting.remove(rec.VMID)
		v.kind = ""
	} else if v.kind == "" {
		v.kind = kindOf(rec)
	}
	serving := t.serving
	t.mu.Unlock()
	if serving { // lead looks at all
		t.queue.add(rec.VMID)
	}
}

// slimmed is what the mirror keeps of a record. Of sandboxes that are ready or
// have ended there are many, and little happens to each: what only a write or
// an announcement needs is read again then.
func (t *term) slimmed(rec kv.Placement) kv.Placement {
	rec.Tenant, rec.Role, rec.ServerID = t.one(rec.Tenant), t.one(rec.Role), t.one(rec.ServerID)
	if rec.Phase != kv.Ready && rec.Phase != kv.Ended {
		return rec
	}
	return kv.Placement{
		VMID: rec.VMID, ServerID: rec.ServerID, Tenant: rec.Tenant, Role: rec.Role, Phase: rec.Phase, Fence: rec.Fence,
		Outcome: rec.Outcome, Code: rec.Code, Request: rec.Request, ReadyAt: rec.ReadyAt, ExpiresAt: rec.ExpiresAt, ActiveAt: rec.ActiveAt,
		EndedAt: rec.EndedAt, PausedAt: rec.PausedAt, FreedAt: rec.FreedAt, Ending: rec.Ending, Traceparent: rec.Traceparent,
	}
}

// one returns the same string for equal strings, which repeat in a hundred
// thousand records; the caller holds mu.
func (t *term) one(s string) string {
	if same, ok := t.strings[s]; ok {
		return same
	}
	if len(t.strings) > 100_000 {
		clear(t.strings)
	}
	t.strings[s] = s
	return s
}

// each is one of every string; equal strings that are the same compare fast,
// and a decision compares with those of every server.
func (t *term) each(list []string) []string {
	same := make([]string, len(list))
	for i, s := range list {
		same[i] = t.one(s)
	}
	return same
}

// whole returns a record with everything that the mirror has left out.
func (t *term) whole(ctx context.Context, vm string) (kv.Placement, uint64, error) {
	t.mu.Lock()
	v := t.vms[vm]
	if v != nil && !v.slim {
		defer t.mu.Unlock()
		return v.rec, v.rev, nil
	}
	t.mu.Unlock()
	rec, rev, err := kv.Get[kv.Placement](ctx, t.placements, kv.VMKey(vm))
	if err == nil {
		t.applyVM(rec, rev)
	}
	return rec, rev, err
}

// countCreating keeps the number of creates in flight of the record's server;
// the caller holds mu.
func (t *term) countCreating(rec kv.Placement, n int) {
	if rec.Phase != kv.Reserved && rec.Phase != kv.Starting {
		return
	}
	if t.creating[rec.ServerID] += n; t.creating[rec.ServerID] == 0 {
		delete(t.creating, rec.ServerID)
	}
	if s := t.servers[rec.ServerID]; s != nil && s.health.state != kv.Healthy {
		t.refresh(rec.ServerID) // a degraded server takes one at a time
		t.wake()
	}
}

func (t *term) forgetVM(vm string, rev uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := t.vms[vm]
	if v == nil || rev < v.rev {
		return
	}
	if v.timer != nil {
		v.timer.Stop()
	}
	t.waiting.remove(vm)
	t.quotas.count(v.rec, -1)
	delete(t.vms, vm)
	t.moving.forget(vm)
}

// applyServer takes a newer record into the mirror and wakes what waits.
func (t *term) applyServer(rec kv.Server, rev uint64) {
	t.mu.Lock()
	s := t.servers[rec.ID]
	if s == nil {
		s = &serverState{assumed: map[string]kv.Alloc{}, health: newMonitor(time.Now())}
		if view, known := t.views[rec.ID]; known {
			s.health.resume(view.Health, view.Reason)
		}
		t.servers[rec.ID] = s
		if beat, heard := t.early[rec.ID]; heard && beat.Epoch >= rec.Epoch {
			s.beat = beat
			s.health.beat(time.Now(), beat)
		}
		delete(t.early, rec.ID)
	}
	if rev <= s.rev {
		t.mu.Unlock()
		return
	}
	onlyAllocs := s.rev != 0 && sameButAllocs(&s.rec, &rec)
	if onlyAllocs {
		rec.Config = s.rec.Config
	} else {
		rec.Config.Roles, rec.Config.Capabilities = t.each(rec.Config.Roles), t.each(rec.Config.Capabilities)
	}
	s.rec, s.rev, s.base = rec, rev, baseOf(&rec, "")
	t.refresh(rec.ID)
	s.viewDue = true
	calm := onlyAllocs && rec.Admin == kv.Active && time.Since(s.viewAt) < t.viewAtMost() // the clock has it tended
	t.mu.Unlock()
	t.wake()
	if !calm {
		t.tending.add(rec.ID)
	}
}

// sameButAllocs reports whether two states of a server's record differ in
// nothing but what the server holds.
func sameButAllocs(a, b *kv.Server) bool {
	return a.Admin == b.Admin && a.Epoch == b.Epoch && a.Worker == b.Worker && a.Drained == b.Drained && a.DrainID == b.DrainID &&
		(a.DrainDeadline == nil) == (b.DrainDeadline == nil) && reflect.DeepEqual(a.Config, b.Config)
}

func (t *term) forgetServer(id string) {
	t.mu.Lock()
	delete(t.servers, id)
	t.fleet.Remove(id)
	t.mu.Unlock()
}

// refresh recomputes a server's snapshot after an assumption or its health
// changed; the caller holds mu.
func (t *term) refresh(id string) {
	if s := t.servers[id]; s != nil && s.rev != 0 {
		t.fleet.Put(s.snapshot(t.creating[s.rec.ID], time.Now()))
	}
}

// onPlacement is the watch of PLACEMENTS.
func (t *term) onPlacement(e jetstream.KeyValueEntry) {
	key, gone := e.Key(), e.Operation() != jetstream.KeyValuePut
	if t.known(key, e, gone) {
		return
	}
	switch {
	case strings.HasPrefix(key, "vm."):
		if gone {
			t.forgetVM(strings.TrimPrefix(key, "vm."), e.Revision())
			return
		}
		var rec kv.Placement
		if t.decode(key, e.Value(), &rec) {
			t.applyVM(rec, e.Revision())
		}
	case strings.HasPrefix(key, "quota."):
		q := kv.Quota{MaxSandboxes: noQuota}
		if gone || t.decode(key, e.Value(), &q) {
			t.mu.Lock()
			t.quotas.set(strings.TrimPrefix(key, "quota."), q.MaxSandboxes)
			t.mu.Unlock()
		}
	case strings.HasPrefix(key, "server."):
		if gone {
			t.forgetServer(strings.TrimPrefix(key, "server."))
			return
		}
		var rec kv.Server
		if t.decode(key, e.Value(), &rec) {
			t.applyServer(rec, e.Revision())
		}
	}
}

// known reports whether the mirror has this revision of a record, or a newer
// one, or is about to: most of all changes are this term's own, and the watch
// often has them before the writer hears of its success.
func (t *term) known(key string, e jetstream.KeyValueEntry, gone bool) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if w := t.own[key]; w != nil {
		w.heard = e
		return true
	}
	if gone {
		return false
	}
	var have uint64
	if vm, ok := strings.CutPrefix(key, "vm."); ok {
		if v := t.vms[vm]; v != nil {
			have = v.rev
		}
	}
	if id, ok := strings.CutPrefix(key, "server."); ok {
		if s := t.servers[id]; s != nil {
			have = s.rev
		}
	}
	return have >= e.Revision()
}

// ownWrite is a record that this term writes at the moment.
type ownWrite struct {
	writers int
	heard   jetstream.KeyValueEntry // newest, of the watch meanwhile
}

// writing says that this term writes a record: what the watch hears of it waits
// until done is called, which is to be after the writer has told the mirror.
func (t *term) writing(key string) (done func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	w := t.own[key]
	if w == nil {
		w = &ownWrite{}
		t.own[key] = w
	}
	w.writers++
	return func() {
		t.mu.Lock()
		w.writers--
		var heard jetstream.KeyValueEntry
		if w.writers == 0 {
			delete(t.own, key)
			heard = w.heard
		}
		t.mu.Unlock()
		if heard != nil {
			t.onPlacement(heard) // nothing new, unless somebody else wrote
		}
	}
}

func (t *term) decode(key string, raw []byte, v any) bool {
	if err := json.Unmarshal(raw, v); err != nil {
		t.log.Error("record is not readable; left alone", "key", key, "err", err)
		return false
	}
	return true
}

// onListed forgets what a full listing no longer has.
func (t *term) onListed(keys map[string]bool) {
	t.mu.Lock()
	var servers, vms []string
	for id := range t.servers {
		if !keys[kv.ServerKey(id)] {
			servers = append(servers, id)
		}
	}
	for vm := range t.vms {
		if !keys[kv.VMKey(vm)] {
			vms = append(vms, vm)
		}
	}
	t.mu.Unlock()
	for _, id := range servers {
		t.forgetServer(id)
	}
	for _, vm := range vms {
		// A record that was made after the listing began comes by the watch.
		if _, _, err := kv.Get[kv.Placement](context.Background(), t.placements, kv.VMKey(vm)); errors.Is(err, kv.ErrNotFound) {
			t.forgetVM(vm, ^uint64(0))
		}
	}
}

// onHeartbeat is the watch of HEARTBEATS.
func (t *term) onHeartbeat(e jetstream.KeyValueEntry) {
	if e.Operation() != jetstream.KeyValuePut {
		return
	}
	var beat kv.Heartbeat
	if !t.decode(e.Key(), e.Value(), &beat) {
		return
	}
	var look []string
	t.mu.Lock()
	s := t.servers[e.Key()]
	if s == nil || s.rec.Epoch > beat.Epoch {
		if s == nil {
			t.early[e.Key()] = beat // its registration follows
		}
		t.mu.Unlock()
		return
	}
	s.beat = beat
	s.health.beat(time.Now(), beat)
	for _, g := range beat.Gone {
		if v := t.vms[g.VM]; v != nil && v.rec.Fence == g.Fence && v.gone == nil {
			v.gone = &g
			look = append(look, g.VM)
		}
	}
	for _, vm := range beat.Watched { // a person who looks uses it (S11)
		if v := t.vms[vm]; v != nil && v.rec.ServerID == e.Key() && t.touch(v, time.Now().UTC()) {
			look = append(look, vm)
		}
	}
	state, _ := s.health.judge(time.Now())
	tend := state != s.health.state || beat.Running == 0 && s.rec.Admin == kv.Draining
	t.mu.Unlock()
	for _, vm := range look {
		t.queue.add(vm)
	}
	if tend {
		t.tending.add(e.Key())
	}
}

// watch follows a bucket until ctx ends. It starts again whenever the bucket
// has moved on without it: a watcher can stay blind for many seconds after a
// server restart, with no error (nats.go#1094). listed is called after each
// full listing with the keys that exist.
func (t *term) watch(ctx context.Context, b jetstream.KeyValue, stream string, each func(jetstream.KeyValueEntry), listed func(keys map[string]bool)) error {
	for attempt := 0; ; attempt++ {
		err := t.watchOnce(ctx, b, stream, each, func(keys map[string]bool) {
			attempt = 0
			listed(keys)
		})
		if ctx.Err() != nil {
			return nil
		}
		t.log.Warn("watch starts again", "bucket", b.Bucket(), "err", err)
		if bus.Pause(ctx, attempt) != nil {
			return nil
		}
	}
}

var errBlind = errors.New("the bucket moved on without the watcher")

func (t *term) watchOnce(ctx context.Context, b jetstream.KeyValue, stream string, each func(jetstream.KeyValueEntry), listed func(keys map[string]bool)) error {
	w, err := b.WatchAll(ctx)
	if err != nil {
		return fmt.Errorf("watch %s: %w", b.Bucket(), err)
	}
	defer func() {
		if err := w.Stop(); err != nil && ctx.Err() == nil {
			t.log.Debug("stop watcher", "bucket", b.Bucket(), "err", err)
		}
	}()
	check := time.NewTicker(3 * time.Second)
	defer check.Stop()
	var seen, behind, base uint64 // newest revision heard; what the stream had at the last check, and when it was listed
	keys := map[string]bool{}     // nil once listed
	listing := newInventory(each)
	defer listing.wait()
	for {
		select {
		case <-ctx.Done():
			return nil
		case e, open := <-w.Updates():
			if !open {
				return errors.New("watcher closed")
			}
			if e == nil {
				listing.wait()
				listed(keys)
				keys = nil
				if last, err := t.lastSequence(ctx, stream); err == nil {
					base = last
				}
				continue
			}
			seen = max(seen, e.Revision())
			if keys == nil {
				each(e)
				continue
			}
			if e.Operation() == jetstream.KeyValuePut {
				keys[e.Key()] = true
			}
			listing.put(e)
		case <-check.C:
			last, err := t.lastSequence(ctx, stream)
			if err != nil || keys != nil {
				continue // the bus is away; the next check tells
			}
			if behind > base && seen < behind {
				return errBlind
			}
			behind = last
		}
	}
}

func (t *term) lastSequence(ctx context.Context, stream string) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	s, err := t.js.Stream(ctx, stream)
	if err != nil {
		return 0, err
	}
	return s.CachedInfo().State.LastSeq, nil
}

// markerTTL is how long a deleted key's marker stays, for watchers to hear.
const markerTTL = time.Hour

// deleteAt removes a key if it is still at the revision.
func (t *term) deleteAt(ctx context.Context, key string, rev uint64) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := t.placements.Purge(ctx, key, jetstream.LastRevision(rev), jetstream.PurgeTTL(markerTTL)); err != nil {
		return fmt.Errorf("delete %s at revision %d: %w", key, rev, err)
	}
	return nil
}

// loadViews reads how the term before judged the servers, so that a change of
// scheduler is no change of health.
func (t *term) loadViews(ctx context.Context) error {
	views := map[string]kv.ServerView{}
	w, err := t.Scheduler.servers.WatchAll(ctx, jetstream.IgnoreDeletes())
	if err != nil {
		return fmt.Errorf("read %s: %w", kv.BucketServers, err)
	}
	defer func() {
		if err := w.Stop(); err != nil && ctx.Err() == nil {
			t.log.Debug("stop watcher", "bucket", kv.BucketServers, "err", err)
		}
	}()
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-w.Updates():
			if e == nil {
				t.mu.Lock()
				t.views = views
				t.mu.Unlock()
				return nil
			}
			var view kv.ServerView
			if t.decode(e.Key(), e.Value(), &view) {
				views[e.Key()] = view
			}
		}
	}
}

// inventory hands the entries of a first listing out in parallel: each key is in
// it once, so their order does not matter.
type inventory struct {
	each  func(jetstream.KeyValueEntry)
	batch []jetstream.KeyValueEntry
	slots chan struct{}
	wg    sync.WaitGroup
}

// listingBatch is how many entries one goroutine takes.
const listingBatch = 256

func newInventory(each func(jetstream.KeyValueEntry)) *inventory {
	return &inventory{each: each, slots: make(chan struct{}, runtime.GOMAXPROCS(0))}
}

func (l *inventory) put(e jetstream.KeyValueEntry) {
	if l.batch = append(l.batch, e); len(l.batch) == listingBatch {
		l.flush()
	}
}

func (l *inventory) flush() {
	batch := l.batch
	l.batch = nil
	l.slots <- struct{}{}
	l.wg.Go(func() {
		defer func() { <-l.slots }()
		for _, e := range batch {
			l.each(e)
		}
	})
}

// wait returns when all that was put has been handled.
func (l *inventory) wait() {
	if len(l.batch) > 0 {
		l.flush()
	}
	l.wg.Wait()
}
