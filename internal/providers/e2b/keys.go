package e2b

import (
	"fmt"
	"unicode/utf8"
)

// keysyms are the X11 key symbols of the W3C names that are more than one
// character. Source: X11/keysymdef.h and X11/XF86keysym.h.
var keysyms = map[string]uint32{
	"Alt": 0xffe9, "AltGraph": 0xfe03, "CapsLock": 0xffe5, "Control": 0xffe3, "Meta": 0xffeb, "NumLock": 0xff7f, "ScrollLock": 0xff14, "Shift": 0xffe1,
	"Enter": 0xff0d, "Tab": 0xff09,
	"ArrowDown": 0xff54, "ArrowLeft": 0xff51, "ArrowRight": 0xff53, "ArrowUp": 0xff52, "End": 0xff57, "Home": 0xff50, "PageDown": 0xff56, "PageUp": 0xff55,
	"Backspace": 0xff08, "Delete": 0xffff, "Insert": 0xff63,
	"ContextMenu": 0xff67, "Escape": 0xff1b, "Pause": 0xff13, "PrintScreen": 0xff61, "Help": 0xff6a,
	"AudioVolumeMute": 0x1008ff12, "AudioVolumeDown": 0x1008ff11, "AudioVolumeUp": 0x1008ff13,
	"MediaTrackNext": 0x1008ff17, "MediaTrackPrevious": 0x1008ff16, "MediaStop": 0x1008ff15, "MediaPlayPause": 0x1008ff14,
	"BrowserBack": 0x1008ff26, "BrowserForward": 0x1008ff27, "BrowserRefresh": 0x1008ff29,
}

// runeSym is the key symbol that stands for a character: Latin-1 has its own
// code, every other character 0x01000000 plus its own (X11 protocol, appendix A).
func runeSym(r rune) uint32 {
	switch {
	case r == '\n' || r == '\r':
		return keysyms["Enter"]
	case r == '\t':
		return keysyms["Tab"]
	case r >= 0x20 && r <= 0x7e || r >= 0xa0 && r <= 0xff:
		return uint32(r)
	}
	return 0x01000000 + uint32(r)
}

// keySym is the key symbol of a canonical key name (computer.CanonicalKey).
func keySym(key string) (uint32, error) {
	if sym, ok := keysyms[key]; ok {
		return sym, nil
	}
	var n uint32
	if _, err := fmt.Sscanf(key, "F%d", &n); err == nil && n >= 1 && n <= 24 && key == fmt.Sprintf("F%d", n) {
		return 0xffbe + n - 1, nil
	}
	r, size := utf8.DecodeRuneInString(key)
	if size != len(key) || r == utf8.RuneError {
		return 0, fmt.Errorf("key %q has no X11 key symbol", key)
	}
	return runeSym(r), nil
}

// inLayout reports whether a US keyboard layout has a key for the symbol. F13
// to F24 and the keys of media and browsers are left to a key of their own:
// what XKB gives them differs between versions.
func inLayout(sym uint32) bool {
	return sym >= 0x20 && sym <= 0x7e || sym == 0xfe03 || sym >= 0xff00 && sym <= 0xffff && (sym < 0xffca || sym > 0xffd5) && sym != 0xff6a
}

// word is a symbol as xdotool and xmodmap take it.
func word(sym uint32) string { return fmt.Sprintf("%#x", sym) }
