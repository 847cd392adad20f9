package desktop

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jezek/xgb/xproto"
	"github.com/jezek/xgb/xtest"
)

// ViewProtocol is what an Upgrade to a viewer's connection names: RFB (RFC 6143),
// from the server's version on, without security of its own.
const ViewProtocol = "rfb"

// ViewMissing says what a machine lacks to show a desktop over RFB, and how to
// get it; nil: nothing.
func ViewMissing() error {
	if _, err := exec.LookPath("x11vnc"); err != nil {
		return errors.New("x11vnc is not installed; on Debian: apt-get install --no-install-recommends x11vnc")
	}
	return nil
}

// viewFlags of x11vnc, beside the display. It serves one viewer on its standard
// input and output and ends with that: no port, no password, no file.
var viewFlags = []string{
	"-inetd", "-norc", "-nopw", "-nolookup",
	// Programs of the desktop cannot give it orders (properties of the root
	// window), and it starts none.
	"-safer", "-nocmds", "-noultraext",
	// It leaves the desktop alone: the clipboard is the actions', and so is how
	// keys repeat.
	"-nosel", "-nobell", "-repeat",
	// Shared memory would stay behind when it is killed: tens of segments.
	"-noshm",
	// The pointer is drawn into the picture: whoever only looks sees it move.
	"-nocursorshape", "-nowireframe", "-noscrollcopyrect",
}

// viewGrace is how long an x11vnc may take to end after its viewer has gone.
const viewGrace = 500 * time.Millisecond

// View shows the desktop to the viewer on conn until one of them, or ctx, ends;
// then x11vnc has ended, and conn is still to be closed. Without control nothing
// that the viewer sends reaches the desktop. What a viewer held when it went is
// released.
func (s *Session) View(ctx context.Context, conn io.ReadWriter, control bool) error {
	ours, theirs, err := socketPair()
	if err != nil {
		return err
	}
	args := append([]string{"-display", ":" + strconv.Itoa(s.number)}, viewFlags...)
	if !control {
		args = append(args, "-viewonly")
	}
	// As the X server's user: programs of the desktop cannot end or trace it.
	cmd := s.service(s.serverUID, "x11vnc", args...)
	cmd.Env = baseEnvironment(s.number, "/nonexistent")
	said := &capped{limit: 16 << 10}
	cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.WaitDelay = theirs, theirs, said, outputGrace
	err = cmd.Start()
	if err = errors.Join(err, theirs.Close()); err != nil {
		return errors.Join(fmt.Errorf("start x11vnc (package x11vnc): %w", err), ours.Close())
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := cmd.Wait(); err != nil {
			text, _ := said.text()
			s.log.Debug("a viewer's x11vnc ended", "err", err, "said", lastLine(text))
		}
	}()
	// Each copy ends with either end; the one from the viewer may wait for it
	// beyond that, until conn is closed.
	gone := make(chan struct{}, 2)
	pipe := func(to io.Writer, from io.Reader) {
		_, _ = io.Copy(to, from) // how it ended is no matter
		gone <- struct{}{}
	}
	go pipe(ours, conn)
	go pipe(conn, ours)
	select {
	case <-gone:
	case <-ended:
	case <-ctx.Done():
	case <-s.down:
	}
	err = ours.Close()
	select {
	case <-ended:
	case <-s.down:
	case <-time.After(viewGrace):
	}
	killGroup(cmd.Process.Pid)
	<-ended
	if control && s.Err() == nil {
		err = errors.Join(err, s.releaseStrays())
	}
	return err
}

func lastLine(text string) string {
	text = strings.TrimSpace(text)
	return text[strings.LastIndexByte(text, '\n')+1:]
}

// socketPair makes a connection between this process and one that it starts.
func socketPair() (ours net.Conn, theirs *os.File, err error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a pair of sockets: %w", err)
	}
	file := os.NewFile(uintptr(fds[0]), "viewer")
	theirs = os.NewFile(uintptr(fds[1]), "x11vnc")
	ours, err = net.FileConn(file)
	if err = errors.Join(err, file.Close()); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("make a pair of sockets: %w", err), theirs.Close())
	}
	return ours, theirs, nil
}

// buttonMasks are the buttons that the X server tells of.
var buttonMasks = map[byte]uint16{1: xproto.ButtonMask1, 2: xproto.ButtonMask2, 3: xproto.ButtonMask3, 4: xproto.ButtonMask4, 5: xproto.ButtonMask5}

// releaseStrays releases the keys and buttons that are down and that no action
// holds: a viewer that went while it held them, for x11vnc does not. A key of
// another viewer may be among them.
func (s *Session) releaseStrays() error {
	keys, err := xproto.QueryKeymap(s.screen.conn).Reply()
	if err != nil {
		return s.screen.failed("query the keys", err)
	}
	pointer, err := xproto.QueryPointer(s.screen.conn, s.screen.root).Reply()
	if err != nil {
		return s.screen.failed("query the buttons", err)
	}
	// What an action presses is noted before it is sent: what is down and not
	// noted now is nobody's.
	for code := range xproto.Keycode(255) {
		if keys.Keys[code/8]>>(code%8)&1 == 1 && !s.screen.keys.holds(code) {
			xtest.FakeInput(s.screen.conn, xproto.KeyRelease, byte(code), 0, s.screen.root, 0, 0, 0)
		}
	}
	for button, mask := range buttonMasks {
		if pointer.Mask&mask != 0 && !s.mouse.holds(button) {
			xtest.FakeInput(s.screen.conn, xproto.ButtonRelease, button, 0, s.screen.root, 0, 0, 0)
		}
	}
	return s.screen.sync()
}

// holds reports whether an action holds a key; it may be called at any time.
func (k *keyboard) holds(code xproto.Keycode) bool {
	k.holding.Lock()
	defer k.holding.Unlock()
	return slices.Contains(k.held, code)
}

// holds reports whether an action holds a button; it may be called at any time.
func (m *mouse) holds(button byte) bool {
	m.holding.Lock()
	defer m.holding.Unlock()
	return slices.Contains(m.held, button)
}

// view hands the caller's connection over to a viewer of the desktop; see View.
func (a *Agent) view(w http.ResponseWriter, r *http.Request) {
	if err := ViewMissing(); err != nil {
		a.answer(w, http.StatusNotImplemented, Refusal{RefusedMissing, err.Error()})
		return
	}
	if r.Header.Get("Upgrade") != ViewProtocol {
		a.answer(w, http.StatusUpgradeRequired, Refusal{RefusedPlain, "this is for an Upgrade to " + ViewProtocol})
		return
	}
	if !a.enter() {
		a.refuse(w, a.session.lost())
		return
	}
	defer a.running.Done()
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		a.refuse(w, fmt.Errorf("take over the connection: %w", err))
		return
	}
	defer func() { a.session.dropError(conn.Close()) }()
	if _, err := io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+ViewProtocol+"\r\n\r\n"); err != nil {
		a.log.Debug("a viewer went at once", "err", err)
		return
	}
	viewer := struct {
		io.Reader
		io.Writer
	}{buffered.Reader, conn}
	if err := a.session.View(context.WithoutCancel(r.Context()), viewer, r.URL.Query().Get("control") == "true"); err != nil {
		a.log.Warn("a viewer's end", "err", err)
	}
}
