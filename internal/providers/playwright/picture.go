package playwright

import (
	"context"
	"fmt"
	"image"
	"strings"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
)

// pictureLimit bounds one picture. A page whose main thread is busy longer
// gives none.
const pictureLimit = 20 * time.Second

// capture takes a picture of the active page as the browser paints it. It has
// no effect on the page, so it may be tried again: a page that closes under it
// or changes its process at that moment gives none.
func (s *sandbox) capture(ctx context.Context, conn *connection) ([]byte, *page, error) {
	for try := 0; ; try++ {
		p, err := conn.current(ctx)
		if err != nil {
			return nil, nil, err
		}
		raw, err := s.shoot(ctx, conn, p)
		if err == nil || try == captureTries || ctx.Err() != nil || s.isDead() || conn.isGone() {
			return raw, p, err
		}
		pause := time.NewTimer(capturePause)
		select {
		case <-pause.C:
		case <-p.closed:
		case <-conn.gone:
		case <-s.dead:
		}
		pause.Stop()
	}
}

const (
	captureTries = 20
	capturePause = 50 * time.Millisecond
)

// shoot takes the picture of one page, with exactly the display's pixels.
func (s *sandbox) shoot(ctx context.Context, conn *connection, p *page) ([]byte, error) {
	d := s.display()
	for try := 0; ; try++ {
		raw, err := s.shootRaw(ctx, conn, p)
		if err != nil {
			return nil, err
		}
		size, err := sizeOf(raw)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", err, providers.ErrUnavailable)
		}
		if size == image.Pt(d.Width, d.Height) {
			return raw, nil
		} else if try == 2 {
			return nil, fmt.Errorf("the browser's picture is %v, the display %d×%d: %w", size, d.Width, d.Height, providers.ErrUnavailable)
		}
		if err := s.ask(ctx, func() error { return p.nudge(d) }); err != nil {
			return nil, err
		}
	}
}

// nudge makes a page take on the display. One that was in the background when
// its display was set lays itself out so, and paints itself as before, until
// the display is set to another size.
func (p *page) nudge(d computer.Display) error {
	if err := p.BringToFront(); err != nil {
		return err
	}
	if err := p.SetViewportSize(d.Width, d.Height-1); err != nil {
		return err
	}
	return p.SetViewportSize(d.Width, d.Height)
}

func (s *sandbox) shootRaw(ctx context.Context, conn *connection, p *page) ([]byte, error) {
	var shot struct{ Data []byte } // base64 in JSON
	err := conn.cdp.call(ctx, p.session, "Page.captureScreenshot", params{
		"format": "png", "optimizeForSpeed": true, "captureBeyondViewport": false,
	}, &shot)
	return shot.Data, err
}

// picture runs a screenshot or a zoom. A zoom is cut out of the whole picture
// and has the region's size: the display has no finer pixels that enlarging
// could show.
func (r *run) picture(ctx context.Context, a computer.Action, out *providers.Result) error {
	raw, _, err := r.capture(ctx, r.conn)
	if err != nil {
		return err
	}
	r.mu.Lock()
	at := r.cursor
	r.mu.Unlock()
	if a.Type == computer.Screenshot {
		out.Image, err = withPointer(raw, at)
		return err
	}
	img, err := decodeWithPointer(raw, at)
	if err != nil {
		return err
	}
	out.Image, err = encodeImage(img.SubImage(image.Rect(a.Region.X, a.Region.Y, a.Region.X+a.Region.Width, a.Region.Y+a.Region.Height)))
	return err
}

// Observe takes a picture of the active page. Address and titles come from the
// browser's own process; the page is only asked for its pixels. The dialogs
// and downloads are those since the last Observe that succeeded. When ctx ends
// the sandbox lives on: nothing of an observation can arrive late.
func (p *Provider) Observe(ctx context.Context, vm string) (providers.View, error) {
	s, done, err := p.use(vm)
	if err != nil {
		return providers.View{}, err
	}
	defer done()
	limited, cancel := context.WithTimeoutCause(ctx, pictureLimit, errNoPicture)
	defer cancel()
	r := &run{sandbox: s}
	view, err := r.observe(limited)
	if err == nil {
		return view, nil
	}
	fault, err := r.explain(limited, err)
	if fault != nil {
		err = fmt.Errorf("%w: %w", fault, providers.ErrUnavailable)
	}
	return providers.View{}, fmt.Errorf("observe vm %s: %w", vm, err)
}

var errNoPicture = fmt.Errorf("the page gave no picture in %s: %w", pictureLimit, providers.ErrTimeout)

func (r *run) observe(ctx context.Context) (_ providers.View, err error) {
	if r.conn, err = r.link(ctx); err != nil {
		return providers.View{}, err
	}
	raw, shown, err := r.capture(ctx, r.conn)
	if err != nil {
		return providers.View{}, err
	}
	taken := time.Now().UTC()
	pages, err := r.conn.describePages(ctx, shown)
	if err != nil {
		return providers.View{}, err
	}
	r.mu.Lock()
	cursor := r.cursor
	r.mu.Unlock()
	if raw, err = withPointer(raw, cursor); err != nil {
		return providers.View{}, fmt.Errorf("%w: %w", err, providers.ErrUnavailable)
	}
	o := computer.Observation{Cursor: &cursor, Pages: pages, TakenAt: taken}
	for _, page := range pages {
		if page.Active {
			o.URL, o.Title = page.URL, page.Title
		}
	}
	r.mu.Lock()
	o.Dialogs, o.Downloads = r.dialogs, r.downloads
	r.dialogs, r.downloads = nil, nil
	r.mu.Unlock()
	return providers.View{PNG: raw, Observation: o}, nil
}

// targetInfo is what the browser's process knows of a page, or something else.
type targetInfo struct{ TargetID, Title, URL string }

func (c *connection) infos(ctx context.Context) ([]targetInfo, error) {
	var targets struct{ TargetInfos []targetInfo }
	err := c.cdp.call(ctx, "", "Target.getTargets", nil, &targets)
	return targets.TargetInfos, err
}

// describePages asks the browser's process for the pages' addresses and titles.
func (c *connection) describePages(ctx context.Context, shown *page) ([]computer.Page, error) {
	infos, err := c.infos(ctx)
	if err != nil {
		return nil, err
	}
	pages, _ := c.all()
	var out []computer.Page
	for _, p := range pages {
		select {
		case <-p.ready:
		default:
			continue // it is opening
		}
		for _, info := range infos {
			if info.TargetID == p.target {
				out = append(out, computer.Page{URL: info.URL, Title: title(info.Title, info.URL), Active: p == shown})
			}
		}
	}
	return out, nil
}

// title drops what the browser shows in place of a title that a page lacks:
// its address, without the scheme.
func title(shown, url string) string {
	_, rest, _ := strings.Cut(url, "://")
	if shown == url || shown == rest || shown == strings.TrimSuffix(rest, "/") {
		return ""
	}
	return shown
}
