package main

import (
	"fmt"
	"strings"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/replay"
)

// readEntry reads an entry of a loop's journal as it is stored.
func readEntry(m stored) (looprunner.Entry, error) {
	e, err := events.Decode(m.header, m.data)
	if err != nil {
		return looprunner.Entry{}, fmt.Errorf("entry %d of %s: %w", m.sequence, m.subject, err)
	}
	out := looprunner.Entry{Name: m.subject[strings.LastIndexByte(m.subject, '.')+1:], Sequence: m.sequence, Stored: m.time, Type: e.Type(), Data: e.Data()}
	if err := out.Decode(&out.Head); err != nil {
		return looprunner.Entry{}, fmt.Errorf("entry %d of %s: %w", m.sequence, m.subject, err)
	}
	return out, nil
}

func read[T any](e looprunner.Entry) (T, error) {
	var v T
	if err := e.Decode(&v); err != nil {
		return v, fmt.Errorf("entry %d, %s: %w", e.Sequence, e.Name, err)
	}
	return v, nil
}

// line is one line of a loop's progress.
type line struct {
	step    int
	what    string // the action, short
	outcome string
	ms      float64
	note    string
	bad     bool
	object  string // picture of it in FRAMES
	done    int    // items of a script that this line completes
}

// teller turns a journal into lines. An act's decision and its outcome are two
// entries; the teller keeps the one for the other.
type teller struct {
	decided events.LoopDecided
	tenant  string
	vm      string
	server  string
}

// tell returns the lines of one entry.
func (t *teller) tell(e looprunner.Entry) ([]line, error) {
	switch e.Name {
	case events.LoopStartedName:
		v, err := read[events.LoopStarted](e)
		t.vm = v.VMID
		return nil, err
	case events.LoopSandboxName:
		v, err := read[events.LoopSandbox](e)
		t.vm, t.server = v.VMID, v.ServerID
		note := fmt.Sprintf("sandbox %s on %s, %d×%d", v.VMID, v.ServerID, v.Display.Width, v.Display.Height)
		return []line{{what: "sandbox", outcome: "ready", note: note}}, err
	case events.LoopDecidedName:
		v, err := read[events.LoopDecided](e)
		t.decided = v
		return t.checks(v), err
	case events.LoopRetriedName:
		v, err := read[events.LoopRetried](e)
		return []line{{step: e.Head.Step, what: replay.DescribeAll(t.decided.Actions), outcome: "not run", note: fmt.Sprintf("%s: %s; attempt %d", v.Code, v.Message, v.Attempt)}}, err
	case events.LoopActedName:
		v, err := read[events.LoopActed](e)
		return t.acted(v), err
	case events.LoopPausedName:
		v, err := read[events.LoopPaused](e)
		return []line{{step: e.Head.Step, what: "paused", outcome: "waits", note: v.Reason}}, err
	case events.LoopResumedName:
		return []line{{step: e.Head.Step, what: "resumed", outcome: "goes on"}}, nil
	case events.LoopMessageName, events.LoopStopName:
		v, err := read[events.LoopControl](e)
		return []line{{step: e.Head.Step, what: e.Name, outcome: "taken", note: v.Reason + v.Text}}, err
	}
	return nil, nil
}

func (t *teller) checks(v events.LoopDecided) []line {
	var out []line
	for _, c := range v.Checks {
		l := line{step: v.Step, what: "check " + c.Check, outcome: "ok", ms: float64(c.Ms), note: c.Want, done: 1}
		if !c.OK {
			l.outcome, l.bad, l.note = "failed", true, fmt.Sprintf("want %s, got %s", c.Want, c.Got)
		}
		out = append(out, l)
	}
	if v.Failed != nil && !t.lastBad(out) {
		out = append(out, line{step: v.Step, what: "decide", outcome: "failed", note: v.Failed.Message, bad: true})
	}
	return out
}

func (*teller) lastBad(lines []line) bool { return len(lines) > 0 && lines[len(lines)-1].bad }

func (t *teller) acted(v events.LoopActed) []line {
	l := line{step: v.Step, what: replay.DescribeAll(t.decided.Actions), outcome: string(v.Outcome), ms: v.Timing.RanMs, note: t.decided.Label,
		bad: v.Outcome != computer.OK, done: len(t.decided.Actions)}
	if l.what == "" {
		l.what = "observe"
	}
	if v.Error != nil {
		l.note = v.Error.Code + ": " + v.Error.Message
	}
	for _, a := range v.Actions {
		if a.Error != nil {
			l.note = a.Error.Code + ": " + a.Error.Message
		}
	}
	if v.Observation != nil {
		l.object = v.Observation.Screenshot.Object
	}
	return []line{l}
}

// String is a line in columns.
func (l line) String() string {
	step, ms := "", ""
	if l.step > 0 {
		step = fmt.Sprint(l.step)
	}
	if l.ms > 0 {
		ms = fmt.Sprintf("%.0f ms", l.ms)
	}
	return strings.TrimRight(fmt.Sprintf("%4s  %-34s  %-8s %9s  %s", step, clip(l.what, 34), l.outcome, ms, clip(l.note, 90)), " ")
}

// clip shortens s to n characters and makes it printable.
func clip(s string, n int) string {
	s = strings.Map(printable, s)
	r := []rune(s)
	if len(r) <= n {
		return s
	}
	return string(r[:n-1]) + "…"
}

// since is a moment relative to the journal's start.
func since(start, at time.Time) string { return fmt.Sprintf("%8.3f", at.Sub(start).Seconds()) }
