// Package thinkertest plays the loop for tests of models: it journals each
// decision as the loop-runner does, carries it out on a sandbox that it makes
// up, and makes a new model for every turn, as after a crash.
package thinkertest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"slices"
	"strings"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
)

// Desk is one loop and its sandbox. Set its fields, then call Step or Run from
// one goroutine.
type Desk struct {
	T            testing.TB
	Factory      looprunner.ModelFactory
	Model        string // the `model` object
	Goal         string
	Display      computer.Display // default 1280×800
	Picture      computer.Display // of the screenshots; default the display
	Capabilities []string
	Script       json.RawMessage

	// Act says what becomes of a command; nil, or nil returned: all is well.
	Act func(step int, actions []computer.Action) *looprunner.Acted
	// Say are the messages that come before a step.
	Say map[int][]string
	// See changes an observation before it is shown.
	See func(step int, o *computer.Observation)
	// Crash lets every turn's first answer die with its process, before it is
	// journaled, so that each is asked for twice.
	Crash bool

	Acts    []computer.Action // in order of effect
	History []looprunner.Exchange
	Last    looprunner.Decision
	Usage   events.LoopUsage

	step   int
	state  json.RawMessage
	obs    *computer.Observation
	frames map[string][]byte
	inbox  []string
}

// Make makes a model, or returns the factory's error.
func (d *Desk) Make() (looprunner.Model, error) {
	d.defaults()
	return d.Factory(looprunner.Spec{Tenant: "default", Loop: "l1", Goal: d.Goal, Model: json.RawMessage(d.Model), Display: &d.Display})
}

func (d *Desk) defaults() {
	if d.Display == (computer.Display{}) {
		d.Display = computer.DefaultDisplay
	}
	if d.Picture == (computer.Display{}) {
		d.Picture = d.Display
	}
	if d.Goal == "" {
		d.Goal = "Save the form."
	}
}

// observe takes a picture that no other is like.
func (d *Desk) observe() {
	if d.frames == nil {
		d.frames = map[string][]byte{}
	}
	n := len(d.frames) + 1
	o := computer.Observation{Screenshot: d.frame(fmt.Sprintf("vm/%d", n), d.Picture.Width, d.Picture.Height, n),
		Cursor: &computer.Point{X: 7, Y: 9}, URL: "https://shop.example/form", Title: fmt.Sprintf("Form %d", n),
		TakenAt: time.Date(2026, 11, 30, 12, 0, n, 0, time.UTC)}
	if d.See != nil {
		d.See(d.step, &o)
	}
	d.obs = &o
}

func (d *Desk) frame(object string, w, h, n int) computer.Picture {
	img := image.NewPaletted(image.Rect(0, 0, w, h), color.Palette{color.RGBA{uint8(n), uint8(n >> 8), 200, 255}, color.Black})
	img.SetColorIndex(n%w, n%h, 1)
	var buf bytes.Buffer
	if err := png.Encode(&buf, img); err != nil {
		d.T.Fatal(err)
	}
	d.frames[object] = buf.Bytes()
	return computer.Picture{Object: object, MediaType: "image/png", Width: w, Height: h, Bytes: buf.Len()}
}

// Frame is a picture of the desk's.
func (d *Desk) Frame(object string) []byte { return d.frames[object] }

// Turn is what the model is told next.
func (d *Desk) Turn() looprunner.Turn {
	if d.obs == nil {
		d.step = 1
		d.observe()
	}
	if said, ok := d.Say[d.step]; ok {
		d.inbox = append(d.inbox, said...)
		delete(d.Say, d.step)
	}
	return looprunner.Turn{Tenant: "default", Loop: "l1", Goal: d.Goal, Step: d.step, Display: d.Display, Capabilities: d.Capabilities,
		Observation: *d.obs, Dialogs: d.obs.Dialogs, Downloads: d.obs.Downloads, History: slices.Clone(d.History), State: d.state, Messages: d.inbox,
		Frame: func(_ context.Context, object string) ([]byte, error) {
			raw, ok := d.frames[object]
			if !ok {
				return nil, fmt.Errorf("no object %s", object)
			}
			return raw, nil
		}}
}

// Think asks a new model.
func (d *Desk) Think(in looprunner.Turn) (looprunner.Decision, error) {
	m, err := d.Make()
	if err != nil {
		return looprunner.Decision{}, err
	}
	return m.Think(d.T.Context(), in)
}

// Step takes one turn. It returns the model's error.
func (d *Desk) Step() error {
	d.T.Helper()
	d.defaults()
	in := d.Turn()
	if d.Crash {
		if _, err := d.Think(in); err != nil {
			return err
		}
	}
	dec, err := d.Think(in)
	if err != nil {
		return err
	}
	dec = d.journal(dec)
	d.Last, d.state = dec, dec.State
	d.Usage.InputTokens += dec.Usage.InputTokens
	d.Usage.OutputTokens += dec.Usage.OutputTokens
	x := looprunner.Exchange{Step: d.step, Observation: *d.obs, Messages: d.inbox, Decision: dec}
	d.inbox = nil
	switch {
	case len(dec.Actions) > 0:
		x.Acted = d.act(dec.Actions)
		d.step++
		d.observe()
	case dec.NeedsInput != "":
		d.step++
	case dec.Observe:
		d.step++
		d.observe()
	}
	d.History = append(d.History, x)
	return nil
}

// journal sends a decision through JSON, as LOOPS does.
func (d *Desk) journal(in looprunner.Decision) looprunner.Decision {
	raw, err := json.Marshal(events.LoopDecided{Label: in.Label, Actions: in.Actions, Observe: in.Observe, WaitSeconds: in.Wait.Seconds(), NeedsInput: in.NeedsInput,
		Done: in.Done, Failed: in.Failed, State: in.State, Reply: in.Reply, Usage: in.Usage})
	if err != nil {
		d.T.Fatal(err)
	}
	if len(raw) > 900<<10 {
		d.T.Fatalf("a decision of %d bytes", len(raw))
	}
	var v events.LoopDecided
	if err := json.Unmarshal(raw, &v); err != nil {
		d.T.Fatal(err)
	}
	return looprunner.Decision{Label: v.Label, Actions: v.Actions, Observe: v.Observe, Wait: events.Seconds(v.WaitSeconds), NeedsInput: v.NeedsInput,
		Done: v.Done, Failed: v.Failed, State: v.State, Reply: v.Reply, Usage: v.Usage}
}

// act carries out a command as a worker would.
func (d *Desk) act(actions []computer.Action) *looprunner.Acted {
	if normal, err := computer.Normalize(actions); err != nil {
		d.T.Errorf("step %d: %v", d.step, err)
	} else if err := computer.CheckBounds(normal, d.Display); err != nil {
		d.T.Errorf("step %d: %v", d.step, err)
	}
	if d.Act != nil {
		if a := d.Act(d.step, actions); a != nil {
			for i, r := range a.Actions {
				if r.Outcome == computer.OK {
					d.Acts = append(d.Acts, actions[i])
				}
			}
			return a
		}
	}
	d.Acts = append(d.Acts, actions...)
	out := &looprunner.Acted{Outcome: computer.OK}
	for i, a := range actions {
		r := computer.ActionResult{Outcome: computer.OK}
		var v any
		switch a.Type {
		case computer.Screenshot:
			v = d.frame(fmt.Sprintf("vm/%d-%d", len(d.frames), i), d.Picture.Width, d.Picture.Height, 1000+len(d.frames))
		case computer.Zoom:
			v = d.frame(fmt.Sprintf("vm/%d-%d", len(d.frames), i), a.Region.Width, a.Region.Height, 2000+len(d.frames))
		case computer.Cursor:
			v = computer.Point{X: 640, Y: 400}
		case computer.ClipboardRead:
			v = "copied"
		case computer.Run:
			v = computer.RunValue{ExitCode: 3, Stdout: "out", Stderr: "err"}
		}
		if v != nil {
			raw, err := json.Marshal(v)
			if err != nil {
				d.T.Fatal(err)
			}
			r.Value = raw
		}
		out.Actions = append(out.Actions, r)
	}
	return out
}

// Run takes turns until the loop would end, at most limit, and fails the test
// where it does not.
func (d *Desk) Run(limit int) looprunner.Decision {
	d.T.Helper()
	for range limit {
		if err := d.Step(); err != nil {
			d.T.Fatalf("step %d: %v", d.step, err)
		}
		if d.Last.Done || d.Last.Failed != nil {
			return d.Last
		}
	}
	d.T.Fatalf("no end in %d turns; acts: %s", limit, d.Did())
	return d.Last
}

// Did is what took effect, in short.
func (d *Desk) Did() string {
	parts := make([]string, len(d.Acts))
	for i, a := range d.Acts {
		raw, err := json.Marshal(a)
		if err != nil {
			d.T.Fatal(err)
		}
		parts[i] = string(raw)
	}
	return strings.Join(parts, " ")
}
