package e2b

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"berth/internal/providers"
)

// Defaults of Options.
const (
	DefaultDomain   = "e2b.app"
	DefaultTemplate = "desktop"
	// DefaultMaxLife is the longest time-out that every plan of E2B allows. A
	// sandbox's end is moved on while it is in use, so it may live longer where
	// the plan lets it.
	DefaultMaxLife = time.Hour
)

// How long E2B has for a call, beside what the caller's ctx allows.
const (
	lookWithin   = 10 * time.Second
	createWithin = time.Minute
	killWithin   = 30 * time.Second
	readyWithin  = 90 * time.Second // for the desktop to be painted
	tidyWithin   = 10 * time.Second // for what failed to be taken away
	resumedLife  = 30 * time.Minute // of a sandbox that is resumed; its worker moves it on
)

// maxCreates bounds the creates at a time; what is more waits here.
const maxCreates = 8

// Clipboard programs that a template may have.
const (
	XClip = "xclip"
	XSel  = "xsel"
)

// Options configure a provider.
type Options struct {
	ServerID string // goes into every Sandbox, and marks its sandboxes at E2B
	APIKey   string
	Domain   string // "": DefaultDomain
	APIURL   string // "": https://api.<Domain>
	// SandboxURL is where all sandboxes are reached, told apart by headers, as at
	// an installation behind one address; "": https://<port>-<id>.<domain>.
	SandboxURL string
	Template   string // where a Spec names none; "": DefaultTemplate
	// Clipboard is the program of the template that reads and writes the
	// clipboard, XClip or XSel. "": it has none, and the capability is not
	// declared: E2B's own desktop template has none.
	Clipboard string
	MaxLife   time.Duration // longest time-out that is asked for; 0: DefaultMaxLife
	CA        []byte        // PEM certificates to trust instead of the system's; nil: the system's
	Logger    *slog.Logger
}

// Provider holds sandboxes at E2B. See the package documentation for what it
// guarantees.
type Provider struct {
	opts    Options
	client  *client
	info    providers.Info
	boot    string
	creates chan struct{}

	mu    sync.Mutex
	boxes map[string]*box          // by vm, as far as they are known
	makes map[string]*making       // by vm: creates under way
	locks map[string]chan struct{} // by vm: one create at a time
}

var _ providers.Provider = (*Provider)(nil)

// New opens the account: it asks for the list of sandboxes once. A server that
// does not answer, or does not take the key, is ErrUnavailable; a bad option is
// ErrInvalid.
func New(ctx context.Context, opts Options) (*Provider, error) {
	p, err := open(opts)
	if err != nil {
		return nil, fmt.Errorf("open server %s: %w", opts.ServerID, err)
	}
	if _, err := p.Health(ctx); err != nil {
		p.client.close()
		return nil, fmt.Errorf("open server %s: %w", opts.ServerID, err)
	}
	return p, nil
}

func open(opts Options) (*Provider, error) {
	if opts.Domain == "" {
		opts.Domain = DefaultDomain
	}
	if opts.APIURL == "" {
		opts.APIURL = "https://api." + opts.Domain
	}
	if opts.Template == "" {
		opts.Template = DefaultTemplate
	}
	if opts.MaxLife == 0 {
		opts.MaxLife = DefaultMaxLife
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	api, err := address("API URL", opts.APIURL)
	if err != nil {
		return nil, err
	}
	var sandboxes *url.URL
	if opts.SandboxURL != "" {
		if sandboxes, err = address("sandbox URL", opts.SandboxURL); err != nil {
			return nil, err
		}
	}
	switch {
	case opts.APIKey == "":
		return nil, fmt.Errorf("%w: no API key", providers.ErrInvalid)
	case !isDomain(opts.Domain):
		return nil, fmt.Errorf("%w: the domain is no host name such as %s", providers.ErrInvalid, DefaultDomain)
	case opts.MaxLife < time.Minute:
		return nil, fmt.Errorf("%w: a life of %s; at least a minute", providers.ErrInvalid, opts.MaxLife)
	case opts.Clipboard != "" && opts.Clipboard != XClip && opts.Clipboard != XSel:
		return nil, fmt.Errorf("%w: the clipboard program %.40q; known are %s and %s", providers.ErrInvalid, opts.Clipboard, XClip, XSel)
	}
	var roots *x509.CertPool
	if opts.CA != nil {
		roots = x509.NewCertPool()
		if !roots.AppendCertsFromPEM(opts.CA) {
			return nil, fmt.Errorf("%w: the CA has no PEM certificate", providers.ErrInvalid)
		}
	}
	for _, u := range []*url.URL{api, sandboxes} {
		if u != nil && u.Scheme == "http" && !isLoopback(u.Hostname()) {
			opts.Logger.Warn("keys travel unencrypted to this server; give it https addresses", "server", opts.ServerID)
			break
		}
	}
	capabilities := []string{providers.Browser, providers.Desktop, providers.Files, providers.PauseCap, providers.Shell, providers.Stream, providers.Windows}
	if opts.Clipboard != "" {
		capabilities = append(capabilities, providers.Clipboard)
	}
	slices.Sort(capabilities)
	sum := sha256.Sum256([]byte(api.Host + api.Path)) // E2B as a whole does not reboot
	return &Provider{
		opts: opts, client: newClient(api, sandboxes, opts.APIKey, roots), boot: "e2b-" + hex.EncodeToString(sum[:6]),
		info:    providers.Info{Kind: "e2b", Capabilities: capabilities, Displays: true},
		creates: make(chan struct{}, maxCreates), boxes: map[string]*box{}, makes: map[string]*making{}, locks: map[string]chan struct{}{},
	}, nil
}

// address reads a base URL; the error never tells it.
func address(what, text string) (*url.URL, error) {
	u, err := url.Parse(text)
	if err != nil || u.Hostname() == "" || u.Scheme != "http" && u.Scheme != "https" {
		return nil, fmt.Errorf("%w: the %s is no http(s) address", providers.ErrInvalid, what)
	}
	return u, nil
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func isDomain(s string) bool {
	return s != "" && len(s) <= 253 && !strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '.' && r != ':'
	})
}

// Info tells what the options and E2B's API make possible.
func (p *Provider) Info() providers.Info {
	info := p.info
	info.Capabilities = slices.Clone(info.Capabilities)
	return info
}

// Health asks for the shortest list there is, which also tries the key. A rate
// limit is an answer. The boot id never changes: E2B as a whole does not lose
// its sandboxes.
func (p *Provider) Health(ctx context.Context) (providers.Health, error) {
	_, _, err := p.page(ctx, url.Values{"limit": {"1"}})
	var limited *providers.RateLimitError
	if err != nil && !errors.As(err, &limited) {
		return providers.Health{}, err
	}
	return providers.Health{BootID: p.boot}, nil
}

// Snapshot is not done: E2B's snapshots are templates of the account, which
// nobody would ever take away again.
func (p *Provider) Snapshot(context.Context, string) (string, error) {
	return "", fmt.Errorf("snapshot: %w", providers.ErrUnsupported)
}

// Close ends the calls under way with ErrUnavailable. Sandboxes stay.
func (p *Provider) Close() error {
	p.client.close()
	return nil
}
