package sandboxd

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"berth/internal/computer"
	"berth/internal/desktop"
	"berth/internal/sandboxd/firecracker"
	"berth/internal/sandboxd/guest"
	"berth/internal/sandboxd/jail"
)

// microvms is the Machine that runs each desktop in a microVM of its own.
type microvms struct {
	opts    Options
	config  firecracker.Config
	version string
	kept    *templates

	base   bool   // new desktops are made from the snapshot of one that nobody has used
	noView string // why the image's desktops are shown in pictures only
}

// probeWithin bounds a look at the host.
const probeWithin = 15 * time.Second

// baseTemplate is the snapshot that new desktops are made from.
const baseTemplate = "base"

// newMicroVMs finds out whether the host can run microVMs, and boots one: what is
// missing is said now, all at once, and not by the first sandbox. The snapshot of
// that one is kept to make others from.
func newMicroVMs(ctx context.Context, opts Options) (*microvms, error) {
	config := opts.Firecracker
	config.VCPUs, config.MemoryMiB = int(math.Ceil(opts.Limits.CPUs)), int(opts.Limits.Memory>>20)
	within, cancel := context.WithTimeout(ctx, probeWithin)
	defer cancel()
	config, version, err := config.Probe(within)
	if err != nil {
		return nil, err
	}
	kept, err := openTemplates(filepath.Join(opts.StateDir, "templates"))
	if err != nil {
		return nil, err
	}
	m := &microvms{opts: opts, config: config, version: version, kept: kept}
	return m, m.prepare(ctx)
}

// prepare sees to the snapshot of a new desktop: the one that an earlier process
// made, if all that it depends on is as it was, else a new one.
func (m *microvms) prepare(ctx context.Context) error {
	of, err := m.fingerprint()
	if err != nil {
		return err
	}
	info, err := m.kept.find(baseTemplate)
	if err == nil && info.Of == of {
		m.base, m.noView = true, info.NoView
		return nil
	}
	if err == nil {
		err = m.kept.remove(baseTemplate)
	}
	if err != nil && !errors.Is(err, errNoTemplate) {
		return err
	}
	return m.makeBase(ctx, of)
}

// fingerprint tells apart what a snapshot depends on: program, image, sizes, and
// the host's kernel.
func (m *microvms) fingerprint() (string, error) {
	words, err := m.bootWords(computer.DefaultDisplay)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	fmt.Fprintln(h, "noView", m.version, m.config.VCPUs, m.config.MemoryMiB, m.config.Console, words)
	for _, path := range []string{m.config.Binary, m.config.Kernel, m.config.Initrd, m.config.RootFS} {
		if path == "" {
			continue
		}
		info, err := os.Stat(path)
		if err != nil {
			return "", fmt.Errorf("look at the image: %w", err)
		}
		fmt.Fprintln(h, path, info.Size(), info.ModTime().UnixNano())
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the host's boot id: %w", err)
	}
	fmt.Fprintln(h, string(boot))
	return hex.EncodeToString(h.Sum(nil)), nil
}

func (m *microvms) Attributes() map[string]string {
	out := map[string]string{
		"machine": "firecracker", "isolation": "microvm", "limits": "microvm", "network": "none", "firecracker": m.version,
		"memoryBytes": strconv.FormatInt(int64(m.config.MemoryMiB)<<20, 10), "cpus": strconv.Itoa(m.config.VCPUs),
	}
	if m.noView != "" {
		out["liveViewReason"] = m.noView
	}
	return out
}

func (m *microvms) Templates() *templates { return m.kept }

// bootWords is what the kernel's command line tells a guest.
func (m *microvms) bootWords(d computer.Display) (string, error) {
	raw, err := json.Marshal(desktop.AgentConfig{
		Display: d, Home: jail.Home, UID: jail.PersonUID, ServerUID: jail.ServerUID, Nested: true, BrowserFlags: m.opts.BrowserFlags,
	})
	if err != nil {
		return "", fmt.Errorf("encode the agent's configuration: %w", err)
	}
	files := m.opts.Limits.Files
	if files == 0 {
		files = DefaultLimits().Files
	}
	return guest.CommandLine(raw, files), nil
}

func (m *microvms) Start(ctx context.Context, dir string, _ int, template string, d computer.Display) (Guest, error) {
	if template == DefaultTemplate {
		if d != computer.DefaultDisplay || !m.base {
			return m.boot(ctx, dir, d)
		}
		template = baseTemplate
	}
	vm, err := m.config.Load(ctx, dir, m.kept.files(template))
	if err != nil {
		return nil, err
	}
	g := newMicroVM(vm)
	if err := g.wake(ctx); err != nil {
		return nil, errors.Join(err, g.Kill())
	}
	return g, nil
}

// boot makes a microVM from nothing.
func (m *microvms) boot(ctx context.Context, dir string, d computer.Display) (*microvm, error) {
	words, err := m.bootWords(d)
	if err != nil {
		return nil, err
	}
	vm, err := m.config.Boot(ctx, dir, words)
	if err != nil {
		return nil, err
	}
	g := newMicroVM(vm)
	if err := g.ready(ctx); err != nil {
		if said := vm.Said(); said != "" {
			err = fmt.Errorf("%w; the microVM said: %s", err, said)
		} else if !m.config.Console {
			err = fmt.Errorf("%w; --console has the log say what its kernel says", err)
		}
		return nil, errors.Join(err, g.Kill())
	}
	return g, nil
}

// makeBase boots a desktop that nobody has used, and keeps its snapshot; it goes
// on in no microVM itself. That it does not boot is an error; without a snapshot
// every desktop boots.
func (m *microvms) makeBase(ctx context.Context, of string) (err error) {
	started := time.Now()
	dir, err := m.kept.scratch()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	within, cancel := context.WithTimeoutCause(ctx, startWithin, errors.New("it was not ready in "+startWithin.String()))
	defer cancel()
	g, err := m.boot(within, dir, computer.DefaultDisplay)
	if err != nil {
		return fmt.Errorf("a microVM of this image does not come up: %w", err)
	}
	defer func() { err = errors.Join(err, g.Kill()) }()
	m.opts.Logger.Info("the image boots", "firecracker", m.version, "took", time.Since(started).Round(time.Millisecond))
	if err := g.agent.viewable(within); err != nil {
		m.noView = "in the image " + err.Error()
	}
	keeping, stop := context.WithTimeout(ctx, pauseWithin)
	defer stop()
	err = g.Pause(keeping)
	if err == nil {
		err = m.kept.keep(keeping, baseTemplate, templateInfo{Display: computer.DefaultDisplay, Of: of, NoView: m.noView}, g.Keep)
	}
	if err != nil {
		m.opts.Logger.Warn("there is no snapshot to make desktops from; each boots", "err", err)
		return nil
	}
	m.base = true
	return nil
}

func (m *microvms) Find(ctx context.Context, dir string, _ Identity) (Guest, error) {
	vm, err := m.config.Find(ctx, dir)
	if err != nil {
		return nil, err
	}
	g := newMicroVM(vm)
	if vm.Paused() {
		return g, nil
	}
	// It may have been stopped while it was found, or a resume of it finished.
	if err := g.wake(ctx); err != nil {
		return nil, errors.Join(err, g.Kill())
	}
	return g, nil
}

// Discard ends what is left of a guest that was not found.
func (m *microvms) Discard(dir string, _ Identity) error { return firecracker.Discard(dir) }

// microvm is a guest in a microVM.
type microvm struct {
	vm    *firecracker.VM
	agent *agentClient
}

func newMicroVM(vm *firecracker.VM) *microvm {
	return &microvm{vm: vm, agent: newAgentClient(vm.Dial)}
}

// tryWithin bounds one attempt to reach an agent that does not listen yet: the
// guest's kernel may have dropped it.
const tryWithin = time.Second

// ready waits until the agent answers: until the guest has booted.
func (g *microvm) ready(ctx context.Context) error {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		within, cancel := context.WithTimeout(ctx, tryWithin)
		conn, err := g.vm.Dial(within)
		cancel()
		if err == nil {
			if err := conn.Close(); err != nil {
				return fmt.Errorf("reach the agent: %w", err)
			}
			break
		}
		select {
		case <-tick.C:
		case <-g.vm.Gone():
			return errors.New("the microVM ended while it started")
		case <-ctx.Done():
			return fmt.Errorf("%w; last: %w", context.Cause(ctx), err)
		}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer afterGone(g.vm.Gone(), func() { cancel(errors.New("the microVM ended while it started")) })()
	return g.agent.ready(ctx)
}

// afterGone calls f when gone is closed, unless stop is called before.
func afterGone(gone <-chan struct{}, f func()) (stop func()) {
	stopped := make(chan struct{})
	go func() {
		select {
		case <-gone:
			f()
		case <-stopped:
		}
	}()
	return func() { close(stopped) }
}

// seedBytes is how much a microVM's random numbers are seeded with.
const seedBytes = 64

// wake waits for the agent of a microVM that was made from a snapshot, and gives
// it the time and a seed.
func (g *microvm) wake(ctx context.Context) error {
	if err := g.ready(ctx); err != nil {
		return err
	}
	seed := make([]byte, seedBytes)
	rand.Read(seed) // never fails; see crypto/rand
	return g.agent.wake(ctx, desktop.Waking{Now: time.Now(), Seed: seed})
}

func (g *microvm) Identity() Identity {
	pid, started := g.vm.Process()
	return Identity{PID: pid, Started: started}
}
func (g *microvm) Agent() *agentClient   { return g.agent }
func (g *microvm) Gone() <-chan struct{} { return g.vm.Gone() }

func (g *microvm) Kill() error {
	g.agent.close()
	return g.vm.Kill()
}

func (g *microvm) Paused() bool { return g.vm.Paused() }

// Pause ends every connection to the agent.
func (g *microvm) Pause(ctx context.Context) error {
	g.agent.close()
	return g.vm.Pause(ctx)
}

func (g *microvm) Resume(ctx context.Context) error {
	if !g.vm.Paused() {
		return nil
	}
	if err := g.vm.Resume(ctx); err != nil {
		return err
	}
	return g.wake(ctx)
}

// Keep ends every connection to the agent, since a snapshot does.
func (g *microvm) Keep(ctx context.Context, to firecracker.Snapshot) error {
	g.agent.close()
	return g.vm.Snapshot(ctx, to)
}
