package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"berth/internal/events"
	"berth/internal/looprunner"
)

// The main job on a real desktop: an editor, a file, a browser.
func TestRunOnADesktop(t *testing.T) {
	t.Parallel()
	out, code := berth(t, "run", "--desktop", "--script", "../examples/desktop.json", "--out", t.TempDir())
	if code != 0 || !strings.Contains(out, "on desktop-01, 1280×800") || !strings.Contains(out, "succeeded after") {
		t.Errorf("exit %d:\n%s", code, out)
	}
}

// Desktops of the all-in-one end with it, also when it is killed.
func TestKilledStackLeavesNoDesktop(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	script := filepath.Join(dir, "long.json")
	if err := os.WriteFile(script, []byte(`{"sandbox":{"requires":["desktop"]},"script":[{"type":"cursor"},{"type":"wait","seconds":60}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	r := start(t, program("berth"), []string{"TMPDIR=" + dir}, "run", "--desktop", "--script", script, "--out", dir)
	r.until(60*time.Second, true, "   1  cursor")
	boxes, err := filepath.Glob(filepath.Join(dir, "berth-*", "desktop", "*", "*", "agent.sock"))
	if err != nil || len(boxes) == 0 {
		t.Fatalf("no desktop is to be found below %s: %v", dir, err)
	}
	if len(desktopsBelow(t, dir)) == 0 {
		t.Fatal("no process of a desktop is to be found")
	}
	r.kill()
	eventually(t, 10*time.Second, "every desktop to end", func() error {
		if left := desktopsBelow(t, dir); len(left) > 0 {
			return fmt.Errorf("processes %v", left)
		}
		return nil
	})
}

// A loop of 30 acts on a real desktop outlives a kill -9 of its runner, its
// server's worker and the scheduler, all at once and in the middle of an act:
// the page saw every click once, and none of them is unknown, since the server
// of desktops remembers what it did.
func TestALoopOnADesktopOutlivesEverything(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	t.Cleanup(func() {
		for _, pid := range desktopsBelow(t, dir) {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				t.Error(err)
			}
		}
	})
	const key = "a-key-of-the-e2e-tests"
	server := start(t, program("sandboxd"), []string{"SANDBOXD_API_KEY=" + key}, "--addr", "127.0.0.1:0", "--state-dir", filepath.Join(dir, "state"), "--warm", "0")
	server.until(30*time.Second, true, "msg=serving")
	url := regexp.MustCompile(`url=(http://\S+)`).FindStringSubmatch(server.output())[1]
	f := provisioned(t, "desktop-01", "desktop-02")
	f.startPairs(t, fmt.Sprintf(`SANDBOX_SERVERS_JSON=[{"id":"desktop-01","url":%q,"apiKey":%q}]`, url, key))
	f.healthy(t, "desktop-01")

	const page = `<!doctype html><title>quay: 0 moored</title><body style="margin:0"><button style="position:fixed;inset:0;width:100%;height:100%" ` +
		`onclick="document.title='quay: '+(++n)+' moored'">Moor</button><script>n=0</script>`
	items := []any{
		map[string]any{"type": "run", "argv": []string{"sh", "-c", "cat > quay.html"}, "stdin": page, "seconds": 5},
		map[string]any{"type": "open", "target": "quay.html"},
		map[string]any{"check": "title", "contains": "quay: 0 moored", "within": 30},
	}
	const clicks = 30
	for range clicks {
		items = append(items, map[string]any{"type": "click", "x": 640, "y": 500}, map[string]any{"type": "wait", "seconds": 0.2})
	}
	items = append(items, map[string]any{"check": "title", "contains": fmt.Sprintf("quay: %d moored", clicks), "within": 10})
	raw, err := json.Marshal(map[string]any{"goal": "moor 30 times, whatever dies", "sandbox": map[string]any{"vmId": "quay", "requires": []string{"desktop"}},
		"limits": map[string]any{"seconds": 180}, "script": items})
	if err != nil {
		t.Fatal(err)
	}
	script := filepath.Join(dir, "moor.json")
	if err := os.WriteFile(script, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	r := start(t, program("berth"), nil, "run", "--server", f.url("operator"), "--script", script, "--out", dir)
	r.until(90*time.Second, true, "  10  wait")
	loop := strings.TrimSuffix(strings.Fields(r.line("loop "))[0], ":")
	_, js := f.connect(t, "operator")
	for e, err := range looprunner.Follow(t.Context(), js, "default", loop) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Name != events.LoopDecidedName || time.Since(e.Stored) > time.Second {
			continue
		}
		for _, name := range []string{e.Head.Runner, f.servers(t)["desktop-01"].Worker, f.leader(t)} {
			f.named(t, name).kill()
		}
		break
	}
	if code := r.wait(120 * time.Second); code != 0 {
		t.Fatalf("the loop did not outlive the crashes: exit %d:\n%s", code, tail(r.output(), 30))
	}
	acts, runners := 0, map[string]bool{}
	for e, err := range looprunner.Follow(t.Context(), js, "default", loop) {
		if err != nil {
			t.Fatal(err)
		}
		runners[e.Head.Runner] = true
		if e.Name != events.LoopActedName {
			continue
		}
		var v events.LoopActed
		if err := e.Decode(&v); err != nil {
			t.Fatal(err)
		}
		if acts++; v.Outcome != "ok" {
			t.Errorf("act %s ended %s", v.Command.ID, v.Outcome)
		}
	}
	if acts != 2*clicks+2 || len(runners) < 2 {
		t.Errorf("%d acts by %d runners, want %d by more than one", acts, len(runners), 2*clicks+2)
	}
	f.noViolations(t)
}

// shortDir is a directory with a short path, since sockets are below it.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "e2e")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// desktopsBelow lists the processes of desktops whose log is below dir.
func desktopsBelow(t *testing.T, dir string) []int {
	t.Helper()
	logs, err := filepath.Glob("/proc/[0-9]*/fd/2")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, log := range logs {
		if target, err := os.Readlink(log); err != nil || !strings.HasPrefix(target, dir+"/") || !strings.HasSuffix(target, "/log") {
			continue
		}
		pid, err := strconv.Atoi(strings.Split(log, "/")[2])
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	return pids
}
