package worker

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// item is one delivered message.
type item struct {
	msg       jetstream.Msg
	seq       uint64 // in the stream
	published time.Time
	fresh     bool   // published since the consumer was read: counts for the backlog
	busy      bool   // over the backlog: to be rejected; written under lanes.mu
	names     string // of a cancel: the command that it ends
	acked     bool   // finished; belongs to the item's handler

	cancel context.CancelCauseFunc // of the run; nil while nothing runs; guarded by lanes.mu
	token  string                  // of the command that runs; likewise
}

// lanes run items one at a time per key and in parallel between keys, each in
// the order put. A key's goroutine lives while it has something to do.
type lanes struct {
	limit  int // fresh items that wait per key; 0: no limit
	handle func(context.Context, *item)

	mu      sync.Mutex
	boxes   map[string]*mailbox
	held    map[uint64]*item // put and not yet handled
	open    map[uint64]bool  // handled and not finished: taken again when it comes again
	stopped bool
	quiet   chan struct{} // of a pause: closed when nothing runs any more
	wg      sync.WaitGroup
}

type mailbox struct {
	waiting []*item
	fresh   int // of those waiting
	running *item
	last    uint64 // highest sequence put
}

// busyLane is the key of items over the backlog; no vm id has a space.
const busyLane = " busy"

func newLanes(limit int, handle func(context.Context, *item)) *lanes {
	return &lanes{limit: limit, handle: handle, boxes: map[string]*mailbox{}, held: map[uint64]*item{}, open: map[uint64]bool{}}
}

// put takes an item over. It returns false where the item is not held and is
// older than what its lane has taken: it has been handled already.
func (l *lanes) put(ctx context.Context, key string, it *item) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.stopped || l.held[it.seq] != nil {
		return true
	}
	if b := l.boxes[key]; b != nil {
		if it.seq <= b.last && !l.open[it.seq] {
			return false
		}
		b.last = max(b.last, it.seq)
		if l.limit > 0 && it.fresh && b.fresh >= l.limit {
			it.busy, key = true, busyLane
		}
	}
	b := l.boxes[key]
	if b == nil {
		b = &mailbox{}
		l.boxes[key] = b
		l.wg.Go(func() { l.work(ctx, key, b) })
	}
	b.last = max(b.last, it.seq)
	b.waiting = append(b.waiting, it)
	if it.fresh {
		b.fresh++
	}
	l.held[it.seq] = it
	delete(l.open, it.seq)
	return true
}

// work handles a lane's items until it has none, or the lanes are stopped.
func (l *lanes) work(ctx context.Context, key string, b *mailbox) {
	for {
		l.mu.Lock()
		if len(b.waiting) == 0 || l.stopped {
			for _, it := range b.waiting {
				delete(l.held, it.seq) // it comes again
			}
			delete(l.boxes, key)
			if len(l.boxes) == 0 && l.quiet != nil {
				close(l.quiet)
				l.quiet = nil
			}
			l.mu.Unlock()
			return
		}
		it := b.waiting[0]
		b.waiting[0] = nil
		b.waiting = b.waiting[1:]
		if it.fresh {
			b.fresh--
		}
		b.running = it
		l.mu.Unlock()
		l.handle(ctx, it)
		l.mu.Lock()
		b.running = nil
		l.mu.Unlock()
		l.handled(it)
	}
}

// begin returns the context of a command's run, which cancelBefore and
// cancelRun can end. done must be called.
func (l *lanes) begin(ctx context.Context, it *item, token string) (run context.Context, done func()) {
	run, cancel := context.WithCancelCause(ctx)
	l.mu.Lock()
	it.cancel, it.token = cancel, token
	l.mu.Unlock()
	return run, func() {
		l.mu.Lock()
		it.cancel = nil
		l.mu.Unlock()
		cancel(context.Canceled)
	}
}

// cancelBefore cancels what runs in a lane if its sequence is below seq.
func (l *lanes) cancelBefore(key string, seq uint64, cause error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if b := l.boxes[key]; b != nil && b.running != nil && b.running.cancel != nil && b.running.seq < seq {
		b.running.cancel(cause)
	}
}

// cancelRun cancels what runs in a lane if it is the command of that token.
func (l *lanes) cancelRun(key, token string, cause error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if b := l.boxes[key]; b != nil && b.running != nil && b.running.cancel != nil && b.running.token == token {
		b.running.cancel(cause)
	}
}

// named reports whether an item is held that names this command.
func (l *lanes) named(command string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, it := range l.held {
		if it.names == command && !it.busy {
			return true
		}
	}
	return false
}

// waits returns the items that wait in a lane.
func (l *lanes) waits(key string) []*item {
	l.mu.Lock()
	defer l.mu.Unlock()
	if b := l.boxes[key]; b != nil {
		return slices.Clone(b.waiting)
	}
	return nil
}

// takeOut takes an item out of its lane before its turn, to be handled by
// whoever has taken it out, and given to handled then. It returns false where
// the item's turn has come.
func (l *lanes) takeOut(key string, it *item) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := l.boxes[key]
	if b == nil {
		return false
	}
	i := slices.Index(b.waiting, it)
	if i < 0 {
		return false
	}
	b.waiting = slices.Delete(b.waiting, i, i+1)
	if it.fresh {
		b.fresh--
	}
	return true
}

// handled ends the holding of an item.
func (l *lanes) handled(it *item) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.held, it.seq)
	if !it.acked {
		l.open[it.seq] = true
	}
}

// isStopped reports whether no further item begins.
func (l *lanes) isStopped() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stopped
}

// stop lets no further item begin and returns when none runs.
func (l *lanes) stop() {
	l.mu.Lock()
	l.stopped = true
	l.mu.Unlock()
	l.wg.Wait()
}

// pause is stop that can be taken back: it reports whether nothing runs any
// more, within d and before one of the contexts ends. Nobody may put meanwhile.
// What waited is not held any more.
func (l *lanes) pause(ctx, work context.Context, d time.Duration) bool {
	l.mu.Lock()
	l.stopped = true
	if len(l.boxes) == 0 {
		l.mu.Unlock()
		return true
	}
	quiet := make(chan struct{})
	l.quiet = quiet
	l.mu.Unlock()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-quiet:
		return true
	case <-timer.C:
	case <-ctx.Done():
	case <-work.Done():
	}
	return false
}

// resume takes a pause back. What the pause has dropped is to be put again, in
// order, by whoever reads the consumer from its first unfinished message.
func (l *lanes) resume() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stopped, l.quiet = false, nil
}

// load counts the items held.
func (l *lanes) load() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.held)
}

// messages returns those of the items held.
func (l *lanes) messages() []jetstream.Msg {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]jetstream.Msg, 0, len(l.held))
	for _, it := range l.held {
		out = append(out, it.msg)
	}
	return out
}
