package chat

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	sdk "github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/packages/param"

	"berth/internal/computer"
	"berth/internal/looprunner"
	"berth/internal/thinkers/screen"
	"berth/internal/thinkers/toolcall"
	"berth/internal/thinkers/vendors"
)

// said is a call as the model made it.
type said struct {
	ID        string `json:"id"`
	Name      string `json:"name"`
	Arguments string `json:"arguments"`
}

// record is a decision's Reply: what later turns need of an answer.
type record struct {
	Text  string          `json:"text,omitempty"`
	Said  []said          `json:"said,omitempty"`
	Calls []toolcall.Call `json:"calls,omitempty"`
	Told  string          `json:"told,omitempty"` // what stood beside the screenshot it answered to
	Note  string          `json:"note,omitempty"` // to begin the next message with
	Sent  screen.Size     `json:"sent"`
	Fault bool            `json:"fault,omitempty"`
	Model string          `json:"model,omitempty"`
}

const gonePicture = "[A screenshot that is no longer kept.]"

// talk is a conversation in the making.
type talk struct {
	m       *model
	in      looprunner.Turn
	from    int
	records []record
	left    int // pictures that are left out, from the oldest
	seen    int
	out     []sdk.ChatCompletionMessageParamUnion
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

// conversation makes the request's messages, and the view of the newest
// screenshot. told is what stands beside it.
func (m *model) conversation(ctx context.Context, in looprunner.Turn, recs []record, state vendors.State, told string) ([]sdk.ChatCompletionMessageParamUnion, screen.View, error) {
	t := &talk{m: m, in: in, from: state.From, records: recs}
	newest, err := m.gallery.Picture(ctx, in.Frame, in.Observation.Screenshot, screen.Size{})
	if err != nil {
		return nil, screen.View{}, err
	}
	view := screen.View{Sent: newest.Size, Display: in.Display}
	t.left = t.leftOut(state)
	t.out = append(t.out, sdk.SystemMessage(m.system()))
	for k := t.from; k <= len(in.History); k++ {
		if err := t.turn(ctx, k, view, told); err != nil {
			return nil, screen.View{}, err
		}
	}
	return t.out, view, nil
}

func (t *talk) leftOut(state vendors.State) int {
	n := 0
	for k := t.from; k <= len(t.in.History); k++ {
		if k > t.from {
			for _, a := range toolcall.Answers(t.records[k-1].Calls, t.in.History[k-1], screen.View{}, nil) {
				n += len(a.Pictures)
			}
		}
		n++
	}
	if state.Few {
		return n - 1
	}
	return vendors.LeftOut(n, t.m.settings.KeepScreenshots, vendors.MaxPictures)
}

// turn adds what the model saw in turn k, and what it answered where it has.
func (t *talk) turn(ctx context.Context, k int, newest screen.View, told string) error {
	o, messages, view, text := t.in.Observation, t.in.Messages, newest, told
	if k < len(t.in.History) {
		x, r := t.in.History[k], t.records[k]
		o, messages, text = x.Observation, x.Messages, r.Told
		view = screen.View{Sent: r.Sent, Display: t.in.Display}
	}
	first, pictures := t.opening(), []computer.Picture(nil)
	zoomed := 0
	if k > t.from {
		first = t.records[k-1].Note
		for _, a := range toolcall.Answers(t.records[k-1].Calls, t.in.History[k-1], t.m.grid(view), messages) {
			t.out = append(t.out, sdk.ToolMessage(a.Text, a.ID))
			pictures = append(pictures, a.Pictures...)
			zoomed += len(a.Pictures)
		}
	}
	if err := t.user(ctx, first, append(pictures, o.Screenshot), zoomed, view, text); err != nil {
		return err
	}
	if k == len(t.in.History) {
		return nil
	}
	r := t.records[k]
	if r.Text == "" && len(r.Said) == 0 {
		return nil
	}
	var answer sdk.ChatCompletionAssistantMessageParam
	if r.Text != "" {
		answer.Content.OfString = param.NewOpt(r.Text)
	}
	for _, c := range r.Said {
		answer.ToolCalls = append(answer.ToolCalls, sdk.ChatCompletionMessageToolCallUnionParam{OfFunction: &sdk.ChatCompletionMessageFunctionToolCallParam{
			ID: c.ID, Function: sdk.ChatCompletionMessageFunctionToolCallFunctionParam{Name: c.Name, Arguments: c.Arguments}}})
	}
	t.out = append(t.out, sdk.ChatCompletionMessageParamUnion{OfAssistant: &answer})
	return nil
}

// user adds a message of the user: words, the pictures of the turn before, the
// screenshot, and words.
func (t *talk) user(ctx context.Context, first string, pictures []computer.Picture, zoomed int, view screen.View, last string) error {
	var parts []sdk.ChatCompletionContentPartUnionParam
	say := func(s string) {
		if s != "" {
			parts = append(parts, sdk.TextContentPart(s))
		}
	}
	say(first)
	for i, p := range pictures {
		t.seen++
		if t.seen <= t.left {
			say(gonePicture)
			continue
		}
		box := screen.Size{}
		if i < zoomed {
			box = view.Sent
			say("A picture that you asked for:")
		} else if zoomed > 0 {
			say("The screen now:")
		}
		img, err := t.m.gallery.Picture(ctx, t.in.Frame, p, box)
		if err != nil {
			return err
		}
		parts = append(parts, sdk.ImageContentPart(sdk.ChatCompletionContentPartImageImageURLParam{URL: img.DataURL()}))
	}
	say(last)
	t.out = append(t.out, sdk.UserMessage(parts))
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
