// Package firecrackertest is a stand-in for the firecracker program, for machines
// without hardware virtualization: a process of its own that serves the REST API
// on its socket, holds callers to the documented order of calls, and forwards
// vsock connections after CONNECT and OK to a guest that is a process tree with a
// real agent and a real X server. Written from Firecracker's API description
// (firecracker.yaml), docs/vsock.md and docs/snapshotting.
//
// Pause stops the guest's processes (SIGSTOP). A snapshot names the stopped tree:
// whoever loads it first takes the tree over, in another process of the stand-in
// too; for whoever loads it again, or while the tree runs, a new guest is booted,
// since processes cannot be copied. What it does not show: memory that is saved
// and shared, a guest's kernel, timing.
//
// A file named fault beside the program breaks a call: "hang PUT /vm", "die …" or
// "refuse …"; the stand-in reads it anew at every call.
package firecrackertest

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/internal/sandboxd/firecracker"
	"berth/internal/sandboxd/guest"
)

// Version is what the stand-in says it is.
const Version = "1.16.1"

// Names under which the test's program is started.
const (
	vmmName    = "firecracker"
	keeperName = "firecracker-keeper"
	guestName  = "firecracker-guest"
)

// Woken is a file in the guest's home directory that says when the agent was
// woken, and with how many bytes of seed: the stand-in leaves this machine's
// clock alone.
const Woken = "woken"

// Main takes over where this process was started as the stand-in or as one of
// its guest's, and then does not return. A TestMain calls it first.
func Main(agent guest.Agent) {
	var err error
	switch filepath.Base(os.Args[0]) {
	case vmmName:
		err = runVMM()
	case keeperName:
		err = runKeeper()
	case guestName:
		err = runGuest(agent)
	default:
		return
	}
	if err != nil {
		if _, err := os.Stderr.WriteString(os.Args[0] + ": " + err.Error() + "\n"); err != nil {
			os.Exit(2)
		}
		os.Exit(1)
	}
	os.Exit(0)
}

// Install returns a configuration that starts the stand-in.
func Install(t testing.TB) firecracker.Config {
	t.Helper()
	dir, err := os.MkdirTemp("", "fci")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if left := left(dir); len(left) > 0 {
			t.Errorf("left of the microVMs, after 20 s: %q", left)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := firecracker.Config{
		Binary: filepath.Join(dir, vmmName), Kernel: filepath.Join(dir, "vmlinux"), RootFS: filepath.Join(dir, "rootfs.ext4"),
		Device: os.DevNull, VCPUs: 2, MemoryMiB: 512,
	}
	if err := os.Symlink(self, c.Binary); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{c.Kernel, c.RootFS} {
		if err := os.WriteFile(path, []byte("stands in for an image"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

// left waits until no process of an installation runs, and returns the command
// lines of those that do.
func left(dir string) []string {
	for end := time.Now().Add(20 * time.Second); ; {
		var out []string
		paths, err := filepath.Glob("/proc/[0-9]*/cmdline")
		if err != nil {
			return []string{err.Error()}
		}
		for _, path := range paths {
			if raw, err := os.ReadFile(path); err == nil && bytes.Contains(raw, []byte(dir)) {
				out = append(out, strings.ReplaceAll(string(raw), "\x00", " "))
			}
		}
		if len(out) == 0 || time.Now().After(end) {
			return out
		}
		<-time.After(pollEvery)
	}
}

// Fault breaks a call of the stand-in from now on, as the package says; "": none.
func Fault(t testing.TB, c firecracker.Config, fault string) {
	t.Helper()
	if err := os.WriteFile(faultPath(c.Binary), []byte(fault), 0o600); err != nil {
		t.Fatal(err)
	}
}

func faultPath(program string) string { return filepath.Join(filepath.Dir(program), "fault") }

// pollEvery is how often the processes look at what they wait for.
const pollEvery = 10 * time.Millisecond
