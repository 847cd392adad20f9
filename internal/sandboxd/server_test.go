package sandboxd

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"image/png"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"berth/api"
	"berth/internal/sandboxd/jail"
)

func TestLifecycle(t *testing.T) {
	t.Parallel()
	w := serve(t, options(t))
	body := map[string]any{
		"sandboxID": "vm-a", "templateID": "desktop", "timeout": 600, "metadata": map[string]string{"fence": "7", "tenant": "acme"},
		"envVars": map[string]string{"GREETING": "hé"}, "display": map[string]int{"width": 1000, "height": 700},
	}
	first := w.want(t, 201, "POST", "/sandboxes", body, "Idempotency-Key", "k")
	var d detail
	first.into(t, &d)
	if d.SandboxID != "vm-a" || d.State != "running" || d.Metadata["tenant"] != "acme" || d.Display.Width != 1000 || d.EndAt == nil || time.Until(*d.EndAt) > 10*time.Minute {
		t.Errorf("created %+v", d)
	}
	if again := w.want(t, 201, "POST", "/sandboxes", body, "Idempotency-Key", "k"); !bytes.Equal(again.body, first.body) {
		t.Errorf("the same key answers\n%s, then\n%s", first.body, again.body)
	}
	if a := w.want(t, 409, "POST", "/sandboxes", body, "Idempotency-Key", "another"); a.code() != "conflict" {
		t.Errorf("%s", a.body)
	}
	var now detail
	w.want(t, 200, "GET", "/sandboxes/vm-a", nil).into(t, &now)
	if now.Usage = nil; !reflect.DeepEqual(now, d) {
		t.Errorf("the detail is %+v", now)
	}
	var list []detail
	if w.want(t, 200, "GET", "/sandboxes", nil).into(t, &list); len(list) != 1 || list[0].SandboxID != "vm-a" {
		t.Errorf("the list is %+v", list)
	}
	w.want(t, 204, "POST", "/sandboxes/vm-a/timeout", `{"timeout":60}`)
	if w.want(t, 200, "GET", "/sandboxes/vm-a", nil).into(t, &d); time.Until(*d.EndAt) > time.Minute {
		t.Errorf("the end is %v", d.EndAt)
	}
	got := w.act(t, "/sandboxes/vm-a", "run", `{"type":"run","argv":["sh","-c","echo $GREETING; id -u; ls -C /proc/self/fd"]}`)
	if string(got[0].Value) != `{"exitCode":0,"stdout":"hé\n1000\n0  1  2  3\n","stderr":""}` {
		t.Errorf("inside: %s, %v", got[0].Value, got[0].Error)
	}
	w.want(t, 501, "POST", "/sandboxes/vm-a/pause", nil)
	w.want(t, 204, "DELETE", "/sandboxes/vm-a", nil)
	for _, path := range []string{"", "/computer/screenshot", "/computer/actions/run", "/stream"} {
		w.want(t, 404, "GET", "/sandboxes/vm-a"+path, nil)
	}
	w.want(t, 404, "DELETE", "/sandboxes/vm-a", nil)
	if a := w.want(t, 409, "POST", "/sandboxes", body, "Idempotency-Key", "k"); a.code() != "sandbox_ended" {
		t.Errorf("a late create of a sandbox that has ended: %s", a.body)
	}
	w.want(t, 204, "POST", w.create(t, "vm-b")+"/timeout", `{"timeout":1}`)
	eventually(t, func() string {
		if a := w.want(t, 200, "GET", "/sandboxes", nil); string(a.body) != "[]" {
			return "after its time: " + string(a.body)
		}
		return ""
	})
	left, err := os.ReadDir(filepath.Join(w.store.dir, "guests"))
	if err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

func TestBadInput(t *testing.T) {
	t.Parallel()
	w := serve(t, options(t))
	path := w.create(t, "vm-a")
	key := []string{"Idempotency-Key", "x"}
	for _, c := range []struct {
		name, method, path, body string
		headers                  []string
		status                   int
		says                     string
	}{
		{"no key", "GET", "/sandboxes", "", []string{"X-API-Key", ""}, 401, "X-API-Key"},
		{"wrong key", "GET", path, "", []string{"X-API-Key", testKey + "x"}, 401, ""},
		{"no such call", "GET", "/nothing", "", nil, 404, "/docs"},
		{"no idempotency key", "POST", "/sandboxes", `{"sandboxID":"a"}`, nil, 400, "Idempotency-Key"},
		{"unknown field", "POST", "/sandboxes", `{"sandboxID":"a","colour":1}`, key, 400, "colour"},
		{"no JSON", "POST", "/sandboxes", `{`, key, 400, "body"},
		{"two values", "POST", "/sandboxes", `{"sandboxID":"a"}{}`, key, 400, "after"},
		{"id", "POST", "/sandboxes", `{"sandboxID":"../a"}`, key, 400, "sandboxID"},
		{"template", "POST", "/sandboxes", `{"sandboxID":"a","templateID":"x"}`, key, 400, "desktop"},
		{"timeout", "POST", "/sandboxes", `{"sandboxID":"a","timeout":-1}`, key, 400, "timeout"},
		{"display", "POST", "/sandboxes", `{"sandboxID":"a","display":{"width":10,"height":10}}`, key, 400, "display"},
		{"fence", "POST", "/sandboxes", `{"sandboxID":"a","metadata":{"fence":"x"}}`, key, 400, "fence"},
		{"variable", "POST", "/sandboxes", `{"sandboxID":"a","envVars":{"a=b":"x"}}`, key, 400, "envVars"},
		{"too much", "POST", "/sandboxes", `{"sandboxID":"a","envVars":{"a":"` + strings.Repeat("x", 40<<10) + `"}}`, key, 400, "bytes"},
		{"far too much", "POST", "/sandboxes", `{"sandboxID":"` + strings.Repeat("x", 2<<20) + `"}`, key, 413, "bytes"},
		{"no timeout", "POST", path + "/timeout", `{}`, nil, 400, "timeout"},
		{"no actions", "POST", path + "/computer/actions", `{"actions":[]}`, key, 400, "action"},
		{"unknown action", "POST", path + "/computer/actions", `{"actions":[{"type":"dance"}]}`, key, 400, "dance"},
		{"unknown key", "POST", path + "/computer/actions", `{"actions":[{"type":"key","keys":["NoSuchKey"]}]}`, key, 400, "NoSuchKey"},
		{"outside", "POST", path + "/computer/actions", `{"actions":[{"type":"click","x":1280,"y":0}]}`, key, 400, "1280"},
		{"javascript", "POST", path + "/computer/actions", `{"actions":[{"type":"open","target":"javascript:1"}]}`, key, 400, "javascript"},
		{"epoch", "POST", path + "/computer/actions", `{"actions":[{"type":"cursor"}]}`, append([]string{"Berth-Epoch", "-1"}, key...), 400, "Berth-Epoch"},
		{"unknown sandbox", "POST", "/sandboxes/x/computer/actions", `{"actions":[{"type":"cursor"}]}`, key, 404, ""},
		{"unknown command", "GET", path + "/computer/actions/never", "", nil, 404, ""},
	} {
		var body any
		if c.body != "" {
			body = c.body
		}
		a := w.want(t, c.status, c.method, c.path, body, c.headers...)
		var e errorBody
		if a.into(t, &e); e.Code != c.status || !strings.Contains(e.Message, c.says) {
			t.Errorf("%s: %s", c.name, a.body)
		}
	}
	if w.want(t, 404, "GET", path+"/computer/actions/x", nil); t.Failed() {
		t.Error("something of the above ran")
	}
}

// TestSlowLoris: a body that does not come is not waited for.
func TestSlowLoris(t *testing.T) {
	t.Parallel()
	w := serve(t, options(t))
	w.readWithin = 200 * time.Millisecond
	conn, err := net.Dial("tcp", w.http.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	})
	if _, err := io.WriteString(conn, "POST /sandboxes HTTP/1.1\r\nHost: x\r\nX-API-Key: "+testKey+"\r\nContent-Length: 100\r\n\r\n{"); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err == nil && resp.StatusCode != http.StatusRequestTimeout || time.Since(began) > 5*time.Second {
		t.Errorf("%v, %v after %v", resp, err, time.Since(began))
	}
	if resp != nil {
		if err := resp.Body.Close(); err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Error(err)
		}
	}
}

// TestFull: a server that is full or draining refuses at once (selenoid#120),
// and an end makes room.
func TestFull(t *testing.T) {
	t.Parallel()
	opts := options(t)
	opts.MaxContainers = 2
	w := serve(t, opts)
	w.create(t, "vm-1")
	w.create(t, "vm-2")
	third := map[string]string{"sandboxID": "vm-3"}
	began := time.Now()
	if a := w.want(t, 503, "POST", "/sandboxes", third, "Idempotency-Key", "3"); a.code() != capacityUnavailable || time.Since(began) > 15*time.Second {
		t.Errorf("%s after %v", a.body, time.Since(began))
	}
	w.want(t, 204, "DELETE", "/sandboxes/vm-1", nil)
	w.want(t, 201, "POST", "/sandboxes", third, "Idempotency-Key", "3")
	var c struct{ MaxContainers, Used, Pending int }
	if w.want(t, 200, "GET", "/capacity", nil).into(t, &c); c.MaxContainers != 2 || c.Used != 2 || c.Pending != 0 {
		t.Errorf("capacity %+v", c)
	}
	w.want(t, 204, "DELETE", "/sandboxes/vm-3", nil)
	w.Drain()
	if a := w.want(t, 503, "POST", "/sandboxes", third, "Idempotency-Key", "4"); !strings.Contains(string(a.body), "draining") {
		t.Errorf("%s", a.body)
	}
	if a := w.want(t, 200, "GET", "/health", nil); !strings.Contains(string(a.body), `"draining"`) {
		t.Errorf("%s", a.body)
	}
	w.act(t, "/sandboxes/vm-2", "still", `{"type":"cursor"}`)
}

func TestActions(t *testing.T) {
	t.Parallel()
	w := serve(t, options(t))
	path := w.create(t, "vm-a")
	actions := path + "/computer/actions"
	click := `{"actions":[{"type":"run","argv":["sh","-c","echo x >> $HOME/ran"]}]}`
	for _, c := range []struct {
		fence, epoch string
		status       int
		code         string
	}{{"6", "", 409, "fence_stale"}, {"8", "", 409, "conflict"}, {"7", "5", 200, ""}, {"7", "4", 409, "fence_stale"}, {"", "5", 200, ""}, {"7", "9", 200, ""}, {"", "8", 409, "fence_stale"}} {
		headers := []string{"Idempotency-Key", "f" + c.fence + c.epoch}
		if c.fence != "" {
			headers = append(headers, "Berth-Fence", c.fence)
		}
		if c.epoch != "" {
			headers = append(headers, "Berth-Epoch", c.epoch)
		}
		if a := w.want(t, c.status, "POST", actions, click, headers...); a.code() != c.code {
			t.Errorf("fence %q, epoch %q: %s", c.fence, c.epoch, a.body)
		}
	}
	// The same key again runs nothing.
	first := w.want(t, 200, "POST", actions, `{"actions":[{"type":"run","argv":["sh","-c","echo x >> $HOME/ran; wc -l < $HOME/ran"]},{"type":"screenshot"},{"type":"open","target":"/none"},{"type":"cursor"}]}`, "Idempotency-Key", "once")
	again := w.want(t, 200, "POST", actions, click, "Idempotency-Key", "once")
	if !bytes.Equal(first.body, again.body) {
		t.Errorf("the same key answers\n%.300s, then\n%.300s", first.body, again.body)
	}
	var got struct{ Actions []result }
	first.into(t, &got)
	if a := got.Actions; len(a) != 4 || !strings.Contains(string(a[0].Value), `"4\n"`) || a[1].Outcome != "ok" || a[2].Outcome != "failed" || a[2].Error.Code != "notFound" || a[3].Outcome != "skipped" {
		t.Errorf("%.500s", first.body)
	}
	var image struct{ Data []byte }
	if err := json.Unmarshal(got.Actions[1].Value, &image); err != nil {
		t.Fatal(err)
	}
	if _, err := png.Decode(bytes.NewReader(image.Data)); err != nil {
		t.Errorf("the screenshot: %v", err)
	}
	recalled := w.want(t, 200, "GET", actions+"/once", nil)
	if !strings.HasPrefix(string(recalled.body), `{"state":"finished"`) {
		t.Errorf("recalled %.200s", recalled.body)
	}
	// A caller that goes away leaves the batch running; one that is cancelled
	// releases what it held. Only who has the newest epoch may cancel.
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := w.call(ctx, t, "POST", actions, `{"actions":[{"type":"hold","keys":["Shift"],"seconds":60},{"type":"cursor"}]}`, "Idempotency-Key", "left")
		ended <- err
	}()
	recall := func() string { return string(w.want(t, 200, "GET", actions+"/left", nil).body) }
	eventually(t, func() string {
		if a, err := w.call(t.Context(), t, "GET", actions+"/left", nil); err != nil || a.status != 200 {
			return "the batch has not begun"
		}
		return ""
	})
	if got := recall(); got != `{"state":"started"}` {
		t.Errorf("recalled %s", got)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	w.want(t, 200, "GET", path+"/computer/screenshot", nil)
	if got := recall(); got != `{"state":"started"}` {
		t.Errorf("after its caller had gone: %s", got)
	}
	w.want(t, 404, "DELETE", actions+"/never", nil)
	w.want(t, 409, "DELETE", actions+"/left", nil, "Berth-Epoch", "8")
	w.want(t, 204, "DELETE", actions+"/left", nil, "Berth-Epoch", "9")
	w.want(t, 204, "DELETE", actions+"/once", nil)
	if got := recall(); got != `{"state":"finished","actions":[{"outcome":"unknown"},{"outcome":"skipped"}]}` {
		t.Errorf("after it was cancelled: %s", got)
	}
	if again := w.want(t, 200, "GET", actions+"/once", nil); !bytes.Equal(again.body, recalled.body) {
		t.Errorf("a cancelled command of long ago: %.200s", again.body)
	}
	shot := w.want(t, 200, "GET", path+"/computer/screenshot", nil)
	img, err := png.Decode(bytes.NewReader(shot.body))
	if err != nil || img.Bounds().Dx() != 1280 || img.Bounds().Dy() != 800 || shot.header.Get("Berth-Cursor") == "" {
		t.Errorf("%v, %v", shot.header, err)
	}
}

// TestKill: it works while a sandbox starts (daytona#2390) and frees calls that
// hang in it (e2b#424); a create that everybody left is given up.
func TestKill(t *testing.T) {
	t.Parallel()
	w := serve(t, options(t))
	path := w.create(t, "vm-a")
	var wg sync.WaitGroup
	wg.Go(func() {
		a := w.want(t, 410, "POST", path+"/computer/actions", `{"actions":[{"type":"wait","seconds":60}]}`, "Idempotency-Key", "w")
		if a.code() != "sandbox_lost" || !strings.Contains(string(a.body), "killed") {
			t.Errorf("%s", a.body)
		}
	})
	eventually(t, func() string {
		if a, err := w.call(t.Context(), t, "GET", path+"/computer/actions/w", nil); err != nil || a.status != 200 {
			return "the wait has not begun"
		}
		return ""
	})
	w.want(t, 204, "DELETE", path, nil)
	wg.Wait()

	w.starts <- struct{}{} // nothing starts while both places are taken
	w.starts <- struct{}{}
	wg.Go(func() {
		if a := w.want(t, 410, "POST", "/sandboxes", `{"sandboxID":"vm-b"}`, "Idempotency-Key", "b"); a.code() != "sandbox_lost" {
			t.Errorf("%s", a.body)
		}
	})
	ctx, leave := context.WithCancel(t.Context())
	wg.Go(func() {
		if _, err := w.call(ctx, t, "POST", "/sandboxes", `{"sandboxID":"vm-c"}`, "Idempotency-Key", "c"); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	eventually(t, func() string {
		var list []detail
		if w.want(t, 200, "GET", "/sandboxes", nil).into(t, &list); len(list) != 2 || list[0].State != "starting" {
			return "not listed as starting"
		}
		return ""
	})
	w.want(t, 204, "DELETE", "/sandboxes/vm-b", nil)
	leave()
	wg.Wait()
	eventually(t, func() string { return strings.TrimPrefix(string(w.want(t, 200, "GET", "/sandboxes", nil).body), "[]") })
	<-w.starts
	<-w.starts
}

// TestRestart: sandboxes outlive the server with all that belongs to them; the
// boot id changes when they did not.
func TestRestart(t *testing.T) {
	t.Parallel()
	opts := options(t)
	opts.StateDir, opts.Warm = state(t), 1
	first := serve(t, opts)
	path := first.create(t, "vm-a")
	first.want(t, 204, "POST", path+"/timeout", `{"timeout":600}`)
	first.act(t, path, "before", `{"type":"move","x":5,"y":6}`, "Berth-Epoch", "3")
	boot := string(first.want(t, 200, "GET", "/health", nil).body)
	detailOf := func(w *world) (d map[string]any) {
		w.want(t, 200, "GET", path, nil).into(t, &d)
		delete(d, "usage") // of the moment
		return d
	}
	before := detailOf(first)
	if _, err := New(t.Context(), opts); err == nil || !strings.Contains(err.Error(), "another sandboxd") {
		t.Errorf("a second server of the state directory: %v", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second := serve(t, opts)
	if got := string(second.want(t, 200, "GET", "/health", nil).body); got != boot {
		t.Errorf("the boot id changed: %s, %s", boot, got)
	}
	if got := detailOf(second); !reflect.DeepEqual(got, before) {
		t.Errorf("%v became %v", before, got)
	}
	if got := string(second.act(t, path, "before", `{"type":"move","x":50,"y":60}`)[0].Value) + string(second.act(t, path, "c", `{"type":"cursor"}`)[0].Value); got != `{"x":5,"y":6}` {
		t.Errorf("a command was forgotten: the pointer is at %s", got)
	}
	second.want(t, 409, "POST", path+"/computer/actions", `{"actions":[{"type":"cursor"}]}`, "Idempotency-Key", "d", "Berth-Epoch", "2")
	pid := second.find("vm-a").guest.Identity().PID
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() string {
		if raw, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat"); err == nil && !strings.Contains(string(raw), ") Z ") {
			return "it is still ending"
		}
		return ""
	})
	third := serve(t, opts)
	if got := string(third.want(t, 200, "GET", "/health", nil).body); got == boot {
		t.Error("the boot id did not change, though the sandbox was lost")
	}
	third.want(t, 404, "GET", path, nil)
}

// TestCrash: an X server that dies takes its own sandbox only, whose calls end
// at once; programs inside cannot end it.
func TestCrash(t *testing.T) {
	t.Parallel()
	w := serve(t, options(t))
	path, other := w.create(t, "vm-a"), w.create(t, "vm-b")
	if got := w.act(t, path, "try", `{"type":"run","argv":["sh","-c","kill -9 -1; for p in /proc/[0-9]*; do kill -9 ${p#/proc/}; done; echo tried"]}`); got[0].Outcome != "ok" {
		t.Logf("it killed itself: %v", got[0])
	}
	w.act(t, path, "alive", `{"type":"cursor"}`)
	done := make(chan answer, 1)
	go func() {
		a, err := w.call(t.Context(), t, "POST", path+"/computer/actions", `{"actions":[{"type":"wait","seconds":60}]}`, "Idempotency-Key", "w")
		if err != nil {
			t.Error(err)
		}
		done <- a
	}()
	eventually(t, func() string {
		if a, err := w.call(t.Context(), t, "GET", path+"/computer/actions/w", nil); err != nil || a.status != 200 {
			return "the wait has not begun"
		}
		return ""
	})
	if err := syscall.Kill(serverOf(t, w.find("vm-a").guest.Identity().PID), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if a := <-done; a.status != 410 || time.Since(began) > 3*time.Second {
		t.Errorf("%d %s after %v", a.status, a.body, time.Since(began))
	}
	w.want(t, 404, "GET", path, nil)
	w.act(t, other, "alive", `{"type":"cursor"}`)
}

// serverOf finds the X server among the processes below a first process.
func serverOf(t *testing.T, root int) int {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	parents, names := map[int]int{}, map[int]string{}
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			continue // it has just ended
		}
		var pid, parent int
		var state string
		head, rest, _ := strings.Cut(string(raw), ") ")
		if _, err := fmt.Sscan(rest, &state, &parent); err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Sscan(head, &pid); err != nil {
			t.Fatal(err)
		}
		parents[pid], names[pid] = parent, head[strings.IndexByte(head, '(')+1:]
	}
	for pid, name := range names {
		for p := pid; name == "Xvfb" && p > 1; p = parents[p] {
			if p == root {
				return pid
			}
		}
	}
	t.Fatal("no X server")
	return 0
}

// TestWarm: a spare is claimed and replaced, and serves its new owner only.
func TestWarm(t *testing.T) {
	t.Parallel()
	opts := options(t)
	opts.Warm = 1
	w := serve(t, opts)
	warm := func() string {
		var c struct{ Attributes map[string]string }
		w.want(t, 200, "GET", "/capacity", nil).into(t, &c)
		return c.Attributes["warm"]
	}
	eventually(t, func() string { return strings.TrimSuffix("warm: "+warm(), "warm: 1") })
	path := w.create(t, "vm-a")
	w.want(t, 409, "POST", path+"/computer/actions", `{"actions":[{"type":"cursor"}]}`, "Idempotency-Key", "x", "Berth-Fence", "6")
	eventually(t, func() string { return strings.TrimSuffix("warm: "+warm(), "warm: 1") })
	w.mu.Lock()
	sp := w.spares[0]
	w.mu.Unlock()
	if err := sp.guest.Kill(); err != nil { // a spare that dies is replaced
		t.Fatal(err)
	}
	eventually(t, func() string {
		w.mu.Lock()
		defer w.mu.Unlock()
		if len(w.spares) == 1 && w.spares[0] != sp {
			return ""
		}
		return "the dead spare was not replaced"
	})
}

// TestWeaker: what a host denies stops the start, unless that is allowed; then
// it is announced, and sandboxes work all the same.
func TestWeaker(t *testing.T) {
	t.Parallel()
	opts := options(t)
	probe := jail.Probe{Weak: jail.Weakness{Namespaces: true, Cgroups: true}, Denied: []string{"limits of memory: none here"}, NoWay: "no namespaces"}
	if _, err := accept(opts, probe); err == nil || !strings.Contains(err.Error(), "--allow-weaker-isolation") {
		t.Fatalf("a host that denies: %v", err)
	}
	opts.AllowWeaker, opts.StateDir = true, state(t)
	machine, err := accept(opts, probe)
	if err != nil {
		t.Fatal(err)
	}
	st, err := openStore(opts.StateDir)
	if err != nil {
		t.Fatal(err)
	}
	s, err := newServer(t.Context(), opts, st, machine)
	if err != nil {
		t.Fatal(err)
	}
	w := expose(t, s)
	if a := w.want(t, 200, "GET", "/capacity", nil); !strings.Contains(string(a.body), `"notEnforced":"limits of memory: none here"`) || !strings.Contains(string(a.body), `"isolation":"none"`) {
		t.Errorf("%s", a.body)
	}
	path := w.create(t, "vm-a")
	var v struct{ Stdout string }
	if err := json.Unmarshal(w.act(t, path, "r", `{"type":"run","argv":["sh","-c","setsid sleep 1000 >/dev/null 2>&1 & echo $!"]}`)[0].Value, &v); err != nil {
		t.Fatal(err)
	}
	left := strings.TrimSpace(v.Stdout)
	if _, err := os.Stat("/proc/" + left); err != nil {
		t.Fatal(err)
	}
	first := strconv.Itoa(w.find("vm-a").guest.Identity().PID)
	w.want(t, 204, "DELETE", path, nil)
	for _, pid := range []string{first, left} {
		eventually(t, func() string { // whoever adopts an orphan has to wait for it
			raw, err := os.ReadFile("/proc/" + pid + "/stat")
			if err != nil || strings.Contains(string(raw), ") Z ") {
				return ""
			}
			return "a process runs on: " + string(raw)
		})
	}
}

// TestStream: the live view opens with the key or a token of this sandbox.
func TestStream(t *testing.T) {
	t.Parallel()
	w := serve(t, options(t))
	path := w.create(t, "vm-a")
	until := time.Now().Add(time.Minute).Unix()
	query := func(id string, expires int64) string {
		return "?expires=" + strconv.FormatInt(expires, 10) + "&token=" + api.StreamToken(testKey, id, api.Look, expires)
	}
	noKey := []string{"X-API-Key", ""}
	if a := w.want(t, 200, "GET", path+"/stream"+query("vm-a", until), nil, noKey...); !strings.Contains(string(a.body), "/sandboxes/vm-a/stream/rfb?expires=") || strings.Contains(string(a.body), testKey) {
		t.Errorf("%s", a.body)
	}
	for name, q := range map[string]string{"none": "", "another's": query("vm-b", until), "old": query("vm-a", 1)} {
		if w.want(t, 401, "GET", path+"/stream"+q, nil, noKey...); t.Failed() {
			t.Fatal(name)
		}
		w.want(t, 401, "GET", path+"/stream/frame"+q, nil, noKey...)
	}
	w.want(t, 200, "GET", path+"/stream", nil)
	frame := path + "/stream/frame" + query("vm-a", until)
	watched := func() (at time.Time) {
		var d struct{ WatchedAt time.Time }
		w.want(t, 200, "GET", path, nil).into(t, &d)
		return d.WatchedAt
	}
	if at := watched(); !at.IsZero() {
		t.Errorf("watched at %v, before anybody looked", at)
	}
	first := w.want(t, 200, "GET", frame, nil, noKey...)
	if _, err := png.Decode(bytes.NewReader(first.body)); err != nil {
		t.Errorf("the first frame: %v", err)
	}
	if at := watched(); time.Since(at) > time.Minute {
		t.Errorf("watched at %v", at)
	}
	name := first.header.Get("Berth-Frame")
	changed := make(chan answer, 1)
	go func() {
		a, err := w.call(t.Context(), t, "GET", frame+"&after="+name, nil, noKey...)
		if err != nil {
			t.Error(err)
		}
		changed <- a
	}()
	w.act(t, path, "move", `{"type":"move","x":5,"y":5}`)
	a := <-changed
	last := a.header.Get("Berth-Frame")
	if a.status != 200 || last == name {
		t.Errorf("after a change: %d, frame %s", a.status, last)
	}
	go func() {
		a, err := w.call(t.Context(), t, "GET", frame+"&after="+last, nil, noKey...)
		if err != nil {
			t.Error(err)
		}
		changed <- a
	}()
	w.want(t, 204, "DELETE", path, nil)
	if a := <-changed; a.status != 410 && a.status != 404 {
		t.Errorf("after its end: %d", a.status)
	}
}

// TestDocs: the page shows every call and loads nothing from elsewhere; every
// call that is described is served.
func TestDocs(t *testing.T) {
	t.Parallel()
	page, err := renderDocs(api.Sandboxd)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"POST", "/sandboxes/{id}/computer/actions", "sandbox_capacity_unavailable", "schema-NewSandbox", "Idempotency-Key"} {
		if !bytes.Contains(page, []byte(want)) {
			t.Errorf("the page has no %s", want)
		}
	}
	for _, never := range []string{"src=", "<script", "<link", "@import"} {
		if bytes.Contains(page, []byte(never)) {
			t.Errorf("the page has %s", never)
		}
	}
	if _, err := description(); err != nil {
		t.Errorf("the description: %v", err)
	}
}
