package desktop

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"berth/internal/computer"
)

// outputGrace is how long output is still read after a program has ended: one
// that it left in the background may hold the pipes open for ever.
const outputGrace = 100 * time.Millisecond

// Person is who programs of the sandbox run as, and where.
type Person struct {
	UID, GID int    // 0: as this process
	Home     string // also the directory that relative paths are from
}

// command prepares a program of the sandbox, in a process group of its own.
func (p *Person) command(argv []string, cwd string, env []string) (*exec.Cmd, error) {
	dir := p.path(cwd)
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return nil, &computer.Fault{Code: codeNotFound, Message: fmt.Sprintf("there is no directory %q", dir)}
	}
	name := argv[0]
	if !strings.Contains(name, "/") {
		found, err := lookPath(name, env)
		if err != nil {
			return nil, &computer.Fault{Code: codeNotFound, Message: fmt.Sprintf("there is no program %q in PATH", name)}
		}
		name = found
	} else if !filepath.IsAbs(name) {
		name = filepath.Join(dir, name)
	}
	cmd := &exec.Cmd{Path: name, Args: argv, Dir: dir, Env: env, SysProcAttr: &syscall.SysProcAttr{Setpgid: true}}
	if p.UID != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(p.UID), Gid: uint32(p.GID)}
	}
	return cmd, nil
}

// path makes a path of the sandbox absolute.
func (p *Person) path(name string) string {
	if filepath.IsAbs(name) {
		return filepath.Clean(name)
	}
	return filepath.Join(p.Home, name)
}

// lookPath finds a program in the PATH of env.
func lookPath(name string, env []string) (string, error) {
	for _, v := range env {
		path, ok := strings.CutPrefix(v, "PATH=")
		if !ok {
			continue
		}
		for _, dir := range filepath.SplitList(path) {
			full := filepath.Join(dir, name)
			if info, err := os.Stat(full); err == nil && !info.IsDir() && info.Mode()&0o111 != 0 {
				return full, nil
			}
		}
	}
	return "", exec.ErrNotFound
}

// capped keeps the first limit bytes and notes that there were more.
type capped struct {
	mu    sync.Mutex
	buf   []byte
	limit int
	more  bool
}

func (c *capped) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := min(len(p), c.limit-len(c.buf))
	c.buf = append(c.buf, p[:n]...)
	c.more = c.more || n < len(p)
	return len(p), nil
}

func (c *capped) text() (string, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return string(c.buf), c.more
}

// run runs a program to its end. Its whole process group is killed when its
// time or ctx ends.
func (s *Session) run(ctx context.Context, a computer.Action, out *Result) error {
	env := s.environment()
	for name, value := range a.Env {
		env = append(env, name+"="+value)
	}
	cmd, err := s.person.command(a.Argv, a.Cwd, env)
	if err != nil {
		return err
	}
	stdout, stderr := &capped{limit: computer.MaxRunOutput}, &capped{limit: computer.MaxRunOutput}
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = stdout, stderr, outputGrace
	if a.Stdin != "" {
		cmd.Stdin = strings.NewReader(a.Stdin)
	}
	limit := time.Duration(a.Duration(computer.DefaultRun) * float64(time.Second))
	if err := cmd.Start(); err != nil {
		return &computer.Fault{Code: codeNotStarted, Message: startFault(a.Argv[0], err)}
	}
	over := s.await(ctx, cmd, limit)
	value := computer.RunValue{ExitCode: cmd.ProcessState.ExitCode()}
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		value.ExitCode = 128 + int(status.Signal())
	}
	var moreOut, moreErr bool
	value.Stdout, moreOut = stdout.text()
	value.Stderr, moreErr = stderr.text()
	value.Truncated = moreOut || moreErr
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if out.Value, err = json.Marshal(value); err != nil {
		return fmt.Errorf("encode the answer: %w", err)
	}
	if over {
		return &computer.Fault{Code: codeTimeout, Message: fmt.Sprintf("still running after %s; it and its process group were killed", limit)}
	}
	return nil
}

// await waits for the program, and kills its group when its time is up or ctx
// ends. It reports whether the time was up.
func (s *Session) await(ctx context.Context, cmd *exec.Cmd, limit time.Duration) (over bool) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := cmd.Wait(); err != nil && errors.Is(err, io.ErrClosedPipe) {
			return // the program did not read all of its input, which is its business
		}
	}()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-ended:
		return false
	case <-timer.C:
		over = true
	case <-ctx.Done():
	}
	killGroup(cmd.Process.Pid)
	<-ended
	return over
}

// killGroup kills a process group. An error means that it has ended already.
func killGroup(pid int) {
	if err := syscall.Kill(-pid, syscall.SIGKILL); err != nil {
		return
	}
}

func startFault(name string, err error) string {
	var path *os.PathError
	if errors.As(err, &path) {
		err = path.Err
	}
	return fmt.Sprintf("%s did not start: %v", name, err)
}
