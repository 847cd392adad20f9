package desktop

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jezek/xgb"
	"github.com/jezek/xgb/xproto"

	"berth/internal/computer"
)

// recorder is the receiving end: an X11 program of its own that covers the
// screen and writes down every input event, as a simple program would see it.
type recorder struct {
	conn   *xgb.Conn
	window xproto.Window
	root   xproto.Window

	mu     sync.Mutex
	events []input
	came   chan struct{}
}

// input is one event: kind is press, release, down, up or move.
type input struct {
	kind  string
	at    computer.Point
	key   xproto.Keysym // press, release
	code  xproto.Keycode
	mods  uint16
	which byte // button of down and up
}

func (e input) String() string {
	switch e.kind {
	case "press", "release":
		return fmt.Sprintf("%s %#x/%d mods %#x", e.kind, e.key, e.code, e.mods)
	}
	return fmt.Sprintf("%s %d at %d,%d mods %#x", e.kind, e.which, e.at.X, e.at.Y, e.mods)
}

// record shows a recorder on the session's display.
func record(t testing.TB, s *Session) *recorder {
	t.Helper()
	conn, err := xgb.NewConnDisplay(fmt.Sprintf(":%d", s.number))
	if err != nil {
		t.Fatal(err)
	}
	r := &recorder{conn: conn, came: make(chan struct{})}
	def := xproto.Setup(conn).DefaultScreen(conn)
	if r.window, err = xproto.NewWindowId(conn); err != nil {
		t.Fatal(err)
	}
	mask := uint32(xproto.EventMaskKeyPress | xproto.EventMaskKeyRelease | xproto.EventMaskButtonPress | xproto.EventMaskButtonRelease | xproto.EventMaskPointerMotion)
	err = xproto.CreateWindowChecked(conn, 0, r.window, def.Root, 0, 0, def.WidthInPixels, def.HeightInPixels, 0, xproto.WindowClassInputOutput, 0,
		xproto.CwBackPixel|xproto.CwOverrideRedirect|xproto.CwEventMask, []uint32{0x336699, 1, mask}).Check()
	if err != nil {
		t.Fatal(err)
	}
	names, err := intern(conn)
	if err != nil {
		t.Fatal(err)
	}
	ping := make([]byte, 4)
	xgb.Put32(ping, uint32(names["_NET_WM_PING"]))
	xproto.ChangeProperty(conn, xproto.PropModeReplace, r.window, names["WM_PROTOCOLS"], xproto.AtomAtom, 32, 1, ping)
	r.root = def.Root
	if err := xproto.MapWindowChecked(conn, r.window).Check(); err != nil {
		t.Fatal(err)
	}
	if err := xproto.SetInputFocusChecked(conn, xproto.InputFocusParent, r.window, xproto.TimeCurrentTime).Check(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.read()
	}()
	t.Cleanup(func() {
		conn.Close()
		<-done
	})
	return r
}

// read handles events in their order; the keymap is fetched when a change of
// it is announced, which is when programs do.
func (r *recorder) read() {
	setup := xproto.Setup(r.conn)
	var per int
	var syms []xproto.Keysym
	fetch := func() bool {
		m, err := xproto.GetKeyboardMapping(r.conn, setup.MinKeycode, byte(setup.MaxKeycode-setup.MinKeycode+1)).Reply()
		if err != nil {
			return false
		}
		per, syms = int(m.KeysymsPerKeycode), m.Keysyms
		return true
	}
	if !fetch() {
		return
	}
	lookup := func(code xproto.Keycode, mods uint16) xproto.Keysym {
		at := int(code-setup.MinKeycode) * per
		plain, shifted := syms[at], syms[at+1]
		lock := mods&xproto.ModMaskLock != 0 && plain >= 'a' && plain <= 'z'
		if (mods&xproto.ModMaskShift != 0) != lock && shifted != 0 {
			return shifted
		}
		return plain
	}
	for {
		ev, err := r.conn.WaitForEvent()
		if ev == nil && err == nil {
			return
		}
		switch e := ev.(type) {
		case xproto.MappingNotifyEvent:
			if !fetch() {
				return
			}
		case xproto.ClientMessageEvent: // a ping: it goes back to the root window
			e.Window = r.root
			xproto.SendEvent(r.conn, false, r.root, xproto.EventMaskSubstructureNotify, string(e.Bytes()))
		case xproto.KeyPressEvent:
			r.add(input{kind: "press", key: lookup(e.Detail, e.State), code: e.Detail, mods: e.State})
		case xproto.KeyReleaseEvent:
			r.add(input{kind: "release", key: lookup(e.Detail, e.State), code: e.Detail, mods: e.State})
		case xproto.ButtonPressEvent:
			r.add(input{kind: "down", at: computer.Point{X: int(e.RootX), Y: int(e.RootY)}, which: byte(e.Detail), mods: e.State})
		case xproto.ButtonReleaseEvent:
			r.add(input{kind: "up", at: computer.Point{X: int(e.RootX), Y: int(e.RootY)}, which: byte(e.Detail), mods: e.State})
		case xproto.MotionNotifyEvent:
			r.add(input{kind: "move", at: computer.Point{X: int(e.RootX), Y: int(e.RootY)}, mods: e.State})
		}
	}
}

func (r *recorder) add(e input) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
	close(r.came)
	r.came = make(chan struct{})
}

// await returns what was recorded as soon as enough is true of it.
func (r *recorder) await(t testing.TB, what string, enough func([]input) bool) []input {
	t.Helper()
	deadline := time.NewTimer(60 * time.Second)
	defer deadline.Stop()
	for {
		r.mu.Lock()
		events, came := append([]input(nil), r.events...), r.came
		r.mu.Unlock()
		if enough(events) {
			return events
		}
		select {
		case <-came:
		case <-deadline.C:
			t.Fatalf("the program did not see %s; it saw\n%s", what, list(events))
		}
	}
}

// settle presses a key more, waits for it, and returns and forgets all before.
func (r *recorder) settle(t testing.TB, s *Session) []input {
	t.Helper()
	do(t, s, computer.Action{Type: computer.Key, Keys: []string{"F9"}})
	isMark := func(e input) bool { return e.key == keysyms["F9"] }
	events := r.await(t, "F9", func(es []input) bool {
		return len(es) > 0 && es[len(es)-1].kind == "release" && isMark(es[len(es)-1])
	})
	r.mu.Lock()
	r.events = nil
	r.mu.Unlock()
	var out []input
	for _, e := range events {
		if !isMark(e) {
			out = append(out, e)
		}
	}
	return out
}

func list(events []input) string {
	var b strings.Builder
	for _, e := range events {
		fmt.Fprintf(&b, "\t%s\n", e)
	}
	return b.String()
}

func of(events []input, kinds ...string) []input {
	var out []input
	for _, e := range events {
		for _, k := range kinds {
			if e.kind == k {
				out = append(out, e)
			}
		}
	}
	return out
}

// typed is the text that the key presses make.
func typed(events []input) string {
	var b strings.Builder
	for _, e := range of(events, "press") {
		switch {
		case e.key == keysyms["Enter"]:
			b.WriteRune('\n')
		case e.key == keysyms["Tab"]:
			b.WriteRune('\t')
		case e.key >= 0x01000000 && e.key < 0x02000000:
			b.WriteRune(rune(e.key - 0x01000000))
		case e.key < 0x100:
			b.WriteRune(rune(e.key))
		}
	}
	return b.String()
}

// released reports whether every key that went down came up, in reverse order.
func released(events []input) bool {
	var down []xproto.Keycode
	for _, e := range events {
		switch e.kind {
		case "press":
			if len(down) > 0 && down[len(down)-1] == e.code {
				continue // repeats while held
			}
			down = append(down, e.code)
		case "release":
			if len(down) == 0 || down[len(down)-1] != e.code {
				return false
			}
			down = down[:len(down)-1]
		}
	}
	return len(down) == 0
}
