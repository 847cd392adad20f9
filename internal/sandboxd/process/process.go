// Package process names a process of the host across restarts of the one that
// started it, and tells when it has ended: by its number and the time it
// started, through a pidfd, so that a number which the kernel has given to
// another process since is never taken for it.
package process

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// endWithin is how long a killed process may take to be gone.
const endWithin = 10 * time.Second

// Process is a process that ran when it was found.
type Process struct {
	PID     int
	Started uint64 // clock ticks after boot; with PID it names the process for ever

	gone chan struct{}
}

// Find finds a process by its name. One that has ended is an error, also while
// nobody has waited for it.
func Find(pid int, started uint64) (*Process, error) {
	at, err := StartTime(pid)
	if err != nil || at != started {
		return nil, fmt.Errorf("process %d is gone", pid)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	if at, err = StartTime(pid); err != nil || at != started { // another has its number by now
		return nil, errors.Join(fmt.Errorf("process %d is gone", pid), unix.Close(fd))
	}
	p := &Process{PID: pid, Started: started, gone: make(chan struct{})}
	go func() {
		defer close(p.gone)
		for {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
			if n > 0 || err != nil && !errors.Is(err, unix.EINTR) {
				break
			}
		}
		if unix.Close(fd) != nil {
			return
		}
	}()
	return p, nil
}

// Gone is closed when the process has ended.
func (p *Process) Gone() <-chan struct{} { return p.gone }

// Kill ends the process and waits until it is gone. It may be called at any
// time, also again.
func (p *Process) Kill() error {
	if at, err := StartTime(p.PID); err == nil && at == p.Started {
		if err := syscall.Kill(p.PID, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("kill process %d: %w", p.PID, err)
		}
	}
	select {
	case <-p.gone:
		return nil
	case <-time.After(endWithin):
		return fmt.Errorf("process %d does not end", p.PID)
	}
}

// Stat returns the fields of /proc/pid/stat after the name: state, parent, ….
func Stat(pid int) ([]string, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil, err
	}
	fields := strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:]))
	if len(fields) < 20 {
		return nil, fmt.Errorf("process %d has an odd stat", pid)
	}
	return fields, nil
}

// StartTime names a process together with its pid; an ended one that nobody
// has waited for yet counts as gone.
func StartTime(pid int) (uint64, error) {
	fields, err := Stat(pid)
	if err != nil {
		return 0, err
	}
	if fields[0] == "Z" || fields[0] == "X" {
		return 0, fmt.Errorf("process %d has ended", pid)
	}
	return strconv.ParseUint(fields[19], 10, 64)
}
