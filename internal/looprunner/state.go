package looprunner

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"berth/internal/computer"
	"berth/internal/events"
)

// state is what a journal says. It is folded from the entries alone, by the
// same code while a loop runs and after a crash, so both always agree.
type state struct {
	entries   int // folded so far
	started   *events.LoopStarted
	startedAt time.Time // the stream's clock
	headers   nats.Header
	sandbox   *events.LoopSandbox

	step      int // being worked on; 0 until the first observation
	obs       *computer.Observation
	stale     bool // obs is from before a pause: people may have used the sandbox meanwhile
	dialogs   []computer.Dialog
	downloads []computer.Download
	history   []Exchange
	carried   json.RawMessage
	acts      int
	usage     events.LoopUsage

	screen      string // that the last turn saw
	sameScreens int    // turns in a row that saw it
	actions     []computer.Action
	sameActions int // decisions in a row with these actions

	pending  *events.LoopDecided // decided and not yet carried out
	attempt  int                 // of the pending act
	deadline time.Time           // of that attempt

	inbox    []string // messages not yet shown to the model
	shown    int      // of these, those in the turn being thought about
	asking   string   // what the model wants to know
	unheard  int      // of inbox, those that came before it was asked: no answer to it
	pause    bool     // somebody wants it to stand still
	paused   bool     // and it has said so
	stop     *events.LoopControl
	controls map[string]bool // tokens of control requests, for those stored twice

	ending   *events.LoopEnding
	finished bool
}

// entry is one message of a journal.
type entry struct {
	name   string
	seq    uint64
	stored time.Time
	header nats.Header
	event  events.Event
	data   entryData // of an owner's own entry, where what it encodes to need not be decoded again
}

// isOwners: only the loop's owner appends it. All else is a control entry, a
// rejection, a newer version's, or a stranger's, and changes nothing that an
// owner is about to append.
func isOwners(name string) bool {
	switch name {
	case events.LoopStartedName, events.LoopSandboxName, events.LoopObservedName, events.LoopThinkingName, events.LoopDecidedName, events.LoopRetriedName,
		events.LoopActedName, events.LoopPausedName, events.LoopResumedName, events.LoopEndingName, events.LoopFinishedName:
		return true
	}
	return false
}

// dataOf is an entry's data. What this process has just written is taken as it
// is, if writing and reading it back change nothing that state keeps.
func dataOf[T any](e entry) (*T, error) {
	if d, ok := any(e.data).(*T); ok {
		return d, nil
	}
	d := new(T)
	if err := events.DecodeTolerant(e.event, d); err != nil {
		return nil, fmt.Errorf("%w: entry %d (%s): %w", errCorrupt, e.seq, e.name, err)
	}
	return d, nil
}

// apply folds one entry. What a newer version wrote under an unknown name is
// counted and passed over.
func (s *state) apply(e entry) error {
	s.entries++
	decode := func(v any) error {
		if err := events.DecodeTolerant(e.event, v); err != nil {
			return fmt.Errorf("%w: entry %d (%s): %w", errCorrupt, e.seq, e.name, err)
		}
		return nil
	}
	switch e.name {
	case events.LoopStartedName:
		s.started, s.startedAt, s.headers = &events.LoopStarted{}, e.stored, e.header
		return decode(s.started)
	case events.LoopSandboxName:
		s.sandbox = &events.LoopSandbox{}
		return decode(s.sandbox)
	case events.LoopObservedName:
		d, err := dataOf[events.LoopObserved](e)
		if err != nil {
			return err
		}
		s.applyObserved(d.Observation)
	case events.LoopThinkingName:
		d, err := dataOf[events.LoopThinking](e)
		if err != nil {
			return err
		}
		s.shown = min(d.Messages, len(s.inbox))
	case events.LoopDecidedName:
		d := &events.LoopDecided{}
		if err := decode(d); err != nil {
			return err
		}
		s.applyDecided(d)
	case events.LoopRetriedName:
		var d events.LoopRetried
		if err := decode(&d); err != nil {
			return err
		}
		s.attempt, s.deadline = d.Attempt, d.Deadline
	case events.LoopActedName:
		d, err := dataOf[events.LoopActed](e)
		if err != nil {
			return err
		}
		s.applyActed(d)
	case events.LoopPausedName:
		s.paused = true
	case events.LoopResumedName:
		s.paused, s.asking, s.stale = false, "", true
	case events.LoopEndingName:
		s.ending = &events.LoopEnding{}
		return decode(s.ending)
	case events.LoopFinishedName:
		s.finished = true
	default:
		return s.applyControl(e, decode)
	}
	return nil
}

func (s *state) applyObserved(o computer.Observation) {
	s.obs, s.stale = &o, false
	s.dialogs = append(slices.Clip(s.dialogs), o.Dialogs...)
	s.downloads = append(slices.Clip(s.downloads), o.Downloads...)
	switch {
	case s.step == 0:
		s.step = 1
	case s.pending != nil && s.pending.Observe && len(s.pending.Actions) == 0:
		s.pending = nil
		s.step++
	}
}

func (s *state) applyDecided(d *events.LoopDecided) {
	s.stale = false
	s.countRepeats(d)
	s.carried = d.State
	s.usage.InputTokens += d.Usage.InputTokens
	s.usage.OutputTokens += d.Usage.OutputTokens
	x := Exchange{Step: d.Step, Messages: slices.Clone(s.inbox[:s.shown]), Decision: decisionOf(d)}
	if s.obs != nil {
		x.Observation = *s.obs
	}
	s.history = append(s.history, x)
	s.inbox, s.shown = slices.Clone(s.inbox[s.shown:]), 0
	s.pending, s.attempt = d, 1
	if d.Deadline != nil {
		s.deadline = *d.Deadline
	}
	s.asking = d.NeedsInput // any other decision comes after the answer
	if d.NeedsInput != "" {
		s.unheard, s.pending, s.stale = len(s.inbox), nil, true
		s.step++
	}
}

func (s *state) applyActed(d *events.LoopActed) {
	if n := len(s.history); n > 0 {
		s.history[n-1].Acted = &Acted{Outcome: d.Outcome, Error: d.Error, Actions: d.Actions}
	}
	s.acts++
	s.pending, s.obs, s.stale, s.dialogs, s.downloads = nil, nil, false, nil, nil
	s.step++
	if d.Observation != nil {
		s.obs = d.Observation
		s.dialogs = append(s.dialogs, d.Observation.Dialogs...) // nil where there is none, however it was written
		s.downloads = append(s.downloads, d.Observation.Downloads...)
	}
}

// applyControl obeys each control request once, however often it was stored.
func (s *state) applyControl(e entry, decode func(any) error) error {
	switch e.name {
	case events.LoopStopName, events.LoopPauseName, events.LoopResumeName, events.LoopMessageName:
	default:
		return nil
	}
	d := &events.LoopControl{}
	if decode(d) != nil {
		return nil // a stranger's
	}
	token := d.Request.Token()
	if s.controls[token] {
		return nil
	}
	if s.controls == nil {
		s.controls = map[string]bool{}
	}
	s.controls[token] = true
	switch e.name {
	case events.LoopStopName:
		s.stop = d
	case events.LoopPauseName:
		s.pause = true
	case events.LoopResumeName:
		s.pause, s.asking = false, ""
	case events.LoopMessageName:
		s.inbox = append(s.inbox, d.Text)
	}
	return nil
}

// waits: the loop stands still until somebody speaks.
func (s *state) waits() bool { return s.pause || (s.asking != "" && len(s.inbox) <= s.unheard) }

func decisionOf(d *events.LoopDecided) Decision {
	return Decision{
		Label: d.Label, Actions: d.Actions, Observe: d.Observe, Wait: events.Seconds(d.WaitSeconds), NeedsInput: d.NeedsInput,
		Done: d.Done, Failed: d.Failed, Checks: d.Checks, State: d.State, Reply: d.Reply, Usage: d.Usage,
	}
}
