package firecracker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"berth/internal/sandboxd/process"
)

// Files of a VM, below its directory.
const (
	apiSocket   = "api.sock"
	vsockSocket = "v.sock"
	logFile     = "log"
	stateFile   = "vm.json"
)

const (
	serveWithin = 10 * time.Second // for a Firecracker process to answer on its socket
	undoWithin  = 15 * time.Second // for a pause that failed to be taken back
	guestCID    = 3                // the same in every microVM: each has a vsock of its own
)

// Errors of a VM.
var (
	ErrKilled = errors.New("the microVM was killed")
	ErrEnded  = errors.New("the microVM has ended")
)

// recorded is what a later process needs to find a VM.
type recorded struct {
	PID     int    `json:"pid,omitempty"`
	Started uint64 `json:"started,omitempty"`
	Paused  bool   `json:"paused,omitempty"` // what counts is the snapshot; a process is left over
	Last    int    `json:"last,omitempty"`   // the newest snapshot; 0: none yet
}

// VM is one microVM. Pause, Resume and Snapshot run one at a time; Kill breaks
// in on them.
type VM struct {
	config Config
	dir    string
	client *Client
	turn   chan struct{} // holds one token: of Pause, Resume, Snapshot
	gone   chan struct{} // closed when it has ended for good

	rec recorded // changed by whoever has the turn

	mu     sync.Mutex
	proc   *process.Process // nil while it is paused
	trial  bool             // proc is not the VM yet: its end leaves the VM paused
	killed bool
	ended  sync.Once
}

func (c Config) vm(dir string) *VM {
	v := &VM{config: c, dir: dir, client: NewClient(filepath.Join(dir, apiSocket)), turn: make(chan struct{}, 1), gone: make(chan struct{})}
	v.turn <- struct{}{}
	return v
}

// Boot boots a VM in a directory; agent is appended to the kernel's command
// line. It returns when the guest's kernel runs. When it fails nothing runs.
func (c Config) Boot(ctx context.Context, dir, agent string) (*VM, error) {
	v := c.vm(dir)
	err := v.spawn(ctx)
	if err == nil {
		err = c.configure(ctx, v.client, agent)
	}
	if err == nil {
		err = v.client.Start(ctx)
	}
	if err != nil {
		return nil, v.failed(err)
	}
	return v, nil
}

func (c Config) configure(ctx context.Context, api *Client, agent string) error {
	for _, step := range []func() error{
		func() error {
			return api.PutMachineConfig(ctx, MachineConfig{VCPUs: c.VCPUs, MemoryMiB: c.MemoryMiB})
		},
		func() error {
			return api.PutBootSource(ctx, BootSource{Kernel: c.Kernel, Initrd: c.Initrd, Args: c.bootArgs(agent)})
		},
		func() error {
			return api.PutDrive(ctx, Drive{ID: "rootfs", Path: c.RootFS, Root: true, ReadOnly: true})
		},
		func() error { return api.PutVsock(ctx, Vsock{CID: guestCID, Path: vsockSocket}) },
		func() error { return api.PutEntropy(ctx) },
	} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// Load makes a VM from a snapshot and lets it go on. The snapshot's memory file
// may be removed afterwards, and must not be changed. When it fails nothing
// runs.
func (c Config) Load(ctx context.Context, dir string, from Snapshot) (*VM, error) {
	v := c.vm(dir)
	err := v.spawn(ctx)
	if err == nil {
		err = v.client.LoadSnapshot(ctx, from)
	}
	if err == nil {
		err = v.client.Resume(ctx)
	}
	if err != nil {
		return nil, v.failed(err)
	}
	return v, nil
}

// failed ends what a start left and adds what it said.
func (v *VM) failed(err error) error {
	err = errors.Join(err, v.Kill())
	if said := v.Said(); said != "" {
		err = fmt.Errorf("%w; firecracker said: %s", err, said)
	}
	return err
}

// Said returns the end of the VM's log.
func (v *VM) Said() string {
	f, err := os.Open(filepath.Join(v.dir, logFile))
	if err != nil {
		return ""
	}
	const tail = 1000
	if info, err := f.Stat(); err == nil && info.Size() > tail {
		if _, err := f.Seek(-tail, io.SeekEnd); err != nil {
			return ""
		}
	}
	raw, err := io.ReadAll(io.LimitReader(f, tail))
	if errors.Join(err, f.Close()) != nil {
		return ""
	}
	return strings.TrimSpace(string(raw))
}

// Find takes over the VM of an earlier process. What that was about to do with
// it is undone, or finished where the guest may have noticed it.
func (c Config) Find(ctx context.Context, dir string) (*VM, error) {
	v := c.vm(dir)
	raw, err := os.ReadFile(filepath.Join(dir, stateFile))
	if err == nil {
		err = json.Unmarshal(raw, &v.rec)
	}
	if err != nil {
		return nil, fmt.Errorf("read what a microVM's process was: %w", err)
	}
	p, findErr := process.Find(v.rec.PID, v.rec.Started)
	if v.rec.Paused {
		if findErr == nil {
			if err := p.Kill(); err != nil {
				return nil, err
			}
		}
		for _, path := range []string{v.snapshot(v.rec.Last).State, v.snapshot(v.rec.Last).Memory} {
			if _, err := os.Stat(filepath.Join(dir, path)); err != nil {
				return nil, fmt.Errorf("the snapshot of a paused microVM: %w", err)
			}
		}
		v.rec.PID, v.rec.Started = 0, 0
		return v, nil
	}
	if findErr != nil {
		return nil, findErr
	}
	v.adopt(p)
	info, err := v.client.Info(ctx)
	switch {
	case err != nil:
	case info.State == StatePaused:
		err = v.client.Resume(ctx)
	case info.State != StateRunning:
		err = fmt.Errorf("the microVM is in state %q", info.State)
	}
	if err != nil {
		return nil, errors.Join(err, v.Kill())
	}
	return v, nil
}

// Discard ends what may still run of a VM that Find did not get.
func Discard(dir string) error {
	raw, err := os.ReadFile(filepath.Join(dir, stateFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	var rec recorded
	if err == nil {
		err = json.Unmarshal(raw, &rec)
	}
	if err != nil {
		return fmt.Errorf("read what a microVM's process was: %w", err)
	}
	if p, err := process.Find(rec.PID, rec.Started); err == nil {
		return p.Kill()
	}
	return nil
}

// spawn starts a Firecracker process that has nothing configured, and returns
// when it answers.
func (v *VM) spawn(ctx context.Context) error {
	for _, name := range []string{apiSocket, vsockSocket} {
		if err := os.Remove(filepath.Join(v.dir, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove an old socket: %w", err)
		}
	}
	log, err := os.OpenFile(filepath.Join(v.dir, logFile), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("make a microVM's log: %w", err)
	}
	cmd := exec.Command(v.config.Binary, "--api-sock", apiSocket, "--id", filepath.Base(v.dir))
	cmd.Dir = v.dir
	cmd.Env = []string{"PATH=/usr/local/bin:/usr/bin:/bin"}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	if err = errors.Join(err, log.Close()); err != nil {
		return fmt.Errorf("start firecracker: %w", err)
	}
	started, err := process.StartTime(cmd.Process.Pid)
	var p *process.Process
	if err == nil {
		p, err = process.Find(cmd.Process.Pid, started)
	}
	go func() { _ = cmd.Wait() }() // however it ended, it is gone; p tells when
	if err != nil {
		return fmt.Errorf("firecracker ended at once: %w", errors.Join(err, ignoreDone(cmd.Process.Kill())))
	}
	if !v.adopt(p) {
		return errors.Join(ErrKilled, p.Kill())
	}
	v.rec.PID, v.rec.Started = p.PID, p.Started
	if err := v.write(); err != nil {
		return err
	}
	// Raised, which needs no right: where memory is out a guest goes before the server.
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", p.PID), []byte("500"), 0); err != nil {
		return fmt.Errorf("prefer the microVM when memory is out: %w", err)
	}
	return v.serves(ctx, p)
}

func ignoreDone(err error) error {
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// serves waits until the process answers on its API socket.
func (v *VM) serves(ctx context.Context, p *process.Process) error {
	ctx, cancel := context.WithTimeoutCause(ctx, serveWithin, fmt.Errorf("firecracker did not answer on its socket in %s", serveWithin))
	defer cancel()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		info, err := v.client.Info(ctx)
		switch {
		case err == nil && info.State == StateNotStarted:
			return nil
		case err == nil:
			return fmt.Errorf("%w: a new process is in state %q", errAnswer, info.State)
		case errors.Is(err, errAnswer):
			return err
		}
		select {
		case <-tick.C:
		case <-p.Gone():
			return errors.New("firecracker ended as it started")
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// adopt makes a process the VM's own, unless the VM has been killed meanwhile.
func (v *VM) adopt(p *process.Process) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.killed {
		return false
	}
	v.proc, v.trial = p, v.rec.Paused
	go func() {
		<-p.Gone()
		v.mu.Lock()
		own := v.proc == p && !v.trial
		v.mu.Unlock()
		if own {
			v.end()
		}
	}()
	return true
}

// settle ends the trial of a process: the guest goes on in it.
func (v *VM) settle() {
	v.mu.Lock()
	p := v.proc
	v.trial = false
	v.mu.Unlock()
	select {
	case <-p.Gone():
		v.end()
	default:
	}
}

func (v *VM) end() { v.ended.Do(func() { close(v.gone) }) }

// release parts the VM from its process, whose end then is not the VM's.
func (v *VM) release() (*process.Process, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.killed {
		return nil, ErrKilled
	}
	p := v.proc
	v.proc = nil
	return p, nil
}

func (v *VM) write() error {
	raw, err := json.Marshal(v.rec)
	path := filepath.Join(v.dir, stateFile)
	if err == nil {
		err = os.WriteFile(path+".new", raw, 0o600)
	}
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		return fmt.Errorf("record a microVM's process: %w", err)
	}
	return nil
}

// Gone is closed when the VM has ended. A paused one has not.
func (v *VM) Gone() <-chan struct{} { return v.gone }

// Process names the VM's process; 0 while it is paused.
func (v *VM) Process() (pid int, started uint64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.proc == nil {
		return 0, 0
	}
	return v.proc.PID, v.proc.Started
}

// Dial connects to the agent in the guest.
func (v *VM) Dial(ctx context.Context) (net.Conn, error) {
	return DialVsock(ctx, filepath.Join(v.dir, vsockSocket), Port)
}

// Kill ends the VM in whatever state it is and waits. Its files stay, for whoever
// made the directory.
func (v *VM) Kill() error {
	v.client.Close()
	v.mu.Lock()
	v.killed = true
	p := v.proc
	v.mu.Unlock()
	if p != nil {
		if err := p.Kill(); err != nil {
			return err
		}
	}
	v.end()
	return nil
}

// begin takes the turn; done gives it back.
func (v *VM) begin(ctx context.Context) (done func(), err error) {
	select {
	case <-v.turn:
		return func() { v.turn <- struct{}{} }, nil
	case <-v.gone:
		return nil, ErrEnded
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

func (v *VM) snapshot(n int) Snapshot {
	return Snapshot{State: "state." + strconv.Itoa(n), Memory: "memory." + strconv.Itoa(n)}
}

// Pause writes the VM's state to files and ends its process, which frees its
// memory. One that is paused already stays so. When it fails the VM goes on,
// unless the error is that it has ended.
func (v *VM) Pause(ctx context.Context) error {
	done, err := v.begin(ctx)
	if err != nil {
		return err
	}
	defer done()
	if v.rec.Paused {
		return nil
	}
	next := v.snapshot(v.rec.Last + 1)
	if err := v.freeze(ctx, next, v.dir); err != nil {
		return errors.Join(err, v.thaw(ctx))
	}
	last := v.rec.Last
	v.rec.Paused, v.rec.Last = true, last+1
	if err := v.write(); err != nil {
		v.rec.Paused, v.rec.Last = false, last
		return errors.Join(err, remove(v.dir, next), v.thaw(ctx))
	}
	p, err := v.release()
	if err != nil {
		return err
	}
	v.client.Close()
	if err := p.Kill(); err != nil {
		return err // Find ends it
	}
	v.rec.PID, v.rec.Started = 0, 0
	return errors.Join(v.write(), remove(v.dir, v.snapshot(last)))
}

// freeze stops the guest and writes a snapshot; a failed one leaves no file.
func (v *VM) freeze(ctx context.Context, to Snapshot, dir string) error {
	if err := v.client.Pause(ctx); err != nil {
		return err
	}
	if err := v.client.CreateSnapshot(ctx, to); err != nil {
		return errors.Join(err, remove(dir, to))
	}
	return nil
}

// thaw lets the guest go on, also after the caller has gone away.
func (v *VM) thaw(ctx context.Context) error {
	select {
	case <-v.gone:
		return ErrEnded
	default:
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoWithin)
	defer cancel()
	for {
		err := v.client.Resume(ctx)
		var refused *APIError
		if err == nil || errors.As(err, &refused) || ctx.Err() != nil {
			return err
		}
		select {
		case <-v.gone:
			return ErrEnded
		case <-ctx.Done():
			return err
		case <-time.After(50 * time.Millisecond): // it still writes the snapshot that was given up
		}
	}
}

// remove removes a snapshot's files, those that are there.
func remove(dir string, s Snapshot) error {
	var errs []error
	for _, path := range []string{s.State, s.Memory} {
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Resume lets a paused VM go on, in a new process. One that runs goes on
// running. When it fails the VM stays paused.
func (v *VM) Resume(ctx context.Context) error {
	done, err := v.begin(ctx)
	if err != nil {
		return err
	}
	defer done()
	if !v.rec.Paused {
		return nil
	}
	err = v.spawn(ctx)
	if err == nil {
		err = v.client.LoadSnapshot(ctx, v.snapshot(v.rec.Last))
	}
	if err == nil {
		v.rec.Paused = false // from here on the guest may have gone on
		err = v.write()
	}
	if err == nil {
		err = v.client.Resume(ctx)
	}
	if err == nil {
		v.settle()
		return nil
	}
	if said := v.Said(); said != "" {
		err = fmt.Errorf("%w; firecracker said: %s", err, said)
	}
	p, releaseErr := v.release()
	if releaseErr != nil {
		return errors.Join(err, releaseErr)
	}
	v.client.Close()
	if p != nil {
		err = errors.Join(err, p.Kill())
	}
	v.rec.Paused, v.rec.PID, v.rec.Started = true, 0, 0
	return errors.Join(err, v.write())
}

// Snapshot writes the VM's state to two new files, and the VM goes on as it was.
func (v *VM) Snapshot(ctx context.Context, to Snapshot) error {
	done, err := v.begin(ctx)
	if err != nil {
		return err
	}
	defer done()
	if v.rec.Paused { // its files do not change any more: another name for them does
		last := v.snapshot(v.rec.Last)
		err := os.Link(filepath.Join(v.dir, last.State), to.State)
		if err == nil {
			err = os.Link(filepath.Join(v.dir, last.Memory), to.Memory)
		}
		if err != nil {
			return errors.Join(fmt.Errorf("keep a snapshot: %w", err), remove(v.dir, to))
		}
		return nil
	}
	err = v.freeze(ctx, to, v.dir)
	return errors.Join(err, v.thaw(ctx))
}

// Paused tells whether the VM is paused.
func (v *VM) Paused() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return (v.proc == nil || v.trial) && !v.killed
}
