package jail

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/sandboxd/process"
)

// Unknown is a number that a host does not tell.
const Unknown = -1

// Usage is what a sandbox takes at a moment; a field may be Unknown.
type Usage struct {
	Memory    int64         // bytes, its files included, without what of the page cache can be dropped
	Files     int64         // bytes in the home directory and in /tmp
	CPU       time.Duration // processor time since its start
	Processes int64         // and threads, those of its network too
}

// Usage reads what the sandbox takes: four small files of its cgroup and two
// statfs, some 0.1 ms, whatever it holds.
func (p *Process) Usage() (Usage, error) {
	u := Usage{Memory: Unknown, Files: Unknown, CPU: Unknown, Processes: Unknown}
	if !p.Weak.Namespaces {
		files, err := p.filesUsed()
		if err != nil {
			return u, err
		}
		u.Files = files
	}
	if p.Weak.Cgroups {
		return u, nil
	}
	h, err := cgroups()
	if err != nil {
		return u, err
	}
	return u, h.usage(p.id, &u)
}

// usage adds what the groups of a sandbox count.
func (h hierarchy) usage(id string, u *Usage) error {
	var err error
	if u.Memory, err = h.memoryIn(filepath.Join(h.dirs["memory"], id)); err != nil {
		return fmt.Errorf("read the memory of sandbox %s: %w", id, err)
	}
	if u.Processes, err = readNumber(filepath.Join(h.dirs["pids"], id, "pids.current")); err != nil {
		return fmt.Errorf("read the processes of sandbox %s: %w", id, err)
	}
	var ns int64
	if h.unified {
		ns, err = readField(filepath.Join(h.dirs["cpu"], id, "cpu.stat"), "usage_usec")
		ns *= 1000
	} else {
		ns, err = readNumber(filepath.Join(h.dirs[accounting], id, "cpuacct.usage"))
	}
	switch {
	case err == nil:
		u.CPU = time.Duration(ns)
	case !errors.Is(err, fs.ErrNotExist): // else there is no such controller, or the sandbox is older than this
		return fmt.Errorf("read the processor time of sandbox %s: %w", id, err)
	}
	return nil
}

// memoryIn is the memory that a group has in use: all that its limit counts, less
// file pages that have not been used lately, which the kernel drops first.
func (h hierarchy) memoryIn(dir string) (int64, error) {
	current, inactive := "memory.usage_in_bytes", "total_inactive_file"
	if h.unified {
		current, inactive = "memory.current", "inactive_file"
	}
	used, err := readNumber(filepath.Join(dir, current))
	if err != nil {
		return 0, err
	}
	cache, err := readField(filepath.Join(dir, "memory.stat"), inactive)
	return max(0, used-cache), err
}

// filesUsed asks the file systems of the sandbox. They are found from the root of
// its first process, through no link, so that nothing inside can point elsewhere.
func (p *Process) filesUsed() (sum int64, err error) {
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", p.PID), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("open the files of sandbox %s: %w", p.id, err)
	}
	defer func() { err = errors.Join(err, unix.Close(root)) }()
	if at, err := process.StartTime(p.PID); err != nil || at != p.Started { // else the number is another's by now
		return 0, fmt.Errorf("sandbox %s has ended", p.id)
	}
	for _, path := range []string{strings.TrimPrefix(Home, "/"), "tmp"} {
		n, err := tmpfsUsed(root, path)
		if err != nil {
			return 0, fmt.Errorf("measure /%s of sandbox %s: %w", path, p.id, err)
		}
		sum += n
	}
	return sum, nil
}

func tmpfsUsed(root int, path string) (n int64, err error) {
	fd, err := unix.Openat2(root, path, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return 0, err
	}
	if st.Type != unix.TMPFS_MAGIC {
		return 0, fmt.Errorf("it is no tmpfs (type %#x)", st.Type)
	}
	return int64(st.Blocks-st.Bfree) * st.Bsize, nil
}

func readNumber(path string) (int64, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(string(bytes.TrimSpace(raw)), 10, 64)
}

// readField reads a number of a file whose lines are "name number".
func readField(path, name string) (int64, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	for line := range bytes.Lines(raw) {
		if value, ok := bytes.CutPrefix(line, []byte(name+" ")); ok {
			return strconv.ParseInt(string(bytes.TrimSpace(value)), 10, 64)
		}
	}
	return 0, fmt.Errorf("%s has no %s", path, name)
}

// FreeMemory is what this process and its sandboxes may still take, in bytes: what
// the host has available, and no more than the limit of a cgroup that this process
// is in leaves.
func FreeMemory() (int64, error) {
	return freeMemory("/proc/meminfo", "/proc/self/cgroup", "/sys/fs/cgroup")
}

func freeMemory(meminfo, self, mount string) (int64, error) {
	raw, err := os.ReadFile(meminfo)
	if err != nil {
		return 0, fmt.Errorf("read the free memory: %w", err)
	}
	free := int64(Unknown)
	for line := range strings.Lines(string(raw)) {
		if value, ok := strings.CutPrefix(line, "MemAvailable:"); ok {
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("read the free memory: %w", err)
			}
			free = kib << 10
		}
	}
	if free == Unknown {
		return 0, fmt.Errorf("%s has no MemAvailable", meminfo)
	}
	raw, err = os.ReadFile(self)
	if err != nil {
		return 0, fmt.Errorf("read this process's cgroups: %w", err)
	}
	for line := range strings.Lines(string(raw)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			continue
		}
		h := hierarchy{unified: parts[0] == "0"}
		top := mount
		if parts[1] == "memory" {
			top = filepath.Join(mount, "memory")
		} else if !h.unified {
			continue
		}
		free = min(free, h.leftBelow(top, filepath.Join(top, parts[2])))
	}
	return free, nil
}

// leftBelow is what the limits of a group and of those above it leave; a limit that
// cannot be read is none, as at the top, or outside of this process's view.
func (h hierarchy) leftBelow(top, dir string) int64 {
	name := "memory.limit_in_bytes"
	if h.unified {
		name = "memory.max"
	}
	left := int64(math.MaxInt64)
	for ; len(dir) >= len(top); dir = filepath.Dir(dir) {
		limit, err := readNumber(filepath.Join(dir, name)) // "max" is no number
		if err != nil {
			continue
		}
		if used, err := h.memoryIn(dir); err == nil {
			left = min(left, max(0, limit-used))
		}
	}
	return left
}
