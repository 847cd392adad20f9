package desktop

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/jezek/xgb/xproto"
	"github.com/jezek/xgb/xtest"

	"berth/internal/computer"
)

// buttonCodes are X11's numbers; 4 to 7 are the wheel.
var buttonCodes = map[computer.Button]byte{computer.Left: 1, computer.Middle: 2, computer.Right: 3, computer.Back: 8, computer.Forward: 9}

const (
	wheelUp, wheelDown, wheelLeft, wheelRight = 4, 5, 6, 7
)

// How a drag is drawn out, so that programs see one. Toolkits begin a drag after
// a few pixels of movement and ask the window below whether it takes what is
// dragged; both happen in turns between programs, for which the server's own
// speed is too fast (measured with Chromium, where a release that came before
// its drag had begun was taken for none).
const (
	dragPress    = 50 * time.Millisecond  // after the press
	dragBegin    = 200 * time.Millisecond // after the first movement
	dragPace     = 6 * time.Millisecond   // between points
	dragDrop     = 120 * time.Millisecond // at the end, and again after a nudge, before the release
	dragEnd      = 50 * time.Millisecond  // after the release
	dragStep     = 25.0                   // px between interpolated points
	minDragSteps = 6                      // in a whole drag
	maxDragSteps = 200                    // interpolated in a whole drag; the given points come on top
)

// keysAfter is the least time from a pointer event to a key event. Programs may
// look up what is below the pointer in another process while keys go straight
// on (Chromium does): a click into a field and the text for it would change
// places.
const keysAfter = 50 * time.Millisecond

// pressGap is the least time between two clicks at one place. Events carry milliseconds, and
// Chromium takes a press of the same one for the same press: a double click in
// one stroke would be a single one.
const pressGap = 5 * time.Millisecond

// lagWithin bounds the wait for a program that is behind, where going on too
// early would do no more than confuse it.
const lagWithin = time.Second

// arriveWithin bounds the wait for the pointer.
const arriveWithin = 2 * time.Second

// mouse moves the pointer and presses buttons through XTEST. Requests are sent
// at once and processed by the server in order; sync waits for that.
type mouse struct {
	s    *Screen
	last time.Time // when the last event was sent

	holding sync.Mutex
	held    []byte // buttons that are down, in the order pressed; changed by who has the turn

	pressed   time.Time // when a click last pressed a button
	pressedAt computer.Point
}

// yield waits until keys may follow what the pointer did.
func (m *mouse) yield(ctx context.Context) error {
	if m.last.IsZero() {
		return nil
	}
	began := time.Now()
	if _, err := m.s.caughtUp(ctx, lagWithin); err != nil {
		return err
	}
	gap := min(max(keysAfter, 8*time.Since(began)), 8*keysAfter) // longer where the program is slow to answer
	wait := time.Until(m.last.Add(gap))
	m.last = time.Time{}
	return sleep(ctx, wait)
}

func (m *mouse) move(to computer.Point) {
	m.last = time.Now()
	xtest.FakeInput(m.s.conn, xproto.MotionNotify, 0, 0, m.s.root, int16(to.X), int16(to.Y), 0)
}

func (m *mouse) button(b byte, down bool) {
	m.last = time.Now()
	kind := byte(xproto.ButtonRelease)
	m.holding.Lock()
	if i := slices.Index(m.held, b); i >= 0 {
		m.held = slices.Delete(m.held, i, i+1)
	}
	if down {
		kind = xproto.ButtonPress
		m.held = append(m.held, b)
	}
	m.holding.Unlock()
	xtest.FakeInput(m.s.conn, kind, b, 0, m.s.root, 0, 0, 0)
}

func (m *mouse) releaseAll() error {
	if len(m.held) == 0 {
		return nil
	}
	for _, b := range slices.Backward(slices.Clone(m.held)) {
		m.button(b, false)
	}
	return m.s.sync()
}

func (m *mouse) click(ctx context.Context, a computer.Action) error {
	b := buttonCodes[a.Button]
	m.move(a.Point())
	for range a.Count {
		if near := distance(m.pressedAt, a.Point()) < 10; near {
			if err := sleep(ctx, time.Until(m.pressed.Add(pressGap))); err != nil {
				return err
			}
		}
		m.pressed, m.pressedAt = time.Now(), a.Point()
		m.button(b, true)
		m.button(b, false)
		if err := m.awaitUp(ctx, b); err != nil {
			return err
		}
	}
	return nil
}

// awaitUp waits until the server has released a button. A window manager that
// looks at every press holds up what follows it; a release that is held up is
// given the place that the pointer has by the time it is let go, so the pointer
// must not move on before.
func (m *mouse) awaitUp(ctx context.Context, b byte) error {
	if b > 5 { // the protocol's mask has five buttons
		return m.s.sync()
	}
	began := time.Now()
	for asked := 0; ; asked++ {
		p, err := xproto.QueryPointer(m.s.conn, m.s.root).Reply()
		if err != nil {
			return m.s.failed("query the buttons", err)
		}
		if p.Mask&(xproto.ButtonMask1<<(b-1)) == 0 || time.Since(began) > arriveWithin {
			return nil
		}
		if asked < 20 { // each is a round trip, in which the window manager gets its turn
			continue
		}
		if err := sleep(ctx, 100*time.Microsecond); err != nil {
			return err
		}
	}
}

// scroll turns the wheel one notch at a time, the two axes in turn. X11 has no
// part of a notch: distances are rounded, to at least one notch.
func (m *mouse) scroll(a computer.Action) error {
	m.move(a.Point())
	dx, dy := notches(a.DX), notches(a.DY)
	for dx != 0 || dy != 0 {
		dx = m.notch(dx, wheelLeft, wheelRight)
		dy = m.notch(dy, wheelUp, wheelDown)
	}
	return m.s.sync()
}

func notches(ticks float64) int {
	n := int(math.Round(ticks))
	switch {
	case n == 0 && ticks > 0:
		return 1
	case n == 0 && ticks < 0:
		return -1
	}
	return n
}

func (m *mouse) notch(left int, back, forth byte) int {
	b := forth
	switch {
	case left == 0:
		return 0
	case left < 0:
		b = back
	}
	m.button(b, true)
	m.button(b, false)
	if left < 0 {
		return left + 1
	}
	return left - 1
}

// drag presses at the path's start, follows it through interpolated points,
// rests at its end with a nudge of one pixel, and releases there.
func (m *mouse) drag(ctx context.Context, a computer.Action) error {
	b := buttonCodes[a.Button]
	m.move(a.Path[0])
	m.button(b, true)
	if err := m.rest(ctx, dragPress); err != nil {
		return err
	}
	for i, p := range interpolate(a.Path) {
		m.move(p)
		err := m.settle(ctx, dragPace)
		if i == 0 && err == nil {
			err = m.rest(ctx, dragBegin)
		}
		if err != nil {
			return err
		}
	}
	end := a.Path[len(a.Path)-1]
	nudge := computer.Point{X: end.X - 1, Y: end.Y}
	if end.X == 0 {
		nudge.X = 1
	}
	for _, p := range []computer.Point{nudge, end} {
		m.move(p)
		if err := m.rest(ctx, dragDrop); err != nil {
			return err
		}
	}
	m.button(b, false)
	if err := m.awaitUp(ctx, b); err != nil {
		return err
	}
	return m.rest(ctx, dragEnd)
}

// rest waits until the program in front has handled what was sent, and then a
// little for what it does about it.
func (m *mouse) rest(ctx context.Context, d time.Duration) error {
	if _, err := m.s.caughtUp(ctx, lagWithin); err != nil {
		return err
	}
	return sleep(ctx, d)
}

func (m *mouse) settle(ctx context.Context, d time.Duration) error {
	if err := m.s.sync(); err != nil {
		return err
	}
	return sleep(ctx, d)
}

// interpolate returns the points of a drag after its first: the given ones,
// and between them ones at most dragStep apart, within the limits above.
func interpolate(path []computer.Point) []computer.Point {
	length := 0.0
	for i := 1; i < len(path); i++ {
		length += distance(path[i-1], path[i])
	}
	total := min(max(length/dragStep, minDragSteps), maxDragSteps)
	var out []computer.Point
	for i := 1; i < len(path); i++ {
		from, to := path[i-1], path[i]
		n := 1
		if length > 0 {
			n = max(1, int(math.Ceil(total*distance(from, to)/length)))
		}
		for k := 1; k <= n; k++ {
			at := computer.Point{X: from.X + (to.X-from.X)*k/n, Y: from.Y + (to.Y-from.Y)*k/n}
			if len(out) == 0 || out[len(out)-1] != at || k == n {
				out = append(out, at)
			}
		}
	}
	return out
}

func distance(a, b computer.Point) float64 {
	return math.Hypot(float64(a.X-b.X), float64(a.Y-b.Y))
}

// moveTo moves the pointer and returns once the server has it there. That takes
// a round trip, unless the window manager looks at a press first: until it has,
// the pointer rests.
func (m *mouse) moveTo(ctx context.Context, to computer.Point) error {
	m.move(to)
	for began := time.Now(); ; {
		at, err := m.s.Cursor()
		if err != nil || at == to {
			return err
		}
		if time.Since(began) > arriveWithin {
			return fmt.Errorf("the pointer is at %d,%d, not at %d,%d: a program holds it", at.X, at.Y, to.X, to.Y)
		}
		if err := sleep(ctx, time.Millisecond); err != nil {
			return err
		}
	}
}
