package firecracker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Port is the vsock port that the agent in a guest listens on.
const Port = 1024

// Config says what microVMs are made of.
type Config struct {
	Binary string // path or name of the firecracker program
	Kernel string // path of an uncompressed kernel (vmlinux)
	Initrd string // path of an initial RAM disk; "": none
	RootFS string // path of a file system image; read-only and shared by all
	Device string // "": /dev/kvm

	VCPUs     int
	MemoryMiB int
	Console   bool // keep the guest's serial console in its log, which has no limit then
}

// Oldest version that is taken, of major 1: from then on it describes its devices
// by ACPI (CHANGELOG of 1.8.0), which is how Debian's kernel finds them.
const (
	wantMajor = 1
	minMinor  = 8
)

var versionLine = regexp.MustCompile(`(?m)^Firecracker v(\d+)\.(\d+)\.(\S+)`)

// Probe finds out whether microVMs can be made here, and returns Firecracker's
// version and an absolute form of the configuration. The error names every
// fault, each with what to do about it.
func (c Config) Probe(ctx context.Context) (Config, string, error) {
	if c.Device == "" {
		c.Device = "/dev/kvm"
	}
	var errs []error
	add := func(err error) {
		if err != nil {
			errs = append(errs, err)
		}
	}
	add(probeDevice(c.Device))
	for _, f := range []struct {
		what string
		path *string
		how  string
	}{
		{"kernel", &c.Kernel, "build one with deploy/images/build.sh and name it with --kernel"},
		{"root file system", &c.RootFS, "build one with deploy/images/build.sh and name it with --rootfs"},
		{"initial RAM disk", &c.Initrd, "deploy/images/build.sh makes one for its kernel; name it with --initrd"},
	} {
		if f.path == &c.Initrd && c.Initrd == "" {
			continue
		}
		add(probeFile(f.what, f.path, f.how))
	}
	if c.VCPUs < 1 || c.VCPUs > 32 {
		add(fmt.Errorf("a microVM has 1 to 32 processors, not %d: set --cpus", c.VCPUs))
	}
	if c.MemoryMiB < 128 {
		add(fmt.Errorf("a microVM needs at least 128 MiB of memory, not %d: set --memory-mib", c.MemoryMiB))
	}
	path, err := exec.LookPath(c.Binary)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	version := ""
	if err != nil {
		add(fmt.Errorf("the program %q is not here: install a release of Firecracker (github.com/firecracker-microvm/firecracker/releases) or name it with --firecracker: %w", c.Binary, err))
	} else {
		c.Binary = path
		version, err = probeVersion(ctx, path)
		add(err)
	}
	return c, version, errors.Join(errs...)
}

func probeDevice(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("%s is not here: microVMs need hardware virtualization; load kvm_intel or kvm_amd, or enable nested virtualization where this is itself a virtual machine", path)
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("no right to use %s: add this user to the group kvm (usermod -aG kvm USER) or run as root", path)
	case err != nil:
		return fmt.Errorf("%s cannot be opened: %w", path, err)
	}
	return f.Close()
}

func probeFile(what string, path *string, how string) error {
	if *path == "" {
		return fmt.Errorf("no %s is given: %s", what, how)
	}
	f, err := os.Open(*path)
	if err != nil {
		return fmt.Errorf("the %s cannot be read: %s: %w", what, how, err)
	}
	head := make([]byte, 4)
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("it is no file")
	}
	if err == nil {
		_, err = io.ReadFull(f, head)
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("the %s %s: %w", what, *path, err)
	}
	if what == "kernel" && bytes.HasPrefix(head, []byte{0x1f, 0x8b}) {
		return fmt.Errorf("the kernel %s is compressed: %s", *path, how)
	}
	*path, err = filepath.Abs(*path)
	return err
}

func probeVersion(ctx context.Context, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("%s --version fails: %w", path, err)
	}
	m := versionLine.FindStringSubmatch(string(out))
	if m == nil {
		return "", fmt.Errorf("%s is no Firecracker: --version says %.100q", path, strings.TrimSpace(string(out)))
	}
	major, majorErr := strconv.Atoi(m[1])
	minor, minorErr := strconv.Atoi(m[2])
	version := m[1] + "." + m[2] + "." + m[3]
	if errors.Join(majorErr, minorErr) != nil || major != wantMajor || minor < minMinor {
		return "", fmt.Errorf("%s is Firecracker %s, wanted is %d.%d or a later %d: install a newer release", path, version, wantMajor, minMinor, wantMajor)
	}
	return version, nil
}

// bootArgs is the kernel's command line. agent is told to the guest.
func (c Config) bootArgs(agent string) string {
	console := "8250.nr_uarts=0 quiet loglevel=1"
	if c.Console {
		console = "console=ttyS0"
	}
	return console + " reboot=k panic=1 pci=off i8042.noaux i8042.nomux i8042.dumbkbd random.trust_cpu=on root=/dev/vda ro init=/usr/sbin/berth-guest " + agent
}
