package playwright

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
)

// helperVariable makes the test's program a worker that shall be killed.
const helperVariable = "BERTH_TEST_WORKER"

func TestMain(m *testing.M) {
	if raw := os.Getenv(helperVariable); raw != "" {
		if err := helperMain(raw); err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		return
	}
	// These tests wait more than they compute: for browsers, drivers, time-outs.
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		if err := flag.Set("test.parallel", strconv.Itoa(max(4, runtime.GOMAXPROCS(0)))); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// job is what a helper process does: make a vm, show a page, run actions, and
// wait for its end.
type job struct {
	Dir       string
	Ephemeral bool
	Page      string
	Actions   []computer.Action
	Edge      string // not "": see edgeMain
}

func helperMain(raw string) error {
	var j job
	if err := json.Unmarshal([]byte(raw), &j); err != nil {
		return err
	}
	if j.Edge != "" {
		return edgeMain(j)
	}
	ctx := context.Background()
	p, err := New(ctx, Options{ServerID: "playwright-01", StateDir: j.Dir, Ephemeral: j.Ephemeral, Spares: 1})
	if err != nil {
		return err
	}
	if _, err := p.Create(ctx, providers.Spec{VM: "vm", Fence: 5, Tenant: "acme", Role: "sales", Owner: "ann", Session: "s"}); err != nil {
		return err
	}
	for {
		p.mu.Lock()
		warm := len(p.spares) == 1
		p.mu.Unlock()
		if warm {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	if j.Page != "" {
		j.Actions = append([]computer.Action{{Type: computer.Open, Target: j.Page}}, j.Actions...)
	}
	fmt.Println("ready")
	if len(j.Actions) > 0 {
		if _, err := p.Execute(ctx, providers.Batch{VM: "vm", Actions: j.Actions}); err != nil {
			return err
		}
	}
	fmt.Println("done")
	select {}
}

// worker is a helper process.
type worker struct {
	cmd   *exec.Cmd
	in    io.Writer
	lines *bufio.Scanner
}

func startWorker(t *testing.T, j job) *worker {
	t.Helper()
	raw, err := json.Marshal(j)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), helperVariable+"="+string(raw))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w := &worker{cmd: cmd, in: in, lines: bufio.NewScanner(out)}
	t.Cleanup(w.kill)
	return w
}

// await reads lines until one is want. One that says what was found, or an
// error, is the last.
func (w *worker) await(t *testing.T, want string) {
	t.Helper()
	for w.lines.Scan() {
		if w.lines.Text() == want {
			return
		}
		if strings.HasPrefix(w.lines.Text(), "error") || strings.HasPrefix(w.lines.Text(), "found") {
			break
		}
	}
	t.Fatalf("the worker said %q, want %q", w.lines.Text(), want)
}

// kill is a worker's crash.
func (w *worker) kill() {
	if w.cmd.ProcessState == nil {
		_ = w.cmd.Process.Kill() // it may have ended
		_ = w.cmd.Wait()         // with the kill's status
	}
}

// keyPage is a page that posts its key and mouse events.
type keyPage struct {
	*httptest.Server
	mu     sync.Mutex
	events []string
	came   chan struct{}
}

const keyPageHTML = `<!doctype html><title>keys</title><body style="background:#123456"><a href="/popup" target="_blank" style="position:absolute;left:600px;top:600px">popup</a><script>
if (location.pathname === "/popup") document.title = "popup";
for (const t of ["keydown", "keyup", "mousedown", "mouseup"]) addEventListener(t, e => {
  if (e.repeat) return;
  const x = new XMLHttpRequest(); x.open("POST", "/event", false); x.send(t + " " + (e.key ?? e.button));
});
if (location.hash.startsWith("#busy")) setTimeout(() => { const end = Date.now() + +location.hash.slice(5); while (Date.now() < end); }, 100);
</script>`

func newKeyPage(t *testing.T) *keyPage {
	k := &keyPage{came: make(chan struct{})}
	k.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			w.Header().Set("Content-Type", "text/html")
			fmt.Fprint(w, keyPageHTML)
			return
		}
		raw, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		k.mu.Lock()
		defer k.mu.Unlock()
		k.events = append(k.events, string(raw))
		close(k.came)
		k.came = make(chan struct{})
	}))
	t.Cleanup(func() {
		k.CloseClientConnections()
		k.Close()
	})
	return k
}

// await waits until the page has seen all of want, in any order.
func (k *keyPage) await(t *testing.T, want ...string) {
	t.Helper()
	limit := time.After(60 * time.Second)
	for {
		k.mu.Lock()
		seen, came := slices.Clone(k.events), k.came
		k.mu.Unlock()
		if !slices.ContainsFunc(want, func(w string) bool { return !slices.Contains(seen, w) }) {
			return
		}
		select {
		case <-came:
		case <-limit:
			t.Fatalf("the page saw %q, want %q", seen, want)
		}
	}
}

func ref[T any](v T) *T { return &v }

func do(t testing.TB, p *Provider, vm string, actions ...computer.Action) []providers.Result {
	t.Helper()
	results, err := p.Execute(t.Context(), providers.Batch{VM: vm, Actions: actions})
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range results {
		if r.Outcome != computer.OK {
			t.Fatalf("action %d: %s, %v", i, r.Outcome, r.Error)
		}
	}
	return results
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(60 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("not in time: %s", what)
		}
	}
}

// A worker that crashes leaves its sandboxes to its successor, with all that
// is in them, and takes its spares along (infra#2041). What it held down is
// released (xdotool#43).
func TestWorkerCrash(t *testing.T) {
	t.Parallel()
	page := newKeyPage(t)
	dir := t.TempDir()
	w := startWorker(t, job{Dir: dir, Page: page.URL, Actions: []computer.Action{
		{Type: computer.Move, X: ref(200), Y: ref(100)}, {Type: computer.MouseDown},
		{Type: computer.Hold, Keys: []string{"Control", "Shift", "x"}, Seconds: ref(60.0)},
	}})
	w.await(t, "ready")
	page.await(t, "mousedown 0", "keydown Control", "keydown Shift", "keydown X")
	browsers, err := filepath.Glob(filepath.Join(dir, "browsers", "*"))
	if err != nil || len(browsers) != 2 {
		t.Fatalf("browsers %v, %v; want the sandbox and a spare", browsers, err)
	}
	w.kill()
	p := start(t, Options{StateDir: dir, Spares: -1})
	list, err := p.List(t.Context())
	if err != nil || len(list) != 1 {
		t.Fatalf("List: %v, %v", list, err)
	}
	if s := list[0]; s.VM != "vm" || s.Fence != 5 || s.Tenant != "acme" || s.Role != "sales" || s.Owner != "ann" || s.Session != "s" || s.State != providers.Running || s.Display != computer.DefaultDisplay || s.CreatedAt.IsZero() {
		t.Errorf("taken over: %+v", s)
	}
	page.await(t, "keyup X", "keyup Shift", "keyup Control", "mouseup 0")
	if left, err := filepath.Glob(filepath.Join(dir, "browsers", "*")); err != nil || len(left) != 1 {
		t.Errorf("the spare's directory is still there: %v, %v", left, err)
	}
	if got, err := p.Create(t.Context(), providers.Spec{VM: "vm", Fence: 5}); err != nil || got.Tenant != "acme" {
		t.Errorf("the same create again: %+v, %v", got, err)
	}
	view, err := p.Observe(t.Context(), "vm")
	if err != nil {
		t.Fatal(err)
	}
	if o := view.Observation; o.Title != "keys" || *o.Cursor != (computer.Point{X: 200, Y: 100}) {
		t.Errorf("observed %+v", o)
	}
	do(t, p, "vm", computer.Action{Type: computer.Key, Keys: []string{"q"}})
	page.await(t, "keydown q", "keyup q") // no Shift, no Control
	if err := p.Kill(t.Context(), "vm"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "no process is left", func() bool { return len(browsersOf(dir)) == 0 }) // crash handlers end by themselves
}

// Ephemeral browsers die with their process, however it ends.
func TestEphemeral(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	w := startWorker(t, job{Dir: dir, Ephemeral: true})
	w.await(t, "ready")
	if len(browsersOf(dir)) == 0 {
		t.Fatal("no browsers")
	}
	w.kill()
	eventually(t, "the browsers are gone", func() bool { return len(browsersOf(dir)) == 0 })
	p := start(t, Options{StateDir: dir, Ephemeral: true, Spares: -1})
	if list, err := p.List(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("List: %v, %v", list, err)
	}
	if _, err := p.Create(t.Context(), providers.Spec{VM: "vm", Fence: 1}); err != nil {
		t.Fatal(err)
	}
	s, err := p.find("vm")
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range browsersOf(dir) { // the kill is of a group, which crash handlers leave; they end by themselves
		if line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); err != nil || strings.Contains(string(line), "crashpad") {
			continue
		}
		if st, err := readStat(pid); err == nil && st.pgrp != s.proc.pid {
			t.Errorf("process %d of the browser is in group %d, not in %d", pid, st.pgrp, s.proc.pid)
		}
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "nothing is left after Close", func() bool { return len(browsersOf(dir)) == 0 })
}

// Close leaves the sandboxes, and the next provider finds them as they were;
// meanwhile the state directory is locked. A sandbox that dies between two
// providers is gone, and its profile too.
func TestHandover(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	page := newKeyPage(t)
	first := start(t, Options{StateDir: dir, Spares: 1})
	for _, vm := range []string{"a", "b"} {
		if _, err := first.Create(t.Context(), providers.Spec{VM: vm, Fence: 1, Display: computer.Display{Width: 900, Height: 700}}); err != nil {
			t.Fatal(err)
		}
	}
	do(t, first, "a", computer.Action{Type: computer.Open, Target: page.URL}, computer.Action{Type: computer.ClipboardWrite, Text: ref("kept")})
	do(t, first, "b", computer.Action{Type: computer.Open, Target: page.URL}, computer.Action{Type: computer.Click, X: ref(610), Y: ref(610), Modifiers: []string{"Control"}})
	title := func(p *Provider) string {
		view, err := p.Observe(t.Context(), "b")
		if err != nil {
			t.Fatal(err)
		}
		return view.Observation.Title
	}
	eventually(t, "a page that opens in the background becomes the active one", func() bool { return title(first) == "popup" })
	do(t, first, "b", computer.Action{Type: computer.Move, X: ref(5), Y: ref(5)})
	busy, err := first.find("b")
	if err != nil {
		t.Fatal(err)
	}
	health, err := first.Health(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := New(ctx, Options{StateDir: dir}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a second provider on the same directory: %v", err)
	}
	second := make(chan *Provider, 1)
	go func() { second <- start(t, Options{StateDir: dir, Spares: -1}) }() // waits for the lock
	started := time.Now()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if d := time.Since(started); d > 3*time.Second {
		t.Errorf("Close took %v", d)
	}
	p := <-second
	if list, err := p.List(t.Context()); err != nil || len(list) != 2 {
		t.Fatalf("List: %v, %v", list, err)
	}
	if again, err := p.Health(t.Context()); err != nil || again != health {
		t.Errorf("the boot id changed: %v, %v, %v", health, again, err)
	}
	if got := title(p); got != "popup" {
		t.Errorf("the active page is %q now", got)
	}
	if got := do(t, p, "a", computer.Action{Type: computer.ClipboardRead})[0]; string(got.Value) != `"kept"` {
		t.Errorf("the clipboard holds %s", got.Value)
	}
	view, err := p.Observe(t.Context(), "a")
	if err != nil || view.Observation.Title != "keys" {
		t.Fatalf("observed %+v, %v", view.Observation, err)
	}
	if size, err := sizeOf(view.PNG); err != nil || size.X != 900 || size.Y != 700 {
		t.Errorf("picture %v, %v", size, err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(busy.proc.pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	p = start(t, Options{StateDir: dir, Spares: -1})
	if list, err := p.List(t.Context()); err != nil || len(list) != 1 || list[0].VM != "a" {
		t.Errorf("List: %v, %v", list, err)
	}
	if _, err := os.Stat(busy.dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the dead one's directory: %v", err)
	}
}

// The driver's death interrupts calls and nothing else.
func TestDriverDeath(t *testing.T) {
	t.Parallel()
	page := newKeyPage(t)
	p := start(t, Options{Spares: 1, pingEvery: 100 * time.Millisecond, pingWithin: 2 * time.Second})
	if _, err := p.Create(t.Context(), providers.Spec{VM: "vm", Fence: 1}); err != nil {
		t.Fatal(err)
	}
	do(t, p, "vm", computer.Action{Type: computer.Open, Target: page.URL})
	if d, err := p.awaitDriver(t.Context()); err != nil {
		t.Fatal(err)
	} else if st, err := readStat(d.pid); err != nil || st.pgrp != d.pid {
		t.Errorf("the driver's process group is %d, %v: an interrupt from the terminal would end it", st.pgrp, err)
	}
	for name, signal := range map[string]syscall.Signal{"killed": syscall.SIGKILL, "hung": syscall.SIGSTOP} {
		t.Run(name, func(t *testing.T) {
			d, err := p.awaitDriver(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := syscall.Kill(d.pid, signal); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the sandbox acts again", func() bool {
				rs, err := p.Execute(t.Context(), providers.Batch{VM: "vm", Actions: []computer.Action{{Type: computer.Key, Keys: []string{"k"}}}})
				if err != nil && !errors.Is(err, providers.ErrUnavailable) {
					t.Fatalf("act without a driver: %v", err)
				}
				return err == nil && rs[0].Outcome == computer.OK
			})
			if again, err := p.awaitDriver(t.Context()); err != nil || again.pid == d.pid {
				t.Errorf("driver %v, %v; the old one was %d", again, err, d.pid)
			}
			view, err := p.Observe(t.Context(), "vm")
			if err != nil || view.Observation.Title != "keys" {
				t.Errorf("observed %+v, %v", view.Observation, err)
			}
		})
	}
}

// Whoever reaps a driver first, after stop everybody knows that it is gone.
func TestStoppedDriverIsGone(t *testing.T) {
	t.Parallel()
	for range 100 {
		cmd := exec.Command("sleep", "60")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		d, err := watchDriver(cmd.Process.Pid)
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err == nil {
			t.Fatal("it ended well")
		}
		d.stop()
		select {
		case <-d.gone:
		default:
			t.Fatal("stop returned, and nobody knows that the driver is gone")
		}
	}
}

// A batch that is at work when the driver dies ends with ErrUnavailable, and
// what it held is released.
func TestDriverDeathReleasesKeys(t *testing.T) {
	t.Parallel()
	page := newKeyPage(t)
	p := start(t, Options{Spares: -1})
	if _, err := p.Create(t.Context(), providers.Spec{VM: "vm", Fence: 1}); err != nil {
		t.Fatal(err)
	}
	do(t, p, "vm", computer.Action{Type: computer.Open, Target: page.URL})
	done := make(chan error, 1)
	go func() {
		_, err := p.Execute(t.Context(), providers.Batch{VM: "vm", Actions: []computer.Action{{Type: computer.Hold, Keys: []string{"Alt", "x"}, Seconds: ref(1.0)}}})
		done <- err
	}()
	page.await(t, "keydown Alt", "keydown x")
	d, err := p.awaitDriver(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(d.pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, providers.ErrUnavailable) {
		t.Errorf("the interrupted batch: %v", err)
	}
	page.await(t, "keyup Alt", "keyup x")
}

// What needs no provider of its own.
func TestBrowser(t *testing.T) {
	t.Parallel()
	p := start(t, Options{Spares: -1})
	for name, test := range map[string]func(*testing.T, *Provider){
		"the page crashes": testRendererCrash, "the last page closes": testLastPageCloses,
		"debugging ports are out of reach": testDebuggingPortsAreOutOfReach, "env and dialogs": testSpecReachesTheBrowser,
		"a browser that is frozen": testFrozenBrowser,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, p)
		})
	}
}

// A page that crashes is the loss of its sandbox, and of nothing else.
func testRendererCrash(t *testing.T, p *Provider) {
	for _, vm := range []string{"crash", "beside"} {
		if _, err := p.Create(t.Context(), providers.Spec{VM: vm, Fence: 1}); err != nil {
			t.Fatal(err)
		}
	}
	s, err := p.find("crash")
	if err != nil {
		t.Fatal(err)
	}
	page, err := s.conn.current(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := p.Execute(t.Context(), providers.Batch{VM: "crash", Actions: []computer.Action{{Type: computer.Wait, Seconds: ref(60.0)}}})
		done <- err
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_ = s.conn.cdp.call(ctx, page.session, "Page.crash", nil, nil) // gives no answer
	if err := <-done; !errors.Is(err, providers.ErrLost) {
		t.Errorf("the call: %v", err)
	}
	eventually(t, "the sandbox is gone", func() bool { _, err := p.Get(t.Context(), "crash"); return errors.Is(err, providers.ErrNotFound) })
	do(t, p, "beside", computer.Action{Type: computer.Click, X: ref(1), Y: ref(1)})
}

// A browser that answers nothing at all loses its own sandbox, and soon.
func testFrozenBrowser(t *testing.T, p *Provider) {
	if _, err := p.Create(t.Context(), providers.Spec{VM: "frozen", Fence: 1}); err != nil {
		t.Fatal(err)
	}
	s, err := p.find("frozen")
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(-s.proc.pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for what, call := range map[string]func(context.Context) error{
		"observe": func(ctx context.Context) error { _, err := p.Observe(ctx, "frozen"); return err },
		"clipboard": func(ctx context.Context) error {
			_, err := p.Execute(ctx, providers.Batch{VM: "frozen", Actions: []computer.Action{{Type: computer.ClipboardRead}}})
			return err
		},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		started := time.Now()
		if err := call(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", what, err)
		}
		cancel()
		if d := time.Since(started); d > 1200*time.Millisecond {
			t.Errorf("%s took %v", what, d)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := p.Execute(ctx, providers.Batch{VM: "frozen", Actions: []computer.Action{{Type: computer.Click, X: ref(1), Y: ref(1)}}}); !errors.Is(err, providers.ErrLost) {
		t.Errorf("click: %v", err)
	}
	if _, err := p.Get(t.Context(), "frozen"); !errors.Is(err, providers.ErrNotFound) {
		t.Errorf("Get: %v", err)
	}
	if err := p.Kill(t.Context(), "frozen"); err != nil { // waits for its end
		t.Error(err)
	}
	if _, err := os.Stat(s.dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its profile: %v", err)
	}
}

// The last page's close opens a blank one.
func testLastPageCloses(t *testing.T, p *Provider) {
	if _, err := p.Create(t.Context(), providers.Spec{VM: "vm", Fence: 1}); err != nil {
		t.Fatal(err)
	}
	s, err := p.find("vm")
	if err != nil {
		t.Fatal(err)
	}
	old, err := s.conn.current(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := s.conn.cdp.call(t.Context(), "", "Target.closeTarget", params{"targetId": old.target}, nil); err != nil {
		t.Fatal(err)
	}
	<-old.closed
	do(t, p, "vm", computer.Action{Type: computer.Open, Target: "data:text/html,<title>new"}, computer.Action{Type: computer.Click, X: ref(5), Y: ref(5)})
	view, err := p.Observe(t.Context(), "vm")
	if err != nil || view.Observation.Title != "new" || len(view.Observation.Pages) != 1 {
		t.Errorf("observed %+v, %v", view.Observation, err)
	}
}

// No page reaches a debugging port, its own browser's or another's; a page
// with the same path elsewhere is a page like any other.
func testDebuggingPortsAreOutOfReach(t *testing.T, p *Provider) {
	for _, vm := range []string{"a", "b"} {
		if _, err := p.Create(t.Context(), providers.Spec{VM: vm, Fence: 1}); err != nil {
			t.Fatal(err)
		}
	}
	other, err := p.find("b")
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"127.0.0.1", "localhost", "x.localhost", "2130706433", "[::ffff:127.0.0.1]", "0.0.0.0"} {
		results, err := p.Execute(t.Context(), providers.Batch{VM: "a", Actions: []computer.Action{{Type: computer.Open, Target: "http://" + host + ":" + other.proc.port() + "/json/list"}}})
		if err != nil {
			t.Fatal(err)
		}
		if r := results[0]; r.Outcome != computer.Failed || r.Error.Code != codeNavigation {
			t.Errorf("%s: %s, %v", host, r.Outcome, r.Error)
		}
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "<title>mine</title>") }))
	defer server.Close()
	do(t, p, "a", computer.Action{Type: computer.Open, Target: server.URL + "/json/list"})
	if view, err := p.Observe(t.Context(), "a"); err != nil || view.Observation.Title != "mine" {
		t.Errorf("observed %+v, %v", view.Observation, err)
	}
}

// A page that is busy when its sandbox is taken over delays nobody else, and
// is taken over when it answers.
func TestTakeOverOfABusyPage(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	page := newKeyPage(t)
	first := start(t, Options{StateDir: dir, Spares: -1})
	for _, vm := range []string{"busy", "idle"} {
		if _, err := first.Create(t.Context(), providers.Spec{VM: vm, Fence: 1}); err != nil {
			t.Fatal(err)
		}
	}
	do(t, first, "busy", computer.Action{Type: computer.Open, Target: page.URL + "/#busy6000"})
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	p := start(t, Options{StateDir: dir, Spares: -1})
	do(t, p, "idle", computer.Action{Type: computer.Click, X: ref(1), Y: ref(1)})
	eventually(t, "the busy one acts", func() bool {
		_, err := p.Execute(t.Context(), providers.Batch{VM: "busy", Actions: []computer.Action{{Type: computer.Key, Keys: []string{"z"}}}})
		return err == nil
	})
	page.await(t, "keydown z", "keyup z")
}
