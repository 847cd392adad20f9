package jail

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Main takes over where this process is a child of Start, and then does not
// return; else it does nothing. A program calls it before anything else. agent
// is what runs in the sandbox: it serves l until it ends, which ends the
// sandbox.
func Main(agent func(l net.Listener, config json.RawMessage) error) {
	if len(os.Args) < 2 {
		return
	}
	var err error
	switch os.Args[1] {
	case initArg:
		err = runInit()
	case agentArg:
		err = runAgent(agent)
	default:
		return
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", os.Args[1], err)
		os.Exit(1)
	}
	os.Exit(0)
}

// runInit is the first process of a sandbox: it builds the sandbox around
// itself, starts the agent, and reaps until the agent ends.
func runInit() error {
	// No program inherits a descriptor: with the socket it could pose as the
	// agent, and others may come from whoever started the server.
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		return fmt.Errorf("keep descriptors from programs: %w", err)
	}
	raw, err := io.ReadAll(io.LimitReader(os.NewFile(fdConfig, "config"), 64<<10))
	if err != nil {
		return fmt.Errorf("read the configuration: %w", err)
	}
	var config initConfig
	if err := json.Unmarshal(raw, &config); err != nil {
		return fmt.Errorf("read the configuration: %w", err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("forbid core dumps: %w", err)
	}
	if !config.Weak.Namespaces {
		if err := buildRoot(config.Files); err != nil {
			return err
		}
		if err := unix.Sethostname([]byte("sandbox")); err != nil {
			return fmt.Errorf("set the host name: %w", err)
		}
	} else if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("adopt orphans: %w", err)
	}
	gate := os.NewFile(fdGate, "gate")
	if n, err := gate.Read(make([]byte, 1)); n != 1 {
		return fmt.Errorf("the server gave up on this sandbox: %w", err)
	}
	if !config.Weak.Namespaces {
		if err := configureNetwork(config); err != nil {
			return err
		}
	}
	if config.Probe {
		return nil
	}
	if config.Gated {
		go func() {
			_, _ = gate.Read(make([]byte, 1)) // nothing is sent: it ends with the server
			if config.Weak.Namespaces {
				killTree(os.Getpid())
			}
			os.Exit(1)
		}()
	}
	return supervise(config)
}

// supervise starts the agent and reaps every process that ends until it does.
// no_new_privs, once set on a thread, holds for all that it starts.
func supervise(config initConfig) error {
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	if err := filterSyscalls(); err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{"sandboxd", agentArg, string(config.Agent)}
	cmd.Env = os.Environ()
	cmd.Dir = "/"
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{os.NewFile(fdListener, "listener")}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the agent: %w", err)
	}
	if err := cmd.ExtraFiles[0].Close(); err != nil {
		return fmt.Errorf("close the socket: %w", err)
	}
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return fmt.Errorf("wait for the agent: %w", err)
		case pid == cmd.Process.Pid:
			if config.Weak.Namespaces {
				killTree(os.Getpid())
			}
			return fmt.Errorf("the agent ended: status %#x", uint32(status))
		}
	}
}

// runAgent serves the socket.
func runAgent(agent func(l net.Listener, config json.RawMessage) error) error {
	if len(os.Args) != 3 {
		return errors.New("want one argument")
	}
	unix.CloseOnExec(3)
	file := os.NewFile(3, "listener")
	l, err := net.FileListener(file)
	if err = errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("take over the socket: %w", err)
	}
	return agent(l, json.RawMessage(os.Args[2]))
}

// etc are the parts of /etc that programs of a desktop need, as they are on the
// host. What the host keeps to its root stays out of reach: that root is none
// of a sandbox's users.
var etc = strings.Fields(`alternatives fonts ssl ca-certificates ca-certificates.conf X11 xdg chromium chromium.d gtk-2.0 gtk-3.0 dconf pki
	ld.so.cache ld.so.conf ld.so.conf.d localtime timezone mime.types magic protocols services bash.bashrc profile inputrc os-release
	debian_version terminfo vim perl python3 java-11-openjdk java-17-openjdk pcmanfm libfm`)

// files are small files of the sandbox's own.
var files = map[string]string{
	"etc/passwd":        "root:x:0:0:root:/root:/bin/sh\nxserver:x:900:900::/nonexistent:/bin/false\nuser:x:1000:1000:user:/home/user:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
	"etc/group":         "root:x:0:\ntty:x:5:\nxserver:x:900:\nuser:x:1000:\nnogroup:x:65534:\n",
	"etc/hosts":         "127.0.0.1 localhost sandbox\n",
	"etc/hostname":      "sandbox\n",
	"etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
	"etc/resolv.conf":   "nameserver 10.0.2.3\n",
	"etc/machine-id":    "00000000000000000000000000000001\n",
}

// rootBuilder mounts things below newRoot; the first error stays.
type rootBuilder struct{ err error }

// newRoot is where the sandbox's root is built: any directory that is there.
const newRoot = "/tmp"

func (b *rootBuilder) do(what string, f func() error) {
	if b.err == nil {
		if err := f(); err != nil {
			b.err = fmt.Errorf("%s: %w", what, err)
		}
	}
}

func (b *rootBuilder) dir(path string, mode os.FileMode) {
	b.do("make "+path, func() error {
		full := newRoot + "/" + path
		if err := os.MkdirAll(full, 0o755); err != nil {
			return err
		}
		return os.Chmod(full, mode)
	})
}

func (b *rootBuilder) tmpfs(path string, size int64, mode string, uid int) {
	b.dir(path, 0o755)
	b.do("mount a tmpfs on /"+path, func() error {
		options := fmt.Sprintf("mode=%s,size=%d,uid=%d,gid=%d", mode, size, uid, uid)
		return unix.Mount("tmpfs", newRoot+"/"+path, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options)
	})
}

// bind shows a file or directory of the host, read-only; one that is not there
// is left out, and a symbolic link is made anew.
func (b *rootBuilder) bind(path string, attributes uint64) {
	b.do("bind /"+path, func() error {
		info, err := os.Lstat("/" + path)
		if errors.Is(err, os.ErrNotExist) || b.err != nil {
			return nil
		}
		if err != nil {
			return err
		}
		to := newRoot + "/" + path
		if info.Mode()&os.ModeSymlink != 0 {
			target, err := os.Readlink("/" + path)
			if err != nil {
				return err
			}
			return os.Symlink(target, to)
		}
		if info.IsDir() {
			err = os.MkdirAll(to, 0o755)
		} else {
			err = os.WriteFile(to, nil, 0o644)
		}
		if err != nil {
			return err
		}
		if err := unix.Mount("/"+path, to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return err
		}
		return unix.MountSetattr(-1, to, unix.AT_RECURSIVE, &unix.MountAttr{Attr_set: attributes})
	})
}

const readOnly = unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV

// buildRoot makes the sandbox's file system and enters it.
func buildRoot(size int64) error {
	if size == 0 {
		size = 512 << 20
	}
	b := &rootBuilder{}
	b.do("make mounts private", func() error { return unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") })
	b.do("mount the root", func() error {
		return unix.Mount("tmpfs", newRoot, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755,size=16m")
	})
	for _, path := range []string{"usr", "bin", "sbin", "lib", "lib32", "lib64"} {
		b.bind(path, readOnly)
	}
	b.dir("etc", 0o755)
	for _, name := range etc {
		b.bind("etc/"+name, readOnly)
	}
	for path, content := range files {
		b.do("write "+path, func() error { return os.WriteFile(newRoot+"/"+path, []byte(content), 0o644) })
	}
	b.dir("proc", 0o755)
	b.do("mount /proc", func() error {
		return unix.Mount("proc", newRoot+"/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
	})
	b.devices(size)
	b.tmpfs("tmp", size, "1777", 0)
	b.dir("tmp/.X11-unix", 0o1777)
	b.tmpfs("home/user", size, "700", PersonUID)
	b.tmpfs("run", 16<<20, "755", 0)
	for _, path := range []string{"root", "sys", "mnt", "opt", "var/lib", "var/cache"} {
		b.dir(path, 0o755)
	}
	b.bind("var/cache/fontconfig", readOnly)
	b.do("link /var/tmp", func() error { return os.Symlink("/tmp", newRoot+"/var/tmp") })
	b.do("enter the root", func() error {
		if err := os.Mkdir(newRoot+"/.host", 0o700); err != nil {
			return err
		}
		if err := unix.PivotRoot(newRoot, newRoot+"/.host"); err != nil {
			return err
		}
		if err := unix.Chdir("/"); err != nil {
			return err
		}
		if err := unix.Unmount("/.host", unix.MNT_DETACH); err != nil {
			return err
		}
		if err := os.Remove("/.host"); err != nil {
			return err
		}
		return unix.MountSetattr(-1, "/", 0, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	})
	return b.err
}

func (b *rootBuilder) devices(size int64) {
	b.tmpfs("dev", 1<<20, "755", 0)
	for _, name := range []string{"null", "zero", "full", "random", "urandom", "tty"} {
		b.bind("dev/"+name, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NOEXEC)
	}
	b.dir("dev/pts", 0o755)
	b.do("mount /dev/pts", func() error {
		return unix.Mount("devpts", newRoot+"/dev/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5")
	})
	for name, target := range map[string]string{"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"} {
		b.do("link /dev/"+name, func() error { return os.Symlink(target, newRoot+"/dev/"+name) })
	}
	b.tmpfs("dev/shm", size, "1777", 0)
}
