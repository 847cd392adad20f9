// Package fleet is the whole fleet as one providers.Provider: who drives a
// sandbox through that interface does not change when one server becomes many.
//
//	Create, Kill, SetTimeout → request.<tenant>.sandbox.… → scheduler → its events
//	Execute, Observe, Pause … → sandbox.<server>.<vm>.…   → worker    → its results
//	Get, List                 → the records in PLACEMENTS
//
// A Fleet keeps nothing of its own: any process that opens one finds the same
// sandboxes, also those that others made. It holds the fleet's trust, as a
// loop-runner does, and speaks for every tenant.
//
// # Where a fleet differs from one server
//
//   - A vm id lives once: Create of one that has ended within 24 h is
//     ErrConflict.
//   - What does not fit waits for room, for Options.Queue at most; ErrFull after
//     that, with the reasons.
//   - Commands of one sandbox run one after the other, observations too, and one
//     that has not begun within 60 s, or by the end of its ctx, is refused
//     (RateLimitError: nothing ran).
//   - A call whose ctx ends sends a cancel. What was cancelled before it began
//     never runs; what had begun is cancelled at its server, and Recall tells what
//     became of it. Where the bus cannot be reached at that moment it runs on.
//     Calls with the same Batch.Key wait for one batch: who gives up ends it for all.
//   - The fence of a sandbox that a Fleet made is Spec.Fence; of another's it is
//     the placement's. Epochs are the workers' business; Batch.Epoch is not looked at.
//   - Capabilities of Info are what some server of the fleet has; a sandbox's own
//     are in its handle. A Spec has no word for what it requires: Options.Requires.
//   - A template that Snapshot returns names its server, and Create from it goes
//     there.
package fleet

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/dispatch"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
)

// Source is that of a Fleet's requests and commands.
const Source = events.OwnSource + "fleet"

// callTimeout bounds one round trip to the bus.
const callTimeout = 5 * time.Second

// Options of a Fleet.
type Options struct {
	JS       jetstream.JetStream
	Tenant   string        // of a Spec that names none; "": "default"
	Requires []string      // capabilities that every Create asks for
	Queue    time.Duration // how long Create waits for room; 0: not at all
	Log      *slog.Logger
}

// Fleet is a Provider. It is safe for concurrent use.
type Fleet struct {
	Options
	placements jetstream.KeyValue
	results    jetstream.Stream
	followers  *dispatch.Followers
	bootID     string
	end        context.CancelFunc
	watching   sync.WaitGroup

	mu     sync.Mutex
	closed bool
	views  map[string]kv.ServerView
	used   map[string]*dispatch.Results // by server; released by Close
}

var _ providers.Provider = (*Fleet)(nil)

// Open finds the fleet on the bus. Its streams must be there (bus.Await).
func Open(ctx context.Context, o Options) (*Fleet, error) {
	if o.Tenant == "" {
		o.Tenant = events.DefaultRole
	}
	f := &Fleet{Options: o, views: map[string]kv.ServerView{}, used: map[string]*dispatch.Results{}}
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var err error
	if f.placements, err = o.JS.KeyValue(call, kv.BucketPlacements); err != nil {
		return nil, fmt.Errorf("bucket %s: %w", kv.BucketPlacements, err)
	}
	if f.results, err = o.JS.Stream(call, bus.Results); err != nil {
		return nil, fmt.Errorf("stream %s: %w", bus.Results, err)
	}
	s, err := o.JS.Stream(call, "KV_"+kv.BucketPlacements)
	if err != nil {
		return nil, fmt.Errorf("bucket %s: %w", kv.BucketPlacements, err)
	}
	f.bootID = s.CachedInfo().Created.UTC().Format(time.RFC3339Nano) // the records and all sandboxes are lost together
	f.followers = dispatch.Follow(o.JS, f.results, o.Log)
	if err := f.watch(call); err != nil {
		return nil, err
	}
	return f, nil
}

// watch keeps the view of the servers, whose present state it has read when it
// returns.
func (f *Fleet) watch(ctx context.Context) error {
	b, err := f.JS.KeyValue(ctx, kv.BucketServers)
	if err != nil {
		return fmt.Errorf("bucket %s: %w", kv.BucketServers, err)
	}
	watching, end := context.WithCancel(context.WithoutCancel(ctx))
	w, err := b.WatchAll(watching)
	if err != nil {
		end()
		return fmt.Errorf("watch %s: %w", kv.BucketServers, err)
	}
	f.end = end
	read := make(chan struct{})
	f.watching.Go(func() {
		defer func() { _ = w.Stop() }() // the connection may be gone; nothing is left to say
		for entry := range w.Updates() {
			if entry == nil {
				close(read)
				continue
			}
			f.saw(entry)
		}
	})
	select {
	case <-read:
		return nil
	case <-ctx.Done():
		end()
		return fmt.Errorf("read %s: %w", kv.BucketServers, context.Cause(ctx))
	}
}

func (f *Fleet) saw(entry jetstream.KeyValueEntry) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if entry.Operation() != jetstream.KeyValuePut {
		delete(f.views, entry.Key())
		return
	}
	v, err := kv.Decode[kv.ServerView](entry)
	if err != nil {
		f.Log.Warn("server view not readable", "err", err)
		return
	}
	f.views[entry.Key()] = v
}

// Info implements [providers.Provider].
func (f *Fleet) Info() providers.Info {
	f.mu.Lock()
	defer f.mu.Unlock()
	all := map[string]bool{}
	for _, v := range f.views {
		for _, c := range v.Capabilities {
			all[c] = true
		}
	}
	return providers.Info{Kind: "fleet", Capabilities: slices.Sorted(maps.Keys(all)), Displays: true}
}

// Health passes where the bus answers and some server is not down.
func (f *Fleet) Health(ctx context.Context) (providers.Health, error) {
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if _, err := f.results.Info(call); err != nil {
		return providers.Health{}, fmt.Errorf("%w: the bus does not answer: %w", providers.ErrUnavailable, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, v := range f.views {
		if v.Health != kv.Down {
			return providers.Health{BootID: f.bootID}, nil
		}
	}
	return providers.Health{}, fmt.Errorf("%w: none of %d servers is up", providers.ErrUnavailable, len(f.views))
}

// Close implements [providers.Provider].
func (f *Fleet) Close() error {
	f.mu.Lock()
	used := f.used
	f.used, f.closed = nil, true
	f.mu.Unlock()
	for _, r := range used {
		f.followers.Release(r)
	}
	f.end()
	f.watching.Wait()
	return nil
}

// resultsOf follows a server's results until Close.
func (f *Fleet) resultsOf(ctx context.Context, server string) (*dispatch.Results, error) {
	f.mu.Lock()
	r, closed := f.used[server], f.closed
	f.mu.Unlock()
	if closed {
		return nil, fmt.Errorf("%w: the fleet was closed", providers.ErrUnavailable)
	}
	if r != nil {
		return r, nil
	}
	r, err := f.followers.Of(ctx, server, nil)
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.closed:
		go f.followers.Release(r)
		return nil, fmt.Errorf("%w: the fleet was closed", providers.ErrUnavailable)
	case f.used[server] != nil:
		go f.followers.Release(r) // not the last use
		return f.used[server], nil
	}
	f.used[server] = r
	return r, nil
}

// createRequest names the create of a vm under a fence: the same pair is the
// same request, from whatever process.
func createRequest(vm string, fence uint64) events.Request {
	return events.Request{Source: Source, ID: vm + "." + strconv.FormatUint(fence, 10)}
}

// fenceOf is the fence by which callers know a sandbox.
func fenceOf(rec kv.Placement) uint64 {
	if own, ok := strings.CutPrefix(rec.Request.ID, rec.VMID+"."); ok && rec.Request.Source == Source {
		if n, err := strconv.ParseUint(own, 10, 64); err == nil {
			return n
		}
	}
	return rec.Fence
}

// handle makes a sandbox's handle of its record.
func handle(rec kv.Placement) providers.Sandbox {
	s := providers.Sandbox{
		ID: rec.VMID, VM: rec.VMID, Fence: fenceOf(rec), Tenant: rec.Tenant, Role: rec.Role, Owner: rec.Owner, Session: rec.Session,
		Server: rec.ServerID, State: providers.Starting, Display: rec.Display(), CreatedAt: rec.CreatedAt,
	}
	if rec.Phase == kv.Ready {
		s.State = providers.Running
	}
	if rec.PausedAt != nil {
		s.State = providers.Paused
	}
	if rec.Info != nil {
		s.Display, s.Capabilities = rec.Info.Display, slices.Clone(rec.Info.Capabilities)
	}
	if rec.ExpiresAt != nil {
		s.ExpiresAt = *rec.ExpiresAt
	}
	return s
}

// record reads a sandbox that has not ended, or says ErrNotFound.
func (f *Fleet) record(ctx context.Context, vm string) (kv.Placement, error) {
	rec, err := f.present(ctx, vm)
	if err == nil && rec.Phase == kv.Ended {
		return rec, fmt.Errorf("%w: vm %s has ended: %s, %s: %s", providers.ErrNotFound, vm, rec.Outcome, rec.Code, rec.Message)
	}
	return rec, err
}

// present is record for a sandbox in any phase.
func (f *Fleet) present(ctx context.Context, vm string) (kv.Placement, error) {
	if err := events.CheckID("vm id", vm); err != nil {
		return kv.Placement{}, fmt.Errorf("%w: %w", providers.ErrInvalid, err)
	}
	rec, _, err := kv.Get[kv.Placement](ctx, f.placements, kv.VMKey(vm))
	switch {
	case errors.Is(err, kv.ErrNotFound):
		return rec, fmt.Errorf("%w: no vm %s", providers.ErrNotFound, vm)
	case err != nil:
		return rec, unavailable(ctx, err)
	}
	return rec, nil
}

// Get implements [providers.Provider].
func (f *Fleet) Get(ctx context.Context, vm string) (providers.Sandbox, error) {
	rec, err := f.record(ctx, vm)
	if err != nil {
		return providers.Sandbox{}, err
	}
	return handle(rec), nil
}

// List implements [providers.Provider]. It reads every record of the last 24 h.
func (f *Fleet) List(ctx context.Context) ([]providers.Sandbox, error) {
	var out []providers.Sandbox
	err := kv.Each(ctx, f.placements, kv.VMKey("*"), func(_ string, rec kv.Placement) {
		if rec.Phase != kv.Ended {
			out = append(out, handle(rec))
		}
	})
	if err != nil {
		return nil, unavailable(ctx, err)
	}
	return out, nil
}

// StreamURL implements [providers.Provider].
func (f *Fleet) StreamURL(ctx context.Context, vm string) (string, error) {
	rec, err := f.record(ctx, vm)
	switch {
	case err != nil:
		return "", err
	case rec.Info == nil || rec.Info.StreamURL == "":
		return "", fmt.Errorf("%w: vm %s has no live view", providers.ErrUnsupported, vm)
	}
	return rec.Info.StreamURL, nil
}

// unavailable is the error of a bus that does not answer, or ctx's cause.
func unavailable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return fmt.Errorf("%w: %w", providers.ErrUnavailable, err)
}
