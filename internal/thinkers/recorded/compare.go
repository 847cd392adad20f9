package recorded

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	_ "image/jpeg" // what FRAMES may hold
	_ "image/png"
	"reflect"
	"slices"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
)

// Field is something that is compared.
type Field string

// The fields.
const (
	Outcome Field = "outcome"
	Value   Field = "value"
	URL     Field = "url"
	Title   Field = "title"
	Picture Field = "picture"
)

// Fields are all that can be compared.
var Fields = []Field{Outcome, Value, URL, Title, Picture}

// DefaultFields are compared where nothing is said.
var DefaultFields = []Field{Outcome, Value, URL, Title}

// Difference is the first difference of a rerun.
type Difference struct {
	Step     int    `json:"step"`
	Field    Field  `json:"field"`
	Action   *int   `json:"action,omitempty"` // index in the step's command, from 0, where it is one action's
	Recorded string `json:"recorded"`
	Now      string `json:"now"`
}

func (d *Difference) String() string {
	at := ""
	if d.Action != nil {
		at = fmt.Sprintf(" of action %d", *d.Action+1)
	}
	return fmt.Sprintf("step %d: %s%s: recorded %s, now %s", d.Step, d.Field, at, d.Recorded, d.Now)
}

// acts compares what became of a step's command.
func (m *model) acts(step int, actions []computer.Action, was *events.LoopActed, now *looprunner.Acted) *Difference {
	if was == nil || now == nil || was.Outcome == computer.Unknown {
		return nil
	}
	if m.compares(Outcome) {
		if a, b := ending(was.Outcome, was.Error), ending(now.Outcome, now.Error); a != b {
			return &Difference{Step: step, Field: Outcome, Recorded: a, Now: b}
		}
	}
	for i := range min(len(was.Actions), len(now.Actions)) {
		a, b := was.Actions[i], now.Actions[i]
		if m.compares(Outcome) {
			if x, y := ending(a.Outcome, a.Error), ending(b.Outcome, b.Error); x != y {
				return &Difference{Step: step, Field: Outcome, Action: &i, Recorded: x, Now: y}
			}
		}
		picture := i < len(actions) && (actions[i].Type == computer.Screenshot || actions[i].Type == computer.Zoom)
		if m.compares(Value) && !picture && !was.ValuesDropped && !same(a.Value, b.Value) {
			return &Difference{Step: step, Field: Value, Action: &i, Recorded: brief(a.Value), Now: brief(b.Value)}
		}
	}
	return nil
}

func ending(o computer.Outcome, f *computer.Fault) string {
	if f == nil {
		return string(o)
	}
	return fmt.Sprintf("%s (%s)", o, f.Code)
}

// same compares JSON by what it says.
func same(a, b json.RawMessage) bool {
	if len(a) == 0 || len(b) == 0 {
		return len(a) == len(b)
	}
	var x, y any
	if json.Unmarshal(a, &x) != nil || json.Unmarshal(b, &y) != nil {
		return bytes.Equal(a, b)
	}
	return reflect.DeepEqual(x, y)
}

// looks compares what the sandbox looks like.
func (m *model) looks(ctx context.Context, step int, was *computer.Observation, now computer.Observation, frame func(context.Context, string) ([]byte, error)) (*Difference, error) {
	if was == nil {
		return nil, nil
	}
	for _, f := range []struct {
		field    Field
		was, now string
	}{{URL, was.URL, now.URL}, {Title, was.Title, now.Title}} {
		if m.compares(f.field) && f.was != f.now {
			return &Difference{Step: step, Field: f.field, Recorded: quote(f.was), Now: quote(f.now)}, nil
		}
	}
	if !m.compares(Picture) || (was.Screenshot.SHA256 != "" && was.Screenshot.SHA256 == now.Screenshot.SHA256) {
		return nil, nil
	}
	if m.settings.tolerance() == 0 && was.Screenshot.SHA256 != "" && now.Screenshot.SHA256 != "" {
		return &Difference{Step: step, Field: Picture, Recorded: was.Screenshot.SHA256, Now: now.Screenshot.SHA256}, nil
	}
	a, err := m.recordedPicture(ctx, was.Screenshot.Object, frame)
	if err != nil {
		return nil, &computer.Fault{Code: CodeNoPicture, Message: fmt.Sprintf("step %d: the recorded picture cannot be compared: %v", step, err)}
	}
	b, err := decoded(ctx, now.Screenshot.Object, frame)
	if err != nil {
		return nil, err
	}
	share := differing(a, b)
	if share <= m.settings.tolerance() {
		return nil, nil
	}
	return &Difference{Step: step, Field: Picture, Recorded: was.Screenshot.Object, Now: fmt.Sprintf("%s, %.2f %% of its pixels differ", now.Screenshot.Object, 100*share)}, nil
}

// recordedPicture is the recorded picture decoded, kept for the next look at
// the same turn.
func (m *model) recordedPicture(ctx context.Context, object string, frame func(context.Context, string) ([]byte, error)) (image.Image, error) {
	if m.kept.object != object || m.kept.img == nil {
		img, err := decoded(ctx, object, frame)
		if err != nil {
			return nil, err
		}
		m.kept.object, m.kept.img = object, img
	}
	return m.kept.img, nil
}

func decoded(ctx context.Context, object string, frame func(context.Context, string) ([]byte, error)) (image.Image, error) {
	if object == "" {
		return nil, errors.New("there is none")
	}
	raw, err := frame(ctx, object)
	if err != nil {
		return nil, err
	}
	img, _, err := image.Decode(bytes.NewReader(raw))
	if err != nil {
		return nil, fmt.Errorf("picture %s: %w", object, err)
	}
	return img, nil
}

// near is the most that each of red, green and blue of a pixel may be off, of
// 255: what a different rasteriser does to an edge is no difference.
const near = 8

// differing is the share of pixels that are not near each other; 1 where the
// sizes differ.
func differing(a, b image.Image) float64 {
	size := a.Bounds().Size()
	if size != b.Bounds().Size() || size.X == 0 || size.Y == 0 {
		return 1
	}
	n := 0
	for y := range size.Y {
		for x := range size.X {
			r1, g1, b1, _ := a.At(a.Bounds().Min.X+x, a.Bounds().Min.Y+y).RGBA()
			r2, g2, b2, _ := b.At(b.Bounds().Min.X+x, b.Bounds().Min.Y+y).RGBA()
			if off(r1, r2) || off(g1, g2) || off(b1, b2) {
				n++
			}
		}
	}
	return float64(n) / float64(size.X*size.Y)
}

func off(a, b uint32) bool {
	d := int(a>>8) - int(b>>8)
	return max(d, -d) > near
}

func (m *model) compares(f Field) bool { return slices.Contains(m.settings.Compare, f) }
