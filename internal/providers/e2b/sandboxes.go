package e2b

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"image"
	"image/png"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
	"berth/internal/providers/httpapi"
)

var vmID = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// metadata keys that are this provider's own; a Spec's of the same name give way.
const (
	metaServer  = "server"
	metaVM      = "vmId"
	metaFence   = "fence"
	metaTenant  = "tenant"
	metaRole    = "role"
	metaOwner   = "owner"
	metaSession = "session"
	metaDisplay = "display"
)

// listed is a sandbox as E2B describes it, as far as it is used.
type listed struct {
	SandboxID string            `json:"sandboxID"`
	State     string            `json:"state"`
	Metadata  map[string]string `json:"metadata"`
	StartedAt time.Time         `json:"startedAt"`
	EndAt     time.Time         `json:"endAt"`
	Token     string            `json:"envdAccessToken"` // not in lists
	Domain    string            `json:"domain"`          // not in lists
}

// box is a sandbox that this provider has met.
type box struct {
	place
	vm      string
	fence   uint64
	display computer.Display
	turn    chan struct{}   // holds one token: batches run one at a time
	left    string          // key of a batch that may still run; whoever has the turn has it
	gone    context.Context // ends with ErrLost when the sandbox is known to be gone
	end     context.CancelCauseFunc
	making  bool // its create is under way; guarded by Provider.mu
	ready   bool // its desktop has been ready; guarded by Provider.mu
}

// making is a create under way.
type making struct {
	cancel context.CancelCauseFunc
	done   chan struct{}
}

var errLost = fmt.Errorf("the sandbox is gone: %w", providers.ErrLost)

// sandbox reads a description. One without this provider's metadata is not its
// own, and ok is false.
func (p *Provider) sandbox(d listed) (s providers.Sandbox, ok bool, err error) {
	if d.Metadata[metaVM] == "" || d.Metadata[metaFence] == "" || d.Metadata[metaServer] != p.opts.ServerID {
		return s, false, nil
	}
	fence, err := strconv.ParseUint(d.Metadata[metaFence], 10, 64)
	states := map[string]providers.State{"running": providers.Running, "paused": providers.Paused}
	if err != nil || d.SandboxID == "" || d.StartedAt.IsZero() || states[d.State] == "" || !safeID(d.SandboxID) {
		return s, false, fmt.Errorf("sandbox %.70q is not described as the API says: %w", d.SandboxID, providers.ErrUnavailable)
	}
	s = providers.Sandbox{
		ID: d.SandboxID, VM: d.Metadata[metaVM], Fence: fence, Tenant: d.Metadata[metaTenant], Role: d.Metadata[metaRole], Owner: d.Metadata[metaOwner],
		Session: d.Metadata[metaSession], Server: p.opts.ServerID, State: states[d.State], Display: computer.DefaultDisplay, Capabilities: slices.Clone(p.info.Capabilities),
		CreatedAt: d.StartedAt, ExpiresAt: d.EndAt,
	}
	if _, err := fmt.Sscanf(d.Metadata[metaDisplay], "%dx%d", &s.Display.Width, &s.Display.Height); err != nil || s.Display.Validate() != nil {
		s.Display = computer.DefaultDisplay
	}
	if s.State == providers.Paused {
		s.ExpiresAt = time.Time{} // its clock stands still
	}
	return s, true, nil
}

// safeID keeps what is no id out of hosts and paths.
func safeID(id string) bool {
	return id != "" && len(id) <= 128 && !strings.ContainsFunc(id, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '_'
	})
}

// maxPages bounds a list: 100 sandboxes each, more than any plan allows.
const maxPages = 100

// list pages through the sandboxes with the given metadata.
func (p *Provider) list(ctx context.Context, metadata map[string]string) ([]listed, error) {
	filter := url.Values{}
	for name, value := range metadata { // the filter's names and values are encoded once more
		filter.Set(url.QueryEscape(name), url.QueryEscape(value))
	}
	q := url.Values{"limit": {"100"}, "state": {"running,paused"}, "metadata": {filter.Encode()}}
	var out []listed
	seen := map[string]bool{}
	for range maxPages {
		page, next, err := p.page(ctx, q)
		if err != nil {
			return nil, err
		}
		for _, d := range page {
			if !seen[d.SandboxID] { // pages shift while sandboxes come and go
				seen[d.SandboxID] = true
				out = append(out, d)
			}
		}
		if next == "" {
			return out, nil
		}
		q.Set("nextToken", next)
	}
	return nil, fmt.Errorf("GET /v2/sandboxes: more than %d pages: %w", maxPages, providers.ErrUnavailable)
}

// page asks for one page of a list. A refusal is the server's fault: a list that
// is "not found" must not be taken for "there is none".
func (p *Provider) page(ctx context.Context, q url.Values) (page []listed, next string, err error) {
	header, raw, err := p.client.do(ctx, call{method: http.MethodGet, path: []string{"v2", "sandboxes"}, query: q, want: []int{http.StatusOK}, within: lookWithin})
	var limited *providers.RateLimitError
	if providers.NothingRan(err) && !errors.As(err, &limited) {
		err = fmt.Errorf("%v: %w", err, providers.ErrUnavailable) //nolint:errorlint // what it wraps must not show
	}
	if err != nil {
		return nil, "", err
	}
	if err := httpapi.Decode(raw, &page); err != nil {
		return nil, "", err
	}
	if page == nil { // null
		return nil, "", fmt.Errorf("GET /v2/sandboxes: no array: %w", providers.ErrUnavailable)
	}
	return page, header.Get("X-Next-Token"), nil
}

// find lists the sandboxes of a vm, the oldest first.
func (p *Provider) find(ctx context.Context, vm string) ([]providers.Sandbox, error) {
	all, err := p.list(ctx, map[string]string{metaServer: p.opts.ServerID, metaVM: vm})
	if err != nil {
		return nil, err
	}
	var out []providers.Sandbox
	for _, d := range all {
		s, ok, err := p.sandbox(d)
		if err != nil {
			return nil, err
		}
		if ok && s.VM == vm {
			out = append(out, s)
		}
	}
	slices.SortFunc(out, func(a, b providers.Sandbox) int {
		if c := a.CreatedAt.Compare(b.CreatedAt); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return out, nil
}

// checkVM keeps what is no id out of calls.
func checkVM(vm string) error {
	if !vmID.MatchString(vm) {
		return fmt.Errorf("vm %q: %w", vm, providers.ErrNotFound)
	}
	return nil
}

// known returns the box of a sandbox, new or not, and how to reach it.
func (p *Provider) known(s providers.Sandbox, at place) *box {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := p.boxes[s.VM]
	if b != nil && b.id == s.ID {
		return b
	}
	if b != nil {
		b.end(errLost)
	}
	b = &box{place: at, vm: s.VM, fence: s.Fence, display: s.Display, turn: make(chan struct{}, 1)}
	b.turn <- struct{}{}
	b.gone, b.end = context.WithCancelCause(p.client.ctx)
	p.boxes[s.VM] = b
	return b
}

// forget drops a box that is gone and ends what hangs in it.
func (p *Provider) forget(vm, id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if b := p.boxes[vm]; b != nil && (id == "" || b.id == id) {
		b.end(errLost)
		delete(p.boxes, vm)
	}
}

// box returns how to reach a vm's sandbox, asking E2B where it is not known.
func (p *Provider) box(ctx context.Context, vm string) (*box, error) {
	if err := checkVM(vm); err != nil {
		return nil, err
	}
	p.mu.Lock()
	b := p.boxes[vm]
	p.mu.Unlock()
	if b != nil {
		return b, nil
	}
	found, err := p.find(ctx, vm)
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("vm %s: %w", vm, providers.ErrNotFound)
	}
	return p.reach(ctx, found[0])
}

// reach asks for the token of a sandbox.
func (p *Provider) reach(ctx context.Context, s providers.Sandbox) (*box, error) {
	p.mu.Lock()
	b := p.boxes[s.VM]
	p.mu.Unlock()
	if b != nil && b.id == s.ID {
		return b, nil
	}
	d, err := p.detail(ctx, s.ID)
	if err != nil {
		return nil, err
	}
	return p.known(s, place{s.ID, d.Token, p.domain(d.Domain)}), nil
}

func (p *Provider) domain(said string) string {
	if isDomain(said) {
		return said
	}
	return p.opts.Domain
}

func (p *Provider) detail(ctx context.Context, id string) (d listed, err error) {
	_, raw, err := p.client.do(ctx, call{method: http.MethodGet, path: []string{"sandboxes", id}, want: []int{http.StatusOK}, within: lookWithin})
	if err == nil {
		err = httpapi.Decode(raw, &d)
	}
	if err == nil && d.SandboxID != id {
		err = fmt.Errorf("GET /sandboxes/%s: another sandbox: %w", id, providers.ErrUnavailable)
	}
	return d, err
}

// Get returns one sandbox. One whose desktop has not been ready yet is Starting.
func (p *Provider) Get(ctx context.Context, vm string) (providers.Sandbox, error) {
	if err := checkVM(vm); err != nil {
		return providers.Sandbox{}, err
	}
	found, err := p.find(ctx, vm)
	if err != nil {
		return providers.Sandbox{}, err
	}
	if len(found) == 0 {
		p.mu.Lock()
		b := p.boxes[vm]
		making := b != nil && b.making
		p.mu.Unlock()
		if !making {
			p.forget(vm, "")
		}
		return providers.Sandbox{}, fmt.Errorf("vm %s: %w", vm, providers.ErrNotFound)
	}
	s := found[0]
	if s.State != providers.Running {
		return s, nil
	}
	b, err := p.reach(ctx, s)
	if err != nil {
		return providers.Sandbox{}, err
	}
	p.mu.Lock()
	ready, making := b.ready, b.making
	p.mu.Unlock()
	if !ready && !making {
		said, err := p.ask(ctx, b, lookWithin, "state")
		if err != nil {
			return providers.Sandbox{}, fmt.Errorf("ask vm %s whether it is ready: %w", vm, err)
		}
		if ready = said == "Z"; ready {
			p.mu.Lock()
			b.ready = true
			p.mu.Unlock()
		}
	}
	if !ready {
		s.State = providers.Starting
	}
	return s, nil
}

// List returns the sandboxes that this server's provider has made, now or
// before; one that cannot be read fails it all. The account's other sandboxes
// are not Berth's to see: whoever compares inventories would end them.
func (p *Provider) List(ctx context.Context) ([]providers.Sandbox, error) {
	all, err := p.list(ctx, map[string]string{metaServer: p.opts.ServerID})
	if err != nil {
		return nil, err
	}
	out := make([]providers.Sandbox, 0, len(all))
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, d := range all {
		s, ok, err := p.sandbox(d)
		if err != nil {
			return nil, err
		}
		if !ok {
			continue
		}
		if b := p.boxes[s.VM]; b != nil && b.id == s.ID && b.making {
			s.State = providers.Starting
		}
		out = append(out, s)
	}
	return out, nil
}

// lock serialises the creates of a vm.
func (p *Provider) lock(ctx context.Context, vm string) (unlock func(), err error) {
	for {
		p.mu.Lock()
		busy := p.locks[vm]
		if busy == nil {
			mine := make(chan struct{})
			p.locks[vm] = mine
			p.mu.Unlock()
			return func() {
				p.mu.Lock()
				delete(p.locks, vm)
				p.mu.Unlock()
				close(mine)
			}, nil
		}
		p.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// Create makes a sandbox and starts its desktop. E2B keeps no idempotency key:
// what is there under the vm's name is looked for first, and again afterwards,
// so that of two providers that create at once one gives way.
func (p *Provider) Create(ctx context.Context, spec providers.Spec) (providers.Sandbox, error) {
	if spec.Display == (computer.Display{}) {
		spec.Display = computer.DefaultDisplay
	}
	if err := spec.Display.Validate(); err != nil {
		return providers.Sandbox{}, fmt.Errorf("%w: %w", providers.ErrInvalid, err)
	}
	if !vmID.MatchString(spec.VM) {
		return providers.Sandbox{}, fmt.Errorf("%w: vm id %q", providers.ErrInvalid, spec.VM)
	}
	unlock, err := p.lock(ctx, spec.VM)
	if err != nil {
		return providers.Sandbox{}, err
	}
	defer unlock()
	select {
	case p.creates <- struct{}{}:
		defer func() { <-p.creates }()
	case <-ctx.Done():
		return providers.Sandbox{}, context.Cause(ctx)
	}
	made, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	m := &making{cancel, make(chan struct{})}
	p.mu.Lock()
	p.makes[spec.VM] = m
	p.mu.Unlock()
	s, err := p.create(made, spec)
	p.mu.Lock()
	delete(p.makes, spec.VM)
	p.mu.Unlock()
	close(m.done)
	if err != nil {
		return providers.Sandbox{}, fmt.Errorf("create vm %s: %w", spec.VM, err)
	}
	return s, nil
}

func (p *Provider) create(ctx context.Context, spec providers.Spec) (s providers.Sandbox, err error) {
	there, err := p.find(ctx, spec.VM)
	if err != nil {
		return s, err
	}
	if len(there) > 0 {
		if s = there[0]; s.Fence != spec.Fence {
			return providers.Sandbox{}, fmt.Errorf("the vm is there under fence %d: %w", s.Fence, providers.ErrConflict)
		}
		if s.State == providers.Paused {
			return s, nil
		}
		b, err := p.reach(ctx, s)
		if err == nil {
			err = p.prepare(ctx, b)
		}
		return s, err
	}
	defer func() {
		if err != nil {
			s = providers.Sandbox{}
			p.tidy(ctx, spec, err)
		}
	}()
	at, err := p.post(ctx, spec)
	if err != nil {
		return s, err
	}
	b := p.known(providers.Sandbox{ID: at.id, VM: spec.VM, Fence: spec.Fence, Display: spec.Display}, at)
	p.mu.Lock()
	b.making = true
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		b.making = false
		p.mu.Unlock()
	}()
	if _, err = p.alone(ctx, b, false); err == nil {
		err = p.prepare(ctx, b)
	}
	if err == nil {
		s, err = p.alone(ctx, b, true)
	}
	return s, err
}

// alone makes sure that b is the vm's only sandbox, and returns it, or gives
// way with ErrConflict: whoever created before b's owner looked may not have
// been listed yet. Of two, the one that is ready stays, else the older. One that
// is ready may have been answered, so it waits for an older one that is not to
// be ready or to give way; that one has not seen it ready, or is giving way.
func (p *Provider) alone(ctx context.Context, b *box, ready bool) (providers.Sandbox, error) {
	bound, cancel := context.WithTimeoutCause(ctx, readyWithin, fmt.Errorf("another sandbox of the vm is neither ready nor gone: %w", providers.ErrTimeout))
	defer cancel()
	for {
		found, err := p.find(bound, b.vm)
		if err != nil {
			return providers.Sandbox{}, err
		}
		mine := slices.IndexFunc(found, func(f providers.Sandbox) bool { return f.ID == b.id })
		if mine < 0 {
			return providers.Sandbox{}, errLost
		}
		wait := false
		for i, other := range found {
			if i == mine || ready && i > mine {
				continue // a younger one gives way to one that is ready
			}
			switch theirs, err := p.isReady(bound, other); {
			case bound.Err() != nil:
				return providers.Sandbox{}, context.Cause(bound)
			case err != nil:
				wait = true
			case theirs || i < mine && !ready:
				return providers.Sandbox{}, fmt.Errorf("the vm has just been made by another: %w", providers.ErrConflict)
			case i < mine:
				wait = true
			}
		}
		if !wait {
			return found[mine], nil
		}
		select {
		case <-time.After(askAgain):
		case <-bound.Done():
			return providers.Sandbox{}, context.Cause(bound)
		}
	}
}

// isReady asks a sandbox that is not this provider's whether its desktop is.
func (p *Provider) isReady(ctx context.Context, s providers.Sandbox) (bool, error) {
	d, err := p.detail(ctx, s.ID)
	if err != nil {
		return false, err
	}
	said, err := p.ask(ctx, &box{place: place{s.ID, d.Token, p.domain(d.Domain)}, gone: p.client.ctx, vm: s.VM}, lookWithin, "state")
	return said == "Z", err
}

// post makes the sandbox at E2B. When ctx ends it still waits a little for the
// answer, which has the name of what would else be left behind.
func (p *Provider) post(ctx context.Context, spec providers.Spec) (place, error) {
	metadata := map[string]string{}
	maps.Copy(metadata, spec.Metadata)
	for name, value := range map[string]string{
		metaServer: p.opts.ServerID, metaVM: spec.VM, metaFence: strconv.FormatUint(spec.Fence, 10), metaTenant: spec.Tenant, metaRole: spec.Role,
		metaOwner: spec.Owner, metaSession: spec.Session, metaDisplay: size(spec.Display),
	} {
		delete(metadata, name)
		if value != "" {
			metadata[name] = value
		}
	}
	env := map[string]string{"DISPLAY": ":0"}
	maps.Copy(env, spec.Env)
	template := spec.Template
	if template == "" {
		template = p.opts.Template
	}
	life := p.opts.MaxLife
	if spec.Timeout > 0 {
		life = min(life, spec.Timeout)
	}
	body := map[string]any{
		"templateID": template, "timeout": seconds(life), "metadata": metadata, "envVars": env, "secure": true, "autoPause": false, "allow_internet_access": true,
	}
	if ctx.Err() != nil {
		return place{}, context.Cause(ctx)
	}
	patient, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	defer context.AfterFunc(ctx, func() {
		time.AfterFunc(time.Second, func() { cancel(context.Cause(ctx)) })
	})()
	_, raw, err := p.client.do(patient, call{method: http.MethodPost, path: []string{"sandboxes"}, body: body, want: []int{http.StatusCreated}, within: createWithin})
	if errors.Is(err, providers.ErrNotFound) {
		return place{}, fmt.Errorf("template %.70q: %v: %w", template, err, providers.ErrInvalid) //nolint:errorlint // it is the template that is not found, not the vm
	}
	if err != nil {
		return place{}, err
	}
	var d listed
	if err := httpapi.Decode(raw, &d); err != nil {
		return place{}, err
	}
	if !safeID(d.SandboxID) {
		return place{}, fmt.Errorf("POST /sandboxes: no id: %w", providers.ErrUnavailable)
	}
	if ctx.Err() != nil {
		return place{}, errors.Join(context.Cause(ctx), p.undo(ctx, d.SandboxID))
	}
	return place{d.SandboxID, d.Token, p.domain(d.Domain)}, nil
}

func size(d computer.Display) string { return fmt.Sprintf("%dx%d", d.Width, d.Height) }

// seconds rounds up, so that a sandbox never ends too early.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }

// undo ends a sandbox whose create is given up.
func (p *Provider) undo(ctx context.Context, id string) error {
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), tidyWithin)
	defer cancel()
	if err := p.delete(clean, id); err != nil && !errors.Is(err, providers.ErrNotFound) {
		return fmt.Errorf("the sandbox %s stays until its time-out: %w", id, err)
	}
	return nil
}

// tidy takes away what a create that failed with err may have left.
func (p *Provider) tidy(ctx context.Context, spec providers.Spec, err error) {
	var limited *providers.RateLimitError
	p.mu.Lock()
	b := p.boxes[spec.VM]
	p.mu.Unlock()
	if b == nil && (providers.NothingRan(err) || errors.Is(err, providers.ErrFull) || errors.As(err, &limited)) {
		return // E2B has refused it
	}
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), tidyWithin)
	defer cancel()
	found, lookErr := p.find(clean, spec.VM)
	for _, s := range found {
		if s.Fence == spec.Fence && (b == nil || s.ID == b.id) {
			lookErr = errors.Join(lookErr, p.undo(clean, s.ID))
		}
	}
	if b != nil {
		p.forget(spec.VM, b.id)
	}
	if lookErr != nil {
		p.opts.Logger.Warn("a sandbox whose create failed may be left until its time-out", "server", p.opts.ServerID, "vm", spec.VM, "err", lookErr)
	}
}

// prepare starts the sandbox's desktop and returns when it has been painted.
func (p *Provider) prepare(ctx context.Context, b *box) error {
	bound, cancel := context.WithTimeoutCause(ctx, readyWithin, fmt.Errorf("the desktop is not ready after %s: %w", readyWithin, providers.ErrTimeout))
	defer cancel()
	args := []string{size(b.display)}
	if p.opts.Clipboard != "" {
		args = append(args, p.opts.Clipboard)
	}
	said, err := p.ask(bound, b, readyWithin, "desktop", args...)
	if err != nil {
		return err
	}
	if why, ok := strings.CutPrefix(said, "M "); ok {
		return fmt.Errorf("the desktop: %.500s: %w", why, providers.ErrUnavailable)
	}
	if got, ok := strings.CutPrefix(said, "Z "); !ok || got != size(b.display) {
		return fmt.Errorf("the template's screen is %.20q, not %s: %w", got, size(b.display), providers.ErrInvalid)
	}
	for {
		view, err := p.look(bound, b)
		if err != nil {
			return err
		}
		img, err := png.Decode(bytes.NewReader(view.PNG))
		if err != nil {
			return fmt.Errorf("the picture: %w: %w", err, providers.ErrUnavailable)
		}
		if painted(img) {
			break
		}
	}
	if _, err := p.ask(bound, b, lookWithin, "ready"); err != nil {
		return err
	}
	p.mu.Lock()
	b.ready = true
	p.mu.Unlock()
	return nil
}

// painted reports whether a desktop has drawn its background: an X server
// without one is black, but for the pointer in the middle.
func painted(img image.Image) bool {
	r := img.Bounds()
	for _, at := range []image.Point{{r.Min.X + 2, r.Min.Y + 2}, {r.Max.X - 3, r.Min.Y + 2}, {r.Min.X + 2, r.Max.Y - 3}, {r.Max.X - 3, r.Max.Y - 3}} {
		if r, g, b, _ := img.At(at.X, at.Y).RGBA(); r|g|b != 0 {
			return true
		}
	}
	return false
}

func (p *Provider) delete(ctx context.Context, id string) error {
	_, _, err := p.client.do(ctx, call{method: http.MethodDelete, path: []string{"sandboxes", id}, want: []int{http.StatusNoContent}, within: killWithin})
	return err
}

// Kill ends every sandbox of the vm.
func (p *Provider) Kill(ctx context.Context, vm string) error {
	if checkVM(vm) != nil {
		return nil // there is none of that id
	}
	p.mu.Lock()
	m := p.makes[vm]
	p.mu.Unlock()
	if m != nil { // it takes away itself what it has made
		m.cancel(errLost)
		select {
		case <-m.done:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	found, err := p.find(ctx, vm)
	if err != nil {
		return err
	}
	for _, s := range found {
		if err := p.delete(ctx, s.ID); err != nil && !errors.Is(err, providers.ErrNotFound) {
			return err
		}
	}
	p.forget(vm, "")
	return nil
}

// SetTimeout sets E2B's end of life to now + d, at most the longest that is
// asked for.
func (p *Provider) SetTimeout(ctx context.Context, vm string, d time.Duration) error {
	return p.named(ctx, vm, func(id string) error {
		_, _, err := p.client.do(ctx, call{
			method: http.MethodPost, path: []string{"sandboxes", id, "timeout"}, body: map[string]int64{"timeout": seconds(min(d, p.opts.MaxLife))},
			want: []int{http.StatusNoContent}, within: lookWithin,
		})
		return err
	})
}

// named calls f with the id of the vm's sandbox, and once more where the one
// that was known is gone.
func (p *Provider) named(ctx context.Context, vm string, f func(id string) error) error {
	if err := checkVM(vm); err != nil {
		return err
	}
	p.mu.Lock()
	b := p.boxes[vm]
	p.mu.Unlock()
	if b != nil {
		if err := f(b.id); !errors.Is(err, providers.ErrNotFound) {
			return err
		}
		p.forget(vm, b.id)
	}
	found, err := p.find(ctx, vm)
	if err != nil {
		return err
	}
	if len(found) == 0 {
		return fmt.Errorf("vm %s: %w", vm, providers.ErrNotFound)
	}
	return f(found[0].ID)
}

// Pause stops a sandbox and keeps its memory; calls in it break off.
func (p *Provider) Pause(ctx context.Context, vm string) error {
	return p.named(ctx, vm, func(id string) error {
		_, _, err := p.client.do(ctx, call{method: http.MethodPost, path: []string{"sandboxes", id, "pause"}, want: []int{http.StatusNoContent}, within: killWithin})
		if errors.Is(err, providers.ErrConflict) { // it is paused already, or on its way somewhere
			if d, lookErr := p.detail(ctx, id); lookErr == nil && d.State == "paused" {
				return nil
			}
		}
		return err
	})
}

// Resume continues a paused sandbox. Its end of life begins anew, so that it
// does not end before its worker has moved it on.
func (p *Provider) Resume(ctx context.Context, vm string) error {
	return p.named(ctx, vm, func(id string) error {
		_, _, err := p.client.do(ctx, call{
			method: http.MethodPost, path: []string{"sandboxes", id, "connect"}, body: map[string]int64{"timeout": seconds(min(resumedLife, p.opts.MaxLife))},
			want: []int{http.StatusOK, http.StatusCreated}, within: createWithin,
		})
		return err
	})
}
