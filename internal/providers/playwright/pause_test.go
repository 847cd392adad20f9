package playwright

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
)

// shop is a site whose pages tell the server, as they load, what they find
// stored, before they store anything.
type shop struct {
	*httptest.Server
	mu    sync.Mutex
	loads []load
	block chan struct{} // closed: pages are answered
}

// load is one load of a page, as the page and the server saw it.
type load struct {
	Path, Session, Local, DB string
	Hours                    int    // of the time zone
	cookies                  string // as the request had them
}

const shopHTML = `<!doctype html><title>shop</title><body style="background:#224466"><script>
const open = () => new Promise((ok, no) => { const q = indexedDB.open("shop", 1); q.onupgradeneeded = () => q.result.createObjectStore("s"); q.onsuccess = () => ok(q.result); q.onerror = no; });
const ask = r => new Promise((ok, no) => { r.onsuccess = () => ok(r.result); r.onerror = no; });
const found = { Path: location.pathname + location.search, Session: JSON.stringify(sessionStorage.item ?? null), Local: JSON.stringify(localStorage.item ?? null), Hours: new Date(0).getHours() };
(async () => {
  found.DB = await ask((await open()).transaction("s").objectStore("s").get("item")) ?? "";
  document.title = location.pathname;
  await fetch("/found", { method: "POST", body: JSON.stringify(found) });
})();
async function store(session, local, db) {
  sessionStorage.item = session; localStorage.item = local;
  const t = (await open()).transaction("s", "readwrite"); t.objectStore("s").put(db, "item");
  await new Promise(ok => t.oncomplete = ok);
  return true;
}
</script>`

func newShop(t testing.TB) *shop {
	s := &shop{block: make(chan struct{})}
	close(s.block)
	pages := map[string]string{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		block := s.block
		s.mu.Unlock()
		switch {
		case r.URL.Path == "/found":
			raw, err := io.ReadAll(r.Body)
			var l load
			if err != nil || json.Unmarshal(raw, &l) != nil {
				return
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			l.cookies = pages[l.Path]
			s.loads = append(s.loads, l)
		case r.URL.Path == "/cookies":
			http.SetCookie(w, &http.Cookie{Name: "basket", Value: "full", Path: "/", HttpOnly: true, SameSite: http.SameSiteStrictMode}) // with the session
			http.SetCookie(w, &http.Cookie{Name: "user", Value: "ann", Path: "/", MaxAge: 3600})
			http.SetCookie(w, &http.Cookie{Name: "soon", Value: "gone", Path: "/", MaxAge: 1})
		default:
			select {
			case <-block:
			case <-r.Context().Done():
				return
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			pages[r.URL.RequestURI()] = r.Header.Get("Cookie")
			w.Header().Set("Content-Type", "text/html")
			fmt.Fprint(w, shopHTML)
		}
	}))
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

// forget drops the loads so far.
func (s *shop) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.loads = nil
}

// await returns the first load of a path.
func (s *shop) await(t testing.TB, path string) (out load) {
	t.Helper()
	eventually(t, path+" is loaded", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		i := slices.IndexFunc(s.loads, func(l load) bool { return l.Path == path })
		if i >= 0 {
			out = s.loads[i]
		}
		return i >= 0
	})
	return out
}

// stop keeps pages without an answer until the returned function is called.
func (s *shop) stop() (start func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.block = make(chan struct{})
	return sync.OnceFunc(func() { close(s.block) })
}

// evaluate runs a script in the active page.
func evaluate(t testing.TB, p *Provider, vm, script string) {
	t.Helper()
	s, err := p.find(vm)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := s.link(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	page, err := conn.current(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var out struct{ ExceptionDetails json.RawMessage }
	if err := conn.cdp.call(t.Context(), page.session, "Runtime.evaluate", params{"expression": script, "awaitPromise": true, "userGesture": true}, &out); err != nil || out.ExceptionDetails != nil {
		t.Fatalf("%s: %v, %s", script, err, out.ExceptionDetails)
	}
}

func visit(t testing.TB, p *Provider, vm, url string) {
	t.Helper()
	do(t, p, vm, computer.Action{Type: computer.Open, Target: url})
}

func pause(t testing.TB, p *Provider, vm string) {
	t.Helper()
	if err := p.Pause(t.Context(), vm); err != nil {
		t.Fatal(err)
	}
}

func resume(t testing.TB, p *Provider, vm string) {
	t.Helper()
	if err := p.Resume(t.Context(), vm); err != nil {
		t.Fatal(err)
	}
}

func wantState(t testing.TB, p *Provider, vm string, want providers.State) {
	t.Helper()
	if got, err := p.Get(t.Context(), vm); err != nil || got.State != want {
		t.Errorf("it is %+v, %v; want %s", got, err, want)
	}
}

// dirOf returns a sandbox's directory, paused or not.
func dirOf(t testing.TB, p *Provider, vm string) string {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	b, err := p.lookup(vm)
	if err != nil {
		t.Fatal(err)
	}
	if b.paused != nil {
		return b.paused.dir
	}
	return b.sandbox.dir
}

// furnish makes a sandbox with all that a pause keeps: three pages, the second
// active.
func furnish(t testing.TB, p *Provider, shop *shop, vm, tenant string) {
	t.Helper()
	spec := providers.Spec{VM: vm, Fence: 7, Tenant: tenant, Role: "sales", Owner: "ann", Display: computer.Display{Width: 900, Height: 700}, Env: map[string]string{"TZ": "Asia/Tokyo"}}
	if _, err := p.Create(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	visit(t, p, vm, shop.URL+"/one")
	shop.await(t, "/one")
	evaluate(t, p, vm, `fetch("/cookies").then(() => store("a\ud800b", "local ☕", "db"))`)
	evaluate(t, p, vm, `window.open("/two?x=1", "_blank", "noopener")`) // it becomes the active one
	shop.await(t, "/two?x=1")
	active(t, p, vm, shop.URL+"/two?x=1")
	evaluate(t, p, vm, `store("second", "local ☕", "db")`)
	evaluate(t, p, vm, `window.open("about:blank", "_blank", "noopener")`)
	active(t, p, vm, "about:blank")
	s, err := p.find(vm)
	if err != nil {
		t.Fatal(err)
	}
	pages, _ := s.conn.all()
	s.conn.choose(pages[1].target)
	if err := pages[1].BringToFront(); err != nil {
		t.Fatal(err)
	}
	do(t, p, vm, computer.Action{Type: computer.ClipboardWrite, Text: ref("copied ☕\r\n")}, computer.Action{Type: computer.Move, X: ref(321), Y: ref(123)})
	shop.forget()
}

// active waits until a page is the active one.
func active(t testing.TB, p *Provider, vm, url string) {
	t.Helper()
	eventually(t, url+" is active", func() bool {
		view, err := p.Observe(t.Context(), vm)
		return err == nil && view.Observation.URL == url
	})
}

// wantFurnished checks at the receiving end what furnish has made.
func wantFurnished(t testing.TB, p *Provider, shop *shop, vm string) {
	t.Helper()
	one, two := shop.await(t, "/one"), shop.await(t, "/two?x=1")
	want := load{Path: "/one", Session: `"a\ud800b"`, Local: `"local ☕"`, DB: "db", Hours: 9}
	for _, got := range []*load{&one, &two} {
		jar := strings.Split(got.cookies, "; ")
		slices.Sort(jar)
		jar = slices.DeleteFunc(jar, func(c string) bool { return c == "soon=gone" }) // it may have a moment left
		if !slices.Equal(jar, []string{"basket=full", "user=ann"}) {
			t.Errorf("%s came with the cookies %q", got.Path, got.cookies)
		}
		got.cookies = ""
	}
	if one != want {
		t.Errorf("the first page found %+v; want %+v", one, want)
	}
	want.Path, want.Session = "/two?x=1", `"second"`
	if two != want {
		t.Errorf("the second page found %+v; want %+v", two, want)
	}
	view, err := p.Observe(t.Context(), vm)
	if err != nil {
		t.Fatal(err)
	}
	o := view.Observation
	var pages []string
	for _, page := range o.Pages {
		pages = append(pages, fmt.Sprint(strings.TrimPrefix(page.URL, shop.URL), " ", page.Active))
	}
	if !slices.Equal(pages, []string{"/one false", "/two?x=1 true", "about:blank false"}) {
		t.Errorf("the pages are %q", pages)
	}
	if size, err := sizeOf(view.PNG); err != nil || size.X != 900 || size.Y != 700 {
		t.Errorf("picture %v, %v", size, err)
	}
	if got := do(t, p, vm, computer.Action{Type: computer.ClipboardRead})[0]; string(got.Value) != `"copied ☕\r\n"` {
		t.Errorf("the clipboard holds %s", got.Value)
	}
}

// A pause ends the browser and keeps what a person expects to find again, also
// across two workers; a resumed sandbox can be paused again.
func TestPause(t *testing.T) {
	t.Parallel()
	shop, dir := newShop(t), t.TempDir()
	p := start(t, Options{StateDir: dir, Spares: -1})
	furnish(t, p, shop, "vm", "acme")
	health, err := p.Health(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	before, err := p.Get(t.Context(), "vm")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second changes nothing
		pause(t, p, "vm")
		wantState(t, p, "vm", providers.Paused)
	}
	eventually(t, "no process is left", func() bool { return len(browsersOf(dir)) == 0 })
	box := dirOf(t, p, "vm")
	for name, mode := range map[string]os.FileMode{"profile": 0o700, pausedFile: 0o600, recordFile: 0o600} {
		if info, err := os.Stat(filepath.Join(box, name)); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: %v, %v; want %v", name, info.Mode(), err, mode)
		}
	}
	for what, err := range map[string]error{
		"an action": func() error {
			_, err := p.Execute(t.Context(), providers.Batch{VM: "vm", Actions: []computer.Action{{Type: computer.Cursor}}})
			return err
		}(),
		"an observation": func() error { _, err := p.Observe(t.Context(), "vm"); return err }(),
	} {
		if !errors.Is(err, providers.ErrConflict) || !strings.Contains(err.Error(), "resume it first") || !providers.NothingRan(err) {
			t.Errorf("%s in a paused sandbox: %v", what, err)
		}
	}
	if again, err := p.Create(t.Context(), providers.Spec{VM: "vm", Fence: 7}); err != nil || again.State != providers.Paused {
		t.Errorf("the same create again: %+v, %v", again, err)
	}
	if err := p.SetTimeout(t.Context(), "vm", time.Hour); err != nil {
		t.Errorf("SetTimeout: %v", err)
	}

	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	p = start(t, Options{StateDir: dir, Spares: -1})
	after, err := p.Get(t.Context(), "vm")
	if err != nil || after.State != providers.Paused {
		t.Fatalf("the next worker has %+v, %v", after, err)
	}
	if again, err := p.Health(t.Context()); err != nil || again != health {
		t.Errorf("the boot id changed: %v, %v, %v", health, again, err)
	}
	for round := range 2 {
		for range 2 { // the second changes nothing
			resume(t, p, "vm")
			wantState(t, p, "vm", providers.Running)
		}
		wantFurnished(t, p, shop, "vm")
		if got := do(t, p, "vm", computer.Action{Type: computer.Cursor})[0]; string(got.Value) != `{"x":321,"y":123}` {
			t.Errorf("the pointer is at %s", got.Value)
		}
		if round == 0 {
			shop.forget()
			pause(t, p, "vm")
		}
	}
	now, err := p.Get(t.Context(), "vm")
	if after.State, before.State = now.State, now.State; err != nil || fmt.Sprint(now) != fmt.Sprint(before) || fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("it was %+v, then %+v, is %+v, %v", before, after, now, err)
	}
	if _, err := os.Stat(filepath.Join(box, pausedFile)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the saved state of a sandbox that runs: %v", err)
	}
	// A store that a page has emptied since stays empty.
	evaluate(t, p, "vm", `sessionStorage.clear()`)
	shop.forget()
	visit(t, p, "vm", shop.URL+"/two?x=1")
	if got := shop.await(t, "/two?x=1"); got.Session != "null" {
		t.Errorf("sessionStorage came back: %+v", got)
	}
	if err := p.Kill(t.Context(), "vm"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(box); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its directory: %v", err)
	}
}

// edgeMain is a worker that takes over "vm", resumes it if it is paused, says
// what it has found, and, when it is told to, pauses, resumes or keeps the
// sandbox up to the edge of its job, where it stands still.
func edgeMain(j job) error {
	ctx := context.Background()
	p, err := New(ctx, Options{ServerID: "playwright-01", StateDir: j.Dir, Spares: -1, edge: func(name string) {
		if name == j.Edge {
			fmt.Println("edge")
			select {}
		}
	}})
	if err != nil {
		return err
	}
	found, err := p.Get(ctx, "vm")
	if err != nil {
		return err
	}
	edge := j.Edge
	j.Edge = "" // not in this resume
	if found.State == providers.Paused {
		if err := p.Resume(ctx, "vm"); err != nil {
			return err
		}
	}
	view, err := p.Observe(ctx, "vm")
	if err != nil {
		return err
	}
	fmt.Println("found", found.State, len(view.Observation.Pages), view.Observation.URL)
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
		return err
	}
	j.Edge = edge
	if edge == "frozen" {
		_, err := p.Snapshot(ctx, "vm")
		return err
	}
	if err := p.Pause(ctx, "vm"); err != nil {
		return err
	}
	return p.Resume(ctx, "vm")
}

// A worker that is killed between two steps of a pause, a resume or a snapshot
// leaves a sandbox that runs or one that is paused, with everything in it.
func TestWorkerCrashAtEveryEdge(t *testing.T) {
	t.Parallel()
	shop, dir := newShop(t), t.TempDir()
	p := start(t, Options{StateDir: dir, Spares: -1})
	furnish(t, p, shop, "vm", "acme")
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	left := providers.Running
	for _, step := range []struct {
		edge  string
		after providers.State // what its successor finds
	}{
		{"frozen", providers.Running}, {"saved", providers.Paused}, {"shelved", providers.Paused},
		{"launched", providers.Paused}, {"restored", providers.Paused}, {"resumed", providers.Running},
	} {
		w := startWorker(t, job{Dir: dir, Edge: step.edge})
		w.await(t, fmt.Sprintf("found %s 3 %s/two?x=1", left, shop.URL))
		if left == providers.Paused {
			for path, want := range map[string]string{"/one": `"a\ud800b"`, "/two?x=1": `"second"`} {
				if got := shop.await(t, path); got.Session != want || got.Local != `"local ☕"` || got.DB != "db" || got.Hours != 9 || !strings.Contains(got.cookies, "basket=full") {
					t.Errorf("before the edge %s the page found %+v", step.edge, got)
				}
			}
		}
		shop.forget()
		if _, err := io.WriteString(w.in, "\n"); err != nil {
			t.Fatal(err)
		}
		w.await(t, "edge")
		w.kill()
		left = step.after
	}
	p = start(t, Options{StateDir: dir, Spares: -1})
	wantState(t, p, "vm", left)
	shop.forget()
	pause(t, p, "vm")
	resume(t, p, "vm")
	wantFurnished(t, p, shop, "vm")
	if names, err := filepath.Glob(filepath.Join(dir, "templates", "*")); err != nil || len(names) > 0 {
		t.Errorf("half a template is left: %v, %v", names, err)
	}
}

// small makes a sandbox that shows a page of the shop.
func small(t testing.TB, p *Provider, shop *shop, vm string) {
	t.Helper()
	if _, err := p.Create(t.Context(), providers.Spec{VM: vm, Fence: 1}); err != nil {
		t.Fatal(err)
	}
	visit(t, p, vm, shop.URL+"/"+vm)
	shop.await(t, "/"+vm)
}

// What goes wrong while a sandbox is paused or resumed harms nothing that is in
// it, and can be ended.
func TestPauseFaults(t *testing.T) {
	t.Parallel()
	p := start(t, Options{Spares: -1})
	for name, test := range map[string]func(*testing.T, *Provider, *shop){
		"a batch is at work": testPauseWaits, "the state cannot be written": testPauseCannotWrite, "the saved state is broken": testBrokenState,
		"killed meanwhile": testKillWhilePausing, "a page hangs": testPauseOfAHungPage, "a page's server does not answer": testResumeWithoutAnswer,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, p, newShop(t))
		})
	}
}

func testPauseWaits(t *testing.T, p *Provider, shop *shop) {
	small(t, p, shop, "busy")
	shop.forget()
	stop := shop.stop() // so that the batch's end is known
	done := make(chan error, 1)
	go func() {
		rs, err := p.Execute(t.Context(), providers.Batch{VM: "busy", Actions: []computer.Action{{Type: computer.Open, Target: shop.URL + "/late"}, {Type: computer.Move, X: ref(9), Y: ref(9)}}})
		if err == nil && rs[1].Outcome != computer.OK {
			err = rs[1].Error
		}
		done <- err
	}()
	eventually(t, "the batch has begun", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.boxes["busy"].users > 0
	})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := p.Pause(ctx, "busy"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a pause that is given up: %v", err)
	}
	paused := make(chan error, 1)
	go func() { paused <- p.Pause(t.Context(), "busy") }()
	eventually(t, "calls are refused", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		_, err := p.Observe(ctx, "busy")
		return errors.Is(err, errHeld) && errors.Is(err, providers.ErrConflict)
	})
	if err := p.Resume(t.Context(), "busy"); !errors.Is(err, errHeld) {
		t.Errorf("a resume meanwhile: %v", err)
	}
	stop()
	if err := <-done; err != nil {
		t.Errorf("the batch: %v", err)
	}
	if err := <-paused; err != nil {
		t.Errorf("the pause: %v", err)
	}
	resume(t, p, "busy")
	shop.await(t, "/late")
	for what, err := range map[string]error{"pause": p.Pause(t.Context(), "nobody"), "resume": p.Resume(t.Context(), "nobody")} {
		if !errors.Is(err, providers.ErrNotFound) {
			t.Errorf("%s of an unknown vm: %v", what, err)
		}
	}
}

// A disk that takes nothing, or what a broken browser has put where the state
// is to be written.
func testPauseCannotWrite(t *testing.T, p *Provider, shop *shop) {
	small(t, p, shop, "unwritable")
	fresh := filepath.Join(dirOf(t, p, "unwritable"), pausedFile+".new")
	if err := os.MkdirAll(filepath.Join(fresh, "in the way"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := p.Pause(t.Context(), "unwritable"); !errors.Is(err, providers.ErrUnavailable) {
		t.Errorf("pause: %v", err)
	}
	wantState(t, p, "unwritable", providers.Running)
	do(t, p, "unwritable", computer.Action{Type: computer.Click, X: ref(5), Y: ref(5)})
	if err := os.RemoveAll(fresh); err != nil {
		t.Fatal(err)
	}
	victim := filepath.Join(t.TempDir(), "victim")
	if err := errors.Join(os.WriteFile(victim, []byte("mine"), 0o600), os.Symlink(victim, fresh)); err != nil {
		t.Fatal(err)
	}
	pause(t, p, "unwritable")
	if raw, err := os.ReadFile(victim); err != nil || string(raw) != "mine" {
		t.Errorf("the state was written through a link: %q, %v", raw, err)
	}
	shop.forget()
	resume(t, p, "unwritable")
	shop.await(t, "/unwritable")
}

func testBrokenState(t *testing.T, p *Provider, shop *shop) {
	small(t, p, shop, "broken")
	pause(t, p, "broken")
	dir := dirOf(t, p, "broken")
	path := filepath.Join(dir, pausedFile)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	elsewhere := filepath.Join(t.TempDir(), "state")
	if err := os.WriteFile(elsewhere, good, 0o600); err != nil {
		t.Fatal(err)
	}
	for what, spoil := range map[string]func() error{
		"half of it": func() error { return os.WriteFile(path, good[:len(good)/2], 0o600) },
		"a version that is not known": func() error {
			return os.WriteFile(path, []byte(strings.Replace(string(good), `"version":1`, `"version":99`, 1)), 0o600)
		},
		"a link":      func() error { return os.Symlink(elsewhere, path) },
		"a directory": func() error { return os.Mkdir(path, 0o700) },
		"nothing":     func() error { return nil },
	} {
		if err := errors.Join(os.RemoveAll(path), spoil()); err != nil {
			t.Fatal(err)
		}
		if err := p.Resume(t.Context(), "broken"); !errors.Is(err, providers.ErrUnavailable) || !strings.Contains(err.Error(), "stays paused") {
			t.Errorf("resume with %s: %v", what, err)
		}
		wantState(t, p, "broken", providers.Paused)
	}
	if err := errors.Join(os.RemoveAll(path), os.WriteFile(path, good, 0o600)); err != nil {
		t.Fatal(err)
	}
	// A browser that does not start, and one that dies, leave it paused too.
	port := filepath.Join(dir, "profile", "SingletonLock")
	if err := os.MkdirAll(filepath.Join(port, "in the way"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := p.Resume(t.Context(), "broken"); !errors.Is(err, providers.ErrUnavailable) {
		t.Errorf("resume without a browser: %v", err)
	}
	wantState(t, p, "broken", providers.Paused)
	if err := os.RemoveAll(port); err != nil {
		t.Fatal(err)
	}
	shop.forget()
	resume(t, p, "broken")
	shop.await(t, "/broken")
	pause(t, p, "broken")
	if err := errors.Join(os.RemoveAll(path), os.WriteFile(path, []byte("{"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := p.Kill(t.Context(), "broken"); err != nil {
		t.Errorf("kill: %v", err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its directory: %v", err)
	}
}

// Whatever a kill interrupts, nothing is left.
func testKillWhilePausing(t *testing.T, p *Provider, shop *shop) {
	for i, delay := range []time.Duration{0, 10 * time.Millisecond, 60 * time.Millisecond, 150 * time.Millisecond, 0, 100 * time.Millisecond, 400 * time.Millisecond} {
		vm, move, of := fmt.Sprint("killed", i), p.Pause, "pause"
		small(t, p, shop, vm)
		dir := dirOf(t, p, vm)
		if i >= 4 {
			pause(t, p, vm)
			move, of = p.Resume, "resume"
		}
		done := make(chan error, 1)
		go func() { done <- move(t.Context(), vm) }()
		<-time.After(delay)
		if err := p.Kill(t.Context(), vm); err != nil {
			t.Errorf("kill: %v", err)
		}
		if err := <-done; err != nil && !errors.Is(err, providers.ErrLost) && !errors.Is(err, providers.ErrNotFound) && !errors.Is(err, errHeld) {
			t.Errorf("the %s that was killed after %s: %v", of, delay, err)
		}
		if _, err := p.Get(t.Context(), vm); !errors.Is(err, providers.ErrNotFound) {
			t.Errorf("Get after that: %v", err)
		}
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the directory of one killed %s after the %s began: %v", delay, of, err)
		}
		eventually(t, "no process is left", func() bool { return len(browsersOf(dir)) == 0 })
	}
}

// A page that hangs is kept by its address.
func testPauseOfAHungPage(t *testing.T, p *Provider, shop *shop) {
	small(t, p, shop, "hung")
	evaluate(t, p, "hung", `setTimeout(() => { for (;;); }, 0); true`)
	pause(t, p, "hung")
	shop.forget()
	resume(t, p, "hung")
	shop.await(t, "/hung")
}

// A page that does not answer when it is reopened holds up no resume, and is
// what it was when it does, after another pause too.
func testResumeWithoutAnswer(t *testing.T, p *Provider, shop *shop) {
	small(t, p, shop, "away")
	evaluate(t, p, "away", `store("kept", "", "")`)
	pause(t, p, "away")
	shop.forget()
	again := shop.stop()
	resume(t, p, "away")
	pause(t, p, "away")
	again()
	resume(t, p, "away")
	if got := shop.await(t, "/away"); got.Session != `"kept"` {
		t.Errorf("it found %+v", got)
	}
}

// A paused sandbox keeps its place, so that it can always be resumed; and one
// that is not ready cannot be paused.
func TestPauseKeepsItsPlace(t *testing.T) {
	t.Parallel()
	shop := newShop(t)
	p := start(t, Options{Spares: 1, MaxContainers: 1, Ephemeral: true})
	starting := make(chan error, 1)
	go func() {
		_, err := p.Create(t.Context(), providers.Spec{VM: "vm", Fence: 1, Env: map[string]string{"TZ": "UTC"}})
		starting <- err
	}()
	eventually(t, "it starts", func() bool { _, err := p.Get(t.Context(), "vm"); return err == nil })
	if err := p.Pause(t.Context(), "vm"); err != nil && (!errors.Is(err, providers.ErrNotFound) || !strings.Contains(err.Error(), "not ready")) {
		t.Errorf("pause during create: %v", err)
	}
	if err := <-starting; err != nil {
		t.Fatal(err)
	}
	if err := p.Resume(t.Context(), "vm"); err != nil {
		t.Fatal(err)
	}
	visit(t, p, "vm", shop.URL+"/vm")
	pause(t, p, "vm")
	if _, err := p.Create(t.Context(), providers.Spec{VM: "other", Fence: 1}); !errors.Is(err, providers.ErrFull) {
		t.Errorf("a second one: %v", err)
	}
	shop.forget()
	resume(t, p, "vm")
	shop.await(t, "/vm")
	pause(t, p, "vm")
	dir := dirOf(t, p, "vm")
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what an ephemeral provider has paused stays: %v", err)
	}
}

// A snapshot is a template of its tenant's, made without disturbing the sandbox.
func TestSnapshot(t *testing.T) {
	t.Parallel()
	shop, dir := newShop(t), t.TempDir()
	p := start(t, Options{StateDir: dir, Spares: -1})
	furnish(t, p, shop, "vm", "acme")
	evaluate(t, p, "vm", `globalThis.alive = true`)
	running, err := p.Snapshot(t.Context(), "vm")
	if err != nil {
		t.Fatal(err)
	}
	evaluate(t, p, "vm", `if (!globalThis.alive) throw "it is another page"; store("changed", "changed", "changed")`)
	shop.mu.Lock()
	if len(shop.loads) > 0 {
		t.Errorf("the snapshot loaded %+v", shop.loads)
	}
	shop.mu.Unlock()
	evaluate(t, p, "vm", `store("second", "local ☕", "db")`)
	pause(t, p, "vm")
	paused, err := p.Snapshot(t.Context(), "vm")
	if err != nil {
		t.Fatal(err)
	}
	wantState(t, p, "vm", providers.Paused)
	if err := p.Kill(t.Context(), "vm"); err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	p = start(t, Options{StateDir: dir, Spares: -1})
	for what, name := range map[string]string{"running": running, "paused": paused} {
		spec := providers.Spec{VM: "from-" + what, Fence: 2, Tenant: "acme", Template: name, Display: computer.Display{Width: 900, Height: 700}, Env: map[string]string{"TZ": "Asia/Tokyo"}}
		made, err := p.Create(t.Context(), spec)
		if err != nil || made.State != providers.Running || made.Fence != 2 {
			t.Fatalf("create from it: %+v, %v", made, err)
		}
		wantFurnished(t, p, shop, spec.VM)
		shop.forget()
		spec.Tenant, spec.VM = "rival", "rival"
		if _, err := p.Create(t.Context(), spec); !errors.Is(err, providers.ErrInvalid) {
			t.Errorf("create from another tenant's: %v", err)
		}
	}
	for _, name := range []string{"ubuntu", "../" + running, "snapshot-0000000000000000", "new-" + running} {
		if _, err := p.Create(t.Context(), providers.Spec{VM: "none", Fence: 1, Tenant: "acme", Template: name}); !errors.Is(err, providers.ErrInvalid) {
			t.Errorf("create from %q: %v", name, err)
		}
	}
	kept := filepath.Join(dir, "templates")
	if info, err := os.Stat(filepath.Join(kept, running)); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the template: %v, %v", info, err)
	}
	for i := range maxTemplates - 2 {
		if err := os.Mkdir(filepath.Join(kept, fmt.Sprintf("snapshot-%016x", i)), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := p.Snapshot(t.Context(), "from-paused"); !errors.Is(err, providers.ErrConflict) || !strings.Contains(err.Error(), "remove one") {
		t.Errorf("one too many: %v", err)
	}
	if err := os.RemoveAll(filepath.Join(kept, running)); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Create(t.Context(), providers.Spec{VM: "none", Fence: 1, Tenant: "acme", Template: running}); !errors.Is(err, providers.ErrInvalid) {
		t.Errorf("create from one that was removed: %v", err)
	}
	do(t, p, "from-running", computer.Action{Type: computer.Click, X: ref(5), Y: ref(5)}) // it goes on
	if _, err := p.Snapshot(t.Context(), "nobody"); !errors.Is(err, providers.ErrNotFound) {
		t.Errorf("of an unknown vm: %v", err)
	}
}

// Copies of a profile follow no link and are bounded.
func TestCopyStores(t *testing.T) {
	from, to := t.TempDir(), filepath.Join(t.TempDir(), "Default")
	secret := filepath.Join(t.TempDir(), "secret")
	store := filepath.Join(from, "Local Storage")
	if err := errors.Join(
		os.WriteFile(secret, []byte("secret"), 0o600), os.MkdirAll(filepath.Join(store, "leveldb"), 0o700),
		os.WriteFile(filepath.Join(store, "leveldb", "log"), []byte("kept"), 0o600), os.Symlink(secret, filepath.Join(store, "leveldb", "link")),
		os.Symlink(filepath.Dir(secret), filepath.Join(from, "IndexedDB")), os.WriteFile(filepath.Join(from, "Cookies"), nil, 0o600),
	); err != nil {
		t.Fatal(err)
	}
	if err := copyStores(t.Context(), from, to); err != nil {
		t.Fatal(err)
	}
	var got []string
	err := filepath.WalkDir(to, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			got = append(got, strings.TrimPrefix(path, to))
		}
		return err
	})
	if err != nil || !slices.Equal(got, []string{"/Local Storage/leveldb/log"}) {
		t.Errorf("copied %q, %v", got, err)
	}
	if err := os.Truncate(filepath.Join(store, "leveldb", "log"), maxTemplateSize+1); err != nil { // a hole: it takes no room
		t.Fatal(err)
	}
	f, err := os.Stat(filepath.Join(store, "leveldb", "log"))
	if err != nil || f.Size() <= maxTemplateSize {
		t.Fatal(f, err)
	}
	root, err := os.OpenRoot(from)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := copyFile(root, "Local Storage/leveldb/log", filepath.Join(t.TempDir(), "log"), 4096); !errors.Is(err, errTooLarge) || !errors.Is(err, providers.ErrInvalid) {
		t.Errorf("a file that is too large: %v", err)
	}
	if err := root.Close(); err != nil {
		t.Fatal(err)
	}
}
