package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/dispatch"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
)

// busyAfter is the wait that a RateLimitError of a busy sandbox names.
const busyAfter = time.Second

// command sends one command to a sandbox and waits for its result.
func (f *Fleet) command(ctx context.Context, rec kv.Placement, verb events.Verb, id events.Request, data events.Command, bound time.Duration) (*events.Finished, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if rec.Phase != kv.Ready {
		return nil, fmt.Errorf("%w: vm %s is not ready, it is %s", providers.ErrNotFound, rec.VMID, rec.Phase)
	}
	results, err := f.resultsOf(ctx, rec.ServerID)
	if err != nil {
		return nil, err
	}
	deadline := time.Now().Add(events.DefaultDeadline)
	if end, ok := ctx.Deadline(); ok && end.Before(deadline) {
		deadline = end
	}
	data.Deadline, data.Fence = &deadline, &rec.Fence
	pending := results.Expect(rec.VMID, id.Token())
	defer results.Forget(pending)
	known, err := f.send(ctx, rec, verb, id, data)
	if err == nil && known {
		if err = results.Look(ctx, pending); err != nil {
			err = unavailable(ctx, err)
		}
	}
	var finished *events.Finished
	if err == nil {
		finished, err = results.Await(ctx, pending, deadline, bound)
	}
	switch {
	case ctx.Err() != nil && finished == nil:
		return nil, f.callOff(ctx, rec, id)
	case errors.Is(err, dispatch.ErrNotTaken):
		return nil, fmt.Errorf("%w: %w", providers.ErrUnavailable, err)
	case err != nil:
		return nil, err
	}
	return finished, nil
}

// send publishes a command. known: the stream had it already.
func (f *Fleet) send(ctx context.Context, rec kv.Placement, verb events.Verb, id events.Request, data events.Command) (known bool, err error) {
	e, err := events.New(events.CommandType(verb), id.Source, id.ID, data)
	if err != nil {
		return false, err
	}
	msg, err := events.NewMessage(ctx, events.CommandSubject(rec.ServerID, rec.VMID, verb), e)
	if err != nil {
		return false, err
	}
	for attempt := 0; ; attempt++ {
		call, cancel := context.WithTimeout(ctx, callTimeout)
		ack, err := f.JS.PublishMsg(call, msg, jetstream.WithMsgID(rec.ServerID+"."+rec.VMID+"."+id.Token()))
		cancel()
		if err == nil {
			return ack.Duplicate, nil
		}
		if attempt >= 3 || bus.Pause(ctx, attempt) != nil { // the claim drops what was stored twice
			return false, unavailable(ctx, fmt.Errorf("publish %s: %w", msg.Subject, err))
		}
	}
}

// callOff cancels a command whose caller waits no longer, and returns ctx's
// cause.
func (f *Fleet) callOff(ctx context.Context, rec kv.Placement, id events.Request) error {
	cause := context.Cause(ctx)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	_, err := f.send(ctx, rec, events.Cancel, events.Request{Source: Source, ID: "cancel." + nuid.Next()}, events.Command{Command: &id})
	if err != nil {
		return fmt.Errorf("%w; and it may run all the same: %w", cause, err)
	}
	return cause
}

// key names a batch's command: the same key in the same sandbox is the same one.
func key(vm, k string) events.Request {
	if k == "" {
		k = nuid.Next()
	}
	return events.Request{Source: Source, ID: vm + ".act." + k}
}

// Execute implements [providers.Provider].
func (f *Fleet) Execute(ctx context.Context, batch providers.Batch) ([]providers.Result, error) {
	rec, err := f.record(ctx, batch.VM)
	if err != nil {
		return nil, err
	}
	switch fence := fenceOf(rec); {
	case len(batch.Actions) == 0:
		return nil, fmt.Errorf("%w: a batch needs an action", providers.ErrInvalid)
	case batch.Fence != 0 && batch.Fence < fence:
		return nil, fmt.Errorf("%w: fence %d; vm %s has %d", providers.ErrFenceStale, batch.Fence, batch.VM, fence)
	case batch.Fence > fence:
		return nil, fmt.Errorf("%w: fence %d; vm %s has %d", providers.ErrConflict, batch.Fence, batch.VM, fence)
	}
	raw, err := json.Marshal(batch.Actions)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", providers.ErrInvalid, err)
	}
	finished, err := f.command(ctx, rec, events.Act, key(batch.VM, batch.Key), events.Command{Actions: raw}, computer.FinishTime(batch.Actions))
	if err != nil {
		return nil, err
	}
	if finished.Outcome == computer.OK || finished.Outcome == computer.Failed && len(finished.Actions) > 0 {
		return f.unpack(ctx, finished.Actions)
	}
	results, err := f.unpack(ctx, finished.Actions)
	return results, errors.Join(errorOfResult(finished), err)
}

// unpack makes results of a command's, whose pictures it fetches.
func (f *Fleet) unpack(ctx context.Context, actions []computer.ActionResult) ([]providers.Result, error) {
	out := make([]providers.Result, len(actions))
	for i, a := range actions {
		out[i].ActionResult = a
		var p computer.Picture
		if json.Unmarshal(a.Value, &p) != nil || p.Object == "" || p.MediaType == "" {
			continue
		}
		raw, err := f.frame(ctx, p)
		if err != nil {
			return out, err
		}
		out[i].Image, out[i].Value = raw, nil
	}
	return out, nil
}

func (f *Fleet) frame(ctx context.Context, p computer.Picture) ([]byte, error) {
	raw, err := dispatch.Frame(ctx, f.JS, p.Object)
	if err != nil {
		return nil, unavailable(ctx, err)
	}
	return raw, nil
}

// Observe implements [providers.Provider].
func (f *Fleet) Observe(ctx context.Context, vm string) (providers.View, error) {
	rec, err := f.record(ctx, vm)
	if err != nil {
		return providers.View{}, err
	}
	finished, err := f.command(ctx, rec, events.Observe, events.Request{Source: Source, ID: "observe." + nuid.Next()}, events.Command{}, computer.FinishTime(nil))
	if err == nil {
		err = errorOfResult(finished)
	}
	if err != nil {
		return providers.View{}, err
	}
	if finished.Observation == nil {
		return providers.View{}, fmt.Errorf("%w: an observation without a picture", providers.ErrUnavailable)
	}
	raw, err := f.frame(ctx, finished.Observation.Screenshot)
	if err != nil {
		return providers.View{}, err
	}
	return providers.View{PNG: raw, Observation: *finished.Observation}, nil
}

// Recall implements [providers.Provider]. Who waits for no result of Execute
// finds it here for two days.
func (f *Fleet) Recall(ctx context.Context, vm, k string) (providers.Recollection, error) {
	rec, err := f.record(ctx, vm)
	if err != nil {
		return providers.Recollection{}, err
	}
	e, raw, err := bus.Last(ctx, f.results, events.ResultSubject(rec.ServerID, vm, key(vm, k).Token()))
	switch {
	case err != nil:
		return providers.Recollection{}, unavailable(ctx, err)
	case raw == nil || k == "":
		return providers.Recollection{}, fmt.Errorf("%w: no batch %q of vm %s", providers.ErrNotFound, k, vm)
	case e.Type() != events.TypeFinished:
		return providers.Recollection{}, nil
	}
	var finished events.Finished
	if err := events.DecodeTolerant(e, &finished); err != nil {
		return providers.Recollection{}, unavailable(ctx, err)
	}
	if finished.Outcome == computer.Rejected {
		return providers.Recollection{}, fmt.Errorf("%w: nothing of it ran: %w", providers.ErrNotFound, errorOf(finished.Error))
	}
	results, err := f.unpack(ctx, finished.Actions)
	return providers.Recollection{Finished: true, Results: results}, err
}

// suspendTime is how long a pause, a resume or a snapshot may take; the
// worker's own bound is as long.
const suspendTime = 2 * time.Minute

// Pause implements [providers.Provider].
func (f *Fleet) Pause(ctx context.Context, vm string) error {
	return f.suspend(ctx, vm, events.Pause)
}

// Resume implements [providers.Provider].
func (f *Fleet) Resume(ctx context.Context, vm string) error {
	return f.suspend(ctx, vm, events.Resume)
}

// recordTime is how long a pause or resume that is done waits for the record to
// say so: somebody else may have taken it back meanwhile.
const recordTime = 2 * time.Second

// suspend returns once the record, too, says that the sandbox is paused or not,
// or recordTime after it is.
func (f *Fleet) suspend(ctx context.Context, vm string, verb events.Verb) error {
	rec, err := f.record(ctx, vm)
	if err != nil {
		return err
	}
	finished, err := f.command(ctx, rec, verb, events.Request{Source: Source, ID: string(verb) + "." + nuid.Next()}, events.Command{}, suspendTime)
	if err == nil {
		err = errorOfResult(finished)
	}
	done := time.Now()
	for attempt := 0; err == nil && (rec.PausedAt != nil) != (verb == events.Pause) && time.Since(done) < recordTime; attempt++ {
		if bus.Pause(ctx, attempt) != nil {
			return context.Cause(ctx)
		}
		rec, err = f.record(ctx, vm)
	}
	return err
}

// Snapshot implements [providers.Provider].
func (f *Fleet) Snapshot(ctx context.Context, vm string) (string, error) {
	rec, err := f.record(ctx, vm)
	if err != nil {
		return "", err
	}
	finished, err := f.command(ctx, rec, events.Snapshot, events.Request{Source: Source, ID: "snapshot." + nuid.Next()}, events.Command{}, suspendTime)
	if err == nil {
		err = errorOfResult(finished)
	}
	if err != nil {
		return "", err
	}
	return finished.Template, nil
}
