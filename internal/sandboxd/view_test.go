package sandboxd

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"image/png"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	pw "github.com/mxschmitt/playwright-go"

	"berth/api"
	"berth/internal/providers/playwright/browsertest"
)

// link makes a link through the API and returns its path.
func (w *world) link(t testing.TB, path string, access api.Access) string {
	t.Helper()
	var got struct {
		Path      string
		Access    api.Access
		ExpiresAt time.Time
	}
	a := w.want(t, 201, "POST", path+"/stream/links", map[string]any{"access": access, "seconds": 600})
	a.into(t, &got)
	if !bytes.Contains(a.body, []byte(got.Path)) {
		t.Errorf("the path cannot be copied from %s", a.body)
	}
	if left := time.Until(got.ExpiresAt); got.Access != access || left < 9*time.Minute || left > 10*time.Minute {
		t.Errorf("%+v", got)
	}
	return got.Path
}

// viewer opens the live view's WebSocket of a link, without a key.
func (w *world) viewer(t testing.TB, link string, headers ...string) (*websocket.Conn, *http.Response, error) {
	t.Helper()
	opts := &websocket.DialOptions{HTTPHeader: http.Header{}, HTTPClient: &http.Client{Transport: &http.Transport{DialContext: narrow}}}
	for i := 0; i < len(headers); i += 2 {
		opts.HTTPHeader.Set(headers[i], headers[i+1])
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ws, resp, err := websocket.Dial(ctx, w.http.URL+strings.Replace(link, "/stream?", "/stream/rfb?", 1), opts)
	if err == nil {
		ws.SetReadLimit(64 << 20)
		t.Cleanup(func() { _ = ws.CloseNow() }) // most are closed by then
	}
	return ws, resp, err
}

// narrow connects with a small receive buffer, so that a viewer who does not read
// is noticed.
func narrow(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err == nil {
		err = conn.(*net.TCPConn).SetReadBuffer(16 << 10)
	}
	return conn, err
}

// rfb is the client's side of RFB 3.8 as far as the tests need it.
type rfb struct {
	net.Conn
	width, height int
}

// open greets; see RFC 6143, 7.1 to 7.3.
func openRFB(t testing.TB, ws *websocket.Conn) *rfb {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	c := &rfb{Conn: websocket.NetConn(ctx, ws, websocket.MessageBinary)}
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	version := c.read(t, 12)
	if !strings.HasPrefix(string(version), "RFB 003.") {
		t.Fatalf("%q", version)
	}
	c.send(t, version)
	types := c.read(t, int(c.read(t, 1)[0]))
	if !bytes.Equal(types, []byte{1}) {
		t.Fatalf("security types %v, want none only: the way in is the link", types)
	}
	c.send(t, []byte{1})
	if result := c.read(t, 4); !bytes.Equal(result, make([]byte, 4)) {
		t.Fatalf("security result %v", result)
	}
	c.send(t, []byte{1}) // shared
	init := c.read(t, 24)
	c.width, c.height = int(binary.BigEndian.Uint16(init)), int(binary.BigEndian.Uint16(init[2:]))
	c.read(t, int(binary.BigEndian.Uint32(init[20:])))
	return c
}

func (c *rfb) read(t testing.TB, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	if _, err := io.ReadFull(c, b); err != nil {
		t.Fatalf("read from the view: %v", err)
	}
	return b
}

func (c *rfb) send(t testing.TB, b []byte) {
	t.Helper()
	if _, err := c.Write(b); err != nil {
		t.Fatalf("write to the view: %v", err)
	}
}

// ask asks for the whole picture.
func (c *rfb) ask(t testing.TB) {
	t.Helper()
	m := []byte{3, 0, 0, 0, 0, 0}
	m = binary.BigEndian.AppendUint16(m, uint16(c.width))
	c.send(t, binary.BigEndian.AppendUint16(m, uint16(c.height)))
}

func (c *rfb) key(t testing.TB, sym uint32, down bool) {
	t.Helper()
	m := []byte{4, 0, 0, 0}
	if down {
		m[1] = 1
	}
	c.send(t, binary.BigEndian.AppendUint32(m, sym))
}

func (c *rfb) pointer(t testing.TB, buttons byte, x, y int) {
	t.Helper()
	m := binary.BigEndian.AppendUint16([]byte{5, buttons}, uint16(x))
	c.send(t, binary.BigEndian.AppendUint16(m, uint16(y)))
}

// viewers counts the processes named x11vnc below a sandbox's first process, of
// the host's point of view.
func (w *world) viewers(t testing.TB, id string) int {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	parent, name := map[int]int{}, map[int]string{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		raw, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue // it has ended
		}
		text := string(raw)
		end := strings.LastIndexByte(text, ')')
		name[pid] = text[strings.IndexByte(text, '(')+1 : end]
		if parent[pid], err = strconv.Atoi(strings.Fields(text[end+1:])[1]); err != nil {
			t.Fatal(err)
		}
	}
	first, n := w.find(id).guest.Identity().PID, 0
	for pid := range name {
		if name[pid] != "x11vnc" {
			continue
		}
		for at := pid; at > 1; at = parent[at] {
			if at == first {
				n++
				break
			}
		}
	}
	return n
}

func (w *world) wantViewers(t testing.TB, id string, want int) {
	t.Helper()
	eventually(t, func() string {
		if n := w.viewers(t, id); n != want {
			return fmt.Sprintf("%d x11vnc run in %s, want %d", n, id, want)
		}
		return ""
	})
}

// sheet opens a terminal that writes down each line that is typed into it, and
// returns what gives the lines so far.
func (w *world) sheet(t testing.TB, path string) (lines func() string) {
	t.Helper()
	script := `setsid xterm -geometry 80x20+50+50 -e sh -c 'touch ready; while read -r line; do echo "$line" >> typed; done' >/dev/null 2>&1 & touch typed; while [ ! -e ready ]; do sleep 0.05; done`
	raw, err := json.Marshal(map[string]any{"type": "run", "argv": []string{"sh", "-c", script}, "seconds": 60})
	if err != nil {
		t.Fatal(err)
	}
	if got := w.act(t, path, "sheet", string(raw)+`,{"type":"move","x":200,"y":200},{"type":"click","x":200,"y":200}`); got[2].Outcome != "ok" {
		t.Fatalf("%+v", got)
	}
	n := 0
	return func() string {
		n++
		var v struct{ Stdout string }
		if err := json.Unmarshal(w.act(t, path, "lines-"+strconv.Itoa(n), `{"type":"run","argv":["cat","typed"]}`)[0].Value, &v); err != nil {
			t.Fatal(err)
		}
		return v.Stdout
	}
}

func (c *rfb) typeLine(t testing.TB, text string) {
	t.Helper()
	for _, r := range text {
		c.key(t, uint32(r), true)
		c.key(t, uint32(r), false)
	}
	c.key(t, 0xff0d, true)
	c.key(t, 0xff0d, false)
}

// TestViewAccess: a look link shows and takes no input, which the server sees to;
// a control link takes keyboard and pointer. x11vnc goes with its viewer.
// Watching is use, also when no picture changes.
func TestViewAccess(t *testing.T) {
	t.Parallel()
	w := serve(t, options(t))
	path := w.create(t, "vm-a")
	if a := w.want(t, 200, "GET", "/capacity", nil); !strings.Contains(string(a.body), `"liveView":"vnc"`) {
		t.Errorf("%s", a.body)
	}
	lines := w.sheet(t, path)
	w.wantViewers(t, "vm-a", 0)

	lookWS, _, err := w.viewer(t, w.link(t, path, api.Look), "Origin", w.http.URL)
	if err != nil {
		t.Fatal(err)
	}
	look := openRFB(t, lookWS)
	if look.width != 1280 || look.height != 800 {
		t.Errorf("%d×%d", look.width, look.height)
	}
	controlWS, _, err := w.viewer(t, w.link(t, path, api.Control))
	if err != nil {
		t.Fatal(err)
	}
	control := openRFB(t, controlWS)
	w.wantViewers(t, "vm-a", 2)

	// What the look link sends is on its way first.
	look.pointer(t, 0, 900, 600)
	look.typeLine(t, "nobody wrote this")
	look.ask(t)
	look.read(t, 16) // all of it has been read before this answer
	control.typeLine(t, "a person was here")
	eventually(t, func() string {
		if got := lines(); got != "a person was here\n" {
			return fmt.Sprintf("typed: %q", got)
		}
		return ""
	})
	var at struct{ X, Y int }
	if err := json.Unmarshal(w.act(t, path, "where", `{"type":"cursor"}`)[0].Value, &at); err != nil || at.X != 200 || at.Y != 200 {
		t.Errorf("the pointer is at %v, %v", at, err)
	}

	// The screen stands still, and is watched all the same.
	watched := func() (at time.Time) {
		var d struct{ WatchedAt time.Time }
		w.want(t, 200, "GET", path, nil).into(t, &d)
		return d.WatchedAt
	}
	since := watched()
	eventually(t, func() string {
		if watched().After(since) {
			return ""
		}
		return "a view that is open does not count as watching"
	})

	if err := controlWS.CloseNow(); err != nil {
		t.Log(err)
	}
	w.wantViewers(t, "vm-a", 1)
	if err := lookWS.Close(websocket.StatusNormalClosure, ""); err != nil {
		t.Log(err)
	}
	w.wantViewers(t, "vm-a", 0)
}

// TestViewRefused: who gets no view, and why.
func TestViewRefused(t *testing.T) {
	t.Parallel()
	w := serve(t, options(t))
	path := w.create(t, "vm-a")
	w.create(t, "vm-b")
	look, control := w.link(t, path, api.Look), w.link(t, path, api.Control)
	noKey := []string{"X-API-Key", ""}
	rfbOf := func(link string) string { return strings.Replace(link, "/stream?", "/stream/rfb?", 1) }
	old := func(access api.Access) string {
		q := url.Values{"access": {string(access)}, "expires": {"1"}, "token": {api.StreamToken(testKey, "vm-a", access, 1)}}
		return path + "/stream?" + q.Encode()
	}
	for name, link := range map[string]string{
		"none": path + "/stream?", "look as control": strings.Replace(look, "access=look", "access=control", 1), "another's": strings.Replace(look, "vm-a", "vm-b", 1),
		"control as look": strings.Replace(control, "access=control", "access=look", 1), "expired": old(api.Control), "expired look": old(api.Look),
		"prolonged": strings.Replace(control, "expires=", "expires=9", 1), "other word": strings.Replace(control, "access=control", "access=root", 1),
	} {
		for _, at := range []string{link, rfbOf(link)} {
			if a := w.want(t, 401, "GET", at, nil, noKey...); a.code() != "unauthorized" {
				t.Errorf("%s: %s", name, a.body)
			}
		}
		if _, resp, err := w.viewer(t, link); err == nil || resp == nil || resp.StatusCode != http.StatusUnauthorized {
			t.Errorf("%s: %v", name, err)
		}
	}
	w.want(t, 400, "GET", path+"/stream?access=root", nil)
	for _, body := range []string{`{"access":"root"}`, `{"seconds":0}`, `{"seconds":86401}`, `{"for":"me"}`} {
		w.want(t, 400, "POST", path+"/stream/links", body)
	}
	w.want(t, 401, "POST", path+"/stream/links", `{}`, noKey...)
	w.want(t, 404, "POST", "/sandboxes/none/stream/links", `{}`)

	for _, origin := range []string{"https://evil.example", "null", "http://127.0.0.1:1"} {
		if _, resp, err := w.viewer(t, control, "Origin", origin); err == nil || resp == nil || resp.StatusCode != http.StatusForbidden {
			t.Errorf("origin %s: %v", origin, err)
		}
	}
	if a := w.want(t, 426, "GET", rfbOf(look), nil, noKey...); a.code() != "upgradeRequired" {
		t.Errorf("%s", a.body)
	}
	w.wantViewers(t, "vm-a", 0)
	w.want(t, 204, "DELETE", path, nil)
	w.want(t, 404, "GET", rfbOf(look), nil, noKey...)
}

// TestViewEndsWithItsLink: who has a link has a view no longer than that grants;
// who has the key has it as long as they like.
func TestViewEndsWithItsLink(t *testing.T) {
	t.Parallel()
	s := &Server{ctx: context.Background(), opts: Options{APIKey: testKey}, key: sha256.Sum256([]byte(testKey))}
	soon := time.Now().Add(3 * time.Second).Unix()
	q := url.Values{"access": {"control"}, "expires": {strconv.FormatInt(soon, 10)}, "token": {api.StreamToken(testKey, "vm-a", api.Control, soon)}}
	for _, key := range []string{"", testKey} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/?"+q.Encode(), nil)
		r.SetPathValue("id", "vm-a")
		r.Header.Set("X-API-Key", key)
		over, leave := make(chan error, 1), make(chan struct{})
		if key != "" {
			over <- errLeft
		}
		err := s.withToken(func(_ http.ResponseWriter, r *http.Request, access api.Access) error {
			if end, ends := r.Context().Deadline(); access != api.Control || ends != (key == "") || ends && end.Unix() != soon {
				t.Errorf("key %q: %s until %v", key, access, end)
			}
			return s.attend(r.Context(), t.Context(), &box{s: s, gone: make(chan struct{})}, nil, leave, over)
		})(httptest.NewRecorder(), r)
		if want := map[string]error{"": errLinkOver, testKey: errLeft}[key]; !errors.Is(err, want) {
			t.Errorf("key %q: it ended with %v", key, err)
		}
	}
}

// TestViewersAreBounded: ten come and eight are let in; the others are told why,
// and a place is free again when one goes. A viewer that takes nothing costs the
// server no memory and is given up. A kill ends them all and waits for none.
func TestViewersAreBounded(t *testing.T) {
	t.Parallel()
	w := serve(t, options(t))
	w.takeWithin = 3 * time.Second
	path := w.create(t, "vm-a")
	link := w.link(t, path, api.Look)
	var mu sync.Mutex
	var in []*websocket.Conn
	full := 0
	var wait sync.WaitGroup
	for range 10 {
		wait.Go(func() {
			ws, resp, err := w.viewer(t, link)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				in = append(in, ws)
			case resp != nil && resp.StatusCode == http.StatusServiceUnavailable:
				full++
			default:
				t.Errorf("%v", err)
			}
		})
	}
	wait.Wait()
	if len(in) != maxBoxViewers || full != 10-maxBoxViewers {
		t.Fatalf("%d let in, %d refused", len(in), full)
	}
	w.wantViewers(t, "vm-a", maxBoxViewers)
	if a := w.want(t, 503, "GET", strings.Replace(link, "/stream?", "/stream/rfb?", 1), nil); a.code() != "too_many_viewers" {
		t.Errorf("%s", a.body)
	}
	// The first asks for one raw picture after the other and reads none.
	greedy := openRFB(t, in[0])
	gone := make(chan error, 1)
	go func() {
		m := []byte{3, 0, 0, 0, 0, 0, 5, 0, 3, 32} // 1280×800
		for {
			if _, err := greedy.Write(m); err != nil {
				gone <- err
				return
			}
			select {
			case <-t.Context().Done():
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	}()
	w.wantViewers(t, "vm-a", maxBoxViewers-1)
	if err := <-gone; err == nil {
		t.Error("a viewer that takes nothing stays")
	}
	var again *websocket.Conn
	eventually(t, func() string { // its place is free once it has been told, or has not listened
		ws, _, err := w.viewer(t, link)
		if err != nil {
			return "a place is not free again: " + err.Error()
		}
		again = ws
		return ""
	})
	openRFB(t, again)
	stuck := openRFB(t, in[1])
	for range 50 {
		stuck.ask(t)
	}
	began := time.Now()
	w.want(t, 204, "DELETE", path, nil)
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("a kill took %v", took)
	}
	for _, ws := range in[2:] {
		eventually(t, func() string {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if _, _, err := ws.Read(ctx); err == nil || errors.Is(err, context.DeadlineExceeded) {
				return fmt.Sprintf("a viewer outlives its sandbox: %v", err)
			}
			return ""
		})
	}
	eventually(t, func() string {
		if n := len(w.Server.viewers); n != 0 {
			return fmt.Sprintf("%d viewers are still counted", n)
		}
		return ""
	})
}

// TestViewPictures: where noVNC is not there the page shows pictures and says
// why, and nothing of the directory but modules is served where it is.
func TestViewPictures(t *testing.T) {
	t.Parallel()
	opts := options(t)
	opts.NoVNC = t.TempDir()
	w := serve(t, opts)
	path := w.create(t, "vm-a")
	page := string(w.want(t, 200, "GET", w.link(t, path, api.Control), nil, "X-API-Key", "").body)
	for _, want := range []string{"no control", "apt-get install --no-install-recommends novnc", "/stream/frame?"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %q:\n%s", want, page)
		}
	}
	a := w.want(t, 200, "GET", "/capacity", nil)
	if !strings.Contains(string(a.body), `"liveView":"pictures"`) || !strings.Contains(string(a.body), "install --no-install-recommends novnc") {
		t.Errorf("%s", a.body)
	}
	if a := w.want(t, 501, "GET", path+"/stream/rfb", nil); a.code() != "unsupported" {
		t.Errorf("%s", a.body)
	}
	if err := os.MkdirAll(filepath.Join(opts.NoVNC, "core"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/hostname", filepath.Join(opts.NoVNC, "core", "out.js")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"core/rfb.js", "core/out.js", "vnc.html", "core/../../secret.js", "core/%2e%2e/%2e%2e/secret.js", "app/ui.js", "core/"} {
		resp, err := http.Get(w.http.URL + scriptsPath + name)
		if err != nil {
			t.Fatal(err)
		}
		if err := resp.Body.Close(); err != nil || resp.StatusCode < 400 {
			t.Errorf("%s: %d, %v", name, resp.StatusCode, err)
		}
	}
}

// TestViewInBrowser opens the page in a real Chromium: it shows what the desktop
// shows, and with a control link what is typed in it arrives on the desktop, with
// a look link it does not.
func TestViewInBrowser(t *testing.T) {
	t.Parallel()
	w := serve(t, options(t))
	path := w.create(t, "vm-a")
	lines := w.sheet(t, path)
	browser := startBrowser(t)

	look := browser.open(t, w.http.URL+w.link(t, path, api.Look), "live, to look at")
	picture := look.canvas(t)
	if n := colours(picture); picture.Bounds().Dx() != 1280 || picture.Bounds().Dy() != 800 || n < 10 {
		t.Errorf("the page shows %v in %d colours", picture.Bounds(), n)
	}
	control := browser.open(t, w.http.URL+w.link(t, path, api.Control), "live, you have keyboard and pointer")
	w.wantViewers(t, "vm-a", 2)

	look.typeLine(t, "nobody wrote this")
	control.typeLine(t, "Typed in a page: a@b.c")
	eventually(t, func() string {
		if got := lines(); got != "Typed in a page: a@b.c\n" {
			return fmt.Sprintf("typed: %q", got)
		}
		return ""
	})
	if dir := os.Getenv("BERTH_VIEW_SHOTS"); dir != "" {
		for name, p := range map[string]*viewPageOf{"look": look, "control": control} {
			file := filepath.Join(dir, name+".png")
			if _, err := p.page.Screenshot(pw.PageScreenshotOptions{Path: &file}); err != nil {
				t.Error(err)
			}
		}
	}
	// The look page shows what the other one typed. Below is the pointer, which each
	// x11vnc draws when it comes to it.
	line := image.Rect(50, 90, 540, 200)
	eventually(t, func() string {
		if at := differing(look.canvas(t), control.canvas(t), line); !at.Empty() {
			return fmt.Sprintf("the two pages show different texts, in %v", at)
		}
		return ""
	})
	w.want(t, 204, "DELETE", path, nil)
	for _, p := range []*viewPageOf{look, control} {
		p.wantState(t, "the sandbox has ended")
		p.noComplaint(t)
	}
}

func colours(p image.Image) int {
	seen := map[[3]uint32]bool{}
	for y := p.Bounds().Min.Y; y < p.Bounds().Max.Y; y++ {
		for x := p.Bounds().Min.X; x < p.Bounds().Max.X; x++ {
			r, g, b, _ := p.At(x, y).RGBA()
			seen[[3]uint32{r, g, b}] = true
		}
	}
	return len(seen)
}

// differing is the rectangle in which two pictures differ, as far as it is in part.
func differing(a, b image.Image, part image.Rectangle) (out image.Rectangle) {
	for y := part.Min.Y; y < part.Max.Y; y++ {
		for x := part.Min.X; x < part.Max.X; x++ {
			if a.At(x, y) != b.At(x, y) {
				out = out.Union(image.Rect(x, y, x+1, y+1))
			}
		}
	}
	return out
}

// testBrowser is a real Chromium.
type testBrowser struct{ pw.Browser }

func startBrowser(t *testing.T) *testBrowser {
	t.Helper()
	return &testBrowser{browsertest.Start(t)}
}

// viewPageOf is the live view, open.
type viewPageOf struct {
	page pw.Page

	mu         sync.Mutex
	complaints []string
}

func (b *testBrowser) open(t *testing.T, address, state string) *viewPageOf {
	t.Helper()
	page, err := b.NewPage(pw.BrowserNewPageOptions{Viewport: &pw.Size{Width: 1280, Height: 840}})
	if err != nil {
		t.Fatal(err)
	}
	p := &viewPageOf{page: page}
	page.OnConsole(func(m pw.ConsoleMessage) {
		if m.Type() == "error" {
			p.complain(m.Text())
		}
	})
	page.OnPageError(func(err error) { p.complain(err.Error()) })
	page.OnRequest(func(r pw.Request) {
		u, err := url.Parse(r.URL())
		if err != nil || u.Scheme != "data" && u.Scheme != "blob" && !strings.HasPrefix(address, "http://"+u.Host+"/") {
			p.complain("asks for " + r.URL())
		}
	})
	if _, err := page.Goto(address); err != nil {
		t.Fatal(err)
	}
	p.wantState(t, state)
	return p
}

func (p *viewPageOf) complain(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.complaints = append(p.complaints, text)
}

// noComplaint: nothing was blocked, missing or thrown. That a view ended, and what
// its page then asked, is no fault.
func (p *viewPageOf) noComplaint(t *testing.T) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.complaints {
		if !strings.Contains(c, "status of 404") && !strings.Contains(c, "status of 410") && !strings.Contains(c, "WebSocket") {
			t.Errorf("the page complains: %s", c)
		}
	}
}

func (p *viewPageOf) wantState(t *testing.T, want string) {
	t.Helper()
	eventually(t, func() string {
		got, err := p.page.Locator("#state").TextContent()
		if err != nil || got != want {
			p.mu.Lock()
			defer p.mu.Unlock()
			return fmt.Sprintf("the page says %q, want %q; %v; %v", got, want, err, p.complaints)
		}
		return ""
	})
}

// canvas is what the page shows of the screen.
func (p *viewPageOf) canvas(t *testing.T) image.Image {
	t.Helper()
	var out image.Image
	eventually(t, func() string {
		v, err := p.page.Evaluate(`async () => {
			const c = document.querySelector("#view canvas");
			if (!c) return "";
			const buf = await (await new Promise(done => c.toBlob(done))).arrayBuffer();
			return btoa(Array.from(new Uint8Array(buf), b => String.fromCharCode(b)).join(""));
		}`)
		if err != nil {
			return err.Error()
		}
		text, _ := v.(string)
		var raw []byte
		if err := json.Unmarshal([]byte(strconv.Quote(text)), &raw); err != nil {
			return err.Error()
		}
		if out, err = png.Decode(bytes.NewReader(raw)); err != nil {
			return err.Error()
		}
		if colours(out) < 3 {
			return "the screen is blank"
		}
		return ""
	})
	return out
}

func (p *viewPageOf) typeLine(t *testing.T, text string) {
	t.Helper()
	canvas := p.page.Locator("#view canvas")
	if err := canvas.Click(pw.LocatorClickOptions{Position: &pw.Position{X: 300, Y: 300}}); err != nil {
		t.Fatal(err)
	}
	if err := p.page.Keyboard().Type(text); err != nil {
		t.Fatal(err)
	}
	if err := p.page.Keyboard().Press("Enter"); err != nil {
		t.Fatal(err)
	}
}

// TestViewOfMicroVM: the view goes over vsock, and a pause sends viewers away.
func TestViewOfMicroVM(t *testing.T) {
	t.Parallel()
	w := serve(t, microOptions(t))
	if a := w.want(t, 200, "GET", "/capacity", nil); !strings.Contains(string(a.body), `"liveView":"vnc"`) {
		t.Errorf("%s", a.body)
	}
	path := w.create(t, "vm-a")
	link := w.link(t, path, api.Control)
	ws, _, err := w.viewer(t, link)
	if err != nil {
		t.Fatal(err)
	}
	c := openRFB(t, ws)
	c.pointer(t, 0, 77, 88)
	eventually(t, func() string {
		if cursor := w.want(t, 200, "GET", path+"/computer/screenshot", nil).header.Get("Berth-Cursor"); cursor != "77,88" {
			return "the pointer is at " + cursor
		}
		return ""
	})
	w.want(t, 204, "POST", path+"/pause", nil)
	if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a pause leaves the view open")
	}
	if _, resp, err := w.viewer(t, link); err == nil || resp == nil || resp.StatusCode != http.StatusConflict {
		t.Errorf("the view of a paused sandbox: %v", err)
	}
	w.want(t, 200, "GET", link, nil)
	w.want(t, 204, "POST", path+"/resume", nil)
	ws, _, err = w.viewer(t, link)
	if err != nil {
		t.Fatal(err)
	}
	openRFB(t, ws)
}
