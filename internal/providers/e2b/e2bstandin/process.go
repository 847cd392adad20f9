package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// Messages of process.Process, in the JSON form of protobuf.

type processConfig struct {
	Cmd  string            `json:"cmd"`
	Args []string          `json:"args,omitempty"`
	Envs map[string]string `json:"envs,omitempty"`
	Cwd  *string           `json:"cwd,omitempty"`
}

type startRequest struct {
	Process processConfig `json:"process"`
	Tag     *string       `json:"tag,omitempty"`
	Stdin   *bool         `json:"stdin,omitempty"`
}

type selector struct {
	PID *int    `json:"pid,omitempty"`
	Tag *string `json:"tag,omitempty"`
}

type selected struct {
	Process selector `json:"process"`
}

type signalRequest struct {
	Process selector `json:"process"`
	Signal  string   `json:"signal"`
}

type inputRequest struct {
	Process selector `json:"process"`
	Input   struct {
		Stdin []byte `json:"stdin"`
	} `json:"input"`
}

type event struct {
	Start     *startEvent `json:"start,omitempty"`
	Data      *dataEvent  `json:"data,omitempty"`
	End       *endEvent   `json:"end,omitempty"`
	Keepalive *struct{}   `json:"keepalive,omitempty"`
}

type startEvent struct {
	PID int `json:"pid"`
}

type dataEvent struct {
	Stdout []byte `json:"stdout,omitempty"`
	Stderr []byte `json:"stderr,omitempty"`
}

// endEvent leaves an exit code of 0 out, as protobuf's JSON does.
type endEvent struct {
	ExitCode int    `json:"exitCode,omitempty"`
	Exited   bool   `json:"exited,omitempty"`
	Status   string `json:"status"`
	Error    string `json:"error,omitempty"`
}

type eventMessage struct {
	Event event `json:"event"`
}

// process is one that envd has started. Its output goes to those who listen;
// where nobody does it is dropped.
type process struct {
	config processConfig
	tag    *string
	cmd    *exec.Cmd
	pid    int
	stdin  io.WriteCloser

	mu        sync.Mutex
	listeners map[*listener]bool
	ended     bool
}

type listener struct {
	events chan event
	gone   chan struct{} // closed when nobody listens any more
}

func (p *process) listen() *listener {
	p.mu.Lock()
	defer p.mu.Unlock()
	l := &listener{events: make(chan event, 64), gone: make(chan struct{})}
	if p.ended {
		close(l.events)
		return l
	}
	p.listeners[l] = true
	return l
}

func (p *process) leave(l *listener) {
	close(l.gone)
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.listeners, l)
}

// tell gives an event to all; a slow one holds the process up.
func (p *process) tell(e event) {
	p.mu.Lock()
	var all []*listener
	for l := range p.listeners {
		all = append(all, l)
	}
	p.mu.Unlock()
	for _, l := range all {
		select {
		case l.events <- e:
		case <-l.gone:
		}
	}
}

func (p *process) end(e event) {
	p.tell(e)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	for l := range p.listeners {
		close(l.events)
	}
	p.listeners = map[*listener]bool{}
}

type processes struct {
	mu  sync.Mutex
	all map[int]*process
}

func newProcesses() *processes { return &processes{all: map[int]*process{}} }

func (ps *processes) find(s selector) (*process, error) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	for pid, p := range ps.all {
		if s.PID != nil && *s.PID == pid || s.Tag != nil && p.tag != nil && *s.Tag == *p.tag {
			return p, nil
		}
	}
	if s.PID != nil {
		return nil, &rpcError{"not_found", fmt.Sprintf("process with pid %d not found", *s.PID)}
	}
	return nil, &rpcError{"not_found", "process with that tag not found"}
}

// routes are the calls of the two services.
func (e *envd) routes(mux *http.ServeMux) {
	mux.HandleFunc("POST /process.Process/Start", streaming(e.start))
	mux.HandleFunc("POST /process.Process/Connect", streaming(e.connect))
	mux.HandleFunc("POST /process.Process/List", unary(e.list))
	mux.HandleFunc("POST /process.Process/SendSignal", unary(e.signal))
	mux.HandleFunc("POST /process.Process/SendInput", unary(e.input))
	mux.HandleFunc("POST /process.Process/CloseStdin", unary(e.closeStdin))
	mux.HandleFunc("POST /filesystem.Filesystem/Stat", unary(e.stat))
	mux.HandleFunc("POST /filesystem.Filesystem/MakeDir", unary(e.makeDir))
	mux.HandleFunc("POST /filesystem.Filesystem/Move", unary(e.move))
	mux.HandleFunc("POST /filesystem.Filesystem/ListDir", unary(e.listDir))
	mux.HandleFunc("POST /filesystem.Filesystem/Remove", unary(e.remove))
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, statuses["unimplemented"], &rpcError{"unimplemented", "the stand-in has no such call"})
	})
}

// start starts a process and streams what it says. The process ends at the
// call's deadline, and goes on when the client leaves.
func (e *envd) start(r *http.Request, in startRequest, s *stream) error {
	who, err := who(r)
	if err != nil {
		return err
	}
	if in.Process.Cmd == "" {
		return &rpcError{"invalid_argument", "cmd is required"}
	}
	limit, err := deadline(r)
	if err != nil {
		return err
	}
	dir := who.home
	if in.Process.Cwd != nil {
		dir = who.path(*in.Process.Cwd)
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return &rpcError{"invalid_argument", fmt.Sprintf("cwd '%s' does not exist", dir)}
	}
	ctx, cancel := context.Background(), context.CancelFunc(func() {})
	if limit > 0 {
		ctx, cancel = context.WithTimeout(ctx, limit)
	}
	p := &process{config: in.Process, tag: in.Tag, listeners: map[*listener]bool{}}
	p.cmd = command(ctx, who, append([]string{in.Process.Cmd}, in.Process.Args...), dir, e.environment(who, in.Process.Envs))
	l := p.listen()
	defer p.leave(l)
	if err := e.run(p, in.Stdin == nil || *in.Stdin, cancel); err != nil {
		cancel()
		return err
	}
	return follow(ctx, r, p, l, s)
}

// run starts p and waits for it beside the call. Its end comes when its output
// has been closed by all that have it.
func (e *envd) run(p *process, stdin bool, done context.CancelFunc) error {
	var err error
	if stdin {
		if p.stdin, err = p.cmd.StdinPipe(); err != nil {
			return err
		}
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	fail, err := p.cmd.StderrPipe()
	if err != nil {
		return err
	}
	if err := p.cmd.Start(); err != nil {
		return &rpcError{"invalid_argument", "error starting process: " + err.Error()}
	}
	p.pid = p.cmd.Process.Pid
	e.processes.mu.Lock()
	e.processes.all[p.pid] = p
	e.processes.mu.Unlock()
	pump := func(from io.Reader, as func([]byte) *dataEvent) {
		buf := make([]byte, 32<<10)
		for {
			n, err := from.Read(buf)
			if n > 0 {
				p.tell(event{Data: as(append([]byte(nil), buf[:n]...))})
			}
			if err != nil {
				return
			}
		}
	}
	go func() {
		var pumps sync.WaitGroup
		pumps.Go(func() { pump(out, func(b []byte) *dataEvent { return &dataEvent{Stdout: b} }) })
		pumps.Go(func() { pump(fail, func(b []byte) *dataEvent { return &dataEvent{Stderr: b} }) })
		pumps.Wait()
		err := p.cmd.Wait()
		done()
		e.processes.mu.Lock()
		delete(e.processes.all, p.pid)
		e.processes.mu.Unlock()
		p.end(event{End: ended(p.cmd.ProcessState, err)})
	}()
	return nil
}

func ended(state *os.ProcessState, err error) *endEvent {
	out := &endEvent{ExitCode: state.ExitCode(), Exited: state.Exited(), Status: state.String()}
	var exit *exec.ExitError
	if err != nil {
		out.Error = err.Error()
		if errors.As(err, &exit) && out.Exited {
			out.Error = ""
		}
	}
	return out
}

// follow streams a process's events until it ends, its time is up, or the
// client leaves.
func follow(ctx context.Context, r *http.Request, p *process, l *listener, s *stream) error {
	if err := s.send(0, eventMessage{event{Start: &startEvent{p.pid}}}); err != nil {
		return err
	}
	every := 90 * time.Second
	if n, err := strconv.Atoi(r.Header.Get("Keepalive-Ping-Interval")); err == nil && n > 0 {
		every = time.Duration(n) * time.Second
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	over := ctx.Done()
	for {
		select {
		case <-over:
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				return ctx.Err()
			}
			over = nil // the process has ended
		case e, ok := <-l.events:
			if !ok {
				return nil
			}
			if err := s.send(0, eventMessage{e}); err != nil {
				return err
			}
		case <-tick.C:
			if err := s.send(0, eventMessage{event{Keepalive: &struct{}{}}}); err != nil {
				return err
			}
		case <-r.Context().Done():
			return r.Context().Err()
		}
	}
}

func (e *envd) connect(r *http.Request, in selected, s *stream) error {
	p, err := e.processes.find(in.Process)
	if err != nil {
		return err
	}
	ctx, cancel := r.Context(), context.CancelFunc(func() {})
	if limit, err := deadline(r); err != nil {
		return err
	} else if limit > 0 {
		ctx, cancel = context.WithTimeout(ctx, limit)
	}
	defer cancel()
	l := p.listen()
	defer p.leave(l)
	return follow(ctx, r.WithContext(ctx), p, l, s)
}

func (e *envd) list(*http.Request, struct{}) (any, error) {
	type info struct {
		Config processConfig `json:"config"`
		PID    int           `json:"pid"`
		Tag    *string       `json:"tag,omitempty"`
	}
	var out struct {
		Processes []info `json:"processes,omitempty"`
	}
	e.processes.mu.Lock()
	defer e.processes.mu.Unlock()
	for _, p := range e.processes.all {
		out.Processes = append(out.Processes, info{p.config, p.pid, p.tag})
	}
	return out, nil
}

func (e *envd) signal(_ *http.Request, in signalRequest) (any, error) {
	sig, ok := map[string]syscall.Signal{"SIGNAL_SIGTERM": syscall.SIGTERM, "SIGNAL_SIGKILL": syscall.SIGKILL}[in.Signal]
	if !ok {
		return nil, &rpcError{"unimplemented", "invalid signal: " + in.Signal}
	}
	p, err := e.processes.find(in.Process)
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Process.Signal(sig); err != nil {
		return nil, &rpcError{"internal", "error sending signal: " + err.Error()}
	}
	return struct{}{}, nil
}

func (e *envd) input(_ *http.Request, in inputRequest) (any, error) {
	p, err := e.processes.find(in.Process)
	if err != nil {
		return nil, err
	}
	if p.stdin == nil {
		return nil, &rpcError{"failed_precondition", "stdin is not enabled"}
	}
	if _, err := p.stdin.Write(in.Input.Stdin); err != nil {
		return nil, &rpcError{"internal", "error writing to stdin: " + err.Error()}
	}
	return struct{}{}, nil
}

func (e *envd) closeStdin(_ *http.Request, in selected) (any, error) {
	p, err := e.processes.find(in.Process)
	if err != nil {
		return nil, err
	}
	if p.stdin == nil {
		return nil, &rpcError{"failed_precondition", "stdin is not enabled"}
	}
	if err := p.stdin.Close(); err != nil {
		return nil, &rpcError{"internal", "error closing stdin: " + err.Error()}
	}
	return struct{}{}, nil
}
