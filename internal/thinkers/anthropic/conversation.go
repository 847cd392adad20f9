package anthropic

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	sdk "github.com/anthropics/anthropic-sdk-go"

	"berth/internal/computer"
	"berth/internal/looprunner"
	"berth/internal/thinkers/screen"
	"berth/internal/thinkers/toolcall"
	"berth/internal/thinkers/vendors"
)

// record is a decision's Reply: what later turns need of an answer.
type record struct {
	Content []json.RawMessage `json:"content,omitempty"` // the model's blocks; none: not to be repeated
	Calls   []toolcall.Call   `json:"calls,omitempty"`
	Told    string            `json:"told,omitempty"` // what stood beside the screenshot it answered to
	Note    string            `json:"note,omitempty"` // to begin the next message with
	Sent    screen.Size       `json:"sent"`           // of that screenshot, as sent
	Fault   bool              `json:"fault,omitempty"`
	Model   string            `json:"model"`
	Stop    string            `json:"stop"`
}

// gonePicture stands for a picture that is left out.
const gonePicture = "[A screenshot that is no longer kept.]"

// talk is a conversation in the making.
type talk struct {
	m       *model
	in      looprunner.Turn
	state   vendors.State
	records []record // of in.History
	left    int      // pictures that are left out, from the oldest
	seen    int      // pictures so far
	out     []sdk.BetaMessageParam
	user    []sdk.BetaContentBlockParamUnion // the message being made
}

// conversation makes the request's messages, and the view of the newest
// screenshot. told is what stands beside it.
func (m *model) conversation(ctx context.Context, in looprunner.Turn, state vendors.State, told string) ([]sdk.BetaMessageParam, screen.View, error) {
	t := &talk{m: m, in: in, state: state, records: make([]record, len(in.History))}
	for k, x := range in.History {
		if err := json.Unmarshal(x.Decision.Reply, &t.records[k]); err != nil {
			return nil, screen.View{}, fmt.Errorf("reply of step %d: %w", x.Step, err)
		}
	}
	newest, err := m.picture(ctx, in, in.Observation.Screenshot, screen.Size{})
	if err != nil {
		return nil, screen.View{}, err
	}
	view := screen.View{Sent: newest.Size, Display: in.Display}
	t.left = t.leftOut()
	for k := state.From; k <= len(in.History); k++ {
		if err := t.turn(ctx, k, view, told); err != nil {
			return nil, screen.View{}, err
		}
	}
	t.close()
	t.markCache()
	return t.out, view, nil
}

// leftOut counts the pictures as turn will meet them.
func (t *talk) leftOut() int {
	n := 0
	for k := t.state.From; k <= len(t.in.History); k++ {
		if k > t.state.From {
			for _, a := range toolcall.Answers(t.records[k-1].Calls, t.in.History[k-1], screen.View{}, nil) {
				n += len(a.Pictures)
			}
		}
		n++
	}
	if t.state.Few {
		return n - 1
	}
	return vendors.LeftOut(n, t.m.settings.KeepScreenshots, vendors.MaxPictures)
}

// turn adds what the model saw in turn k, and what it answered where it has.
func (t *talk) turn(ctx context.Context, k int, newest screen.View, told string) error {
	observation, messages, view, text := t.in.Observation, t.in.Messages, newest, told
	if k < len(t.in.History) {
		x, r := t.in.History[k], t.records[k]
		observation, messages, text = x.Observation, x.Messages, r.Told
		view = screen.View{Sent: r.Sent, Display: t.in.Display}
	}
	var answers []toolcall.Answer
	if k == t.state.From {
		t.user = append(t.user, sdk.NewBetaTextBlock(t.opening()))
	} else {
		answers = toolcall.Answers(t.records[k-1].Calls, t.in.History[k-1], view, messages)
	}
	if err := t.results(ctx, k, answers, observation, view); err != nil {
		return err
	}
	if text != "" {
		t.user = append(t.user, sdk.NewBetaTextBlock(text))
	}
	if k == len(t.in.History) || len(t.records[k].Content) == 0 {
		return nil
	}
	t.close()
	blocks := make([]sdk.BetaContentBlockParamUnion, len(t.records[k].Content))
	for i, raw := range t.records[k].Content {
		var b sdk.BetaContentBlockUnion
		if err := json.Unmarshal(raw, &b); err != nil {
			return fmt.Errorf("reply of step %d: %w", t.in.History[k].Step, err)
		}
		blocks[i] = b.ToParam()
	}
	t.out = append(t.out, sdk.BetaMessageParam{Role: sdk.BetaMessageParamRoleAssistant, Content: blocks})
	return nil
}

func (t *talk) close() {
	if len(t.user) > 0 {
		t.out = append(t.out, sdk.BetaMessageParam{Role: sdk.BetaMessageParamRoleUser, Content: t.user})
		t.user = nil
	}
}

// opening is the goal, and a list of the steps that are not told in full.
func (t *talk) opening() string {
	var b strings.Builder
	fmt.Fprintf(&b, "The goal:\n%s\n", t.in.Goal)
	if t.state.From > 0 {
		fmt.Fprintf(&b, "\nWhat has been done so far, in short:\n%s\n", toolcall.Digest(t.in.History[:t.state.From]))
	}
	b.WriteString("\nThis is the screen now:")
	return b.String()
}

// results answers the calls of the turn before and shows the screenshot, in
// the result that asks for it, else in the last one that is no error, else
// after them: the API takes no picture in an error.
func (t *talk) results(ctx context.Context, k int, answers []toolcall.Answer, o computer.Observation, view screen.View) error {
	host := -1
	for i, a := range answers {
		if !a.Failed {
			host = i
		}
	}
	for i, a := range answers {
		block := sdk.BetaToolResultBlockParam{ToolUseID: a.ID}
		if t.m.member(t.records[k-1], i) {
			block.ToolsetName = sdk.String(toolset)
		}
		block.Content = append(block.Content, sdk.BetaToolResultBlockParamContentUnion{OfText: &sdk.BetaTextBlockParam{Text: a.Text}})
		if a.Failed {
			block.IsError = sdk.Bool(true)
		}
		for _, p := range a.Pictures {
			img, text, err := t.show(ctx, p, a.Zoomed, view.Sent)
			if err != nil {
				return err
			}
			if a.Failed { // what it saw before it failed is not shown
				continue
			}
			block.Content = append(block.Content, sdk.BetaToolResultBlockParamContentUnion{OfImage: img, OfText: text})
		}
		if i == host {
			img, text, err := t.show(ctx, o.Screenshot, false, view.Sent)
			if err != nil {
				return err
			}
			block.Content = append(block.Content, sdk.BetaToolResultBlockParamContentUnion{OfImage: img, OfText: text})
		}
		t.user = append(t.user, sdk.BetaContentBlockParamUnion{OfToolResult: &block})
	}
	if k > t.state.From {
		if note := t.records[k-1].Note; note != "" {
			t.user = append(t.user, sdk.NewBetaTextBlock(note))
		}
	}
	if host >= 0 {
		return nil
	}
	img, text, err := t.show(ctx, o.Screenshot, false, view.Sent)
	if err == nil {
		t.user = append(t.user, sdk.BetaContentBlockParamUnion{OfImage: img, OfText: text})
	}
	return err
}

// show is a picture, or the words that stand for one that is left out.
func (t *talk) show(ctx context.Context, p computer.Picture, zoomed bool, box screen.Size) (*sdk.BetaImageBlockParam, *sdk.BetaTextBlockParam, error) {
	t.seen++
	if t.seen <= t.left {
		return nil, &sdk.BetaTextBlockParam{Text: gonePicture}, nil
	}
	if !zoomed {
		box = screen.Size{}
	}
	img, err := t.m.picture(ctx, t.in, p, box)
	if err != nil {
		return nil, nil, err
	}
	return &sdk.BetaImageBlockParam{Source: sdk.BetaImageBlockParamSourceUnion{OfBase64: &sdk.BetaBase64ImageSourceParam{
		Data: img.Base64(), MediaType: sdk.BetaBase64ImageSourceMediaType(img.MediaType)}}}, nil, nil
}

func (m *model) picture(ctx context.Context, in looprunner.Turn, p computer.Picture, box screen.Size) (screen.Image, error) {
	return m.gallery.Picture(ctx, in.Frame, p, box)
}

// markCache sets the breakpoints of the prompt cache: the end of this request,
// which the next one begins with, and the end of the one before.
func (t *talk) markCache() {
	marked := 0
	for i := len(t.out) - 1; i >= 0 && marked < 2; i-- {
		if t.out[i].Role != sdk.BetaMessageParamRoleUser {
			continue
		}
		blocks := t.out[i].Content
		if c := blocks[len(blocks)-1].GetCacheControl(); c != nil {
			*c = sdk.NewBetaCacheControlEphemeralParam()
			marked++
		}
	}
}
