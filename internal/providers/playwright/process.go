package playwright

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/computer"
)

// launchTimeout bounds a browser's start, to the moment that its debugging
// port answers. It takes 0.3 to 0.8 s on an idle machine.
const launchTimeout = 30 * time.Second

// flags are what every browser is started with. They switch off what talks to
// the network, asks questions, or changes timing by itself.
var flags = []string{
	"--headless",
	"--remote-debugging-port=0", // Chromium chooses; see DevToolsActivePort
	"--no-first-run", "--no-default-browser-check", "--no-service-autorun", "--disable-search-engine-choice-screen",
	"--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-default-apps",
	"--disable-extensions", "--disable-field-trial-config", "--disable-client-side-phishing-detection",
	// Not --disable-crashpad-for-testing: with it the network service of Debian's
	// Chromium ends as it starts ("FD ownership violation"), and no page loads.
	"--disable-breakpad", "--metrics-recording-only", "--disable-domain-reliability",
	"--disable-quic", "--disable-gpu", "--mute-audio", "--password-store=basic",
	"--keep-alive-for-test", // a browser whose last page closes gets a new one, see connection
	"--disable-hang-monitor", "--disable-prompt-on-repost", "--disable-smooth-scrolling",
	"--disable-renderer-backgrounding", "--disable-backgrounding-occluded-windows", "--disable-background-timer-throttling",
	"--disable-back-forward-cache", "--disable-ipc-flooding-protection", "--allow-pre-commit-input",
	"--force-color-profile=srgb", "--force-device-scale-factor=1",
	"--disable-features=Translate,MediaRouter,OptimizationHints,InterestFeedContentSuggestions,AutofillServerCommunication,CertificateTransparencyComponentUpdater,PaintHolding,DestroyProfileOnBrowserClose,HttpsUpgrades,RenderDocument",
}

// process is one browser process and its group. It is the leader of a session
// of its own, so that the group's id is its pid and no signal to the worker's
// group reaches it.
type process struct {
	pid      int
	started  string // start time in clock ticks, from /proc/<pid>/stat: pid and start name a process for ever
	endpoint string // ws://127.0.0.1:<port>/devtools/browser/<uuid>
	exited   chan struct{}
	unwatch  func() // stops watching; the process lives on
}

// launcher starts browsers. With ephemeral set they die with this process,
// also when it is killed: Linux sends the parent-death signal when the *thread*
// that forked ends, so all forks happen on one locked thread that lives until
// close.
type launcher struct {
	executable string
	ephemeral  bool
	forks      chan func()
	done       sync.WaitGroup
}

func newLauncher(executable string, ephemeral bool) *launcher {
	l := &launcher{executable: executable, ephemeral: ephemeral, forks: make(chan func())}
	if ephemeral {
		l.done.Go(func() {
			runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
			for fork := range l.forks {
				fork()
			}
		})
	}
	return l
}

// close ends the forking thread, and with it every ephemeral browser.
func (l *launcher) close() {
	close(l.forks)
	l.done.Wait()
}

func (l *launcher) start(cmd *exec.Cmd) error {
	if !l.ephemeral {
		return cmd.Start()
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	answer := make(chan error)
	l.forks <- func() { answer <- cmd.Start() }
	return <-answer
}

// browserEnv is the environment of a browser: no variable of the worker's
// reaches it but these, since a page may read what a browser process knows.
func browserEnv(dir string, extra map[string]string) []string {
	env := []string{
		"PATH=/usr/local/bin:/usr/bin:/bin", "HOME=" + dir, "XDG_RUNTIME_DIR=" + dir, "XDG_CONFIG_HOME=" + dir, "XDG_CACHE_HOME=" + dir,
		"DBUS_SESSION_BUS_ADDRESS=disabled:",
	}
	for _, name := range []string{"TZ", "LANG", "LANGUAGE", "FONTCONFIG_PATH", "FONTCONFIG_FILE", "LD_LIBRARY_PATH"} {
		value, ok := extra[name]
		if !ok {
			value, ok = os.LookupEnv(name)
		}
		if ok {
			env = append(env, name+"="+value)
		}
	}
	return env
}

// launch starts a browser in dir and waits until its debugging port is known.
// When it fails nothing of the process is left, but dir is.
func (l *launcher) launch(ctx context.Context, dir string, display computer.Display, env map[string]string) (*process, error) {
	profile := filepath.Join(dir, "profile")
	if err := os.MkdirAll(profile, 0o700); err != nil {
		return nil, fmt.Errorf("make profile: %w", err)
	}
	log, err := os.OpenFile(filepath.Join(dir, "browser.log"), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make log: %w", err)
	}
	defer func() { _ = log.Close() }() // the browser has its own descriptor
	args := append(slices.Clone(flags), "--user-data-dir="+profile, fmt.Sprintf("--window-size=%d,%d", display.Width, display.Height))
	if os.Geteuid() == 0 {
		args = append(args, "--no-sandbox") // Chromium refuses to sandbox as root
	}
	cmd := exec.Command(l.executable, append(args, "about:blank")...)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = dir, browserEnv(dir, env), log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := l.start(cmd); err != nil {
		return nil, fmt.Errorf("start %s: %w", l.executable, err)
	}
	p := &process{pid: cmd.Process.Pid, exited: make(chan struct{}), unwatch: func() {}}
	stat, statErr := readStat(p.pid) // before Wait can reap it
	p.started = stat.started
	go func() { // ends with the process; Wait's error is the kill that we sent, or told by exited
		_ = cmd.Wait()
		close(p.exited)
	}()
	if statErr == nil {
		p.endpoint, err = p.awaitEndpoint(ctx, profile)
	} else {
		err = statErr
	}
	if err != nil {
		killErr := p.kill(context.WithoutCancel(ctx))
		return nil, errors.Join(fmt.Errorf("browser did not start: %w%s", err, logTail(dir)), killErr)
	}
	return p, nil
}

// awaitEndpoint polls for the file in which Chromium writes its port and path.
func (p *process) awaitEndpoint(ctx context.Context, profile string) (string, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, launchTimeout, errors.New("no debugging port in "+launchTimeout.String()))
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		raw, err := os.ReadFile(filepath.Join(profile, "DevToolsActivePort"))
		if port, path, ok := strings.Cut(string(raw), "\n"); err == nil && ok && strings.HasPrefix(path, "/devtools/browser/") {
			return "ws://127.0.0.1:" + port + strings.TrimSpace(path), nil
		}
		select {
		case <-p.exited:
			return "", errors.New("it exited")
		case <-ctx.Done():
			return "", context.Cause(ctx)
		case <-tick.C:
		}
	}
}

// logTail returns the last lines of a browser's log for an error message.
func logTail(dir string) string {
	f, err := os.Open(filepath.Join(dir, "browser.log"))
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }() // only read
	if info, err := f.Stat(); err == nil && info.Size() > 600 {
		if _, err := f.Seek(-600, io.SeekEnd); err != nil {
			return ""
		}
	}
	raw, err := io.ReadAll(f)
	if err != nil || len(bytes.TrimSpace(raw)) == 0 {
		return ""
	}
	return "; its log ends: " + strings.TrimSpace(string(raw))
}

// adopt watches a browser that another process started, if it still lives and
// is the one recorded: same pid, same start, and dir in its command line.
func adopt(pid int, started, endpoint, dir string) (*process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	file := os.NewFile(uintptr(fd), "pidfd")
	stat, err := readStat(pid)
	if err == nil && (stat.started != started || stat.state == "Z" || !browses(pid, dir)) {
		err = errors.New("is another one now")
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("process %d: %w", pid, err), file.Close())
	}
	_ = syscall.Kill(-pid, syscall.SIGCONT) // a crash may have left it frozen; a browser that has just ended cannot be continued
	p := &process{pid: pid, started: started, endpoint: endpoint, exited: make(chan struct{})}
	p.unwatch = watchExit(file, func() { close(p.exited) })
	return p, nil
}

// watchExit calls exited when the process of a pidfd ends, unless the returned
// function was called first; that function waits for the watcher's end.
func watchExit(pidfd *os.File, exited func()) (stop func()) {
	var watcher sync.WaitGroup
	watcher.Go(func() {
		conn, err := pidfd.SyscallConn()
		if err != nil {
			return
		}
		gone := false
		err = conn.Read(func(fd uintptr) bool { // a pidfd is readable once its process has ended
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
			gone = err == nil && n > 0
			return gone
		})
		if err == nil && gone {
			exited()
		}
	})
	var once sync.Once
	return func() {
		once.Do(func() {
			_ = pidfd.Close() // only wakes the watcher: nothing was written
			watcher.Wait()
		})
	}
}

// quit asks a browser to write its profile and exit, and waits for that, at
// most quitWithin, and not when stop is closed. Whoever calls it kills what is
// left.
func (p *process) quit(stop <-chan struct{}) {
	ctx, cancel := context.WithTimeout(context.Background(), quitWithin)
	var helpers sync.WaitGroup
	defer helpers.Wait()
	defer cancel()
	helpers.Go(func() {
		select {
		case <-stop:
			cancel()
		case <-p.exited:
			cancel()
		case <-ctx.Done():
		}
	})
	c, err := dialDevtools(ctx, p.endpoint, func(read func()) bool { helpers.Go(read); return true })
	if err != nil {
		return // there is nobody to ask
	}
	defer c.close()
	_ = c.call(ctx, "", "Browser.close", nil, nil) // what counts is the exit
	<-ctx.Done()
}

// freeze stops every process of the group, so that their files stand still, and
// returns when they have stopped. thaw must be called.
func (p *process) freeze(ctx context.Context) (thaw func(), err error) {
	thaw = func() { _ = syscall.Kill(-p.pid, syscall.SIGCONT) } // fails when it has ended
	if err := syscall.Kill(-p.pid, syscall.SIGSTOP); err != nil {
		return nil, fmt.Errorf("freeze the browser: %w", err)
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for p.moves() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			thaw()
			return nil, context.Cause(ctx)
		}
	}
	return thaw, nil
}

// moves reports whether a process of the group is neither stopped nor ended.
func (p *process) moves() bool {
	moves := false
	eachProcess(func(pid int) {
		s, err := readStat(pid)
		moves = moves || err == nil && s.pgrp == p.pid && s.state != "T" && s.state != "Z" && s.state != "X"
	})
	return moves
}

// kill ends the whole group at once and waits until no process of it runs. What
// of the profile shall stay was written before, see quit.
func (p *process) kill(ctx context.Context) error {
	return killGroup(ctx, p.pid)
}

func killGroup(ctx context.Context, pgid int) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 10*time.Second, fmt.Errorf("process group %d still runs after SIGKILL", pgid))
	defer cancel()
	tick := time.NewTicker(3 * time.Millisecond)
	defer tick.Stop()
	for {
		// Processes that the group forked meanwhile get the next round's signal.
		if err := syscall.Kill(-pgid, syscall.SIGKILL); errors.Is(err, syscall.ESRCH) || !groupRuns(pgid) {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

type stat struct {
	state   string
	pgrp    int
	started string
}

// readStat reads /proc/<pid>/stat; see proc(5).
func readStat(pid int) (stat, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return stat{}, err
	}
	// The second field, the name in parentheses, may hold spaces and parentheses.
	fields := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
	if len(fields) < 20 {
		return stat{}, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	pgrp, err := strconv.Atoi(fields[2])
	return stat{state: fields[0], pgrp: pgrp, started: fields[19]}, err
}

// groupRuns reports whether a process of the group is not a zombie.
func groupRuns(pgid int) bool {
	runs := false
	eachProcess(func(pid int) {
		s, err := readStat(pid)
		runs = runs || err == nil && s.pgrp == pgid && s.state != "Z"
	})
	return runs
}

func eachProcess(visit func(pid int)) {
	dir, err := os.Open("/proc")
	if err != nil {
		return
	}
	defer func() { _ = dir.Close() }() // only read
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return
	}
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil {
			visit(pid)
		}
	}
}

// browses reports whether a process was started as the browser of dir.
func browses(pid int, dir string) bool {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && bytes.Contains(raw, []byte("--user-data-dir="+filepath.Join(dir, "profile")))
}

// reap kills every process group that has a browser process of dir: also one
// that was started and never recorded.
func reap(ctx context.Context, dir string) error {
	groups := map[int]bool{}
	eachProcess(func(pid int) {
		if s, err := readStat(pid); err == nil && s.state != "Z" && browses(pid, dir) && s.pgrp != syscall.Getpgrp() {
			groups[s.pgrp] = true
		}
	})
	var errs []error
	for pgid := range groups {
		errs = append(errs, killGroup(ctx, pgid))
	}
	return errors.Join(errs...)
}

// findExecutable returns the browser to use.
func findExecutable(given string) (string, error) {
	const advice = "install one with `apt-get install chromium` or `npx playwright install chromium`, or name it in BERTH_CHROMIUM"
	for _, name := range []string{given, os.Getenv("BERTH_CHROMIUM")} {
		if name == "" {
			continue
		}
		path, err := exec.LookPath(name)
		if err != nil {
			return "", fmt.Errorf("browser %q: %w; %s", name, err, advice)
		}
		return path, nil
	}
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome", "google-chrome-stable"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	home, err := os.UserHomeDir()
	if err == nil {
		found, err := filepath.Glob(filepath.Join(home, ".cache/ms-playwright/chromium-*/chrome-linux*/chrome"))
		if err == nil && len(found) > 0 {
			return found[len(found)-1], nil
		}
	}
	return "", errors.New("no Chromium found; " + advice)
}
