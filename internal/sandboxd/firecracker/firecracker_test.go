package firecracker_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/internal/sandboxd/firecracker"
	"berth/internal/sandboxd/firecracker/firecrackertest"
	"berth/internal/sandboxd/guest"
)

func TestMain(m *testing.M) {
	firecrackertest.Main(agent)
	os.Exit(m.Run())
}

// agent answers how often it was asked, so that a guest that was booted anew is
// told from one that goes on.
func agent(l net.Listener, _ json.RawMessage, _ func(time.Time, []byte) error) error {
	n := 0
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n++
		fmt.Fprint(w, n)
	})}
	server.SetKeepAlivesEnabled(false)
	return server.Serve(l)
}

// words are what a guest is told.
func words() string { return guest.CommandLine(json.RawMessage(`{}`), 1<<20) }

func vmDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "fcv")
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

// kill ends a VM with the test.
func kill(t *testing.T, v *firecracker.VM) {
	t.Helper()
	t.Cleanup(func() {
		if err := v.Kill(); err != nil {
			t.Error(err)
		}
	})
}

// ask asks a guest's agent how often it was asked, once it listens.
func ask(t *testing.T, v *firecracker.VM) string {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return v.Dial(ctx) }}}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent/", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err == nil {
			raw, err := io.ReadAll(resp.Body)
			if err = errors.Join(err, resp.Body.Close()); err != nil {
				t.Fatal(err)
			}
			return string(raw)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatal(err)
		}
	}
}

// process is a bare process of the stand-in.
func process(t *testing.T, c firecracker.Config) (*firecracker.Client, string) {
	t.Helper()
	dir := vmDir(t)
	cmd := exec.Command(c.Binary, "--api-sock", "api.sock", "--id", "test")
	cmd.Dir = dir
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	client := firecracker.NewClient(filepath.Join(dir, "api.sock"))
	t.Cleanup(func() {
		client.Close()
		if err := cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Error(err)
		}
		_ = cmd.Wait() // killed
	})
	for end := time.Now().Add(20 * time.Second); ; {
		_, err := client.Info(t.Context())
		if err == nil {
			return client, dir
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
		<-time.After(5 * time.Millisecond)
	}
}

// TestOrderOfCalls: the documented order, as the client meets it. What is out of
// order is refused with a reason and changes nothing.
func TestOrderOfCalls(t *testing.T) {
	t.Parallel()
	config := firecrackertest.Install(t)
	c, dir := process(t, config)
	ctx := t.Context()
	ok := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	refused := func(what string, err error, says string) {
		t.Helper()
		var e *firecracker.APIError
		if !errors.As(err, &e) || e.Status != http.StatusBadRequest || !strings.Contains(e.Message, says) {
			t.Errorf("%s: %v; want a refusal that says %q", what, err, says)
		}
	}
	state := func(want string) {
		t.Helper()
		if info, err := c.Info(ctx); err != nil || info.State != want || info.ID != "test" || info.Version != firecrackertest.Version {
			t.Errorf("%+v, %v; want state %s", info, err, want)
		}
	}
	boot := firecracker.BootSource{Kernel: config.Kernel, Args: words()}
	root := firecracker.Drive{ID: "rootfs", Path: config.RootFS, Root: true, ReadOnly: true}
	vsock := firecracker.Vsock{CID: 3, Path: "v.sock"}
	shot := firecracker.Snapshot{State: "state.1", Memory: "memory.1"}

	state(firecracker.StateNotStarted)
	refused("start without a kernel", c.Start(ctx), "kernel")
	refused("pause before the start", c.Pause(ctx), "before starting")
	refused("resume before the start", c.Resume(ctx), "before starting")
	refused("snapshot before the start", c.CreateSnapshot(ctx, shot), "before starting")
	refused("no processors", c.PutMachineConfig(ctx, firecracker.MachineConfig{MemoryMiB: 128}), "vCPU")
	refused("no memory", c.PutMachineConfig(ctx, firecracker.MachineConfig{VCPUs: 1}), "memory")
	refused("no kernel", c.PutBootSource(ctx, firecracker.BootSource{Kernel: "none"}), "cannot be opened")
	refused("no drive", c.PutDrive(ctx, firecracker.Drive{ID: "rootfs", Path: "none", Root: true}), "none")
	refused("the host's context id", c.PutVsock(ctx, firecracker.Vsock{CID: 2, Path: "v.sock"}), "CID")
	ok("machine", c.PutMachineConfig(ctx, firecracker.MachineConfig{VCPUs: 2, MemoryMiB: 512}))
	ok("boot source", c.PutBootSource(ctx, boot))
	refused("start without a root drive", c.Start(ctx), "root device")
	ok("drive", c.PutDrive(ctx, root))
	ok("vsock", c.PutVsock(ctx, vsock))
	ok("entropy", c.PutEntropy(ctx))
	ok("start", c.Start(ctx))
	state(firecracker.StateRunning)
	for what, err := range map[string]error{
		"start": c.Start(ctx), "machine": c.PutMachineConfig(ctx, firecracker.MachineConfig{VCPUs: 1, MemoryMiB: 128}), "boot source": c.PutBootSource(ctx, boot),
		"drive": c.PutDrive(ctx, root), "vsock": c.PutVsock(ctx, vsock), "entropy": c.PutEntropy(ctx), "load": c.LoadSnapshot(ctx, shot),
	} {
		refused(what+" after the start", err, "after starting")
	}
	refused("snapshot while it runs", c.CreateSnapshot(ctx, shot), "not paused")
	ok("pause", c.Pause(ctx))
	state(firecracker.StatePaused)
	ok("snapshot", c.CreateSnapshot(ctx, shot))
	ok("resume", c.Resume(ctx))
	state(firecracker.StateRunning)

	at := firecracker.Snapshot{State: filepath.Join(dir, shot.State), Memory: filepath.Join(dir, shot.Memory)}
	second, _ := process(t, config)
	ok("machine", second.PutMachineConfig(ctx, firecracker.MachineConfig{VCPUs: 2, MemoryMiB: 512}))
	refused("load after something was configured", second.LoadSnapshot(ctx, at), "not allowed after configuring")
	third, _ := process(t, config)
	ok("load", third.LoadSnapshot(ctx, at))
	if info, err := third.Info(ctx); err != nil || info.State != firecracker.StatePaused {
		t.Errorf("after a load: %+v, %v", info, err)
	}
	ok("resume", third.Resume(ctx))
	fourth, _ := process(t, config)
	refused("load of what is not there", fourth.LoadSnapshot(ctx, shot), "Failed to restore")
	for end := time.Now().Add(20 * time.Second); ; { // its process ends by itself
		if _, err := fourth.Info(ctx); err != nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal("a failed load left its process")
		}
		<-time.After(5 * time.Millisecond)
	}
}

// TestVM: the life of one, and what another process finds of it.
func TestVM(t *testing.T) {
	t.Parallel()
	config, dir, ctx := firecrackertest.Install(t), vmDir(t), t.Context()
	v, err := config.Boot(ctx, dir, words())
	if err != nil {
		t.Fatal(err)
	}
	kill(t, v)
	if n := ask(t, v); n != "1" {
		t.Errorf("asked %s times", n)
	}
	if err := v.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	if pid, _ := v.Process(); pid != 0 || !v.Paused() {
		t.Errorf("paused, and process %d runs", pid)
	}
	if _, err := v.Dial(ctx); err == nil {
		t.Error("a paused one is reached")
	}
	found, err := config.Find(ctx, dir)
	if err != nil || !found.Paused() {
		t.Fatalf("found: %v", err)
	}
	kill(t, found)
	if err := found.Resume(ctx); err != nil {
		t.Fatal(err)
	}
	if n := ask(t, found); n != "2" {
		t.Errorf("after the resume it was asked %s times; what was in memory is not what it was", n)
	}
	if _, err := os.Stat(filepath.Join(dir, "memory.1")); err != nil {
		t.Errorf("the file that backs its memory: %v", err)
	}
	if err := found.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(dir, "memory.1")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the snapshot before the last: %v", err)
	}
	if err := found.Resume(ctx); err != nil {
		t.Fatal(err)
	}

	// Killed between the pause's two halves, or a resume's: it runs on.
	api := firecracker.NewClient(filepath.Join(dir, "api.sock"))
	defer api.Close()
	if err := api.Pause(ctx); err != nil {
		t.Fatal(err)
	}
	again, err := config.Find(ctx, dir)
	if err != nil || again.Paused() {
		t.Fatalf("found in the middle of a pause: %v", err)
	}
	kill(t, again)
	if n := ask(t, again); n != "3" {
		t.Errorf("asked %s times", n)
	}
	if err := again.Kill(); err != nil {
		t.Fatal(err)
	}
	<-again.Gone()
	<-found.Gone()
	if _, err := config.Find(ctx, dir); err == nil {
		t.Error("found after its end")
	}
	if err := again.Pause(ctx); !errors.Is(err, firecracker.ErrEnded) {
		t.Errorf("pause after its end: %v", err)
	}
}

// TestSlow: a call ends with its ctx although the process does not answer, and a
// kill ends one that hangs.
func TestSlow(t *testing.T) {
	t.Parallel()
	config, ctx := firecrackertest.Install(t), t.Context()
	v, err := config.Boot(ctx, vmDir(t), words())
	if err != nil {
		t.Fatal(err)
	}
	kill(t, v)
	c, _ := process(t, config)
	firecrackertest.Fault(t, config, "hang PUT /machine-config")
	late := errors.New("late")
	short, cancel := context.WithTimeoutCause(ctx, 50*time.Millisecond, late)
	defer cancel()
	if err := c.PutMachineConfig(short, firecracker.MachineConfig{VCPUs: 1, MemoryMiB: 128}); !errors.Is(err, late) {
		t.Errorf("a call without an answer: %v", err)
	}
	firecrackertest.Fault(t, config, "hang PUT /snapshot/create")
	done := make(chan error, 1)
	go func() { done <- v.Pause(ctx) }()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); { // it is in there
		short, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
		err := v.Snapshot(short, firecracker.Snapshot{})
		cancel()
		if errors.Is(err, context.DeadlineExceeded) {
			break
		}
	}
	if err := v.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, firecracker.ErrEnded) {
		t.Errorf("the pause of a killed one: %v", err)
	}
	firecrackertest.Fault(t, config, "die PUT /vsock")
	if _, err := config.Boot(ctx, vmDir(t), words()); err == nil {
		t.Error("booted in a process that died")
	}
}

// TestProbe: each lack is named, with the next step, all at once.
func TestProbe(t *testing.T) {
	t.Parallel()
	good := firecrackertest.Install(t)
	if c, version, err := good.Probe(t.Context()); err != nil || version != firecrackertest.Version || !filepath.IsAbs(c.Kernel) {
		t.Fatalf("%+v, %s, %v", c, version, err)
	}
	dir := vmDir(t)
	script := func(name, says string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"+says+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
		return path
	}
	zipped := filepath.Join(dir, "vmlinuz.gz")
	if err := os.WriteFile(zipped, []byte{0x1f, 0x8b, 8, 0, 0}, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func(*firecracker.Config)
		says   []string
	}{
		"all of it":                     {func(c *firecracker.Config) { *c = firecracker.Config{Binary: "no-such-program", Device: dir + "/kvm"} }, []string{"kvm_intel", "--kernel", "--rootfs", "--cpus", "--memory-mib", "releases"}},
		"no kernel":                     {func(c *firecracker.Config) { c.Kernel = dir + "/none" }, []string{"build.sh", "no such file"}},
		"a directory":                   {func(c *firecracker.Config) { c.RootFS = dir }, []string{"no file"}},
		"a compressed one":              {func(c *firecracker.Config) { c.Kernel = zipped }, []string{"compressed"}},
		"no disk":                       {func(c *firecracker.Config) { c.Initrd = dir + "/none" }, []string{"initial RAM disk"}},
		"an old version":                {func(c *firecracker.Config) { c.Binary = script("old", "echo Firecracker v1.4.0") }, []string{"1.4.0, wanted is 1.8", "newer release"}},
		"a later major":                 {func(c *firecracker.Config) { c.Binary = script("new", "echo Firecracker v2.0.0-dev") }, []string{"2.0.0-dev"}},
		"another program":               {func(c *firecracker.Config) { c.Binary = script("other", "echo hello") }, []string{"is no Firecracker", "hello"}},
		"a broken program":              {func(c *firecracker.Config) { c.Binary = script("broken", "exit 3") }, []string{"exit status 3"}},
		"too many vCPUs":                {func(c *firecracker.Config) { c.VCPUs = 64 }, []string{"1 to 32"}},
		"a device that no one may open": {func(c *firecracker.Config) { c.Device = "/proc/self/mem/x" }, []string{"cannot be opened"}},
	} {
		config := good
		c.change(&config)
		_, _, err := config.Probe(t.Context())
		for _, text := range c.says {
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("%s: %v; want %q in it", name, err, text)
			}
		}
	}
}

// TestGreeting: what is no OK is an error, within the caller's time.
func TestGreeting(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer string
		want   string // "": the connection is made
	}{
		"ok": {"OK 1073741824\nhello", ""}, "hangs up": {"", "nobody listens"}, "another word": {"HTTP/1.1 400 Bad Request\n", "no OK"},
		"no number": {"OK x\n", "no OK"}, "no end": {"OK " + strings.Repeat("1", 100), "no OK"},
	} {
		path := filepath.Join(vmDir(t), "v.sock")
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		asked := make(chan string, 1)
		go func() {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			line := make([]byte, 64)
			n, err := conn.Read(line)
			if err == nil {
				_, err = io.WriteString(conn, c.answer)
			}
			asked <- string(line[:n])
			_ = errors.Join(err, conn.Close()) // the other side may have hung up first
		}()
		conn, err := firecracker.DialVsock(t.Context(), path, 1024)
		if line := <-asked; line != "CONNECT 1024\n" {
			t.Errorf("%s: it says %q", name, line)
		}
		if c.want != "" {
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: %v; want %q", name, err, c.want)
			}
		} else if err != nil {
			t.Errorf("%s: %v", name, err)
		} else if rest, err := io.ReadAll(conn); string(rest) != "hello" {
			t.Errorf("%s: %q came after the greeting, %v", name, rest, err)
		}
		if conn != nil {
			err = conn.Close()
		} else {
			err = nil
		}
		if err := errors.Join(err, l.Close()); err != nil {
			t.Error(err)
		}
	}
	// Nothing is said.
	path := filepath.Join(vmDir(t), "v.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := firecracker.DialVsock(ctx, path, 1024); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no answer: %v", err)
	}
}
