package sandboxd

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"berth/internal/sandboxd/firecracker"
)

// Pauser is a Guest that can be paused, and kept as a template. The three calls
// run one at a time; each breaks off every connection to the agent.
type Pauser interface {
	// Pause stops the guest, keeps its state and frees its memory. One that is
	// paused stays so. After an error it goes on, unless it is gone.
	Pause(ctx context.Context) error
	// Resume continues it; it returns when the agent answers and has the time.
	Resume(ctx context.Context) error
	// Keep writes its state to files and has it go on as it was.
	Keep(ctx context.Context, to firecracker.Snapshot) error
	Paused() bool
}

var (
	errPaused  = errors.New("the sandbox is paused; resume it first")
	errBusy    = errors.New("the sandbox is being paused, resumed or kept; or a command in it did not end in time for that")
	errNoStore = errors.New("the snapshot was not begun")
	errCannot  = errors.New("the sandboxes of this server cannot be paused or kept: only microVMs can (--machine firecracker)")
)

// Limits of time.
const (
	quietWithin = 30 * time.Second // for calls under way to end before a pause
	pauseWithin = 2 * time.Minute  // for the pause, or what else is done, itself
)

// paused tells whether the guest of a box is paused.
func (b *box) paused() bool {
	p, ok := b.guest.(Pauser)
	return ok && p.Paused()
}

// use is called before a call to the agent, and done after it: a pause waits for
// the calls under way, and refuses new ones.
func (b *box) use() (done func(), err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.paused() {
		return nil, errPaused
	}
	if b.held {
		return nil, errBusy
	}
	b.users++
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.users--; b.users == 0 && b.quiet != nil {
			close(b.quiet)
			b.quiet = nil
		}
	}, nil
}

// hold keeps calls away from the agent until release, and waits for those under
// way. Viewers are sent away.
func (b *box) hold(ctx context.Context) (release func(), err error) {
	b.mu.Lock()
	if b.held {
		b.mu.Unlock()
		return nil, errBusy
	}
	b.held = true
	b.dismiss()
	quiet := make(chan struct{})
	if b.users == 0 {
		close(quiet)
	} else {
		b.quiet = quiet
	}
	b.mu.Unlock()
	release = func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.held, b.quiet = false, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, quietWithin, errBusy)
	defer cancel()
	select {
	case <-quiet:
		return release, nil
	case <-b.gone:
		err = errLost
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	release()
	return nil, err
}

// still runs f while no call to the agent is under way, if the host can hold what
// f needs. It goes on when the caller goes away, so that a sandbox is never left
// half way.
func (s *Server) still(r *http.Request, of func(*box) need, f func(context.Context, *box, Pauser) error) error {
	b, err := s.running(r.PathValue("id"))
	if err != nil {
		return err
	}
	guest, ok := b.guest.(Pauser)
	if !ok {
		return errCannot
	}
	release, err := b.hold(r.Context())
	if err != nil {
		return err
	}
	defer release()
	free, err := s.promise(of(b))
	if errors.Is(err, errNoDisk) {
		err = fmt.Errorf("%w: %w", errNoStore, err)
	}
	if err != nil {
		return err
	}
	defer free()
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(r.Context()), pauseWithin, errors.New("it took longer than "+pauseWithin.String()))
	defer cancel()
	err = f(ctx, b, guest)
	select {
	case <-b.guest.Gone():
		return b.explain(ctx, fmt.Errorf("%w: %w", errAgent, errors.Join(err, errLost)))
	default:
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.rec.Guest = b.guest.Identity()
	return errors.Join(err, writeRecord(b.dir, b.rec))
}

func (s *Server) postPause(w http.ResponseWriter, r *http.Request) error {
	err := s.still(r, s.writing, func(ctx context.Context, _ *box, g Pauser) error { return g.Pause(ctx) })
	if err == nil {
		w.WriteHeader(http.StatusNoContent)
	}
	return err
}

func (s *Server) postResume(w http.ResponseWriter, r *http.Request) error {
	err := s.still(r, s.waking, func(ctx context.Context, _ *box, g Pauser) error { return g.Resume(ctx) })
	if err == nil {
		w.WriteHeader(http.StatusNoContent)
	}
	return err
}

// postSnapshot keeps a sandbox as a template of its tenant's.
func (s *Server) postSnapshot(w http.ResponseWriter, r *http.Request) error {
	name := snapshotPrefix + randomHex(8)
	err := s.still(r, s.writing, func(ctx context.Context, b *box, g Pauser) error {
		rec := b.record()
		return s.machine.(templater).Templates().keep(ctx, name, templateInfo{Display: rec.Display, Tenant: rec.Metadata["tenant"]}, g.Keep)
	})
	if err == nil {
		s.json(w, http.StatusCreated, map[string]string{"snapshotID": name})
	}
	return err
}

// snapshotPrefix begins the names of templates that were kept by call.
const snapshotPrefix = "snapshot-"

// templater is a Machine whose guests can be kept as templates.
type templater interface{ Templates() *templates }

// knows completes an order that names a template, or says what is wrong with it.
// A template of another tenant is none.
func (s *Server) knows(o *order, displayGiven bool) error {
	if o.template == DefaultTemplate {
		return nil
	}
	unknown := badInput("templateID: unknown template %.64q; known is %s, and what a snapshot of the same tenant was named", o.template, DefaultTemplate)
	m, ok := s.machine.(templater)
	if !ok || !strings.HasPrefix(o.template, snapshotPrefix) {
		return unknown
	}
	info, err := m.Templates().find(o.template)
	if errors.Is(err, errNoTemplate) || err == nil && info.Tenant != o.metadata["tenant"] {
		return unknown
	}
	if err != nil {
		return err
	}
	if displayGiven && o.display != info.Display {
		return badInput("display: template %s has %d×%d", o.template, info.Display.Width, info.Display.Height)
	}
	o.display = info.Display
	return nil
}

func (s *Server) deleteTemplate(w http.ResponseWriter, r *http.Request) error {
	m, ok := s.machine.(templater)
	if !ok {
		return errCannot
	}
	name := r.PathValue("id")
	if !strings.HasPrefix(name, snapshotPrefix) {
		return errNoTemplate
	}
	if err := m.Templates().remove(name); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
