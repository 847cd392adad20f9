package looprunner

import (
	"context"
	"encoding/json"
	"time"

	"github.com/nats-io/nats.go"

	"berth/internal/computer"
	"berth/internal/events"
)

// Model thinks: given what happened so far it decides what to do next.
//
// Think is called once per turn, from one goroutine at a time, and may take as
// long as it likes within the loop's limits; it returns promptly after ctx
// ends. Its answer is journaled before anything is done, so an answer is never
// asked for twice unless the process died before it was stored. A model keeps
// nothing in memory that it cannot rebuild from the Turn: after a crash
// another process makes a new Model and goes on from the journal.
//
// An error of Think ends the loop as failed, with the code of a
// *computer.Fault where it wraps one, else modelFailed. Retrying a vendor's
// passing errors is the model's own affair.
type Model interface {
	Think(ctx context.Context, in Turn) (Decision, error)
}

// ModelFactory makes the model of one loop. It is called when the request is
// taken in, so that bad input is refused before anything runs, and again by
// every process that runs the loop. Its error should be an *events.DataError;
// it must not name credentials.
type ModelFactory func(Spec) (Model, error)

// Spec is what a model is made from.
type Spec struct {
	Tenant  string
	Loop    string
	Goal    string
	Model   json.RawMessage // the start's `model`, its name included
	Script  json.RawMessage // the start's `script`, or nil
	Limits  events.LoopLimits
	Display *computer.Display // nil while unknown: a sandbox given by its id
	NC      *nats.Conn        // the runner's connection, for models that answer on the bus; not to be closed
}

// Turn is all that a model knows. It is the same whenever it is rebuilt from
// the journal. Its values are shared: do not change them.
type Turn struct {
	Tenant       string
	Loop         string
	Goal         string
	Step         int // from 1
	Display      computer.Display
	Capabilities []string

	Observation computer.Observation // the latest
	// Dialogs and Downloads are all since the last act; an observation has
	// only those since the observation before it.
	Dialogs   []computer.Dialog
	Downloads []computer.Download

	History  []Exchange      // the earlier turns, oldest first
	State    json.RawMessage // Decision.State of the last turn
	Messages []string        // from people, since the last turn

	// Frame fetches a picture by Observation.Screenshot.Object.
	Frame func(ctx context.Context, object string) ([]byte, error)
	// Observe takes a new observation within this turn and journals it. It
	// costs no turn. It is to be called from the goroutine of Think.
	Observe func(ctx context.Context) (computer.Observation, error)
}

// Exchange is one earlier turn: what the model saw and decided, and what
// became of it.
type Exchange struct {
	Step        int
	Observation computer.Observation
	Messages    []string
	Decision    Decision
	Acted       *Acted // nil where the decision had no actions
}

// Acted is what became of a decision's actions. An unknown outcome means that
// nobody can say how far they went; it is for the model to judge from the
// next observation.
type Acted struct {
	Outcome computer.Outcome
	Error   *computer.Fault
	Actions []computer.ActionResult
}

// Decision is a model's answer. It has Actions, or Observe, or NeedsInput, or
// is Done, or Failed.
type Decision struct {
	Label      string            // what this is, for people
	Actions    []computer.Action // one command, run in order
	Observe    bool              // look again, after Wait
	Wait       time.Duration
	NeedsInput string          // what a person is asked; the loop pauses until a message comes
	Done       bool            // the goal is reached
	Failed     *computer.Fault // it cannot be
	Checks     []events.LoopCheck
	State      json.RawMessage // carried to the next turn; keep it small
	Reply      json.RawMessage // the model's own record of this turn, kept in History
	Usage      events.LoopUsage
}

// Last is the last turn, or nil.
func (t Turn) Last() *Exchange {
	if len(t.History) == 0 {
		return nil
	}
	return &t.History[len(t.History)-1]
}
