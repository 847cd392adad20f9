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
// no effect on the page, so when ctx ends only the picture's own session is
// closed.
func (s *sandbox) capture(ctx context.Context, conn *connection) ([]byte, *page, error) {
	for {
		p, err := conn.current(ctx)
		if err != nil {
			return nil, nil, err
		}
		raw, err := s.shoot(ctx, conn, p)
		if err == nil || ctx.Err() != nil || s.isDead() || !s.moved(conn, p) {
			return raw, p, err
		}
		// The page closed under it: another one is active now.
	}
}

// moved reports whether p is no longer the active page, or shows so in a moment.
func (s *sandbox) moved(conn *connection, p *page) bool {
	select {
	case <-p.closed:
		return !conn.isGone() && !s.isDead()
	case <-conn.gone:
	case <-s.dead:
	case <-time.After(settle):
	}
	return false
}

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
		// A window that has just opened, or whose display another client changed.
		if err := s.ask(ctx, func() error { return p.SetViewportSize(d.Width, d.Height) }); err != nil {
			return nil, err
		}
	}
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
	s, err := p.find(vm)
	if err != nil {
		return providers.View{}, err
	}
	limited, cancel := context.WithTimeoutCause(ctx, pictureLimit, errNoPicture)
	defer cancel()
	view, err := s.observe(limited)
	if err == nil {
		return view, nil
	}
	var conn *connection
	if conn, _ = s.link(limited); conn == nil {
		conn = &connection{}
	}
	fault, err := (&run{sandbox: s, conn: conn}).explain(limited, err)
	if fault != nil {
		err = fmt.Errorf("%w: %w", fault, providers.ErrUnavailable)
	}
	return providers.View{}, fmt.Errorf("observe vm %s: %w", vm, err)
}

var errNoPicture = fmt.Errorf("the page gave no picture in %s: %w", pictureLimit, providers.ErrTimeout)

func (s *sandbox) observe(ctx context.Context) (providers.View, error) {
	conn, err := s.link(ctx)
	if err != nil {
		return providers.View{}, err
	}
	raw, shown, err := s.capture(ctx, conn)
	if err != nil {
		return providers.View{}, err
	}
	taken := time.Now().UTC()
	pages, err := s.describePages(ctx, conn, shown)
	if err != nil {
		return providers.View{}, err
	}
	s.mu.Lock()
	cursor := s.cursor
	s.mu.Unlock()
	if raw, err = withPointer(raw, cursor); err != nil {
		return providers.View{}, fmt.Errorf("%w: %w", err, providers.ErrUnavailable)
	}
	o := computer.Observation{Cursor: &cursor, Pages: pages, TakenAt: taken}
	for _, page := range pages {
		if page.Active {
			o.URL, o.Title = page.URL, page.Title
		}
	}
	s.mu.Lock()
	o.Dialogs, o.Downloads = s.dialogs, s.downloads
	s.dialogs, s.downloads = nil, nil
	s.mu.Unlock()
	return providers.View{PNG: raw, Observation: o}, nil
}

// describePages asks the browser's process for the pages' addresses and titles.
func (s *sandbox) describePages(ctx context.Context, conn *connection, shown *page) ([]computer.Page, error) {
	var targets struct {
		TargetInfos []struct{ TargetID, Title, URL string }
	}
	if err := conn.cdp.call(ctx, "", "Target.getTargets", nil, &targets); err != nil {
		return nil, err
	}
	pages, _ := conn.all()
	var out []computer.Page
	for _, p := range pages {
		select {
		case <-p.ready:
		default:
			continue // it is opening
		}
		for _, info := range targets.TargetInfos {
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
