package desktop

import (
	"unicode/utf8"

	"github.com/jezek/xgb/xproto"
)

// keysyms are the X11 key symbols of the W3C names that are more than one
// character. Source: X11/keysymdef.h and X11/XF86keysym.h.
var keysyms = map[string]xproto.Keysym{
	"Alt": 0xffe9, "AltGraph": 0xfe03, "CapsLock": 0xffe5, "Control": 0xffe3, "Meta": 0xffeb, "NumLock": 0xff7f, "ScrollLock": 0xff14, "Shift": 0xffe1,
	"Enter": 0xff0d, "Tab": 0xff09,
	"ArrowDown": 0xff54, "ArrowLeft": 0xff51, "ArrowRight": 0xff53, "ArrowUp": 0xff52, "End": 0xff57, "Home": 0xff50, "PageDown": 0xff56, "PageUp": 0xff55,
	"Backspace": 0xff08, "Delete": 0xffff, "Insert": 0xff63,
	"ContextMenu": 0xff67, "Escape": 0xff1b, "Pause": 0xff13, "PrintScreen": 0xff61, "Help": 0xff6a,
	"F1": 0xffbe, "F2": 0xffbf, "F3": 0xffc0, "F4": 0xffc1, "F5": 0xffc2, "F6": 0xffc3, "F7": 0xffc4, "F8": 0xffc5, "F9": 0xffc6, "F10": 0xffc7, "F11": 0xffc8, "F12": 0xffc9,
	"F13": 0xffca, "F14": 0xffcb, "F15": 0xffcc, "F16": 0xffcd, "F17": 0xffce, "F18": 0xffcf, "F19": 0xffd0, "F20": 0xffd1, "F21": 0xffd2, "F22": 0xffd3, "F23": 0xffd4, "F24": 0xffd5,
	"AudioVolumeMute": 0x1008ff12, "AudioVolumeDown": 0x1008ff11, "AudioVolumeUp": 0x1008ff13,
	"MediaTrackNext": 0x1008ff17, "MediaTrackPrevious": 0x1008ff16, "MediaStop": 0x1008ff15, "MediaPlayPause": 0x1008ff14,
	"BrowserBack": 0x1008ff26, "BrowserForward": 0x1008ff27, "BrowserRefresh": 0x1008ff29,
}

// runeSym is the key symbol that stands for a character: Latin-1 has its own
// code, every other character, also beyond the BMP, 0x01000000 plus its own
// (X11 protocol, appendix A).
func runeSym(r rune) xproto.Keysym {
	switch {
	case r == '\n' || r == '\r':
		return keysyms["Enter"]
	case r == '\t':
		return keysyms["Tab"]
	case r >= 0x20 && r <= 0x7e || r >= 0xa0 && r <= 0xff:
		return xproto.Keysym(r)
	}
	return 0x01000000 + xproto.Keysym(r)
}

// keySym is the key symbol of a canonical W3C key name.
func keySym(key string) (xproto.Keysym, bool) {
	if sym, ok := keysyms[key]; ok {
		return sym, true
	}
	r, size := utf8.DecodeRuneInString(key)
	if size != len(key) || r == utf8.RuneError {
		return 0, false
	}
	return runeSym(r), true
}
