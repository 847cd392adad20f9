package sandboxd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"berth/internal/sandboxd/jail"
	"berth/internal/sandboxd/process"
)

// usage is what something takes at a moment, as it is answered. What is not known
// is missing.
type usage struct {
	MemoryBytes *int64   `json:"memoryBytes,omitempty"`
	FilesBytes  *int64   `json:"filesBytes,omitempty"`
	DiskBytes   *int64   `json:"diskBytes,omitempty"`
	CPUSeconds  *float64 `json:"cpuSeconds,omitempty"`
	Processes   *int64   `json:"processes,omitempty"`
}

func add[T int64 | float64](sum **T, n *T) {
	if n == nil {
		return
	}
	if *sum == nil {
		*sum = new(T)
	}
	**sum += *n
}

func (u *usage) add(other usage) {
	add(&u.MemoryBytes, other.MemoryBytes)
	add(&u.FilesBytes, other.FilesBytes)
	add(&u.DiskBytes, other.DiskBytes)
	add(&u.CPUSeconds, other.CPUSeconds)
	add(&u.Processes, other.Processes)
}

func known(n int64) *int64 {
	if n == jail.Unknown {
		return nil
	}
	return &n
}

// usage measures a guest; what cannot be read is missing, as where it just ends.
func (s *Server) usage(g Guest, dir string) usage {
	u, err := g.Usage()
	if err != nil {
		s.log.Debug("what a sandbox takes is not known", "err", err)
	}
	if n, err := diskUsed(dir); err == nil {
		u.DiskBytes = &n
	}
	return u
}

// diskUsed is what the files of one directory take on the disk; there are a few at
// most, and none in directories below.
func diskUsed(dir string) (sum int64, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, fmt.Errorf("measure files: %w", err)
	}
	for _, e := range entries {
		var st unix.Stat_t
		switch err := unix.Lstat(filepath.Join(dir, e.Name()), &st); {
		case errors.Is(err, os.ErrNotExist): // just removed
		case err != nil:
			return 0, fmt.Errorf("measure files: %w", err)
		case st.Mode&unix.S_IFMT == unix.S_IFREG:
			sum += st.Blocks * 512 // stat(2)'s unit
		}
	}
	return sum, nil
}

func (g *jailed) Usage() (usage, error) {
	u, err := g.p.Usage()
	out := usage{MemoryBytes: known(u.Memory), FilesBytes: known(u.Files), Processes: known(u.Processes)}
	if u.CPU != jail.Unknown {
		seconds := u.CPU.Seconds()
		out.CPUSeconds = &seconds
	}
	return out, err
}

// ticks of processor time in a second, in /proc (proc(5)); Linux has no other for
// programs.
const ticks = 100

// Usage is that of the microVM's process; while it is paused there is none. What
// the guest does with its memory is its own.
func (g *microvm) Usage() (usage, error) {
	pid, started := g.vm.Process()
	if pid == 0 {
		return usage{MemoryBytes: new(int64)}, nil
	}
	fields, err := process.Stat(pid)
	if err != nil {
		return usage{}, fmt.Errorf("measure a microVM: %w", err)
	}
	if at, err := strconv.ParseUint(fields[19], 10, 64); err != nil || at != started {
		return usage{}, errors.New("measure a microVM: it has ended")
	}
	user, userErr := strconv.ParseInt(fields[11], 10, 64)
	system, systemErr := strconv.ParseInt(fields[12], 10, 64)
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err = errors.Join(err, userErr, systemErr); err != nil {
		return usage{}, fmt.Errorf("measure a microVM: %w", err)
	}
	words := strings.Fields(string(raw))
	if len(words) < 2 {
		return usage{}, fmt.Errorf("measure a microVM: process %d has an odd statm", pid)
	}
	pages, err := strconv.ParseInt(words[1], 10, 64)
	if err != nil {
		return usage{}, fmt.Errorf("measure a microVM: %w", err)
	}
	memory, seconds := pages*int64(os.Getpagesize()), float64(user+system)/ticks
	return usage{MemoryBytes: &memory, CPUSeconds: &seconds}, nil
}

// used is what the templates take on the disk.
func (t *templates) used() (sum int64, err error) {
	names, err := t.names()
	if err != nil {
		return 0, err
	}
	for _, name := range names {
		n, err := diskUsed(filepath.Join(t.dir, name))
		if err != nil && !errors.Is(err, os.ErrNotExist) { // else just removed
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

// room keeps count of what the host has promised and does not show yet: calls that
// run at the same time must not all be promised the same.
type room struct {
	mu           sync.Mutex
	memory, disk int64
}

// need is what something will take of the host, in bytes.
type need struct{ memory, disk int64 }

var (
	errNoMemory = errors.New("the host has too little free memory")
	errNoDisk   = errors.New("the disk of the state directory has too little room")
)

// promise takes what is needed of what is free, until release; it must then show
// in what is free, or not be needed any more. The error says how much is lacking.
func (s *Server) promise(n need) (release func(), err error) {
	r := &s.room
	r.mu.Lock()
	defer r.mu.Unlock()
	memory, disk, err := s.free() // under the lock: what is released meanwhile would be in neither sum
	if err != nil {
		return nil, err
	}
	if left := memory - r.memory; n.memory > left {
		return nil, fmt.Errorf("%w: %d MiB are needed and %d MiB are left", errNoMemory, mib(n.memory), max(0, left>>20))
	}
	if left := disk - r.disk; n.disk > left {
		return nil, fmt.Errorf("%w: %d MiB are needed and %d MiB are left", errNoDisk, mib(n.disk), max(0, left>>20))
	}
	r.memory += n.memory
	r.disk += n.disk
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.memory -= n.memory
		r.disk -= n.disk
	}, nil
}

// mib rounds up.
func mib(n int64) int64 { return (n + 1<<20 - 1) >> 20 }

// free is what the host has of memory, and of disk below the state directory.
func (s *Server) free() (memory, disk int64, err error) {
	if memory, err = jail.FreeMemory(); err != nil {
		return 0, 0, err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(s.opts.StateDir, &st); err != nil {
		return 0, 0, fmt.Errorf("read the free disk: %w", err)
	}
	return memory, int64(st.Bavail) * st.Bsize, nil
}

// starting is what another sandbox needs: a microVM all of its memory, a desktop
// what it has with a browser open, since its limit is no size.
func (s *Server) starting() need {
	n := need{memory: s.opts.FreeMemory, disk: s.opts.FreeDisk}
	if _, ok := s.machine.(templater); ok {
		n.memory = max(n.memory, s.opts.Limits.Memory)
	}
	return n
}

// writing is what a snapshot of a sandbox needs: as much disk as that has memory.
// One that is paused has been written.
func (s *Server) writing(b *box) need {
	if b.paused() {
		return need{}
	}
	return need{disk: s.opts.Limits.Memory + s.opts.FreeDisk}
}

// waking is what a paused sandbox needs to run: all of its memory.
func (s *Server) waking(b *box) need {
	if !b.paused() {
		return need{}
	}
	return need{memory: s.opts.Limits.Memory}
}

// usedBy is what the sandboxes and spares take together, and the templates.
func (s *Server) usedBy(boxes []*box, spares []*spare) usage {
	var sum usage
	for _, b := range boxes {
		if u := b.usage(); u != nil {
			sum.add(*u)
		}
	}
	for _, sp := range spares {
		sum.add(s.usage(sp.guest, sp.dir))
	}
	if m, ok := s.machine.(templater); ok {
		if n, err := m.Templates().used(); err == nil {
			sum.add(usage{DiskBytes: &n})
		}
	}
	return sum
}

// usage is what a box takes; nil while it starts.
func (b *box) usage() *usage {
	select {
	case <-b.started:
	default:
		return nil
	}
	if b.guest == nil {
		return nil
	}
	u := b.s.usage(b.guest, b.dir)
	return &u
}

// host is what the host has left.
type host struct {
	MemoryFreeBytes int64 `json:"memoryFreeBytes"`
	DiskFreeBytes   int64 `json:"diskFreeBytes"`
}
