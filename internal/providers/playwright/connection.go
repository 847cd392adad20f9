package playwright

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	pw "github.com/mxschmitt/playwright-go"

	"berth/internal/computer"
)

const connectTimeout = 10 * time.Second

// connection is one CDP connection to one browser, through the driver. It ends
// with the driver, with the browser, or when the socket between them breaks.
type connection struct {
	s       *sandbox
	driver  *driver
	browser pw.Browser
	context pw.BrowserContext
	cdp     *devtools
	gone    chan struct{}
	over    sync.Once

	clipboard *clipboard

	mu      sync.Mutex
	pages   []*page // in the order opened; the last activated is active
	active  *page
	noted   held          // what an earlier connection left; see place
	changed chan struct{} // closed and renewed when active changes
}

// page is one tab or window.
type page struct {
	pw.Page
	target  string // CDP target id
	session string // in devtools; "" while not ready, and when preparing failed
	closed  chan struct{}
	ready   chan struct{} // closed when it is prepared, or that failed
	loaded  chan struct{} // gets a token when a document has loaded
	mouse   computer.Point
	placed  bool       // the page's pointer is at mouse
	wanted  *savedPage // what it is to be, while it could not be reopened
	styled  string     // the frame whose select elements have another style, see prepareSelect
}

// dial connects to the sandbox's browser and prepares its pages. When it is
// given up early, what it made so far is undone in the background.
func dial(ctx context.Context, s *sandbox, d *driver) (*connection, error) {
	c := &connection{s: s, driver: d, gone: make(chan struct{}), changed: make(chan struct{})}
	err := c.wait(ctx, func(ctx context.Context) error {
		err := c.build(ctx)
		if err != nil || c.isGone() {
			c.abandon()
		}
		return err
	})
	if err != nil {
		c.end()
		return nil, err
	}
	s.work.Go(func() {
		select {
		case <-d.gone:
		case <-c.cdp.gone:
		case <-s.dead:
		case <-s.p.ctx.Done():
		case <-c.gone:
		}
		c.abandon()
	})
	return c, nil
}

// build connects twice, our own way and through Playwright, and prepares the
// pages. All its calls end with ctx, the driver or the browser.
func (c *connection) build(ctx context.Context) (err error) {
	if c.cdp, err = dialDevtools(ctx, c.s.proc.endpoint, c.s.work.Go); err != nil {
		return err
	}
	c.clipboard = &clipboard{cdp: c.cdp}
	c.cdp.on("Page.loadEventFired", c.onLoad)
	if err := c.guard(ctx); err != nil {
		return err
	}
	c.browser, err = c.driver.pw.Chromium.ConnectOverCDP(c.s.proc.endpoint, pw.BrowserTypeConnectOverCDPOptions{
		Timeout:      pw.Float(float64(connectTimeout.Milliseconds())),
		ArtifactsDir: pw.String(filepath.Join(c.s.dir, "downloads")),
		IsLocal:      pw.Bool(true),
	})
	if err != nil {
		c.browser = nil
		return fmt.Errorf("connect to the browser: %w", err)
	}
	c.browser.OnDisconnected(func(pw.Browser) { c.end() })
	if !c.browser.IsConnected() {
		c.end()
	}
	if len(c.browser.Contexts()) == 0 {
		return errors.New("the browser has no default context")
	}
	c.context = c.browser.Contexts()[0]
	return c.attach()
}

// wait runs a blocking call of the connection's making; when ctx, the driver
// or the browser ends first, nobody waits for it any more.
func (c *connection) wait(ctx context.Context, fn func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, connectTimeout+5*time.Second, errors.New("the browser's pages do not answer"))
	defer cancel()
	done := make(chan error, 1)
	c.s.work.Go(func() { done <- fn(ctx) })
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-c.s.proc.exited:
		return errExited
	case <-c.s.dead:
		return errKilled
	case <-c.driver.gone:
		return errDriverGone
	}
}

func (c *connection) end() { c.over.Do(func() { close(c.gone) }) }

func (c *connection) isGone() bool {
	select {
	case <-c.gone:
		return true
	case <-c.driver.gone:
		return true
	default:
		return false
	}
}

// abandon ends a connection, whole or not. The browser lives.
func (c *connection) abandon() {
	c.end()
	if c.cdp != nil {
		c.cdp.close()
	}
	if c.browser != nil && !c.s.isDead() && c.s.p.ctx.Err() == nil {
		_ = c.browser.Close() // disconnects; a fault means that it is already
	}
}

// onLoad tells a page that its document has loaded.
func (c *connection) onLoad(session string, _ json.RawMessage) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.pages {
		if p.session == session {
			select {
			case p.loaded <- struct{}{}:
			default:
			}
		}
	}
}

// attach follows pages, dialogs and downloads. Event handlers run on the
// driver connection's only goroutine, so none of them may block.
func (c *connection) attach() error {
	c.context.OnDialog(c.onDialog)
	c.context.OnPage(func(p pw.Page) { c.addPage(p) })
	var pages []*page
	for _, p := range c.context.Pages() {
		pages = append(pages, c.addPage(p))
	}
	if len(pages) == 0 {
		p, err := c.context.NewPage()
		if err != nil {
			return fmt.Errorf("open a page: %w", err)
		}
		pages = append(pages, c.addPage(p))
	}
	for _, p := range pages {
		<-p.ready
	}
	return nil
}

// addPage makes a page known and active, once, and prepares it in the
// background (see ready).
func (c *connection) addPage(raw pw.Page) *page {
	c.mu.Lock()
	for _, p := range c.pages {
		if p.Page == raw {
			c.mu.Unlock()
			return p
		}
	}
	p := &page{Page: raw, closed: make(chan struct{}), ready: make(chan struct{}), loaded: make(chan struct{}, 1)}
	c.pages = append(c.pages, p)
	c.activate(p)
	c.mu.Unlock()
	raw.OnClose(func(pw.Page) { c.removePage(p) })
	raw.OnCrash(func(pw.Page) { c.onCrash(p) })
	raw.OnDownload(c.onDownload)
	started := c.s.work.Go(func() {
		defer close(p.ready)
		if err := c.prepare(p); err != nil && !p.isClosed() && !c.isGone() {
			c.s.p.log.Warn("page not prepared; closing it", "vm", c.s.vm(), "error", err)
			_ = p.Close() // its close event does the rest
		}
	})
	if !started {
		close(p.ready)
	}
	return p
}

// prepare gives a page its session and the sandbox's display.
func (c *connection) prepare(p *page) error {
	ctx, cancel := context.WithTimeout(c.s.p.ctx, connectTimeout)
	defer cancel()
	target, err := c.identify(ctx, p)
	if err != nil {
		return err
	}
	c.place(p, target)
	session, err := c.cdp.attach(ctx, target)
	if err == nil {
		err = c.cdp.call(ctx, session, "Page.enable", nil, nil)
	}
	if err == nil {
		err = c.cdp.call(ctx, session, "DOM.enable", nil, nil)
	}
	if err != nil {
		return err
	}
	c.mu.Lock()
	active := c.active == p
	c.mu.Unlock()
	if active { // one that opened in the background gives no pictures, and takes no display
		if err := p.BringToFront(); err != nil {
			return fmt.Errorf("bring to front: %w", err)
		}
	}
	d := c.s.display()
	if err := p.SetViewportSize(d.Width, d.Height); err != nil {
		return fmt.Errorf("set the display: %w", err)
	}
	c.mu.Lock()
	p.session = session
	c.mu.Unlock()
	return nil
}

// identify asks Playwright which CDP target a page is. A call of a Playwright
// CDP session that closes in the middle never returns, so nobody waits for
// this one's goroutine: in that rare case it ends with the driver.
func (c *connection) identify(ctx context.Context, p *page) (string, error) {
	type answer struct {
		target string
		err    error
	}
	done := make(chan answer, 1)
	go func() {
		session, err := c.context.NewCDPSession(p.Page)
		if err != nil {
			done <- answer{err: fmt.Errorf("open a page's session: %w", err)}
			return
		}
		raw, err := session.Send("Target.getTargetInfo", params{})
		reply, _ := raw.(map[string]any)
		info, _ := reply["targetInfo"].(map[string]any)
		target, ok := info["targetId"].(string)
		if err == nil && !ok {
			err = errors.New("the page has no target")
		}
		done <- answer{target, err}
		_ = session.Detach() // a page that has closed is detached
	}()
	select {
	case a := <-done:
		return a.target, a.err
	case <-p.closed:
		return "", pw.ErrTargetClosed
	case <-c.gone:
		return "", errDevtoolsGone
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
}

// activate makes p the active page. The caller holds c.mu.
func (c *connection) activate(p *page) {
	c.active = p
	close(c.changed)
	c.changed = make(chan struct{})
}

func (p *page) isClosed() bool {
	select {
	case <-p.closed:
		return true
	default:
		return false
	}
}

// removePage forgets a closed page. Another one becomes active: the youngest
// that is left, or a fresh blank one.
func (c *connection) removePage(p *page) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if p.isClosed() {
		return
	}
	close(p.closed)
	for i, other := range c.pages {
		if other == p {
			c.pages = append(c.pages[:i:i], c.pages[i+1:]...)
			break
		}
	}
	if c.active != p {
		return
	}
	var next *page
	if n := len(c.pages); n > 0 {
		next = c.pages[n-1]
	}
	c.activate(next)
	c.s.work.Go(func() {
		c.s.mu.Lock()
		quits := c.s.quits
		c.s.mu.Unlock()
		if c.isGone() || c.s.isDead() || quits {
			return
		}
		if next != nil {
			_ = next.BringToFront() // a page that closes meanwhile is handled by its own event
		} else if _, err := c.context.NewPage(); err != nil && !c.isGone() {
			c.s.p.log.Warn("no new page", "vm", c.s.vm(), "error", err)
		}
	})
}

// onCrash handles a renderer that died ("Aw, snap!"). The active page's state
// is what the sandbox is for, so its loss is the sandbox's; a page in the
// background is only closed.
func (c *connection) onCrash(p *page) {
	c.mu.Lock()
	active := c.active == p
	c.mu.Unlock()
	if active {
		c.s.bury(errors.New("the page crashed"))
		return
	}
	c.s.work.Go(func() { _ = p.Close() }) // its close event does the rest
}

// current returns the active page, prepared, waiting for one that is opening.
func (c *connection) current(ctx context.Context) (*page, error) {
	for {
		c.mu.Lock()
		p, changed := c.active, c.changed
		c.mu.Unlock()
		var ready chan struct{}
		if p != nil {
			ready = p.ready
		}
		select {
		case <-ready:
			if !p.isClosed() && p.session != "" {
				return p, nil
			}
			ready = nil
		default:
		}
		select {
		case <-ready:
		case <-changed:
		case <-c.gone:
			return nil, errDriverGone
		case <-c.s.dead:
			return nil, c.s.lost()
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// shown returns the active page's CDP target, "" while it is opening, and those
// of all pages in the order opened. While pages are still being taken over it is
// what was noted.
func (c *connection) shown() (active string, all []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.noted.Pages) > 0 {
		return c.noted.Active, c.noted.Pages
	}
	for _, p := range c.pages {
		if p.target != "" {
			all = append(all, p.target)
		}
	}
	if c.active != nil {
		active = c.active.target
	}
	return active, all
}

// place gives a page its target. One that an earlier connection knew too is not
// new, however late Playwright tells of it: the active one of then stays active.
func (c *connection) place(p *page, target string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p.target = target
	if slices.Contains(c.noted.Pages, target) && c.active == p || c.noted.Active == target {
		c.takeUp()
	}
}

// takeUp puts the pages in the noted order, which a browser that is connected to
// anew does not tell, and those that were not noted last, and makes the noted
// one active. The caller holds c.mu.
func (c *connection) takeUp() {
	place := func(p *page) int {
		if i := slices.Index(c.noted.Pages, p.target); i >= 0 {
			return i
		}
		return len(c.noted.Pages)
	}
	slices.SortStableFunc(c.pages, func(a, b *page) int { return place(a) - place(b) })
	for _, p := range c.pages {
		if p.target == c.noted.Active && p.target != "" && c.active != p {
			c.activate(p)
		}
	}
}

// takeOver goes on where an earlier connection was. A nil note ends that: what
// opens or closes from now on is new.
func (c *connection) takeOver(note *held) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if note == nil {
		c.noted = held{}
		return
	}
	c.noted = *note
	c.takeUp()
}

// choose makes the page of a target the active one, if it is there.
func (c *connection) choose(target string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, p := range c.pages {
		if p.target == target && target != "" && c.active != p {
			c.activate(p)
		}
	}
}

// all returns the open pages and the active one.
func (c *connection) all() ([]*page, *page) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]*page(nil), c.pages...), c.active
}

// onDialog answers a JavaScript dialog at once, because a page stands still
// until somebody does, and keeps it for the next observation. An alert and a
// beforeunload are accepted: the first has one answer only, and the second
// guards a navigation that the agent has asked for. A confirm and a prompt are
// dismissed, which is what a page treats as "no": saying yes unseen could
// delete something. A create whose metadata has dialogs=accept says yes (to a
// prompt: with its default text).
func (c *connection) onDialog(d pw.Dialog) {
	kind, message := d.Type(), d.Message()
	c.s.mu.Lock()
	accept := kind == "alert" || kind == "beforeunload" || c.s.rec.Metadata["dialogs"] == "accept"
	answer := map[bool]string{true: "accepted", false: "dismissed"}[accept]
	c.s.dialogs = capped(append(c.s.dialogs, computer.Dialog{Kind: kind, Message: message, Answer: answer}))
	c.s.mu.Unlock()
	c.s.work.Go(func() {
		var err error
		switch {
		case !accept:
			err = d.Dismiss()
		case kind == "prompt":
			err = d.Accept(d.DefaultValue())
		default:
			err = d.Accept()
		}
		if err != nil && !c.isGone() && !errors.Is(err, pw.ErrTargetClosed) {
			c.s.p.log.Warn("dialog not answered", "vm", c.s.vm(), "error", err)
		}
	})
}

// onDownload keeps a file that the browser fetches in the sandbox's directory
// and reports it when it is complete.
func (c *connection) onDownload(d pw.Download) {
	name, url := filepath.Base(filepath.Clean("/"+d.SuggestedFilename())), d.URL()
	c.s.work.Go(func() {
		report := computer.Download{Name: name, URL: url}
		path, err := uniquePath(filepath.Join(c.s.dir, "downloads", "files"), name)
		if err == nil {
			err = d.SaveAs(path)
		}
		if err != nil {
			report.Error = firstLine(err)
		} else {
			report.Path = filepath.Join("downloads", filepath.Base(path)) // as the sandbox sees it
		}
		c.s.mu.Lock()
		c.s.downloads = capped(append(c.s.downloads, report))
		c.s.mu.Unlock()
	})
}

// uniquePath returns a path in dir that does not exist yet, and reserves it.
func uniquePath(dir, name string) (string, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	ext := filepath.Ext(name)
	for i := range 10000 {
		path := filepath.Join(dir, name)
		if i > 0 {
			path = filepath.Join(dir, fmt.Sprintf("%s (%d)%s", strings.TrimSuffix(name, ext), i, ext))
		}
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err == nil {
			return path, f.Close()
		}
		if !errors.Is(err, os.ErrExist) {
			return "", err
		}
	}
	return "", fmt.Errorf("too many files named %q", name)
}

// maxReports bounds what one observation reports of a kind; the oldest go.
const maxReports = 50

func capped[T any](list []T) []T { return list[max(0, len(list)-maxReports):] }

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}
