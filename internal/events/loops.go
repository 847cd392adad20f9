package events

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"berth/internal/computer"
)

// Types of loop requests.
const (
	TypeLoopStart   = "berth.loop.start.v1"
	TypeLoopStop    = "berth.loop.stop.v1"
	TypeLoopPause   = "berth.loop.pause.v1"
	TypeLoopResume  = "berth.loop.resume.v1"
	TypeLoopMessage = "berth.loop.message.v1"
)

// Names of journal entries: the last token of their subject, and their type
// by LoopType.
const (
	LoopStartedName  = "started"         // the request was taken in
	LoopSandboxName  = "sandbox"         // the loop has its sandbox
	LoopObservedName = "observed"        // what the sandbox looks like
	LoopThinkingName = "thinking"        // the model is being asked
	LoopDecidedName  = "decided"         // its answer, before any act
	LoopRetriedName  = "retried"         // the command did not run; the next attempt
	LoopActedName    = "acted"           // what became of the act
	LoopPausedName   = "paused"          // the loop waits for somebody
	LoopResumedName  = "resumed"         // and goes on
	LoopStopName     = "stopRequested"   // control entry, by any runner
	LoopPauseName    = "pauseRequested"  // likewise
	LoopResumeName   = "resumeRequested" // likewise
	LoopMessageName  = "message"         // likewise: a message to the model
	LoopEndingName   = "ending"          // the outcome is settled; the sandbox is being ended
	LoopFinishedName = "finished"        // the last entry
	LoopRejectedName = "rejected"        // a request that came to nothing; no part of a journal
)

// Codes of loops, beside the common ones.
const (
	CodeLoopIDInUse = "loopIdInUse" // the loop id names another request's loop
	CodeLimit       = "limit"       // one of the loop's limits is reached
	CodeCheckFailed = "checkFailed" // a script's check did not hold
	CodeModelFailed = "modelFailed" // the model gave no usable answer
	CodeStopped     = "stopped"     // somebody stopped the loop

	CodeNoPrice        = "noPrice"        // a spend limit for a model whose price is not known
	CodeRepeatedScreen = "repeatedScreen" // limits.repeatedScreens: turn after turn saw the same
	CodeRepeatedAction = "repeatedAction" // limits.repeatedActions: turn after turn did the same
	CodeHostDenied     = "hostDenied"     // limits.allowHosts, limits.denyHosts
	CodeActionDenied   = "actionDenied"   // limits.allowActions, limits.denyActions
)

// Outcomes of a loop.
const (
	LoopSucceeded = "succeeded"
	LoopFailed    = "failed"
	LoopStopped   = "stopped"
)

// Defaults and bounds of a loop.
const (
	DefaultLoopSteps   = 200
	DefaultLoopSeconds = 3600.0
	DefaultRepScreens  = 20 // of a loop without a script
	DefaultRepActions  = 30 // likewise
	MaxLoopSteps       = 10000
	MaxLoopSeconds     = 5 * 24 * 3600.0 // LOOPS keeps a journal for 7 days
	MaxLoopStart       = 512 << 10       // bytes of a start's data; with its echo it must fit a 1 MiB message
	MaxLoopMessage     = 64 << 10        // bytes of a message to a loop
	MaxLoopGoal        = 64 << 10        // bytes
	MaxLoopSpend       = 1e6             // US dollars

	maxLoopRules = 1000 // hosts in a list
)

// LoopLimits bound a loop. Zero, or nothing, means the default; of Tokens and
// SpendUSD it means none.
type LoopLimits struct {
	Steps    int     `json:"steps,omitempty"`    // acts and observations that the model asks for
	Seconds  float64 `json:"seconds,omitempty"`  // from started to the end, pauses included
	Tokens   int64   `json:"tokens,omitempty"`   // input and output together
	SpendUSD float64 `json:"spendUsd,omitempty"` // estimated by the price in LoopStarted

	// How many turns in a row may see the same picture at the same address, and
	// how many may decide the same actions; 0: any number. The default is
	// DefaultRepScreens and DefaultRepActions, but for a loop with a script any number.
	RepeatedScreens *int `json:"repeatedScreens,omitempty"`
	RepeatedActions *int `json:"repeatedActions,omitempty"`

	// Hosts that the sandbox may, or may not, show; see HostPattern.
	AllowHosts []HostPattern `json:"allowHosts,omitempty"`
	DenyHosts  []HostPattern `json:"denyHosts,omitempty"`
	// Actions that the loop may, or may not, decide.
	AllowActions []computer.Type `json:"allowActions,omitempty"`
	DenyActions  []computer.Type `json:"denyActions,omitempty"`
}

// LoopStart is the data of berth.loop.start.v1.
type LoopStart struct {
	LoopID  string          `json:"loopId,omitempty"`
	Goal    string          `json:"goal,omitempty"`
	Model   json.RawMessage `json:"model,omitempty"` // {name, …}; the rest is the model's own
	Script  json.RawMessage `json:"script,omitempty"`
	Sandbox *SandboxCreate  `json:"sandbox,omitempty"`
	VMID    string          `json:"vmId,omitempty"`
	Limits  LoopLimits      `json:"limits,omitzero"`
	Keep    bool            `json:"keep,omitempty"` // the sandbox outlives the loop
}

// ModelName is the name in Model, or "".
func (s *LoopStart) ModelName() string {
	var m struct {
		Name string `json:"name"`
	}
	if json.Unmarshal(s.Model, &m) != nil {
		return ""
	}
	return m.Name
}

// Validate fills the defaults and returns a *DataError that names the first
// fault. The model's own part is the model's to check.
func (s *LoopStart) Validate() error {
	if s.LoopID != "" {
		if err := CheckID("loopId", s.LoopID); err != nil {
			return BadInput("%v", err)
		}
	}
	if len(s.Goal) > MaxLoopGoal {
		return &DataError{CodeTooLarge, fmt.Sprintf("goal is %d bytes, at most %d", len(s.Goal), MaxLoopGoal)}
	}
	if s.ModelName() == "" {
		return BadInput(`model: want an object with a "name"`)
	}
	if err := s.Limits.validate(len(s.Script) > 0); err != nil {
		return err
	}
	switch {
	case s.VMID != "" && s.Sandbox != nil:
		return BadInput("sandbox and vmId: give only one")
	case s.VMID != "":
		if err := CheckID("vmId", s.VMID); err != nil {
			return BadInput("%v", err)
		}
		return nil
	case s.Sandbox == nil:
		s.Sandbox = &SandboxCreate{}
	}
	if s.Sandbox.TTLSeconds == nil {
		ttl := max(DefaultTTL.Seconds(), s.Limits.Seconds+300)
		s.Sandbox.TTLSeconds = &ttl
	}
	if err := s.Sandbox.Validate(); err != nil {
		var d *DataError
		if errors.As(err, &d) {
			return &DataError{d.Code, "sandbox: " + d.Message}
		}
		return err
	}
	return nil
}

func (l *LoopLimits) validate(scripted bool) error {
	if l.Steps == 0 {
		l.Steps = DefaultLoopSteps
	}
	if l.Steps < 1 || l.Steps > MaxLoopSteps {
		return BadInput("limits.steps: %d is not in 1 to %d", l.Steps, MaxLoopSteps)
	}
	if l.Seconds == 0 {
		l.Seconds = DefaultLoopSeconds
	}
	if math.IsNaN(l.Seconds) || l.Seconds < 0 || l.Seconds > MaxLoopSeconds {
		return BadInput("limits.seconds: %v is not in 0 (exclusive) to %v", l.Seconds, MaxLoopSeconds)
	}
	if l.Tokens < 0 {
		return BadInput("limits.tokens: %d is negative", l.Tokens)
	}
	if math.IsNaN(l.SpendUSD) || l.SpendUSD < 0 || l.SpendUSD > MaxLoopSpend {
		return BadInput("limits.spendUsd: %v is not in 0 to %v", l.SpendUSD, MaxLoopSpend)
	}
	for _, r := range []struct {
		name string
		n    **int
		def  int
	}{{"repeatedScreens", &l.RepeatedScreens, DefaultRepScreens}, {"repeatedActions", &l.RepeatedActions, DefaultRepActions}} {
		if *r.n == nil && !scripted {
			*r.n = &r.def
		}
		if n := *r.n; n != nil && (*n < 0 || *n > MaxLoopSteps) {
			return BadInput("limits.%s: %d is not in 0 to %d", r.name, *n, MaxLoopSteps)
		}
	}
	return l.validateLists()
}

func (l *LoopLimits) validateLists() error {
	for _, list := range []struct {
		name  string
		hosts []HostPattern
	}{{"allowHosts", l.AllowHosts}, {"denyHosts", l.DenyHosts}} {
		if len(list.hosts) > maxLoopRules {
			return &DataError{CodeTooLarge, fmt.Sprintf("limits.%s: %d hosts, at most %d", list.name, len(list.hosts), maxLoopRules)}
		}
		for i, h := range list.hosts {
			clean, err := h.canonical()
			if err != nil {
				return BadInput("limits.%s: %v", list.name, err)
			}
			list.hosts[i] = clean
		}
	}
	for _, list := range []struct {
		name    string
		actions []computer.Type
	}{{"allowActions", l.AllowActions}, {"denyActions", l.DenyActions}} {
		for _, a := range list.actions {
			if !slices.Contains(computer.Types(), a) {
				return BadInput("limits.%s: unknown action %q", list.name, clip(string(a)))
			}
		}
	}
	return nil
}

// Redacted returns a copy whose sandbox environment has no values, for the
// journal, which people read.
func (s LoopStart) Redacted() LoopStart {
	if s.Sandbox == nil || len(s.Sandbox.Env) == 0 {
		return s
	}
	box := *s.Sandbox
	box.Env = make(map[string]string, len(s.Sandbox.Env))
	for k := range s.Sandbox.Env {
		box.Env[k] = "***"
	}
	s.Sandbox = &box
	return s
}

// LoopControlRequest is the data of stop, pause, resume and message requests.
type LoopControlRequest struct {
	LoopID string `json:"loopId"`
	Reason string `json:"reason,omitempty"` // stop, pause, resume: for people
	Text   string `json:"text,omitempty"`   // message only, and needed there
}

// Validate returns a *DataError that names the first fault.
func (c *LoopControlRequest) Validate(v Verb) error {
	if err := CheckID("loopId", c.LoopID); err != nil {
		return BadInput("%v", err)
	}
	if len(c.Text) > MaxLoopMessage || len(c.Reason) > MaxLoopMessage {
		return &DataError{CodeTooLarge, fmt.Sprintf("text and reason: at most %d bytes", MaxLoopMessage)}
	}
	switch {
	case v == Message && strings.TrimSpace(c.Text) == "":
		return BadInput("text: a message needs one")
	case v == Message && c.Reason != "":
		return BadInput("reason: a message has none")
	case v != Message && c.Text != "":
		return BadInput("text: only a message has one")
	}
	return nil
}

// LoopEntry is what every journal entry begins with. Runner and Epoch tell
// which process wrote it under which hold of the loop's lease; control entries
// have no epoch.
type LoopEntry struct {
	LoopID  string    `json:"loopId"`
	Step    int       `json:"step"`
	Request Request   `json:"request"` // the start, or for control entries their own
	At      time.Time `json:"at"`
	Runner  string    `json:"runner"`
	Epoch   uint64    `json:"epoch,omitempty"`
}

// Head returns the common part of the entry that embeds it.
func (e *LoopEntry) Head() *LoopEntry { return e }

// LoopStarted is the request as it was taken in, defaults filled.
type LoopStarted struct {
	LoopEntry
	Tenant string    `json:"tenant"`
	VMID   string    `json:"vmId"`
	Given  bool      `json:"given,omitempty"` // the sandbox is the requester's
	Start  LoopStart `json:"start"`
	// Price is what the model's tokens cost, as the runner that took the request
	// in was told; all estimates of the loop go by it. Nil: not known.
	Price *LoopPrice `json:"price,omitempty"`
}

// LoopPrice is the price of a model's tokens in US dollars.
type LoopPrice struct {
	Model            string  `json:"model"` // {name}/{id}, as operators name it
	InputPerMillion  float64 `json:"inputPerMillionUsd"`
	OutputPerMillion float64 `json:"outputPerMillionUsd"`
}

// Of is what usage costs, as if no input had come from a vendor's cache.
func (p *LoopPrice) Of(u LoopUsage) float64 {
	if p == nil {
		return 0
	}
	return (float64(u.InputTokens)*p.InputPerMillion + float64(u.OutputTokens)*p.OutputPerMillion) / 1e6
}

// LoopSandbox says where the loop's sandbox is.
type LoopSandbox struct {
	LoopEntry
	VMID         string           `json:"vmId"`
	ServerID     string           `json:"serverId"`
	Fence        uint64           `json:"fence"`
	Display      computer.Display `json:"display"`
	Capabilities []string         `json:"capabilities,omitempty"`
	StreamURL    string           `json:"streamUrl,omitempty"`
	Explanation  string           `json:"explanation,omitempty"`
}

// LoopObserved is one observation, and the command that took it.
type LoopObserved struct {
	LoopEntry
	Command     Request              `json:"command"`
	Observation computer.Observation `json:"observation"`
	Timing      Timing               `json:"timing"`
}

// LoopThinking says that the model is asked. There is one per call of the model.
type LoopThinking struct {
	LoopEntry
	Model       string `json:"model"`
	RequestHash string `json:"requestHash"` // SHA-256, hex, of what it is asked
	Messages    int    `json:"messages,omitempty"`
}

// LoopCheck is the result of one check of a script.
type LoopCheck struct {
	Item  int    `json:"item"` // index in the script, from 0
	Check string `json:"check"`
	OK    bool   `json:"ok"`
	Want  string `json:"want"`
	Got   string `json:"got"`
	Ms    int64  `json:"ms"` // until it held or was given up
}

// LoopUsage is what a model's answer cost.
type LoopUsage struct {
	InputTokens  int64 `json:"inputTokens"`
	OutputTokens int64 `json:"outputTokens"`
}

// LoopDecided is the model's answer. Deadline is that of the act's first
// attempt; a later one has its own in LoopRetried.
type LoopDecided struct {
	LoopEntry
	Label       string            `json:"label,omitempty"`
	Actions     []computer.Action `json:"actions,omitempty"`
	Observe     bool              `json:"observe,omitempty"`
	WaitSeconds float64           `json:"waitSeconds,omitempty"`
	NeedsInput  string            `json:"needsInput,omitempty"`
	Done        bool              `json:"done,omitempty"`
	Failed      *computer.Fault   `json:"failed,omitempty"`
	Checks      []LoopCheck       `json:"checks,omitempty"`
	State       json.RawMessage   `json:"state,omitempty"`
	Reply       json.RawMessage   `json:"reply,omitempty"`
	Usage       LoopUsage         `json:"usage,omitzero"`
	Deadline    *time.Time        `json:"deadline,omitempty"`
	ThoughtMs   float64           `json:"thoughtMs"`
}

// LoopRetried tells of an attempt that certainly did not run, and the next one.
type LoopRetried struct {
	LoopEntry
	Attempt  int       `json:"attempt"` // the next
	Deadline time.Time `json:"deadline"`
	Code     string    `json:"code"`
	Message  string    `json:"message"`
}

// LoopActed says what became of the act.
type LoopActed struct {
	LoopEntry
	Command       Request                 `json:"command"`
	Attempt       int                     `json:"attempt"`
	Outcome       computer.Outcome        `json:"outcome"`
	Error         *computer.Fault         `json:"error,omitempty"`
	Actions       []computer.ActionResult `json:"actions,omitempty"`
	Observation   *computer.Observation   `json:"observation,omitempty"`
	Timing        Timing                  `json:"timing"`
	ValuesDropped bool                    `json:"valuesDropped,omitempty"` // they were too large for a journal
}

// LoopPaused is the data of paused, where the loop waits for a person, and of
// resumed.
type LoopPaused struct {
	LoopEntry
	NeedsInput bool   `json:"needsInput,omitempty"` // the model asks; a message answers
	Reason     string `json:"reason,omitempty"`
}

// LoopControl is a control entry: a stop, pause, resume or message request
// that any runner stored.
type LoopControl struct {
	LoopEntry
	Reason string `json:"reason,omitempty"`
	Text   string `json:"text,omitempty"`
}

// LoopEnding settles the outcome, which will not change.
type LoopEnding struct {
	LoopEntry
	Outcome string `json:"outcome"`
	Code    string `json:"code,omitempty"`
	Message string `json:"message,omitempty"`
}

// LoopFinished ends a journal.
type LoopFinished struct {
	LoopEntry
	Outcome  string    `json:"outcome"` // succeeded, failed, stopped
	Code     string    `json:"code,omitempty"`
	Message  string    `json:"message,omitempty"`
	Steps    int       `json:"steps"` // acts
	Seconds  float64   `json:"seconds"`
	Usage    LoopUsage `json:"usage,omitzero"`
	SpendUSD float64   `json:"spendUsd,omitempty"` // estimated; 0 where no price is known
}

// LoopRejected is the data of berth.loop.rejected.v1.
type LoopRejected struct {
	LoopID  string  `json:"loopId"`
	Code    string  `json:"code"`
	Message string  `json:"message"`
	Request Request `json:"request"`
}
