package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sys/unix"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/devstack"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/natsd"
	"berth/internal/replay"
	"berth/internal/telemetry"
)

// recordedServer has the journal of one short loop: two turns, whose second
// picture has expired.
func recordedServer(t *testing.T) (url string) {
	t.Helper()
	srv, err := natsd.Start(natsd.Options{StoreDir: t.TempDir(), Addr: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Shutdown)
	nc, err := nats.Connect("", srv.InProcess())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := bus.Ensure(t.Context(), js, 1); err != nil {
		t.Fatal(err)
	}
	frames, err := js.ObjectStore(t.Context(), kv.BucketFrames)
	if err != nil {
		t.Fatal(err)
	}
	img := image.NewPaletted(image.Rect(0, 0, 640, 400), color.Palette{color.RGBA{0, 0, 255, 255}})
	var buf bytes.Buffer
	if err := png.Encode(&buf, img); err != nil {
		t.Fatal(err)
	}
	if _, err := frames.PutBytes(t.Context(), "v/first", buf.Bytes()); err != nil {
		t.Fatal(err)
	}
	x, y := 100, 200
	seen := func(object, title string) computer.Observation {
		return computer.Observation{Screenshot: computer.Picture{Object: object, MediaType: "image/png", Width: 640, Height: 400}, Title: title, URL: "http://quay.example/"}
	}
	after := seen("v/gone", "the gate\x1b[2J is open")
	head := events.LoopEntry{LoopID: "gate", Step: 1, At: time.Now()}
	for _, e := range []struct {
		name string
		data any
	}{
		{events.LoopStartedName, events.LoopStarted{LoopEntry: head, Tenant: "default", VMID: "v", Start: events.LoopStart{Goal: "open the gate", Model: json.RawMessage(`{"name":"bus"}`)}}},
		{events.LoopSandboxName, events.LoopSandbox{LoopEntry: head, VMID: "v", ServerID: "s-01", Display: computer.Display{Width: 640, Height: 400}}},
		{events.LoopObservedName, events.LoopObserved{LoopEntry: head, Observation: seen("v/first", "the gate is shut")}},
		{events.LoopThinkingName, events.LoopThinking{LoopEntry: head}},
		{events.LoopDecidedName, events.LoopDecided{LoopEntry: head, Label: "turn the wheel", Actions: []computer.Action{{Type: computer.Click, X: &x, Y: &y, Count: 1}}, Usage: events.LoopUsage{InputTokens: 70, OutputTokens: 7}}},
		{events.LoopActedName, events.LoopActed{LoopEntry: head, Outcome: computer.OK, Actions: []computer.ActionResult{{Outcome: computer.OK}}, Observation: &after}},
		{events.LoopThinkingName, events.LoopThinking{LoopEntry: head}},
		{events.LoopDecidedName, events.LoopDecided{LoopEntry: head, Done: true, Label: "it is open"}},
		{events.LoopFinishedName, events.LoopFinished{LoopEntry: head, Outcome: events.LoopSucceeded, Steps: 1}},
	} {
		ev, err := events.New(events.LoopType(e.name), events.SourceLoopRunner, e.name, e.data)
		if err != nil {
			t.Fatal(err)
		}
		msg, err := events.NewMessage(t.Context(), events.LoopSubject("default", "gate", e.name), ev)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := js.PublishMsg(t.Context(), msg); err != nil {
			t.Fatal(err)
		}
	}
	// What a stranger put there stops nobody.
	if _, err := js.Publish(t.Context(), events.LoopSubject("default", "gate", "nonsense"), []byte("{")); err != nil {
		t.Fatal(err)
	}
	return srv.URL()
}

func berth(ctx context.Context, args ...string) (stdout, stderr string, code int) {
	var out, errs bytes.Buffer
	code = perform(ctx, args, strings.NewReader(""), &out, &errs)
	return out.String(), errs.String(), code
}

func TestReplayWithoutATerminal(t *testing.T) {
	t.Parallel()
	url := recordedServer(t)
	out, _, code := berth(t.Context(), "replay", "gate", "--server", url)
	if code != 0 || !strings.Contains(out, "click 100,200") || !strings.Contains(out, "succeeded after 1 steps") || strings.ContainsRune(out, '\x1b') {
		t.Errorf("exit %d:\n%s", code, out)
	}
	out, _, code = berth(t.Context(), "replay", "gate", "--json", "--server", url)
	if lines := strings.Split(strings.TrimSpace(out), "\n"); code != 0 || len(lines) != 9 || !json.Valid([]byte(lines[4])) {
		t.Errorf("exit %d:\n%s", code, out)
	}
	dir := t.TempDir()
	out, _, code = berth(t.Context(), "replay", "gate", "--out", dir, "--server", url)
	if files, err := filepath.Glob(dir + "/*.png"); code != 0 || err != nil || len(files) != 1 || !strings.Contains(out, "1 pictures in "+dir+"; 1 have expired") {
		t.Errorf("exit %d, files %v %v:\n%s", code, files, err, out)
	}
	if _, errs, code := berth(t.Context(), "replay", "nothing", "--server", url); code != 1 || !strings.Contains(errs, `no journal of a loop "nothing"`) {
		t.Errorf("exit %d: %s", code, errs)
	}
}

func TestReplayExportsAPage(t *testing.T) {
	t.Parallel()
	url, file := recordedServer(t), filepath.Join(t.TempDir(), "gate.html")
	if out, errs, code := berth(t.Context(), "replay", "gate", "--html", file, "--server", url); code != 0 || !strings.Contains(out, "2 turns") {
		t.Fatalf("exit %d: %s%s", code, out, errs)
	}
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`src="data:image/png;base64,`, `cx="100" cy="200"`, "turn the wheel", "FRAMES keeps pictures for 24 hours", "the gate␛[2J is open"} {
		if !bytes.Contains(raw, []byte(want)) {
			t.Errorf("the page lacks %q", want)
		}
	}
	if files, err := os.ReadDir(filepath.Dir(file)); err != nil || len(files) != 1 {
		t.Errorf("it left %v %v beside the page", files, err)
	}
	if _, errs, code := berth(t.Context(), "replay", "gate", "--html", filepath.Join(file, "no", "such"), "--server", url); code != 2 || !strings.Contains(errs, "not a directory") {
		t.Errorf("exit %d: %s", code, errs)
	}
}

// pty makes a terminal of 100×40 characters.
func pty(t *testing.T) (master, slave *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = master.Close() })
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = slave.Close() })
	if err := unix.IoctlSetWinsize(int(slave.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: 40, Col: 100}); err != nil {
		t.Fatal(err)
	}
	return master, slave
}

// In a terminal it shows one turn at a time, moves by keys, shows and writes
// pictures, and leaves the terminal as it was.
func TestReplayStepsInATerminal(t *testing.T) {
	url, dir := recordedServer(t), t.TempDir()
	t.Setenv("TERM", "xterm-256color")
	t.Setenv("COLORTERM", "truecolor")
	t.Setenv("NO_COLOR", "")
	master, slave := pty(t)
	was, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var shown bytes.Buffer
	more := make(chan struct{}, 1) // the terminal has shown something
	go func() {                    // ends with the terminal
		buf := make([]byte, 4096)
		for {
			n, err := master.Read(buf)
			mu.Lock()
			shown.Write(buf[:n])
			mu.Unlock()
			select {
			case more <- struct{}{}:
			default:
			}
			if err != nil {
				return
			}
		}
	}()
	ended := make(chan int, 1)
	var errs bytes.Buffer
	go func() {
		ended <- perform(t.Context(), []string{"replay", "gate", "--out", dir, "--server", url}, slave, slave, &errs)
	}()
	// expect waits until what came since the last key shows all of it.
	expect := func(key string, want ...string) string {
		t.Helper()
		if key != "" {
			mu.Lock()
			shown.Reset()
			mu.Unlock()
			if _, err := master.WriteString(key); err != nil {
				t.Fatal(err)
			}
		}
		deadline := time.NewTimer(30 * time.Second)
		defer deadline.Stop()
		for {
			mu.Lock()
			text := shown.String()
			mu.Unlock()
			missing := ""
			for _, w := range append(want, "q: quit") {
				if !strings.Contains(text, w) {
					missing = w
				}
			}
			if missing == "" {
				return text
			}
			select {
			case <-more:
			case <-deadline.C:
				t.Fatalf("after %q it does not show %q:\n%q\n%s", key, missing, text, errs.String())
			}
		}
	}
	first := expect("", "turn 1 of 2", "click 100,200", "turn the wheel", "the gate is shut", "FRAMES v/first", "tokens: 70 in, 7 out")
	if !strings.Contains(first, "\033[38;2;0;0;255m\033[48;2;0;0;255m▀") {
		t.Error("there is no preview of the blue picture")
	}
	expect("w", "written to "+filepath.Join(dir, "gate-001.png"))
	second := expect("\033[C", "turn 2 of 2", "it is open", "the gate [2J is open", "expired: pictures are kept for 24 hours")
	if strings.Contains(second, "gate\033[2J") {
		t.Error("a title moves the cursor")
	}
	expect("n", "the end, after 2 turns", "succeeded after 1 steps")
	expect("p", "turn 2 of 2")
	expect("g", "turn 1 of 2")
	expect("G", "the end, after 2 turns")
	expect("\033[D\033[Dn", "turn 2 of 2") // as keys that repeat come
	if _, err := master.WriteString("q"); err != nil {
		t.Fatal(err)
	}
	select {
	case code := <-ended:
		if code != 0 {
			t.Errorf("exit %d: %s", code, errs.String())
		}
	case <-time.After(30 * time.Second):
		t.Fatal("q does not end it")
	}
	if raw, err := os.ReadFile(filepath.Join(dir, "gate-001.png")); err != nil || !bytes.HasPrefix(raw, []byte("\x89PNG")) {
		t.Errorf("the picture that w wrote: %v", err)
	}
	if now, err := unix.IoctlGetTermios(int(slave.Fd()), unix.TCGETS); err != nil || now.Lflag != was.Lflag {
		t.Errorf("the terminal is left in another mode: %v", err)
	}
}

// withStack runs the whole stack with real browsers.
func withStack(t *testing.T, use func(ctx context.Context, s *devstack.Stack)) {
	t.Helper()
	tel, err := telemetry.Setup(t.Context(), telemetry.Config{}, telemetry.Options{Service: "test", Level: slog.LevelError, Out: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	err = devstack.Run(t.Context(), devstack.Options{Servers: 1, NATSAddr: "127.0.0.1:0", DataDir: t.TempDir(), Telemetry: tel}, func(ctx context.Context, s *devstack.Stack) error {
		use(ctx, s)
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

var loopLine = regexp.MustCompile(`(?m)^loop (\S+): `)

// record runs a script and returns its loop's id.
func record(ctx context.Context, t *testing.T, s *devstack.Stack, script string, want int) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "s.json")
	if err := os.WriteFile(file, []byte(script), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	out, errs, code := berth(ctx, "run", "--server", s.NATSURL, "--script", file, "--out", dir)
	m := loopLine.FindStringSubmatch(out)
	if code != want || m == nil {
		t.Fatalf("exit %d, want %d:\n%s%s", code, want, out, errs)
	}
	page, err := os.ReadFile(filepath.Join(dir, m[1], "loop.html"))
	if err != nil || !bytes.Contains(page, []byte("data:image/png;base64,")) {
		t.Errorf("the page beside loop.json: %d bytes, %v", len(page), err)
	}
	return m[1]
}

// A form of the demo application, filled in again from its record on a fresh browser, comes to the
// same; and one whose application has changed does not, and says where.
func TestRerun(t *testing.T) {
	t.Parallel()
	var visits atomic.Int64
	var slow atomic.Bool
	app := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		switch r.URL.Path {
		case "/visits":
			fmt.Fprintf(w, "<title>visit %d</title>", visits.Add(1))
		case "/colours":
			fmt.Fprintf(w, "<title>colours</title><body style='background:%s'>", []string{"red", "green"}[visits.Add(1)%2])
		case "/late":
			delay := 0
			if slow.Load() {
				delay = 1500
			}
			fmt.Fprintf(w, "<title>early</title><script>setTimeout(() => document.title = 'late', %d)</script>", delay)
		}
	}))
	defer app.Close()
	withStack(t, func(ctx context.Context, s *devstack.Stack) {
		rerun := func(loop string, more ...string) (rerunResult, int) {
			t.Helper()
			out, errs, code := berth(ctx, append([]string{"replay", loop, "--rerun", "--json", "--server", s.NATSURL}, more...)...)
			var res rerunResult
			if err := json.Unmarshal([]byte(out), &res); err != nil {
				t.Fatalf("%v; exit %d:\n%s%s", err, code, out, errs)
			}
			return res, code
		}
		raw, err := os.ReadFile("../../examples/form.json")
		if err != nil {
			t.Fatal(err)
		}
		form := record(ctx, t, s, strings.ReplaceAll(string(raw), "{{demo}}", s.DemoURL), 0)
		if res, code := rerun(form, "--settle", "60"); code != 0 || !res.Same || res.Difference != nil || res.Outcome != "succeeded" || res.Steps < 5 {
			t.Errorf("the form again: exit %d, %+v", code, res)
		}

		counted := record(ctx, t, s, fmt.Sprintf(`[{"type":"cursor"},{"type":"open","target":"%s/visits"},{"check":"title","equals":"visit 1"}]`, app.URL), 0)
		res, code := rerun(counted, "--settle", "0.3")
		if code != 1 || res.Same || res.Difference == nil || res.Difference.Step != 3 || res.Difference.Field != "title" || res.Difference.Recorded != `"visit 1"` || res.Difference.Now != `"visit 2"` {
			t.Errorf("another title: exit %d, %+v, %+v", code, res, res.Difference)
		}
		if res, code := rerun(counted, "--compare", "outcome,url", "--settle", "60"); code != 0 || !res.Same {
			t.Errorf("titles not compared: exit %d, %+v", code, res)
		}

		// Pictures count when asked for.
		visits.Store(0)
		coloured := record(ctx, t, s, fmt.Sprintf(`[{"type":"open","target":"%s/colours"},{"check":"title","equals":"colours"},{"type":"cursor"}]`, app.URL), 0)
		if res, code := rerun(coloured, "--settle", "60"); code != 0 || !res.Same {
			t.Errorf("pictures not compared: exit %d, %+v", code, res)
		}
		visits.Store(1)
		if res, code := rerun(coloured, "--compare", "picture", "--settle", "0.2"); code != 1 || res.Difference == nil || res.Difference.Field != "picture" || res.Difference.Step != 2 || !strings.Contains(res.Difference.Now, " % of its pixels differ") {
			t.Errorf("another colour: exit %d, %+v, %+v", code, res, res.Difference)
		}
		visits.Store(0)
		if res, code := rerun(coloured, "--compare", "picture", "--settle", "60"); code != 0 || !res.Same {
			t.Errorf("the same colour: exit %d, %+v, %+v", code, res, res.Difference)
		}

		// A page that is slower today is no difference.
		waited := record(ctx, t, s, fmt.Sprintf(`[{"type":"open","target":"%s/late"},{"check":"title","equals":"late"},{"type":"cursor"}]`, app.URL), 0)
		slow.Store(true)
		if res, code := rerun(waited, "--settle", "30"); code != 0 || !res.Same {
			t.Errorf("a slower page: exit %d, %+v, %+v", code, res, res.Difference)
		}

		// A recorded failure that fails the same way is the same.
		failed := record(ctx, t, s, fmt.Sprintf(`[{"type":"open","target":"%s/late"},{"check":"title","equals":"never","within":0.1}]`, app.URL), 1)
		if res, code := rerun(failed, "--settle", "30"); code != 0 || !res.Same || res.Code != "checkFailed" {
			t.Errorf("a failure again: exit %d, %+v", code, res)
		}
		out, errs, code := berth(ctx, "replay", counted, "--rerun", "--settle", "0.3", "--server", s.NATSURL)
		if code != 1 || !strings.Contains(out, "differs at step 3: title: recorded \"visit 1\", now \"visit ") {
			t.Errorf("exit %d:\n%s%s", code, out, errs)
		}
	})
}

func TestSplitKeys(t *testing.T) {
	for in, want := range map[string]string{"": "", "nn": "n|n", "\033[C\033[C": "\033[C|\033[C", "\033OCq": "\033OC|q", "\033[1~w": "\033[1~|w", "\033": "\033", "\033[": "\033|["} {
		if got := strings.Join(splitKeys(in), "|"); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func TestRerunNeedsTheEnvironment(t *testing.T) {
	o := rerunOptions{on: true}
	if err := o.env.Set("B=2"); err != nil {
		t.Fatal(err)
	}
	story := storyWith(events.SandboxCreate{VMID: "mine", Role: "git", Env: map[string]string{"A": "***", "B": "***"}})
	var usage *usageError
	if _, err := o.start(story); !errors.As(err, &usage) || !strings.Contains(err.Error(), "--env NAME=VALUE for A") {
		t.Errorf("error %v, want one that asks for A", err)
	}
	if err := o.env.Set("A=1"); err != nil {
		t.Fatal(err)
	}
	start, err := o.start(story)
	if err != nil || start.Sandbox.VMID != "" || start.Sandbox.Role != "git" || start.Sandbox.Env["A"] != "1" || start.Sandbox.Env["B"] != "2" {
		t.Errorf("start %+v, %v; want another sandbox with the role and the environment", start.Sandbox, err)
	}
}

func storyWith(box events.SandboxCreate) *replay.Story {
	return &replay.Story{Started: events.LoopStarted{LoopEntry: events.LoopEntry{LoopID: "l"}, Start: events.LoopStart{Sandbox: &box}}}
}
