package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
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
	dir, err := os.MkdirTemp("", "e2e") // a short path, since sockets are below it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
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
	if n := desktopsBelow(t, dir); n == 0 {
		t.Fatal("no process of a desktop is to be found")
	}
	r.kill()
	eventually(t, 10*time.Second, "every desktop to end", func() error {
		if n := desktopsBelow(t, dir); n > 0 {
			return os.ErrExist
		}
		return nil
	})
}

// desktopsBelow counts the first processes of desktops whose log is below dir.
func desktopsBelow(t *testing.T, dir string) int {
	t.Helper()
	logs, err := filepath.Glob("/proc/[0-9]*/fd/2")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, log := range logs {
		if target, err := os.Readlink(log); err == nil && strings.HasPrefix(target, dir+"/berth-") && strings.HasSuffix(target, "/log") {
			n++
		}
	}
	return n
}
