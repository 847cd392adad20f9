package openai

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/openai/openai-go/v3/packages/param"
	"github.com/openai/openai-go/v3/responses"

	"berth/internal/computer"
	"berth/internal/looprunner"
	"berth/internal/thinkers/screen"
	"berth/internal/thinkers/toolcall"
	"berth/internal/thinkers/vendors"
)

// check is a safety check, as the API gives it and wants it back.
type check struct {
	ID      string `json:"id"`
	Code    string `json:"code,omitempty"`
	Message string `json:"message,omitempty"`
}

// record is a decision's Reply: what later turns need of an answer.
type record struct {
	Items  []json.RawMessage  `json:"items,omitempty"` // the answer's output items; none: not to be repeated
	Calls  []toolcall.Call    `json:"calls,omitempty"`
	Checks map[string][]check `json:"checks,omitempty"` // by call, acknowledged once the call is answered
	Told   string             `json:"told,omitempty"`   // what stood beside the screenshot it answered to
	Note   string             `json:"note,omitempty"`   // to begin the next message with
	Sent   screen.Size        `json:"sent"`
	Fault  bool               `json:"fault,omitempty"`
	Model  string             `json:"model,omitempty"`

	// A turn whose checks a person must acknowledge holds its actions; the next
	// one carries them out (Resumed), or leaves the turn out (Refused).
	Held    bool              `json:"held,omitempty"`
	Actions []computer.Action `json:"actions,omitempty"`
	Resumed bool              `json:"resumed,omitempty"`
	Refused bool              `json:"refused,omitempty"`
}

func records(history []looprunner.Exchange) ([]record, error) {
	out := make([]record, len(history))
	for k, x := range history {
		if err := json.Unmarshal(x.Decision.Reply, &out[k]); err != nil {
			return nil, fmt.Errorf("reply of step %d: %w", x.Step, err)
		}
	}
	return out, nil
}

// talk is a conversation in the making.
type talk struct {
	m       *model
	in      looprunner.Turn
	records []record // of in.History
	refused bool     // the turn before was held, and a person refuses it
	from    int      // exchanges before it are told as a list only
	out     []responses.ResponseInputItemUnionParam
}

// conversation makes the request's input, and the view of the newest
// screenshot. told is what stands beside it.
func (m *model) conversation(ctx context.Context, in looprunner.Turn, recs []record, state vendors.State, refused bool, told string) ([]responses.ResponseInputItemUnionParam, screen.View, error) {
	t := &talk{m: m, in: in, records: recs, refused: refused}
	newest, err := m.picture(ctx, in, in.Observation.Screenshot)
	if err != nil {
		return nil, screen.View{}, err
	}
	view := screen.View{Sent: newest.Size, Display: in.Display}
	n := len(in.History)
	t.from = min(n, state.From+vendors.LeftOut(n+1-state.From, m.settings.KeepScreenshots, vendors.MaxPictures))
	if t.from > 0 && recs[t.from-1].Held {
		t.from--
	}
	for k := t.from; k <= n; k++ {
		if err := t.turn(ctx, k, view, told); err != nil {
			return nil, screen.View{}, err
		}
		if k < n && !(recs[k].Held && t.refusedAt(k+1)) {
			for _, raw := range recs[k].Items {
				t.out = append(t.out, param.Override[responses.ResponseInputItemUnionParam](raw))
			}
		}
	}
	return t.out, view, nil
}

func (t *talk) refusedAt(k int) bool {
	if k == len(t.records) {
		return t.refused
	}
	return t.records[k].Refused
}

// turn adds what the model saw in turn k.
func (t *talk) turn(ctx context.Context, k int, newest screen.View, told string) error {
	o, messages, view, text := t.in.Observation, t.in.Messages, newest, told
	if k < len(t.in.History) {
		x, r := t.in.History[k], t.records[k]
		o, messages, text = x.Observation, x.Messages, r.Told
		view = screen.View{Sent: r.Sent, Display: t.in.Display}
	}
	if k == t.from {
		return t.say(ctx, t.opening(), o.Screenshot, text)
	}
	before := t.records[k-1]
	switch {
	case before.Held && t.refusedAt(k):
		return t.say(ctx, "A person did not allow the step that you proposed next, and nothing of it was executed. They say: "+
			strings.Join(messages, "\n")+"\nFind another way, or give up.", o.Screenshot, "")
	case before.Held: // its call is still open
		return nil
	}
	answers := toolcall.Answers(before.Calls, t.in.History[k-1], view, messages)
	shown, err := t.outputs(ctx, before, answers, o.Screenshot)
	if err != nil {
		return err
	}
	notes := before.Note
	for i, a := range answers {
		if before.Calls[i].Tool == "computer" && a.Text != "OK" {
			notes = strings.TrimSpace(notes + "\nAbout call " + a.ID + ": " + a.Text)
		}
	}
	picture := o.Screenshot
	if shown {
		picture = computer.Picture{}
	}
	return t.say(ctx, notes, picture, text)
}

// outputs answers the calls of the turn before. It reports whether the
// screenshot is among the answers.
func (t *talk) outputs(ctx context.Context, before record, answers []toolcall.Answer, shot computer.Picture) (bool, error) {
	shown := false
	for i, a := range answers {
		if before.Calls[i].Tool != "computer" {
			out := &responses.ResponseInputItemFunctionCallOutputParam{CallID: param.NewOpt(a.ID)}
			out.Output.OfString = param.NewOpt(a.Text)
			t.out = append(t.out, responses.ResponseInputItemUnionParam{OfFunctionCallOutput: out})
			continue
		}
		img, err := t.m.picture(ctx, t.in, shot)
		if err != nil {
			return false, err
		}
		out := &responses.ResponseInputItemComputerCallOutputParam{CallID: a.ID,
			Output: responses.ResponseComputerToolCallOutputScreenshotParam{ImageURL: param.NewOpt(img.DataURL())}}
		if !t.m.settings.preview() { // the SDK has no field for it yet
			out.Output.SetExtraFields(map[string]any{"detail": "original"})
		}
		for _, c := range before.Checks[a.ID] {
			ack := responses.ResponseInputItemComputerCallOutputAcknowledgedSafetyCheckParam{ID: c.ID}
			if c.Code != "" {
				ack.Code = param.NewOpt(c.Code)
			}
			if c.Message != "" {
				ack.Message = param.NewOpt(c.Message)
			}
			out.AcknowledgedSafetyChecks = append(out.AcknowledgedSafetyChecks, ack)
		}
		t.out = append(t.out, responses.ResponseInputItemUnionParam{OfComputerCallOutput: out})
		shown = true
	}
	return shown, nil
}

// say adds a message: words, a picture where it has one, and words.
func (t *talk) say(ctx context.Context, first string, p computer.Picture, last string) error {
	var parts responses.ResponseInputMessageContentListParam
	if first != "" {
		parts = append(parts, responses.ResponseInputContentParamOfInputText(first))
	}
	if p.Object != "" {
		img, err := t.m.picture(ctx, t.in, p)
		if err != nil {
			return err
		}
		part := responses.ResponseInputContentParamOfInputImage(responses.ResponseInputImageDetailHigh)
		if !t.m.settings.preview() {
			part = responses.ResponseInputContentParamOfInputImage(responses.ResponseInputImageDetailOriginal)
		}
		part.OfInputImage.ImageURL = param.NewOpt(img.DataURL())
		parts = append(parts, part)
	}
	if last != "" {
		parts = append(parts, responses.ResponseInputContentParamOfInputText(last))
	}
	if len(parts) > 0 {
		message := responses.ResponseInputItemParamOfMessage(parts, responses.EasyInputMessageRoleUser)
		message.OfMessage.Type = responses.EasyInputMessageTypeMessage
		t.out = append(t.out, message)
	}
	return nil
}

// opening is the goal, and a list of the steps that are not told in full.
func (t *talk) opening() string {
	var b strings.Builder
	fmt.Fprintf(&b, "The goal:\n%s\n", t.in.Goal)
	if t.from > 0 {
		fmt.Fprintf(&b, "\nWhat has been done so far, in short:\n%s\n", toolcall.Digest(t.in.History[:t.from]))
	}
	b.WriteString("\nThis is the screen now:")
	return b.String()
}

func (m *model) picture(ctx context.Context, in looprunner.Turn, p computer.Picture) (screen.Image, error) {
	return m.gallery.Picture(ctx, in.Frame, p, screen.Size{})
}
