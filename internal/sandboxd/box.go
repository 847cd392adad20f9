package sandboxd

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"berth/internal/computer"
	"berth/internal/desktop"
)

func baseName(dir string) string { return filepath.Base(dir) }

// order is a create request that has been checked.
type order struct {
	id, key, template string
	display           computer.Display
	timeout           time.Duration // 0: none
	metadata          map[string]string
	env               map[string]string
	fence, epoch      uint64
}

// box is one sandbox from the request for it to its end.
type box struct {
	s       *Server
	cancel  context.CancelCauseFunc // gives a start up
	started chan struct{}           // closed when the start has ended, well or not
	gone    chan struct{}           // closed when nothing is left of it

	err     error                     // of the start; set before started is closed
	watched atomic.Pointer[time.Time] // when a viewer of the live view last asked; nil: never by this process

	dir   string
	guest Guest // likewise; nil after an error

	mu      sync.Mutex
	rec     record
	users   int           // calls to the agent under way
	held    bool          // calls are kept away from the agent
	viewers int           // of the live view
	leave   chan struct{} // closed to have them go, then another; nil: there are none
	quiet   chan struct{} // closed when users comes to 0; nil: nobody waits for that
	waiting int           // callers that wait for the start
	known   bool          // somebody has been told that it is ready
	reason  string
	timer   *time.Timer
}

// Errors of a create.
var (
	errFull     = errors.New("the server has no room for another sandbox")
	errDraining = errors.New("the server is draining and takes no new sandboxes")
	errTaken    = errors.New("another sandbox has this id")
	errEnded    = errors.New("the sandbox of this key has ended")
	errKilled   = errors.New("the sandbox was killed")
	errGivenUp  = errors.New("nobody waits for the sandbox any more")
	errNone     = errors.New("there is no such sandbox")
	errLost     = errors.New("the sandbox is lost")
	errSilent   = errors.New("the sandbox runs and its agent does not answer")
)

// create makes a sandbox, or returns the one that an earlier request with the
// same key made. It returns when the sandbox is ready.
func (s *Server) create(ctx context.Context, o order) (*box, error) {
	b, fresh, err := s.enter(o)
	if err != nil {
		return nil, err
	}
	if fresh {
		startCtx, cancel := context.WithCancelCause(s.ctx)
		b.mu.Lock()
		b.cancel = cancel
		b.mu.Unlock()
		s.tasks.Go(func() { s.start(startCtx, b, o) })
	}
	select {
	case <-b.started:
		return b, b.err
	case <-ctx.Done():
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.waiting--; b.waiting == 0 {
			b.cancel(errGivenUp)
		}
		return nil, context.Cause(ctx)
	}
}

// announce notes that a caller is being told that the box is ready. It reports
// false where that caller has gone away and nobody else knows of the box.
func (b *box) announce(ctx context.Context) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.waiting--
	if ctx.Err() == nil {
		b.known = true
	}
	return b.known || b.waiting > 0
}

// enter takes a place for a sandbox, or finds the one of the same key.
func (s *Server) enter(o order) (_ *box, fresh bool, _ error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b := s.boxes[o.id]; b != nil {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.rec.Key != o.key {
			return nil, false, errTaken
		}
		b.waiting++
		return b, false, nil
	}
	switch {
	case s.endings[o.key]:
		return nil, false, errEnded
	case s.draining:
		return nil, false, errDraining
	case len(s.boxes) >= s.opts.MaxContainers:
		return nil, false, errFull
	}
	now := time.Now().UTC().Truncate(time.Millisecond)
	b := &box{
		s: s, started: make(chan struct{}), gone: make(chan struct{}), waiting: 1, cancel: func(error) {},
		rec: record{ID: o.id, Key: o.key, Template: o.template, Display: o.display, Metadata: maps.Clone(o.metadata), StartedAt: now},
	}
	s.boxes[o.id] = b
	return b, true, nil
}

// start brings a box to life, or removes it.
func (s *Server) start(ctx context.Context, b *box, o order) {
	err := s.obtain(ctx, b, o)
	rec := b.record()
	if err == nil {
		s.watch(b)
		close(b.started)
		s.log.Info("a sandbox is ready", "sandbox", o.id, "took", time.Since(rec.StartedAt).Round(time.Millisecond))
		return
	}
	s.mu.Lock()
	delete(s.boxes, o.id)
	if errors.Is(err, errKilled) {
		s.remember(o.key)
	}
	s.mu.Unlock()
	if !errors.Is(err, errGivenUp) && !errors.Is(err, errKilled) && !errors.Is(err, errNoMemory) && !errors.Is(err, errNoDisk) && s.ctx.Err() == nil {
		s.log.Error("a sandbox did not start", "sandbox", o.id, "err", err)
	}
	b.err = err
	close(b.started)
	close(b.gone)
}

// obtain gets a guest for a box: a spare, else a new one. A spare that turns
// out to be dead is passed over.
func (s *Server) obtain(ctx context.Context, b *box, o order) error {
	for {
		sp := s.takeSpare(o.template, o.display)
		warm := sp != nil
		if !warm {
			dir, g, rec, err := s.launch(ctx, b.record())
			if err != nil {
				return err
			}
			sp = &spare{dir, g, rec}
		}
		err := sp.guest.Agent().claim(ctx, desktop.Claim{Fence: o.fence, Epoch: o.epoch, Env: o.env})
		if err == nil {
			err = b.take(sp, o.timeout)
		}
		if err == nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err == nil {
			return nil
		}
		b.mu.Lock()
		b.guest = nil
		b.mu.Unlock()
		again := warm && errors.Is(err, errAgent)
		if err = errors.Join(err, sp.discard(s)); !again {
			return err
		}
		s.log.Warn("a spare was dead", "err", err)
	}
}

// take makes a guest the box's own.
func (b *box) take(sp *spare, timeout time.Duration) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rec.Slot, b.rec.Guest = sp.rec.Slot, sp.rec.Guest
	if timeout > 0 {
		b.rec.EndAt = time.Now().UTC().Add(timeout).Truncate(time.Millisecond)
	}
	b.dir, b.guest = sp.dir, sp.guest
	return writeRecord(sp.dir, b.rec)
}

// watch follows a ready box to its end: its time, or its guest's death.
func (s *Server) watch(b *box) {
	b.schedule()
	s.tasks.Go(func() {
		select {
		case <-s.ctx.Done(): // it lives on without this process
			b.mu.Lock()
			defer b.mu.Unlock()
			if b.timer != nil {
				b.timer.Stop()
			}
		case <-b.guest.Gone():
			b.bury()
		}
	})
}

// schedule sets the timer of the box's end.
func (b *box) schedule() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.timer != nil {
		b.timer.Stop()
	}
	if b.rec.EndAt.IsZero() {
		return
	}
	b.timer = time.AfterFunc(time.Until(b.rec.EndAt), func() {
		b.mu.Lock()
		due := !b.rec.EndAt.IsZero() && !time.Now().Before(b.rec.EndAt)
		b.mu.Unlock()
		if due && b.s.ctx.Err() == nil {
			if err := b.kill("its time was up"); err != nil {
				b.s.log.Error("a sandbox outlives its end", "sandbox", b.record().ID, "err", err)
			}
		}
	})
}

// bury removes what is left of a box whose guest has ended.
func (b *box) bury() {
	rec := b.record()
	b.mu.Lock()
	reason := b.reason
	if b.timer != nil {
		b.timer.Stop()
	}
	b.mu.Unlock()
	if reason == "" {
		b.s.log.Warn("a sandbox died", "sandbox", rec.ID, "said", logged(b.dir))
	} else {
		b.s.log.Info("a sandbox has ended", "sandbox", rec.ID, "why", reason)
	}
	// Its cgroup and directory; then its id and place are free.
	if err := errors.Join(b.guest.Kill(), os.RemoveAll(b.dir)); err != nil {
		b.s.log.Error("something of a sandbox is left", "sandbox", rec.ID, "err", err)
	}
	b.s.freeSlot(rec.Slot)
	b.s.mu.Lock()
	delete(b.s.boxes, rec.ID)
	b.s.remember(rec.Key)
	b.s.mu.Unlock()
	close(b.gone)
}

// kill ends a box in whatever state it is, and returns when it is gone.
func (b *box) kill(reason string) error {
	b.mu.Lock()
	b.reason = reason
	cancel := b.cancel
	b.mu.Unlock()
	cancel(errKilled)
	<-b.started
	if b.guest == nil {
		return nil
	}
	if err := b.guest.Kill(); err != nil {
		return err
	}
	select {
	case <-b.gone:
		return nil
	case <-b.s.ctx.Done():
		return errClosed
	}
}

// setTimeout moves the box's end.
func (b *box) setTimeout(d time.Duration) error {
	b.mu.Lock()
	rec := b.rec
	rec.EndAt = time.Time{}
	if d > 0 {
		rec.EndAt = time.Now().UTC().Add(d).Truncate(time.Millisecond)
	}
	if b.guest != nil {
		if err := writeRecord(b.dir, rec); err != nil {
			b.mu.Unlock()
			return err
		}
	}
	b.rec = rec
	b.mu.Unlock()
	b.schedule()
	return nil
}

func (b *box) record() record {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.rec
}

// state is starting, running or paused.
func (b *box) state() string {
	select {
	case <-b.started:
	default:
		return "starting"
	}
	if b.paused() {
		return "paused"
	}
	return "running"
}

// find returns a box by its id, or nil.
func (s *Server) find(id string) *box {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.boxes[id]
}

// running returns a box that is ready, and may be paused.
func (s *Server) running(id string) (*box, error) {
	b := s.find(id)
	if b == nil {
		return nil, errNone
	}
	select {
	case <-b.started:
	default:
		return nil, fmt.Errorf("%w: it is still starting", errNone)
	}
	if b.guest == nil {
		return nil, errNone
	}
	return b, nil
}

// usable returns a box whose agent can be called until done.
func (s *Server) usable(id string) (b *box, done func(), err error) {
	if b, err = s.running(id); err != nil {
		return nil, nil, err
	}
	done, err = b.use()
	return b, done, err
}

// explain turns a failure of the agent into what the caller may know: that the
// sandbox is lost, once it is off the inventory, or that its agent is at fault.
func (b *box) explain(ctx context.Context, err error) error {
	var refusal *agentRefusal
	down := errors.As(err, &refusal) && refusal.status == http.StatusGone
	if !down && !errors.Is(err, errAgent) {
		return err
	}
	select {
	case <-b.gone:
	case <-time.After(lossWithin):
		return fmt.Errorf("%w: %w", errSilent, err)
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-b.s.ctx.Done():
		return errClosed
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.reason != "" {
		return fmt.Errorf("%w: %s", errLost, b.reason)
	}
	return fmt.Errorf("%w: %w", errLost, err)
}

func fenceOf(metadata map[string]string) (uint64, error) {
	text := metadata["fence"]
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, errors.New("a whole number")
	}
	return n, nil
}
