package scheduler

import (
	"context"
	"errors"
	"maps"
	"sync"

	"berth/internal/kv"
)

// edits are the changes of server records that wait to be written. Those of
// one server that come while a write is under way are written together, in the
// order in which they came: a record holds up to 1,000 allocations, so a write
// for each of them would cost more the fuller the server is.
type edits struct {
	mu     sync.Mutex
	queues map[string][]*edit // by server; somebody writes while it is here
}

// edit is one change. It has no effect where it returns an error, and is
// idempotent: after a write whose answer was lost it is applied again.
type edit struct {
	change func(s *kv.Server, rev uint64) error
	done   chan error // of capacity one
}

// edit changes a server's record by compare-and-set, together with the other
// changes that are due, and returns once it is written; kv.ErrUnchanged from
// change counts as success. change gets revision 0 where there is no record.
// A group ends with the context of the caller that writes it, which fails the
// others too; all of them are tried again.
func (t *term) edit(ctx context.Context, server string, change func(s *kv.Server, rev uint64) error) error {
	e := &edit{change, make(chan error, 1)}
	t.edits.mu.Lock()
	queue, writing := t.edits.queues[server]
	t.edits.queues[server] = append(queue, e)
	t.edits.mu.Unlock()
	if !writing {
		t.writeEdits(ctx, server)
	}
	select {
	case err := <-e.done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx) // it may be written all the same
	}
}

// writeEdits writes the changes of a server that are due now, and has those
// that come meanwhile written afterwards.
func (t *term) writeEdits(ctx context.Context, server string) {
	t.edits.mu.Lock()
	group := t.edits.queues[server]
	t.edits.queues[server] = nil
	t.edits.mu.Unlock()
	outcomes := make([]error, len(group))
	for i := range outcomes {
		outcomes[i] = errNotWritten // should a change panic, which is a fault of this program
	}
	defer func() {
		for i, err := range outcomes {
			group[i].done <- err
		}
		t.edits.mu.Lock()
		defer t.edits.mu.Unlock()
		if len(t.edits.queues[server]) > 0 {
			t.work.Go(func() { t.writeEdits(ctx, server) })
			return
		}
		delete(t.edits.queues, server)
	}()
	copy(outcomes, t.writeGroup(ctx, server, group))
}

var errNotWritten = errors.New("the change was not written")

// writeGroup applies the changes one after the other, each to what the ones
// before it have left, and writes the outcome once.
func (t *term) writeGroup(ctx context.Context, server string, group []*edit) []error {
	outcomes := make([]error, len(group))
	apply := func(s *kv.Server, rev uint64) (all bool, err error) {
		all, err = true, kv.ErrUnchanged
		for i, e := range group {
			outcomes[i] = e.change(s, rev)
			if outcomes[i] == nil {
				err = nil
				continue
			}
			all = false
			if errors.Is(outcomes[i], kv.ErrUnchanged) {
				outcomes[i] = nil
			}
		}
		return all, err
	}
	t.mu.Lock()
	var rec kv.Server
	var rev uint64
	if s := t.servers[server]; s != nil {
		rec, rev = s.rec, s.rev
	}
	t.mu.Unlock()
	defer t.writing(kv.ServerKey(server))()
	if rev != 0 {
		// The mirror first: one write, and no read, where nobody else has
		// changed the record. It refuses nobody, for it may be behind.
		rec.Allocs = maps.Clone(rec.Allocs)
		if all, _ := apply(&rec, rev); all {
			if next, err := kv.Put(ctx, t.placements, kv.ServerKey(server), rec, rev); err == nil {
				t.applyServer(rec, next)
				return outcomes
			}
		}
	}
	rec, rev, err := kv.Update(ctx, t.placements, kv.ServerKey(server), func(s *kv.Server, rev uint64) error {
		_, err := apply(s, rev)
		return err
	})
	if err != nil {
		for i := range outcomes {
			outcomes[i] = err
		}
		return outcomes
	}
	if rev != 0 {
		t.applyServer(rec, rev)
	}
	return outcomes
}
