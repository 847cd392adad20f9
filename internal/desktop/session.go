package desktop

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"berth/internal/computer"
)

const (
	startWithin  = 20 * time.Second       // bounds the start of a desktop
	managerPause = 500 * time.Millisecond // before the window manager is started again
)

// Options describe a desktop to start.
type Options struct {
	Display computer.Display
	Person  Person // who its programs run as
	// ServerUID is who the X server runs as, so that a program cannot end it
	// with a signal; 0: as this process.
	ServerUID    int
	Env          []string // of its programs, beside DISPLAY, HOME and the like
	Nested       bool     // user namespaces can nest here, which Chromium's own sandbox needs
	BrowserFlags []string // more flags for Chromium
	Logger       *slog.Logger
}

// Session is one desktop: X server, window manager, and what drives them.
type Session struct {
	person       Person
	serverUID    int
	log          *slog.Logger
	nested       bool
	browserFlags []string

	number    int
	screen    *Screen
	clipboard *clipboard
	mouse     *mouse

	turn     chan struct{} // holds one token: batches run one at a time
	programs sync.WaitGroup
	down     chan struct{} // closed when the desktop can no longer be used
	downOnce sync.Once
	why      error

	mu      sync.Mutex
	env     []string
	extra   []string
	looking sync.Mutex
	behind  atomic.Bool  // input was sent since somebody looked
	opened  map[int]bool // process groups of programs that `open` started

	server *exec.Cmd
	waits  sync.WaitGroup
}

// dependencies are the programs that a desktop is made of, and their packages.
var dependencies = []struct{ program, pkg string }{
	{"Xvfb", "xvfb"}, {"setxkbmap", "x11-xkb-utils"}, {"openbox", "openbox"}, {"xterm", "xterm"},
	{"l3afpad", "l3afpad"}, {"pcmanfm", "pcmanfm"}, {"chromium", "chromium"},
}

// Missing returns an error that names the programs a desktop needs and this
// machine lacks, and how to get them; nil where all are there.
func Missing() error {
	var programs, packages []string
	for _, d := range dependencies {
		if _, err := exec.LookPath(d.program); err != nil {
			programs, packages = append(programs, d.program), append(packages, d.pkg)
		}
	}
	if len(programs) == 0 {
		return nil
	}
	return fmt.Errorf("missing: %s. On Debian: apt-get install --no-install-recommends %s", strings.Join(programs, ", "), strings.Join(packages, " "))
}

// Start starts a desktop and returns when it can be used: the keyboard layout
// is checked, a window manager serves, and a frame has been painted.
func Start(ctx context.Context, opts Options) (*Session, error) {
	if err := opts.Display.Validate(); err != nil {
		return nil, err
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Session{
		person: opts.Person, serverUID: opts.ServerUID, log: opts.Logger, nested: opts.Nested, browserFlags: opts.BrowserFlags,
		turn: make(chan struct{}, 1), down: make(chan struct{}), extra: opts.Env, opened: map[int]bool{},
	}
	s.turn <- struct{}{}
	ctx, cancel := context.WithTimeoutCause(ctx, startWithin, fmt.Errorf("the desktop did not start in %s", startWithin))
	defer cancel()
	if err := s.start(ctx, opts); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func (s *Session) start(ctx context.Context, opts Options) error {
	if err := s.startServer(ctx, opts); err != nil {
		return err
	}
	s.env = baseEnvironment(s.number, s.person.Home)
	var err error
	if s.screen, err = Connect(s.number); err != nil {
		return err
	}
	if s.screen.Size() != opts.Display {
		return fmt.Errorf("the X server's screen is %v, want %v", s.screen.Size(), opts.Display)
	}
	s.mouse = &mouse{s: s.screen}
	go func() {
		<-s.screen.Gone()
		s.fail(errServer)
	}()
	if s.clipboard, err = openClipboard(s.number); err != nil {
		return err
	}
	if err := s.layout(ctx); err != nil {
		return err
	}
	if err := s.startManager(ctx); err != nil {
		return err
	}
	return s.screen.paintRoot(ctx)
}

func baseEnvironment(display int, home string) []string {
	return []string{
		"DISPLAY=:" + strconv.Itoa(display), "HOME=" + home, "USER=user", "LOGNAME=user", "SHELL=/bin/bash", "LANG=C.UTF-8",
		"PATH=/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games:/usr/sbin:/sbin", "XDG_RUNTIME_DIR=" + filepath.Join(home, ".run"),
		"XDG_CURRENT_DESKTOP=openbox", "NO_AT_BRIDGE=1", "GTK_USE_PORTAL=0", "TERM=xterm-256color",
	}
}

// environment is what programs are started with.
func (s *Session) environment() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append(append([]string(nil), s.env...), s.extra...)
}

// SetEnv replaces the additional environment of programs started from now on.
func (s *Session) SetEnv(env []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.extra = append([]string(nil), env...)
}

// service prepares one of the desktop's own programs, which ends with this
// process.
func (s *Session) service(uid int, name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Env = s.environment()
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if uid != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}
	}
	return cmd
}

// startServer starts Xvfb on a free display number, which it tells through a
// pipe when it listens.
func (s *Session) startServer(ctx context.Context, opts Options) error {
	r, w, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make a pipe: %w", err)
	}
	defer func() { s.dropError(r.Close()) }()
	size := fmt.Sprintf("%dx%dx24", opts.Display.Width, opts.Display.Height)
	s.server = s.service(opts.ServerUID, "Xvfb", "-displayfd", "3", "-screen", "0", size, "-noreset", "-nolisten", "tcp", "-dpi", "96", "-s", "0")
	said := &capped{limit: 4 << 10}
	s.server.Stderr = said
	s.server.Env = baseEnvironment(0, "/nonexistent")
	s.server.ExtraFiles = []*os.File{w}
	err = s.server.Start()
	s.dropError(w.Close())
	if err != nil {
		s.server = nil
		return fmt.Errorf("start Xvfb (package xvfb): %w", err)
	}
	s.waits.Go(func() {
		err := s.server.Wait()
		s.fail(errors.Join(errServer, err))
	})
	type answer struct {
		line string
		err  error
	}
	got := make(chan answer, 1)
	go func() {
		line, err := bufio.NewReader(io.LimitReader(r, 16)).ReadString('\n')
		got <- answer{line, err}
	}()
	select {
	case a := <-got:
		number, err := strconv.Atoi(strings.TrimSpace(a.line))
		if a.err != nil || err != nil {
			text, _ := said.text()
			return fmt.Errorf("Xvfb did not start: %s", strings.TrimSpace(text))
		}
		s.number = number
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for Xvfb: %w", context.Cause(ctx))
	}
}

// layout makes sure of a US keyboard layout: what it lacks, upper case for
// one, is lost without a sound (docker-baseimage-selkies#183).
func (s *Session) layout(ctx context.Context) error {
	if s.screen.keys.checkLayout() == nil {
		return nil
	}
	cmd := exec.CommandContext(ctx, "setxkbmap", "-layout", "us")
	cmd.Env = s.environment()
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("set the keyboard layout: %w: %.200s", err, out)
	}
	if err := s.screen.keys.load(); err != nil {
		return err
	}
	return s.screen.keys.checkLayout()
}

// startManager starts openbox and returns when it serves. It is started again
// whenever it ends: it runs as the person, who can end it.
func (s *Session) startManager(ctx context.Context) error {
	if err := s.writeConfig(); err != nil {
		return err
	}
	said := &capped{limit: 4 << 10}
	s.waits.Go(func() { s.keepManager(said) })
	for {
		if ok, err := s.screen.managed(); err != nil || ok {
			return err
		}
		if err := sleep(ctx, 5*time.Millisecond); err != nil {
			text, _ := said.text()
			return fmt.Errorf("the window manager openbox (package openbox) does not serve: %w: %s", err, strings.TrimSpace(text))
		}
	}
}

func (s *Session) keepManager(said io.Writer) {
	for {
		cmd := s.service(s.person.UID, "openbox", "--sm-disable")
		cmd.Dir, cmd.Stderr = s.person.Home, said
		err := cmd.Start()
		if err == nil {
			ended := make(chan error, 1)
			go func() { ended <- cmd.Wait() }()
			select {
			case err = <-ended:
			case <-s.down:
				killGroup(cmd.Process.Pid)
				if err := <-ended; err != nil {
					s.log.Debug("the window manager was ended", "err", err)
				}
				return
			}
		}
		s.log.Debug("the window manager ended; starting it again", "err", err) // a program of the person can do this at will
		select {
		case <-s.down:
			return
		case <-time.After(managerPause):
		}
	}
}

// fail marks the desktop as lost.
func (s *Session) fail(err error) {
	s.downOnce.Do(func() {
		s.why = err
		close(s.down)
	})
}

// Down is closed when the desktop can no longer be used; Err then says why.
func (s *Session) Down() <-chan struct{} { return s.down }

// Err says why the desktop went down.
func (s *Session) Err() error {
	select {
	case <-s.down:
		return s.why
	default:
		return nil
	}
}

func (s *Session) dropError(err error) {
	if err != nil {
		s.log.Debug("closing", "err", err)
	}
}

// Close ends the desktop: X server and window manager are killed, and with the
// display every program that shows something. It waits for them.
func (s *Session) Close() error {
	s.fail(errors.New("the desktop was closed"))
	if s.server != nil {
		killGroup(s.server.Process.Pid)
	}
	s.mu.Lock()
	for pid := range s.opened {
		killGroup(pid)
	}
	s.mu.Unlock()
	s.programs.Wait()
	s.waits.Wait()
	if s.clipboard != nil {
		s.clipboard.close()
	}
	if s.screen != nil {
		s.screen.Close()
	}
	return nil
}
