package events

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"

	"berth/internal/computer"
)

// Event types: requests and commands.
const (
	TypeSandboxCreate = "berth.sandbox.create.v1"
	TypeSandboxKill   = "berth.sandbox.kill.v1"
	TypeSandboxExtend = "berth.sandbox.extend.v1"
	TypeServerCordon  = "berth.server.cordon.v1"
	TypeServerUncord  = "berth.server.uncordon.v1"
	TypeServerDrain   = "berth.server.drain.v1"
	TypeServerRemove  = "berth.server.remove.v1"
	TypeQuotaSet      = "berth.quota.set.v1"
)

// CommandType is the type of a command: berth.command.<verb>.v1.
func CommandType(v Verb) string { return "berth.command." + string(v) + ".v1" }

// SandboxType is the type of a sandbox event: berth.sandbox.<name>.v1.
func SandboxType(name string) string { return "berth.sandbox." + name + ".v1" }

// ServerType is the type of a server event: berth.server.<name>.v1.
func ServerType(name string) string { return "berth.server." + name + ".v1" }

// LoopType is the type of a journal entry or loop request: berth.loop.<name>.v1.
func LoopType(name string) string { return "berth.loop." + name + ".v1" }

// Types of results.
const (
	TypeStarted  = "berth.command.started.v1"
	TypeFinished = "berth.command.finished.v1"
)

// Names of sandbox events, the last token of their subject.
const (
	EventQueued   = "queued"
	EventPlaced   = "placed"
	EventReady    = "ready"
	EventFailed   = "failed"
	EventRejected = "rejected"
	EventExpired  = "expired"
	EventKilled   = "killed"
	EventLost     = "lost"
	EventExtended = "extended"
	EventPaused   = "paused" // by its idle clock
	EventFinished = "finished"
)

// Codes say why, for programs. They are stable.
const (
	CodeBadInput     = computer.CodeBadInput   // malformed data, a missing or unknown field
	CodeUnknownKey   = computer.CodeUnknownKey // a key without a name
	CodeOutOfRange   = computer.CodeOutOfRange // a coordinate outside the display
	CodeTooLarge     = computer.CodeTooLarge   // over a stated limit
	CodeUnknownType  = "unknownType"           // the event's type does not belong on this subject
	CodeForbidden    = "forbidden"             // this tenant may not ask for it
	CodeNotFound     = "notFound"              // no such sandbox, server or loop
	CodeQuota        = "quotaExceeded"         // the tenant has as many sandboxes as it may
	CodeNotReady     = "notReady"              // the sandbox is not ready yet
	CodeOccupied     = "occupied"              // the server still holds sandboxes, or its worker lives
	CodeVMIDInUse    = "vmIdInUse"             // the vm id names another sandbox, or did within 24 h
	CodeWrongServer  = "wrongServer"           // the sandbox lives elsewhere; the message names where
	CodeFenceStale   = "fenceStale"            // the fence names an earlier placement
	CodePaused       = "paused"                // the sandbox is paused; resume it first
	CodeDeadline     = "deadlineExceeded"      // not started in time
	CodeUnsupported  = "unsupported"           // the sandbox cannot do this
	CodeBusy         = "busy"                  // the sandbox's backlog is full
	CodeKilled       = "killed"                // killed before or while it ran
	CodeCancelled    = "cancelled"             // cancelled before or while it ran
	CodeFull         = "full"                  // no room at the server
	CodeUnavailable  = "unavailable"           // the server's fault
	CodeServerDown   = "serverDown"            // the server is down, removed or unknown
	CodeTimeout      = "timeout"               // no answer in time
	CodeWorkerDied   = "workerDied"            // the worker died while it ran
	CodeLeaseLost    = "leaseLost"             // the worker could not keep its lease
	CodeLost         = "lost"                  // the sandbox is gone, its state with it
	CodeActionFailed = "actionFailed"          // an action ran and failed
	CodeUnconfirmed  = "unconfirmed"           // a reservation that no worker took up
	CodeNoPicture    = "noPicture"             // what was asked for ran, but its picture could not be taken or kept
	CodeQueueTimeout = "queueTimeout"          // expired: waited too long
	CodeTTL          = "ttl"                   // expired: lived its time
	CodeIdle         = "idle"                  // expired: nobody used it
	CodeEnded        = "ended"                 // the sandbox has ended already
	CodeInternal     = "internal"              // Berth's own fault
)

// Source values of Berth's own programs. A source that begins with OwnSource
// is decoded tolerantly.
const (
	OwnSource        = "/berth/"
	SourceScheduler  = "/berth/scheduler"
	SourceWorker     = "/berth/worker"
	SourceLoopRunner = "/berth/loop-runner"
)

// ExtForwarded is the CloudEvents extension on a command that the scheduler
// forwarded from a request; its value is the tenant. The worker copies it to
// the finished result, which the scheduler then shows to the tenant.
const ExtForwarded = "berthtenant"

// Strings is a JSON string, number or boolean, or an array of these.
type Strings []string

// UnmarshalJSON accepts a scalar or an array of scalars.
func (s *Strings) UnmarshalJSON(raw []byte) error {
	var v any
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.UseNumber() // 1000000 stays as it was written
	if err := dec.Decode(&v); err != nil {
		return err
	}
	list, ok := v.([]any)
	if !ok {
		list = []any{v}
	}
	*s = make(Strings, 0, len(list))
	for _, item := range list {
		switch item := item.(type) {
		case string:
			*s = append(*s, item)
		case json.Number, bool:
			*s = append(*s, fmt.Sprint(item))
		default:
			return fmt.Errorf("want a string, number or boolean, or an array of these")
		}
	}
	return nil
}

// MarshalJSON writes one value as a string, several as an array.
func (s Strings) MarshalJSON() ([]byte, error) {
	if len(s) == 1 {
		return json.Marshal(s[0])
	}
	return json.Marshal([]string(s))
}

// Constraint is a hard condition on a server attribute.
type Constraint struct {
	Attribute string  `json:"attribute"`
	Operator  string  `json:"operator"` // = != in notin > < exists
	Value     Strings `json:"value,omitempty"`
}

// Affinity is a wish: its weight (−100 to 100) counts where the condition holds.
type Affinity struct {
	Constraint
	Weight int `json:"weight"`
}

// SandboxCreate is the data of berth.sandbox.create.v1. Nil durations mean the
// defaults below.
type SandboxCreate struct {
	VMID                string            `json:"vmId,omitempty"`
	Role                string            `json:"role,omitempty"`
	Template            string            `json:"template,omitempty"`
	Display             *computer.Display `json:"display,omitempty"`
	Requires            []string          `json:"requires,omitempty"`
	Owner               string            `json:"owner,omitempty"`
	Session             string            `json:"session,omitempty"`
	Constraints         []Constraint      `json:"constraints,omitempty"`
	Affinities          []Affinity        `json:"affinities,omitempty"`
	TTLSeconds          *float64          `json:"ttlSeconds,omitempty"`
	IdleTimeoutSeconds  *float64          `json:"idleTimeoutSeconds,omitempty"`
	IdlePolicy          string            `json:"idlePolicy,omitempty"` // what the idle clock does: IdleKill, IdlePause
	QueueTimeoutSeconds *float64          `json:"queueTimeoutSeconds,omitempty"`
	Env                 map[string]string `json:"env,omitempty"`
	Metadata            map[string]string `json:"metadata,omitempty"`
}

// Idle policies.
const (
	IdleKill  = "kill"  // the default
	IdlePause = "pause" // asks for the capability too; a resume starts the clock anew
)

// Defaults of a create request and of commands.
const (
	DefaultRole           = "default"
	DefaultTTL            = time.Hour
	DefaultQueueTimeout   = 300 * time.Second
	DefaultDeadline       = 60 * time.Second // of a command's start, from its publication
	MaxTTL                = 30 * 24 * time.Hour
	MaxDeadline           = 12 * time.Hour // RESULTS outlive it
	MaxEnvAndMetadata     = 16 << 10
	DefaultSnapshotPrefix = "snap-"
)

// SandboxKill is the data of berth.sandbox.kill.v1. Where Request is given,
// only the sandbox that this very create request made is killed: a requester
// that does not know yet whether the vm id became its own names it.
type SandboxKill struct {
	VMID    string   `json:"vmId"`
	Request *Request `json:"request,omitempty"`
}

// SandboxExtend is the data of berth.sandbox.extend.v1: the sandbox's life
// ends TTLSeconds from now.
type SandboxExtend struct {
	VMID       string  `json:"vmId"`
	TTLSeconds float64 `json:"ttlSeconds"`
}

// ServerRequest is the data of the server requests.
type ServerRequest struct {
	ServerID        string   `json:"serverId"`
	DeadlineSeconds *float64 `json:"deadlineSeconds,omitempty"` // drain only
}

// QuotaSet is the data of berth.quota.set.v1: how many sandboxes of a tenant
// may live at once, waiting ones included. Nil lifts the quota.
type QuotaSet struct {
	Tenant       string `json:"tenant"`
	MaxSandboxes *int   `json:"maxSandboxes"`
}

// Command is the data of every command but create. Fence nil means the sandbox's
// present holder. VMID is only for requests, whose subject does not name the
// sandbox; Command only for cancel, and names what is to end.
type Command struct {
	VMID     string          `json:"vmId,omitempty"`
	Actions  json.RawMessage `json:"actions,omitempty"`
	Observe  bool            `json:"observe,omitempty"`
	Deadline *time.Time      `json:"deadline,omitempty"`
	Fence    *uint64         `json:"fence,omitempty"`
	Command  *Request        `json:"command,omitempty"`
}

// CommandCreate is the data of berth.command.create.v1.
type CommandCreate struct {
	Fence      uint64            `json:"fence"`
	Tenant     string            `json:"tenant"`
	Role       string            `json:"role"`
	Owner      string            `json:"owner,omitempty"`
	Session    string            `json:"session,omitempty"`
	Template   string            `json:"template,omitempty"`
	Display    computer.Display  `json:"display"`
	TTLSeconds float64           `json:"ttlSeconds"`
	Deadline   *time.Time        `json:"deadline,omitempty"`
	Env        map[string]string `json:"env,omitempty"`
	Metadata   map[string]string `json:"metadata,omitempty"`
	Request    Request           `json:"request"`
}

// Started is the claim: whoever published it may execute the command.
type Started struct {
	CommandID string  `json:"commandId"`
	Source    string  `json:"source"`
	Command   Verb    `json:"command"`
	Worker    string  `json:"worker"`
	Fence     uint64  `json:"fence"`
	Epoch     uint64  `json:"epoch"` // lease epoch of the claimant
	Request   Request `json:"request"`
}

// Finished ends a command. Actions has one entry per action of an act.
type Finished struct {
	CommandID   string                  `json:"commandId"`
	Source      string                  `json:"source"`
	Command     Verb                    `json:"command"`
	Outcome     computer.Outcome        `json:"outcome"`
	Error       *computer.Fault         `json:"error,omitempty"`
	Actions     []computer.ActionResult `json:"actions"`
	Observation *computer.Observation   `json:"observation,omitempty"`
	Timing      Timing                  `json:"timing"`
	Fence       uint64                  `json:"fence,omitempty"`
	Request     Request                 `json:"request"`
	Sandbox     *SandboxInfo            `json:"sandbox,omitempty"`  // of a create that is ok
	Template    string                  `json:"template,omitempty"` // of a snapshot that is ok; see TemplateAt
}

// Timing of a command. Durations are milliseconds.
type Timing struct {
	StartedAt  *time.Time `json:"startedAt,omitempty"`
	FinishedAt time.Time  `json:"finishedAt"`
	QueuedMs   float64    `json:"queuedMs"` // from publication to start
	RanMs      float64    `json:"ranMs"`    // at the provider
}

// SandboxInfo is what a worker tells about a sandbox that it made.
type SandboxInfo struct {
	Display      computer.Display `json:"display"`
	Capabilities []string         `json:"capabilities"`
	StreamURL    string           `json:"streamUrl,omitempty"`
}

// Queued is the data of berth.sandbox.queued.v1. Position is 1 for the next.
type Queued struct {
	VMID        string         `json:"vmId"`
	Reasons     map[string]int `json:"reasons"`
	Explanation string         `json:"explanation"`
	Position    int            `json:"position,omitempty"`
	Request     Request        `json:"request"`
}

// Placed is the data of berth.sandbox.placed.v1 and, with the sandbox's
// abilities, of ready.v1.
type Placed struct {
	VMID         string            `json:"vmId"`
	ServerID     string            `json:"serverId"`
	Fence        uint64            `json:"fence"`
	Explanation  string            `json:"explanation"`
	Display      *computer.Display `json:"display,omitempty"`
	Capabilities []string          `json:"capabilities,omitempty"`
	StreamURL    string            `json:"streamUrl,omitempty"`
	ExpiresAt    *time.Time        `json:"expiresAt,omitempty"`
	Request      Request           `json:"request"`
}

// Ended is the data of failed, rejected, expired, killed and lost.
type Ended struct {
	VMID     string  `json:"vmId"`
	ServerID string  `json:"serverId,omitempty"`
	Code     string  `json:"code"`
	Message  string  `json:"message"`
	Request  Request `json:"request"`
}

// ServerEvent is the data of the server events.
type ServerEvent struct {
	ServerID string   `json:"serverId"`
	From     string   `json:"from"`
	Reason   string   `json:"reason"`
	Request  *Request `json:"request,omitempty"`
}
