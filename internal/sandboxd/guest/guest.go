// Package guest is the inside of a microVM: its first process, which builds the
// system around the agent, and the agent's process, which serves the desktop to
// the host over vsock. Both are the program that imports it.
//
//	kernel → First, pid 1: mounts, host name, reaps → agent: listens on vsock
//
// The root drive is read-only and shared by all microVMs; home directory, /tmp
// and the other places that are written are tmpfs, as in package jail, and part
// of the guest's memory. When the agent ends the machine reboots, which ends a
// microVM.
//
// Only the host is served: a connection from another context id is closed.
// Programs of the guest cannot pose as the host, since no loopback transport for
// vsock is in the image.
package guest

import (
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"

	"berth/internal/sandboxd/firecracker"
)

// First is the name under which the program is a microVM's first process.
const First = "berth-guest"

// agentArg is the first argument of the agent's process.
const agentArg = "guest-agent"

// Agent serves l until it ends, which ends the microVM. wake must be called
// with what the host says after the microVM was made from a snapshot.
type Agent func(l net.Listener, config json.RawMessage, wake func(now time.Time, seed []byte) error) error

// Words of the kernel's command line.
const (
	agentWord = "berth.agent=" // base64 of the agent's configuration
	filesWord = "berth.files=" // bytes of the home directory and of /tmp, each
)

// CommandLine is what a kernel's command line tells the guest: the agent's
// configuration, and how many bytes each place for files has.
func CommandLine(config json.RawMessage, files int64) string {
	return agentWord + base64.RawURLEncoding.EncodeToString(config) + " " + filesWord + strconv.FormatInt(files, 10)
}

// Parse reads what CommandLine wrote out of a kernel's command line.
func Parse(line string) (config json.RawMessage, files int64, err error) {
	for _, word := range strings.Fields(line) {
		if text, ok := strings.CutPrefix(word, agentWord); ok {
			if config, err = base64.RawURLEncoding.DecodeString(text); err != nil {
				return nil, 0, fmt.Errorf("the kernel's command line: %s: %w", agentWord, err)
			}
		}
		if text, ok := strings.CutPrefix(word, filesWord); ok {
			if files, err = strconv.ParseInt(text, 10, 64); err != nil || files <= 0 {
				return nil, 0, fmt.Errorf("the kernel's command line: %s%.20s is no size", filesWord, text)
			}
		}
	}
	if config == nil || files == 0 {
		return nil, 0, fmt.Errorf("the kernel's command line lacks %s or %s", agentWord, filesWord)
	}
	return config, files, nil
}

// Main takes over where this process is of a microVM's inside, and then does
// not return; else it does nothing. A program calls it before anything else.
func Main(agent Agent) {
	switch {
	case filepath.Base(os.Args[0]) == First && os.Getpid() == 1:
		err := first()
		fmt.Fprintf(os.Stderr, "%s: %v\n", First, err)
		// reboot=k on the command line: Firecracker ends when the guest reboots.
		if err := unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART); err != nil {
			fmt.Fprintf(os.Stderr, "%s: reboot: %v\n", First, err)
		}
		os.Exit(1) // which is a panic of the kernel, and a reboot after a second
	case len(os.Args) == 2 && os.Args[1] == agentArg && filepath.Base(os.Args[0]) == First:
		if err := serve(agent); err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", agentArg, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

// mount is one file system to mount.
type mount struct {
	path, kind, options string
	flags               uintptr
}

// first is the first process: it builds the system, starts the agent, and reaps
// every process that ends until that does.
func first() error {
	if err := mountAll([]mount{{path: "/proc", kind: "proc", flags: unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC}}); err != nil {
		return err
	}
	line, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return fmt.Errorf("read the kernel's command line: %w", err)
	}
	_, files, err := Parse(string(line))
	if err != nil {
		return err
	}
	if err := build(files); err != nil {
		return err
	}
	runtime.LockOSThread() // no_new_privs, once set on a thread, holds for all that it starts
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{First, agentArg}
	cmd.Env = []string{"PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "GOTRACEBACK=single"}
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the agent: %w", err)
	}
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return fmt.Errorf("wait for the agent: %w", err)
		case pid == cmd.Process.Pid:
			return fmt.Errorf("the agent ended: status %#x", uint32(status))
		}
	}
}

// person is the user that a desktop's programs run as; see package jail.
const person = 1000

func build(files int64) error {
	size := "size=" + strconv.FormatInt(files, 10)
	own := fmt.Sprintf("mode=700,uid=%d,gid=%d,%s", person, person, size)
	const plain = unix.MS_NOSUID | unix.MS_NODEV
	if err := mountAll([]mount{
		{path: "/sys", kind: "sysfs", flags: plain | unix.MS_NOEXEC | unix.MS_RDONLY},
		{path: "/dev", kind: "devtmpfs", options: "mode=755", flags: unix.MS_NOSUID},
		{path: "/dev/pts", kind: "devpts", options: "ptmxmode=0666,mode=620,gid=5", flags: unix.MS_NOSUID | unix.MS_NOEXEC},
		{path: "/dev/shm", kind: "tmpfs", options: "mode=1777," + size, flags: plain},
		{path: "/run", kind: "tmpfs", options: "mode=755,size=16m", flags: plain},
		{path: "/tmp", kind: "tmpfs", options: "mode=1777," + size, flags: plain},
		{path: "/var/tmp", kind: "tmpfs", options: "mode=1777,size=64m", flags: plain},
		{path: "/home/user", kind: "tmpfs", options: own, flags: plain},
	}); err != nil {
		return err
	}
	if err := os.Mkdir("/tmp/.X11-unix", 0o700); err != nil {
		return err
	}
	if err := os.Chmod("/tmp/.X11-unix", 0o1777); err != nil {
		return err
	}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("forbid core dumps: %w", err)
	}
	if err := unix.Sethostname([]byte("sandbox")); err != nil {
		return fmt.Errorf("set the host name: %w", err)
	}
	return loopbackUp()
}

func mountAll(mounts []mount) error {
	for _, m := range mounts {
		if err := os.MkdirAll(m.path, 0o755); err != nil {
			return fmt.Errorf("make %s: %w", m.path, err)
		}
		// EBUSY: the kernel or the initial RAM disk has mounted it.
		if err := unix.Mount(m.kind, m.path, m.kind, m.flags, m.options); err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mount %s: %w", m.path, err)
		}
	}
	return nil
}

func loopbackUp() (err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("bring up the loopback interface: %w", err)
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("bring up the loopback interface: %w", err)
	}
	lo.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo); err != nil {
		return fmt.Errorf("bring up the loopback interface: %w", err)
	}
	return nil
}

func serve(agent Agent) error {
	line, err := os.ReadFile("/proc/cmdline")
	if err != nil {
		return fmt.Errorf("read the kernel's command line: %w", err)
	}
	config, _, err := Parse(string(line))
	if err != nil {
		return err
	}
	l, err := vsock.Listen(firecracker.Port, nil)
	if err != nil {
		return fmt.Errorf("listen on vsock (kernel module vmw_vsock_virtio_transport): %w", err)
	}
	return agent(hostOnly{l}, config, Wake)
}

// hostOnly accepts connections of the host.
type hostOnly struct{ net.Listener }

func (l hostOnly) Accept() (net.Conn, error) {
	for {
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if from, ok := conn.RemoteAddr().(*vsock.Addr); ok && from.ContextID == vsock.Host {
			return conn, nil
		}
		if err := conn.Close(); err != nil {
			fmt.Fprintf(os.Stderr, "%s: close a stranger's connection: %v\n", agentArg, err)
		}
	}
}

// Wake makes anew, in a microVM that was made from a snapshot, what must not be
// as it was then: the clock, and the kernel's random numbers, which would be the
// same in every microVM of one snapshot.
func Wake(now time.Time, seed []byte) error {
	at, err := unix.TimeToTimespec(now)
	if err == nil {
		err = unix.ClockSettime(unix.CLOCK_REALTIME, &at)
	}
	if err != nil {
		return fmt.Errorf("set the clock: %w", err)
	}
	return Reseed(seed)
}

// Reseed adds random bytes to the kernel's pool, as entropy, and has its
// generator start anew from that. See random(4).
func Reseed(seed []byte) (err error) {
	f, err := os.OpenFile("/dev/random", os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("reseed the kernel's random numbers: %w", err)
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	// struct rand_pool_info: bits, bytes, data.
	info := binary.NativeEndian.AppendUint32(nil, uint32(len(seed)*8))
	info = append(binary.NativeEndian.AppendUint32(info, uint32(len(seed))), seed...)
	if err := ioctl(f, unix.RNDADDENTROPY, info); err != nil {
		return fmt.Errorf("reseed the kernel's random numbers: %w", err)
	}
	if err := ioctl(f, rndReseed, nil); err != nil {
		return fmt.Errorf("reseed the kernel's random numbers: %w", err)
	}
	return nil
}

// rndReseed is RNDRESEEDCRNG of linux/random.h: _IO('R', 7).
const rndReseed = 0x5207
