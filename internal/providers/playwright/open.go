package playwright

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"regexp"
	"strings"
	"time"

	pw "github.com/mxschmitt/playwright-go"

	"berth/internal/computer"
	"berth/internal/providers"
)

// How long open waits: for the page to answer, and then for it to load. A page
// that has answered and loads on is open.
const (
	answerWithin = 25 * time.Second
	loadWithin   = 4 * time.Second
)

var (
	withScheme = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9+.-]*://`)
	bareScheme = regexp.MustCompile(`^(?i)(about|data|javascript|mailto|tel|blob|view-source|chrome|file|ftp|ws|wss|urn):`)
	filePath   = regexp.MustCompile(`^(/|\./|\.\./|~|[A-Za-z]:\\)`)
)

// address makes a URL of what open was given. http, https, data and
// about:blank are taken as they are; a bare "example.com/x" gets https, and
// http when it names this machine. A file's path or URL is ErrUnsupported: the
// sandbox has no files of its own, and those of the machine are none of its
// business. Any other scheme is ErrInvalid.
func address(target string) (string, error) {
	target = strings.TrimSpace(target)
	lower := strings.ToLower(target)
	switch {
	case strings.HasPrefix(lower, "http://"), strings.HasPrefix(lower, "https://"):
	case lower == "about:blank", strings.HasPrefix(lower, "data:"):
		return target, nil
	case filePath.MatchString(target), strings.HasPrefix(lower, "file:"):
		return "", fmt.Errorf("opening a file (%q): %w", target, providers.ErrUnsupported)
	case withScheme.MatchString(target), bareScheme.MatchString(target):
		return "", fmt.Errorf("open %q: only http, https, data and about:blank are opened: %w", target, providers.ErrInvalid)
	default:
		scheme := "https://"
		if u, err := url.Parse("http://" + target); err == nil && isLoopback(u.Hostname()) {
			scheme = "http://"
		}
		target = scheme + target
	}
	u, err := url.Parse(target)
	if err != nil || u.Host == "" || strings.ContainsAny(u.Host, " \t") {
		return "", fmt.Errorf("open %q: not an address: %w", target, providers.ErrInvalid)
	}
	return target, nil
}

func isLoopback(host string) bool {
	host = strings.TrimSuffix(strings.ToLower(host), ".")
	if host == "localhost" || strings.HasSuffix(host, ".localhost") {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// open loads a page in the active tab and returns when it has loaded, or has
// answered and loaded for a while. A load that turns out to be a download is
// open too: the observation reports it. A load that fails, or that ctx or time
// ends, is stopped, so nothing of it arrives later.
func (r *run) open(ctx context.Context, target string) error {
	to, err := address(target)
	if err != nil {
		return err
	}
	p := r.page
	limited, cancel := context.WithTimeoutCause(ctx, answerWithin, errActionLimit)
	defer cancel()
	err = r.navigate(limited, p, func() error {
		_, err := p.Goto(to, pw.PageGotoOptions{WaitUntil: pw.WaitUntilStateCommit, Timeout: pw.Float(0)})
		return err
	})
	if err == nil {
		waitCtx, done := context.WithTimeoutCause(limited, loadWithin, errLoadsOn)
		defer done()
		err = r.ask(waitCtx, func() error {
			return p.WaitForLoadState(pw.PageWaitForLoadStateOptions{State: pw.LoadStateLoad, Timeout: pw.Float(float64(loadWithin.Milliseconds()))})
		}, func() {}) // its own time-out ends it
		if errors.Is(err, errLoadsOn) || errors.Is(err, pw.ErrTimeout) {
			return nil
		}
	}
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case errors.Is(err, errActionLimit):
		return &computer.Fault{Code: codeTimeout, Message: fmt.Sprintf("%s did not answer in %s; the load was stopped", to, answerWithin)}
	case strings.Contains(err.Error(), "Download is starting"):
		return nil
	case errors.Is(err, providers.ErrLost), errors.Is(err, providers.ErrUnavailable), errors.Is(err, pw.ErrTargetClosed):
		return err
	}
	return &computer.Fault{Code: codeNavigation, Message: reason(err)}
}

var errLoadsOn = errors.New("the page loads on")

// navigate runs a navigation. When ctx ends it stops the load, which makes the
// call return; a page that cannot even be stopped is closed with its browser.
func (r *run) navigate(ctx context.Context, p *page, load func() error) error {
	done := make(chan error, 1)
	if !r.work.Go(func() { done <- load() }) {
		return r.lost()
	}
	select {
	case err := <-done:
		return err
	case <-r.dead:
		return r.lost()
	case <-ctx.Done():
	}
	stopCtx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), graceOnCancel, context.Cause(ctx))
	defer cancel()
	err := r.call(stopCtx, func() error {
		_, err := send[none](p.cdp, "Page.stopLoading", nil)
		return err
	})
	if err != nil {
		return err
	}
	select {
	case <-done: // with ERR_ABORTED
		return context.Cause(ctx)
	case <-r.dead:
		return r.lost()
	case <-stopCtx.Done():
		r.bury(errors.New("a load could not be stopped"))
		return r.lost()
	}
}

var netError = regexp.MustCompile(`net::[A-Z_]+`)

// reason finds the browser's own reason in Playwright's message.
func reason(err error) string {
	if code := netError.FindString(err.Error()); code != "" {
		return code
	}
	return firstLine(err)
}
