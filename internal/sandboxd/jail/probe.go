package jail

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
)

// Probe tries out what this host allows.
type Probe struct {
	Weak    Weakness
	Network bool     // slirp4netns works
	Denied  []string // what is not enforced and why, in words
	NoWay   string   // why there is no way out
}

// probed keeps the answers: what a host allows does not change while a process
// lives.
var probed = struct {
	sync.Mutex
	byOpen map[string]Probe
}{byOpen: map[string]Probe{}}

// ProbeHost starts and ends a sandbox without a program, once in a process. dir
// is for its files.
func ProbeHost(dir string, open []string) (Probe, error) {
	probed.Lock()
	defer probed.Unlock()
	key := strings.Join(open, ",")
	if p, ok := probed.byOpen[key]; ok {
		return p, nil
	}
	p, err := probeHost(dir, open)
	if err == nil {
		probed.byOpen[key] = p
	}
	return p, err
}

func probeHost(dir string, open []string) (Probe, error) {
	var p Probe
	if _, err := cgroups(); err != nil {
		p.Weak.Cgroups = true
		p.Denied = append(p.Denied, fmt.Sprintf("limits of memory, processes and processor time (cgroups): %v", err))
	}
	if err := probe(dir, p.Weak, Network{}); err != nil {
		p.Weak.Namespaces = true
		p.Denied = append(p.Denied, fmt.Sprintf("isolation of files, processes, users and network (namespaces): %v", err))
		p.NoWay = "without namespaces the sandbox uses the host's network"
		return p, nil
	}
	if _, err := blocked(open); err != nil {
		return p, err
	}
	if _, err := exec.LookPath("slirp4netns"); err != nil {
		p.NoWay = "slirp4netns is not installed (package slirp4netns)"
	} else if err := probe(dir, p.Weak, Network{Out: true, Open: open}); err != nil {
		p.NoWay = err.Error()
	} else {
		p.Network = true
	}
	return p, nil
}

func probe(dir string, weak Weakness, network Network) (err error) {
	tmp, err := os.MkdirTemp(dir, "probe")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	spec := Spec{ID: filepath.Base(tmp), Dir: tmp, Slot: MaxSlots - 1, Network: network, Weak: weak, Limits: Limits{Memory: 256 << 20, Processes: 32, CPUs: 1, Files: 1 << 20}}
	p, err := Start(spec)
	if err == nil {
		<-p.Gone()
		err = p.Kill() // and with it the cgroup
	}
	said, readErr := os.ReadFile(filepath.Join(tmp, "log"))
	if text := strings.TrimSpace(string(said)); err == nil && text != "" {
		err = errors.New(text)
	}
	if err == nil {
		err = readErr
	}
	return err
}
