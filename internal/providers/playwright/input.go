package playwright

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	pw "github.com/mxschmitt/playwright-go"

	"berth/internal/computer"
)

// PixelsPerTick is how far one wheel tick scrolls: what Chromium makes of one
// notch of a mouse wheel on Windows, and the middle of the 60–120 px that
// systems differ by. It is the only place where ticks become pixels; what is
// lost is the system's acceleration.
const PixelsPerTick = 100

// How a drag is drawn out, so that a page sees one: pages and the browser
// itself ignore a press and a release that have no movement between them.
const (
	dragDwell    = 40 * time.Millisecond // after the press, and before the release
	dragStep     = 25.0                  // px between interpolated points
	minDragSteps = 5                     // in a whole drag
	maxDragSteps = 200                   // interpolated in a whole drag; the given points come on top
)

// typeChunk is how many characters are typed between looks at ctx.
const typeChunk = 100

// releaseWithin bounds the release of what is held when a batch ends early.
const releaseWithin = 2 * time.Second

// moveTo moves the pointer. Where it is there already the page still gets the
// event: pages do not wait for us, so neither do we.
func (r *run) moveTo(ctx context.Context, to computer.Point) error {
	p := r.page
	if err := r.call(ctx, func() error { return p.Mouse().Move(float64(to.X), float64(to.Y)) }); err != nil {
		return err
	}
	p.mouse, p.placed = to, true
	r.mu.Lock()
	r.cursor = to
	r.mu.Unlock()
	return nil
}

// place brings the active page's own pointer to the sandbox's: each page has
// one, and another page may have been active.
func (r *run) place(ctx context.Context) error {
	r.mu.Lock()
	at := r.cursor
	r.mu.Unlock()
	if r.page.placed && r.page.mouse == at {
		return nil
	}
	return r.moveTo(ctx, at)
}

func (r *run) click(ctx context.Context, a computer.Action) (err error) {
	if err := r.press(ctx, a.Modifiers); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.unpress(ctx, a.Modifiers)) }()
	if err := r.moveTo(ctx, a.Point()); err != nil {
		return err
	}
	if a.Button == computer.Left {
		if err := r.prepareSelect(ctx, a.Point()); err != nil {
			return err
		}
	}
	for n := 1; n <= a.Count; n++ {
		if err := r.button(ctx, a.Button, n, true); err != nil {
			return err
		}
		if err := r.button(ctx, a.Button, n, false); err != nil {
			if errors.Is(err, pw.ErrTargetClosed) && r.closedItself() {
				return nil
			}
			return err
		}
	}
	return nil
}

// closedItself reports whether the page has closed while the browser lives on.
func (r *run) closedItself() bool {
	select {
	case <-r.page.closed:
	case <-time.After(settle):
		return false
	}
	select {
	case <-r.dead:
		return false
	case <-r.conn.gone:
		return false
	case <-time.After(settle / 5):
		return true
	}
}

// button presses or releases a mouse button where the pointer is.
func (r *run) button(ctx context.Context, b computer.Button, count int, down bool) error {
	r.mu.Lock()
	at := r.cursor
	r.buttons = slices.DeleteFunc(r.buttons, func(o computer.Button) bool { return o == b })
	if down {
		r.buttons = append(r.buttons, b)
	}
	mask, mods := 0, modifiers(r.keys)
	for _, o := range r.buttons {
		mask |= buttonBits[o]
	}
	r.mu.Unlock()
	if down {
		if err := r.note(); err != nil {
			return err
		}
	}
	p, conn := r.page, r.conn
	err := r.call(ctx, func() error {
		switch {
		case b == computer.Back || b == computer.Forward: // Playwright's API has only three buttons
			kind := map[bool]string{true: "mousePressed", false: "mouseReleased"}[down]
			return conn.cdp.call(context.Background(), p.session, "Input.dispatchMouseEvent", params{
				"type": kind, "x": at.X, "y": at.Y, "button": string(b), "buttons": mask, "clickCount": count, "modifiers": mods,
			}, nil)
		case down:
			return p.Mouse().Down(pw.MouseDownOptions{Button: mouseButton(b), ClickCount: pw.Int(count)})
		default:
			return p.Mouse().Up(pw.MouseUpOptions{Button: mouseButton(b), ClickCount: pw.Int(count)})
		}
	})
	if err != nil && !down { // it may still be down
		r.mu.Lock()
		r.buttons = append(r.buttons, b)
		r.mu.Unlock()
	}
	if err == nil && !down {
		return r.note()
	}
	return err
}

func mouseButton(b computer.Button) *pw.MouseButton {
	switch b {
	case computer.Right:
		return pw.MouseButtonRight
	case computer.Middle:
		return pw.MouseButtonMiddle
	default:
		return pw.MouseButtonLeft
	}
}

func (r *run) mouseDown(ctx context.Context, b computer.Button) error {
	if err := r.place(ctx); err != nil {
		return err
	}
	return r.button(ctx, b, 1, true)
}

func (r *run) mouseUp(ctx context.Context, b computer.Button) error {
	if err := r.place(ctx); err != nil {
		return err
	}
	return r.button(ctx, b, 1, false)
}

// drag presses at the path's start, follows it through interpolated points,
// and releases at its end. It serves pages that use drag-and-drop events and
// pages that follow the pointer themselves.
func (r *run) drag(ctx context.Context, a computer.Action) (err error) {
	if err := r.press(ctx, a.Modifiers); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.unpress(ctx, a.Modifiers)) }()
	if err := r.moveTo(ctx, a.Path[0]); err != nil {
		return err
	}
	if err := r.button(ctx, a.Button, 1, true); err != nil {
		return err
	}
	if err := r.pause(ctx, dragDwell.Seconds()); err != nil {
		return err
	}
	for _, point := range interpolate(a.Path) {
		if err := r.moveTo(ctx, point); err != nil {
			return err
		}
	}
	if err := r.pause(ctx, dragDwell.Seconds()); err != nil {
		return err
	}
	return r.button(ctx, a.Button, 1, false)
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

// scroll turns the wheel one tick at a time, as a hand does: pages that count
// wheel events see as many as there were ticks.
func (r *run) scroll(ctx context.Context, a computer.Action) (err error) {
	if err := r.press(ctx, a.Modifiers); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.unpress(ctx, a.Modifiers)) }()
	if err := r.moveTo(ctx, a.Point()); err != nil {
		return err
	}
	n := math.Ceil(max(math.Abs(a.DX), math.Abs(a.DY)))
	p := r.page
	for range int(n) {
		if err := r.call(ctx, func() error {
			return p.Mouse().Wheel(a.DX*PixelsPerTick/n, a.DY*PixelsPerTick/n)
		}); err != nil {
			return err
		}
	}
	return nil
}

// typeText types characters one by one. Those on a US keyboard come with their
// key events, "\n" is Enter, and every other one, also a tab, is inserted as
// the character it is: a Tab key would leave the field (for that there is the
// action key).
func (r *run) typeText(ctx context.Context, text string) error {
	text = strings.ReplaceAll(text, "\r\n", "\n")
	p := r.page
	for len(text) > 0 {
		chunk := text
		for i, n := 0, 0; i < len(text); n++ {
			if n == typeChunk {
				chunk = text[:i]
				break
			}
			_, size := utf8.DecodeRuneInString(text[i:])
			i += size
		}
		text = text[len(chunk):]
		if err := r.call(ctx, func() error { return p.Keyboard().Type(chunk) }); err != nil {
			return err
		}
	}
	return context.Cause(ctx)
}

// chord presses the keys one after the other, holds them together, and
// releases them in the opposite order.
func (r *run) chord(ctx context.Context, keys []string, repeat int) error {
	for range repeat {
		if err := r.hold(ctx, keys, 0); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) hold(ctx context.Context, keys []string, seconds float64) (err error) {
	if err := r.press(ctx, keys); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.unpress(ctx, keys)) }()
	if seconds > 0 {
		return r.pause(ctx, seconds)
	}
	return nil
}

// press presses keys in order. When it fails, what it pressed is in r.keys and
// the batch's end releases it.
func (r *run) press(ctx context.Context, keys []string) error {
	if len(keys) == 0 {
		return nil
	}
	r.mu.Lock()
	before := slices.Clone(r.keys)
	r.keys = append(r.keys, keys...)
	r.mu.Unlock()
	if err := r.note(); err != nil { // the whole chord, before the first of it is down
		return err
	}
	down := before
	for _, key := range keys {
		down = append(down, key)
		if err := r.stroke(ctx, key, down, true); err != nil {
			return err
		}
	}
	return nil
}

// unpress releases keys, last first. It does so also after ctx has ended.
func (r *run) unpress(ctx context.Context, keys []string) error {
	if len(keys) == 0 || r.isDead() || r.page.isClosed() {
		r.drop(keys)
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseWithin)
	defer cancel()
	for _, key := range slices.Backward(keys) {
		r.mu.Lock()
		down := slices.Clone(r.keys)
		r.mu.Unlock()
		if i := slices.Index(down, key); i >= 0 {
			down = slices.Delete(down, i, i+1)
		}
		if err := r.stroke(ctx, key, down, false); err != nil {
			if r.page.isClosed() || errors.Is(err, pw.ErrTargetClosed) && r.closedItself() {
				r.drop(keys) // they went with the page
				return nil
			}
			return fmt.Errorf("release %s: %w", key, err)
		}
		r.drop([]string{key})
	}
	return r.note()
}

// drop forgets keys that are no longer down.
func (r *run) drop(keys []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, key := range keys {
		if i := slices.Index(r.keys, key); i >= 0 {
			r.keys = slices.Delete(r.keys, i, i+1)
		}
	}
}

// stroke sends one key down or up; down are the keys held after it.
func (r *run) stroke(ctx context.Context, key string, down []string, press bool) error {
	st, err := resolve(key, slices.Contains(down, "Shift"))
	if err != nil {
		return err
	}
	p, conn := r.page, r.conn
	return r.call(ctx, func() error {
		switch {
		case st.name == "":
			return conn.rawKey(p, st, modifiers(down), press)
		case press:
			return p.Keyboard().Down(st.name)
		default:
			return p.Keyboard().Up(st.name)
		}
	})
}

// rawKey sends a key event that Playwright has no name for.
func (c *connection) rawKey(p *page, st stroke, mods int, press bool) error {
	event := params{"type": "keyUp", "key": st.key, "code": st.code, "windowsVirtualKeyCode": st.vk, "modifiers": mods}
	if press {
		event["type"] = "rawKeyDown"
		if st.text != "" && mods&^modifierBits["Shift"] == 0 {
			event["type"], event["text"], event["unmodifiedText"] = "keyDown", st.text, st.text
		}
	}
	return c.cdp.call(context.Background(), p.session, "Input.dispatchKeyEvent", event, nil)
}

// releaseAll releases every key and button, after a batch that did not go
// through. It is quick when nothing is held.
func (r *run) releaseAll(ctx context.Context) error {
	r.mu.Lock()
	keys, buttons := slices.Clone(r.keys), slices.Clone(r.buttons)
	r.mu.Unlock()
	if len(keys)+len(buttons) == 0 || r.isDead() || r.conn == nil || r.conn.isGone() || r.p.ctx.Err() != nil {
		return nil // a new connection releases what the note says; see releaseLeftovers
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseWithin)
	defer cancel()
	if r.page == nil || r.page.isClosed() {
		if err := r.locate(ctx); err != nil {
			return err
		}
	}
	for _, b := range slices.Backward(buttons) {
		if err := r.button(ctx, b, 1, false); err != nil {
			return err
		}
	}
	return r.unpress(ctx, keys)
}

// releaseLeftovers releases what the note of an earlier connection says was
// down, and takes over its pointer. The events go to every page, since which
// of them was pressed is not known.
func (s *sandbox) releaseLeftovers(ctx context.Context, c *connection) error {
	var h held
	err := readJSON(filepath.Join(s.dir, heldFile), &h)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read what is held: %w", err)
	}
	c.takeOver(&h)
	pages, active := c.all()
	err = c.wait(ctx, func(ctx context.Context) error {
		if active != nil {
			if err := active.BringToFront(); err != nil && !active.isClosed() {
				return fmt.Errorf("bring to front: %w", err)
			}
		}
		for _, p := range pages {
			if err := c.releaseRaw(ctx, p, h); err != nil && !p.isClosed() {
				return fmt.Errorf("release what was held: %w", err)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.cursor, s.keys, s.buttons = h.Cursor, nil, nil
	s.mu.Unlock()
	return s.noteWith(c)
}

func (c *connection) releaseRaw(ctx context.Context, p *page, h held) error {
	for _, b := range slices.Backward(h.Buttons) {
		if err := c.cdp.call(ctx, p.session, "Input.dispatchMouseEvent", params{
			"type": "mouseReleased", "x": h.Cursor.X, "y": h.Cursor.Y, "button": string(b), "buttons": 0, "clickCount": 1,
		}, nil); err != nil {
			return err
		}
	}
	for i, key := range slices.Backward(h.Keys) {
		st, err := resolve(key, false)
		if err != nil {
			return err
		}
		if st.code == "" {
			st.code, st.vk = codeOf(key)
		}
		if slices.Contains(h.Keys[:i], "Shift") && len(key) == 1 {
			st.key = strings.ToUpper(key)
		}
		if err := c.rawKey(p, st, modifiers(h.Keys[:i]), false); err != nil {
			return err
		}
	}
	return nil
}

// codeOf gives a key's physical code for a release outside Playwright's keyboard.
func codeOf(key string) (code string, vk int) {
	switch key {
	case "Control":
		return "ControlLeft", 17
	case "Shift":
		return "ShiftLeft", 16
	case "Alt":
		return "AltLeft", 18
	case "Meta":
		return "MetaLeft", 91
	}
	if r, size := utf8.DecodeRuneInString(key); size == len(key) {
		return physical[r], int(r)
	}
	return key, 0
}
