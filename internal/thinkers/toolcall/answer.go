package toolcall

import (
	"encoding/json"
	"fmt"
	"strings"

	"berth/internal/computer"
	"berth/internal/looprunner"
	"berth/internal/thinkers/screen"
)

// Answer is what a model is told about one of its calls.
type Answer struct {
	ID       string
	Failed   bool
	Text     string
	Pictures []computer.Picture // of screenshot and zoom actions
	Zoomed   bool               // the pictures show a region
	Look     bool               // the turn's screenshot belongs to it
}

// Answers tells what became of the calls of an earlier turn. view is how the
// model sees the display now; messages are what people said since.
func Answers(calls []Call, x looprunner.Exchange, view screen.View, messages []string) []Answer {
	out := make([]Answer, len(calls))
	next := 0
	stopped := false // an action failed
	for i, c := range calls {
		a := Answer{ID: c.ID, Look: c.Look}
		mine := x.Decision.Actions[min(next, len(x.Decision.Actions)):min(next+c.Actions, len(x.Decision.Actions))]
		switch {
		case c.Skipped || stopped && c.Actions == 0:
			a.Failed, a.Text, a.Look = true, NotExecuted, false
		case c.Ask:
			a.Text = said(messages)
		default:
			stopped = a.tell(c, mine, next, x.Acted, view) || stopped
		}
		next += c.Actions
		out[i] = a
	}
	return out
}

func said(messages []string) string {
	if len(messages) == 0 {
		return "A person let you go on without a word."
	}
	return "A person answers: " + strings.Join(messages, "\n")
}

// tell fills an answer from the results of the call's own actions. It reports
// whether one of them did not succeed.
func (a *Answer) tell(c Call, mine []computer.Action, first int, acted *looprunner.Acted, view screen.View) bool {
	var lines []string
	for i, action := range mine {
		r, known := resultOf(acted, first+i)
		if !known || r.Outcome != computer.OK {
			a.Failed, a.Look = true, false
			a.Text = join(lines, failure(r, known, acted, len(mine) > 1, i))
			return true
		}
		if line := a.value(action, r.Value, view); line != "" {
			lines = append(lines, line)
		}
	}
	if c.Fault != "" {
		a.Failed, a.Look = true, false
		a.Text = join(lines, "Error: "+c.Fault)
		return true
	}
	if c.Note != "" {
		lines = append(lines, c.Note)
	}
	a.Text = join(lines, "")
	if a.Text == "" {
		a.Text = "OK"
	}
	return false
}

// resultOf is the result of the decision's n-th action. A command that was
// rejected, or of which nobody knows anything, has no results of its actions.
func resultOf(acted *looprunner.Acted, n int) (computer.ActionResult, bool) {
	if acted == nil {
		return computer.ActionResult{}, false
	}
	if n < len(acted.Actions) {
		return acted.Actions[n], true
	}
	if acted.Outcome == computer.OK { // its worker gave none: all ran
		return computer.ActionResult{Outcome: computer.OK}, true
	}
	failedHere := acted.Outcome != computer.Failed || n == 0 // a failure without any results is the first action's
	return computer.ActionResult{Outcome: acted.Outcome, Error: acted.Error}, failedHere
}

func failure(r computer.ActionResult, known bool, acted *looprunner.Acted, several bool, i int) string {
	why := "no reason given"
	switch {
	case r.Error != nil:
		why = r.Error.Code + ": " + r.Error.Message
	case acted != nil && acted.Error != nil:
		why = acted.Error.Code + ": " + acted.Error.Message
	}
	which := ""
	if several {
		which = fmt.Sprintf("action %d of this call: ", i+1)
	}
	switch {
	case acted == nil || !known || r.Outcome == computer.Skipped:
		return NotExecuted
	case r.Outcome == computer.Unknown:
		return fmt.Sprintf("Unknown: %sit may have been executed, in full, in part or not at all (%s). It was not tried again. Judge by the screenshot what has happened before you repeat anything.", which, why)
	case r.Outcome == computer.Rejected:
		return fmt.Sprintf("Error: %snothing was executed (%s).", which, why)
	default:
		return fmt.Sprintf("Error: %s%s", which, why)
	}
}

// value tells an action's answer and takes its picture.
func (a *Answer) value(action computer.Action, raw json.RawMessage, view screen.View) string {
	missing := "its answer was too large to be kept"
	switch action.Type {
	case computer.Screenshot, computer.Zoom:
		var p computer.Picture
		if json.Unmarshal(raw, &p) != nil || p.Object == "" {
			return missing
		}
		a.Pictures, a.Zoomed = append(a.Pictures, p), action.Type == computer.Zoom
	case computer.Cursor:
		var p computer.Point
		if json.Unmarshal(raw, &p) != nil {
			return missing
		}
		x, y := view.Shown(p)
		return fmt.Sprintf("X=%d, Y=%d", x, y)
	case computer.ClipboardRead:
		var text string
		if json.Unmarshal(raw, &text) != nil {
			return missing
		}
		return text
	case computer.Run:
		var v computer.RunValue
		if json.Unmarshal(raw, &v) != nil {
			return missing
		}
		return ranText(v)
	}
	return ""
}

func ranText(v computer.RunValue) string {
	var b strings.Builder
	fmt.Fprintf(&b, "exit code %d", v.ExitCode)
	for _, s := range []struct{ name, text string }{{"stdout", v.Stdout}, {"stderr", v.Stderr}} {
		if s.text != "" {
			fmt.Fprintf(&b, "\n%s:\n%s", s.name, s.text)
		}
	}
	if v.Truncated {
		b.WriteString("\n(there was more output)")
	}
	return b.String()
}

func join(lines []string, last string) string {
	if last != "" {
		lines = append(lines, last)
	}
	return strings.Join(lines, "\n")
}
