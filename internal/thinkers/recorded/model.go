package recorded

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/replay"
	"berth/internal/thinkers/vendors"
)

// Name is the model's name in a start request.
const Name = "replay"

// Codes of loops that rerun another.
const (
	CodeDiffers   = "differs"   // something came out otherwise than recorded
	CodeNoPicture = "noPicture" // a picture that is to be compared has expired
)

// Bounds and defaults of the settings.
const (
	DefaultSettle    = 5.0   // seconds
	MaxSettle        = 300.0 // seconds
	DefaultTolerance = 0.01  // of the pixels
	lookEvery        = 150 * time.Millisecond
	readTime         = 15 * time.Second
)

// Settings are the model's part of a start request.
type Settings struct {
	Name      string   `json:"name"`
	Loop      string   `json:"loop"`                    // whose decisions
	Compare   []Field  `json:"compare,omitempty"`       // default: DefaultFields
	Tolerance *float64 `json:"tolerance,omitempty"`     // share of a picture's pixels that may differ
	Settle    *float64 `json:"settleSeconds,omitempty"` // how long the sandbox may take to look as recorded
}

func (s *Settings) tolerance() float64 { return *s.Tolerance }

// Check fills the defaults and returns an *events.DataError that names the
// first field at fault.
func (s *Settings) Check() error {
	if err := events.CheckID("model.loop", s.Loop); err != nil {
		return events.BadInput("%v", err)
	}
	if len(s.Compare) == 0 {
		s.Compare = DefaultFields
	}
	for _, f := range s.Compare {
		if !slices.Contains(Fields, f) {
			return events.BadInput("model.compare: %q is none of %s", brief(json.RawMessage(f)), fieldNames())
		}
	}
	tolerance, settle := DefaultTolerance, DefaultSettle
	if s.Tolerance == nil {
		s.Tolerance = &tolerance
	}
	if s.Settle == nil {
		s.Settle = &settle
	}
	if t := *s.Tolerance; !(t >= 0 && t <= 1) {
		return events.BadInput("model.tolerance: %v is not in 0 to 1, the share of pixels that may differ", t)
	}
	if t := *s.Settle; !(t >= 0 && t <= MaxSettle) {
		return events.BadInput("model.settleSeconds: %v is not in 0 to %v", t, MaxSettle)
	}
	return nil
}

func fieldNames() string {
	names := make([]string, len(Fields))
	for i, f := range Fields {
		names[i] = string(f)
	}
	return strings.Join(names, ", ")
}

// model follows a record.
type model struct {
	settings Settings
	story    *replay.Story
	kept     struct { // the recorded picture decoded last
		object string
		img    image.Image
	}
}

// New is the looprunner.ModelFactory. It reads the record, of the same tenant,
// and refuses one that is not there or has no decisions.
func New(spec looprunner.Spec) (looprunner.Model, error) {
	m := &model{}
	if err := vendors.Decode(spec.Model, &m.settings, ""); err != nil {
		return nil, err
	}
	if err := m.settings.Check(); err != nil {
		return nil, err
	}
	js, err := bus.JetStream(spec.NC)
	if err != nil {
		return nil, err
	}
	entries, err := read(js, spec.Tenant, m.settings.Loop)
	if err != nil {
		return nil, err
	}
	m.story, err = replay.Tell(entries)
	switch {
	case errors.Is(err, replay.ErrNoLoop):
		return nil, &events.DataError{Code: events.CodeNotFound, Message: fmt.Sprintf("model.loop: there is no journal of a loop %q; journals are kept for 7 days", m.settings.Loop)}
	case err != nil:
		return nil, events.BadInput("model.loop: the journal of %s cannot be read: %v", m.settings.Loop, err)
	case len(m.story.Turns) == 0:
		return nil, events.BadInput("model.loop: nothing was decided in loop %s", m.settings.Loop)
	}
	return m, nil
}

// read tries for a while: the bus may be away for a moment.
func read(js jetstream.JetStream, tenant, loop string) ([]looprunner.Entry, error) {
	ctx, cancel := context.WithTimeout(context.Background(), readTime)
	defer cancel()
	for attempt := 0; ; attempt++ {
		entries, err := looprunner.Read(ctx, js, tenant, loop)
		if err == nil || bus.Pause(ctx, attempt) != nil {
			return entries, err
		}
	}
}

// PricedAs says that a record costs nothing.
func (*model) PricedAs() string { return "" }

// Think compares what has come of the decisions so far, and makes the next.
func (m *model) Think(ctx context.Context, in looprunner.Turn) (looprunner.Decision, error) {
	n, turns := len(in.History), m.story.Turns
	if n > len(turns) {
		return looprunner.Decision{}, fmt.Errorf("turn %d of a record of %d", n+1, len(turns))
	}
	if last := in.Last(); last != nil {
		was := turns[n-1]
		if d := m.acts(last.Step, was.Decided.Actions, was.Acted, last.Acted); d != nil {
			return differs(d), nil
		}
	}
	was := m.story.Last
	if n < len(turns) {
		was = turns[n].Seen
	}
	d, err := m.settle(ctx, in, was)
	switch {
	case err != nil:
		return looprunner.Decision{}, err
	case d != nil:
		return differs(d), nil
	case n == len(turns):
		return looprunner.Decision{Done: true, Label: "the record ends here: " + m.end()}, nil
	}
	again := turns[n].Decided
	out := looprunner.Decision{Label: again.Label, Actions: again.Actions, Observe: again.Observe, Wait: events.Seconds(again.WaitSeconds), Done: again.Done, Failed: again.Failed}
	if again.NeedsInput != "" {
		out = looprunner.Decision{Label: "a person was asked: " + again.NeedsInput, Observe: true}
	}
	return out, nil
}

// settle looks again until the sandbox looks as recorded, or its time is over.
func (m *model) settle(ctx context.Context, in looprunner.Turn, was *computer.Observation) (*Difference, error) {
	began, now := time.Now(), in.Observation
	for {
		d, err := m.looks(ctx, in.Step, was, now, in.Frame)
		if err != nil || d == nil || time.Since(began) >= events.Seconds(*m.settings.Settle) {
			return d, err
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(lookEvery):
		}
		if now, err = in.Observe(ctx); err != nil {
			return nil, err
		}
	}
}

// end says how the record ended without the model's deciding it.
func (m *model) end() string {
	switch s := m.story; {
	case s.Finished != nil:
		return strings.TrimSuffix(s.Finished.Outcome+", "+s.Finished.Code, ", ")
	case s.Ending != nil:
		return strings.TrimSuffix(s.Ending.Outcome+", "+s.Ending.Code, ", ")
	default:
		return "it had not finished"
	}
}

func differs(d *Difference) looprunner.Decision {
	raw, err := json.Marshal(d)
	if err != nil { // strings and numbers
		raw = nil
	}
	return looprunner.Decision{Failed: &computer.Fault{Code: CodeDiffers, Message: d.String()}, Reply: raw}
}

func quote(s string) string { return strconv.Quote(clip(s)) }

func brief(raw json.RawMessage) string {
	if len(raw) == 0 {
		return "nothing"
	}
	return clip(string(raw))
}

// clip keeps what is echoed short.
func clip(s string) string {
	const limit = 300
	if len(s) > limit {
		return strings.ToValidUTF8(s[:limit], "") + "…"
	}
	return s
}
