package replay

import (
	"errors"
	"fmt"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
)

// ErrNoLoop says that the entries are not those of a loop's journal.
var ErrNoLoop = errors.New("no journal of a loop")

// Story is what a journal tells. A field that the journal has not come to is zero.
type Story struct {
	Started  events.LoopStarted
	StoredAt time.Time // of started, by the stream's clock
	Sandbox  *events.LoopSandbox
	Turns    []Turn
	Last     *computer.Observation // the latest, which no turn was decided on
	Notes    []Note                // what came after the last turn
	Ending   *events.LoopEnding
	Finished *events.LoopFinished
}

// Turn is one answer of the model and what became of it.
type Turn struct {
	Decided  events.LoopDecided
	StoredAt time.Time
	Seen     *computer.Observation // what the model decided on
	Looks    int                   // observations taken within the turn
	LookedMs float64               // what those of the turn, and before it, took
	Retried  []events.LoopRetried
	Acted    *events.LoopActed
	Notes    []Note // between the turn before and this one's answer
}

// Note is what happened beside the turns.
type Note struct {
	At   time.Time
	What string // the entry's name
	Text string
}

// Display is the size of the loop's display.
func (s *Story) Display() computer.Display {
	switch {
	case s.Sandbox != nil && s.Sandbox.Display.Validate() == nil:
		return s.Sandbox.Display
	case s.Started.Start.Sandbox != nil && s.Started.Start.Sandbox.Display != nil && s.Started.Start.Sandbox.Display.Validate() == nil:
		return *s.Started.Start.Sandbox.Display
	default:
		return computer.DefaultDisplay
	}
}

// Tell folds the entries of one journal, in their order. The error is
// ErrNoLoop where they have no started, or names the entry that cannot be read.
func Tell(entries []looprunner.Entry) (*Story, error) {
	s := &Story{}
	t := teller{story: s}
	begun := false
	for _, e := range entries {
		if e.Name == events.LoopStartedName {
			begun, s.StoredAt = true, e.Stored
		}
		if err := t.fold(e); err != nil {
			return nil, fmt.Errorf("entry %d (%s): %w", e.Sequence, e.Name, err)
		}
	}
	if !begun {
		return nil, ErrNoLoop
	}
	s.Last, s.Notes = t.seen, t.notes
	return s, nil
}

// teller holds what the next turn begins with.
type teller struct {
	story    *Story
	seen     *computer.Observation
	looks    int
	lookedMs float64
	thinking bool
	notes    []Note
}

func (t *teller) fold(e looprunner.Entry) error {
	s := t.story
	switch e.Name {
	case events.LoopStartedName:
		return e.Decode(&s.Started)
	case events.LoopSandboxName:
		s.Sandbox = &events.LoopSandbox{}
		return e.Decode(s.Sandbox)
	case events.LoopObservedName:
		var v events.LoopObserved
		if err := e.Decode(&v); err != nil {
			return err
		}
		t.seen = &v.Observation
		t.lookedMs += v.Timing.QueuedMs + v.Timing.RanMs
		if t.thinking {
			t.looks++
		}
	case events.LoopThinkingName:
		t.thinking = true
	case events.LoopDecidedName:
		return t.decided(e)
	case events.LoopRetriedName, events.LoopActedName:
		return t.acted(e)
	case events.LoopPausedName, events.LoopResumedName:
		var v events.LoopPaused
		if err := e.Decode(&v); err != nil {
			return err
		}
		t.notes = append(t.notes, Note{e.Stored, e.Name, v.Reason})
	case events.LoopStopName, events.LoopPauseName, events.LoopResumeName, events.LoopMessageName:
		var v events.LoopControl
		if e.Decode(&v) == nil { // else a stranger's
			t.notes = append(t.notes, Note{e.Stored, e.Name, v.Reason + v.Text})
		}
	case events.LoopEndingName:
		s.Ending = &events.LoopEnding{}
		return e.Decode(s.Ending)
	case events.LoopFinishedName:
		s.Finished = &events.LoopFinished{}
		return e.Decode(s.Finished)
	}
	return nil
}

func (t *teller) decided(e looprunner.Entry) error {
	turn := Turn{StoredAt: e.Stored, Seen: t.seen, Looks: t.looks, LookedMs: t.lookedMs, Notes: t.notes}
	if err := e.Decode(&turn.Decided); err != nil {
		return err
	}
	t.story.Turns = append(t.story.Turns, turn)
	t.looks, t.lookedMs, t.thinking, t.notes = 0, 0, false, nil
	return nil
}

// acted adds to the turn that was decided last.
func (t *teller) acted(e looprunner.Entry) error {
	n := len(t.story.Turns)
	if n == 0 {
		return errors.New("no decision came before it")
	}
	turn := &t.story.Turns[n-1]
	if e.Name == events.LoopRetriedName {
		var v events.LoopRetried
		err := e.Decode(&v)
		turn.Retried = append(turn.Retried, v)
		return err
	}
	turn.Acted = &events.LoopActed{}
	if err := e.Decode(turn.Acted); err != nil {
		return err
	}
	t.seen = turn.Acted.Observation // nil: the next look shows it
	return nil
}
