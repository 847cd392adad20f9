package desktop

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jezek/xgb/xproto"

	"berth/internal/computer"
)

// watching is a viewer of the desktop.
type watching struct {
	net.Conn
	ended chan error // what View returned
}

// watchDesktop has somebody see the desktop, up to the first message of theirs.
func watchDesktop(t *testing.T, s *Session, control bool) *watching {
	t.Helper()
	if err := ViewMissing(); err != nil {
		t.Fatal(err)
	}
	ours, file, err := socketPair()
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := net.FileConn(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	v := &watching{ours, make(chan error, 1)}
	go func() {
		err := s.View(t.Context(), theirs, control)
		_ = theirs.Close() // as the caller of View does
		v.ended <- err
	}()
	t.Cleanup(func() { _ = ours.Close() }) // most are closed by then
	if err := v.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	version := v.read(t, 12)
	v.send(t, version...)
	v.read(t, int(v.read(t, 1)[0]))
	v.send(t, 1) // no security
	v.read(t, 4)
	v.send(t, 1) // shared
	v.read(t, int(binary.BigEndian.Uint32(v.read(t, 24)[20:])))
	return v
}

func (v *watching) read(t *testing.T, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	if _, err := io.ReadFull(v, b); err != nil {
		t.Fatalf("read from the view: %v", err)
	}
	return b
}

func (v *watching) send(t *testing.T, b ...byte) {
	t.Helper()
	if _, err := v.Write(b); err != nil {
		t.Fatalf("write to the view: %v", err)
	}
}

// hold presses a key and the left button at 300,300, and returns when x11vnc has
// read that.
func (v *watching) hold(t *testing.T, key byte) {
	t.Helper()
	v.send(t, 4, 1, 0, 0, 0, 0, 0, key)
	v.send(t, 5, 1, 1, 44, 1, 44)
	v.send(t, 3, 0, 0, 0, 0, 0, 0, 1, 0, 1) // a picture of one pixel
	v.read(t, 4+12+4)
}

// part hangs up and waits for the end of the view.
func (v *watching) part(t *testing.T) {
	t.Helper()
	if err := v.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-v.ended; err != nil {
		t.Errorf("the view's end: %v", err)
	}
}

// TestView: with control a viewer acts, without nothing of it arrives. What a
// viewer held when it went is released, and what an action holds is not. x11vnc
// listens nowhere, leaves how keys repeat alone, and ends with its viewer and
// with the desktop.
func TestView(t *testing.T) {
	t.Parallel()
	s := start(t)
	r := record(t, s)
	down := func() (keys int, buttons uint16) {
		reply, err := xproto.QueryKeymap(s.screen.conn).Reply()
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range reply.Keys {
			for ; b != 0; b &= b - 1 {
				keys++
			}
		}
		pointer, err := xproto.QueryPointer(s.screen.conn, s.screen.root).Reply()
		if err != nil {
			t.Fatal(err)
		}
		return keys, pointer.Mask & (xproto.ButtonMask1 | xproto.ButtonMask2 | xproto.ButtonMask3)
	}
	look := watchDesktop(t, s, false)
	look.hold(t, 'q')
	control := watchDesktop(t, s, true)
	control.hold(t, 'z')
	events := r.await(t, "the viewer's z and button", func(all []input) bool {
		return len(of(all, "press")) > 0 && len(of(all, "down")) > 0
	})
	if first := of(events, "press")[0]; first.key != 'z' {
		t.Errorf("the first key that arrives is %v, want z: q is of the viewer without control", first)
	}
	if keys, buttons := down(); keys != 1 || buttons != xproto.ButtonMask1 {
		t.Errorf("%d keys and buttons %#x are down, want one of each", keys, buttons)
	}
	if k, err := xproto.GetKeyboardControl(s.screen.conn).Reply(); err != nil || k.GlobalAutoRepeat != xproto.AutoRepeatModeOn {
		t.Errorf("keys repeat: %+v, %v", k, err)
	}
	if ports := listening(t); len(ports) > 0 {
		t.Errorf("x11vnc listens: %s", ports)
	}

	do(t, s, computer.Action{Type: computer.MouseDown, Button: computer.Right})
	control.part(t)
	if keys, buttons := down(); keys != 0 || buttons != xproto.ButtonMask3 {
		t.Errorf("after the viewer %d keys and buttons %#x are down, want the action's only", keys, buttons)
	}
	do(t, s, computer.Action{Type: computer.MouseUp, Button: computer.Right})
	look.part(t)

	last := watchDesktop(t, s, true)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-last.ended; err != nil {
		t.Errorf("at the desktop's end: %v", err)
	}
}

// listening returns the sockets that an x11vnc of this process's listens on.
func listening(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	children, err := exec.Command("pgrep", "-x", "-P", fmt.Sprint(os.Getpid()), "x11vnc").Output()
	if err != nil {
		t.Fatalf("no x11vnc runs: %v", err)
	}
	sockets, err := exec.Command("netstat", "-lnp").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, sockets)
	}
	for _, pid := range strings.Fields(string(children)) {
		for line := range strings.Lines(string(sockets)) {
			if strings.Contains(line, " "+pid+"/") {
				out.WriteString(line)
			}
		}
	}
	return out.String()
}

// TestViewMissing: without x11vnc the agent says what to install.
func TestViewMissing(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	w := httptest.NewRecorder()
	(&Agent{}).view(w, httptest.NewRequest(http.MethodGet, "/view", nil))
	if w.Code != http.StatusNotImplemented || !strings.Contains(w.Body.String(), "apt-get install --no-install-recommends x11vnc") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}
