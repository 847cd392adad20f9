package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"image/png"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/events"
)

// dev is a running `berth dev`.
type dev struct {
	*process
	url, demo string
	js        jetstream.JetStream // for the test's own eyes
	dir       string              // its temporary directory
}

func startDev(t *testing.T) *dev {
	t.Helper()
	return startDevWith(t, nil)
}

func startDevWith(t *testing.T, env []string, args ...string) *dev {
	t.Helper()
	dir := t.TempDir()
	d := &dev{dir: dir, process: start(t, program("berth"), append(env, "TMPDIR="+dir), append([]string{"dev", "--nats-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"}, args...)...)}
	d.until(60*time.Second, false, "ready")
	d.url, d.demo = d.line("NATS "), d.line("demo app ")
	_, d.js = connect(t, d.url)
	return d
}

func (d *dev) cli(t *testing.T, args ...string) string { return cli(t, d.url, args...) }

// placement is what `nats kv get PLACEMENTS vm.<vm>` shows.
type placement struct {
	VMID     string `json:"vmId"`
	ServerID string `json:"serverId"`
	Tenant   string `json:"tenant"`
	Role     string `json:"role"`
	Phase    string `json:"phase"`
	Fence    uint64 `json:"fence"`
	Request  struct{ Source, ID string }
}

func (d *dev) ready(t *testing.T, vm string) placement {
	t.Helper()
	awaitKey(t, d.js, "PLACEMENTS", "vm."+vm, 20*time.Second, func(p placement) error {
		if p.Phase != "ready" {
			return fmt.Errorf("phase %s", p.Phase)
		}
		return nil
	})
	var p placement
	if err := json.Unmarshal([]byte(d.cli(t, "kv", "get", "PLACEMENTS", "vm."+vm, "--raw")), &p); err != nil {
		t.Fatal(err)
	}
	return p
}

// title is the server's own record of what arrived in the demo application.
func (d *dev) title(t *testing.T, session, part string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, d.demo+"/api/state?run="+session, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	var state struct {
		Parts map[string]struct{ Title string }
	}
	if err := json.NewDecoder(resp.Body).Decode(&state); err != nil {
		return ""
	}
	return state.Parts[part].Title
}

// claims counts the result subjects of a sandbox.
func (d *dev) claims(t *testing.T, vm string) int {
	t.Helper()
	s, err := d.js.Stream(t.Context(), "RESULTS")
	if err != nil {
		t.Fatal(err)
	}
	info, err := s.Info(t.Context(), jetstream.WithSubjectFilter("sandbox.*."+vm+".result.*"))
	if err != nil {
		t.Fatal(err)
	}
	return len(info.State.Subjects)
}

// The bus is the product's face: all of it with the stock nats CLI, against
// `berth dev` and a real browser.
func TestEverythingWithTheNATSCLI(t *testing.T) {
	t.Parallel()
	d := startDev(t)

	// What happens is heard live …
	heard := start(t, filepath.Join(bin, "nats"), nil, "--server", d.url, "sub", "event.>")
	heard.until(10*time.Second, true, "Subscribing on event.>")

	// … while a structured and a binary event each create a sandbox, the latter
	// with headers in mixed case.
	d.cli(t, "pub", "request.default.sandbox.create", `{"specversion":"1.0","id":"s1","source":"/e2e","type":"berth.sandbox.create.v1","data":{"vmId":"structured"}}`)
	d.cli(t, "pub", "request.default.sandbox.create", "-H", "ce-specversion:1.0", "-H", "Ce-Id:b1", "-H", "CE-Source:/e2e", "-H", "ce-type:berth.sandbox.create.v1",
		"-H", "content-type:application/json", `{"vmId":"binary"}`)
	box := d.ready(t, "structured")
	if box.VMID != "structured" || box.ServerID != "playwright-01" || box.Tenant != "default" || box.Role != "default" || box.Fence == 0 || box.Request.Source != "/e2e" || box.Request.ID != "s1" {
		t.Errorf("the record: %+v", box)
	}
	if b := d.ready(t, "binary"); b.Request.ID != "b1" {
		t.Errorf("the record of the binary event: %+v", b)
	}
	heard.until(10*time.Second, true, `Received on "event.default.structured.ready"`)
	heard.until(10*time.Second, true, `Received on "event.default.binary.ready"`)

	type view struct {
		ID, Health, Admin string
		Used              int
	}
	want := view{"playwright-01", "healthy", "active", 2}
	awaitKey(t, d.js, "SERVERS", "playwright-01", 10*time.Second, func(v view) error {
		if v != want {
			return fmt.Errorf("%+v", v)
		}
		return nil
	})
	var shown view
	if err := json.Unmarshal([]byte(d.cli(t, "kv", "get", "SERVERS", "playwright-01", "--raw")), &shown); err != nil || shown != want {
		t.Errorf("SERVERS shows %+v, %v", shown, err)
	}

	// A published act clicks, whether the publisher knows the server or not.
	act := func(id, vm, session string) string {
		return fmt.Sprintf(`{"specversion":"1.0","id":%q,"source":"/e2e","type":"berth.command.act.v1","data":{%s"actions":[{"type":"open","target":"%s/events?run=%s"},{"type":"click","x":160,"y":254}],"observe":true}}`, id, vm, d.demo, session)
	}
	d.cli(t, "pub", "sandbox.playwright-01.structured.act", act("a1", "", "direct"))
	d.cli(t, "pub", "request.default.sandbox.act", act("a2", `"vmId":"binary",`, "forwarded"))
	for _, session := range []string{"direct", "forwarded"} {
		eventually(t, 20*time.Second, session+" act to click", func() error {
			if got := d.title(t, session, "events"); !strings.HasPrefix(got, "events: click=1 ") {
				return fmt.Errorf("%q", got)
			}
			return nil
		})
	}
	heard.until(10*time.Second, true, `Received on "event.default.binary.finished"`)

	// The results, and the pictures that they name.
	await(t, d.js, "RESULTS", "sandbox.playwright-01.structured.result."+events.Token("/e2e", "a1"), 10*time.Second, func(data []byte) error {
		// The click is on the page before the act's result, which names its
		// picture, is stored.
		if !strings.Contains(string(data), `"type":"berth.command.finished.v1"`) {
			return fmt.Errorf("%s", data)
		}
		return nil
	})
	// `stream view` pages, and wants a terminal for it.
	results, code := run(t, "script", "-qec", fmt.Sprintf("%s --server %s stream view RESULTS 100", filepath.Join(bin, "nats"), d.url), "/dev/null")
	if code != 0 || !strings.Contains(results, `"type":"berth.command.finished.v1"`) || !strings.Contains(results, `"commandId":"a1"`) {
		t.Fatalf("stream view: exit %d: %s", code, tail(results, 5))
	}
	_, rest, found := strings.Cut(results, `"object":"structured/`)
	if !found {
		t.Fatalf("no picture in RESULTS:\n%s", results)
	}
	object, _, _ := strings.Cut(rest, `"`)
	file := filepath.Join(t.TempDir(), "frame.png")
	d.cli(t, "object", "get", "FRAMES", "structured/"+object, "-O", file, "--no-progress")
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if img, err := png.Decode(f); err != nil || img.Bounds().Dx() != 1280 || img.Bounds().Dy() != 800 {
		t.Errorf("the frame: %v", err)
	}

	// The person's tool does the same; who interrupts an act cancels it.
	if got := mustBerth(t, "act", "binary", `[{"type":"move","x":7,"y":9},{"type":"cursor"}]`, "--server", d.url); !strings.Contains(got, `1  ok  {"x":7,"y":9}`) {
		t.Errorf("berth act: %s", got)
	}
	seen := filepath.Join(t.TempDir(), "seen.png")
	if got := mustBerth(t, "observe", "binary", "--out", seen, "--server", d.url); !strings.Contains(got, "1280×800") {
		t.Errorf("berth observe: %s", got)
	}
	if raw, err := os.ReadFile(seen); err != nil || http.DetectContentType(raw) != "image/png" {
		t.Errorf("berth observe --out: %v", err)
	}
	if got, code := berth(t, "act", "binary", `{"type":"click","x":5000,"y":1}`, "--server", d.url); code != 1 || !strings.Contains(got, "rejected, outOfRange") {
		t.Errorf("berth act outside the display: exit %d, %s", code, got)
	}
	claims := d.claims(t, "binary")
	long := start(t, program("berth"), nil, "act", "binary", `{"type":"wait","seconds":300}`, "--server", d.url)
	eventually(t, 10*time.Second, "the long act to begin", func() error {
		if n := d.claims(t, "binary"); n == claims {
			return fmt.Errorf("%d claims", n)
		}
		return nil
	})
	if err := syscall.Kill(-long.cmd.Process.Pid, syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if code := long.wait(10 * time.Second); code == 0 {
		t.Error("an interrupted act exits 0")
	}
	if got := mustBerth(t, "act", "binary", `{"type":"cursor"}`, "--timeout", "30s", "--server", d.url); !strings.Contains(got, "ok") {
		t.Errorf("berth act after the interrupted one: %s", got)
	}

	// A finished loop is replayed from LOOPS in its original timing.
	script := filepath.Join(t.TempDir(), "waits.json")
	if err := os.WriteFile(script, []byte(`[{"type":"wait","seconds":1},{"type":"wait","seconds":1}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	out := mustBerth(t, "run", "--server", d.url, "--script", script, "--out", t.TempDir())
	_, rest, _ = strings.Cut(out, "loop ")
	loop, _, _ := strings.Cut(rest, ":")
	var journal []struct {
		Time time.Time
		Name string
	}
	for line := range strings.Lines(mustBerth(t, "replay", loop, "--json", "--server", d.url)) {
		journal = append(journal, struct {
			Time time.Time
			Name string
		}{})
		if err := json.Unmarshal([]byte(line), &journal[len(journal)-1]); err != nil {
			t.Fatal(err)
		}
	}
	if len(journal) < 8 || journal[len(journal)-1].Name != "finished" {
		t.Fatalf("the journal: %+v", journal)
	}
	took := journal[len(journal)-1].Time.Sub(journal[0].Time)
	d.cli(t, "consumer", "add", "LOOPS", "again", "--pull", "--ephemeral", "--filter", "loop.default."+loop+".>", "--deliver", "all", "--replay", "original", "--ack", "none", "--defaults")
	began := time.Now()
	replayed := d.cli(t, "consumer", "next", "LOOPS", "again", "--count", fmt.Sprint(len(journal)))
	if again := time.Since(began); again < took*8/10 || again > took+5*time.Second {
		t.Errorf("replayed in %s, it took %s", again, took)
	}
	if n := strings.Count(replayed, "subj: loop.default."+loop+"."); n != len(journal) {
		t.Errorf("%d entries replayed, want %d", n, len(journal))
	}

	d.cli(t, "pub", "request.default.sandbox.kill", `{"specversion":"1.0","id":"k1","source":"/e2e","type":"berth.sandbox.kill.v1","data":{"vmId":"structured"}}`)
	heard.until(20*time.Second, true, `Received on "event.default.structured.killed"`)
}

// An unused browser is paused: its process ends, and a resume finds its page. So
// is one that is paused by command, and a kill ends it.
func TestIdleBrowserIsPaused(t *testing.T) {
	t.Parallel()
	d := startDev(t)
	heard := start(t, filepath.Join(bin, "nats"), nil, "--server", d.url, "sub", "event.>")
	heard.until(10*time.Second, true, "Subscribing on event.>")
	pub := func(subject, id, typ, data string) {
		d.cli(t, "pub", subject, fmt.Sprintf(`{"specversion":"1.0","id":%q,"source":"/e2e","type":"berth.%s.v1","data":%s}`, id, typ, data))
	}
	ended := func(id, outcome, part string) {
		t.Helper()
		await(t, d.js, "RESULTS", "sandbox.playwright-01.idle.result."+events.Token("/e2e", id), 60*time.Second, func(data []byte) error {
			if !strings.Contains(string(data), `"type":"berth.command.finished.v1"`) {
				return fmt.Errorf("%s", data)
			}
			if !strings.Contains(string(data), `"outcome":"`+outcome+`"`) || !strings.Contains(string(data), part) {
				t.Errorf("%s: %s; want %s, and in it %q", id, data, outcome, part)
			}
			return nil
		})
	}
	pub("request.default.sandbox.create", "c1", "sandbox.create", `{"vmId":"idle","requires":["pause","snapshot"],"idleTimeoutSeconds":12,"idlePolicy":"pause"}`)
	d.ready(t, "idle")
	page := d.demo + "/events?run=idle"
	pub("sandbox.playwright-01.idle.act", "a1", "command.act", fmt.Sprintf(`{"actions":[{"type":"open","target":%q}]}`, page))
	ended("a1", "ok", "")
	browsers := filepath.Join(d.dir, "*", "playwright", "*", "browsers", "*")
	heard.until(60*time.Second, true, `Received on "event.default.idle.paused"`)
	saved, err := filepath.Glob(filepath.Join(browsers, "paused.json"))
	if err != nil || len(saved) != 1 {
		t.Fatalf("saved state: %v, %v", saved, err)
	}
	box := filepath.Dir(saved[0]) // beside it there are spares
	eventually(t, 20*time.Second, "the browser to end", func() error {
		if n := processesWith(t, box); n > 0 {
			return fmt.Errorf("%d processes", n)
		}
		return nil
	})
	pub("sandbox.playwright-01.idle.act", "a2", "command.act", `{"actions":[{"type":"cursor"}]}`)
	ended("a2", "rejected", "resume it first")
	pub("sandbox.playwright-01.idle.resume", "r1", "command.resume", `{}`)
	ended("r1", "ok", "")
	pub("sandbox.playwright-01.idle.observe", "o1", "command.observe", `{}`)
	ended("o1", "ok", page)
	if n := processesWith(t, box); n == 0 {
		t.Error("no browser runs; the check above proved nothing")
	}
	template := strings.TrimSpace(mustBerth(t, "snapshot", "idle", "--server", d.url))
	if i := strings.Index(template, "snapshot-"); i >= 0 {
		template = strings.Fields(template[i:])[0]
	}
	pub("request.default.sandbox.create", "c2", "sandbox.create", fmt.Sprintf(`{"vmId":"copy","template":%q}`, template))
	d.ready(t, "copy")
	if got := mustBerth(t, "act", "copy", `{"type":"cursor"}`, "--timeout", "30s", "--server", d.url); !strings.Contains(got, "ok") {
		t.Errorf("berth act in a copy: %s", got)
	}
	pub("sandbox.playwright-01.idle.pause", "p1", "command.pause", `{}`)
	ended("p1", "ok", "")
	pub("request.default.sandbox.kill", "k1", "sandbox.kill", `{"vmId":"idle"}`)
	heard.until(20*time.Second, true, `Received on "event.default.idle.killed"`)
	if _, err := os.Stat(box); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its directory: %v", err)
	}
}

// SIGTERM ends `berth dev` with 0, its temporary data and every browser.
func TestDevLeavesNothing(t *testing.T) {
	t.Parallel()
	d := startDev(t)
	d.cli(t, "pub", "request.default.sandbox.create", `{"specversion":"1.0","id":"c1","source":"/e2e","type":"berth.sandbox.create.v1","data":{"vmId":"left"}}`)
	d.ready(t, "left")
	if n := processesWith(t, d.dir); n == 0 {
		t.Fatal("no browser runs; the check below would prove nothing")
	}
	if code := d.terminate(); code != 0 {
		t.Errorf("exit %d after SIGTERM", code)
	}
	eventually(t, 5*time.Second, "every browser to end", func() error {
		if n := processesWith(t, d.dir); n > 0 {
			return fmt.Errorf("%d processes are left", n)
		}
		return nil
	})
	if left, err := filepath.Glob(d.dir + "/berth-*"); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

// So it is when it is killed: the browsers do not outlive it.
func TestDevKilledLeavesNoBrowser(t *testing.T) {
	t.Parallel()
	d := startDev(t)
	d.cli(t, "pub", "request.default.sandbox.create", `{"specversion":"1.0","id":"c1","source":"/e2e","type":"berth.sandbox.create.v1","data":{"vmId":"left"}}`)
	d.ready(t, "left")
	d.kill()
	eventually(t, 20*time.Second, "every browser to end", func() error {
		if n := processesWith(t, d.dir); n > 0 {
			return fmt.Errorf("%d processes are left", n)
		}
		return nil
	})
}

// processesWith counts the processes, other than this one, that name dir on
// their command line.
func processesWith(t *testing.T, dir string) int {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, path := range files {
		if raw, err := os.ReadFile(path); err == nil && strings.Contains(string(raw), dir) && filepath.Base(filepath.Dir(path)) != fmt.Sprint(os.Getpid()) {
			n++
		}
	}
	return n
}

// A port that somebody has is named, before anything else is started.
func TestDevOnATakenPort(t *testing.T) {
	t.Parallel()
	d := startDev(t)
	out, code := berth(t, "dev", "--nats-addr", strings.TrimPrefix(d.url, "nats://"))
	if code != 1 || !strings.Contains(out, "address already in use") {
		t.Errorf("exit %d: %s", code, out)
	}
}
