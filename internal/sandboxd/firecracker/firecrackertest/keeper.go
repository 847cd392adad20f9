package firecrackertest

import (
	"bufio"
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

	"golang.org/x/sys/unix"

	"berth/internal/desktop"
	"berth/internal/sandboxd/firecracker"
	"berth/internal/sandboxd/guest"
	"berth/internal/sandboxd/process"
)

// A keeper is what a guest's processes are children of. One process of the
// stand-in at a time is attached to it; when that ends the guest ends, unless it
// is stopped and a snapshot of it is there.

// attachment is the connection to a keeper.
type attachment struct {
	socket string
	mu     sync.Mutex
	conn   net.Conn
	lines  chan string
	gone   chan struct{}
}

// portPath is where a guest listens on a vsock port.
func portPath(keeper string, port int) string {
	return filepath.Join(filepath.Dir(keeper), "port."+strconv.Itoa(port))
}

// startKeeper starts a keeper and its guest, and attaches to it.
func startKeeper(bootArgs string) (*attachment, error) {
	dir, err := os.MkdirTemp("", "fck")
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{keeperName, dir, bootArgs, filepath.Dir(os.Args[0])} // the last so that Install finds it
	if _, err := cmd.StdinPipe(); err != nil {                               // ends with this process
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	if strings.Contains(bootArgs, "console=ttyS0") {
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	go func() { _ = cmd.Wait() }() // the connection tells
	socket := filepath.Join(dir, "k")
	for end := time.Now().Add(20 * time.Second); ; {
		a, err := reattach(socket)
		if err == nil || time.Now().After(end) {
			return a, err
		}
		<-time.After(pollEvery)
	}
}

// reattach attaches to a keeper that nobody is attached to.
func reattach(socket string) (*attachment, error) {
	conn, err := net.Dial("unix", socket)
	if err != nil {
		return nil, err
	}
	a := &attachment{socket: socket, conn: conn, lines: make(chan string), gone: make(chan struct{})}
	go func() {
		for in := bufio.NewScanner(conn); in.Scan(); {
			a.lines <- in.Text()
		}
		close(a.gone)
	}()
	if err := a.tell("attach"); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return a, nil
}

// tell sends a line and waits until it has been done.
func (a *attachment) tell(line string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, err := fmt.Fprintln(a.conn, line); err != nil {
		return err
	}
	select {
	case answer := <-a.lines:
		if answer != "ok" {
			return errors.New(answer)
		}
		return nil
	case <-a.gone:
		return errors.New("the guest has ended")
	}
}

// keeper runs in a process of its own.
type keeper struct {
	mu       sync.Mutex
	attached bool
	met      bool // somebody has been attached
	stopped  bool
	kept     *os.File // state file of the newest snapshot
	conn     net.Conn // of whoever is attached
}

func runKeeper() error {
	dir := os.Args[1]
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return err
	}
	l, err := net.Listen("unix", filepath.Join(dir, "k"))
	if err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = append([]string{guestName}, os.Args[1:]...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	k := &keeper{}
	end := func() {
		k.mu.Lock() // for good: nothing is done any more
		if k.conn != nil {
			_ = k.conn.Close() // first, so that the microVM ends
		}
		each(syscall.SIGKILL)
		_ = os.RemoveAll(dir) // in /tmp; nothing depends on it
		os.Exit(0)
	}
	go func() {
		_ = cmd.Wait() // however it ended, the machine reboots
		end()
	}()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // nothing comes; it ends with who started this
		k.mu.Lock()
		met := k.met
		k.mu.Unlock()
		if !met {
			end()
		}
	}()
	go func() {
		for range time.Tick(pollEvery) {
			if k.abandoned() {
				end()
			}
		}
	}()
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			if k.serve(conn) {
				end()
			}
		}()
	}
}

// abandoned tells whether a snapshot that nobody has loaded has been removed.
func (k *keeper) abandoned() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.attached || k.kept == nil {
		return false
	}
	var st unix.Stat_t
	return unix.Fstat(int(k.kept.Fd()), &st) != nil || st.Nlink == 0
}

// serve does what the attached process says; true: it has ended and the guest
// ends with it.
func (k *keeper) serve(conn net.Conn) (end bool) {
	mine := false
	for in := bufio.NewScanner(conn); in.Scan(); {
		answer := "ok"
		if err := k.do(in.Text(), &mine); err != nil {
			answer = err.Error()
		} else if in.Text() == "attach" {
			k.mu.Lock()
			k.conn = conn
			k.mu.Unlock()
		}
		if _, err := fmt.Fprintln(conn, answer); err != nil {
			break
		}
	}
	_ = conn.Close() // it has ended
	if !mine {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.attached, k.conn = false, nil
	return !k.stopped || k.kept == nil
}

func (k *keeper) do(line string, mine *bool) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	word, path, _ := strings.Cut(line, " ")
	if word != "attach" && !*mine {
		return errors.New("attach first")
	}
	switch word {
	case "attach":
		if k.attached {
			return errors.New("another has the guest")
		}
		k.attached, k.met, *mine = true, true, true
	case "stop":
		k.stopped = true
		// A process may have started another meanwhile: until there is none left.
		for each(syscall.SIGSTOP) {
		}
	case "cont":
		if k.kept != nil {
			_ = k.kept.Close() // only read
			k.kept = nil       // the guest is not what it was in it any more
		}
		k.stopped = false
		each(syscall.SIGCONT)
	case "kept":
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		k.kept = f
	default:
		return errors.New("no such word")
	}
	return nil
}

// each sends a signal to every descendant of this process that has not got it,
// and reports whether there was one.
func each(signal syscall.Signal) (any bool) {
	children := map[int][]int{}
	state := map[int]string{}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return false
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if fields, err := process.Stat(pid); err == nil {
			if parent, err := strconv.Atoi(fields[1]); err == nil {
				children[parent] = append(children[parent], pid)
				state[pid] = fields[0]
			}
		}
	}
	for todo := children[os.Getpid()]; len(todo) > 0; todo = todo[1:] {
		pid := todo[0]
		todo = append(todo, children[pid]...)
		if state[pid] == "Z" || signal == syscall.SIGSTOP && state[pid] == "T" {
			continue
		}
		any = syscall.Kill(pid, signal) == nil || any
	}
	return any
}

// runGuest is the inside: the agent, as it would run in a microVM, on a unix
// socket instead of vsock.
func runGuest(agent guest.Agent) error {
	dir, line := os.Args[1], os.Args[2]
	raw, _, err := guest.Parse(line)
	if err != nil {
		return err
	}
	var config desktop.AgentConfig
	if err := json.Unmarshal(raw, &config); err != nil {
		return err
	}
	// Of this host, not of a machine of its own.
	config.Home, config.UID, config.ServerUID, config.Nested = filepath.Join(dir, "home"), 0, 0, os.Getuid() != 0
	if err := os.Mkdir(config.Home, 0o700); err != nil {
		return err
	}
	if raw, err = json.Marshal(config); err != nil {
		return err
	}
	l, err := net.Listen("unix", portPath(filepath.Join(dir, "k"), firecracker.Port))
	if err != nil {
		return err
	}
	return agent(l, raw, func(now time.Time, seed []byte) error {
		return os.WriteFile(filepath.Join(config.Home, Woken), fmt.Appendf(nil, "%s %d\n", now.UTC().Format(time.RFC3339Nano), len(seed)), 0o600)
	})
}
