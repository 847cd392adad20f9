package replay

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"io"
	"net/http"
	"strings"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
)

// ErrExpired says that a picture is no longer where pictures are kept.
var ErrExpired = errors.New("the picture has expired")

// Frames fetches a picture by its object name. ErrExpired says that it is
// gone; another error ends the page.
type Frames func(ctx context.Context, object string) ([]byte, error)

// HTML writes the story as one page. kept is how long pictures are kept, for
// the words about one that is gone; 0: not known.
func HTML(ctx context.Context, w io.Writer, s *Story, frames Frames, kept time.Duration) error {
	b := &builder{ctx: ctx, story: s, frames: frames, kept: kept}
	p, err := b.page()
	if err != nil {
		return err
	}
	if err := pageTemplate.Execute(w, p); err != nil {
		return fmt.Errorf("write the page: %w", err)
	}
	return nil
}

var (
	//go:embed page.html.tmpl
	pageText string
	//go:embed page.css
	styleText string
	//go:embed page.js
	scriptText string

	pageTemplate = template.Must(template.New("page").Funcs(template.FuncMap{"text": printable}).Parse(pageText))
)

// page is what the template shows. Everything in it but Policy, Style, Script
// and the pictures is text, which the template escapes.
type page struct {
	Policy        string
	Style, Script template.HTML
	Loop, Goal    string
	Outcome       string
	OutcomeClass  string
	EndText       string
	Facts         []pair
	Width, Height int
	Pages         []section
}

type pair struct{ Name, Value string }

// section is one turn, or the end.
type section struct {
	ID       string
	Step     int
	Heading  string
	What     string
	Outcome  string
	Picture  template.URL
	Missing  string
	URL      string
	Title    string
	Marks    []mark
	Notes    []Note
	Label    string
	Question string
	Actions  []actionRow
	Checks   []events.LoopCheck
	Retries  []string
	Error    string
	Shown    []string // dialogs and downloads
	Times    []pair
	Reply    string
}

type actionRow struct {
	What, Outcome, Error, Value, Missing string
	Picture                              template.URL
}

type builder struct {
	ctx    context.Context
	story  *Story
	frames Frames
	kept   time.Duration
}

// digest is a source of the page's policy: what has this hash, and nothing else.
func digest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}

func (b *builder) page() (*page, error) {
	s := b.story
	d := s.Display()
	p := &page{
		Policy: fmt.Sprintf("default-src 'none'; img-src data:; style-src %s; script-src %s; base-uri 'none'; form-action 'none'", digest(styleText), digest(scriptText)),
		Style:  template.HTML("<style>" + styleText + "</style>"), Script: template.HTML("<script>" + scriptText + "</script>"),
		Loop: s.Started.LoopID, Goal: s.Started.Start.Goal, Width: d.Width, Height: d.Height,
		Facts: b.facts(), Outcome: "not finished", OutcomeClass: "unfinished",
	}
	if f := s.Finished; f != nil {
		p.Outcome, p.OutcomeClass = f.Outcome, outcomeClass(f.Outcome)
		if f.Code != "" {
			p.EndText = f.Code + ": " + f.Message
		}
	} else if e := s.Ending; e != nil {
		p.EndText = strings.TrimSuffix(e.Outcome+", "+e.Code+": "+e.Message, ": ")
	}
	for i := range s.Turns {
		if b.ctx.Err() != nil {
			return nil, context.Cause(b.ctx)
		}
		one, err := b.turn(i)
		if err != nil {
			return nil, err
		}
		p.Pages = append(p.Pages, one)
	}
	last := section{ID: "end", Step: len(s.Turns) + 1, Heading: "End", What: p.Outcome, Notes: s.Notes, Error: p.EndText, Marks: nil}
	if err := b.see(&last, s.Last); err != nil {
		return nil, err
	}
	p.Pages = append(p.Pages, last)
	return p, nil
}

func (b *builder) facts() []pair {
	s := b.story
	facts := []pair{{"tenant", s.Started.Tenant}, {"model", modelOf(&s.Started.Start)}, {"started", s.Started.At.UTC().Format("2006-01-02 15:04:05 UTC")}}
	if s.Sandbox != nil {
		facts = append(facts, pair{"sandbox", s.Sandbox.VMID}, pair{"server", s.Sandbox.ServerID})
	}
	in, out := int64(0), int64(0)
	for _, t := range s.Turns {
		in, out = in+t.Decided.Usage.InputTokens, out+t.Decided.Usage.OutputTokens
	}
	if in+out > 0 {
		facts = append(facts, pair{"tokens", fmt.Sprintf("%d in, %d out", in, out)})
	}
	if p := s.Started.Price; p != nil && p.Model != "" {
		facts = append(facts, pair{"spent, estimated", fmt.Sprintf("$%.4f", p.Of(events.LoopUsage{InputTokens: in, OutputTokens: out}))})
	}
	if f := s.Finished; f != nil {
		facts = append(facts, pair{"steps", fmt.Sprint(f.Steps)}, pair{"took", fmt.Sprintf("%.1f s", f.Seconds)})
	}
	return facts
}

// modelOf is the model's name, with the vendor's id where the start has one.
func modelOf(s *events.LoopStart) string {
	var m struct{ Name, Model, Thinker string }
	if json.Unmarshal(s.Model, &m) != nil {
		return ""
	}
	return strings.TrimSpace(m.Name + " " + cmp.Or(m.Model, m.Thinker))
}

// outcomeClass is a word of the style sheet, whatever the journal says.
func outcomeClass(outcome string) string {
	switch outcome {
	case events.LoopSucceeded, events.LoopFailed, events.LoopStopped,
		string(computer.OK), string(computer.Rejected), string(computer.Unknown), string(computer.Skipped):
		return outcome
	}
	return "other"
}

func (b *builder) turn(i int) (section, error) {
	t := &b.story.Turns[i]
	d := &t.Decided
	one := section{ID: fmt.Sprintf("turn-%d", i+1), Step: d.Step, Heading: fmt.Sprintf("Step %d", d.Step), What: doing(d), Notes: t.Notes,
		Label: d.Label, Question: d.NeedsInput, Checks: d.Checks, Reply: pretty(d.Reply)}
	var cursor *computer.Point
	if t.Seen != nil {
		cursor = t.Seen.Cursor
	}
	one.Marks = marks(d.Actions, cursor, b.story.Display())
	for _, r := range t.Retried {
		one.Retries = append(one.Retries, fmt.Sprintf("%s: %s; attempt %d follows", r.Code, r.Message, r.Attempt))
	}
	if d.Failed != nil {
		one.Error = d.Failed.Error()
	}
	if t.Looks > 0 {
		one.Shown = append(one.Shown, fmt.Sprintf("looked again %d times before it decided; the last picture is shown", t.Looks))
	}
	for j, a := range d.Actions {
		row := actionRow{What: Describe(a)}
		if err := b.result(&row, a, t.Acted, j); err != nil {
			return one, err
		}
		one.Actions = append(one.Actions, row)
	}
	one.Times = b.times(t)
	if t.Acted != nil {
		one.Outcome = outcomeClass(string(t.Acted.Outcome))
		if t.Acted.Error != nil {
			one.Error = t.Acted.Error.Error()
		}
	}
	return one, b.see(&one, t.Seen)
}

// doing is what a decision comes to, in a few words.
func doing(d *events.LoopDecided) string {
	switch {
	case d.Failed != nil:
		return "gives up"
	case d.Done:
		return "is done"
	case d.NeedsInput != "":
		return "asks a person"
	case len(d.Actions) > 0:
		return DescribeAll(d.Actions)
	case d.WaitSeconds > 0:
		return fmt.Sprintf("looks again after %g s", d.WaitSeconds)
	default:
		return "looks again"
	}
}

// times are the phases of a turn.
func (b *builder) times(t *Turn) []pair {
	ms := func(v float64) string { return fmt.Sprintf("%.1f ms", v) }
	out := []pair{{"since start", fmt.Sprintf("%.2f s", t.StoredAt.Sub(b.story.StoredAt).Seconds())}}
	if t.LookedMs > 0 {
		out = append(out, pair{"look", ms(t.LookedMs)})
	}
	out = append(out, pair{"think", ms(t.Decided.ThoughtMs)})
	if t.Acted != nil {
		out = append(out, pair{"queued", ms(t.Acted.Timing.QueuedMs)}, pair{"act", ms(t.Acted.Timing.RanMs)})
	}
	if u := t.Decided.Usage; u.InputTokens+u.OutputTokens > 0 {
		out = append(out, pair{"tokens in", fmt.Sprint(u.InputTokens)}, pair{"tokens out", fmt.Sprint(u.OutputTokens)})
	}
	return out
}

// result fills what became of the j-th action.
func (b *builder) result(row *actionRow, a computer.Action, acted *events.LoopActed, j int) error {
	if acted == nil || j >= len(acted.Actions) {
		return nil
	}
	r := acted.Actions[j]
	row.Outcome = outcomeClass(string(r.Outcome))
	if r.Error != nil {
		row.Error = r.Error.Error()
	}
	if len(r.Value) == 0 {
		return nil
	}
	if a.Type == computer.Screenshot || a.Type == computer.Zoom {
		var p computer.Picture
		if json.Unmarshal(r.Value, &p) == nil && p.Object != "" {
			var err error
			row.Picture, row.Missing, err = b.picture(p.Object)
			return err
		}
	}
	row.Value = pretty(r.Value)
	return nil
}

// see shows an observation.
func (b *builder) see(one *section, o *computer.Observation) error {
	if o == nil {
		one.Missing = "There is no picture."
		return nil
	}
	one.URL, one.Title = o.URL, o.Title
	for _, d := range o.Dialogs {
		one.Shown = append(one.Shown, fmt.Sprintf("%s dialog, %s: %s", d.Kind, d.Answer, d.Message))
	}
	for _, d := range o.Downloads {
		one.Shown = append(one.Shown, strings.TrimSuffix(fmt.Sprintf("download %s: %s", d.Name, d.Error), ": "))
	}
	var err error
	one.Picture, one.Missing, err = b.picture(o.Screenshot.Object)
	return err
}

// picture is a picture's bytes as a URL, or why there is none.
func (b *builder) picture(object string) (template.URL, string, error) {
	if object == "" {
		return "", "There is no picture.", nil
	}
	raw, err := b.frames(b.ctx, object)
	if errors.Is(err, ErrExpired) {
		if b.kept > 0 {
			return "", fmt.Sprintf("This picture has expired: FRAMES keeps pictures for %g hours.", b.kept.Hours()), nil
		}
		return "", "This picture has expired.", nil
	}
	if err != nil {
		return "", "", err
	}
	media := http.DetectContentType(raw)
	switch media {
	case "image/png", "image/jpeg", "image/webp":
		return template.URL("data:" + media + ";base64," + base64.StdEncoding.EncodeToString(raw)), "", nil
	}
	return "", "What is stored under this picture's name is no picture.", nil
}

// pretty is JSON indented, or a JSON string's text.
func pretty(raw json.RawMessage) string {
	if len(raw) == 0 {
		return ""
	}
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return s
	}
	var out bytes.Buffer
	if json.Indent(&out, raw, "", "  ") != nil {
		return string(raw)
	}
	return out.String()
}
