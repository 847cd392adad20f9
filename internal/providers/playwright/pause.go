package playwright

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"berth/internal/providers"
)

// Bounds of a pause.
const (
	quietWithin = 30 * time.Second // for the calls under way to end
	quitWithin  = 10 * time.Second // for the browser to write its profile and exit; then it is killed
)

var (
	errPaused = providers.ErrPaused
	errHeld   = fmt.Errorf("the sandbox is being paused, resumed, kept or killed: %w", providers.ErrConflict)
	errAtWork = fmt.Errorf("a call in the sandbox did not end in %s: %w", quietWithin, providers.ErrConflict)
)

// paused is a sandbox without a browser: a record and a directory.
type paused struct {
	dir string
	rec record
}

// hold is the sole use of a slot, which a pause, a resume or a kill has.
type hold struct {
	cancel context.CancelCauseFunc
	killed chan struct{} // closed when a kill waits for it
	done   chan struct{} // closed when it is over
}

// kill ends what goes on, as far as it can be ended. The caller holds
// Provider.mu.
func (h *hold) kill() {
	select {
	case <-h.killed:
	default:
		close(h.killed)
	}
	h.cancel(errKilled)
}

// use is called before a call in a sandbox, and done after it: a pause waits
// for the calls under way.
func (p *Provider) use(vm string) (s *sandbox, done func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b, err := p.lookup(vm)
	if err != nil {
		return nil, nil, err
	}
	switch {
	case b.held != nil:
		return nil, nil, fmt.Errorf("vm %s: %w", vm, errHeld)
	case b.paused != nil:
		return nil, nil, fmt.Errorf("vm %s: %w", vm, errPaused)
	}
	b.users++
	return b.sandbox, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if b.users--; b.users == 0 && b.quiet != nil {
			close(b.quiet)
			b.quiet = nil
		}
	}, nil
}

// hold takes a slot that no call uses, or shall soon not use any more. The
// caller holds p.mu, and calls release at the end, without p.mu.
func (p *Provider) hold(b *slot, cancel context.CancelCauseFunc) (quiet chan struct{}, release func()) {
	h := &hold{cancel: cancel, killed: make(chan struct{}), done: make(chan struct{})}
	b.held = h
	quiet = make(chan struct{})
	if b.users == 0 {
		close(quiet)
	} else {
		b.quiet = quiet
	}
	return quiet, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		b.held, b.quiet = nil, nil
		close(h.done)
	}
}

// still runs f while no call is under way in a sandbox, and refuses new ones.
// When ctx ends before f has taken effect, f ends too; else it goes on, so that
// a sandbox is never left half way.
func (p *Provider) still(ctx context.Context, vm string, f func(context.Context, *slot) error) error {
	p.mu.Lock()
	b, err := p.lookup(vm)
	if err == nil && b.held != nil {
		err = fmt.Errorf("vm %s: %w", vm, errHeld)
	}
	if err != nil {
		p.mu.Unlock()
		return err
	}
	mine, cancel := context.WithCancelCause(ctx)
	quiet, release := p.hold(b, cancel)
	p.mu.Unlock()
	done := make(chan error, 1)
	if !p.work.Go(func() {
		defer cancel(nil)
		defer context.AfterFunc(p.ctx, func() { cancel(errClosed) })()
		err := b.becomeQuiet(mine, quiet)
		if err == nil {
			err = f(mine, b)
		}
		release()
		done <- err
	}) {
		cancel(errClosed)
		release()
		return errClosed
	}
	select {
	case err = <-done:
	case <-ctx.Done():
		select {
		case err = <-done:
		case <-time.After(graceOnCancel):
			err = context.Cause(ctx)
		}
	}
	if err != nil {
		if errors.Is(err, errKilled) && !errors.Is(err, providers.ErrLost) {
			err = fmt.Errorf("%w: %w", err, providers.ErrLost)
		}
		return fmt.Errorf("vm %s: %w", vm, err)
	}
	return nil
}

// becomeQuiet waits for the calls under way.
func (b *slot) becomeQuiet(ctx context.Context, quiet <-chan struct{}) error {
	timer := time.NewTimer(quietWithin)
	defer timer.Stop()
	var dead chan struct{}
	if b.sandbox != nil {
		dead = b.sandbox.dead
	}
	select {
	case <-quiet:
		return context.Cause(ctx)
	case <-timer.C:
		return errAtWork
	case <-dead:
		return b.sandbox.lost()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Pause saves what a browser forgets at its end (see saved), and ends it; its
// profile stays. It waits up to 30 s for the calls under way, and refuses others
// with ErrConflict until Resume. A sandbox that is paused stays so. When the
// state cannot be saved the sandbox goes on. Once it is saved the pause is
// finished whatever becomes of ctx.
func (p *Provider) Pause(ctx context.Context, vm string) error {
	err := p.still(ctx, vm, p.pause)
	if err != nil {
		return fmt.Errorf("pause %w", err)
	}
	return nil
}

func (p *Provider) pause(ctx context.Context, b *slot) error {
	if b.paused != nil {
		return nil
	}
	s := b.sandbox
	conn, err := s.link(ctx)
	if err != nil {
		return err
	}
	state, err := s.save(ctx, conn, false)
	if err == nil {
		s.mu.Lock()
		rec := s.rec
		s.mu.Unlock()
		err = writeSynced(filepath.Join(s.dir, recordFile), rec)
	}
	if err == nil {
		err = writeSynced(filepath.Join(s.dir, pausedFile), state)
	}
	if err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return errors.Join(s.blame(ctx, conn, err), s.unsave())
	}
	p.opts.edge("saved")
	if !p.shelve(b, s) {
		return s.lost()
	}
	p.opts.edge("shelved")
	p.mu.Lock()
	killed := b.held.killed
	p.mu.Unlock()
	s.proc.quit(killed)
	s.bury(errPaused)
	<-s.gone
	p.log.Info("paused", "vm", b.paused.rec.VM, "pages", len(state.Pages), "cookies", len(state.Cookies))
	return nil
}

// blame gives an error of a pause, a resume or a snapshot one of the package's.
func (s *sandbox) blame(ctx context.Context, conn *connection, err error) error {
	switch {
	case s.isDead():
		return s.lost()
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, providers.ErrUnavailable), errors.Is(err, providers.ErrLost), errors.Is(err, providers.ErrTimeout):
		return err
	case conn != nil && conn.isGone():
		return fmt.Errorf("the connection to the browser broke: %w: %w", err, providers.ErrUnavailable)
	}
	return fmt.Errorf("%w: %w", err, providers.ErrUnavailable)
}

// unsave removes what a pause that was given up has saved: the sandbox runs.
func (s *sandbox) unsave() error {
	err := os.Remove(filepath.Join(s.dir, pausedFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// shelve makes a sandbox whose state is saved a paused one: from now on its
// browser's end is no loss. False: it is dead already.
func (p *Provider) shelve(b *slot, s *sandbox) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.why != nil {
		return false
	}
	s.shelved, s.quits = true, true
	b.sandbox, b.paused = nil, &paused{s.dir, s.rec}
	return true
}

// Resume starts a browser on a paused sandbox's profile, restores what was
// saved, reopens the pages, and returns when the active one has painted. A
// sandbox that runs goes on. After an error it is still paused, and nothing of
// its state is gone. It takes no place on the server that the paused sandbox
// has not had.
func (p *Provider) Resume(ctx context.Context, vm string) error {
	err := p.still(ctx, vm, p.resume)
	if err != nil {
		return fmt.Errorf("resume %w", err)
	}
	return nil
}

func (p *Provider) resume(ctx context.Context, b *slot) error {
	if b.paused == nil {
		return nil
	}
	dir, rec := b.paused.dir, b.paused.rec
	state, err := readSaved(filepath.Join(dir, pausedFile))
	if err != nil {
		return fmt.Errorf("%w; it stays paused, and can be killed: %w", err, providers.ErrUnavailable)
	}
	// Keys that were down are up in a new browser, and no pointer is anywhere.
	if err := os.Remove(filepath.Join(dir, heldFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("%w: %w", err, providers.ErrUnavailable)
	}
	s, err := p.boot(ctx, dir, rec, &state)
	if err != nil {
		return err
	}
	p.opts.edge("restored")
	if err := p.unshelve(ctx, b, s); err != nil {
		s.bury(err)
		<-s.gone
		return err
	}
	p.opts.edge("resumed")
	if err := syncDir(dir); err != nil && !s.isDead() {
		p.log.Warn("a resume may not outlast a loss of power", "vm", rec.VM, "error", err)
	}
	p.log.Info("resumed", "vm", rec.VM, "pages", len(state.Pages), "cookies", len(state.Cookies))
	return nil
}

// unshelve makes a paused sandbox a running one. When it fails the caller buries
// the browser, and the sandbox is still paused.
func (p *Provider) unshelve(ctx context.Context, b *slot, s *sandbox) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.why != nil:
		return fmt.Errorf("%w: %w", s.why, providers.ErrUnavailable)
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	// Until here a successor of this process would find it paused.
	if err := os.Remove(filepath.Join(s.dir, pausedFile)); err != nil {
		return fmt.Errorf("%w: %w", err, providers.ErrUnavailable)
	}
	s.shelved, s.ready = false, true
	b.sandbox, b.paused = s, nil
	return nil
}

// remove ends a paused sandbox. The caller holds its slot.
func (p *Provider) remove(b *slot) error {
	if err := discard(b.paused.dir); err != nil {
		return err
	}
	p.mu.Lock()
	delete(p.boxes, b.paused.rec.VM)
	p.mu.Unlock()
	p.wakeFiller()
	return nil
}

// discard removes a sandbox's directory. Its files go first, so that it is never
// taken for a sandbox when this process dies in between.
func discard(dir string) error {
	for _, name := range []string{recordFile, pausedFile} {
		if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return removeAll(dir)
}

// isPaused reports whether a browser's directory has saved state.
func isPaused(dir string) bool {
	_, err := os.Lstat(filepath.Join(dir, pausedFile))
	return err == nil
}

// shelf takes over a paused sandbox of an earlier process. If that died while it
// paused or resumed the sandbox, the browser is still there, or on its way out.
func (p *Provider) shelf(ctx context.Context, dir string, rec record) error {
	proc, err := adopt(rec.PID, rec.Started, rec.Endpoint, dir)
	if err == nil {
		proc.quit(ctx.Done())
		proc.unwatch()
	}
	if err := reap(ctx, dir); err != nil {
		return err
	}
	done := make(chan struct{})
	close(done)
	p.boxes[rec.VM] = &slot{fence: rec.Fence, paused: &paused{dir, rec}, done: done, cancel: func(error) {}}
	p.log.Info("taking over a paused sandbox", "vm", rec.VM)
	return nil
}

// leftovers are files of a profile whose browser has ended: the next would take
// them for its own.
var leftovers = []string{"DevToolsActivePort", "SingletonLock", "SingletonCookie", "SingletonSocket"}

// clean makes a profile one that no browser has open.
func clean(dir string) error {
	for _, name := range leftovers {
		if err := os.Remove(filepath.Join(dir, "profile", name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("clean the profile: %w", err)
		}
	}
	return nil
}

// boot starts a browser in a directory, connects to it, restores state where
// there is some, and waits for the first picture. A paused sandbox's directory
// stays when it fails; else nothing does.
func (p *Provider) boot(ctx context.Context, dir string, rec record, state *saved) (*sandbox, error) {
	shelved := rec.VM != ""
	select {
	case p.launches <- struct{}{}:
		defer func() { <-p.launches }()
	case <-ctx.Done():
		if !shelved {
			return nil, errors.Join(context.Cause(ctx), removeAll(dir))
		}
		return nil, context.Cause(ctx)
	}
	fail := func(err error) (*sandbox, error) {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		} else if !errors.Is(err, providers.ErrUnavailable) {
			err = fmt.Errorf("%w: %w", err, providers.ErrUnavailable)
		}
		if !shelved {
			err = errors.Join(err, removeAll(dir))
		}
		return nil, err
	}
	if err := clean(dir); err != nil {
		return fail(err)
	}
	proc, err := p.launcher.launch(ctx, dir, rec.Display, rec.Env)
	if err != nil {
		return fail(err)
	}
	if shelved {
		p.opts.edge("launched")
	}
	rec.PID, rec.Started, rec.Endpoint = proc.pid, proc.started, proc.endpoint
	s := newSandbox(p, dir, proc, rec)
	s.shelved = shelved
	err = writeJSON(filepath.Join(dir, recordFile), rec)
	if err == nil {
		err = s.connect(ctx)
	}
	if err == nil && state != nil {
		var conn *connection
		if conn, err = s.link(ctx); err == nil {
			err = s.restore(ctx, conn, *state)
		}
	} else if err == nil {
		err = s.painted(ctx)
	}
	if err == nil && !p.work.Go(func() { s.keep(p.ctx) }) {
		err = errClosed
	}
	if err == nil {
		return s, nil
	}
	s.bury(err)
	<-s.gone
	if !shelved {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return nil, fmt.Errorf("%s: %w", err.Error(), providers.ErrUnavailable) // and not ErrLost: it is still paused
}

// handle describes a recorded sandbox.
func (r record) handle(server string, state providers.State) providers.Sandbox {
	return providers.Sandbox{
		ID: r.VM, VM: r.VM, Fence: r.Fence, Tenant: r.Tenant, Role: r.Role, Owner: r.Owner, Session: r.Session,
		Server: server, State: state, Display: r.Display, Capabilities: slices.Clone(capabilities), CreatedAt: r.CreatedAt,
	}
}
