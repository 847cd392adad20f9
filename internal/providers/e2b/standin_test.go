package e2b

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"berth/internal/providers"
)

// testKey has the form of E2B's keys, which the official clients check.
const testKey = "e2b_0123456789abcdef0123456789abcdef01234567"

// standinBinary is the stand-in, built once: the same program that the official
// clients are run against.
var standinBinary string

func TestMain(m *testing.M) {
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue {
		if err := f.Value.Set("4"); err != nil { // the tests wait for other processes most of the time
			panic(err)
		}
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "e2b")
	if err != nil {
		panic(err)
	}
	standinBinary = filepath.Join(dir, "e2bstandin")
	build := exec.Command("go", "build", "-o", standinBinary, "./e2bstandin")
	if out, err := build.CombinedOutput(); err != nil {
		panic(fmt.Sprintf("build the stand-in: %v\n%s", err, out))
	}
	code := m.Run()
	if err := os.RemoveAll(dir); err != nil {
		panic(err)
	}
	return code
}

// standin is a running stand-in.
type standin struct {
	url, state string
	cmd        *exec.Cmd
}

// startStandin starts one that ends with the test.
func startStandin(t testing.TB, args ...string) *standin {
	t.Helper()
	need(t, map[string]string{
		"Xvfb": "xvfb", "startxfce4": "xfce4-session", "xfwm4": "xfwm4", "xfdesktop": "xfdesktop4", "dbus-launch": "dbus-x11", "xdotool": "xdotool", "scrot": "scrot",
		"xclip": "xclip", "xmodmap": "x11-xserver-utils", "xdpyinfo": "x11-utils", "x11vnc": "x11vnc", "websockify": "websockify", "netstat": "net-tools",
		"slirp4netns": "slirp4netns", "xterm": "xterm", "chromium": "chromium",
	})
	state, err := os.MkdirTemp("", "e2")
	if err != nil {
		t.Fatal(err)
	}
	s := &standin{state: state, cmd: exec.Command(standinBinary, append([]string{"--state", state}, args...)...)}
	s.cmd.Env = append(os.Environ(), "E2B_API_KEY="+testKey)
	said := &strings.Builder{}
	s.cmd.Stderr = said
	out, err := s.cmd.StdoutPipe()
	if err == nil {
		err = s.cmd.Start()
	}
	if err != nil {
		t.Fatal(errors.Join(err, os.RemoveAll(state)))
	}
	t.Cleanup(func() {
		if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Errorf("stop the stand-in: %v", err)
		}
		err := s.cmd.Wait()
		if err != nil && s.cmd.ProcessState.ExitCode() >= 0 { // a test may have killed it
			t.Errorf("the stand-in: %v\n%s", err, said)
		}
		if err := os.RemoveAll(state); err != nil {
			t.Error(err)
		}
	})
	line := make(chan string, 1)
	go func() {
		text, err := bufio.NewReader(out).ReadString('\n')
		if err != nil {
			text = ""
		}
		line <- strings.TrimSpace(text)
	}()
	select {
	case s.url = <-line:
	case <-time.After(30 * time.Second):
	}
	if s.url == "" {
		t.Fatal("the stand-in does not serve")
	}
	return s
}

// need fails the test when a program is missing.
func need(t testing.TB, programs map[string]string) {
	t.Helper()
	var missing []string
	for program, pkg := range programs {
		if _, err := exec.LookPath(program); err != nil {
			missing = append(missing, pkg)
		}
	}
	if len(missing) > 0 {
		t.Fatalf("missing. On Debian: apt-get install --no-install-recommends %s", strings.Join(missing, " "))
	}
}

// TestStandinLeavesNothing: also one that is killed outright takes its sandboxes
// along.
func TestStandinLeavesNothing(t *testing.T) {
	t.Parallel()
	s := startStandin(t)
	p := connect(t, s)
	made, err := p.Create(t.Context(), providers.Spec{VM: "left", Fence: 1})
	if err != nil {
		t.Fatal(err)
	}
	pid, err := os.ReadFile(filepath.Join(s.state, made.ID, "pid"))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(20 * time.Second); ; {
		raw, err := os.ReadFile("/proc/" + string(pid) + "/stat")
		if err != nil || strings.Contains(string(raw), ") Z ") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("a sandbox outlives the stand-in")
		}
		<-time.After(20 * time.Millisecond)
	}
}
