package toolcall

import (
	"errors"
	"fmt"
	"slices"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
)

// NotExecuted answers a call after one that failed. It is the text that
// Anthropic's computer toolset prescribes, and as clear to any other model.
const NotExecuted = "Not executed: an earlier computer action in this turn failed."

// Parsed is one call of a model as its package understood it. It asks for
// actions, to look at the screen, for a person's word, or to end the loop; or
// it is not understood (Err), after those of Actions that are.
type Parsed struct {
	ID      string
	Tool    string // as the model named it
	Actions []computer.Action
	Look    bool
	Ask     string  // a question to a person
	Done    *string // the goal is reached: a summary
	GiveUp  *string // it cannot be: why
	Note    string  // added to the answer
	Err     error
}

// Call is what is journaled of a call: what its answer will be made from.
type Call struct {
	ID      string `json:"id"`
	Tool    string `json:"tool"`
	Actions int    `json:"actions,omitempty"` // of the decision's, in order, how many are its
	Look    bool   `json:"look,omitempty"`    // answered by the next screenshot
	Ask     bool   `json:"ask,omitempty"`     // answered by a person
	Fault   string `json:"fault,omitempty"`   // why it, or its next action, was not carried out
	Skipped bool   `json:"skipped,omitempty"` // an earlier call has a fault
	Note    string `json:"note,omitempty"`
}

// Plan is what a model's calls come to.
type Plan struct {
	Calls   []Call
	Actions []computer.Action
	Ask     string
	Done    *string
	GiveUp  *string
}

// Rules say what a model may do in a sandbox.
type Rules struct {
	Display      computer.Display
	Capabilities []string
	Allow, Deny  []computer.Type
	Limits       events.LoopLimits // of the loop: its lists of actions hold too
}

// offByDefault need Allow.
var offByDefault = []computer.Type{computer.Run}

// May returns an *computer.InvalidError where an action is not allowed or the
// sandbox cannot do it. A sandbox that declares no capabilities at all is taken
// at its word only by its server, which refuses what it cannot do.
func (r Rules) May(t computer.Type) error {
	unsupported := func(format string, args ...any) error {
		return &computer.InvalidError{Code: events.CodeUnsupported, Index: -1, Message: fmt.Sprintf(format, args...)}
	}
	switch {
	case slices.Contains(r.Deny, t), slices.Contains(r.Limits.DenyActions, t), len(r.Limits.AllowActions) > 0 && !slices.Contains(r.Limits.AllowActions, t):
		return unsupported("the action %s is not allowed in this loop", t)
	case slices.Contains(offByDefault, t) && !slices.Contains(r.Allow, t):
		return unsupported("the action %s is off; the loop's model.allow must name it", t)
	}
	if need := t.Requires(); need != "" && !slices.Contains(r.Capabilities, need) {
		return unsupported("this sandbox has no %s, so there is no %s", need, t)
	}
	return nil
}

// check validates one action by the rules of a command.
func (r Rules) check(a computer.Action) (computer.Action, error) {
	out, err := computer.Normalize([]computer.Action{a})
	if err != nil {
		return a, err
	}
	if err := computer.CheckBounds(out, r.Display); err != nil {
		return a, err
	}
	return out[0], r.May(a.Type)
}

// Make plans the calls of one answer.
func Make(rules Rules, parsed []Parsed) Plan {
	var p Plan
	stopped := false
	lastAct := lastActing(parsed)
	for i, c := range parsed {
		call := Call{ID: c.ID, Tool: c.Tool, Note: c.Note}
		if stopped {
			call.Skipped = true
			p.Calls = append(p.Calls, call)
			continue
		}
		err := c.Err
		switch {
		case c.Ask != "" || c.Done != nil || c.GiveUp != nil:
			if i > 0 {
				err = fmt.Errorf("call %s alone, in a turn of its own, once you have seen what came of the others", c.Tool)
				break
			}
			p.Ask, p.Done, p.GiveUp = c.Ask, c.Done, c.GiveUp
			call.Ask, stopped = c.Ask != "", true
		case c.Look && i < lastAct:
			c.Actions = []computer.Action{{Type: computer.Screenshot}}
		case c.Look:
			call.Look = true
		}
		var n int
		n, err = p.add(rules, c.Actions, err)
		call.Actions = n
		if err != nil {
			call.Fault, stopped = explain(err, n), true
		}
		p.Calls = append(p.Calls, call)
	}
	return p
}

// add takes the valid beginning of a call's actions.
func (p *Plan) add(rules Rules, actions []computer.Action, err error) (int, error) {
	for i, a := range actions {
		if len(p.Actions) == computer.MaxActions {
			return i, fmt.Errorf("more than %d actions in one turn; take several turns", computer.MaxActions)
		}
		a, bad := rules.check(a)
		if bad != nil {
			return i, bad
		}
		p.Actions = append(p.Actions, a)
	}
	return len(actions), err
}

func lastActing(parsed []Parsed) int {
	for i, c := range slices.Backward(parsed) {
		if len(c.Actions) > 0 {
			return i
		}
	}
	return -1
}

func explain(err error, ran int) string {
	var invalid *computer.InvalidError
	text := err.Error()
	if errors.As(err, &invalid) {
		text = invalid.Code + ": " + invalid.Message
		if invalid.Field != "" {
			text = fmt.Sprintf("%s: %s: %s", invalid.Code, invalid.Field, invalid.Message)
		}
	}
	if ran > 0 {
		return fmt.Sprintf("action %d of this call: %s; it and those after it were not executed", ran+1, text)
	}
	return text
}

// Decide makes the decision. label is what the model said.
func (p Plan) Decide(label string) looprunner.Decision {
	d := looprunner.Decision{Label: label}
	switch {
	case p.GiveUp != nil:
		d.Failed = &computer.Fault{Code: CodeGaveUp, Message: nonEmpty(*p.GiveUp, "the model gave up")}
	case p.Done != nil:
		d.Done = true
		d.Label = nonEmpty(*p.Done, label)
	case p.Ask != "":
		d.NeedsInput = p.Ask
	case len(p.Actions) > 0:
		d.Actions = p.Actions
	default:
		d.Observe = true
	}
	return d
}

// Faulted reports that the calls came to nothing because one could not be
// carried out.
func Faulted(calls []Call, d looprunner.Decision) bool {
	if len(d.Actions) > 0 || d.NeedsInput != "" || d.Done || d.Failed != nil {
		return false
	}
	return slices.ContainsFunc(calls, func(c Call) bool { return c.Fault != "" })
}

func nonEmpty(s, otherwise string) string {
	if s == "" {
		return otherwise
	}
	return s
}
