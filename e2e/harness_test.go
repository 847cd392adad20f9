// Package e2e tests the programs as they are run: real processes, a real
// nats-server with deploy/nats/dev.conf, the stock nats CLI, a real Chromium.
package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// bin is where the programs are: `make test` builds them and says so in
// BERTH_BIN; a plain `go test` builds them itself.
var bin string

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	if bin = os.Getenv("BERTH_BIN"); bin == "" {
		dir, err := os.MkdirTemp("", "berth-e2e-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer func() { _ = os.RemoveAll(dir) }()
		bin = dir
		if err := build(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return m.Run()
}

func build() error {
	for _, args := range [][]string{
		{"build", "-o", bin + "/", "berth/cmd/berth", "berth/cmd/scheduler", "berth/cmd/worker", "berth/cmd/loop-runner"},
		{"build", "-o", bin + "/nats-server", "github.com/nats-io/nats-server/v2"},
		{"build", "-C", "../tools", "-o", bin + "/nats", "github.com/nats-io/natscli/nats"},
	} {
		out, err := exec.Command("go", args...).CombinedOutput()
		if err != nil {
			return fmt.Errorf("go %v: %w\n%s", args, err, out)
		}
	}
	return nil
}

// process is a program of ours that a test has started.
type process struct {
	t    *testing.T
	name string
	cmd  *exec.Cmd
	done chan struct{}

	mu  sync.Mutex
	out bytes.Buffer
}

// Write takes in what the process prints, on either stream.
func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.Write(b)
}

func (p *process) output() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String()
}

// start runs a program until the test ends.
func start(t *testing.T, name string, env []string, args ...string) *process {
	t.Helper()
	p := &process{t: t, name: filepath.Base(name), done: make(chan struct{})}
	p.cmd = exec.Command(name, args...)
	p.cmd.Env = append(environment(t), env...)
	p.cmd.Stdout, p.cmd.Stderr = p, p
	// Its group is its own, as under a service manager.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("start %s: %v", name, err)
	}
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait() // its state tells
	}()
	t.Cleanup(func() {
		p.terminate()
		if t.Failed() {
			t.Logf("%s %v:\n%s", p.name, args, tail(p.output(), 80))
		}
	})
	return p
}

// environment is a clean one: of the tester's own, only what programs need.
func environment(t *testing.T) []string {
	env := []string{"PATH=" + os.Getenv("PATH"), "HOME=" + os.Getenv("HOME"), "TMPDIR=" + os.TempDir()}
	for _, name := range []string{"BERTH_CHROMIUM", "PLAYWRIGHT_NODEJS_PATH"} {
		if v := os.Getenv(name); v != "" {
			env = append(env, name+"="+v)
		}
	}
	return env
}

// terminate asks the process to stop and returns its exit code.
func (p *process) terminate() int {
	p.t.Helper()
	if p.cmd.Process.Signal(syscall.SIGTERM) != nil {
		<-p.done
	}
	return p.wait(40 * time.Second)
}

// kill ends the process like a crash.
func (p *process) kill() {
	p.t.Helper()
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Errorf("kill %s: %v", p.name, err)
	}
	<-p.done
}

// wait returns the exit code.
func (p *process) wait(atMost time.Duration) int {
	p.t.Helper()
	select {
	case <-p.done:
	case <-time.After(atMost):
		p.t.Errorf("%s has not ended in %s", p.name, atMost)
		_ = p.cmd.Process.Signal(syscall.SIGQUIT) // its goroutines go to the log
		select {
		case <-p.done:
		case <-time.After(2 * time.Second):
			_ = p.cmd.Process.Kill()
			<-p.done
		}
	}
	return p.cmd.ProcessState.ExitCode()
}

// until waits for a line of output that is exactly want, or has it as a part
// where part is set.
func (p *process) until(atMost time.Duration, part bool, want string) {
	p.t.Helper()
	eventually(p.t, atMost, p.name+" to print "+want, func() error {
		select {
		case <-p.done:
			p.t.Fatalf("%s ended with %d", p.name, p.cmd.ProcessState.ExitCode())
		default:
		}
		out := p.output()
		for line := range strings.SplitSeq(out, "\n") {
			if line == want || part && strings.Contains(line, want) {
				return nil
			}
		}
		return errors.New("not printed")
	})
}

// line returns what follows a prefix in the output.
func (p *process) line(prefix string) string {
	p.t.Helper()
	for l := range strings.SplitSeq(p.output(), "\n") {
		if rest, ok := strings.CutPrefix(l, prefix); ok {
			return strings.TrimSpace(rest)
		}
	}
	p.t.Fatalf("%s printed no line %q", p.name, prefix)
	return ""
}

func eventually(t *testing.T, atMost time.Duration, what string, check func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(atMost); time.Now().Before(end); time.Sleep(30 * time.Millisecond) {
		if err = check(); err == nil {
			return
		}
	}
	t.Fatalf("waited %s for %s: %v", atMost, what, err)
}

func tail(s string, lines int) string {
	all := strings.Split(strings.TrimRight(s, "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// program is the path of one of ours.
func program(name string) string { return filepath.Join(bin, name) }

// berth runs the tool to its end.
func berth(t *testing.T, args ...string) (out string, code int) {
	t.Helper()
	return run(t, program("berth"), args...)
}

func run(t *testing.T, name string, args ...string) (string, int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	began := time.Now()
	defer func() { t.Logf("%6.2f s  %s %.60v", time.Since(began).Seconds(), filepath.Base(name), args) }()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = environment(t)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s %v: %v\n%s", filepath.Base(name), args, err, out)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

// mustBerth is berth that must exit 0.
func mustBerth(t *testing.T, args ...string) string {
	t.Helper()
	out, code := berth(t, args...)
	if code != 0 {
		t.Fatalf("berth %v exited with %d:\n%s", args, code, out)
	}
	return out
}

// cli runs the stock nats CLI, which must succeed.
func cli(t *testing.T, url string, args ...string) string {
	t.Helper()
	out, code := run(t, filepath.Join(bin, "nats"), append([]string{"--server", url, "--timeout", "10s"}, args...)...)
	if code != 0 {
		t.Fatalf("nats %v exited with %d:\n%s", args, code, out)
	}
	return out
}

// natsServer runs a real nats-server with dev.conf on a free port.
type natsServer struct {
	*process
	addr string // host:port
}

func startNATS(t *testing.T) *natsServer {
	t.Helper()
	dir := t.TempDir()
	s := &natsServer{process: start(t, filepath.Join(bin, "nats-server"), nil,
		"-c", "../deploy/nats/dev.conf", "-a", "127.0.0.1", "-p", "-1", "-sd", filepath.Join(dir, "store"), "--ports_file_dir", dir)}
	eventually(t, 10*time.Second, "nats-server's ports", func() error {
		files, err := filepath.Glob(filepath.Join(dir, "*.ports"))
		if err != nil || len(files) != 1 {
			return fmt.Errorf("%d port files, %w", len(files), err)
		}
		raw, err := os.ReadFile(files[0])
		if err != nil {
			return err
		}
		var ports struct {
			NATS []string `json:"nats"`
		}
		if err := json.Unmarshal(raw, &ports); err != nil || len(ports.NATS) == 0 {
			return fmt.Errorf("%q: %w", raw, err)
		}
		s.addr = strings.TrimPrefix(ports.NATS[0], "nats://")
		return nil
	})
	return s
}

// url is for one of dev.conf's users.
func (s *natsServer) url(user string) string {
	return fmt.Sprintf("nats://%s:%s@%s", user, user, s.addr)
}

// connect is for the test's own eyes.
func (s *natsServer) connect(t *testing.T, user string) (*nats.Conn, jetstream.JetStream) {
	t.Helper()
	nc, err := nats.Connect(s.url(user), nats.CustomInboxPrefix("_INBOX."+user), nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return nc, js
}
