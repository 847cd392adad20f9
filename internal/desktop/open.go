package desktop

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
	"unicode/utf8"

	"berth/internal/computer"
)

// openWithin bounds how long a program may take to show something.
const openWithin = 30 * time.Second

// Programs that `open` uses. Each is looked up in the sandbox's PATH.
var (
	browsers     = []string{"chromium", "chromium-browser", "google-chrome"}
	editors      = []string{"l3afpad", "mousepad", "featherpad"}
	fileManagers = []string{"pcmanfm", "thunar"}
)

// schemes that `open` gives to the browser.
var schemes = map[string]bool{"http": true, "https": true, "about": true, "data": true}

// CheckTarget refuses what `open` can never open, before anything runs.
func CheckTarget(target string) error {
	scheme, rest, ok := strings.Cut(target, ":")
	if !ok || strings.ContainsAny(scheme, "/ ") || scheme == "" {
		if strings.ContainsRune(target, 0) {
			return errors.New("a path has no NUL")
		}
		return nil // a path
	}
	switch scheme = strings.ToLower(scheme); {
	case scheme == "file":
		if u, err := url.Parse(target); err != nil || u.Path == "" || u.Host != "" && u.Host != "localhost" {
			return errors.New("a file URL has the form file:///path")
		}
		return nil
	case !schemes[scheme]:
		return fmt.Errorf("cannot open %.20q addresses; known are http, https, about, data, file, and paths", scheme)
	case scheme == "http" || scheme == "https":
		if u, err := url.Parse(target); err != nil || u.Host == "" {
			return errors.New("no address of the form https://host/path")
		}
	case rest == "":
		return errors.New("an address with nothing behind its scheme")
	}
	return nil
}

// open shows a URL in the browser, a directory in the file manager, a text in
// the editor, any other file in the browser. It returns when a window has come
// or changed and the screen has come to rest. Whether a page could be loaded is
// in the picture, not in the outcome.
func (s *Session) open(ctx context.Context, target string) error {
	argv, err := s.opener(target)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, openWithin, &computer.Fault{Code: codeTimeout, Message: fmt.Sprintf("%s showed no window in %s", argv[0], openWithin)})
	defer cancel()
	before, err := s.screen.shown()
	if err != nil {
		return err
	}
	cmd, err := s.person.command(argv, "", s.environment())
	if err != nil {
		return err
	}
	said := &capped{limit: 2 << 10}
	cmd.Stderr, cmd.WaitDelay = said, outputGrace
	if err := cmd.Start(); err != nil {
		return &computer.Fault{Code: codeNotStarted, Message: startFault(argv[0], err)}
	}
	ended := make(chan error, 1)
	s.mu.Lock()
	s.opened[cmd.Process.Pid] = true
	s.mu.Unlock()
	s.programs.Go(func() {
		ended <- cmd.Wait()
		s.mu.Lock()
		delete(s.opened, cmd.Process.Pid)
		s.mu.Unlock()
	})
	quietly := time.Time{}
	err = s.screen.awaitChange(ctx, before, func() error {
		select {
		case err := <-ended:
			if err != nil && !errors.Is(err, exec.ErrWaitDelay) { // that one: it left a process behind, which is what it is for
				text, _ := said.text()
				return &computer.Fault{Code: codeFailed, Message: strings.TrimSpace(fmt.Sprintf("%s: %v: %.200s", argv[0], err, text))}
			}
			quietly = time.Now() // it handed over to one that is running
		default:
		}
		if !quietly.IsZero() && time.Since(quietly) > 2*time.Second {
			return errNothingNew
		}
		return nil
	})
	if err != nil && !errors.Is(err, errNothingNew) {
		return err
	}
	if err := s.screen.awaitPainted(ctx); err != nil {
		return err
	}
	return s.screen.awaitQuiet(ctx)
}

// errNothingNew: the program is done and what shows its target was there.
var errNothingNew = errors.New("nothing new was shown")

// opener chooses the program.
func (s *Session) opener(target string) ([]string, error) {
	if err := CheckTarget(target); err != nil {
		return nil, &computer.Fault{Code: computer.CodeBadInput, Message: err.Error()}
	}
	scheme, _, ok := strings.Cut(target, ":")
	if ok && schemes[strings.ToLower(scheme)] {
		return s.browser(target)
	}
	if ok && strings.EqualFold(scheme, "file") {
		u, err := url.Parse(target)
		if err != nil {
			return nil, &computer.Fault{Code: computer.CodeBadInput, Message: err.Error()}
		}
		target = u.Path
	}
	path := s.person.path(target)
	info, err := os.Stat(path)
	if err != nil {
		return nil, &computer.Fault{Code: codeNotFound, Message: fmt.Sprintf("there is no file %q in the sandbox", path)}
	}
	kind := editors
	switch {
	case info.IsDir():
		kind = fileManagers
	case !editable(path):
		return s.browser((&url.URL{Scheme: "file", Path: path}).String())
	}
	name, err := s.first(kind)
	if err != nil {
		return nil, err
	}
	return []string{name, path}, nil
}

func (s *Session) first(names []string) (string, error) {
	for _, name := range names {
		if _, err := lookPath(name, s.environment()); err == nil {
			return name, nil
		}
	}
	return "", &computer.Fault{Code: codeNotFound, Message: "the sandbox has none of " + strings.Join(names, ", ")}
}

// browser is the command line of Chromium. Its own sandbox stays on where it
// can nest; a profile in the home directory is the sandbox's only one.
func (s *Session) browser(address string) ([]string, error) {
	name, err := s.first(browsers)
	if err != nil {
		return nil, err
	}
	argv := []string{
		name, "--no-first-run", "--no-default-browser-check", "--password-store=basic", "--disable-background-networking",
		"--disable-component-update", "--disable-gpu", "--disable-sync", "--disable-quic", "--noerrdialogs", "--hide-crash-restore-bubble",
		"--start-maximized", "--lang=en-US", "--user-data-dir=" + filepath.Join(s.person.Home, ".config", "chromium"),
	}
	if !s.nested {
		argv = append(argv, "--no-sandbox", "--test-type")
	}
	return append(append(argv, s.browserFlags...), address), nil
}

// editable reports whether a file looks like text, or is empty. HTML and SVG
// are shown rather than edited.
func editable(path string) bool {
	switch strings.ToLower(filepath.Ext(path)) {
	case ".html", ".htm", ".xhtml", ".svg", ".pdf":
		return false
	}
	f, err := os.Open(path)
	if err != nil {
		return true // the editor says why it cannot
	}
	head := make([]byte, 4096)
	n, err := io.ReadFull(f, head)
	if closeErr := f.Close(); closeErr != nil || err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return true
	}
	head = head[:n]
	for cut := 0; cut < utf8.UTFMax && len(head) > 0 && !utf8.Valid(head); cut++ {
		head = head[:len(head)-1] // a character cut in two
	}
	return utf8.Valid(head) && !bytes.ContainsRune(head, 0)
}
