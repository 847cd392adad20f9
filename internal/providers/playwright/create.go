package playwright

import (
	"context"
	"errors"
	"fmt"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
)

// Create hands out a spare when there is one, else it starts a browser.
// Spec.Metadata "dialogs" = "accept" says yes to confirm and prompt dialogs.
// A template is what Snapshot named, for the same tenant; another is ErrInvalid.
// Variables other than TZ and LANG are ErrUnsupported.
func (p *Provider) Create(ctx context.Context, spec providers.Spec) (providers.Sandbox, error) {
	if err := checkSpec(&spec); err != nil {
		return providers.Sandbox{}, fmt.Errorf("create vm %s: %w", spec.VM, err)
	}
	mineCtx, cancel := context.WithCancelCause(ctx) // a kill ends it too
	defer cancel(nil)
	for {
		b, mine, err := p.reserve(spec, cancel)
		if err != nil {
			return providers.Sandbox{}, fmt.Errorf("create vm %s: %w", spec.VM, err)
		}
		if mine {
			return p.build(mineCtx, b, spec)
		}
		select {
		case <-b.done:
		case <-ctx.Done():
			return providers.Sandbox{}, context.Cause(ctx)
		}
		if b.err == nil {
			p.mu.Lock()
			defer p.mu.Unlock()
			return p.describe(b), nil
		}
		if !errors.Is(b.err, context.Canceled) && !errors.Is(b.err, context.DeadlineExceeded) {
			return providers.Sandbox{}, b.err
		}
		// The call that was first gave up, and this one has not: try anew.
	}
}

// reserve takes up capacity for a vm, or finds the slot of the same placement.
func (p *Provider) reserve(spec providers.Spec, cancel context.CancelCauseFunc) (b *slot, mine bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, false, errClosed
	}
	if err := p.checkEpoch(spec.LeaseEpoch); err != nil {
		return nil, false, err
	}
	if b := p.boxes[spec.VM]; b != nil {
		if b.fence != spec.Fence {
			return nil, false, fmt.Errorf("it exists with fence %d, asked for %d: %w", b.fence, spec.Fence, providers.ErrConflict)
		}
		return b, false, nil
	}
	used := len(p.boxes)
	for _, vm := range p.dying { // what is on its way out is still there
		if vm != "" {
			used++
		}
	}
	if p.opts.MaxContainers > 0 && used >= p.opts.MaxContainers {
		return nil, false, fmt.Errorf("%d of %d sandboxes: %w", used, p.opts.MaxContainers, providers.ErrFull)
	}
	b = &slot{fence: spec.Fence, done: make(chan struct{}), cancel: cancel, handle: providers.Sandbox{
		ID: spec.VM, VM: spec.VM, Fence: spec.Fence, Tenant: spec.Tenant, Role: spec.Role, Owner: spec.Owner, Session: spec.Session,
		Server: p.opts.ServerID, State: providers.Starting, Display: spec.Display, Capabilities: capabilities, CreatedAt: time.Now().UTC(),
	}}
	p.boxes[spec.VM] = b
	return b, true, nil
}

// checkEpoch refuses an older lease epoch than the newest seen; 0 is not
// checked. The caller holds p.mu.
func (p *Provider) checkEpoch(epoch uint64) error {
	if epoch != 0 && epoch < p.epoch {
		return fmt.Errorf("lease epoch %d, the newest is %d: %w", epoch, p.epoch, providers.ErrFenceStale)
	}
	p.epoch = max(p.epoch, epoch)
	return nil
}

// build makes the sandbox of a reserved slot. When it fails nothing stays.
func (p *Provider) build(ctx context.Context, b *slot, spec providers.Spec) (providers.Sandbox, error) {
	s, err := p.obtain(ctx, spec)
	if err == nil {
		err = s.become(ctx, spec)
	}
	p.mu.Lock()
	if err == nil && ctx.Err() != nil { // killed, or given up, at the last moment
		err = context.Cause(ctx)
	}
	if err == nil && !s.isDead() {
		b.sandbox = s
		close(b.done)
		p.mu.Unlock()
		return s.handle(), nil
	}
	p.mu.Unlock()
	if s != nil {
		s.bury(errKilled)
		<-s.gone // nothing stays behind
		if err == nil {
			err = s.lost()
		}
	}
	b.err = fmt.Errorf("create vm %s: %w", spec.VM, createError(ctx, err))
	p.mu.Lock()
	delete(p.boxes, spec.VM)
	close(b.done)
	p.mu.Unlock()
	p.wakeFiller()
	return providers.Sandbox{}, b.err
}

// createError gives a failed create one of the package's errors.
func createError(ctx context.Context, err error) error {
	switch cause := context.Cause(ctx); {
	case errors.Is(cause, errKilled):
		return fmt.Errorf("killed while it started: %w", providers.ErrLost)
	case cause != nil:
		return cause // given up by the caller, or closed
	case errors.Is(err, providers.ErrLost), errors.Is(err, providers.ErrUnavailable), errors.Is(err, providers.ErrInvalid):
		return err
	}
	return fmt.Errorf("%w: %w", err, providers.ErrUnavailable)
}

// obtain takes a warm spare, or starts a browser: from a template always.
func (p *Provider) obtain(ctx context.Context, spec providers.Spec) (*sandbox, error) {
	if spec.Template != "" {
		return p.startFrom(ctx, spec)
	}
	if len(spec.Env) == 0 {
		p.mu.Lock()
		for len(p.spares) > 0 {
			s := p.spares[0]
			p.spares = p.spares[1:]
			if s.isConnected() {
				p.mu.Unlock()
				p.wakeFiller()
				return s, nil
			}
			defer s.bury(errors.New("a spare that lost its connection"))
		}
		p.mu.Unlock()
	}
	return p.start(ctx, spec.Display, spec.Env)
}

func (s *sandbox) isConnected() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.why == nil && s.conn != nil && !s.conn.isGone()
}

// become turns a warm browser into the sandbox of a vm: it sets the display
// where that differs, and writes the record.
func (s *sandbox) become(ctx context.Context, spec providers.Spec) error {
	if s.display() != spec.Display {
		s.mu.Lock()
		s.rec.Display = spec.Display
		s.mu.Unlock()
		conn, err := s.link(ctx)
		if err != nil {
			return err
		}
		pages, _ := conn.all()
		for _, p := range pages {
			if err := s.call(ctx, func() error { return p.SetViewportSize(spec.Display.Width, spec.Display.Height) }); err != nil {
				return fmt.Errorf("set the display: %w", err)
			}
		}
		if err := s.painted(ctx); err != nil {
			return err
		}
	}
	return s.assign(spec)
}

// painted returns once the browser has given a picture of its display.
func (s *sandbox) painted(ctx context.Context) error {
	conn, err := s.link(ctx)
	if err != nil {
		return err
	}
	if _, _, err := s.capture(ctx, conn); err != nil {
		return fmt.Errorf("first picture: %w", err)
	}
	return nil
}

// start launches a browser, connects to it and waits for its first picture.
// When it fails nothing stays behind.
func (p *Provider) start(ctx context.Context, display computer.Display, env map[string]string) (*sandbox, error) {
	dir, err := p.state.newBrowserDir()
	if err != nil {
		return nil, fmt.Errorf("make the browser's directory: %w", err)
	}
	return p.boot(ctx, dir, record{Version: recordVersion, Display: display, Env: env}, nil)
}

// fill keeps the spares warm: one at a time, within the server's limit, with a
// pause after a failure.
func (p *Provider) fill(ctx context.Context) {
	delay := time.Duration(0)
	for {
		for p.lacksSpare() && ctx.Err() == nil {
			s, err := p.start(ctx, computer.DefaultDisplay, nil)
			if err != nil {
				if ctx.Err() == nil {
					p.log.Warn("no spare browser", "error", err)
					delay = min(max(2*delay, time.Second), time.Minute)
				}
				break
			}
			delay = 0
			p.mu.Lock()
			closed := p.closed
			if !closed && !s.isDead() {
				p.spares = append(p.spares, s)
			}
			p.mu.Unlock()
			if closed {
				s.bury(errClosed)
			}
		}
		var retry <-chan time.Time
		if delay > 0 {
			retry = time.After(delay)
		}
		select {
		case <-ctx.Done():
			return
		case <-p.refill:
		case <-retry:
		}
	}
}

func (p *Provider) lacksSpare() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	room := p.opts.MaxContainers == 0 || len(p.boxes)+len(p.dying)+len(p.spares) < p.opts.MaxContainers
	return !p.closed && room && len(p.spares) < p.opts.Spares
}

func (p *Provider) wakeFiller() {
	select {
	case p.refill <- struct{}{}:
	default:
	}
}

// Kill ends the browser with all its processes and removes its profile. It
// returns when both are gone, and ends calls in the sandbox with ErrLost, a
// pause and a resume too.
func (p *Provider) Kill(ctx context.Context, vm string) error {
	p.mu.Lock()
	first := p.boxes[vm]
	for p.boxes[vm] == first && first != nil && !p.closed {
		ended, end := p.ending(first)
		p.mu.Unlock()
		if end != nil {
			if err := end(); err != nil {
				return fmt.Errorf("kill vm %s: %w", vm, err)
			}
		}
		select {
		case <-ended:
		case <-ctx.Done():
			return fmt.Errorf("kill vm %s: %w", vm, context.Cause(ctx))
		}
		p.mu.Lock()
	}
	closed := p.closed
	var going []*sandbox
	for s, name := range p.dying {
		if name == vm {
			going = append(going, s)
		}
	}
	p.mu.Unlock()
	for _, s := range going {
		select {
		case <-s.gone:
		case <-ctx.Done():
			return fmt.Errorf("kill vm %s: %w", vm, context.Cause(ctx))
		}
	}
	if closed {
		return errClosed
	}
	return nil
}

// ending begins, or continues, the end of a slot: it returns what to wait for,
// and what to do before that without p.mu, which the caller holds.
func (p *Provider) ending(b *slot) (ended <-chan struct{}, end func() error) {
	select {
	case <-b.done:
	default:
		b.cancel(errKilled)
		return b.done, nil
	}
	if h := b.held; h != nil {
		h.kill()
		return h.done, nil
	}
	_, release := p.hold(b, func(error) {})
	s, h := b.sandbox, b.held
	return h.done, func() error {
		defer release()
		if s == nil {
			return p.remove(b)
		}
		s.bury(errKilled)
		return nil
	}
}
