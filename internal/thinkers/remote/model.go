package remote

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/thinkers/screen"
	"berth/internal/thinkers/toolcall"
	"berth/internal/thinkers/vendors"
)

// Name is the model's name in a start request.
const Name = "bus"

// CodeNoThinker is what a loop ends with whose thinker nobody is.
const CodeNoThinker = "noThinker"

const (
	defaultThinker = "default"
	defaultTimeout = 120.0
	maxTimeout     = 1800.0
	// absence is how long nobody may be there, as while a service restarts.
	absence  = 10 * time.Second
	askAgain = 250 * time.Millisecond
	// headroom of a message beside picture and data: subject, headers, envelope.
	headroom = 4 << 10
	// leastPicture is the smallest picture that is worth sending, in bytes.
	leastPicture = 2 << 10
)

// settings is the `model` object.
type settings struct {
	Name           string          `json:"name"`
	Thinker        string          `json:"thinker"` // asked at think.<thinker>
	TimeoutSeconds float64         `json:"timeoutSeconds"`
	Picture        bool            `json:"picture"` // send the screenshot along
	Options        json.RawMessage `json:"options"` // passed on as they are
	Allow          []computer.Type `json:"allow"`
	Deny           []computer.Type `json:"deny"`
}

func parse(raw json.RawMessage) (settings, error) {
	var s settings
	if err := vendors.Decode(raw, &s, "it for the thinker, where it runs,"); err != nil {
		return s, err
	}
	if s.Thinker == "" {
		s.Thinker = defaultThinker
	}
	if err := events.CheckID("model.thinker", s.Thinker); err != nil {
		return s, events.BadInput("%v", err)
	}
	if s.TimeoutSeconds == 0 {
		s.TimeoutSeconds = defaultTimeout
	}
	if !(s.TimeoutSeconds > 0 && s.TimeoutSeconds <= maxTimeout) {
		return s, events.BadInput("model.timeoutSeconds: %v is not in 0 (exclusive) to %v", s.TimeoutSeconds, maxTimeout)
	}
	for _, t := range slices.Concat(s.Allow, s.Deny) {
		if !slices.Contains(computer.Types(), t) {
			return s, events.BadInput("model.allow, model.deny: unknown action %q", string(t))
		}
	}
	return s, nil
}

// New is the looprunner.ModelFactory of services on the bus.
func New(spec looprunner.Spec) (looprunner.Model, error) {
	s, err := parse(spec.Model)
	if err != nil {
		return nil, err
	}
	if spec.NC == nil {
		return nil, &events.DataError{Code: events.CodeInternal, Message: "this process has no connection for its models"}
	}
	return &model{settings: s, limits: spec.Limits, nc: spec.NC}, nil
}

// model asks one thinker for one loop. It keeps nothing between turns.
type model struct {
	settings settings
	limits   events.LoopLimits
	nc       *nats.Conn
}

// PricedAs is what the tokens that the service reports are priced by.
func (m *model) PricedAs() string { return Name + "/" + m.settings.Thinker }

// Think sends the turn and reads the reply.
func (m *model) Think(ctx context.Context, in looprunner.Turn) (looprunner.Decision, error) {
	msg, err := m.request(ctx, in)
	if err != nil {
		return looprunner.Decision{}, err
	}
	answer, err := m.ask(ctx, msg)
	if err != nil {
		return looprunner.Decision{}, err
	}
	if why := answer.Header.Get("Nats-Service-Error"); why != "" {
		return looprunner.Decision{}, &computer.Fault{Code: vendors.CodeUnavailable, Message: fmt.Sprintf("%s: %s %s", msg.Subject, answer.Header.Get("Nats-Service-Error-Code"), clip(why))}
	}
	r, err := decode(answer)
	if err != nil {
		return looprunner.Decision{}, m.bad(err)
	}
	var usage events.LoopUsage
	if r.Usage != nil {
		usage = *r.Usage
	} else if err := vendors.Counted(m.limits, usage); err != nil {
		return looprunner.Decision{}, err
	}
	d := looprunner.Decision{Label: r.Label, Observe: r.Observe, Wait: events.Seconds(r.WaitSeconds), NeedsInput: r.NeedsInput, Done: r.Done, Failed: r.Failed, State: r.State, Usage: usage}
	if !r.Observe && r.NeedsInput == "" && !r.Done && r.Failed == nil {
		if d.Actions, err = m.actions(in, r.Actions); err != nil {
			return looprunner.Decision{}, m.bad(err)
		}
	}
	return d, nil
}

func (m *model) bad(err error) error {
	return &computer.Fault{Code: vendors.CodeMalformed, Message: fmt.Sprintf("reply of %s: %s", Subject(m.settings.Thinker), clip(err.Error()))}
}

// actions holds a reply's actions to the rules of a command.
func (m *model) actions(in looprunner.Turn, raw json.RawMessage) ([]computer.Action, error) {
	actions, err := computer.DecodeActions(raw)
	if err != nil {
		return nil, err
	}
	if err := computer.CheckBounds(actions, in.Display); err != nil {
		return nil, err
	}
	rules := toolcall.Rules{Display: in.Display, Capabilities: in.Capabilities, Allow: m.settings.Allow, Deny: m.settings.Deny}
	for i, a := range actions {
		if err := rules.May(a.Type); err != nil {
			return nil, fmt.Errorf("action %d: %w", i, err)
		}
	}
	return actions, nil
}

// request makes the message.
func (m *model) request(ctx context.Context, in looprunner.Turn) (*nats.Msg, error) {
	r := Request{Tenant: in.Tenant, Loop: in.Loop, Goal: in.Goal, Step: in.Step, Display: in.Display, Capabilities: slices.Clone(in.Capabilities),
		Observation: in.Observation, Dialogs: in.Dialogs, Downloads: in.Downloads, Messages: in.Messages, State: in.State, Options: m.settings.Options}
	if r.Capabilities == nil {
		r.Capabilities = []string{}
	}
	if last := in.Last(); last != nil {
		r.Last = &Last{Label: last.Decision.Label, Actions: last.Decision.Actions, Observe: last.Decision.Observe, NeedsInput: last.Decision.NeedsInput}
		if a := last.Acted; a != nil {
			r.Last.Outcome, r.Last.Error, r.Last.Results = a.Outcome, a.Error, a.Actions
		}
	}
	if m.settings.Picture {
		if err := m.attach(ctx, in, &r); err != nil {
			return nil, err
		}
	}
	id := fmt.Sprintf("%s.%s.%d.%d", in.Tenant, in.Loop, in.Step, len(in.History))
	e, err := events.New(TypeRequest, events.SourceLoopRunner, id, r)
	if err != nil {
		return nil, err
	}
	msg, err := events.NewMessage(ctx, Subject(m.settings.Thinker), e)
	if err == nil && int64(len(msg.Data))+headroom > m.nc.MaxPayload() {
		err = &computer.Fault{Code: events.CodeTooLarge, Message: fmt.Sprintf("the turn has %d bytes, a message at most %d", len(msg.Data), m.nc.MaxPayload())}
	}
	return msg, err
}

// attach puts the screenshot into the request, as large as the message allows.
func (m *model) attach(ctx context.Context, in looprunner.Turn, r *Request) error {
	without, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("encode turn: %w", err)
	}
	room := (int(m.nc.MaxPayload()) - len(without) - 2*headroom) / 4 * 3 // in base64
	if room < leastPicture {
		return &computer.Fault{Code: events.CodeTooLarge, Message: "the turn leaves no room for a picture in a message; set model.picture to false"}
	}
	raw, err := in.Frame(ctx, in.Observation.Screenshot.Object)
	if err != nil {
		return fmt.Errorf("picture %s: %w", in.Observation.Screenshot.Object, err)
	}
	img, err := screen.Prepare(raw, screen.Limits{Bytes: room}, screen.Size{})
	if err != nil {
		return fmt.Errorf("picture %s: %w", in.Observation.Screenshot.Object, err)
	}
	r.Picture = &Picture{MediaType: img.MediaType, Width: img.Size.Width, Height: img.Size.Height, Data: img.Data}
	return nil
}

// ask sends the request until somebody is there, once.
func (m *model) ask(ctx context.Context, msg *nats.Msg) (*nats.Msg, error) {
	absent := time.Now().Add(absence)
	for {
		call, cancel := context.WithTimeout(ctx, events.Seconds(m.settings.TimeoutSeconds))
		answer, err := m.nc.RequestMsgWithContext(call, msg)
		cancel()
		switch {
		case err == nil:
			return answer, nil
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case errors.Is(err, context.DeadlineExceeded) || errors.Is(err, nats.ErrTimeout):
			return nil, &computer.Fault{Code: events.CodeTimeout, Message: fmt.Sprintf("%s has not answered in %v s", msg.Subject, m.settings.TimeoutSeconds)}
		case !errors.Is(err, nats.ErrNoResponders):
			return nil, &computer.Fault{Code: vendors.CodeUnavailable, Message: fmt.Sprintf("%s: %v", msg.Subject, err)}
		case time.Now().After(absent):
			return nil, &computer.Fault{Code: CodeNoThinker, Message: fmt.Sprintf("nobody has subscribed to %s for %s", msg.Subject, absence)}
		}
		t := time.NewTimer(askAgain)
		select {
		case <-ctx.Done():
			t.Stop()
			return nil, context.Cause(ctx)
		case <-t.C:
		}
	}
}

// clip keeps a thinker's words short enough for a journal.
func clip(s string) string {
	if len(s) > 1000 {
		return strings.ToValidUTF8(s[:1000], "") + "…"
	}
	return s
}
