package playwright

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
)

// Bounds of what the provider itself waits for.
const (
	// graceOnCancel is how long a call that ctx cancelled may take to end by
	// itself before its browser is closed.
	graceOnCancel = 500 * time.Millisecond
	// reconnectWithin bounds how long a sandbox may be without a connection to
	// its living browser before it counts as lost.
	reconnectWithin = 60 * time.Second
	// callsEndWithin bounds the wait for calls whose browser or driver is gone.
	// They end at once, unless Playwright forgets one.
	callsEndWithin = 5 * time.Second
	// settle is how long a failed call waits to learn what made it fail.
	settle = 500 * time.Millisecond
)

// sandbox is one browser, and from Create on one sandbox. A spare is a sandbox
// that nobody has yet.
//
// Its life: launched → connected ⇄ reconnecting → dead. dead is closed when
// the process is gone or given up on; everything that waits looks at it.
type sandbox struct {
	p    *Provider
	dir  string
	proc *process
	turn chan struct{} // holds one token: batches take turns
	dead chan struct{}
	gone chan struct{} // closed when the process is gone and its directory removed
	work tasks

	mu        sync.Mutex
	rec       record
	ready     bool // Create has returned it; a spare is not
	shelved   bool // its end leaves the directory: it is paused, or was and is not yet again what runs
	quits     bool // its browser was asked to exit
	conn      *connection
	connected chan struct{} // closed while conn is set; renewed when it is not
	why       error         // set before dead is closed
	cursor    computer.Point
	noted     held              // what the note says
	keys      []string          // held now, in the order pressed
	buttons   []computer.Button // held now, in the order pressed
	dialogs   []computer.Dialog
	downloads []computer.Download
}

func newSandbox(p *Provider, dir string, proc *process, rec record) *sandbox {
	s := &sandbox{
		p: p, dir: dir, proc: proc, rec: rec,
		turn: make(chan struct{}, 1), dead: make(chan struct{}), gone: make(chan struct{}), connected: make(chan struct{}),
		cursor: computer.Point{X: rec.Display.Width / 2, Y: rec.Display.Height / 2},
	}
	s.turn <- struct{}{}
	p.mu.Lock()
	p.ports[proc.port()]++ // until buried
	p.mu.Unlock()
	return s
}

// bury ends a sandbox for the given reason: it is no longer listed from this
// moment, calls in it end, and its process and directory go in the background
// (see gone). Of one that is shelved only the process goes. Only the first call
// counts. It does not block.
func (s *sandbox) bury(why error) {
	s.mu.Lock()
	if s.why != nil {
		s.mu.Unlock()
		return
	}
	s.why = why
	vm, shelved := s.rec.VM, s.shelved
	s.mu.Unlock()
	if shelved {
		s.p.forget(s, "") // its slot has the vm
	} else {
		s.p.forget(s, vm) // closes dead
	}
	if vm != "" && !shelved && !errors.Is(why, errKilled) {
		s.p.log.Warn("sandbox lost", "vm", vm, "reason", why)
	}
	go func() { // Provider.Close waits for it: see forget and buried
		defer close(s.gone) // last: who waited for it finds its place free
		defer s.p.buried(s)
		if err := s.proc.kill(context.Background()); err != nil {
			s.p.log.Error("browser does not end", "vm", vm, "pid", s.proc.pid, "error", err)
		}
		s.proc.unwatch()
		if !s.work.wait(callsEndWithin) {
			s.p.log.Error("calls hang in a browser that is gone", "vm", vm)
		}
		if shelved {
			return
		}
		if err := discard(s.dir); err != nil {
			s.p.log.Error("profile stays", "vm", vm, "error", err)
		}
	}()
}

var (
	errKilled = errors.New("killed")
	errExited = errors.New("the browser exited")
)

// lost is the error of calls that a sandbox's end has interrupted.
func (s *sandbox) lost() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Errorf("vm %s: %w: %w", s.rec.VM, s.why, providers.ErrLost)
}

func (s *sandbox) vm() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec.VM
}

func (s *sandbox) isDead() bool {
	select {
	case <-s.dead:
		return true
	default:
		return false
	}
}

// keep stays with a sandbox until it is dead or the provider closes: it buries
// it when the process exits, and reconnects when the connection breaks.
func (s *sandbox) keep(ctx context.Context) {
	for {
		conn, err := s.reconnect(ctx)
		if err != nil {
			if ctx.Err() == nil {
				s.bury(err)
			}
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-s.dead:
			return
		case <-s.proc.exited:
			s.bury(errExited)
			return
		case <-conn.gone:
			s.mu.Lock()
			s.conn, s.connected = nil, make(chan struct{})
			s.mu.Unlock()
		}
		select { // a connection that breaks again and again shall not keep us busy
		case <-time.After(50 * time.Millisecond):
		case <-s.dead:
		case <-ctx.Done():
		}
	}
}

// reconnect returns the connection, and makes one, as soon as there is a
// driver, when there is none. The browser may be about to exit, so it watches
// for that too.
func (s *sandbox) reconnect(ctx context.Context) (*connection, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, reconnectWithin, errors.New("no connection to the browser for "+reconnectWithin.String()))
	defer cancel()
	for delay := 50 * time.Millisecond; ; delay = min(2*delay, 5*time.Second) {
		s.mu.Lock()
		conn := s.conn
		s.mu.Unlock()
		if conn != nil {
			return conn, nil
		}
		err := s.connect(ctx)
		if err == nil {
			continue
		}
		select {
		case <-s.dead:
			return nil, errKilled
		case <-s.proc.exited:
			return nil, errExited
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %w", context.Cause(ctx), err)
		case <-time.After(delay):
		}
	}
}

// connect connects to the browser, sets the display on every page, and
// releases what an earlier connection left pressed.
func (s *sandbox) connect(ctx context.Context) error {
	d, err := s.p.awaitDriver(ctx)
	if err != nil {
		return err
	}
	conn, err := dial(ctx, s, d)
	if err != nil {
		return err
	}
	if err := s.releaseLeftovers(ctx, conn); err != nil {
		conn.abandon()
		return err
	}
	s.mu.Lock()
	s.conn = conn
	close(s.connected)
	s.mu.Unlock()
	return nil
}

// link returns the present connection, waiting for one that is being made.
func (s *sandbox) link(ctx context.Context) (*connection, error) {
	wait, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for {
		s.mu.Lock()
		conn, connected := s.conn, s.connected
		s.mu.Unlock()
		if conn != nil && !conn.isGone() {
			return conn, nil
		}
		if conn != nil { // gone, and keep has not noticed yet
			connected = nil
		}
		select {
		case <-s.dead:
			return nil, s.lost()
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-wait.Done():
			return nil, fmt.Errorf("no connection to the browser of vm %s: %w", s.vm(), providers.ErrUnavailable)
		case <-connected:
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// call runs a blocking Playwright call so that ctx and the sandbox's end can
// interrupt the wait for it. What such a call does to the page cannot be taken
// back or stopped by itself, so when ctx ends it gets a grace period, and then
// the browser is closed: a cancelled press never arrives late. Calls without
// an effect on the page use ask.
func (s *sandbox) call(ctx context.Context, fn func() error) error {
	if err := context.Cause(ctx); err != nil {
		return err
	}
	done := make(chan error, 1)
	s.work.Go(func() { done <- fn() })
	select {
	case err := <-done:
		return err
	case <-s.dead:
		return s.lost()
	case <-ctx.Done():
	}
	grace := time.NewTimer(graceOnCancel)
	defer grace.Stop()
	select {
	case err := <-done:
		if err == nil {
			return nil // it ran; the caller sees ctx at its next step
		}
		return err
	case <-s.dead:
		return s.lost()
	case <-grace.C:
		s.bury(fmt.Errorf("the page did not answer, and the call was given up: %w", context.Cause(ctx)))
		return fmt.Errorf("%w: %w", context.Cause(ctx), s.lost())
	}
}

// ask runs a blocking Playwright call that has no effect on the page. When ctx
// ends nobody waits for it any more; it ends with the page at the latest.
func (s *sandbox) ask(ctx context.Context, fn func() error) error {
	if err := context.Cause(ctx); err != nil {
		return err
	}
	done := make(chan error, 1)
	s.work.Go(func() { done <- fn() })
	select {
	case err := <-done:
		return err
	case <-s.dead:
		return s.lost()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// handle describes the sandbox.
func (s *sandbox) handle() providers.Sandbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec.handle(s.p.opts.ServerID, providers.Running)
}

// assign makes a spare the sandbox of a vm and records that.
func (s *sandbox) assign(spec providers.Spec) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	rec := s.rec
	rec.VM, rec.Fence, rec.Tenant, rec.Role, rec.Owner, rec.Session = spec.VM, spec.Fence, spec.Tenant, spec.Role, spec.Owner, spec.Session
	rec.Display, rec.CreatedAt, rec.Metadata, rec.Env = spec.Display, time.Now().UTC(), spec.Metadata, spec.Env
	if err := writeJSON(filepath.Join(s.dir, recordFile), rec); err != nil {
		return fmt.Errorf("record vm %s: %w", spec.VM, err)
	}
	s.rec, s.ready = rec, true
	s.cursor = computer.Point{X: rec.Display.Width / 2, Y: rec.Display.Height / 2}
	return nil
}

func (s *sandbox) display() computer.Display {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rec.Display
}
