package playwright

import (
	"fmt"
	"unicode/utf8"

	"berth/internal/computer"
	"berth/internal/providers"
)

// stroke is how one key is pressed: by the name that Playwright's keyboard
// knows, or else by a raw CDP key event.
type stroke struct {
	name string // for Playwright; "": raw
	key  string // KeyboardEvent.key
	code string // KeyboardEvent.code
	vk   int    // windowsVirtualKeyCode
	text string // what it types without Control, Alt or Meta
}

// playwrightKeys are the named keys of Playwright's US layout (driver 1.64.1,
// usKeyboardLayout.ts). ASCII characters are in it too.
var playwrightKeys = map[string]bool{}

// rawKeys are canonical keys that Playwright does not know, with the codes of
// Windows' virtual-key table, which CDP uses.
var rawKeys = map[string]stroke{
	"Help":           {key: "Help", code: "Help", vk: 0x2F},
	"MediaStop":      {key: "MediaStop", code: "MediaStop", vk: 0xB2},
	"BrowserBack":    {key: "BrowserBack", code: "BrowserBack", vk: 0xA6},
	"BrowserForward": {key: "BrowserForward", code: "BrowserForward", vk: 0xA7},
	"BrowserRefresh": {key: "BrowserRefresh", code: "BrowserRefresh", vk: 0xA8},
}

// physical names the key of a US keyboard on which a character is printed
// first, so that Shift in a chord makes of it what a keyboard would: Shift+t
// is "T".
var physical = map[rune]string{
	'`': "Backquote", '-': "Minus", '=': "Equal", '[': "BracketLeft", ']': "BracketRight", '\\': "Backslash",
	';': "Semicolon", '\'': "Quote", ',': "Comma", '.': "Period", '/': "Slash", ' ': "Space",
}

func init() {
	for _, name := range []string{
		"Alt", "AltGraph", "CapsLock", "Control", "Meta", "NumLock", "ScrollLock", "Shift", "Enter", "Tab",
		"ArrowDown", "ArrowLeft", "ArrowRight", "ArrowUp", "End", "Home", "PageDown", "PageUp",
		"Backspace", "Delete", "Insert", "ContextMenu", "Escape", "Pause", "PrintScreen",
		"AudioVolumeMute", "AudioVolumeDown", "AudioVolumeUp", "MediaTrackNext", "MediaTrackPrevious", "MediaPlayPause",
	} {
		playwrightKeys[name] = true
	}
	for n := 1; n <= 12; n++ {
		playwrightKeys[fmt.Sprintf("F%d", n)] = true
	}
	for n := 13; n <= 24; n++ {
		name := fmt.Sprintf("F%d", n)
		rawKeys[name] = stroke{key: name, code: name, vk: 0x7C + n - 13}
	}
	for r := 'a'; r <= 'z'; r++ {
		physical[r] = "Key" + string(r-'a'+'A')
	}
	for r := '0'; r <= '9'; r++ {
		physical[r] = "Digit" + string(r)
	}
}

// resolve finds how to press a canonical key; shift tells that Shift is down.
func resolve(key string, shift bool) (stroke, error) {
	if playwrightKeys[key] {
		return stroke{name: key, key: key}, nil
	}
	if raw, ok := rawKeys[key]; ok {
		return raw, nil
	}
	r, size := utf8.DecodeRuneInString(key)
	if size == 0 || size != len(key) {
		return stroke{}, fmt.Errorf("key %q: %w", key, providers.ErrInvalid)
	}
	if r >= ' ' && r <= '~' {
		if code, ok := physical[r]; ok && shift {
			return stroke{name: code, key: key}, nil
		}
		return stroke{name: key, key: key}, nil
	}
	return stroke{key: key, text: key}, nil // a character that is on no key of a US keyboard
}

// checkKeys reports the first key of a batch that cannot be pressed.
func checkKeys(actions []computer.Action) error {
	for i, a := range actions {
		for _, key := range a.Keys {
			if _, err := resolve(key, false); err != nil {
				return fmt.Errorf("action %d: %w", i, err)
			}
		}
	}
	return nil
}

// modifierBits are CDP's, by canonical name.
var modifierBits = map[string]int{"Alt": 1, "Control": 2, "Meta": 4, "Shift": 8}

func modifiers(keys []string) int {
	mask := 0
	for _, k := range keys {
		mask |= modifierBits[k]
	}
	return mask
}

// buttonBits are CDP's masks of pressed buttons.
var buttonBits = map[computer.Button]int{
	computer.Left: 1, computer.Right: 2, computer.Middle: 4, computer.Back: 8, computer.Forward: 16,
}
