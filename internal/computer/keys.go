package computer

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// namedKeys are the W3C UI Events KeyboardEvent.key values that are accepted
// beside single characters.
// Source: https://www.w3.org/TR/uievents-key/ (named key attribute values
// found on desktop keyboards).
var namedKeys = []string{
	"Alt", "AltGraph", "CapsLock", "Control", "Meta", "NumLock", "ScrollLock", "Shift",
	"Enter", "Tab",
	"ArrowDown", "ArrowLeft", "ArrowRight", "ArrowUp", "End", "Home", "PageDown", "PageUp",
	"Backspace", "Delete", "Insert",
	"ContextMenu", "Escape", "Pause", "PrintScreen", "Help",
	"F1", "F2", "F3", "F4", "F5", "F6", "F7", "F8", "F9", "F10", "F11", "F12",
	"F13", "F14", "F15", "F16", "F17", "F18", "F19", "F20", "F21", "F22", "F23", "F24",
	"AudioVolumeMute", "AudioVolumeDown", "AudioVolumeUp",
	"MediaTrackNext", "MediaTrackPrevious", "MediaStop", "MediaPlayPause",
	"BrowserBack", "BrowserForward", "BrowserRefresh",
}

// keyAliases are X11 keysym, xdotool and everyday names, lower-case, beside
// the W3C names themselves. Left and right variants mean the key itself.
var keyAliases = map[string]string{
	"ctrl": "Control", "control_l": "Control", "control_r": "Control", "ctl": "Control",
	"shift_l": "Shift", "shift_r": "Shift",
	"alt_l": "Alt", "alt_r": "Alt", "option": "Alt", "opt": "Alt",
	"altgr": "AltGraph", "iso_level3_shift": "AltGraph",
	"cmd": "Meta", "command": "Meta", "super": "Meta", "super_l": "Meta", "super_r": "Meta", "meta_l": "Meta", "meta_r": "Meta", "win": "Meta", "windows": "Meta", "os": "Meta",
	"return": "Enter", "kp_enter": "Enter", "linefeed": "Enter",
	"iso_left_tab": "Tab", "kp_tab": "Tab",
	"down": "ArrowDown", "left": "ArrowLeft", "right": "ArrowRight", "up": "ArrowUp",
	"kp_down": "ArrowDown", "kp_left": "ArrowLeft", "kp_right": "ArrowRight", "kp_up": "ArrowUp",
	"arrow_down": "ArrowDown", "arrow_left": "ArrowLeft", "arrow_right": "ArrowRight", "arrow_up": "ArrowUp",
	"page_down": "PageDown", "next": "PageDown", "pgdn": "PageDown", "pgdown": "PageDown", "kp_next": "PageDown", "kp_page_down": "PageDown",
	"page_up": "PageUp", "prior": "PageUp", "pgup": "PageUp", "kp_prior": "PageUp", "kp_page_up": "PageUp",
	"kp_home": "Home", "kp_end": "End",
	"back_space": "Backspace", "bksp": "Backspace",
	"del": "Delete", "kp_delete": "Delete", "ins": "Insert", "kp_insert": "Insert",
	"menu": "ContextMenu", "apps": "ContextMenu",
	"esc": "Escape", "break": "Pause",
	"print": "PrintScreen", "print_screen": "PrintScreen", "prtsc": "PrintScreen", "sys_req": "PrintScreen",
	"caps_lock": "CapsLock", "num_lock": "NumLock", "scroll_lock": "ScrollLock",
	"xf86audiomute": "AudioVolumeMute", "xf86audiolowervolume": "AudioVolumeDown", "xf86audioraisevolume": "AudioVolumeUp",
	"xf86audionext": "MediaTrackNext", "xf86audioprev": "MediaTrackPrevious", "xf86audiostop": "MediaStop", "xf86audioplay": "MediaPlayPause",
	"xf86back": "BrowserBack", "xf86forward": "BrowserForward", "xf86refresh": "BrowserRefresh",
	"space": " ", "spacebar": " ", "kp_space": " ",
	"plus": "+", "kp_add": "+", "minus": "-", "kp_subtract": "-", "equal": "=", "kp_equal": "=",
	"asterisk": "*", "kp_multiply": "*", "slash": "/", "kp_divide": "/", "backslash": "\\",
	"period": ".", "kp_decimal": ".", "comma": ",", "kp_separator": ",", "semicolon": ";", "colon": ":",
	"apostrophe": "'", "quotedbl": `"`, "grave": "`", "asciitilde": "~", "exclam": "!", "at": "@",
	"numbersign": "#", "dollar": "$", "percent": "%", "asciicircum": "^", "ampersand": "&",
	"parenleft": "(", "parenright": ")", "underscore": "_",
	"bracketleft": "[", "bracketright": "]", "braceleft": "{", "braceright": "}",
	"bar": "|", "less": "<", "greater": ">", "question": "?",
	"kp_0": "0", "kp_1": "1", "kp_2": "2", "kp_3": "3", "kp_4": "4",
	"kp_5": "5", "kp_6": "6", "kp_7": "7", "kp_8": "8", "kp_9": "9",
}

func init() {
	for _, name := range namedKeys {
		keyAliases[strings.ToLower(name)] = name
	}
}

// CanonicalKey returns the W3C KeyboardEvent.key value for a key name. A
// single character is itself, case-sensitive; names and aliases are accepted
// in any letter case. The error names the key.
func CanonicalKey(name string) (string, error) {
	if r, size := utf8.DecodeRuneInString(name); size > 0 && size == len(name) && r != utf8.RuneError {
		switch {
		case r == '\n' || r == '\r':
			return "Enter", nil
		case r == '\t':
			return "Tab", nil
		case unicode.IsPrint(r):
			return name, nil
		}
		return "", fmt.Errorf("unknown key %q", name)
	}
	if key, ok := keyAliases[strings.ToLower(name)]; ok {
		return key, nil
	}
	return "", fmt.Errorf("unknown key %q; use a W3C KeyboardEvent.key name such as Enter, or one character", brief(name))
}

// IsModifier reports whether a canonical key is one that `modifiers` takes.
func IsModifier(key string) bool {
	switch key {
	case "Control", "Shift", "Alt", "Meta":
		return true
	}
	return false
}
