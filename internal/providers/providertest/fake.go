package providertest

import (
	"context"
	"fmt"
	"slices"
	"sort"
	"sync"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
)

// FakeOptions choose what a Fake server is. The zero value is a server with
// the default capabilities, no limit, no fence checks and no recall.
type FakeOptions struct {
	ServerID     string                 // Sandbox.Server
	Kind         string                 // Info.Kind; default "fake"
	Capabilities []providers.Capability // nil: DefaultFakeCapabilities
	Capacity     int                    // sandboxes at most; 0: no limit
	Recall       bool                   // keeps a record of every batch by its key: a repeated key runs nothing
	CheckFences  bool                   // refuses older fences and lease epochs
	// Detached servers finish a batch or create that has begun even when the
	// client's ctx ends, as an HTTP server may; else the end of ctx stops it.
	Detached bool
}

// DefaultFakeCapabilities are what a Fake declares unless told otherwise.
var DefaultFakeCapabilities = []providers.Capability{providers.Browser, providers.Clipboard, providers.PauseCap, providers.Shell, providers.Snapshot}

// Effect is one action that took effect in a sandbox. It is recorded at the
// moment of the effect: after Kill has returned, a sandbox has no further one.
type Effect struct {
	VM     string
	Fence  uint64 // of the sandbox it happened in
	Epoch  uint64 // lease epoch of the batch
	Key    string // idempotency key of the batch
	Index  int    // position of the action in the batch
	Action computer.Action
	Client int // which client's batch: 1 for the first Provider() call
	At     time.Time
}

// Life is one sandbox's life, from the moment that it takes up capacity.
type Life struct {
	VM       string
	Fence    uint64
	Epoch    uint64 // Spec.LeaseEpoch of the create
	Tenant   string
	Role     string
	Template string
	Created  time.Time
	Ready    time.Time // zero: it never became ready
	Ended    time.Time // zero: it lives
	Why      string    // "killed", "crashed", "expired", "createFailed", "reboot"
}

// Fake is an in-memory server and the record of all that happened on it. It
// is safe for concurrent use.
type Fake struct {
	info   providers.Info
	server string

	mu        sync.Mutex
	capacity  int
	recall    bool
	fences    bool
	detached  bool
	boots     int
	bootID    string // set by SetBootID; "": derived from boots
	clients   int
	epoch     uint64 // the highest seen
	boxes     map[string]*fakeBox
	records   map[recordKey]*fakeRecord
	templates map[string]string // tenants, by the name of their snapshot
	lives     []*Life
	peak      int
	effects   []Effect
	waiters   chan struct{} // closed and renewed at every effect
	hook      func(Call) Injection
	rules     []*rule
	work      sync.WaitGroup // detached work
	stop      chan struct{}  // closed by Shutdown
	stopped   bool
}

type recordKey struct{ vm, key string }

type fakeRecord struct {
	done     chan struct{} // closed when finished
	finished bool
	results  []providers.Result
	err      error
}

// NewFake starts a fake server.
func NewFake(opts FakeOptions) *Fake {
	caps := opts.Capabilities
	if caps == nil {
		caps = DefaultFakeCapabilities
	}
	caps = slices.Clone(caps)
	slices.Sort(caps)
	kind := opts.Kind
	if kind == "" {
		kind = "fake"
	}
	return &Fake{
		info:      providers.Info{Kind: kind, Capabilities: caps, Displays: true},
		server:    opts.ServerID,
		capacity:  opts.Capacity,
		recall:    opts.Recall,
		fences:    opts.CheckFences,
		detached:  opts.Detached,
		boots:     1,
		boxes:     map[string]*fakeBox{},
		records:   map[recordKey]*fakeRecord{},
		templates: map[string]string{},
		waiters:   make(chan struct{}),
		stop:      make(chan struct{}),
	}
}

// Provider returns a new client of the server. Closing it ends its own calls
// in flight with ErrUnavailable and touches no sandbox. A worker's crash is
// its ctx's end, or a client that nobody uses any more.
func (f *Fake) Provider() providers.Provider {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.clients++
	return &fakeClient{f: f, id: f.clients, closed: make(chan struct{})}
}

// Shutdown ends every sandbox and all detached work and waits for the latter.
// It is only needed with Detached, before a bubble ends. It is idempotent.
func (f *Fake) Shutdown() {
	f.mu.Lock()
	if !f.stopped {
		f.stopped = true
		close(f.stop)
		for _, b := range f.boxes {
			f.end(b, "reboot")
		}
	}
	f.mu.Unlock()
	f.work.Wait()
}

// Effects returns every effect so far, in the order they happened.
func (f *Fake) Effects() []Effect {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.effects)
}

// EffectsOf returns the effects in one vm's sandboxes.
func (f *Fake) EffectsOf(vm string) []Effect {
	return slices.DeleteFunc(f.Effects(), func(e Effect) bool { return e.VM != vm })
}

// WaitEffects returns once there are at least n effects, or with ctx's error.
func (f *Fake) WaitEffects(ctx context.Context, n int) ([]Effect, error) {
	for {
		f.mu.Lock()
		got, wait := slices.Clone(f.effects), f.waiters
		f.mu.Unlock()
		if len(got) >= n {
			return got, nil
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return got, fmt.Errorf("%d of %d effects: %w", len(got), n, context.Cause(ctx))
		}
	}
}

// Lives returns every sandbox that ever took up capacity, in that order.
func (f *Fake) Lives() []Life {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := make([]Life, len(f.lives))
	for i, l := range f.lives {
		out[i] = *l
	}
	return out
}

// Peak is the largest number of sandboxes that the server held at any moment.
func (f *Fake) Peak() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.peak
}

// Held lists the keys and buttons that are down in a sandbox, sorted.
func (f *Fake) Held(vm string) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []string
	if b := f.boxes[vm]; b != nil {
		for k := range b.held {
			out = append(out, k)
		}
	}
	sort.Strings(out)
	return out
}

// Crash ends a sandbox as if it had died by itself: calls in flight end with
// ErrLost and it is no longer listed. It reports whether there was one.
func (f *Fake) Crash(vm string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	b := f.boxes[vm]
	if b != nil {
		f.end(b, "crashed")
	}
	return b != nil
}

// Reboot loses every sandbox and every record, and changes the boot id.
func (f *Fake) Reboot() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.boots++
	f.bootID = ""
	for _, b := range f.boxes {
		f.end(b, "reboot")
	}
	f.records = map[recordKey]*fakeRecord{}
	f.epoch = 0
}

// Watch has somebody look at a sandbox's live view at this moment.
func (f *Fake) Watch(vm string) {
	f.set(func() {
		if b := f.boxes[vm]; b != nil {
			b.sandbox.WatchedAt = time.Now()
		}
	})
}

// SetBootID changes what Health tells, and nothing else.
func (f *Fake) SetBootID(id string) { f.set(func() { f.bootID = id }) }

// SetCapacity changes the limit; 0 is none. Sandboxes over it live on.
func (f *Fake) SetCapacity(n int) { f.set(func() { f.capacity = n }) }

// SetRecall switches the record of batches on or off.
func (f *Fake) SetRecall(on bool) { f.set(func() { f.recall = on }) }

// SetFenceChecks switches the refusal of older fences and epochs on or off.
func (f *Fake) SetFenceChecks(on bool) { f.set(func() { f.fences = on }) }

// RegisterEpoch tells the server of a lease epoch, as a new lease holder does
// before its first command: older ones are refused from now on.
func (f *Fake) RegisterEpoch(epoch uint64) { f.set(func() { f.epoch = max(f.epoch, epoch) }) }

func (f *Fake) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// end removes a box. The caller holds f.mu.
func (f *Fake) end(b *fakeBox, why string) {
	if f.boxes[b.sandbox.VM] != b {
		return
	}
	delete(f.boxes, b.sandbox.VM)
	b.life.Ended, b.life.Why, b.why = time.Now(), why, why
	if b.expiry != nil {
		b.expiry.Stop()
	}
	close(b.dead)
}

// checkEpoch refuses an epoch older than the newest seen and remembers a newer
// one. Epoch 0 is not checked. The caller holds f.mu.
func (f *Fake) checkEpoch(epoch uint64) error {
	if f.fences && epoch != 0 && epoch < f.epoch {
		return fmt.Errorf("lease epoch %d, the newest is %d: %w", epoch, f.epoch, providers.ErrFenceStale)
	}
	f.epoch = max(f.epoch, epoch)
	return nil
}
