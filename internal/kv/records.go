package kv

import (
	"time"

	"berth/internal/computer"
	"berth/internal/events"
)

// Names of the buckets.
const (
	BucketServers    = "SERVERS"
	BucketPlacements = "PLACEMENTS"
	BucketHeartbeats = "HEARTBEATS"
	BucketLeases     = "LEASES"
	BucketFrames     = "FRAMES" // an object store
)

// ServerKey and VMKey are the keys of PLACEMENTS.
func ServerKey(server string) string { return "server." + server }

// VMKey is the PLACEMENTS key of one sandbox.
func VMKey(vm string) string { return "vm." + vm }

// Isolation of a server: what may share it.
type Isolation string

// The isolations.
const (
	IsolationNone   Isolation = "none"
	IsolationRole   Isolation = "role"   // one role at a time
	IsolationTenant Isolation = "tenant" // one tenant at a time
)

// Admin is what people have decided about a server.
type Admin string

// The admin states.
const (
	Active   Admin = "active"
	Cordoned Admin = "cordoned" // nothing new is placed
	Draining Admin = "draining" // nothing new, and what is there ends by a deadline
)

// ServerConfig is a server's entry in its worker's registry.
type ServerConfig struct {
	Provider      string            `json:"provider"`
	Roles         []string          `json:"roles"`
	Priority      int               `json:"priority"`
	MaxContainers int               `json:"maxContainers"`
	Isolation     Isolation         `json:"isolation"`
	Attributes    map[string]string `json:"attributes,omitempty"`
	Capabilities  []string          `json:"capabilities"`
}

// Alloc is one sandbox's claim on a server's capacity. It exists before the
// sandbox and goes only when the sandbox is confirmed gone.
type Alloc struct {
	Attempt string    `json:"attempt"`
	Fence   uint64    `json:"fence"`
	Role    string    `json:"role"`
	Tenant  string    `json:"tenant"`
	Since   time.Time `json:"since"`
}

// Server is PLACEMENTS `server.<id>`: the only truth for capacity, isolation
// and admission of one server.
type Server struct {
	ID            string           `json:"id"`
	Config        ServerConfig     `json:"config"`
	Admin         Admin            `json:"admin"`
	DrainDeadline *time.Time       `json:"drainDeadline,omitempty"`
	DrainID       string           `json:"drainId,omitempty"` // names the drain request
	Drained       bool             `json:"drained,omitempty"` // its worker has confirmed zero
	Epoch         uint64           `json:"epoch"`             // lease epoch of the worker that registered last
	Worker        string           `json:"worker"`            // its name
	Allocs        map[string]Alloc `json:"allocs,omitempty"`
}

// Phase of a sandbox's placement.
type Phase string

// The phases, in order.
const (
	Queued   Phase = "queued"
	Reserved Phase = "reserved"
	Starting Phase = "starting"
	Ready    Phase = "ready"
	Ended    Phase = "ended"
)

// Ending says how a sandbox is to end, once its server has confirmed.
type Ending struct {
	Outcome string    `json:"outcome"` // killed, expired, failed
	Code    string    `json:"code"`
	Message string    `json:"message"`
	Since   time.Time `json:"since"`
	Attempt int       `json:"attempt"` // of the first kill command; those that follow are found by their results
}

// Placement is PLACEMENTS `vm.<vmId>`: the only truth for one sandbox.
type Placement struct {
	VMID      string         `json:"vmId"`
	ServerID  string         `json:"serverId,omitempty"`
	Tenant    string         `json:"tenant"`
	Role      string         `json:"role"`
	Owner     string         `json:"owner,omitempty"`
	Session   string         `json:"session,omitempty"`
	Phase     Phase          `json:"phase"`
	Fence     uint64         `json:"fence,omitempty"`
	Outcome   string         `json:"outcome,omitempty"` // of an ended sandbox: failed, rejected, expired, killed, lost
	Request   events.Request `json:"request"`
	CreatedAt time.Time      `json:"createdAt"`
	ReadyAt   *time.Time     `json:"readyAt,omitempty"`
	ExpiresAt *time.Time     `json:"expiresAt,omitempty"`
	EndedAt   *time.Time     `json:"endedAt,omitempty"`

	Code    string `json:"code,omitempty"`    // why it ended
	Message string `json:"message,omitempty"` // likewise, for people

	Order       uint64                `json:"order"`                 // REQUESTS sequence: the order of arrival
	Deadline    time.Time             `json:"deadline"`              // queueTimeoutSeconds from publication
	Spec        *events.SandboxCreate `json:"spec,omitempty"`        // dropped at the end
	Attempt     string                `json:"attempt,omitempty"`     // of the present reservation
	Attempts    int                   `json:"attempts,omitempty"`    // reservations so far
	ReservedAt  *time.Time            `json:"reservedAt,omitempty"`  // of the present reservation
	Explanation string                `json:"explanation,omitempty"` // why this server
	Ending      *Ending               `json:"ending,omitempty"`      // set: it is to end
	Info        *events.SandboxInfo   `json:"info,omitempty"`        // of a ready sandbox
	ActiveAt    *time.Time            `json:"activeAt,omitempty"`    // last use, where an idle time-out is set
	FreedAt     *time.Time            `json:"freedAt,omitempty"`     // ended: its allocation is gone too
	AvoidServer string                `json:"avoidServer,omitempty"` // refused it last; not tried again before AvoidUntil
	AvoidUntil  *time.Time            `json:"avoidUntil,omitempty"`  //
	PausedAt    *time.Time            `json:"pausedAt,omitempty"`    // the idle clock stands
	Traceparent string                `json:"traceparent,omitempty"` // of the create request
}

// QuotaKey is the PLACEMENTS key of a tenant's quota.
func QuotaKey(tenant string) string { return "quota." + tenant }

// Quota is PLACEMENTS `quota.<tenant>`.
type Quota struct {
	Tenant       string         `json:"tenant"`
	MaxSandboxes int            `json:"maxSandboxes"`
	Request      events.Request `json:"request"` // who set it
}

// Gone is a worker's word that a sandbox it had is no more.
type Gone struct {
	VM      string `json:"vm"`
	Fence   uint64 `json:"fence"`
	Code    string `json:"code"`
	Message string `json:"message"`
}

// Heartbeat is HEARTBEATS `<server>`, written every 2 s by the lease holder.
type Heartbeat struct {
	Server   string    `json:"server"`
	Worker   string    `json:"worker"`
	Epoch    uint64    `json:"epoch"`
	BootID   string    `json:"bootId"`
	Probe    string    `json:"probe,omitempty"`   // "" when the last probe passed, else why not
	Breaker  string    `json:"breaker"`           // closed, half-open, open
	Running  int       `json:"running"`           // sandboxes in the provider's inventory
	Synced   bool      `json:"synced"`            // the inventory has been read since the lease was taken
	Gone     []Gone    `json:"gone,omitempty"`    // until the allocation is freed
	Watched  []string  `json:"watched,omitempty"` // vm ids whose live view somebody saw since the inventory before the last
	SentAt   time.Time `json:"sentAt"`            // the worker's clock, for people
	Sequence uint64    `json:"sequence"`          // counts up within an epoch
}

// HealthState of a server, as the active scheduler sees it.
type HealthState string

// The health states.
const (
	Healthy  HealthState = "healthy"
	Degraded HealthState = "degraded"
	Down     HealthState = "down"
)

// ServerView is SERVERS `<server>`: the merged picture that people read. The
// active scheduler writes it; nothing is decided from it.
type ServerView struct {
	ID            string            `json:"id"`
	Provider      string            `json:"provider"`
	Roles         []string          `json:"roles"`
	Priority      int               `json:"priority"`
	MaxContainers int               `json:"maxContainers"`
	Isolation     Isolation         `json:"isolation"`
	Attributes    map[string]string `json:"attributes"`
	Capabilities  []string          `json:"capabilities"`
	Admin         Admin             `json:"admin"`
	Health        HealthState       `json:"health"`
	Reason        string            `json:"reason"`
	Breaker       string            `json:"breaker"`
	Used          int               `json:"used"`
	BootID        string            `json:"bootId"`
	Worker        string            `json:"worker"`
	ObservedAt    time.Time         `json:"observedAt"`
}

// Display returns the display the sandbox was asked to have.
func (p *Placement) Display() computer.Display {
	if p.Spec != nil && p.Spec.Display != nil {
		return *p.Spec.Display
	}
	return computer.DefaultDisplay
}
