package playwright

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	pw "github.com/mxschmitt/playwright-go"
	"golang.org/x/sys/unix"
)

// nodeVariable is where playwright-go looks for a Node.js of the system's.
const nodeVariable = "PLAYWRIGHT_NODEJS_PATH"

// minNode is the oldest Node.js that Playwright's driver supports.
const minNode = 20

// findNode makes sure that playwright-go will find a Node.js, and sets its
// environment variable to it, process-wide.
var findNode = sync.OnceValue(locateNode)

func locateNode() error {
	path := os.Getenv(nodeVariable)
	if path == "" {
		found, err := exec.LookPath("node")
		if err != nil {
			return fmt.Errorf("no Node.js found, which Playwright's driver needs; install version %d or newer (`apt-get install nodejs`), or name it in %s", minNode, nodeVariable)
		}
		path = found
	}
	out, err := exec.Command(path, "--version").Output()
	if err != nil {
		return fmt.Errorf("run %s: %w", path, err)
	}
	major, _, _ := strings.Cut(strings.TrimPrefix(strings.TrimSpace(string(out)), "v"), ".")
	if n, err := strconv.Atoi(major); err != nil || n < minNode {
		return fmt.Errorf("%s is version %s; Playwright's driver needs %d or newer", path, strings.TrimSpace(string(out)), minNode)
	}
	return os.Setenv(nodeVariable, ownSession(path))
}

// ownSession returns a program that runs node in a session of its own, so that
// an interrupt from the terminal does not end the driver before the worker has
// drained; or node itself where that cannot be arranged. The driver ends with
// its standard input, so it does not outlive us.
func ownSession(node string) string {
	setsid, err := exec.LookPath("setsid")
	if err != nil {
		return node
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return node
	}
	script := fmt.Sprintf("#!/bin/sh\nexec '%s' '%s' \"$@\"\n", setsid, node)
	dir := filepath.Join(cache, "berth")
	if filepath.Dir(node) == dir { // it is such a program, from a parent's environment
		return node
	}
	sum := sha256.Sum256([]byte(script))
	path := filepath.Join(dir, fmt.Sprintf("node-%x", sum[:8]))
	if old, err := os.ReadFile(path); err == nil && string(old) == script {
		return path
	}
	if strings.ContainsRune(setsid+node, '\'') || os.MkdirAll(dir, 0o700) != nil {
		return node
	}
	fresh := fmt.Sprintf("%s.%d", path, os.Getpid())
	if os.WriteFile(fresh, []byte(script), 0o700) != nil || os.Rename(fresh, path) != nil {
		return node
	}
	return path
}

// EnsureDriver installs Playwright's driver (a JavaScript package from the npm
// registry, no browser) unless the right version is there already, and writes
// what it does to progress, which may be nil. An installation that is cut off
// leaves nothing that looks like a driver, and of two at once one does the
// work. It ends early with ctx, but an installation that has begun goes on in
// the background.
func EnsureDriver(ctx context.Context, progress io.Writer) error {
	if err := findNode(); err != nil {
		return err
	}
	if progress == nil {
		progress = io.Discard
	}
	done := make(chan error, 1)
	go func() { done <- installDriver(progress) }()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("install Playwright's driver: %w", err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("install Playwright's driver: %w", context.Cause(ctx))
	}
}

func installDriver(progress io.Writer) (err error) {
	d, err := pw.NewDriver(&pw.RunOptions{SkipInstallBrowsers: true})
	if err != nil {
		return err
	}
	dir := os.Getenv("PLAYWRIGHT_DRIVER_PATH") // the same places where playwright-go looks
	if dir == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return err
		}
		dir = filepath.Join(home, ".cache", "ms-playwright-go", d.Version)
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	lock, err := os.OpenFile(dir+".lock", os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	defer func() { // the lock goes by word, see state.close
		err = errors.Join(err, syscall.Flock(int(lock.Fd()), syscall.LOCK_UN), lock.Close())
	}()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	if driverInstalled() {
		return nil
	}
	if os.Getenv("PLAYWRIGHT_CLI_PATH") != "" {
		return fmt.Errorf("PLAYWRIGHT_CLI_PATH does not name a driver of version %s", d.Version)
	}
	fmt.Fprintln(progress, "installing Playwright's driver from the npm registry")
	fresh, err := os.MkdirTemp(filepath.Dir(dir), "installing-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(fresh)) }()
	if err := pw.Install(&pw.RunOptions{SkipInstallBrowsers: true, DriverDirectory: fresh, Stdout: progress}); err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil { // what is there is of another version, or broken
		return err
	}
	if err := os.Rename(fresh, dir); err != nil {
		return err
	}
	fmt.Fprintln(progress, "installed Playwright's driver in", dir)
	return nil
}

// driverInstalled reports whether the driver of the version that playwright-go
// wants is there.
func driverInstalled() bool {
	d, err := pw.NewDriver(&pw.RunOptions{SkipInstallBrowsers: true})
	if err != nil {
		return false
	}
	out, err := d.Command("--version").Output()
	return err == nil && strings.Contains(string(out), d.Version)
}

// driver is one run of Playwright's Node.js process.
type driver struct {
	pw    *pw.Playwright
	pid   int
	gone  chan struct{} // closed when the process has ended
	watch func()
}

// startDriver starts Playwright. It takes about 2 s.
func startDriver(ctx context.Context) (*driver, error) {
	type started struct {
		d   *driver
		err error
	}
	done := make(chan started, 1)
	go func() {
		// No Stderr and no Logger: playwright-go would redirect the process's own
		// log to them.
		run, err := pw.Run(&pw.RunOptions{SkipInstallBrowsers: true})
		if err != nil {
			done <- started{err: fmt.Errorf("start Playwright's driver: %w", err)}
			return
		}
		d, err := watchDriver(run.Pid())
		if err != nil {
			done <- started{err: errors.Join(err, run.Stop())}
			return
		}
		d.pw = run
		done <- started{d: d}
	}()
	select {
	case s := <-done:
		return s.d, s.err
	case <-ctx.Done():
		go func() { // the start cannot be interrupted; end what it makes
			if s := <-done; s.d != nil {
				s.d.stop()
			}
		}()
		return nil, context.Cause(ctx)
	}
}

// watchDriver follows the process of a driver.
func watchDriver(pid int) (*driver, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("watch Playwright's driver: %w", err)
	}
	d := &driver{pid: pid, gone: make(chan struct{})}
	d.watch = watchExit(os.NewFile(uintptr(fd), "pidfd"), func() { close(d.gone) })
	return d, nil
}

// stop kills the driver and waits for its end: gone is closed when it returns,
// also when playwright-go has reaped the process before. A kill rather than a
// goodbye: what the driver is connected to shall go on living, and a hung one
// must not hold us up.
func (d *driver) stop() {
	select {
	case <-d.gone:
	default:
		_ = syscall.Kill(d.pid, syscall.SIGKILL) // fails when it is gone already
		<-d.gone
	}
	d.watch()
}

// ping asks the driver for something trivial.
func (d *driver) ping(ctx context.Context) error {
	done := make(chan error, 1)
	go func() {
		request, err := d.pw.Request.NewContext()
		if err == nil {
			err = request.Dispose()
		}
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-d.gone:
		return errDriverGone
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

var errDriverGone = errors.New("Playwright's driver died")

// supervise keeps a driver running until ctx ends: it restarts one that died,
// kills one that no longer answers, and waits longer after each failed start.
func (p *Provider) supervise(ctx context.Context, d *driver) {
	delay := time.Duration(0)
	for {
		if d != nil {
			p.setDriver(d)
			delay = 0
			p.guard(ctx, d)
			p.setDriver(nil)
			d.stop()
		}
		if ctx.Err() != nil {
			return
		}
		p.log.Warn("restarting Playwright's driver", "after", delay)
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return
		}
		var err error
		if d, err = startDriver(ctx); err != nil {
			delay = min(max(2*delay, 500*time.Millisecond), 30*time.Second)
			if ctx.Err() == nil {
				p.log.Error("Playwright's driver does not start", "error", err)
			}
		}
	}
}

// guard returns when the driver has died, answers no more, or ctx has ended.
func (p *Provider) guard(ctx context.Context, d *driver) {
	tick := time.NewTicker(p.opts.pingEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-d.gone:
			p.log.Error("Playwright's driver died", "pid", d.pid)
			return
		case <-tick.C:
		}
		pingCtx, cancel := context.WithTimeout(ctx, p.opts.pingWithin)
		err := d.ping(pingCtx)
		cancel()
		if err != nil && ctx.Err() == nil {
			p.log.Error("Playwright's driver does not answer; killing it", "pid", d.pid, "error", err)
			return
		}
	}
}

// setDriver publishes the running driver, or nil while there is none.
func (p *Provider) setDriver(d *driver) {
	p.driverMu.Lock()
	defer p.driverMu.Unlock()
	p.driver = d
	close(p.driverChanged)
	p.driverChanged = make(chan struct{})
}

// awaitDriver returns the running driver, waiting for a restart.
func (p *Provider) awaitDriver(ctx context.Context) (*driver, error) {
	for {
		p.driverMu.Lock()
		d, changed := p.driver, p.driverChanged
		p.driverMu.Unlock()
		if d != nil {
			select {
			case <-d.gone: // and the supervisor has not noticed yet
			default:
				return d, nil
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}
