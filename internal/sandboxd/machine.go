package sandboxd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"berth/internal/computer"
	"berth/internal/desktop"
	"berth/internal/sandboxd/guest"
	"berth/internal/sandboxd/jail"
)

// Machine makes what holds a sandbox. It is safe for concurrent use.
type Machine interface {
	// Start starts a guest whose files are in dir and returns when its agent
	// answers, which is when its desktop can be used. When it fails nothing is
	// left but dir. A template other than DefaultTemplate is one of the machine's.
	Start(ctx context.Context, dir string, slot int, template string, d computer.Display) (Guest, error)
	// Find takes over the guest of an earlier process by its identity.
	Find(ctx context.Context, dir string, id Identity) (Guest, error)
	// Discard ends what is left of a guest that Find did not get.
	Discard(dir string, id Identity) error
	// Attributes describe the machines to schedulers and people.
	Attributes() map[string]string
}

// Guest is one running machine.
type Guest interface {
	Identity() Identity
	Agent() *agentClient
	Gone() <-chan struct{} // closed when it has ended
	Kill() error           // ends it and waits; works always, also again
	// Usage is what it takes beside files on the host's disk; it is cheap, and may
	// be called at any time.
	Usage() (usage, error)
}

// Identity names a guest across restarts of this program.
type Identity struct {
	PID     int           `json:"pid"`
	Started uint64        `json:"started"` // ticks after boot
	Weak    jail.Weakness `json:"weak"`
}

// desktops is the Machine that runs desktops in namespaces of the host.
type desktops struct {
	opts  Options
	probe jail.Probe
}

// newDesktops tries out what the host allows. What it denies is an error unless
// the options allow weaker isolation.
func newDesktops(opts Options) (*desktops, error) {
	if err := desktop.Missing(); err != nil {
		return nil, err
	}
	probe, err := jail.ProbeHost(opts.StateDir, opts.OpenNetworks)
	if err != nil {
		return nil, err
	}
	return accept(opts, probe)
}

// accept refuses a host that denies what isolation needs, unless that is
// allowed; then it is said in the log and in Attributes.
func accept(opts Options, probe jail.Probe) (*desktops, error) {
	if len(probe.Denied) > 0 {
		text := "this host does not enforce " + strings.Join(probe.Denied, "; nor ")
		if !opts.AllowWeaker {
			return nil, errors.New(text + ". --allow-weaker-isolation starts all the same")
		}
		opts.Logger.Warn("weaker isolation, as allowed: " + text)
	}
	if probe.NoWay != "" {
		opts.Logger.Warn("sandboxes have no network of their own", "why", probe.NoWay)
	}
	return &desktops{opts: opts, probe: probe}, nil
}

func (m *desktops) Attributes() map[string]string {
	out := map[string]string{"machine": "desktop", "isolation": "namespaces", "limits": "cgroups", "network": "slirp4netns"}
	if m.probe.Weak.Namespaces {
		out["isolation"] = "none"
	}
	if m.probe.Weak.Cgroups {
		out["limits"] = "none"
	} else {
		out["memoryBytes"] = strconv.FormatInt(m.opts.Limits.Memory, 10)
		out["processes"] = strconv.Itoa(m.opts.Limits.Processes)
		out["cpus"] = strconv.FormatFloat(m.opts.Limits.CPUs, 'g', -1, 64)
	}
	switch {
	case m.probe.Weak.Namespaces:
		out["network"] = "host"
	case !m.probe.Network:
		out["network"] = "none"
	}
	if len(m.probe.Denied) > 0 {
		out["notEnforced"] = strings.Join(m.probe.Denied, "; ")
	}
	if err := desktop.ViewMissing(); err != nil {
		out["liveViewReason"] = err.Error()
	}
	if m.probe.NoWay != "" {
		out["networkReason"] = m.probe.NoWay
	}
	return out
}

func (m *desktops) Start(ctx context.Context, dir string, slot int, _ string, d computer.Display) (Guest, error) {
	config := desktop.AgentConfig{Display: d, Home: jail.Home, UID: jail.PersonUID, ServerUID: jail.ServerUID, Nested: true, BrowserFlags: m.opts.BrowserFlags}
	if m.probe.Weak.Namespaces {
		config = desktop.AgentConfig{Display: d, Home: filepath.Join(dir, "home"), Nested: os.Getuid() != 0, BrowserFlags: m.opts.BrowserFlags}
		if err := os.Mkdir(config.Home, 0o700); err != nil {
			return nil, fmt.Errorf("make a home directory: %w", err)
		}
	}
	raw, err := json.Marshal(config)
	if err != nil {
		return nil, fmt.Errorf("encode the agent's configuration: %w", err)
	}
	p, err := jail.Start(jail.Spec{
		ID: filepath.Base(dir), Dir: dir, Slot: slot, Limits: m.opts.Limits, Agent: raw, Weak: m.probe.Weak, Ephemeral: m.opts.Ephemeral,
		Network: jail.Network{Out: m.probe.Network, Open: m.opts.OpenNetworks},
	})
	if err != nil {
		return nil, errors.Join(err, logged(dir))
	}
	g := newGuest(p, dir)
	if err := g.ready(ctx); err != nil {
		return nil, errors.Join(err, g.Kill(), logged(dir))
	}
	return g, nil
}

// logged returns what the sandbox said at its start as an error, or nil.
func logged(dir string) error {
	raw, err := os.ReadFile(filepath.Join(dir, "log"))
	if text := strings.TrimSpace(string(raw)); err == nil && text != "" {
		return fmt.Errorf("the sandbox said: %.1000s", text)
	}
	return nil
}

func (m *desktops) Find(ctx context.Context, dir string, id Identity) (Guest, error) {
	p, err := jail.Find(filepath.Base(dir), id.PID, id.Started, id.Weak)
	if err != nil {
		return nil, err
	}
	g := newGuest(p, dir)
	if err := g.ready(ctx); err != nil {
		return nil, errors.Join(err, g.Kill())
	}
	return g, nil
}

// Discard ends a jail, and removes what it had of the host.
func (m *desktops) Discard(dir string, id Identity) error {
	if id.PID != 0 {
		if p, err := jail.Find(baseName(dir), id.PID, id.Started, id.Weak); err == nil {
			if err := p.Kill(); err != nil {
				return err
			}
		}
	}
	if err := jail.Forget(baseName(dir)); err != nil {
		m.opts.Logger.Warn("a leftover stays", "err", err)
	}
	return nil
}

// jailed is a guest in a jail.
type jailed struct {
	p     *jail.Process
	agent *agentClient
}

func newGuest(p *jail.Process, dir string) *jailed {
	return &jailed{p: p, agent: newAgentClient(dialUnix(jail.SocketPath(dir)))}
}

// ready waits until the agent answers.
func (g *jailed) ready(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer afterGone(g.p.Gone(), func() { cancel(errors.New("the sandbox ended while it started")) })()
	return g.agent.ready(ctx)
}

func (g *jailed) Identity() Identity {
	return Identity{PID: g.p.PID, Started: g.p.Started, Weak: g.p.Weak}
}
func (g *jailed) Agent() *agentClient   { return g.agent }
func (g *jailed) Gone() <-chan struct{} { return g.p.Gone() }

func (g *jailed) Kill() error {
	g.agent.close()
	return g.p.Kill()
}

// Missing names what this machine lacks to run desktops; nil: nothing.
func Missing() error {
	err := desktop.Missing()
	if _, slirp := exec.LookPath("slirp4netns"); slirp != nil {
		err = errors.Join(err, errors.New("missing: slirp4netns. On Debian: apt-get install --no-install-recommends slirp4netns"))
	}
	return err
}

// TakeOver must be called first thing by a program that uses this package: in
// the processes that run inside a sandbox, or as the inside of a microVM, it does
// not return. See jail.Main and guest.Main.
func TakeOver() {
	jail.Main(func(l net.Listener, raw json.RawMessage) error { return ServeAgent(l, raw, nil) })
	guest.Main(ServeAgent)
}

// ServeAgent serves a desktop as the agent of a sandbox until that ends. wake:
// see desktop.AgentConfig.
func ServeAgent(l net.Listener, raw json.RawMessage, wake func(now time.Time, seed []byte) error) error {
	debug.SetGCPercent(50) // an agent is idle most of the time, and there are many
	var config desktop.AgentConfig
	if err := json.Unmarshal(raw, &config); err != nil {
		return fmt.Errorf("read the agent's configuration: %w", err)
	}
	config.Wake = wake
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	return desktop.Serve(context.Background(), l, config, log)
}
