package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The main job with nothing running: exit 0, progress per step, pictures and
// the journal where it says.
func TestRunDoesTheMainJob(t *testing.T) {
	t.Parallel()
	out := t.TempDir()
	printed, code := berth(t, "run", "--script", "../examples/main.json", "--out", out)
	if code != 0 {
		t.Fatalf("exit %d:\n%s", code, printed)
	}
	for _, want := range []string{`(?m)^ +\d+  double click 424,727 +ok +\d+ ms  double-click crate 60$`, `(?m)^succeeded after \d+ steps and [\d.]+ s$`, `look at   ` + regexp.QuoteMeta(out)} {
		if !regexp.MustCompile(want).MatchString(printed) {
			t.Errorf("the output lacks %s:\n%s", want, printed)
		}
	}
	if strings.ContainsRune(printed, '\r') || strings.ContainsRune(printed, '\x1b') {
		t.Error("a bar was drawn where there is no terminal")
	}
	dirs, err := filepath.Glob(out + "/*")
	if err != nil || len(dirs) != 1 {
		t.Fatalf("output directories %v %v", dirs, err)
	}
	raw, err := os.ReadFile(filepath.Join(dirs[0], "loop.json"))
	if err != nil {
		t.Fatal(err)
	}
	var loop struct {
		Loop, Outcome string
		Frames        []struct{ File, Object string }
		Journal       []struct {
			Name string
			Time time.Time
		}
	}
	if err := json.Unmarshal(raw, &loop); err != nil {
		t.Fatal(err)
	}
	if loop.Outcome != "succeeded" || filepath.Base(dirs[0]) != loop.Loop || len(loop.Journal) < 50 || loop.Journal[len(loop.Journal)-1].Name != "finished" || len(loop.Frames) < 10 {
		t.Errorf("loop.json: %s, %s, %d entries, %d frames", loop.Loop, loop.Outcome, len(loop.Journal), len(loop.Frames))
	}
	for _, f := range loop.Frames {
		if info, err := os.Stat(filepath.Join(dirs[0], f.File)); err != nil || info.Size() < 1000 || !regexp.MustCompile(`^\d{3}-[a-z0-9-]+\.png$`).MatchString(f.File) {
			t.Errorf("frame %q: %v", f.File, err)
		}
	}
}

// The other examples, at the same time on one stack.
func TestExamples(t *testing.T) {
	t.Parallel()
	d := startDev(t)
	for _, name := range []string{"form", "draganddrop"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			out, code := berth(t, "run", "--server", d.url, "--script", "../examples/"+name+".json", "--out", t.TempDir())
			if code != 0 || !strings.Contains(out, "succeeded after") {
				t.Errorf("exit %d:\n%s", code, out)
			}
		})
	}
}

// A person speaks to a running loop, which hears it, and stops it; what cannot
// be asked is refused with the reason.
func TestSpeakingToALoop(t *testing.T) {
	t.Parallel()
	d := startDev(t)
	dir := t.TempDir()
	script := filepath.Join(dir, "long.json")
	if err := os.WriteFile(script, []byte(`[{"type":"cursor"},{"type":"wait","seconds":1},{"type":"wait","seconds":60}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	r := start(t, program("berth"), nil, "run", "--server", d.url, "--script", script, "--out", dir)
	r.until(60*time.Second, true, "   1  cursor")
	loop := strings.TrimSuffix(strings.Fields(r.line("loop "))[0], ":")
	for _, ask := range [][]string{{"pause", loop, "for lunch"}, {"message", loop, "how is it going?"}, {"resume", loop}, {"stop", loop, "enough"}} {
		if out := mustBerth(t, append([]string{"loop", "--server", d.url}, ask...)...); !strings.Contains(out, ask[0]+" is in the journal of loop "+loop) {
			t.Errorf("%v: %s", ask, out)
		}
	}
	if code := r.wait(60 * time.Second); code != 1 || !strings.Contains(r.output(), "stopped on request: enough") {
		t.Errorf("exit %d:\n%s", code, r.output())
	}
	for _, gone := range []string{loop, "nosuch"} {
		if out, code := berth(t, "loop", "stop", gone, "--server", d.url); code != 1 || !strings.Contains(out, "rejected: ") {
			t.Errorf("%s: exit %d: %s", gone, code, out)
		}
	}
}

// A check that does not hold fails the run, which says where and why.
func TestRunSaysWhatFailed(t *testing.T) {
	t.Parallel()
	script := filepath.Join(t.TempDir(), "wrong.json")
	if err := os.WriteFile(script, []byte(`{"goal":"fail honestly","script":[
		{"type":"open","target":"{{demo}}/form"},
		{"check":"title","equals":"form: nothing yet"},
		{"type":"click","x":180,"y":692,"name":"send"},
		{"check":"title","equals":"form: all is well","within":0.5},
		{"type":"click","x":1,"y":1}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	out, code := berth(t, "run", "--script", script, "--out", t.TempDir())
	if code != 1 {
		t.Fatalf("exit %d, want 1:\n%s", code, out)
	}
	for _, want := range []string{"check title                         failed", "want equal to \"form: all is well\", got \"form: sent", "failed after 2 steps", "checkFailed", "failed at step 3, check title"} {
		if !strings.Contains(out, want) {
			t.Errorf("the output lacks %q:\n%s", want, out)
		}
	}
}

// Ctrl-C at a terminal goes to the whole process group: the loop is stopped
// and its sandbox with it, the journal is saved, and no browser is left.
func TestRunInterrupted(t *testing.T) {
	t.Parallel()
	dir, out := t.TempDir(), t.TempDir()
	script := filepath.Join(dir, "long.json")
	if err := os.WriteFile(script, []byte(`[{"type":"cursor"},{"type":"wait","seconds":1},{"type":"wait","seconds":60}]`), 0o600); err != nil {
		t.Fatal(err)
	}
	r := start(t, program("berth"), []string{"TMPDIR=" + dir}, "run", "--script", script, "--out", out)
	r.until(60*time.Second, true, "   2  wait 1 s")
	if err := syscall.Kill(-r.cmd.Process.Pid, syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if code := r.wait(30 * time.Second); code != 130 {
		t.Errorf("exit %d, want 130", code)
	}
	if !strings.Contains(r.output(), "stopped after") {
		t.Errorf("it does not say that it stopped:\n%s", r.output())
	}
	if files, err := filepath.Glob(out + "/*/loop.json"); err != nil || len(files) != 1 {
		t.Errorf("no journal: %v %v", files, err)
	}
	eventually(t, 5*time.Second, "every browser to end", func() error {
		if n := processesWith(t, dir); n > 0 {
			return os.ErrExist
		}
		return nil
	})
}
