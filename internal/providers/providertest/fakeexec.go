package providertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
)

// check refuses a batch before anything ran.
func (c *fakeClient) check(b *fakeBox, batch providers.Batch) ([]computer.Action, error) {
	for _, a := range batch.Actions {
		if need := a.Type.Requires(); need != "" && !c.has(need) {
			return nil, fmt.Errorf("action %q needs %s: %w", a.Type, need, providers.ErrUnsupported)
		}
	}
	actions, err := computer.Normalize(batch.Actions)
	if err == nil {
		err = computer.CheckBounds(actions, b.sandbox.Display)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", providers.ErrInvalid, err)
	}
	c.f.mu.Lock()
	defer c.f.mu.Unlock()
	if err := c.f.checkEpoch(batch.Epoch); err != nil {
		return nil, err
	}
	if c.f.fences && batch.Fence != 0 && batch.Fence != b.sandbox.Fence {
		kind := providers.ErrConflict // a placement that is not here (yet)
		if batch.Fence < b.sandbox.Fence {
			kind = providers.ErrFenceStale
		}
		return nil, fmt.Errorf("vm %s has fence %d, the batch %d: %w", batch.VM, b.sandbox.Fence, batch.Fence, kind)
	}
	return actions, nil
}

// Execute runs a batch. With Recall on, a key that was seen before runs
// nothing: it waits for that batch and answers the same.
func (c *fakeClient) Execute(ctx context.Context, batch providers.Batch) ([]providers.Result, error) {
	b, err := c.f.awake(batch.VM)
	if err != nil {
		return nil, err
	}
	actions, err := c.check(b, batch)
	if err != nil {
		return nil, err
	}
	in, err := c.begin(ctx, Call{Method: "Execute", VM: batch.VM, Fence: batch.Fence, Epoch: batch.Epoch, Key: batch.Key}, b)
	if err != nil {
		return nil, err
	}
	rec, first := c.f.record(batch)
	if !first {
		select {
		case <-rec.done:
			return slices.Clone(rec.results), rec.err
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-c.closed:
			return nil, c.end().err()
		}
	}
	batch.Actions = actions
	if c.f.isDetached() {
		c.f.work.Go(func() { c.runRecorded(context.WithoutCancel(ctx), b, batch, rec) })
	} else {
		c.runRecorded(ctx, b, batch, rec)
	}
	select {
	case <-rec.done:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-c.closed:
		return nil, c.end().err()
	}
	if rec.err != nil {
		return slices.Clone(rec.results), rec.err
	}
	if err := c.answer(ctx, in, batch.VM); err != nil {
		return nil, err
	}
	return slices.Clone(rec.results), nil
}

// record opens the record of a batch, or finds the one of the same key.
func (f *Fake) record(batch providers.Batch) (rec *fakeRecord, first bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	key := recordKey{batch.VM, batch.Key}
	if f.recall && batch.Key != "" {
		if rec := f.records[key]; rec != nil {
			return rec, false
		}
	}
	rec = &fakeRecord{done: make(chan struct{})}
	if batch.Key != "" {
		f.records[key] = rec
	}
	return rec, true
}

func (c *fakeClient) runRecorded(ctx context.Context, b *fakeBox, batch providers.Batch, rec *fakeRecord) {
	results, err := c.run(ctx, b, batch)
	c.f.mu.Lock()
	rec.finished, rec.results, rec.err = true, results, err
	c.f.mu.Unlock()
	close(rec.done)
}

// run takes the sandbox's turn and runs the actions. An error means that the
// results stop at an action of unknown outcome.
func (c *fakeClient) run(ctx context.Context, b *fakeBox, batch providers.Batch) ([]providers.Result, error) {
	results := make([]providers.Result, len(batch.Actions))
	for i := range results {
		results[i].Outcome = computer.Skipped
	}
	select {
	case <-b.turn:
	case <-ctx.Done():
		return results, context.Cause(ctx)
	case <-b.dead:
		return results, b.end().err()
	case <-c.closed:
		return results, c.end().err()
	}
	defer func() { b.turn <- struct{}{} }()
	for i, a := range batch.Actions {
		r, err := c.act(ctx, b, batch, i, a)
		if err != nil {
			r.Outcome = computer.Unknown
		}
		results[i] = r
		if r.Outcome != computer.OK {
			c.f.set(func() { clear(b.held) })
			return results, err
		}
	}
	return results, nil
}

// act runs one action. A *computer.Fault from a hook makes it failed.
func (c *fakeClient) act(ctx context.Context, b *fakeBox, batch providers.Batch, i int, a computer.Action) (providers.Result, error) {
	call := Call{Method: "Action", VM: batch.VM, Fence: batch.Fence, Epoch: batch.Epoch, Key: batch.Key, Index: i, Action: a}
	in, err := c.begin(ctx, call, b)
	var fault *computer.Fault
	if errors.As(err, &fault) {
		return providers.Result{ActionResult: computer.ActionResult{Outcome: computer.Failed, Error: fault}}, nil
	}
	if err != nil {
		return providers.Result{}, err
	}
	c.f.mu.Lock()
	if c.f.boxes[b.sandbox.VM] != b {
		c.f.mu.Unlock()
		return providers.Result{}, b.end().err()
	}
	c.f.effects = append(c.f.effects, Effect{
		VM: batch.VM, Fence: b.sandbox.Fence, Epoch: batch.Epoch, Key: batch.Key, Index: i, Action: a, Client: c.id, At: time.Now(),
	})
	close(c.f.waiters)
	c.f.waiters = make(chan struct{})
	r := b.apply(a)
	c.f.mu.Unlock()
	if a.Type == computer.Wait || a.Type == computer.Hold {
		err := pass(ctx, time.Duration(a.Duration(0)*float64(time.Second)), b.end(), c.end(), c.f.end3())
		c.f.set(func() {
			for _, k := range a.Keys {
				delete(b.held, k)
			}
		})
		if err != nil {
			return providers.Result{}, err
		}
	}
	return r, c.answer(ctx, in, batch.VM)
}

// apply changes a sandbox by one action. The caller holds Fake.mu.
func (b *fakeBox) apply(a computer.Action) providers.Result {
	r := providers.Result{ActionResult: computer.ActionResult{Outcome: computer.OK}}
	b.revision++
	switch a.Type {
	case computer.Screenshot:
		b.revision--
		r.Image = solidPNG(b.sandbox.Display.Width, b.sandbox.Display.Height, b.revision)
	case computer.Zoom:
		b.revision--
		r.Image = solidPNG(a.Region.Width, a.Region.Height, b.revision)
	case computer.Cursor:
		b.revision--
		r.Value = mustJSON(b.cursor)
	case computer.Wait:
		b.revision--
	case computer.Click, computer.Move, computer.Scroll:
		b.cursor = a.Point()
	case computer.Drag:
		b.cursor = a.Path[len(a.Path)-1]
	case computer.MouseDown:
		b.held["button:"+string(a.Button)] = true
	case computer.MouseUp:
		delete(b.held, "button:"+string(a.Button))
	case computer.Hold:
		for _, k := range a.Keys {
			b.held[k] = true
		}
	case computer.TypeText:
		b.text += *a.Text
	case computer.Open:
		b.url = a.Target
	case computer.ClipboardWrite:
		b.revision--
		b.clipboard = *a.Text
	case computer.ClipboardRead:
		b.revision--
		r.Value = mustJSON(b.clipboard)
	case computer.Run:
		r.Value = mustJSON(computer.RunValue{Stdout: fmt.Sprint(a.Argv)})
	}
	return r
}

func mustJSON(v any) json.RawMessage {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(err) // plain structs and strings always encode
	}
	return raw
}

// Recall answers from the records that batches with a key have left.
func (c *fakeClient) Recall(ctx context.Context, vm, key string) (providers.Recollection, error) {
	in, err := c.begin(ctx, Call{Method: "Recall", VM: vm, Key: key}, nil)
	if err != nil {
		return providers.Recollection{}, err
	}
	c.f.mu.Lock()
	on, rec := c.f.recall, c.f.records[recordKey{vm, key}]
	var out providers.Recollection
	if rec != nil {
		out = providers.Recollection{Finished: rec.finished, Results: slices.Clone(rec.results)}
	}
	c.f.mu.Unlock()
	switch {
	case !on:
		return out, fmt.Errorf("recall: %w", providers.ErrUnsupported)
	case rec == nil:
		return out, fmt.Errorf("batch %s of vm %s: %w", key, vm, providers.ErrNotFound)
	}
	return out, c.answer(ctx, in, vm)
}

// Observe does not wait for a batch that runs. The picture has one colour,
// which follows from the number of actions that have changed the sandbox.
func (c *fakeClient) Observe(ctx context.Context, vm string) (providers.View, error) {
	b, err := c.f.awake(vm)
	if err != nil {
		return providers.View{}, err
	}
	in, err := c.begin(ctx, Call{Method: "Observe", VM: vm}, b)
	if err != nil {
		return providers.View{}, err
	}
	c.f.mu.Lock()
	cursor := b.cursor
	view := providers.View{
		PNG: solidPNG(b.sandbox.Display.Width, b.sandbox.Display.Height, b.revision),
		Observation: computer.Observation{
			Cursor: &cursor, URL: b.url, Title: b.text, TakenAt: time.Now(),
			Pages: []computer.Page{{URL: b.url, Title: b.text, Active: true}},
		},
	}
	c.f.mu.Unlock()
	return view, c.answer(ctx, in, vm)
}
