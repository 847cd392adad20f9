package script

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
)

// pollEvery is how often the sandbox is looked at for a check that does not
// hold yet.
const pollEvery = 150 * time.Millisecond

// Name is the model's name in a start request.
const Name = "script"

// model follows a script. All that it knows between turns is in position.
type model struct{ script Script }

// position is the Decision's state: the item to go on with.
type position struct {
	Next int `json:"next"`
}

// New is the looprunner.ModelFactory of scripts.
func New(spec looprunner.Spec) (looprunner.Model, error) {
	var options struct {
		Name string `json:"name"`
	}
	dec := json.NewDecoder(bytes.NewReader(spec.Model))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&options); err != nil {
		return nil, events.BadInput("model: %v", err)
	}
	if len(spec.Script) == 0 {
		return nil, events.BadInput(`script: the model "script" needs one`)
	}
	s, err := Parse(spec.Script)
	if err != nil {
		return nil, err
	}
	if spec.Display != nil {
		if err := s.CheckBounds(*spec.Display); err != nil {
			return nil, err
		}
	}
	return &model{s}, nil
}

// PricedAs says that a script costs nothing.
func (*model) PricedAs() string { return "" }

// Think evaluates the checks up to the next action and decides on that.
func (m *model) Think(ctx context.Context, in looprunner.Turn) (looprunner.Decision, error) {
	var p position
	if len(in.State) > 0 {
		if err := json.Unmarshal(in.State, &p); err != nil {
			return looprunner.Decision{}, fmt.Errorf("script position: %w", err)
		}
	}
	if p.Next < 0 || p.Next > len(m.script) {
		return looprunner.Decision{}, fmt.Errorf("script position %d of %d items", p.Next, len(m.script))
	}
	now := seen{observation: in.Observation, dialogs: slices.Clone(in.Dialogs), downloads: slices.Clone(in.Downloads), frame: in.Frame}
	if last := in.Last(); last != nil && last.Acted != nil {
		if fault := m.judge(p.Next, last); fault != nil {
			return looprunner.Decision{Failed: fault, State: in.State}, nil
		}
		if n := len(last.Acted.Actions); n > 0 {
			now.value = last.Acted.Actions[n-1].Value
		}
	}
	var d looprunner.Decision
	for ; p.Next < len(m.script) && m.script[p.Next].Check != nil; p.Next++ {
		check, err := m.await(ctx, p.Next, &now, in)
		if err != nil {
			return d, err
		}
		d.Checks = append(d.Checks, check)
		if !check.OK {
			d.Failed = &computer.Fault{Code: events.CodeCheckFailed,
				Message: fmt.Sprintf("%s: want %s %s, got %s", m.describe(p.Next), check.Check, check.Want, check.Got)}
			break
		}
	}
	switch {
	case d.Failed != nil:
	case p.Next == len(m.script):
		d.Done = true
	default:
		it := m.script[p.Next]
		d.Label, d.Actions = it.Name, []computer.Action{*it.Action}
		p.Next++
	}
	raw, err := json.Marshal(p)
	d.State = raw
	return d, err
}

// judge looks at what became of the last action, whose item is the last
// action before next.
func (m *model) judge(next int, last *looprunner.Exchange) *computer.Fault {
	acted, item := last.Acted, next-1
	if acted.Outcome == computer.OK || item < 0 {
		return nil
	}
	if acted.Outcome == computer.Unknown && m.script[item].UnknownContinue {
		return nil
	}
	fault := &computer.Fault{Code: events.CodeActionFailed, Message: "the action's outcome is " + string(acted.Outcome)}
	if acted.Error != nil {
		fault = acted.Error
	}
	for _, a := range acted.Actions {
		if a.Error != nil {
			fault = a.Error
			break
		}
	}
	return &computer.Fault{Code: fault.Code, Message: fmt.Sprintf("%s: %s: %s", m.describe(item), acted.Outcome, fault.Message)}
}

// await evaluates a check, looking again until it holds or its time is over.
func (m *model) await(ctx context.Context, item int, now *seen, in looprunner.Turn) (events.LoopCheck, error) {
	c := m.script[item].Check
	began := time.Now()
	for {
		ok, got, err := c.eval(ctx, *now)
		if err != nil {
			return events.LoopCheck{}, err
		}
		if ok || time.Since(began) >= c.Within {
			return events.LoopCheck{Item: item, Check: string(c.Kind), OK: ok, Want: c.want(), Got: got, Ms: time.Since(began).Milliseconds()}, nil
		}
		select {
		case <-ctx.Done():
			return events.LoopCheck{}, context.Cause(ctx)
		case <-time.After(pollEvery):
		}
		o, err := in.Observe(ctx)
		if err != nil {
			return events.LoopCheck{}, err
		}
		now.observation = o
		now.dialogs = append(now.dialogs, o.Dialogs...)
		now.downloads = append(now.downloads, o.Downloads...)
	}
}

// describe names an item for people.
func (m *model) describe(i int) string {
	if name := m.script[i].Name; name != "" {
		return fmt.Sprintf("script item %d (%s)", i, name)
	}
	return fmt.Sprintf("script item %d", i)
}
