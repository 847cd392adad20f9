package jail

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// cgroupName is the group of all sandboxes, below this process's own group.
const cgroupName = "berth-sandboxes"

// hierarchy is where this process may make groups.
type hierarchy struct {
	unified bool              // v2
	dirs    map[string]string // by controller; v2: all the same
}

// needed are the controllers that limit a sandbox.
var needed = []string{"memory", "pids", "cpu"}

// accounting counts processor time in v1; v2 does with the others. It need not be
// there.
const accounting = "cpuacct"

var cgroups = sync.OnceValues(func() (hierarchy, error) { return findCgroups("/proc/self/cgroup", "/sys/fs/cgroup") })

// findCgroups finds the host's hierarchies, v2 or v1 or both side by side, and
// makes the group of all sandboxes.
func findCgroups(self, mount string) (hierarchy, error) {
	raw, err := os.ReadFile(self)
	if err != nil {
		return hierarchy{}, fmt.Errorf("read this process's cgroups: %w", err)
	}
	h, counted := hierarchy{dirs: map[string]string{}}, ""
	for line := range strings.Lines(string(raw)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 {
			continue
		}
		for _, controller := range strings.Split(parts[1], ",") {
			dir := filepath.Join(mount, controller, parts[2], cgroupName)
			if slices.Contains(needed, controller) {
				h.dirs[controller] = dir
			}
			if controller == accounting {
				counted = dir
			}
		}
		if parts[0] == "0" && len(h.dirs) == 0 {
			if _, err := os.Stat(filepath.Join(mount, "cgroup.controllers")); err == nil {
				return unifiedAt(filepath.Join(mount, parts[2]))
			}
		}
	}
	for _, controller := range needed {
		dir, ok := h.dirs[controller]
		if !ok {
			return hierarchy{}, fmt.Errorf("the host has no cgroup controller %q", controller)
		}
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return hierarchy{}, fmt.Errorf("make a cgroup: %w", err)
		}
	}
	if err := os.Mkdir(counted, 0o755); err == nil || errors.Is(err, fs.ErrExist) {
		h.dirs[accounting] = counted
	}
	return h, nil
}

// unifiedAt makes the group of all sandboxes in a v2 hierarchy. A group whose
// children have controllers may hold no process itself, so this process moves
// into a child of its own where needed.
func unifiedAt(own string) (hierarchy, error) {
	enable := func(dir string) error {
		return os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+memory +pids +cpu"), 0)
	}
	err := enable(own)
	if errors.Is(err, syscall.EBUSY) {
		leaf := filepath.Join(own, "berth-sandboxd")
		if err := os.Mkdir(leaf, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return hierarchy{}, fmt.Errorf("make a cgroup: %w", err)
		}
		if err := os.WriteFile(filepath.Join(leaf, "cgroup.procs"), []byte(strconv.Itoa(os.Getpid())), 0); err != nil {
			return hierarchy{}, fmt.Errorf("move into a cgroup: %w", err)
		}
		err = enable(own)
	}
	if err != nil {
		return hierarchy{}, fmt.Errorf("delegate cgroup controllers (under systemd: Delegate=yes): %w", err)
	}
	dir := filepath.Join(own, cgroupName)
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return hierarchy{}, fmt.Errorf("make a cgroup: %w", err)
	}
	if err := enable(dir); err != nil {
		return hierarchy{}, fmt.Errorf("delegate cgroup controllers: %w", err)
	}
	h := hierarchy{unified: true, dirs: map[string]string{}}
	for _, controller := range needed {
		h.dirs[controller] = dir
	}
	return h, nil
}

const cpuPeriod = 100_000 // µs

// values are the files to write for limits, by controller.
func (h hierarchy) values(l Limits) map[string][][2]string {
	out := map[string][][2]string{}
	set := func(controller, v1, v2, value string) {
		name := v1
		if h.unified {
			name = v2
		}
		out[controller] = append(out[controller], [2]string{name, value})
	}
	if l.Memory > 0 {
		set("memory", "memory.limit_in_bytes", "memory.max", strconv.FormatInt(l.Memory, 10))
	}
	if l.Processes > 0 {
		set("pids", "pids.max", "pids.max", strconv.Itoa(l.Processes))
	}
	if l.CPUs > 0 {
		quota := strconv.Itoa(int(l.CPUs * cpuPeriod))
		if h.unified {
			quota += " " + strconv.Itoa(cpuPeriod)
		} else {
			set("cpu", "cpu.cfs_period_us", "", strconv.Itoa(cpuPeriod))
		}
		set("cpu", "cpu.cfs_quota_us", "cpu.max", quota)
	}
	return out
}

// groups returns the sandbox's directories.
func (h hierarchy) groups(id string) []string {
	var out []string
	for _, controller := range append(needed[:len(needed):len(needed)], accounting) {
		parent, ok := h.dirs[controller]
		if dir := filepath.Join(parent, id); ok && !slices.Contains(out, dir) {
			out = append(out, dir)
		}
	}
	return out
}

// makeCgroup makes a sandbox's groups with their limits and moves pid there.
func makeCgroup(id string, limits Limits, pid int) error {
	h, err := cgroups()
	if err != nil {
		return err
	}
	return h.make(id, limits, pid)
}

func (h hierarchy) make(id string, limits Limits, pid int) error {
	for _, dir := range h.groups(id) {
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("make a cgroup: %w", err)
		}
	}
	for controller, list := range h.values(limits) {
		for _, v := range list {
			if err := os.WriteFile(filepath.Join(h.dirs[controller], id, v[0]), []byte(v[1]), 0o644); err != nil {
				return fmt.Errorf("limit %s: %w", controller, err)
			}
		}
	}
	for _, dir := range h.groups(id) {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0o644); err != nil {
			return fmt.Errorf("move a process into its cgroup: %w", err)
		}
	}
	return nil
}

// removeCgroup removes a sandbox's groups once its processes are gone; what is
// left of them, such as its network, is killed.
func removeCgroup(id string) error {
	h, err := cgroups()
	if err != nil {
		return err
	}
	for _, dir := range h.groups(id) {
		for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			if err = os.Remove(dir); err == nil || errors.Is(err, fs.ErrNotExist) {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("remove a cgroup: %w", err)
			}
			raw, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
			if err != nil {
				continue
			}
			for _, line := range strings.Fields(string(raw)) {
				if pid, err := strconv.Atoi(line); err == nil && pid > 1 && syscall.Kill(pid, syscall.SIGKILL) != nil {
					continue // it has just ended
				}
			}
		}
	}
	return nil
}

// MemoryUsed is what a sandbox takes, in bytes, its files included.
func (p *Process) MemoryUsed() (int64, error) {
	h, err := cgroups()
	if err != nil || p.Weak.Cgroups {
		return 0, errors.Join(err, errors.New("no cgroup"))
	}
	name := "memory.usage_in_bytes"
	if h.unified {
		name = "memory.current"
	}
	raw, err := os.ReadFile(filepath.Join(h.dirs["memory"], p.id, name))
	if err != nil {
		return 0, fmt.Errorf("read the memory of sandbox %s: %w", p.id, err)
	}
	return strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64)
}

// Forget removes the cgroup of a sandbox that is known to have ended, with
// whatever is left in it.
func Forget(id string) error {
	if _, err := cgroups(); err != nil {
		return nil // there are none
	}
	return removeCgroup(id)
}
