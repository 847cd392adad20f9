package playwright

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/computer"
)

// savedVersion changes when older files can no longer be read.
const savedVersion = 1

// maxSaved bounds a file of saved state, in bytes: browsers keep at most some
// 10 MB of sessionStorage and localStorage for an origin.
const maxSaved = 256 << 20

// Times of saving and restoring.
const (
	answersWithin = 5 * time.Second  // for pages to tell what they store; one that hangs tells nothing
	reopenWithin  = 10 * time.Second // for reopened pages to answer; one that does not loads on
	paintWithin   = 10 * time.Second // for the active page's first picture
)

// saved is what a pause keeps of a sandbox beside its profile: what a browser
// forgets when it ends.
type saved struct {
	Version   int                 `json:"version"`
	Pages     []savedPage         `json:"pages"` // in the order opened
	Cookies   []cookie            `json:"cookies"`
	Clipboard string              `json:"clipboard,omitempty"`
	Cursor    computer.Point      `json:"cursor"`
	Dialogs   []computer.Dialog   `json:"dialogs,omitempty"`
	Downloads []computer.Download `json:"downloads,omitempty"`
}

// savedPage is one page. Session and Local are its sessionStorage and
// localStorage, as JSON texts of arrays of pairs, so that a string that is no
// Unicode text stays what it is. Local is kept by snapshots only: a browser that
// ends writes it into its profile.
type savedPage struct {
	URL     string `json:"url"`
	Active  bool   `json:"active,omitempty"`
	Origin  string `json:"origin,omitempty"` // whose Session and Local are
	Session string `json:"session,omitempty"`
	Local   string `json:"local,omitempty"`
}

// cookie is one as CDP tells it, and takes it in a CookieParam.
type cookie struct {
	Name         string          `json:"name"`
	Value        string          `json:"value"`
	Domain       string          `json:"domain"` // with a dot in front: subdomains too
	Path         string          `json:"path"`
	Expires      float64         `json:"expires,omitempty"` // seconds since 1970; 0: with the session
	HTTPOnly     bool            `json:"httpOnly,omitempty"`
	Secure       bool            `json:"secure,omitempty"`
	SameSite     string          `json:"sameSite,omitempty"`
	Priority     string          `json:"priority,omitempty"`
	SourceScheme string          `json:"sourceScheme,omitempty"`
	SourcePort   int             `json:"sourcePort,omitempty"`
	PartitionKey json.RawMessage `json:"partitionKey,omitempty"`
}

// save reads the state of a sandbox without changing anything in it. A page
// that does not answer in time is kept by its address only. local: what the
// open pages have in localStorage too.
func (s *sandbox) save(ctx context.Context, conn *connection, local bool) (saved, error) {
	out := saved{Version: savedVersion}
	asking, cancel := context.WithTimeoutCause(ctx, answersWithin, errors.New("the page does not answer"))
	defer cancel()
	pages, active, err := conn.whole(asking)
	if err != nil {
		return saved{}, err
	}
	if out.Pages, err = conn.savePages(ctx, asking, pages, active, local); err != nil {
		return saved{}, err
	}
	if out.Clipboard, err = conn.clipboard.read(ctx); err != nil {
		return saved{}, fmt.Errorf("read the clipboard: %w", err)
	}
	s.mu.Lock()
	out.Cursor, out.Dialogs, out.Downloads = s.cursor, slices.Clone(s.dialogs), slices.Clone(s.downloads)
	s.mu.Unlock()
	var jar struct{ Cookies []cookie }
	if err := conn.cdp.call(ctx, "", "Storage.getCookies", nil, &jar); err != nil {
		return saved{}, err
	}
	for i := range jar.Cookies {
		jar.Cookies[i].Expires = max(0, jar.Cookies[i].Expires) // CDP says -1 of a session's
	}
	out.Cookies = jar.Cookies
	return out, nil
}

// whole returns the pages when all that the browser has are known and prepared,
// or ctx ends: after a take-over they come one by one.
func (c *connection) whole(ctx context.Context) ([]*page, *page, error) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		infos, err := c.infos(ctx)
		if err != nil {
			return nil, nil, err
		}
		_, expected := c.shown()
		pages, active := c.all()
		known := func(target string) bool {
			return slices.ContainsFunc(pages, func(p *page) bool {
				select {
				case <-p.ready:
					return p.target == target
				default:
					return false
				}
			})
		}
		missing := slices.ContainsFunc(infos, func(i targetInfo) bool { return slices.Contains(expected, i.TargetID) && !known(i.TargetID) })
		if !missing {
			return pages, active, nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return pages, active, nil
		}
	}
}

// savePages asks the browser for addresses, and the pages, all at once, for
// what they store.
func (c *connection) savePages(ctx, asking context.Context, pages []*page, active *page, local bool) ([]savedPage, error) {
	infos, err := c.infos(ctx)
	if err != nil {
		return nil, err
	}
	var out []savedPage
	var from []*page
	for _, p := range pages {
		for _, info := range infos {
			if info.TargetID == p.target && p.target != "" {
				out, from = append(out, savedPage{URL: info.URL, Active: p == active}), append(from, p)
			}
		}
	}
	var asked sync.WaitGroup
	for i, p := range from {
		asked.Go(func() {
			if err := c.saveStorage(asking, p, &out[i], local); err != nil {
				c.s.p.log.Warn("a page's sessionStorage is not kept", "vm", c.s.vm(), "error", err)
			}
		})
	}
	asked.Wait()
	for i, p := range out { // once is enough: two pages would undo each other's changes
		if slices.ContainsFunc(out[:i], func(q savedPage) bool { return q.Origin == p.Origin }) {
			out[i].Local = ""
		}
	}
	return out, context.Cause(ctx)
}

// storageScript tells what a document stores. Documents without an origin of
// their own may not look.
const storageScript = `(local => {
	const list = get => { try { return JSON.stringify(Object.entries(get())); } catch { return ""; } };
	return [self.origin, list(() => sessionStorage), local ? list(() => localStorage) : ""];
})`

// saveStorage completes a page with what its document stores. It looks from a
// world of its own, which the page's scripts cannot have changed. A page that
// could not be reopened after an earlier pause stays what it was to be.
func (c *connection) saveStorage(ctx context.Context, p *page, to *savedPage, local bool) error {
	value, err := c.inspect(ctx, p, fmt.Sprintf("%s(%t)", storageScript, local))
	var told []string
	if err == nil {
		err = json.Unmarshal(value, &told)
	}
	if err == nil && len(told) != 3 {
		err = errors.New("the page's answer is none")
	}
	c.mu.Lock()
	wanted := p.wanted
	c.mu.Unlock()
	if wanted != nil && (to.URL == "about:blank" || to.URL == wanted.URL) && (err != nil || told[0] != wanted.Origin) {
		active := to.Active
		*to = *wanted
		to.Active = active
		return nil
	}
	if err != nil {
		return err
	}
	if told[1] == "[]" {
		told[1] = "" // as a new page has it
	}
	to.Origin, to.Session, to.Local = told[0], told[1], told[2]
	return nil
}

// inspect evaluates an expression in a page's document, in a world of its own.
func (c *connection) inspect(ctx context.Context, p *page, expression string) (json.RawMessage, error) {
	var tree struct {
		FrameTree struct{ Frame struct{ ID string } }
	}
	if err := c.cdp.call(ctx, p.session, "Page.getFrameTree", nil, &tree); err != nil {
		return nil, err
	}
	var world struct{ ExecutionContextID int }
	if err := c.cdp.call(ctx, p.session, "Page.createIsolatedWorld", params{"frameId": tree.FrameTree.Frame.ID}, &world); err != nil {
		return nil, err
	}
	var out struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails *struct{ Text string }
	}
	err := c.cdp.call(ctx, p.session, "Runtime.evaluate", params{"expression": expression, "returnByValue": true, "contextId": world.ExecutionContextID}, &out)
	if err == nil && out.ExceptionDetails != nil {
		err = errors.New(out.ExceptionDetails.Text)
	}
	return out.Result.Value, err
}

// restore gives a browser that has just started what was saved, reopens the
// pages and returns when the active one has painted. A page that does not
// answer loads on, and one that gives no picture holds nothing up: in a sandbox
// that was not paused they would be no different.
func (s *sandbox) restore(ctx context.Context, conn *connection, from saved) error {
	if err := s.restoreCookies(ctx, conn, from.Cookies); err != nil {
		return err
	}
	if from.Clipboard != "" {
		if err := conn.clipboard.write(ctx, from.Clipboard); err != nil {
			return fmt.Errorf("restore the clipboard: %w", err)
		}
	}
	s.mu.Lock()
	s.cursor, s.dialogs, s.downloads = from.Cursor, from.Dialogs, from.Downloads
	s.mu.Unlock()
	active, err := s.reopen(ctx, conn, from.Pages)
	if err != nil {
		return err
	}
	painting, cancel := context.WithTimeoutCause(ctx, paintWithin, errNoPicture)
	defer cancel()
	if _, _, err := s.capture(painting, conn); err != nil {
		if ctx.Err() != nil || conn.isGone() || s.isDead() {
			return fmt.Errorf("first picture: %w", err)
		}
		s.p.log.Warn("reopened, and no picture yet", "vm", s.vm(), "url", active, "error", err)
	}
	return s.note()
}

// restoreCookies sets the cookies that have not expired.
func (s *sandbox) restoreCookies(ctx context.Context, conn *connection, all []cookie) error {
	now := float64(time.Now().Unix())
	jar := slices.DeleteFunc(slices.Clone(all), func(c cookie) bool { return c.Expires != 0 && c.Expires <= now })
	if len(jar) == 0 || conn.cdp.call(ctx, "", "Storage.setCookies", params{"cookies": jar}, nil) == nil {
		return nil
	}
	for _, c := range jar { // all or none: find the one that the browser does not take
		if err := conn.cdp.call(ctx, "", "Storage.setCookies", params{"cookies": []cookie{c}}, nil); err != nil {
			if conn.isGone() || ctx.Err() != nil {
				return fmt.Errorf("restore the cookies: %w", err)
			}
			s.p.log.Warn("a cookie could not be restored", "vm", s.vm(), "domain", c.Domain, "name", c.Name, "error", err)
		}
	}
	return nil
}

// reopen opens the pages in their order and loads them all at once. It returns
// the address of the active one.
func (s *sandbox) reopen(ctx context.Context, conn *connection, list []savedPage) (string, error) {
	if len(list) == 0 {
		list = []savedPage{{URL: "about:blank", Active: true}}
	}
	pages, _ := conn.all()
	for len(pages) < len(list) {
		var p *page
		err := s.ask(ctx, func() error {
			raw, err := conn.context.NewPage()
			if err == nil {
				p = conn.addPage(raw)
			}
			return err
		})
		if err != nil {
			return "", fmt.Errorf("reopen a page: %w", err)
		}
		pages = append(pages, p)
	}
	front := pages[max(0, slices.IndexFunc(list, func(p savedPage) bool { return p.Active }))]
	for _, p := range pages {
		select {
		case <-p.ready:
		case <-ctx.Done():
			return "", context.Cause(ctx)
		}
		if p.session == "" {
			return "", errors.New("reopen a page: it could not be prepared")
		}
	}
	conn.choose(front.target)
	if err := s.ask(ctx, func() error { return front.BringToFront() }); err != nil {
		return "", fmt.Errorf("bring to front: %w", err)
	}
	within, cancel := context.WithTimeout(ctx, reopenWithin)
	defer cancel()
	address := ""
	for _, first := range []bool{true, false} { // what is in localStorage is there before another page of the origin
		var answers []<-chan struct{}
		for i, saved := range list {
			if pages[i] == front {
				address = saved.URL
			}
			if first == (saved.Local != "") {
				answers = append(answers, conn.reload(pages[i], saved))
			}
		}
		for _, answered := range answers {
			select {
			case <-answered:
			case <-within.Done():
			case <-conn.gone:
				return "", errDevtoolsGone
			}
		}
	}
	if err := context.Cause(ctx); err != nil {
		return "", err
	}
	if reopens(address) && address != "about:blank" {
		select {
		case <-front.loaded:
		case <-time.After(loadWithin): // it loads on
		case <-within.Done():
		case <-front.closed:
		case <-conn.gone:
			return "", errDevtoolsGone
		case <-ctx.Done():
			return "", context.Cause(ctx)
		}
	}
	return address, nil
}

// reopens reports whether a page is loaded anew: what open takes. Others, such
// as a blob's, were made by a page that is gone.
func reopens(url string) bool {
	to, err := address(url)
	return err == nil && to == url
}

// storedScript puts what was saved into the storages of the first document of
// its origin, before any script of the page's runs.
const storedScript = `((origin, session, local) => {
	if (self !== top || self.origin !== origin) return;
	if (local) localStorage.clear();
	for (const [store, text] of [["sessionStorage", session], ["localStorage", local]])
		if (text) for (const [key, value] of JSON.parse(text)) self[store].setItem(key, value);
})`

// reload loads a saved page's address and returns what is closed when it has
// answered. Until then the page is remembered as what it is to be.
func (c *connection) reload(p *page, from savedPage) <-chan struct{} {
	answered := make(chan struct{})
	if !reopens(from.URL) || from.URL == "about:blank" {
		close(answered)
		return answered
	}
	c.mu.Lock()
	p.wanted = &from
	c.mu.Unlock()
	started := c.s.work.Go(func() {
		defer close(answered)
		var script struct{ Identifier string }
		ctx := c.s.p.ctx
		if from.Session != "" || from.Local != "" {
			raw, err := json.Marshal([]string{from.Origin, from.Session, from.Local}) // JSON is JavaScript
			if err == nil {
				err = c.cdp.call(ctx, p.session, "Page.addScriptToEvaluateOnNewDocument", params{"source": storedScript + "(..." + string(raw) + ")"}, &script)
			}
			if err != nil {
				c.s.p.log.Warn("a page's sessionStorage is not restored", "vm", c.s.vm(), "error", err)
			}
		}
		var went navigation
		err := c.cdp.call(ctx, p.session, "Page.navigate", params{"url": from.URL}, &went)
		if script.Identifier != "" {
			_ = c.cdp.call(ctx, p.session, "Page.removeScriptToEvaluateOnNewDocument", params{"identifier": script.Identifier}, nil) // fails with the page
		}
		if err == nil && went.ErrorText == "" {
			c.forgetWanted(p)
		}
	})
	if !started {
		close(answered)
	}
	return answered
}

// forgetWanted notes that a page is what it shows.
func (c *connection) forgetWanted(p *page) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p.wanted = nil
}

// readSaved reads a file of saved state. It takes nothing but a regular file,
// whatever else may have been put in its place.
func readSaved(path string) (saved, error) {
	var out saved
	raw, err := readRegular(path, maxSaved)
	if err == nil {
		err = json.Unmarshal(raw, &out)
	}
	if err == nil && out.Version != savedVersion {
		err = fmt.Errorf("it has version %d, and this program knows %d", out.Version, savedVersion)
	}
	if err != nil {
		return saved{}, fmt.Errorf("the saved state (%s) cannot be read: %w", filepath.Base(path), err)
	}
	return out, nil
}

func readRegular(path string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // only read
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > limit {
		return nil, fmt.Errorf("it is no file of at most %d bytes", limit)
	}
	return io.ReadAll(io.LimitReader(f, limit))
}

// writeSynced replaces a file atomically and durably: after it returns, a crash
// of this process or the machine leaves the new content, before that the old.
func writeSynced(path string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode %s: %w", filepath.Base(path), err)
	}
	if len(raw) > maxSaved {
		return fmt.Errorf("%s would have %d bytes, at most %d are kept", filepath.Base(path), len(raw), maxSaved)
	}
	fresh := path + ".new"
	if err := os.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(fresh, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600) // O_EXCL: follows no link
	if err != nil {
		return err
	}
	_, err = f.Write(raw)
	if err == nil {
		err = f.Sync()
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(fresh, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(fresh))
	}
	return syncDir(filepath.Dir(path))
}

// syncDir makes what was renamed or removed in a directory durable.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
