package main

import (
	"os"

	"golang.org/x/sys/unix"
)

func isTerminal(fd uintptr) bool {
	_, err := unix.IoctlGetTermios(int(fd), unix.TCGETS)
	return err == nil
}

// keyByKey has a terminal hand over each key as it is typed, unseen. Ctrl-C
// stays a signal; Ctrl-Z, which would leave the terminal so, is a key without
// a meaning. restore puts the terminal back.
func keyByKey(fd uintptr) (restore func() error, err error) {
	was, err := unix.IoctlGetTermios(int(fd), unix.TCGETS)
	if err != nil {
		return nil, err
	}
	now := *was
	now.Lflag &^= unix.ICANON | unix.ECHO
	now.Cc[unix.VMIN], now.Cc[unix.VTIME], now.Cc[unix.VSUSP] = 1, 0, 0
	if err := unix.IoctlSetTermios(int(fd), unix.TCSETS, &now); err != nil {
		return nil, err
	}
	return func() error { return unix.IoctlSetTermios(int(fd), unix.TCSETS, was) }, nil
}

// windowSize is a terminal's, in characters; 80×24 where it does not say.
func windowSize(out any) (width, height int) {
	if f, ok := out.(*os.File); ok {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil && size.Col > 0 && size.Row > 0 {
			return int(size.Col), int(size.Row)
		}
	}
	return 80, 24
}
