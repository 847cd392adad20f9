package selfhosted

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"time"

	"berth/api"
	"berth/internal/computer"
	"berth/internal/providers"
	"berth/internal/providers/httpapi"
)

// How long a server has for a call, beside what the caller's ctx allows.
const (
	healthWithin  = time.Second // the contract's: no answer by then is a failed probe
	lookWithin    = 10 * time.Second
	createWithin  = time.Minute
	killWithin    = 30 * time.Second
	pauseWithin   = 150 * time.Second // a server waits for the batch under way and writes a memory to disk
	pictureWithin = 25 * time.Second
	actWithin     = time.Minute // and what the actions themselves may take
)

// Calls at a time to one server; what is more waits here.
const (
	maxCreates = 8
	maxShots   = 16
)

// streamFor is how long a live view's URL is valid.
const streamFor = 12 * time.Hour

// Options configure a provider.
type Options struct {
	ServerID string // goes into every Sandbox
	URL      string // base URL of the server
	APIKey   string
	Template string // where a Spec names none; "": the server's default
	CA       []byte // PEM certificates to trust instead of the system's; nil: the system's
	Logger   *slog.Logger
}

// Provider holds sandboxes on a self-hosted server. See the package
// documentation for what it guarantees.
type Provider struct {
	opts    Options
	client  *client
	info    providers.Info
	creates chan struct{}
	shots   chan struct{}
}

var _ providers.Provider = (*Provider)(nil)

// New opens the server: it asks what it can do. A server that does not answer,
// or not as the API describes, is ErrUnavailable; a bad option is ErrInvalid.
func New(ctx context.Context, opts Options) (*Provider, error) {
	base, err := url.Parse(opts.URL)
	if err != nil || base.Host == "" || base.Scheme != "http" && base.Scheme != "https" {
		return nil, fmt.Errorf("%w: the URL of server %s is no http(s) address", providers.ErrInvalid, opts.ServerID)
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	var roots *x509.CertPool
	if opts.CA != nil {
		roots = x509.NewCertPool()
		if !roots.AppendCertsFromPEM(opts.CA) {
			return nil, fmt.Errorf("%w: the CA of server %s has no PEM certificate", providers.ErrInvalid, opts.ServerID)
		}
	}
	if base.Scheme == "http" && !isLoopback(base.Hostname()) {
		opts.Logger.Warn("the API key travels unencrypted to this server; give it an https address", "server", opts.ServerID)
	}
	p := &Provider{opts: opts, client: newClient(base, opts.APIKey, roots), creates: make(chan struct{}, maxCreates), shots: make(chan struct{}, maxShots)}
	var capacity struct {
		MaxContainers int               `json:"maxContainers"`
		Capabilities  []string          `json:"capabilities"`
		Attributes    map[string]string `json:"attributes"`
	}
	_, raw, err := p.client.do(ctx, call{method: http.MethodGet, path: []string{"capacity"}, want: http.StatusOK, limit: maxAnswer, within: lookWithin})
	if err == nil {
		err = httpapi.Decode(raw, &capacity)
	}
	if err == nil && (capacity.MaxContainers < 1 || len(capacity.Capabilities) == 0) {
		err = fmt.Errorf("GET /capacity: neither room nor capabilities: %w", providers.ErrUnavailable)
	}
	if err != nil {
		p.client.close()
		return nil, fmt.Errorf("open server %s: %w", opts.ServerID, err)
	}
	if text := capacity.Attributes["notEnforced"]; text != "" {
		opts.Logger.Warn("the server isolates less than it should", "server", opts.ServerID, "notEnforced", text)
	}
	slices.Sort(capacity.Capabilities)
	p.info = providers.Info{Kind: "selfhosted", Capabilities: slices.Compact(capacity.Capabilities), Displays: true}
	return p, nil
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// Info tells what the server said when it was opened.
func (p *Provider) Info() providers.Info {
	info := p.info
	info.Capabilities = slices.Clone(info.Capabilities)
	return info
}

// Health probes the server. A draining one is healthy: its sandboxes go on.
func (p *Provider) Health(ctx context.Context) (providers.Health, error) {
	_, raw, err := p.client.do(ctx, call{method: http.MethodGet, path: []string{"health"}, want: http.StatusOK, limit: maxProblem, within: healthWithin})
	if err != nil {
		return providers.Health{}, err
	}
	var body struct {
		Status string `json:"status"`
		BootID string `json:"bootId"`
	}
	if err := httpapi.Decode(raw, &body); err != nil {
		return providers.Health{}, err
	}
	if body.BootID == "" || body.Status != "ok" && body.Status != "draining" {
		return providers.Health{}, fmt.Errorf("GET /health: status %.40q, boot id %.40q: %w", body.Status, body.BootID, providers.ErrUnavailable)
	}
	return providers.Health{BootID: body.BootID}, nil
}

var vmID = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// metadata keys that are this provider's own; a Spec's of the same name give way.
const (
	metaVM      = "vmId"
	metaFence   = "fence"
	metaTenant  = "tenant"
	metaRole    = "role"
	metaOwner   = "owner"
	metaSession = "session"
)

// detail is a sandbox as the server answers it.
type detail struct {
	SandboxID    string            `json:"sandboxID"`
	State        providers.State   `json:"state"`
	Metadata     map[string]string `json:"metadata"`
	StartedAt    time.Time         `json:"startedAt"`
	EndAt        time.Time         `json:"endAt"`
	WatchedAt    time.Time         `json:"watchedAt"`
	Display      computer.Display  `json:"display"`
	Capabilities []string          `json:"capabilities"`
}

func (p *Provider) sandbox(d detail) (providers.Sandbox, error) {
	fence, err := strconv.ParseUint(d.Metadata[metaFence], 10, 64)
	if d.Metadata[metaFence] == "" {
		fence, err = 0, nil // not made through Berth; a reaper sees it all the same
	}
	if err != nil || d.SandboxID == "" || d.StartedAt.IsZero() {
		return providers.Sandbox{}, fmt.Errorf("sandbox %.70q is not described as the API says: %w", d.SandboxID, providers.ErrUnavailable)
	}
	vm := d.Metadata[metaVM]
	if vm == "" {
		vm = d.SandboxID
	}
	capabilities := slices.Clone(d.Capabilities)
	slices.Sort(capabilities)
	return providers.Sandbox{
		ID: d.SandboxID, VM: vm, Fence: fence, Tenant: d.Metadata[metaTenant], Role: d.Metadata[metaRole], Owner: d.Metadata[metaOwner],
		Session: d.Metadata[metaSession], Server: p.opts.ServerID, State: d.State, Display: d.Display, Capabilities: capabilities,
		CreatedAt: d.StartedAt, ExpiresAt: d.EndAt, WatchedAt: d.WatchedAt,
	}, nil
}

// take waits for a place among the calls of a kind; give returns it.
func take(ctx context.Context, places chan struct{}) (give func(), err error) {
	select {
	case places <- struct{}{}:
		return func() { <-places }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// Create makes a sandbox whose id is the vm's.
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
	give, err := take(ctx, p.creates)
	if err != nil {
		return providers.Sandbox{}, err
	}
	defer give()
	metadata := map[string]string{}
	maps.Copy(metadata, spec.Metadata)
	own := map[string]string{
		metaVM: spec.VM, metaFence: strconv.FormatUint(spec.Fence, 10), metaTenant: spec.Tenant, metaRole: spec.Role, metaOwner: spec.Owner, metaSession: spec.Session,
	}
	for name, value := range own {
		delete(metadata, name)
		if value != "" {
			metadata[name] = value
		}
	}
	template := spec.Template
	if template == "" {
		template = p.opts.Template
	}
	body := map[string]any{"sandboxID": spec.VM, "templateID": template, "metadata": metadata, "display": spec.Display, "timeout": seconds(spec.Timeout)}
	if len(spec.Env) > 0 {
		body["envVars"] = spec.Env
	}
	header := map[string]string{"Idempotency-Key": spec.VM + "." + own[metaFence]}
	if spec.LeaseEpoch > 0 {
		header["Berth-Epoch"] = strconv.FormatUint(spec.LeaseEpoch, 10)
	}
	_, raw, err := p.client.do(ctx, call{
		method: http.MethodPost, path: []string{"sandboxes"}, body: body, header: header, want: http.StatusCreated, limit: maxAnswer, within: createWithin,
	})
	if err != nil {
		return providers.Sandbox{}, fmt.Errorf("create vm %s: %w", spec.VM, err)
	}
	return p.one(raw)
}

// seconds rounds up, so that a sandbox never ends too early.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }

func (p *Provider) one(raw []byte) (providers.Sandbox, error) {
	var d detail
	if err := httpapi.Decode(raw, &d); err != nil {
		return providers.Sandbox{}, err
	}
	return p.sandbox(d)
}

// checkVM keeps what is no id out of paths.
func checkVM(vm string) error {
	if !vmID.MatchString(vm) {
		return fmt.Errorf("vm %q: %w", vm, providers.ErrNotFound)
	}
	return nil
}

// Get returns one sandbox.
func (p *Provider) Get(ctx context.Context, vm string) (providers.Sandbox, error) {
	if err := checkVM(vm); err != nil {
		return providers.Sandbox{}, err
	}
	_, raw, err := p.client.do(ctx, call{method: http.MethodGet, path: []string{"sandboxes", vm}, want: http.StatusOK, limit: maxAnswer, within: lookWithin})
	if err != nil {
		return providers.Sandbox{}, err
	}
	return p.one(raw)
}

// List returns the whole inventory; one entry that cannot be read fails it all.
func (p *Provider) List(ctx context.Context) ([]providers.Sandbox, error) {
	_, raw, err := p.client.do(ctx, call{method: http.MethodGet, path: []string{"sandboxes"}, want: http.StatusOK, limit: maxAnswer, within: lookWithin})
	if err != nil {
		return nil, err
	}
	var list []detail
	if err := httpapi.Decode(raw, &list); err != nil {
		return nil, err
	}
	if list == nil { // null
		return nil, fmt.Errorf("GET /sandboxes: no array: %w", providers.ErrUnavailable)
	}
	out := make([]providers.Sandbox, len(list))
	for i, d := range list {
		if out[i], err = p.sandbox(d); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// Kill ends a sandbox.
func (p *Provider) Kill(ctx context.Context, vm string) error {
	if checkVM(vm) != nil {
		return nil // there is none of that id
	}
	_, _, err := p.client.do(ctx, call{method: http.MethodDelete, path: []string{"sandboxes", vm}, want: http.StatusNoContent, limit: maxProblem, within: killWithin})
	if errors.Is(err, providers.ErrNotFound) {
		return nil
	}
	return err
}

// SetTimeout sets the server's end of life.
func (p *Provider) SetTimeout(ctx context.Context, vm string, d time.Duration) error {
	_, err := p.post(ctx, vm, "timeout", call{body: map[string]int64{"timeout": seconds(d)}, want: http.StatusNoContent, within: lookWithin})
	return err
}

// Pause stops a sandbox where the server can. It waits for the batch under way;
// until Resume, batches and pictures are refused with ErrConflict.
func (p *Provider) Pause(ctx context.Context, vm string) error {
	return p.suspend(ctx, vm, "pause")
}

// Resume continues a paused sandbox where the server can.
func (p *Provider) Resume(ctx context.Context, vm string) error {
	return p.suspend(ctx, vm, "resume")
}

func (p *Provider) suspend(ctx context.Context, vm, verb string) error {
	if !slices.Contains(p.info.Capabilities, providers.PauseCap) {
		return fmt.Errorf("%s: the server cannot: %w", verb, providers.ErrUnsupported)
	}
	_, err := p.post(ctx, vm, verb, call{want: http.StatusNoContent, within: pauseWithin})
	return err
}

// Snapshot keeps a sandbox's state where the server can. The name is a Template
// for sandboxes of the same tenant on this server.
func (p *Provider) Snapshot(ctx context.Context, vm string) (string, error) {
	if !slices.Contains(p.info.Capabilities, providers.Snapshot) {
		return "", fmt.Errorf("snapshot: the server cannot: %w", providers.ErrUnsupported)
	}
	raw, err := p.post(ctx, vm, "snapshots", call{want: http.StatusCreated, within: pauseWithin})
	if err != nil {
		return "", err
	}
	var body struct {
		SnapshotID string `json:"snapshotID"`
	}
	if err := httpapi.Decode(raw, &body); err != nil {
		return "", err
	}
	if !vmID.MatchString(body.SnapshotID) {
		return "", fmt.Errorf("snapshot of vm %s: the answer names none: %w", vm, providers.ErrUnavailable)
	}
	return body.SnapshotID, nil
}

func (p *Provider) post(ctx context.Context, vm, verb string, in call) ([]byte, error) {
	if err := checkVM(vm); err != nil {
		return nil, err
	}
	in.method, in.path, in.limit = http.MethodPost, []string{"sandboxes", vm, verb}, maxProblem
	_, raw, err := p.client.do(ctx, in)
	return raw, err
}

// StreamURL is a page that shows the sandbox for the next twelve hours to
// whoever has the URL, to look at only.
func (p *Provider) StreamURL(ctx context.Context, vm string) (string, error) {
	if !slices.Contains(p.info.Capabilities, providers.Stream) {
		return "", fmt.Errorf("stream: the server has no live view: %w", providers.ErrUnsupported)
	}
	if _, err := p.Get(ctx, vm); err != nil {
		return "", err
	}
	expires := time.Now().Add(streamFor).Unix()
	u := p.client.base.JoinPath("sandboxes", vm, "stream")
	u.User = nil
	u.RawQuery = url.Values{"expires": {strconv.FormatInt(expires, 10)}, "token": {api.StreamToken(p.opts.APIKey, vm, api.Look, expires)}}.Encode()
	return u.String(), nil
}

// Close ends the calls under way with ErrUnavailable. Sandboxes stay.
func (p *Provider) Close() error {
	p.client.close()
	return nil
}
