package desktop

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/jezek/xgb"
	"github.com/jezek/xgb/xproto"

	"berth/internal/computer"
)

// Limits of the clipboard.
const (
	maxClipboard  = 256 << 10       // bytes read: what fits a result on the bus
	clipboardWait = 2 * time.Second // for the program that owns the selection
)

// clipboard owns and asks for the CLIPBOARD selection, over a connection of its
// own: it must answer other programs at any time.
type clipboard struct {
	conn   *xgb.Conn
	atoms  atoms
	window xproto.Window
	done   chan struct{}

	reading sync.Mutex // one read at a time

	mu      sync.Mutex
	text    string // what this owner hands out
	owning  bool
	since   xproto.Timestamp
	notify  chan xproto.SelectionNotifyEvent
	changed chan xproto.PropertyNotifyEvent
}

// openClipboard connects to display n.
func openClipboard(n int) (*clipboard, error) {
	conn, err := xgb.NewConnDisplay(fmt.Sprintf(":%d", n))
	if err != nil {
		return nil, fmt.Errorf("connect the clipboard: %w", err)
	}
	c := &clipboard{conn: conn, done: make(chan struct{}), notify: make(chan xproto.SelectionNotifyEvent, 1), changed: make(chan xproto.PropertyNotifyEvent, 64)}
	if c.atoms, err = intern(conn); err == nil {
		if c.window, err = xproto.NewWindowId(conn); err == nil {
			def := xproto.Setup(conn).DefaultScreen(conn)
			err = xproto.CreateWindowChecked(conn, 0, c.window, def.Root, -10, -10, 1, 1, 0, xproto.WindowClassInputOnly, 0,
				xproto.CwEventMask, []uint32{xproto.EventMaskPropertyChange}).Check()
		}
	}
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("open the clipboard: %w", err)
	}
	go c.serve()
	return c, nil
}

func (c *clipboard) close() {
	c.conn.Close()
	<-c.done
}

func (c *clipboard) serve() {
	defer close(c.done)
	for {
		ev, err := c.conn.WaitForEvent()
		if ev == nil && err == nil {
			return
		}
		switch ev := ev.(type) {
		case xproto.SelectionRequestEvent:
			c.answer(ev)
		case xproto.SelectionClearEvent:
			c.mu.Lock()
			c.owning, c.text = false, ""
			c.mu.Unlock()
		case xproto.SelectionNotifyEvent:
			select {
			case c.notify <- ev:
			default: // nobody waits for it any more
			}
		case xproto.PropertyNotifyEvent:
			if ev.State == xproto.PropertyNewValue {
				select {
				case c.changed <- ev:
				default:
				}
			}
		}
	}
}

// answer hands the text to a program that asks for it.
func (c *clipboard) answer(ev xproto.SelectionRequestEvent) {
	property := ev.Property
	if property == 0 {
		property = ev.Target // clients of before ICCCM 2.2
	}
	c.mu.Lock()
	text, owning, since := c.text, c.owning, c.since
	c.mu.Unlock()
	put := func(typ xproto.Atom, format byte, n int, data []byte) {
		xproto.ChangeProperty(c.conn, xproto.PropModeReplace, ev.Requestor, property, typ, format, uint32(n), data)
	}
	utf8Text := []xproto.Atom{c.atoms["UTF8_STRING"], c.atoms["text/plain;charset=utf-8"], c.atoms["text/plain"], c.atoms["TEXT"]}
	switch {
	case !owning || ev.Selection != c.atoms["CLIPBOARD"]:
		property = 0
	case ev.Target == c.atoms["TARGETS"]:
		targets := append([]xproto.Atom{c.atoms["TARGETS"], c.atoms["TIMESTAMP"], xproto.AtomString}, utf8Text...)
		raw := make([]byte, 4*len(targets))
		for i, t := range targets {
			xgb.Put32(raw[4*i:], uint32(t))
		}
		put(xproto.AtomAtom, 32, len(targets), raw)
	case ev.Target == c.atoms["TIMESTAMP"]:
		raw := make([]byte, 4)
		xgb.Put32(raw, uint32(since))
		put(xproto.AtomInteger, 32, 1, raw)
	case ev.Target == xproto.AtomString:

		if !isLatin1(text) {
			property = 0
		} else {
			var latin []byte
			for _, r := range text {
				latin = append(latin, byte(r))
			}
			put(xproto.AtomString, 8, len(latin), latin)
		}
	case slices.Contains(utf8Text, ev.Target):
		typ := ev.Target
		if typ == c.atoms["TEXT"] {
			typ = c.atoms["UTF8_STRING"]
		}
		put(typ, 8, len(text), []byte(text))
	default:
		property = 0
	}
	reply := xproto.SelectionNotifyEvent{Time: ev.Time, Requestor: ev.Requestor, Selection: ev.Selection, Target: ev.Target, Property: property}
	xproto.SendEvent(c.conn, false, ev.Requestor, 0, string(reply.Bytes()))
}

func isLatin1(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r > 0xff })
}

// write makes text the clipboard's content.
func (c *clipboard) write(text string) error {
	now, err := c.now()
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.text, c.owning, c.since = text, true, now
	c.mu.Unlock()
	xproto.SetSelectionOwner(c.conn, c.window, c.atoms["CLIPBOARD"], now)
	owner, err := xproto.GetSelectionOwner(c.conn, c.atoms["CLIPBOARD"]).Reply()
	if err != nil {
		return fmt.Errorf("write the clipboard: %w: %w", errServer, err)
	}
	if owner.Owner != c.window {
		return &computer.Fault{Code: codeFailed, Message: "another program took the clipboard at the same moment"}
	}
	return nil
}

// now asks the server for its time, as owners of selections must (ICCCM 2.1):
// a change of nothing in a property tells it.
func (c *clipboard) now() (xproto.Timestamp, error) {
	c.reading.Lock()
	defer c.reading.Unlock()
	c.drop()
	xproto.ChangeProperty(c.conn, xproto.PropModeAppend, c.window, c.atoms["BERTH_CLIPBOARD"], xproto.AtomString, 8, 0, nil)
	timer := time.NewTimer(clipboardWait)
	defer timer.Stop()
	select {
	case ev := <-c.changed:
		return ev.Time, nil
	case <-timer.C:
		return 0, fmt.Errorf("the X server told no time in %s: %w", clipboardWait, errServer)
	case <-c.done:
		return 0, errServer
	}
}

// drop forgets events of earlier calls.
func (c *clipboard) drop() {
	for {
		select {
		case <-c.notify:
		case <-c.changed:
		default:
			return
		}
	}
}

// read returns the clipboard's text, "" where it has none.
func (c *clipboard) read(ctx context.Context) (string, error) {
	c.mu.Lock()
	text, owning := c.text, c.owning
	c.mu.Unlock()
	if owning {
		return text, nil
	}
	c.reading.Lock()
	defer c.reading.Unlock()
	owner, err := xproto.GetSelectionOwner(c.conn, c.atoms["CLIPBOARD"]).Reply()
	if err != nil {
		return "", fmt.Errorf("read the clipboard: %w: %w", errServer, err)
	}
	if owner.Owner == 0 {
		return "", nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, clipboardWait, &computer.Fault{Code: codeTimeout, Message: "the program that owns the clipboard did not hand it over in " + clipboardWait.String()})
	defer cancel()
	raw, ok, err := c.convert(ctx, c.atoms["UTF8_STRING"])
	if err == nil && !ok {
		if raw, ok, err = c.convert(ctx, xproto.AtomString); ok {
			runes := make([]rune, len(raw))
			for i, b := range raw {
				runes[i] = rune(b)
			}
			raw = []byte(string(runes))
		}
	}
	if err != nil {
		return "", err
	}
	if !utf8.Valid(raw) {
		return strings.ToValidUTF8(string(raw), "\uFFFD"), nil
	}
	return string(raw), nil // not ok: it holds something that is no text
}

// convert asks the owner for one form of the selection.
func (c *clipboard) convert(ctx context.Context, target xproto.Atom) ([]byte, bool, error) {
	c.drop()
	property := c.atoms["BERTH_CLIPBOARD"]
	xproto.DeleteProperty(c.conn, c.window, property)
	xproto.ConvertSelection(c.conn, c.window, c.atoms["CLIPBOARD"], target, property, xproto.TimeCurrentTime)
	select {
	case ev := <-c.notify:
		if ev.Property == 0 {
			return nil, false, nil
		}
	case <-ctx.Done():
		return nil, false, context.Cause(ctx)
	case <-c.done:
		return nil, false, errServer
	}
	raw, typ, err := c.take(property)
	if err != nil || typ != c.atoms["INCR"] {
		return raw, err == nil, err
	}
	var whole []byte // in pieces; the owner puts each after the one before was deleted
	for {
		select {
		case <-c.changed:
		case <-ctx.Done():
			return nil, false, context.Cause(ctx)
		case <-c.done:
			return nil, false, errServer
		}
		piece, typ, err := c.take(property)
		if err != nil {
			return nil, false, err
		}
		if typ == 0 {
			continue // a notice of what has been taken already
		}
		if len(piece) == 0 {
			return whole, true, nil
		}
		if whole = append(whole, piece...); len(whole) > maxClipboard {
			return nil, false, tooLarge(len(whole))
		}
	}
}

func tooLarge(n int) error {
	return &computer.Fault{Code: computer.CodeTooLarge, Message: fmt.Sprintf("the clipboard holds more than %d bytes, at most %d are read", n, maxClipboard)}
}

// take reads and deletes a property.
func (c *clipboard) take(property xproto.Atom) ([]byte, xproto.Atom, error) {
	reply, err := xproto.GetProperty(c.conn, true, c.window, property, xproto.GetPropertyTypeAny, 0, maxClipboard/4).Reply()
	if err != nil {
		return nil, 0, fmt.Errorf("read the clipboard: %w: %w", errServer, err)
	}
	if reply.BytesAfter > 0 {
		return nil, 0, tooLarge(len(reply.Value))
	}
	return reply.Value, reply.Type, nil
}
