package desktop

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jezek/xgb/xproto"
	"github.com/jezek/xgb/xtest"
)

// reuseAfter is how long a temporary keymap entry stands before another
// character may take its place, unless the program in front says earlier that
// it has caught up (see caughtUp). Programs look a key up when they handle its
// event, not when it happened: an entry that changed in between would turn one
// character into another.
const reuseAfter = time.Second

// reuseWithin bounds the wait for a program that is behind with its events.
const reuseWithin = 10 * time.Second

// typeChunk is how many characters are typed between looks at ctx.
const typeChunk = 64

// keyboard knows which key makes which symbol.
type keyboard struct {
	s     *Screen
	stale atomic.Bool // somebody else changed the keymap

	plain, shifted map[xproto.Keysym]xproto.Keycode // by the layout: alone, and with Shift
	spares         []spare                          // keys without a symbol, for what the layout lacks
	bound          map[xproto.Keysym]int            // index into spares

	otherEvent byte // the event type of a key press on another device; 0: there is none

	holding sync.Mutex
	held    []xproto.Keycode // down, in the order pressed; changed by who has the turn
}

// spare is a key that temporary entries use.
type spare struct {
	code xproto.Keycode
	sym  xproto.Keysym // 0: free
	used time.Time
}

// checked are the characters that a layout must have where a US one has them:
// otherwise programs that look at key positions see other keys than people.
const checked = "abcdefghijklmnopqrstuvwxyz0123456789-=[];'`\\,./ "
const checkedShifted = `ABCDEFGHIJKLMNOPQRSTUVWXYZ~!@#$%^&*()_+{}|:"<>?`

func newKeyboard(s *Screen) (*keyboard, error) {
	k := &keyboard{s: s, bound: map[xproto.Keysym]int{}}
	const name = "XInputExtension"
	if reply, err := xproto.QueryExtension(s.conn, uint16(len(name)), name).Reply(); err != nil {
		return nil, s.failed("query the extension "+name, err)
	} else if reply.Present {
		k.otherEvent = reply.FirstEvent + 1 // DeviceKeyPress; the release follows (XInput protocol)
	}
	return k, k.load()
}

// load reads the keymap.
func (k *keyboard) load() error {
	setup := xproto.Setup(k.s.conn)
	first, count := setup.MinKeycode, int(setup.MaxKeycode)-int(setup.MinKeycode)+1
	m, err := xproto.GetKeyboardMapping(k.s.conn, first, byte(count)).Reply()
	if err != nil {
		return k.s.failed("read the keymap", err)
	}
	k.plain, k.shifted = map[xproto.Keysym]xproto.Keycode{}, map[xproto.Keysym]xproto.Keycode{}
	per := int(m.KeysymsPerKeycode)
	own := map[xproto.Keycode]bool{}
	for i := range k.spares {
		sp := &k.spares[i]
		own[sp.code] = true
		if at := int(sp.code-first) * per; sp.sym != 0 && (per == 0 || m.Keysyms[at] != sp.sym) {
			delete(k.bound, sp.sym) // another program's layout replaced the entry
			sp.sym = 0
		}
	}
	var free []spare
	for i := range count {
		code, syms := first+xproto.Keycode(i), m.Keysyms[i*per:(i+1)*per]
		if own[code] {
			continue
		}
		if unused(syms) {
			free = append(free, spare{code: code})
			continue
		}
		if per > 0 && syms[0] != 0 {
			setDefault(k.plain, syms[0], code)
		}
		if per > 1 && syms[1] != 0 && syms[1] != syms[0] {
			setDefault(k.shifted, syms[1], code)
		}
	}
	if k.spares == nil {
		k.spares = free
	}
	if len(k.spares) < 8 {
		return fmt.Errorf("the keymap has %d unused keys; at least 8 are needed to type characters that it lacks", len(k.spares))
	}
	return nil
}

func setDefault(m map[xproto.Keysym]xproto.Keycode, sym xproto.Keysym, code xproto.Keycode) {
	if _, ok := m[sym]; !ok {
		m[sym] = code
	}
}

// unused reports whether a key may be taken: it has no symbol. Keys with vendor
// symbols that no action can name stay what they are: programs know them by
// their place and would act on them.
func unused(syms []xproto.Keysym) bool {
	return !slices.ContainsFunc(syms, func(sym xproto.Keysym) bool { return sym != 0 })
}

// checkLayout reports what the layout lacks of a US keyboard.
func (k *keyboard) checkLayout() error {
	var lacks []string
	for text, table := range map[string]map[xproto.Keysym]xproto.Keycode{checked: k.plain, checkedShifted: k.shifted} {
		for _, r := range text {
			if _, ok := table[runeSym(r)]; !ok {
				lacks = append(lacks, string(r))
			}
		}
	}
	for _, name := range []string{"Control", "Shift", "Alt", "Meta", "Enter", "Tab", "Escape", "ArrowUp"} {
		if _, ok := k.plain[keysyms[name]]; !ok {
			lacks = append(lacks, name)
		}
	}
	if len(lacks) > 0 {
		return fmt.Errorf("the keyboard layout lacks %s", strings.Join(lacks, " "))
	}
	return nil
}

// refresh reads the keymap again when another program has changed it.
func (k *keyboard) refresh() error {
	if !k.stale.Swap(false) {
		return nil
	}
	return k.load()
}

// find returns the key that makes sym, and whether with Shift.
func (k *keyboard) find(sym xproto.Keysym) (code xproto.Keycode, shift, ok bool) {
	if code, ok = k.plain[sym]; ok {
		return code, false, true
	}
	if code, ok = k.shifted[sym]; ok {
		return code, true, true
	}
	if i, bound := k.bound[sym]; bound {
		k.spares[i].used = time.Now()
		return k.spares[i].code, false, true
	}
	return 0, false, false
}

// ensure gives every symbol a key, at most as many new ones as there are
// spares. It waits where an entry was used too lately to be changed.
func (k *keyboard) ensure(ctx context.Context, syms []xproto.Keysym) error {
	changed, asked := false, false
	for _, sym := range syms {
		if _, _, ok := k.find(sym); ok {
			continue
		}
		oldest := 0
		for i, sp := range k.spares {
			if sp.used.Before(k.spares[oldest].used) {
				oldest = i
			}
		}
		sp := &k.spares[oldest]
		if sp.sym != 0 {
			if err := k.awaitReuse(ctx, sp.used, &asked); err != nil {
				return err
			}
			delete(k.bound, sp.sym)
		}
		// Twice the same: a single entry of a letter would get its other case.
		xproto.ChangeKeyboardMapping(k.s.conn, 1, sp.code, 2, []xproto.Keysym{sym, sym})
		sp.sym, sp.used = sym, time.Now()
		k.bound[sym] = oldest
		changed = true
	}
	if !changed {
		return nil
	}
	return k.announce()
}

// announce tells programs of a changed keymap. Those that use XKB and look only
// for a new keyboard, as Chromium does, are told when the master keyboard takes
// over the keymap of another of its devices: a tap of Shift, which does nothing
// by itself, on the one that is not XTEST's. Without that they would take a new
// entry's key for an empty one.
func (k *keyboard) announce() error {
	if k.otherEvent == 0 {
		return k.s.sync()
	}
	shift := byte(k.plain[keysyms["Shift"]])
	for _, kind := range []byte{k.otherEvent, k.otherEvent + 1} {
		if err := xtest.FakeInputChecked(k.s.conn, kind, shift, 0, k.s.root, 0, 0, otherKeyboard).Check(); err != nil {
			k.otherEvent = 0 // this server has no such device
			return k.s.sync()
		}
	}
	return k.s.sync()
}

// otherKeyboard is the id of Xvfb's own keyboard: after the two master devices,
// XTEST's two, and Xvfb's pointer.
const otherKeyboard = 7

// awaitReuse waits until an entry that was used then may be changed: until the
// program in front has handled its keys where it can say so, else for a while.
func (k *keyboard) awaitReuse(ctx context.Context, used time.Time, asked *bool) error {
	if *asked {
		return context.Cause(ctx)
	}
	left := time.Until(used.Add(reuseAfter))
	if left <= 0 {
		return context.Cause(ctx)
	}
	said, err := k.s.caughtUp(ctx, reuseWithin)
	if err != nil || said {
		*asked = said
		return err
	}
	return sleep(ctx, left)
}

func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return context.Cause(ctx)
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// stroke sends one key down or up. It is sent, not yet processed.
func (k *keyboard) stroke(code xproto.Keycode, down bool) {
	kind := byte(xproto.KeyRelease)
	k.holding.Lock()
	if down {
		kind = xproto.KeyPress
		k.held = append(k.held, code)
	} else if i := slices.Index(k.held, code); i >= 0 {
		k.held = slices.Delete(k.held, i, i+1)
	}
	k.holding.Unlock()
	xtest.FakeInput(k.s.conn, kind, byte(code), 0, k.s.root, 0, 0, 0)
}

// releaseAll sends the release of everything that is down, last first.
func (k *keyboard) releaseAll() error {
	if len(k.held) == 0 {
		return nil
	}
	for _, code := range slices.Backward(slices.Clone(k.held)) {
		k.stroke(code, false)
	}
	return k.s.sync()
}

// press presses the keys of a chord in order; see chordCodes.
func (k *keyboard) press(ctx context.Context, keys []string) ([]xproto.Keycode, error) {
	codes, err := k.chordCodes(ctx, keys)
	if err != nil {
		return nil, err
	}
	for _, code := range codes {
		k.stroke(code, true)
	}
	return codes, k.s.sync()
}

// release releases the keys of a chord, last first. It does so whatever
// happened meanwhile.
func (k *keyboard) release(codes []xproto.Keycode) error {
	if len(codes) == 0 {
		return nil
	}
	for _, code := range slices.Backward(codes) {
		k.stroke(code, false)
	}
	return k.s.sync()
}

// chordCodes finds the keys of a chord. A character that the layout makes with
// Shift brings Shift along, except a letter beside another modifier: "ctrl+A"
// is what people write for Control and the key A.
func (k *keyboard) chordCodes(ctx context.Context, keys []string) ([]xproto.Keycode, error) {
	if err := k.refresh(); err != nil {
		return nil, err
	}
	modified := slices.ContainsFunc(keys, func(key string) bool { return key == "Control" || key == "Alt" || key == "Meta" })
	syms := make([]xproto.Keysym, len(keys))
	for i, key := range keys {
		if r, size := utf8.DecodeRuneInString(key); modified && size == len(key) && unicode.IsUpper(r) {
			key = string(unicode.ToLower(r))
		}
		sym, ok := keySym(key)
		if !ok {
			return nil, fmt.Errorf("key %q has no symbol", key)
		}
		syms[i] = sym
	}
	if err := k.ensure(ctx, syms); err != nil {
		return nil, err
	}
	shift := k.plain[keysyms["Shift"]]
	var codes []xproto.Keycode
	for _, sym := range syms {
		code, shifted, ok := k.find(sym)
		if !ok {
			return nil, errors.New("more new keys in one chord than the keymap has room for")
		}
		if shifted && !slices.Contains(codes, shift) {
			codes = append(codes, shift)
		}
		if !slices.Contains(codes, code) {
			codes = append(codes, code)
		}
	}
	return codes, nil
}

// typeText types text exactly: with Caps Lock off, characters that the layout
// lacks through temporary keymap entries, "\n" as Enter and "\t" as Tab.
func (k *keyboard) typeText(ctx context.Context, text string) (err error) {
	if err := k.refresh(); err != nil {
		return err
	}
	restore, err := k.unlock()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, restore()) }()
	runes := []rune(strings.ReplaceAll(text, "\r\n", "\n"))
	for len(runes) > 0 {
		n := k.fitting(runes)
		if err := k.typeChunk(ctx, runes[:n]); err != nil {
			return err
		}
		runes = runes[n:]
	}
	return context.Cause(ctx)
}

// fitting returns how many characters of the text can be typed with the spare
// keys at once.
func (k *keyboard) fitting(runes []rune) int {
	missing := map[rune]bool{}
	for i, r := range runes {
		if i == typeChunk {
			return i
		}
		sym := runeSym(r)
		if _, ok := k.plain[sym]; ok {
			continue
		}
		if _, ok := k.shifted[sym]; ok {
			continue
		}
		if missing[r] = true; len(missing) > len(k.spares) {
			return i
		}
	}
	return len(runes)
}

func (k *keyboard) typeChunk(ctx context.Context, runes []rune) error {
	syms := make([]xproto.Keysym, len(runes))
	for i, r := range runes {
		syms[i] = runeSym(r)
	}
	if err := k.ensure(ctx, syms); err != nil {
		return err
	}
	shift, shifted := k.plain[keysyms["Shift"]], false
	for _, sym := range syms {
		code, want, ok := k.find(sym)
		if !ok {
			return fmt.Errorf("symbol %#x lost its key", sym)
		}
		if want != shifted {
			k.stroke(shift, want)
			shifted = want
		}
		k.stroke(code, true)
		k.stroke(code, false)
	}
	if shifted {
		k.stroke(shift, false)
	}
	if err := k.s.sync(); err != nil {
		return err
	}
	return context.Cause(ctx)
}

// unlock switches Caps Lock off and returns what restores it.
func (k *keyboard) unlock() (restore func() error, err error) {
	nothing := func() error { return nil }
	p, err := xproto.QueryPointer(k.s.conn, k.s.root).Reply()
	if err != nil {
		return nothing, k.s.failed("query the modifiers", err)
	}
	code, ok := k.plain[keysyms["CapsLock"]]
	if p.Mask&xproto.ModMaskLock == 0 || !ok {
		return nothing, nil
	}
	toggle := func() error {
		k.stroke(code, true)
		k.stroke(code, false)
		return k.s.sync()
	}
	return toggle, toggle()
}
