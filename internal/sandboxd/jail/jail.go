package jail

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/sandboxd/process"
)

// Ids inside a sandbox.
const (
	ServerUID = 900  // the X server
	PersonUID = 1000 // the programs that a person runs
	Home      = "/home/user"
)

// First arguments of the children; see Main.
const (
	initArg  = "sandbox-init"
	agentArg = "sandbox-agent"
)

// Host user ids: sandbox n has idBase + n*idCount and the following. systemd
// gives its containers the ids below.
const (
	idBase   = 0x70000000
	idCount  = 65536
	MaxSlots = 0x7fff0000/idCount - idBase/idCount // sandboxes at a time
)

// Spec describes a sandbox to start.
type Spec struct {
	ID      string // name of its cgroup: [a-z0-9-]
	Dir     string // on the host, for its socket and log; exists
	Slot    int    // 0 to MaxSlots-1; one sandbox at a time has it
	Limits  Limits
	Network Network
	Agent   json.RawMessage // handed to the agent
	Weak    Weakness        // what is left out, because the host denies it

	// Ephemeral has the sandbox end with this process, however that ends.
	Ephemeral bool
}

// Limits of a sandbox. 0 is no limit.
type Limits struct {
	Memory    int64   // bytes, tmpfs included
	Processes int     // and threads
	CPUs      float64 // processors' worth of time
	Files     int64   // bytes of the home directory and of /tmp, each
}

// Network says what of the network a sandbox reaches.
type Network struct {
	Out  bool     // a way out, through slirp4netns
	Open []string // address ranges (CIDR) that are reachable all the same
}

// Weakness is what a host cannot enforce.
type Weakness struct {
	Namespaces bool // no isolation at all: the host's files, processes and network
	Cgroups    bool // no limits
}

// Process is a running sandbox.
type Process struct {
	PID     int    // of its first process, on the host
	Started uint64 // clock ticks after boot; with PID it names the process for ever
	Weak    Weakness

	id   string
	gone chan struct{}
}

// SocketPath is where the agent listens.
func SocketPath(dir string) string { return filepath.Join(dir, "agent.sock") }

// Start starts a sandbox. When it returns an error nothing is left.
func Start(spec Spec) (_ *Process, err error) {
	listener, err := listen(spec.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, listener.Close()) }()
	c := child{spec: spec}
	defer func() { err = errors.Join(err, c.closePipes()) }()
	if err := c.start(listener); err != nil {
		return nil, err
	}
	p := &Process{PID: c.cmd.Process.Pid, Weak: spec.Weak, id: spec.ID, gone: make(chan struct{})}
	if p.Started, err = process.StartTime(p.PID); err == nil {
		err = c.release(p)
	}
	held := c.gate
	if spec.Ephemeral {
		c.gate = nil // open until the sandbox ends, or with this process
	}
	go func() {
		_ = c.cmd.Wait() // however it ended, it is gone
		if spec.Ephemeral {
			_ = held.Close() // nobody reads it any more
		}
		close(p.gone)
	}()
	if err != nil {
		return nil, errors.Join(err, p.Kill())
	}
	return p, nil
}

// listen makes the agent's socket. It belongs to the host: the sandbox has it
// as an open descriptor and no path to it.
func listen(dir string) (*os.File, error) {
	path := SocketPath(dir)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("make the agent's socket: %w", err)
	}
	l.SetUnlinkOnClose(false)
	file, err := l.File()
	if err = errors.Join(err, l.Close()); err != nil {
		return nil, fmt.Errorf("make the agent's socket: %w", err)
	}
	return file, nil
}

// child is a first process at its start. It waits for a byte on the pipe gate
// while its cgroup and network are made, and holds the pipe alive until it
// ends.
type child struct {
	spec              Spec
	cmd               *exec.Cmd
	gate, alive, note *os.File // our ends
	theirs            []*os.File
}

// Descriptors of the children.
const (
	fdConfig   = 3 // init: its configuration, one JSON value
	fdListener = 4 // init and agent: the agent's socket
	fdGate     = 5 // init: go on when a byte comes
	fdAlive    = 6 // init: held open
)

// initConfig is what the first process is told.
type initConfig struct {
	Weak    Weakness
	Files   int64
	Blocked []string // routes to make unreachable
	Network bool
	Agent   json.RawMessage
	Probe   bool
	Gated   bool // end when the gate closes
}

func (c *child) start(listener *os.File) error {
	config := initConfig{Weak: c.spec.Weak, Files: c.spec.Limits.Files, Agent: c.spec.Agent, Network: c.spec.Network.Out, Probe: c.spec.Agent == nil, Gated: c.spec.Ephemeral}
	var err error
	if config.Blocked, err = blocked(c.spec.Network.Open); err != nil {
		return err
	}
	raw, err := json.Marshal(config)
	if err != nil {
		return fmt.Errorf("encode the sandbox's configuration: %w", err)
	}
	pipes := [3][2]*os.File{}
	for i := range pipes {
		if pipes[i][0], pipes[i][1], err = os.Pipe(); err != nil {
			return fmt.Errorf("make a pipe: %w", err)
		}
	}
	c.note, c.gate, c.alive = pipes[0][1], pipes[1][1], pipes[2][0]
	c.theirs = []*os.File{pipes[0][0], pipes[1][0], pipes[2][1]}
	log, err := os.OpenFile(filepath.Join(c.spec.Dir, "log"), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("make the sandbox's log: %w", err)
	}
	c.theirs = append(c.theirs, log)
	c.cmd = exec.Command("/proc/self/exe")
	c.cmd.Args = []string{"sandboxd", initArg}
	c.cmd.Env = []string{"PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "GOTRACEBACK=single", "GOMAXPROCS=1"}
	c.cmd.Dir = "/"
	c.cmd.Stdout, c.cmd.Stderr = log, log
	c.cmd.ExtraFiles = []*os.File{c.theirs[0], listener, c.theirs[1], c.theirs[2]}
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if !c.spec.Weak.Namespaces {
		base := idBase + c.spec.Slot*idCount
		ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: base, Size: idCount}}
		c.cmd.SysProcAttr = &syscall.SysProcAttr{
			Setsid: true, UidMappings: ids, GidMappings: ids, GidMappingsEnableSetgroups: true, Credential: &syscall.Credential{},
			Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWNET | unix.CLONE_NEWUTS,
		}
	}
	if err := c.cmd.Start(); err != nil {
		return fmt.Errorf("start the sandbox's first process: %w", err)
	}
	if _, err := c.note.Write(raw); err != nil { // less than a pipe holds
		return errors.Join(fmt.Errorf("configure the sandbox: %w", err), c.cmd.Process.Kill())
	}
	return nil
}

// release gives the first process its cgroup and network and lets it go on.
func (c *child) release(p *Process) error {
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", p.PID), []byte("500"), 0); err != nil {
		return fmt.Errorf("prefer the sandbox when memory is out: %w", err)
	}
	if !c.spec.Weak.Cgroups {
		if err := makeCgroup(c.spec.ID, c.spec.Limits, p.PID); err != nil {
			return err
		}
	}
	if c.spec.Network.Out && !c.spec.Weak.Namespaces {
		if err := startNetwork(c.spec, p.PID, c.alive); err != nil {
			return err
		}
	}
	if _, err := c.gate.Write([]byte{1}); err != nil {
		return fmt.Errorf("the sandbox's first process ended: %w", err)
	}
	return nil
}

func (c *child) closePipes() error {
	var errs []error
	for _, f := range append(c.theirs, c.gate, c.alive, c.note) {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// Find takes over a sandbox of an earlier process, or says why it is gone.
func Find(id string, pid int, started uint64, weak Weakness) (*Process, error) {
	first, err := process.Find(pid, started)
	if err != nil {
		return nil, fmt.Errorf("sandbox %s: %w", id, err)
	}
	p := &Process{PID: pid, Started: started, Weak: weak, id: id, gone: make(chan struct{})}
	go func() {
		<-first.Gone()
		close(p.gone)
	}()
	return p, nil
}

// Gone is closed when the sandbox has ended.
func (p *Process) Gone() <-chan struct{} { return p.gone }

// Kill ends the sandbox with all its processes and waits until it is gone. It
// may be called at any time, also again.
func (p *Process) Kill() error {
	if p.Weak.Namespaces {
		killTree(p.PID)
	}
	if at, err := process.StartTime(p.PID); err == nil && at == p.Started {
		if err := syscall.Kill(p.PID, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("kill sandbox %s: %w", p.id, err)
		}
	}
	select {
	case <-p.gone:
	case <-time.After(10 * time.Second):
		return fmt.Errorf("sandbox %s does not end", p.id)
	}
	if p.Weak.Cgroups {
		return nil
	}
	return removeCgroup(p.id)
}

// killTree kills the descendants of a process, as far as they are still such.
func killTree(root int) {
	children := map[int][]int{}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if fields, err := process.Stat(pid); err == nil {
			if parent, err := strconv.Atoi(fields[1]); err == nil {
				children[parent] = append(children[parent], pid)
			}
		}
	}
	for todo := children[root]; len(todo) > 0; todo = todo[1:] {
		todo = append(todo, children[todo[0]]...)
		if syscall.Kill(todo[0], syscall.SIGKILL) != nil {
			continue // it has just ended
		}
	}
}
