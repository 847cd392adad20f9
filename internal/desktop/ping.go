package desktop

import (
	"context"
	"encoding/binary"
	"slices"
	"time"

	"github.com/jezek/xgb/xproto"
)

// caughtUp waits until the program that has the keyboard has handled what was
// sent to it so far. Programs of toolkits say so when they are asked
// (_NET_WM_PING of the Extended Window Manager Hints, in the order of events);
// for others, and while another caller asks, it reports false at once. It does
// not wait longer than within.
func (s *Screen) caughtUp(ctx context.Context, within time.Duration) (bool, error) {
	if !s.asking.TryLock() {
		return false, nil
	}
	defer s.asking.Unlock()
	window, err := s.keyboardOwner()
	if err != nil || window == 0 {
		return false, err
	}
	raw, err := s.property(window, "WM_PROTOCOLS")
	if err != nil || !slices.Contains(windowsIn(raw), xproto.Window(s.atoms["_NET_WM_PING"])) {
		return false, nil // it has no such protocol, or has just closed
	}
	for len(s.pongs) > 0 {
		<-s.pongs
	}
	s.serial++
	ask := xproto.ClientMessageEvent{Format: 32, Window: window, Type: s.atoms["WM_PROTOCOLS"],
		Data: xproto.ClientMessageDataUnionData32New([]uint32{uint32(s.atoms["_NET_WM_PING"]), s.serial, uint32(window), 0, 0})}
	xproto.SendEvent(s.conn, false, window, 0, string(ask.Bytes()))
	timer := time.NewTimer(within)
	defer timer.Stop()
	for {
		select {
		case serial := <-s.pongs:
			if serial == s.serial {
				return true, nil
			}
		case <-timer.C:
			return false, nil
		case <-ctx.Done():
			return false, context.Cause(ctx)
		case <-s.gone:
			return false, errServer
		}
	}
}

// keyboardOwner is the active window, else the one that has the focus.
func (s *Screen) keyboardOwner() (xproto.Window, error) {
	focus, err := xproto.GetInputFocus(s.conn).Reply()
	if err != nil {
		return 0, s.failed("query the focus", err)
	}
	raw, err := s.property(s.root, "_NET_ACTIVE_WINDOW")
	if err != nil {
		return 0, err
	}
	if active := windowsIn(raw); len(active) > 0 && active[0] != 0 {
		return active[0], nil
	}
	if focus.Focus <= xproto.InputFocusPointerRoot {
		return 0, nil
	}
	return focus.Focus, nil
}

// pong takes an answer to a ping off the event stream.
func (s *Screen) pong(ev xproto.ClientMessageEvent) {
	raw := ev.Data.Bytes()
	if ev.Type != s.atoms["WM_PROTOCOLS"] || len(raw) < 8 || xproto.Atom(binary.LittleEndian.Uint32(raw)) != s.atoms["_NET_WM_PING"] {
		return
	}
	select {
	case s.pongs <- binary.LittleEndian.Uint32(raw[4:]):
	default: // of a ping that nobody waits for
	}
}
