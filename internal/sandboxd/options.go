package sandboxd

import (
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"runtime"

	"berth/internal/sandboxd/firecracker"
	"berth/internal/sandboxd/jail"
)

// DefaultTemplate is what sandboxes are made from, unless they name a snapshot.
const DefaultTemplate = "desktop"

// Options configure a Server.
type Options struct {
	StateDir      string // one server at a time has it; a short path, since sockets are below it
	APIKey        string
	MaxContainers int // sandboxes at a time
	Warm          int // spares kept ready
	Roles         []string
	Machine       string // one of the constants below
	Limits        jail.Limits
	Firecracker   firecracker.Config // of microVMs; sizes are taken from Limits
	OpenNetworks  []string           // CIDR ranges reachable beside public addresses
	AllowWeaker   bool               // start also where the host cannot isolate or limit
	BrowserFlags  []string           // more flags for Chromium
	NoVNC         string             // directory of noVNC; "": DefaultNoVNC
	FreeMemory    int64              // bytes of the host's memory that must be free for another sandbox
	FreeDisk      int64              // bytes of the state directory's disk that must stay free
	Ephemeral     bool               // sandboxes end with this process, however that ends; call Shutdown, not Close
	Logger        *slog.Logger
}

// What a host keeps free, unless its operator says otherwise: a desktop with
// Chromium on an empty page takes 200 MiB.
const (
	DefaultFreeMemory = 256 << 20
	DefaultFreeDisk   = 64 << 20
)

// What a Machine can be.
const (
	MachineDesktop     = "desktop"
	MachineFirecracker = "firecracker"
)

// DefaultLimits are those of one sandbox with a browser.
func DefaultLimits() jail.Limits {
	return jail.Limits{Memory: 2 << 30, Processes: 512, CPUs: float64(min(2, runtime.NumCPU())), Files: 512 << 20}
}

var identifier = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// Validate lists every fault.
func (o Options) Validate() []error {
	var errs []error
	add := func(bad bool, text string) {
		if bad {
			errs = append(errs, errors.New(text))
		}
	}
	add(o.StateDir == "", "state dir: missing")
	add(len(o.APIKey) < 16, "API key: at least 16 characters")
	add(o.MaxContainers < 1 || o.MaxContainers > 1000, "max: 1 to 1000 sandboxes")
	add(o.Warm < 0 || o.Warm > 100, "warm: 0 to 100 spares")
	add(o.Limits.Memory != 0 && o.Limits.Memory < 128<<20, "memory: at least 128 MiB, or 0 for no limit")
	add(o.FreeMemory < 0 || o.FreeDisk < 0, "free memory and disk: not negative")
	add(o.Limits.Files < 0 || o.Limits.CPUs < 0 || o.Limits.Processes < 0, "a limit is negative")
	for _, r := range o.Roles {
		add(!identifier.MatchString(r), fmt.Sprintf("role %.70q: letters, digits, _ and -, at most 64", r))
	}
	add(o.Machine != MachineDesktop && o.Machine != MachineFirecracker, fmt.Sprintf("machine %.40q: known are %s and %s", o.Machine, MachineDesktop, MachineFirecracker))
	if o.Machine == MachineFirecracker {
		add(o.Limits.Memory == 0 || o.Limits.CPUs == 0, "a microVM has a size: memory and cpus cannot be without limit")
		add(o.Ephemeral, "microVMs do not end with this process: use machine desktop for that")
		add(len(o.OpenNetworks) > 0, "open networks: microVMs have no network")
	}
	return errs
}
