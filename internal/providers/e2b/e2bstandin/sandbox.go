package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"berth/internal/sandboxd/jail"
)

// envdVersion is the version that the stand-in's envd has the calls of.
const envdVersion = "0.5.7"

// States of a sandbox. The last three are in transition: calls meet 409.
const (
	running  = "running"
	paused   = "paused"
	pausing  = "pausing"
	resuming = "resuming"
	ending   = "ending"
)

// box is one sandbox.
type box struct {
	id, template, token string
	metadata            map[string]string
	autoPause           bool
	allowInternet       bool
	started             time.Time
	slot                int
	dir                 string
	process             *jail.Process
	transport           *http.Transport

	mu    sync.Mutex
	cut   chan struct{} // closed when the calls under way end: a pause breaks them off
	state string
	end   time.Time
	timer *time.Timer
}

// start starts a sandbox's processes and returns when its envd answers.
func (s *server) start(b *box, env map[string]string) error {
	b.dir = filepath.Join(s.opts.StateDir, b.id)
	if err := os.Mkdir(b.dir, 0o755); err != nil {
		return fmt.Errorf("make a directory: %w", err)
	}
	config, err := json.Marshal(envdConfig{SandboxID: b.id, Token: b.token, Env: env})
	if err != nil {
		return fmt.Errorf("encode envd's configuration: %w", err)
	}
	b.process, err = jail.Start(jail.Spec{
		ID: "e2b-" + b.id, Dir: b.dir, Slot: b.slot, Agent: config, Weak: s.probe.Weak,
		Limits:  jail.Limits{Memory: 2 << 30, Processes: 1024, Files: 512 << 20},
		Network: jail.Network{Out: s.probe.Network && b.allowInternet},
	})
	if err != nil {
		return errors.Join(err, os.RemoveAll(b.dir))
	}
	if err := os.WriteFile(filepath.Join(b.dir, "pid"), []byte(strconv.Itoa(b.process.PID)), 0o644); err != nil {
		return errors.Join(err, b.process.Kill())
	}
	b.transport = &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", jail.SocketPath(b.dir))
		},
		DisableCompression: true,
	}
	if err := b.answers(); err != nil {
		raw, readErr := os.ReadFile(filepath.Join(b.dir, "log"))
		return errors.Join(err, readErr, fmt.Errorf("envd said: %.1000s", raw), b.process.Kill())
	}
	go b.hold(s)
	return nil
}

// hold keeps the lifeline until the sandbox ends.
func (b *box) hold(s *server) {
	req, err := http.NewRequest(http.MethodGet, "http://envd/", nil)
	if err == nil {
		req.Header.Set(portHeader, lifeline)
		var resp *http.Response
		if resp, err = b.transport.RoundTrip(req); err == nil {
			err = resp.Body.Close()
		}
	}
	select {
	case <-b.process.Gone():
	case <-time.After(10 * time.Second):
		s.log.Warn("a sandbox has lost its lifeline", "id", b.id, "err", err)
	}
}

// answers waits for envd.
func (b *box) answers() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	client := &http.Client{Transport: b.transport}
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://envd/health", nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err == nil {
			return resp.Body.Close()
		}
		select {
		case <-b.process.Gone():
			return errors.New("the sandbox ended")
		case <-ctx.Done():
			return err
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// stop ends the sandbox's processes.
func (b *box) stop() error {
	b.transport.CloseIdleConnections()
	return errors.Join(b.process.Kill(), os.RemoveAll(b.dir))
}

// signal sends a signal to every process of the sandbox: a stopped one keeps
// its state as a paused machine does.
func (b *box) signal(sig syscall.Signal) error {
	children := map[int][]int{}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		raw, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue // it has just ended
		}
		if f := strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:])); len(f) > 1 {
			if parent, err := strconv.Atoi(f[1]); err == nil {
				children[parent] = append(children[parent], pid)
			}
		}
	}
	all := []int{b.process.PID}
	for i := 0; i < len(all); i++ {
		all = append(all, children[all[i]]...)
	}
	if sig == syscall.SIGCONT {
		slices.Reverse(all)
	}
	for _, pid := range all {
		if err := syscall.Kill(pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("signal process %d: %w", pid, err)
		}
	}
	return nil
}
