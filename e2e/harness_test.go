// Package e2e tests the programs as they are run: real processes, a real
// nats-server with deploy/nats/dev.conf, the stock nats CLI, a real Chromium.
package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
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
	// The tests wait for processes of their own more than they compute.
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == strconv.Itoa(runtime.GOMAXPROCS(0)) {
		if err := f.Value.Set("4"); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
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

	mu      sync.Mutex
	out     bytes.Buffer
	printed chan struct{} // closed and renewed at each output
}

// Write takes in what the process prints, on either stream.
func (p *process) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.printed)
	p.printed = make(chan struct{})
	return p.out.Write(b)
}

func (p *process) output() string {
	out, _ := p.outputAnd()
	return out
}

// outputAnd is the output so far, and a channel that is closed when there is
// more.
func (p *process) outputAnd() (string, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.out.String(), p.printed
}

// start runs a program until the test ends.
func start(t *testing.T, name string, env []string, args ...string) *process {
	t.Helper()
	p := &process{t: t, name: filepath.Base(name), done: make(chan struct{}), printed: make(chan struct{})}
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
	limit := time.NewTimer(atMost)
	defer limit.Stop()
	for {
		out, more := p.outputAnd()
		for line := range strings.SplitSeq(out, "\n") {
			if line == want || part && strings.Contains(line, want) {
				return
			}
		}
		select {
		case <-more:
		case <-p.done:
			if out != p.output() {
				continue // its last words
			}
			p.t.Fatalf("%s ended with %d and has not printed %q", p.name, p.cmd.ProcessState.ExitCode(), want)
		case <-limit.C:
			p.t.Fatalf("waited %s for %s to print %q", atMost, p.name, want)
		}
	}
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

// lookEvery is how often eventually looks at what tells nobody that it has
// changed.
const lookEvery = 30 * time.Millisecond

// eventually waits until check returns nil.
func eventually(t *testing.T, atMost time.Duration, what string, check func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), atMost)
	defer cancel()
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for {
		err := check()
		if err == nil {
			return
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			t.Fatalf("waited %s for %s: %v", atMost, what, err)
		}
	}
}

// await reads a subject along, from its last message on, until check accepts one.
func await(t *testing.T, js jetstream.JetStream, stream, subject string, atMost time.Duration, check func(data []byte) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), atMost)
	defer cancel()
	cons, err := js.OrderedConsumer(ctx, stream, jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{subject}, DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy})
	if err != nil {
		t.Fatalf("read %s: %v", subject, err)
	}
	msgs, err := cons.Messages()
	if err != nil {
		t.Fatalf("read %s: %v", subject, err)
	}
	defer msgs.Stop()
	err = errors.New("no message")
	for {
		msg, nerr := msgs.Next(jetstream.NextContext(ctx))
		switch {
		case ctx.Err() != nil:
			t.Fatalf("waited %s on %s: %v", atMost, subject, err)
		case nerr != nil:
			continue // the consumer is made anew
		}
		if err = check(msg.Data()); err == nil {
			return
		}
	}
}

// awaitKey is await on a key of a bucket.
func awaitKey[T any](t *testing.T, js jetstream.JetStream, bucket, key string, atMost time.Duration, check func(T) error) {
	t.Helper()
	await(t, js, "KV_"+bucket, "$KV."+bucket+"."+key, atMost, func(data []byte) error {
		var v T
		if err := json.Unmarshal(data, &v); err != nil {
			return fmt.Errorf("%q: %w", data, err)
		}
		return check(v)
	})
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

// startNATS gives the worker's user the two servers, as docs/operations.md has
// operators do.
func startNATS(t *testing.T, servers [2]string) *natsServer {
	t.Helper()
	dir := t.TempDir()
	conf, err := os.ReadFile("../deploy/nats/dev.conf")
	if err != nil {
		t.Fatal(err)
	}
	conf = []byte(strings.NewReplacer("playwright-01", servers[0], "playwright-02", servers[1]).Replace(string(conf)))
	file := filepath.Join(dir, "dev.conf")
	if err := os.WriteFile(file, conf, 0o600); err != nil {
		t.Fatal(err)
	}
	s := &natsServer{process: start(t, filepath.Join(bin, "nats-server"), nil,
		"-c", file, "-a", "127.0.0.1", "-p", "-1", "-sd", filepath.Join(dir, "store"), "--ports_file_dir", dir)}
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
	return connect(t, s.url(user), nats.CustomInboxPrefix("_INBOX."+user))
}

func connect(t *testing.T, url string, opts ...nats.Option) (*nats.Conn, jetstream.JetStream) {
	t.Helper()
	nc, err := nats.Connect(url, append(opts, nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {}))...)
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
