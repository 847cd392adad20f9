package e2b

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"image"
	"image/draw"
	"image/png"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nuid"

	"berth/internal/computer"
	"berth/internal/providers"
)

//go:embed script.sh
var script string

// records is the script's directory inside a sandbox.
const records = "/tmp/.berth"

// How a call that ends early is wound up.
const (
	revokeWithin = 1500 * time.Millisecond
	askAgain     = 100 * time.Millisecond
	reattachFor  = 10 * time.Second // after a stream that broke
	explainFor   = 2 * time.Second
)

// program is a call of the script.
func program(verb, key string, words ...string) []string {
	return append([]string{"-c", script, "berth", records, verb, key}, words...)
}

// ask runs a part of the script that says one line.
func (p *Provider) ask(ctx context.Context, b *box, within time.Duration, verb string, words ...string) (string, error) {
	bound, cancel := context.WithTimeoutCause(ctx, within+5*time.Second, errNoAnswer)
	defer cancel()
	var said bytes.Buffer
	end, err := p.talk(bound, b, process{args: program(verb, "-", words...), limit: within}, func(raw []byte) error {
		if said.Len()+len(raw) > maxProblem {
			return malformed("it says too much")
		}
		said.Write(raw)
		return nil
	})
	if err != nil {
		return "", err
	}
	if end.code != 0 {
		return "", fmt.Errorf("%s: exit code %d: %.300s: %w", verb, end.code, end.stderr, providers.ErrUnavailable)
	}
	return strings.TrimSuffix(said.String(), "\n"), nil
}

// talk starts a process in a sandbox and explains what goes wrong: whether the
// sandbox is gone, paused or only out of reach.
func (p *Provider) talk(ctx context.Context, b *box, pr process, output func([]byte) error) (ended, error) {
	bound, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(b.gone, func() { cancel(context.Cause(b.gone)) })()
	end, started, err := p.client.start(bound, b.place, pr, output)
	if err == nil {
		return end, nil
	}
	return end, p.explain(bound, b, started, err)
}

// explain turns an error of a sandbox's call into one of the package's. E2B's
// API may hold a sandbox that has just died for running: while its proxy says
// otherwise, it is asked again for a little.
func (p *Provider) explain(ctx context.Context, b *box, started bool, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	gone, moving := errors.Is(err, errGone), errors.Is(err, errMoving)
	if !gone && !moving && !errors.Is(err, providers.ErrUnavailable) {
		return err
	}
	until := time.Now().Add(explainFor)
	for {
		d, lookErr := p.detail(ctx, b.id)
		alive := error(nil)
		if lookErr == nil && d.State == "running" {
			alive = p.client.alive(ctx, b.place)
		}
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case errors.Is(lookErr, providers.ErrNotFound):
			p.forget(b.vm, b.id)
			if started || !gone {
				return errLost
			}
			return fmt.Errorf("vm %s: the sandbox is gone: %w", b.vm, providers.ErrNotFound)
		case lookErr != nil:
			return fmt.Errorf("%w: %v: %w", err, lookErr, providers.ErrUnavailable) //nolint:errorlint // what the second call met is not what the first did
		case errors.Is(alive, errGone) && time.Now().Before(until):
		case started:
			return fmt.Errorf("the sandbox broke off (it is %.20s now): %w: %w", d.State, err, providers.ErrUnavailable)
		case d.State == "paused":
			return providers.ErrPaused
		case moving:
			return fmt.Errorf("%w; try again: %w", err, providers.ErrConflict)
		default:
			return fmt.Errorf("%w: %w", err, providers.ErrUnavailable)
		}
		select {
		case <-time.After(askAgain):
		case <-ctx.Done():
		}
	}
}

// Execute runs a batch as one process in the sandbox, which goes through its
// steps by itself; see providers.Provider. A batch without a key gets one of its
// own, so it cannot be recalled.
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
	pl, err := planOf(actions, p.opts.Clipboard)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", providers.ErrInvalid, err)
	}
	if batch.Key == "" {
		batch.Key = "once-" + nuid.Next()
	}
	if !safeID(batch.Key) {
		return nil, fmt.Errorf("key %.70q: letters, digits, - and _: %w", batch.Key, providers.ErrInvalid)
	}
	b, err := p.box(ctx, batch.VM)
	if err != nil {
		return nil, err
	}
	if err := computer.CheckBounds(actions, b.display); err != nil {
		return nil, fmt.Errorf("%w: %w", providers.ErrInvalid, err)
	}
	switch {
	case batch.Fence == 0 || batch.Fence == b.fence:
	case batch.Fence < b.fence:
		return nil, fmt.Errorf("vm %s is under fence %d: %w", batch.VM, b.fence, providers.ErrFenceStale)
	default:
		return nil, fmt.Errorf("vm %s is under fence %d: %w", batch.VM, b.fence, providers.ErrConflict)
	}
	select {
	case <-b.turn:
		defer func() { b.turn <- struct{}{} }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-b.gone.Done():
		return nil, context.Cause(b.gone)
	}
	results, err := p.run(ctx, b, batch, pl, actions)
	if err != nil {
		return results, fmt.Errorf("execute in vm %s: %w", batch.VM, err)
	}
	return results, nil
}

// run sends a planned batch; b's turn is taken.
func (p *Provider) run(ctx context.Context, b *box, batch providers.Batch, pl plan, actions []computer.Action) ([]providers.Result, error) {
	if left := b.left; left != "" { // it may still hold the sandbox
		b.left = ""
		p.revoke(ctx, b, left)
	}
	rec := &record{}
	total := time.Duration(pl.millis()) * time.Millisecond
	_, err := p.talk(ctx, b, process{
		args: program("act", batch.Key, pl.words(batch.Epoch, len(actions))...), tag: "berth-" + batch.Key, limit: total + time.Minute,
	}, rec.write)
	if rec.again { // it has been sent before: it does not run again
		return p.await(ctx, b, batch.Key, actions)
	}
	switch {
	case rec.stale:
		return nil, fmt.Errorf("the sandbox has seen a newer epoch than %d: %w", batch.Epoch, providers.ErrFenceStale)
	case ctx.Err() != nil:
		p.revoke(ctx, b, batch.Key)
		return nil, context.Cause(ctx)
	case err != nil && (b.gone.Err() != nil || providers.NothingRan(err)):
		return nil, err
	case err != nil || !rec.finished:
		return p.reattach(ctx, b, batch.Key, actions, err)
	}
	return p.finish(rec.conclude(), actions)
}

// finish crops zooms, and says so where an action was cut short.
func (p *Provider) finish(results []providers.Result, actions []computer.Action) ([]providers.Result, error) {
	if len(results) != len(actions) {
		return nil, fmt.Errorf("%d results for %d actions: %w", len(results), len(actions), providers.ErrUnavailable)
	}
	for i := range results {
		r := &results[i]
		switch {
		case r.Outcome == computer.Unknown:
			return results, fmt.Errorf("action %d (%s): %w", i, actions[i].Type, errUnknown)
		case r.Outcome != computer.OK:
		case actions[i].Type == computer.Zoom:
			img, err := crop(r.Image, *actions[i].Region)
			if err != nil {
				return nil, fmt.Errorf("action %d: %w: %w", i, err, providers.ErrUnavailable)
			}
			r.Image = img
		}
	}
	return results, nil
}

var errUnknown = errors.New("it was interrupted, and nobody can say how far it went")

// crop cuts a region out of a picture.
func crop(raw []byte, region computer.Rect) ([]byte, error) {
	img, err := png.Decode(bytes.NewReader(raw))
	if err != nil {
		return nil, fmt.Errorf("the picture: %w", err)
	}
	out := image.NewRGBA(image.Rect(0, 0, region.Width, region.Height))
	draw.Draw(out, out.Bounds(), img, img.Bounds().Min.Add(image.Pt(region.X, region.Y)), draw.Src)
	var buf bytes.Buffer
	if err := png.Encode(&buf, out); err != nil {
		return nil, fmt.Errorf("the picture: %w", err)
	}
	return buf.Bytes(), nil
}

// revoke ends a batch, or keeps it from beginning, after its caller has left.
// What it holds is released by the script. Where the sandbox is out of reach, the
// next batch tries again.
func (p *Provider) revoke(ctx context.Context, b *box, key string) {
	bound, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), revokeWithin, errNoAnswer)
	defer cancel()
	_, err := p.talk(bound, b, process{args: program("revoke", key), limit: 10 * time.Second}, func([]byte) error { return nil })
	if err != nil && b.gone.Err() == nil {
		b.left = key
		p.opts.Logger.Warn("a batch that was given up may go on in its sandbox", "server", p.opts.ServerID, "vm", b.vm, "err", err)
	}
}

// reattach asks what became of a batch whose stream broke with err. Where the
// sandbox does not tell, nobody can.
func (p *Provider) reattach(ctx context.Context, b *box, key string, actions []computer.Action, err error) ([]providers.Result, error) {
	if err == nil {
		err = fmt.Errorf("the sandbox said nothing of the batch's end: %w", providers.ErrUnavailable)
	}
	bound, cancel := context.WithTimeoutCause(ctx, reattachFor, err)
	defer cancel()
	results, again := p.await(bound, b, key, actions)
	switch {
	case again == nil || errors.Is(again, errUnknown):
		return results, again
	case ctx.Err() != nil:
		p.revoke(ctx, b, key)
		return nil, context.Cause(ctx)
	case b.gone.Err() != nil:
		return nil, context.Cause(b.gone)
	}
	b.left = key
	return nil, err
}

// await asks until a batch has ended.
func (p *Provider) await(ctx context.Context, b *box, key string, actions []computer.Action) ([]providers.Result, error) {
	for {
		rec, err := p.recollect(ctx, b, key)
		switch {
		case errors.Is(err, errRevoked):
			return nil, fmt.Errorf("the key was given up before: %w", err)
		case err != nil:
			return nil, err
		case rec.Finished:
			for i, r := range rec.Results { // the record keeps no picture
				if i < len(actions) && r.Outcome == computer.OK && actions[i].Type == computer.Zoom {
					return rec.Results, nil
				}
			}
			return p.finish(rec.Results, actions)
		}
		select {
		case <-time.After(askAgain):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-b.gone.Done():
			return nil, context.Cause(b.gone)
		}
	}
}

// Recall asks the sandbox for its record of a batch. The record of a batch that died in
// the middle says how far it came; it keeps no pictures, and no more than the last hundred
// batches.
func (p *Provider) Recall(ctx context.Context, vm, key string) (providers.Recollection, error) {
	if err := checkVM(vm); err != nil {
		return providers.Recollection{}, err
	}
	if !safeID(key) {
		return providers.Recollection{}, fmt.Errorf("key %.70q: %w", key, providers.ErrNotFound)
	}
	b, err := p.box(ctx, vm)
	if err != nil {
		return providers.Recollection{}, err
	}
	rec, err := p.recollect(ctx, b, key)
	if err != nil {
		return providers.Recollection{}, fmt.Errorf("recall in vm %s: %w", vm, err)
	}
	return rec, nil
}

// errRevoked: the batch was kept from beginning.
var errRevoked = fmt.Errorf("it was given up before it began: %w", providers.ErrNotFound)

func (p *Provider) recollect(ctx context.Context, b *box, key string) (providers.Recollection, error) {
	var said []byte
	end, err := p.talk(ctx, b, process{args: program("recall", key), limit: lookWithin}, func(raw []byte) error {
		said = append(said, raw...)
		return nil
	})
	if err == nil && end.code != 0 {
		err = fmt.Errorf("exit code %d: %.300s: %w", end.code, end.stderr, providers.ErrUnavailable)
	}
	if err != nil {
		return providers.Recollection{}, err
	}
	line, log, _ := bytes.Cut(said, []byte("\n"))
	switch string(line) {
	case "N":
		return providers.Recollection{}, fmt.Errorf("key %s: %w", key, providers.ErrNotFound)
	case "R":
		return providers.Recollection{}, errRevoked
	case "T running":
		return providers.Recollection{}, nil
	case "T done", "T dead":
	default:
		return providers.Recollection{}, malformed("recall")
	}
	rec := &record{}
	if err := rec.write(log); err != nil {
		return providers.Recollection{}, err
	}
	if !rec.begun { // it died before its first step
		return providers.Recollection{}, fmt.Errorf("key %s: it died before it began: %w", key, providers.ErrNotFound)
	}
	if string(line) == "T dead" {
		rec.cut = true
	}
	return providers.Recollection{Finished: true, Results: rec.conclude()}, nil
}

// Observe takes a picture, also while a batch runs.
func (p *Provider) Observe(ctx context.Context, vm string) (providers.View, error) {
	b, err := p.box(ctx, vm)
	if err != nil {
		return providers.View{}, err
	}
	view, err := p.look(ctx, b)
	if err != nil {
		return providers.View{}, fmt.Errorf("observe vm %s: %w", vm, err)
	}
	return view, nil
}

func (p *Provider) look(ctx context.Context, b *box) (providers.View, error) {
	var said []byte
	end, err := p.talk(ctx, b, process{args: program("look", "-"), limit: pictureTime * time.Millisecond}, func(raw []byte) error {
		if said = append(said, raw...); len(said) > maxFrame {
			return malformed("a picture that is too large")
		}
		return nil
	})
	if err == nil && end.code != 0 {
		err = fmt.Errorf("no picture: exit code %d: %.300s: %w", end.code, end.stderr, providers.ErrUnavailable)
	}
	if err != nil {
		return providers.View{}, err
	}
	line, rest, _ := bytes.Cut(said, []byte("\n"))
	var at computer.Point
	var title, size int
	if _, err := fmt.Sscanf(string(line), "L %d %d %d %d", &at.X, &at.Y, &title, &size); err != nil || title < 0 || size < 0 || len(rest) != title+size {
		return providers.View{}, malformed("a picture")
	}
	view := providers.View{PNG: rest[title:], Observation: computer.Observation{TakenAt: time.Now().UTC(), Title: strings.ToValidUTF8(string(rest[:title]), "�")}}
	if config, err := png.DecodeConfig(bytes.NewReader(view.PNG)); err != nil || config.Width != b.display.Width || config.Height != b.display.Height {
		return providers.View{}, malformed("a picture of another size")
	}
	if at.X >= 0 && at.Y >= 0 {
		view.Observation.Cursor = &at
	}
	return view, nil
}
