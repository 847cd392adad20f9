package playwright

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
)

// DefaultSpares is how many browsers are kept warm unless Options says
// otherwise. Each takes about 200 MB of memory.
const DefaultSpares = 2

// capabilities are what this provider declares, sorted. It is a browser, not a
// desktop: no shell, no windows, no files that an action could reach.
var capabilities = []providers.Capability{providers.Browser, providers.Clipboard, providers.PauseCap, providers.Snapshot}

// Options configure a provider.
type Options struct {
	ServerID      string       // goes into every Sandbox
	StateDir      string       // survives the process; see the package doc. "": a temporary one, which needs Ephemeral
	Spares        int          // browsers kept warm; 0: DefaultSpares, negative: none
	MaxContainers int          // sandboxes at most; 0: no limit
	Ephemeral     bool         // the browsers die with this process, however it ends
	Executable    string       // the browser; "": $BERTH_CHROMIUM, or the first of chromium, chromium-browser, google-chrome
	Logger        *slog.Logger // nil: none

	pingEvery, pingWithin time.Duration // how the driver is watched; for tests
	edge                  func(string)  // called between the steps of a pause, a resume and a snapshot; for tests
}

// Provider holds sandboxes that are browsers on this machine. See the package
// documentation for what it guarantees.
type Provider struct {
	opts     Options
	log      *slog.Logger
	launcher *launcher
	state    *state
	kept     *templates
	bootID   string
	launches chan struct{} // bounds browser starts at the same time

	ctx    context.Context // ends with Close; not a caller's
	cancel context.CancelCauseFunc
	work   tasks

	driverMu      sync.Mutex
	driver        *driver
	driverChanged chan struct{}

	mu     sync.Mutex
	closed bool
	boxes  map[string]*slot // by vm
	spares []*sandbox       // warm, oldest first
	dying  map[*sandbox]string
	ports  map[string]int // debugging ports of all browsers here; see guard
	quiet  chan struct{}  // closed and renewed when a dying browser is gone
	epoch  uint64         // the highest lease epoch seen
	refill chan struct{}  // tells the filler to look
}

// slot is a vm that takes up capacity. When done is closed and err is nil, one
// of sandbox and paused is set. Provider.mu guards all that changes after that.
type slot struct {
	fence   uint64
	handle  providers.Sandbox // while it starts
	sandbox *sandbox          // while it runs
	paused  *paused           // while it does not
	err     error
	done    chan struct{}
	cancel  context.CancelCauseFunc

	users int           // calls in the sandbox
	quiet chan struct{} // closed when users becomes 0, if somebody waits for that
	held  *hold         // keeps calls away
}

var _ providers.Provider = (*Provider)(nil)

// New starts a provider: it takes the lock of the state directory (waiting for
// another process that has it until ctx ends), installs the driver if it is
// missing, takes over the browsers that are recorded and live, removes the
// rest, and starts to warm spares. The errors say what is missing and how to
// get it.
func New(ctx context.Context, opts Options) (*Provider, error) {
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	if opts.Spares == 0 {
		opts.Spares = DefaultSpares
	}
	if opts.edge == nil {
		opts.edge = func(string) {}
	}
	if opts.pingEvery == 0 {
		opts.pingEvery, opts.pingWithin = 5*time.Second, 10*time.Second
	}
	if opts.StateDir == "" && !opts.Ephemeral {
		return nil, errors.New("a StateDir is needed, so that a later process finds the browsers, or Ephemeral")
	}
	executable, err := findExecutable(opts.Executable)
	if err != nil {
		return nil, err
	}
	if err := findNode(); err != nil {
		return nil, err
	}
	p := &Provider{
		opts: opts, log: opts.Logger.With("server", opts.ServerID), launches: make(chan struct{}, max(2, runtime.NumCPU())),
		driverChanged: make(chan struct{}), boxes: map[string]*slot{}, dying: map[*sandbox]string{}, ports: map[string]int{}, quiet: make(chan struct{}),
		refill: make(chan struct{}, 1),
	}
	if p.state, err = openState(ctx, opts.StateDir); err != nil {
		return nil, err
	}
	if p.kept, err = openTemplates(filepath.Join(p.state.dir, "templates")); err != nil {
		return nil, errors.Join(err, p.state.close())
	}
	p.ctx, p.cancel = context.WithCancelCause(context.Background())
	p.launcher = newLauncher(executable, opts.Ephemeral)
	if err := p.begin(ctx); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// begin does New's slow part: driver, adoption, spares.
func (p *Provider) begin(ctx context.Context) error {
	d, err := startDriver(ctx)
	if err != nil && !driverInstalled() {
		p.log.Info("installing Playwright's driver")
		if err = EnsureDriver(ctx, nil); err == nil {
			d, err = startDriver(ctx)
		}
	}
	if err != nil {
		return err
	}
	p.setDriver(d)
	p.work.Go(func() { p.supervise(p.ctx, d) })
	if err := p.adoptAll(ctx); err != nil {
		return err
	}
	p.work.Go(func() { p.fill(p.ctx) })
	return nil
}

// adoptAll takes over what an earlier process left and removes what is dead.
func (p *Provider) adoptAll(ctx context.Context) error {
	dirs, err := p.state.browsers()
	if err != nil {
		return fmt.Errorf("read state directory: %w", err)
	}
	recorded, shelved, adopted := 0, 0, []*sandbox{}
	for _, dir := range dirs {
		var rec record
		err := readJSON(filepath.Join(dir, recordFile), &rec)
		if err == nil && rec.VM != "" {
			recorded++
		}
		if err == nil && rec.VM != "" && rec.Version == recordVersion && !p.opts.Ephemeral && isPaused(dir) {
			if err := p.shelf(ctx, dir, rec); err != nil {
				return fmt.Errorf("take over paused vm %s: %w", rec.VM, err)
			}
			shelved++
			continue
		}
		var proc *process
		if err == nil && rec.VM != "" && rec.Version == recordVersion && !p.opts.Ephemeral {
			proc, err = adopt(rec.PID, rec.Started, rec.Endpoint, dir)
		}
		if proc == nil {
			p.log.Info("removing a browser of an earlier process", "vm", rec.VM, "reason", err)
			if err := errors.Join(reap(ctx, dir), discard(dir)); err != nil {
				return fmt.Errorf("remove an earlier browser: %w", err)
			}
			continue
		}
		s := newSandbox(p, dir, proc, rec)
		s.ready = true
		done := make(chan struct{})
		close(done)
		p.boxes[rec.VM] = &slot{fence: rec.Fence, sandbox: s, done: done, cancel: func(error) {}}
		adopted = append(adopted, s)
	}
	if p.bootID, err = p.state.bootID(recorded > 0 && len(adopted)+shelved == 0 || p.opts.Ephemeral); err != nil {
		return err
	}
	for _, s := range adopted {
		p.log.Info("taking over a browser", "vm", s.vm(), "pid", s.proc.pid)
		p.work.Go(func() { s.keep(p.ctx) })
	}
	waitCtx, cancel := context.WithTimeout(ctx, 5*time.Second) // those that hang are not waited for longer
	defer cancel()
	for _, s := range adopted {
		if _, err := s.link(waitCtx); err != nil {
			p.log.Warn("taken over, not connected yet", "vm", s.vm(), "error", err)
		}
	}
	return nil
}

// Close leaves the sandboxes running, unless they are ephemeral; it kills the
// spares, stops the driver, and releases the state directory. Calls in flight
// end with ErrUnavailable. It is idempotent.
func (p *Provider) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	p.closed = true
	doomed := slices.Clone(p.spares)
	for _, b := range p.boxes {
		b.cancel(errClosed)
		if b.sandbox != nil && p.opts.Ephemeral {
			doomed = append(doomed, b.sandbox)
		}
	}
	p.mu.Unlock()
	p.cancel(errClosed)
	for _, s := range doomed {
		s.bury(errKilled)
	}
	if !p.work.wait(time.Minute) { // the supervisor stops the driver, which ends every call in flight
		p.log.Error("the provider's own work does not end")
	}
	var errs []error
	for _, b := range p.slots() {
		<-b.done
		p.mu.Lock()
		s, shelf := b.sandbox, b.paused
		p.mu.Unlock()
		switch {
		case s != nil && p.opts.Ephemeral:
			s.bury(errKilled) // also one that was just resumed
		case s != nil && !s.isDead():
			if !s.work.wait(callsEndWithin) {
				p.log.Error("calls hang without a driver", "vm", s.vm())
			}
			s.proc.unwatch()
		case shelf != nil && p.opts.Ephemeral:
			errs = append(errs, discard(shelf.dir))
		}
	}
	p.awaitDying(func() bool { return len(p.dying) == 0 })
	p.launcher.close()
	return errors.Join(append(errs, p.state.close())...)
}

var errClosed = fmt.Errorf("provider closed: %w", providers.ErrUnavailable)

// Info tells what the server can do.
func (p *Provider) Info() providers.Info {
	return providers.Info{Kind: "playwright", Capabilities: slices.Clone(capabilities), Displays: true}
}

// Health answers when the driver does and the browser's program is there. The
// boot id changes after a reboot, and when every sandbox was found dead at the
// start.
func (p *Provider) Health(ctx context.Context) (providers.Health, error) {
	if p.ctx.Err() != nil {
		return providers.Health{}, errClosed
	}
	if _, err := os.Stat(p.launcher.executable); err != nil {
		return providers.Health{}, fmt.Errorf("the browser's program: %w: %w", err, providers.ErrUnavailable)
	}
	d, err := p.awaitDriver(ctx)
	if err == nil {
		err = d.ping(ctx)
	}
	if err != nil {
		return providers.Health{}, fmt.Errorf("Playwright's driver: %w: %w", err, providers.ErrUnavailable)
	}
	return providers.Health{BootID: p.bootID}, nil
}

// Get returns one sandbox.
func (p *Provider) Get(ctx context.Context, vm string) (providers.Sandbox, error) {
	if err := context.Cause(ctx); err != nil {
		return providers.Sandbox{}, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	b := p.boxes[vm]
	if b == nil {
		return providers.Sandbox{}, notFound(vm)
	}
	return p.describe(b), nil
}

// List returns the sandboxes in the order of their vm ids. Spares are not
// among them.
func (p *Provider) List(ctx context.Context) ([]providers.Sandbox, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	if p.ctx.Err() != nil {
		return nil, errClosed
	}
	p.mu.Lock()
	out := make([]providers.Sandbox, 0, len(p.boxes))
	for _, b := range p.boxes {
		out = append(out, p.describe(b))
	}
	p.mu.Unlock()
	slices.SortFunc(out, func(a, b providers.Sandbox) int { return strings.Compare(a.VM, b.VM) })
	return out, nil
}

func (p *Provider) slots() []*slot {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]*slot, 0, len(p.boxes))
	for _, b := range p.boxes {
		out = append(out, b)
	}
	return out
}

// describe tells what a slot has. The caller holds p.mu.
func (p *Provider) describe(b *slot) providers.Sandbox {
	switch {
	case b.sandbox != nil:
		return b.sandbox.handle()
	case b.paused != nil:
		return b.paused.rec.handle(p.opts.ServerID, providers.Paused)
	}
	h := b.handle
	h.Capabilities = slices.Clone(h.Capabilities)
	return h
}

func notFound(vm string) error { return fmt.Errorf("vm %s: %w", vm, providers.ErrNotFound) }

// lookup returns the slot of a sandbox that is ready, or paused. The caller
// holds p.mu.
func (p *Provider) lookup(vm string) (*slot, error) {
	if p.closed {
		return nil, errClosed
	}
	b := p.boxes[vm]
	if b == nil {
		return nil, notFound(vm)
	}
	if b.sandbox == nil && b.paused == nil {
		return nil, fmt.Errorf("vm %s is not ready yet: %w", vm, providers.ErrNotFound)
	}
	return b, nil
}

// forget takes a sandbox off the inventory and declares it dead, in one step:
// whoever learns that it is dead no longer finds it. Its process is about to go.
func (p *Provider) forget(s *sandbox, vm string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(s.dead)
	p.dying[s] = vm
	if b := p.boxes[vm]; b != nil && b.sandbox == s {
		delete(p.boxes, vm)
	}
	p.spares = slices.DeleteFunc(p.spares, func(o *sandbox) bool { return o == s })
}

// buried notes that a dying browser is gone.
func (p *Provider) buried(s *sandbox) {
	p.mu.Lock()
	delete(p.dying, s)
	if p.ports[s.proc.port()]--; p.ports[s.proc.port()] == 0 {
		delete(p.ports, s.proc.port())
	}
	close(p.quiet)
	p.quiet = make(chan struct{})
	p.mu.Unlock()
	p.wakeFiller()
}

// awaitDying waits until reached, which is called with p.mu held, is true.
func (p *Provider) awaitDying(reached func() bool) {
	for {
		p.mu.Lock()
		ok, quiet := reached(), p.quiet
		p.mu.Unlock()
		if ok {
			return
		}
		<-quiet
	}
}

// SetTimeout answers nil: a browser has no end of life of its own. Berth's
// clocks, and the reaper that compares inventories, are what ends it.
func (p *Provider) SetTimeout(ctx context.Context, vm string, _ time.Duration) error {
	_, err := p.Get(ctx, vm)
	return err
}

// StreamURL is not supported.
func (p *Provider) StreamURL(context.Context, string) (string, error) {
	return "", unsupported("a live view")
}

// Recall is not supported: a browser keeps no record of what was done to it.
func (p *Provider) Recall(context.Context, string, string) (providers.Recollection, error) {
	return providers.Recollection{}, unsupported("recalling a batch")
}

func unsupported(what string) error {
	return fmt.Errorf("%s: a Playwright browser cannot: %w", what, providers.ErrUnsupported)
}

var vmID = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// browserVariables are the parts of Spec.Env that a browser has a use for.
var browserVariables = []string{"TZ", "LANG", "LANGUAGE"}

// checkSpec refuses what cannot be made, and fills in the default display.
func checkSpec(spec *providers.Spec) error {
	if spec.Display == (computer.Display{}) {
		spec.Display = computer.DefaultDisplay
	}
	if err := spec.Display.Validate(); err != nil {
		return fmt.Errorf("%w: %w", providers.ErrInvalid, err)
	}
	if !vmID.MatchString(spec.VM) {
		return fmt.Errorf("%w: vm id %q", providers.ErrInvalid, spec.VM)
	}
	for name := range spec.Env {
		if !slices.Contains(browserVariables, name) {
			return unsupported(fmt.Sprintf("env %s (of the environment only %s mean something to a browser)", name, strings.Join(browserVariables, ", ")))
		}
	}
	return nil
}
