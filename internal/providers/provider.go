// Package providers is the one interface to everything that can hold a
// sandbox: the Provider, its typed handle, and its typed errors. Each backend
// is a package below this one; a factory chooses among them by environment.
//
// A Provider speaks for one server. It is safe for concurrent use; calls that
// name different sandboxes do not wait for each other. It never retries an
// action. What a backend cannot do it declares by leaving the capability out
// of Info, and refuses with ErrUnsupported: an empty answer never hides a gap.
package providers

import (
	"context"
	"time"

	"berth/internal/computer"
)

// Capability is an ability that a create request may require and a server may
// declare. The words below are the contract's; another word is a server's own
// and is compared as it stands.
type Capability = string

// The contract's capabilities.
const (
	Browser   Capability = "browser"
	Desktop   Capability = "desktop"
	Shell     Capability = "shell"
	Files     Capability = "files"
	Clipboard Capability = "clipboard"
	Windows   Capability = "windows"
	Stream    Capability = "stream"
	PauseCap  Capability = "pause"
	Snapshot  Capability = "snapshot"
	GPU       Capability = "gpu"
	Audio     Capability = "audio"
)

// Provider creates, drives and ends sandboxes on one server.
//
// Every method returns one of the package's errors (wrapped) when it fails,
// returns promptly after ctx ends, and leaves nothing running on its own
// account afterwards.
type Provider interface {
	// Info tells what the server is and can do. It needs no network.
	Info() Info
	// Health probes the server once; nil means that it serves. BootID changes
	// whenever the server has lost its sandboxes (a reboot).
	Health(ctx context.Context) (Health, error)

	// Create makes a sandbox and returns when it is ready to use: it answers
	// and has painted. It is idempotent by (spec.VM, spec.Fence): the same pair
	// again returns the same sandbox. Another fence for a vm that exists is
	// ErrConflict. When it fails nothing stays behind.
	Create(ctx context.Context, spec Spec) (Sandbox, error)
	// Get returns one sandbox by vm id, or ErrNotFound.
	Get(ctx context.Context, vm string) (Sandbox, error)
	// List returns the whole inventory. An error means unknown, never "none".
	List(ctx context.Context) ([]Sandbox, error)
	// Kill ends a sandbox and returns nil once it is gone; nil also when there
	// is none. It works in every state and frees calls that hang in it.
	Kill(ctx context.Context, vm string) error
	// SetTimeout sets the server's own end of life to now + d, a safety net
	// behind Berth's clocks. A server without one answers nil.
	SetTimeout(ctx context.Context, vm string, d time.Duration) error
	// Pause stops a sandbox and keeps its state; Resume continues it.
	// ErrUnsupported unless Info declares PauseCap.
	Pause(ctx context.Context, vm string) error
	Resume(ctx context.Context, vm string) error
	// Snapshot saves a sandbox's state as a template and returns its name.
	// ErrUnsupported unless Info declares Snapshot.
	Snapshot(ctx context.Context, vm string) (string, error)

	// Execute runs the actions in order and stops at the first that fails. The
	// results have one entry per action (Skipped after a failure). The error is
	// for the batch as a whole: ErrNotFound, ErrFenceStale, ErrUnsupported and
	// ErrInvalid mean that nothing ran; any other means that nobody can say how
	// far it went. Keys and buttons that an action of the batch held are
	// released on every way out, except those of mouseDown, which stay until
	// mouseUp or until the batch fails.
	Execute(ctx context.Context, batch Batch) ([]Result, error)
	// Recall tells what became of a batch, by its key, so that a worker's
	// successor can ask instead of guessing. ErrUnsupported where the server
	// keeps no such record, ErrNotFound where it has never seen the key.
	Recall(ctx context.Context, vm, key string) (Recollection, error)
	// Observe takes a picture and reads what the sandbox tells about itself.
	Observe(ctx context.Context, vm string) (View, error)
	// StreamURL is where a person can watch live. ErrUnsupported unless Info
	// declares Stream.
	StreamURL(ctx context.Context, vm string) (string, error)

	// Close releases the provider's own resources. Sandboxes stay.
	Close() error
}

// Info is what a provider declares about its server.
type Info struct {
	Kind         string       // "playwright", "selfhosted", "e2b"
	Capabilities []Capability // sorted
	Displays     bool         // whether Spec.Display may differ from the default
}

// Health is a server's answer to a probe.
type Health struct {
	BootID string // changes when the server lost its sandboxes
}

// Spec describes a sandbox to make.
type Spec struct {
	VM         string // vm id
	Fence      uint64 // names this very placement of the vm
	Tenant     string
	Role       string
	Owner      string
	Session    string
	Template   string // "" is the server's default
	Display    computer.Display
	Timeout    time.Duration // the server's own end of life, see SetTimeout; 0: none
	Env        map[string]string
	Metadata   map[string]string
	ServerID   string
	LeaseEpoch uint64
}

// State of a sandbox at its server.
type State string

// The states.
const (
	Starting State = "starting"
	Running  State = "running"
	Paused   State = "paused"
)

// Sandbox is the handle of one sandbox.
type Sandbox struct {
	ID           string // the backend's own name; for Playwright the vm id
	VM           string
	Fence        uint64
	Tenant       string
	Role         string
	Owner        string
	Session      string
	Server       string
	State        State
	Display      computer.Display
	Capabilities []Capability
	CreatedAt    time.Time
	ExpiresAt    time.Time // the server's own end of life; zero: none
	WatchedAt    time.Time // when somebody last saw the live view, by the server's clock; zero: never, or not known
}

// Batch is one command's actions for one sandbox.
type Batch struct {
	VM      string
	Fence   uint64 // vm fence; a server that checks refuses an older one
	Epoch   uint64 // lease epoch of the worker; likewise
	Key     string // idempotency key: the command's token
	Actions []computer.Action
}

// Result is what became of one action. Image is the PNG of a screenshot or
// zoom, whose picture the caller stores; Result.Value is then empty.
type Result struct {
	computer.ActionResult
	Image []byte
}

// Recollection is what a server remembers of a batch.
type Recollection struct {
	Finished bool // false: it started and has not finished
	Results  []Result
}

// View is what a sandbox looks like. PNG has exactly Display's pixels, with the
// pointer drawn. The Observation's Screenshot is filled by whoever stores it.
type View struct {
	PNG         []byte
	Observation computer.Observation
}
