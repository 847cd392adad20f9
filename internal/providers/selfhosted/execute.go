package selfhosted

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"image/png"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nuid"

	"berth/internal/computer"
	"berth/internal/providers"
	"berth/internal/providers/httpapi"
)

// answered is one action's result as the server answers it.
type answered struct {
	Outcome computer.Outcome `json:"outcome"`
	Value   json.RawMessage  `json:"value"`
	Error   *computer.Fault  `json:"error"`
}

// picture is the value of a screenshot or zoom.
type picture struct {
	MediaType string `json:"mediaType"`
	Data      []byte `json:"data"`
}

var outcomes = []computer.Outcome{computer.OK, computer.Failed, computer.Unknown, computer.Skipped}

// Execute sends a batch; see providers.Provider. A batch without a key gets one
// of its own, so it cannot be recalled.
func (p *Provider) Execute(ctx context.Context, batch providers.Batch) ([]providers.Result, error) {
	if err := checkVM(batch.VM); err != nil {
		return nil, err
	}
	for i, a := range batch.Actions {
		if need := a.Type.Requires(); need != "" && !slices.Contains(p.info.Capabilities, need) {
			return nil, fmt.Errorf("action %d (%s): the server has no %s: %w", i, a.Type, need, providers.ErrUnsupported)
		}
	}
	actions, err := computer.Normalize(batch.Actions)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", providers.ErrInvalid, err)
	}
	header := map[string]string{"Idempotency-Key": batch.Key}
	if batch.Key == "" {
		header["Idempotency-Key"] = "once-" + nuid.Next()
	}
	if batch.Fence > 0 {
		header["Berth-Fence"] = strconv.FormatUint(batch.Fence, 10)
	}
	if batch.Epoch > 0 {
		header["Berth-Epoch"] = strconv.FormatUint(batch.Epoch, 10)
	}
	_, raw, err := p.client.do(ctx, call{
		method: http.MethodPost, path: []string{"sandboxes", batch.VM, "computer", "actions"}, body: map[string]any{"actions": actions},
		header: header, want: http.StatusOK, limit: maxPictures, within: actWithin + duration(actions),
	})
	if err != nil {
		if ctx.Err() != nil || errors.Is(err, providers.ErrTimeout) {
			p.cancel(ctx, batch.VM, header)
		}
		return nil, fmt.Errorf("execute in vm %s: %w", batch.VM, err)
	}
	var body struct {
		Actions []answered `json:"actions"`
	}
	if err := httpapi.Decode(raw, &body); err != nil {
		return nil, err
	}
	if len(body.Actions) != len(actions) {
		return nil, fmt.Errorf("execute in vm %s: %d results for %d actions: %w", batch.VM, len(body.Actions), len(actions), providers.ErrUnavailable)
	}
	results, err := convert(body.Actions, func(i int) bool { return isPicture(actions[i].Type) })
	if err != nil {
		return nil, err
	}
	for i, r := range results {
		if r.Outcome == computer.Unknown { // it was cut short: an earlier sender of the same key went away
			return results, fmt.Errorf("action %d (%s): %w", i, actions[i].Type, errUnknown)
		}
	}
	return results, nil
}

// cancelWithin bounds the call that ends a batch which was given up.
const cancelWithin = 2 * time.Second

// cancel ends a batch that this process gives up: its server would go on with
// it, as it does for a sender that died. A server that lacks the call, or does
// not answer, is left alone; its epoch is what keeps the batch from being late.
func (p *Provider) cancel(ctx context.Context, vm string, sent map[string]string) {
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), cancelWithin)
	defer stop()
	header := map[string]string{}
	if epoch := sent["Berth-Epoch"]; epoch != "" {
		header["Berth-Epoch"] = epoch
	}
	_, _, err := p.client.do(ctx, call{
		method: http.MethodDelete, path: []string{"sandboxes", vm, "computer", "actions", sent["Idempotency-Key"]}, header: header, want: http.StatusNoContent, limit: 1 << 10,
	})
	if err != nil && !errors.Is(err, providers.ErrNotFound) {
		p.opts.Logger.Warn("a batch that was given up is not known to have ended", "server", p.opts.ServerID, "vm", vm, "key", sent["Idempotency-Key"], "err", err)
	}
}

var errUnknown = errors.New("it was interrupted, and nobody can say how far it went")

func isPicture(t computer.Type) bool { return t == computer.Screenshot || t == computer.Zoom }

// duration is what the actions may take by themselves.
func duration(actions []computer.Action) time.Duration {
	total := 0.0
	for _, a := range actions {
		switch a.Type {
		case computer.Wait, computer.Hold:
			total += a.Duration(0)
		case computer.Run:
			total += a.Duration(computer.DefaultRun)
		case computer.Open:
			total += 45
		case computer.TypeText:
			total += float64(len(*a.Text)) / 1000
		case computer.Drag:
			total += 2 + float64(len(a.Path))/100
		}
	}
	return time.Duration(total * float64(time.Second))
}

// convert turns the server's results into the provider's. pictures tells which
// are to be one, where that is known.
func convert(in []answered, pictures func(i int) bool) ([]providers.Result, error) {
	out := make([]providers.Result, len(in))
	for i, a := range in {
		if !slices.Contains(outcomes, a.Outcome) || (a.Outcome == computer.Failed) != (a.Error != nil) {
			return nil, fmt.Errorf("result %d has outcome %.40q, with an error: %t: %w", i, a.Outcome, a.Error != nil, providers.ErrUnavailable)
		}
		out[i] = providers.Result{ActionResult: computer.ActionResult{Outcome: a.Outcome, Value: a.Value, Error: a.Error}}
		if a.Outcome != computer.OK || !pictures(i) {
			continue
		}
		var pic picture
		if err := json.Unmarshal(a.Value, &pic); err != nil || pic.MediaType != "image/png" {
			return nil, fmt.Errorf("result %d is no picture: %w", i, providers.ErrUnavailable)
		}
		out[i].Image, out[i].Value = pic.Data, nil
	}
	return out, nil
}

// Recall asks what became of a batch. Pictures of long ago are gone.
func (p *Provider) Recall(ctx context.Context, vm, key string) (providers.Recollection, error) {
	if err := checkVM(vm); err != nil {
		return providers.Recollection{}, err
	}
	if key == "" || strings.ContainsAny(key, "/?#") {
		return providers.Recollection{}, fmt.Errorf("key %q: %w", key, providers.ErrNotFound)
	}
	_, raw, err := p.client.do(ctx, call{
		method: http.MethodGet, path: []string{"sandboxes", vm, "computer", "actions", key}, want: http.StatusOK, limit: maxPictures, within: pictureWithin,
	})
	if err != nil {
		return providers.Recollection{}, fmt.Errorf("recall in vm %s: %w", vm, err)
	}
	var body struct {
		State   string     `json:"state"`
		Actions []answered `json:"actions"`
	}
	if err := httpapi.Decode(raw, &body); err != nil {
		return providers.Recollection{}, err
	}
	switch body.State {
	case "started":
		return providers.Recollection{}, nil
	case "finished":
		results, err := convert(body.Actions, func(i int) bool {
			return bytes.HasPrefix(body.Actions[i].Value, []byte(`{"mediaType":`))
		})
		return providers.Recollection{Finished: true, Results: results}, err
	default:
		return providers.Recollection{}, fmt.Errorf("recall in vm %s: state %.40q: %w", vm, body.State, providers.ErrUnavailable)
	}
}

// Observe takes a picture. Of what the sandbox tells about itself the API has
// the pointer and the active window's title.
func (p *Provider) Observe(ctx context.Context, vm string) (providers.View, error) {
	if err := checkVM(vm); err != nil {
		return providers.View{}, err
	}
	give, err := take(ctx, p.shots)
	if err != nil {
		return providers.View{}, err
	}
	defer give()
	header, raw, err := p.client.do(ctx, call{
		method: http.MethodGet, path: []string{"sandboxes", vm, "computer", "screenshot"}, want: http.StatusOK, limit: maxPicture, within: pictureWithin,
	})
	if err != nil {
		return providers.View{}, fmt.Errorf("observe vm %s: %w", vm, err)
	}
	if _, err := png.DecodeConfig(bytes.NewReader(raw)); err != nil {
		return providers.View{}, fmt.Errorf("observe vm %s: no PNG: %w: %w", vm, err, providers.ErrUnavailable)
	}
	view := providers.View{PNG: raw, Observation: computer.Observation{TakenAt: time.Now().UTC()}}
	var at computer.Point
	if n, err := fmt.Sscanf(header.Get("Berth-Cursor"), "%d,%d", &at.X, &at.Y); err == nil && n == 2 {
		view.Observation.Cursor = &at
	}
	if title, err := url.PathUnescape(header.Get("Berth-Title")); err == nil {
		view.Observation.Title = title
	}
	return view, nil
}
