package desktop

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"time"

	"github.com/jezek/xgb"
	"github.com/jezek/xgb/xproto"
)

// background is the colour of an empty desktop, 0xRRGGBB.
const background = 0x2e3b4e

// How often, and for how long, a change of the screen is waited for.
const (
	pollEvery   = 25 * time.Millisecond
	quietFor    = 200 * time.Millisecond // no change of the screen: it has been painted
	paintWithin = 10 * time.Second
	emptyWithin = 5 * time.Second
)

type atoms map[string]xproto.Atom

func intern(conn *xgb.Conn) (atoms, error) {
	names := []string{
		"_NET_SUPPORTING_WM_CHECK", "_NET_CLIENT_LIST", "_NET_ACTIVE_WINDOW", "_NET_WM_NAME", "WM_NAME", "WM_PROTOCOLS", "_NET_WM_PING", "UTF8_STRING",
		"CLIPBOARD", "TARGETS", "TIMESTAMP", "MULTIPLE", "TEXT", "INCR", "BERTH_CLIPBOARD",
		"text/plain", "text/plain;charset=utf-8",
	}
	cookies := make([]xproto.InternAtomCookie, len(names))
	for i, name := range names {
		cookies[i] = xproto.InternAtom(conn, false, uint16(len(name)), name)
	}
	out := atoms{}
	for i, c := range cookies {
		reply, err := c.Reply()
		if err != nil {
			return nil, fmt.Errorf("intern %s: %w", names[i], err)
		}
		out[names[i]] = reply.Atom
	}
	return out, nil
}

// property reads up to 4 KiB of a window's property; nil where it has none.
func (s *Screen) property(w xproto.Window, name string) ([]byte, error) {
	reply, err := xproto.GetProperty(s.conn, false, w, s.atoms[name], xproto.GetPropertyTypeAny, 0, 1024).Reply()
	if err != nil {
		return nil, s.failed("read property "+name, err)
	}
	return reply.Value, nil
}

func windowsIn(raw []byte) []xproto.Window {
	var out []xproto.Window
	for ; len(raw) >= 4; raw = raw[4:] {
		out = append(out, xproto.Window(binary.LittleEndian.Uint32(raw)))
	}
	return out
}

// managed reports whether a window manager serves the display.
func (s *Screen) managed() (bool, error) {
	raw, err := s.property(s.root, "_NET_SUPPORTING_WM_CHECK")
	return len(raw) >= 4, err
}

// paintRoot gives the root window its background and waits until a picture
// shows it: a first picture of a screen that nobody painted is noise.
func (s *Screen) paintRoot(ctx context.Context) error {
	xproto.ChangeWindowAttributes(s.conn, s.root, xproto.CwBackPixel, []uint32{background})
	xproto.ClearArea(s.conn, false, s.root, 0, 0, 0, 0)
	for {
		s.mu.Lock()
		err := s.grab()
		last := len(s.pixels) - 4
		painted := err == nil && bytes.Equal(s.pixels[last:last+3], []byte{background & 0xff, background >> 8 & 0xff, background >> 16})
		s.mu.Unlock()
		if painted || err != nil {
			return err
		}
		if err := sleep(ctx, pollEvery); err != nil {
			return fmt.Errorf("wait for the first frame: %w", err)
		}
	}
}

// shown is what tells that something has opened.
type shown struct {
	windows []xproto.Window
	active  xproto.Window
	title   string
}

func (s *Screen) shown() (shown, error) {
	raw, err := s.property(s.root, "_NET_CLIENT_LIST")
	if err != nil {
		return shown{}, err
	}
	out := shown{windows: windowsIn(raw)}
	if raw, err = s.property(s.root, "_NET_ACTIVE_WINDOW"); err != nil {
		return shown{}, err
	}
	if active := windowsIn(raw); len(active) > 0 && active[0] != 0 {
		out.active = active[0]
		for _, name := range []string{"_NET_WM_NAME", "WM_NAME"} {
			raw, err := s.property(out.active, name)
			if err == nil && len(raw) > 0 { // else it has just closed, or has no such title
				out.title = string(raw)
				break
			}
		}
	}
	return out, nil
}

// awaitChange waits until a window has come, or the active one or its title
// has changed, since before; alive says whether that can still happen.
func (s *Screen) awaitChange(ctx context.Context, before shown, alive func() error) error {
	for {
		now, err := s.shown()
		if err != nil {
			return err
		}
		came := slices.ContainsFunc(now.windows, func(w xproto.Window) bool { return !slices.Contains(before.windows, w) })
		if came || now.active != before.active && now.active != 0 || now.title != before.title {
			return nil
		}
		if err := alive(); err != nil {
			return err
		}
		if err := sleep(ctx, pollEvery); err != nil {
			return err
		}
	}
}

// awaitPainted waits until the active window shows more than one colour: a
// program that has opened a window has not painted it yet. An empty window is
// not waited for longer than emptyWithin.
func (s *Screen) awaitPainted(ctx context.Context) error {
	for began := time.Now(); time.Since(began) < emptyWithin; {
		empty, err := s.activeIsEmpty()
		if err != nil || !empty {
			return err
		}
		if err := sleep(ctx, pollEvery); err != nil {
			return err
		}
	}
	return nil
}

// activeIsEmpty reports whether the active window's inside is of one colour,
// looking at every eighth row.
func (s *Screen) activeIsEmpty() (bool, error) {
	raw, err := s.property(s.root, "_NET_ACTIVE_WINDOW")
	active := windowsIn(raw)
	if err != nil || len(active) == 0 || active[0] == 0 {
		return true, err
	}
	size, sizeErr := xproto.GetGeometry(s.conn, xproto.Drawable(active[0])).Reply()
	place, placeErr := xproto.TranslateCoordinates(s.conn, active[0], s.root, 0, 0).Reply()
	if sizeErr != nil || placeErr != nil {
		return true, nil // it has just closed
	}
	left, right := max(0, int(place.DstX)), min(s.size.Width, int(place.DstX)+int(size.Width))
	top, bottom := max(0, int(place.DstY)), min(s.size.Height, int(place.DstY)+int(size.Height))
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.grab(); err != nil {
		return true, err
	}
	if left >= right || top >= bottom {
		return false, nil
	}
	first := s.pixels[4*(top*s.size.Width+left):][:3]
	for y := top; y < bottom; y += 8 {
		row := s.pixels[4*(y*s.size.Width+left) : 4*(y*s.size.Width+right)]
		for ; len(row) > 0; row = row[4:] {
			if !bytes.Equal(row[:3], first) {
				return false, nil
			}
		}
	}
	return true, nil
}

// awaitQuiet waits until the screen has not changed for a moment. A screen
// that never rests is not waited for longer than paintWithin.
func (s *Screen) awaitQuiet(ctx context.Context) error {
	last, err := s.fingerprint()
	if err != nil {
		return err
	}
	began := time.Now()
	since := began
	for time.Since(since) < quietFor && time.Since(began) < paintWithin {
		if err := sleep(ctx, 2*pollEvery); err != nil {
			return err
		}
		now, err := s.fingerprint()
		if err != nil {
			return err
		}
		if now != last {
			last, since = now, time.Now()
		}
	}
	return nil
}
