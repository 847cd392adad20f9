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
	limited, cancel := context.WithTimeoutCause(ctx, answerWithin, errNoAnswer)
	defer cancel()
	select { // forget the load of the document before
	case <-r.page.loaded:
	default:
	}
	went, err := r.navigate(limited, to)
	switch {
	case errors.Is(err, errNoAnswer) && ctx.Err() == nil && !r.isDead():
		return &computer.Fault{Code: codeTimeout, Message: fmt.Sprintf("%s did not answer in %s; the load was stopped", to, answerWithin)}
	case err != nil:
		return err
	case went.IsDownload:
		return nil
	case went.ErrorText != "":
		return &computer.Fault{Code: codeNavigation, Message: went.ErrorText}
	case went.LoaderID == "": // another place in the same document
		return nil
	}
	timer := time.NewTimer(loadWithin)
	defer timer.Stop()
	select {
	case <-r.page.loaded:
	case <-timer.C: // it loads on
	case <-r.page.closed: // it closed itself, having been opened
	case <-r.dead:
		return r.lost()
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-r.p.ctx.Done():
		return errClosed
	}
	return nil
}

var errNoAnswer = errors.New("the page did not answer")

// navigation is what Page.navigate answers when the browser has shown the new
// document, or knows that it will not.
type navigation struct {
	ErrorText  string // the browser's reason, such as net::ERR_CONNECTION_REFUSED
	LoaderID   string
	IsDownload bool
}

// navigate goes to an address. When ctx ends it stops the load, which makes
// the call return; if that does not help the browser is closed.
func (r *run) navigate(ctx context.Context, to string) (navigation, error) {
	p, conn := r.page, r.conn
	conn.forgetWanted(p)
	type outcome struct {
		went navigation
		err  error
	}
	done := make(chan outcome, 1)
	if !r.work.Go(func() {
		var went navigation
		err := conn.cdp.call(context.Background(), p.session, "Page.navigate", params{"url": to}, &went) // ended by stopLoading
		done <- outcome{went, err}
	}) {
		return navigation{}, r.lost()
	}
	select {
	case o := <-done:
		return o.went, o.err
	case <-r.dead:
		return navigation{}, r.lost()
	case <-ctx.Done():
	}
	stopCtx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), graceOnCancel, context.Cause(ctx))
	defer cancel()
	if err := r.call(stopCtx, func() error {
		return conn.cdp.call(context.Background(), p.session, "Page.stopLoading", nil, nil)
	}); err != nil {
		return navigation{}, err
	}
	select {
	case <-done: // with ERR_ABORTED
		return navigation{}, context.Cause(ctx)
	case <-r.dead:
		return navigation{}, r.lost()
	case <-stopCtx.Done():
		r.bury(errors.New("a load could not be stopped"))
		return navigation{}, r.lost()
	}
}
