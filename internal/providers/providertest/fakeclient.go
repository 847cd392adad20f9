package providertest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
)

// fakeClient is one client of a Fake.
type fakeClient struct {
	f      *Fake
	id     int
	close  sync.Once
	closed chan struct{}
}

// fakeBox is one sandbox. All but the channels is guarded by Fake.mu.
type fakeBox struct {
	sandbox providers.Sandbox
	life    *Life
	turn    chan struct{} // holds one token: batches take turns
	ready   chan struct{} // closed when it runs
	dead    chan struct{} // closed when it is gone
	why     string
	expiry  *time.Timer

	revision  int // rises with every action that changes the picture
	cursor    computer.Point
	url       string
	text      string
	clipboard string
	held      map[string]bool
}

func (b *fakeBox) end() end {
	return end{b.dead, func() error { return fmt.Errorf("vm %s %s: %w", b.sandbox.VM, b.why, providers.ErrLost) }}
}

func (c *fakeClient) end() end {
	return end{c.closed, func() error { return fmt.Errorf("client closed: %w", providers.ErrUnavailable) }}
}

func (f *Fake) end3() end {
	return end{f.stop, func() error { return fmt.Errorf("server shut down: %w", providers.ErrUnavailable) }}
}

// begin runs what is to befall a call before its effect and returns what is to
// befall it afterwards.
func (c *fakeClient) begin(ctx context.Context, call Call, b *fakeBox) (Injection, error) {
	call.Client = c.id
	in := c.f.befall(call)
	ends := []end{c.end(), c.f.end3()}
	if b != nil {
		ends = []end{b.end(), c.end(), c.f.end3()}
	}
	if err := pass(ctx, in.Latency, ends...); err != nil {
		return in, err
	}
	if in.Hang {
		return in, hang(ctx, ends...)
	}
	if in.Crash {
		c.f.Crash(call.VM)
		if b != nil {
			return in, b.end().err()
		}
	}
	return in, in.Err
}

// answer runs what is to befall a call after its effect.
func (c *fakeClient) answer(ctx context.Context, in Injection, vm string) error {
	if in.CrashAfter {
		c.f.Crash(vm)
	}
	if err := pass(ctx, in.AnswerAfter, c.end(), c.f.end3()); err != nil {
		return err
	}
	return in.AnswerErr
}

func (c *fakeClient) Info() providers.Info {
	info := c.f.info
	info.Capabilities = slices.Clone(info.Capabilities)
	return info
}

func (c *fakeClient) has(capability string) bool {
	return slices.Contains(c.f.info.Capabilities, capability)
}

func (c *fakeClient) Health(ctx context.Context) (providers.Health, error) {
	in, err := c.begin(ctx, Call{Method: "Health"}, nil)
	if err != nil {
		return providers.Health{}, err
	}
	c.f.mu.Lock()
	id := c.f.bootID
	if id == "" {
		id = fmt.Sprintf("boot-%d", c.f.boots)
	}
	c.f.mu.Unlock()
	return providers.Health{BootID: id}, c.answer(ctx, in, "")
}

func (c *fakeClient) Get(ctx context.Context, vm string) (providers.Sandbox, error) {
	in, err := c.begin(ctx, Call{Method: "Get", VM: vm}, nil)
	if err != nil {
		return providers.Sandbox{}, err
	}
	b, err := c.f.box(vm)
	if err != nil {
		return providers.Sandbox{}, err
	}
	return c.f.snapshot(b), c.answer(ctx, in, vm)
}

func (c *fakeClient) List(ctx context.Context) ([]providers.Sandbox, error) {
	in, err := c.begin(ctx, Call{Method: "List"}, nil)
	if err != nil {
		return nil, err
	}
	c.f.mu.Lock()
	out := make([]providers.Sandbox, 0, len(c.f.boxes))
	for _, b := range c.f.boxes {
		out = append(out, b.sandbox)
	}
	c.f.mu.Unlock()
	slices.SortFunc(out, func(a, b providers.Sandbox) int { return strings.Compare(a.VM, b.VM) })
	if err := c.answer(ctx, in, ""); err != nil {
		return nil, err
	}
	return out, nil
}

func (c *fakeClient) Kill(ctx context.Context, vm string) error {
	in, err := c.begin(ctx, Call{Method: "Kill", VM: vm}, nil)
	if err != nil {
		return err
	}
	c.f.mu.Lock()
	if b := c.f.boxes[vm]; b != nil {
		c.f.end(b, "killed")
	}
	c.f.mu.Unlock()
	return c.answer(ctx, in, vm)
}

func (c *fakeClient) SetTimeout(ctx context.Context, vm string, d time.Duration) error {
	in, err := c.begin(ctx, Call{Method: "SetTimeout", VM: vm}, nil)
	if err != nil {
		return err
	}
	c.f.mu.Lock()
	b := c.f.boxes[vm]
	if b != nil {
		c.f.expire(b, d)
	}
	c.f.mu.Unlock()
	if b == nil {
		return notFound(vm)
	}
	return c.answer(ctx, in, vm)
}

func (c *fakeClient) Pause(ctx context.Context, vm string) error {
	return c.setState(ctx, "Pause", vm, providers.Paused)
}

func (c *fakeClient) Resume(ctx context.Context, vm string) error {
	return c.setState(ctx, "Resume", vm, providers.Running)
}

func (c *fakeClient) setState(ctx context.Context, method, vm string, state providers.State) error {
	if !c.has(providers.PauseCap) {
		return fmt.Errorf("%s: %w", method, providers.ErrUnsupported)
	}
	in, err := c.begin(ctx, Call{Method: method, VM: vm}, nil)
	if err != nil {
		return err
	}
	b, err := c.f.box(vm)
	if err != nil {
		return err
	}
	c.f.set(func() { b.sandbox.State = state })
	return c.answer(ctx, in, vm)
}

func (c *fakeClient) Snapshot(ctx context.Context, vm string) (string, error) {
	name, err := c.name(ctx, "Snapshot", vm, providers.Snapshot, "snapshot-")
	if err != nil {
		return "", err
	}
	b, err := c.f.box(vm)
	if err != nil {
		return "", err
	}
	c.f.set(func() { c.f.templates[name] = b.sandbox.Tenant })
	return name, nil
}

func (c *fakeClient) StreamURL(ctx context.Context, vm string) (string, error) {
	return c.name(ctx, "StreamURL", vm, providers.Stream, "fake://stream/")
}

// name answers the calls that give a sandbox's vm id with a prefix.
func (c *fakeClient) name(ctx context.Context, method, vm, capability, prefix string) (string, error) {
	if !c.has(capability) {
		return "", fmt.Errorf("%s: %w", method, providers.ErrUnsupported)
	}
	in, err := c.begin(ctx, Call{Method: method, VM: vm}, nil)
	if err != nil {
		return "", err
	}
	if _, err := c.f.box(vm); err != nil {
		return "", err
	}
	return prefix + vm, c.answer(ctx, in, vm)
}

func (c *fakeClient) Close() error {
	c.close.Do(func() { close(c.closed) })
	return nil
}

// box finds a sandbox that runs or is paused. One that starts counts as found.
func (f *Fake) box(vm string) (*fakeBox, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if b := f.boxes[vm]; b != nil {
		return b, nil
	}
	return nil, notFound(vm)
}

// awake is box for calls that a paused sandbox refuses.
func (f *Fake) awake(vm string) (*fakeBox, error) {
	b, err := f.box(vm)
	if err == nil && f.snapshot(b).State == providers.Paused {
		return nil, fmt.Errorf("vm %s: %w", vm, providers.ErrPaused)
	}
	return b, err
}

func notFound(vm string) error { return fmt.Errorf("vm %s: %w", vm, providers.ErrNotFound) }

func (f *Fake) snapshot(b *fakeBox) providers.Sandbox {
	f.mu.Lock()
	defer f.mu.Unlock()
	return b.sandbox
}

// expire sets a box's own end of life. The caller holds f.mu.
func (f *Fake) expire(b *fakeBox, d time.Duration) {
	if b.expiry != nil {
		b.expiry.Stop()
	}
	b.sandbox.ExpiresAt = time.Now().Add(d)
	b.expiry = time.AfterFunc(d, func() {
		f.set(func() { f.end(b, "expired") })
	})
}

// Create is idempotent by (vm, fence) also while the first call is at work:
// the second waits for the same sandbox.
func (c *fakeClient) Create(ctx context.Context, spec providers.Spec) (providers.Sandbox, error) {
	if spec.Display == (computer.Display{}) {
		spec.Display = computer.DefaultDisplay
	}
	if err := spec.Display.Validate(); err != nil {
		return providers.Sandbox{}, fmt.Errorf("create %q: %w: %w", spec.VM, providers.ErrInvalid, err)
	}
	if spec.VM == "" {
		return providers.Sandbox{}, fmt.Errorf("create without a vm id: %w", providers.ErrInvalid)
	}
	b, mine, err := c.f.reserve(spec)
	if err != nil {
		return providers.Sandbox{}, err
	}
	if !mine {
		return c.join(ctx, b, spec)
	}
	if !c.f.isDetached() {
		return c.build(ctx, b, spec)
	}
	type answer struct {
		s   providers.Sandbox
		err error
	}
	done := make(chan answer, 1)
	c.f.work.Go(func() {
		s, err := c.build(context.WithoutCancel(ctx), b, spec)
		done <- answer{s, err}
	})
	select {
	case a := <-done:
		return a.s, a.err
	case <-ctx.Done():
		return providers.Sandbox{}, context.Cause(ctx)
	case <-c.closed:
		return providers.Sandbox{}, c.end().err()
	}
}

func (f *Fake) isDetached() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.detached
}

// reserve takes up capacity, or finds the sandbox of the same vm and fence.
func (f *Fake) reserve(spec providers.Spec) (b *fakeBox, mine bool, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stopped {
		return nil, false, f.end3().err()
	}
	if err := f.checkEpoch(spec.LeaseEpoch); err != nil {
		return nil, false, err
	}
	if b := f.boxes[spec.VM]; b != nil {
		if b.sandbox.Fence != spec.Fence {
			return nil, false, fmt.Errorf("vm %s exists with fence %d, asked for %d: %w", spec.VM, b.sandbox.Fence, spec.Fence, providers.ErrConflict)
		}
		return b, false, nil
	}
	if f.capacity > 0 && len(f.boxes) >= f.capacity {
		return nil, false, fmt.Errorf("%d sandboxes: %w", len(f.boxes), providers.ErrFull)
	}
	if tenant, ok := f.templates[spec.Template]; spec.Template != "" && (!ok || tenant != spec.Tenant) {
		return nil, false, fmt.Errorf("there is no template %q: %w", spec.Template, providers.ErrInvalid)
	}
	now := time.Now()
	life := &Life{VM: spec.VM, Fence: spec.Fence, Epoch: spec.LeaseEpoch, Tenant: spec.Tenant, Role: spec.Role, Template: spec.Template, Created: now}
	b = &fakeBox{
		sandbox: providers.Sandbox{
			ID: fmt.Sprintf("fake-%d", len(f.lives)+1), VM: spec.VM, Fence: spec.Fence, Tenant: spec.Tenant, Role: spec.Role,
			Owner: spec.Owner, Session: spec.Session, Server: f.server, State: providers.Starting, Display: spec.Display,
			Capabilities: slices.Clone(f.info.Capabilities), CreatedAt: now,
		},
		life: life,
		turn: make(chan struct{}, 1), ready: make(chan struct{}), dead: make(chan struct{}),
		cursor: computer.Point{X: spec.Display.Width / 2, Y: spec.Display.Height / 2},
		url:    "about:blank",
		held:   map[string]bool{},
	}
	b.turn <- struct{}{}
	f.boxes[spec.VM] = b
	f.lives = append(f.lives, life)
	f.peak = max(f.peak, len(f.boxes))
	return b, true, nil
}

// build makes a reserved sandbox ready; when it fails nothing stays behind.
func (c *fakeClient) build(ctx context.Context, b *fakeBox, spec providers.Spec) (providers.Sandbox, error) {
	in, err := c.begin(ctx, Call{Method: "Create", VM: spec.VM, Fence: spec.Fence, Epoch: spec.LeaseEpoch}, b)
	c.f.mu.Lock()
	if err == nil && c.f.boxes[spec.VM] != b {
		err = b.end().err()
	}
	if err != nil {
		c.f.end(b, "createFailed")
		c.f.mu.Unlock()
		return providers.Sandbox{}, err
	}
	b.sandbox.State = providers.Running
	b.life.Ready = time.Now()
	if spec.Timeout > 0 {
		c.f.expire(b, spec.Timeout)
	}
	s := b.sandbox
	close(b.ready)
	c.f.mu.Unlock()
	return s, c.answer(ctx, in, spec.VM)
}

func (c *fakeClient) join(ctx context.Context, b *fakeBox, spec providers.Spec) (providers.Sandbox, error) {
	in, err := c.begin(ctx, Call{Method: "Create", VM: spec.VM, Fence: spec.Fence, Epoch: spec.LeaseEpoch}, b)
	if err != nil {
		return providers.Sandbox{}, err
	}
	select {
	case <-b.ready:
		return c.f.snapshot(b), c.answer(ctx, in, spec.VM)
	case <-b.dead:
		return providers.Sandbox{}, b.end().err()
	case <-c.closed:
		return providers.Sandbox{}, c.end().err()
	case <-ctx.Done():
		return providers.Sandbox{}, context.Cause(ctx)
	}
}
