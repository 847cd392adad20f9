package looprunner

import (
	"context"
	"errors"
	"fmt"
	"time"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
)

// errTaken: the loop id names another request's loop.
var errTaken = &events.DataError{Code: events.CodeLoopIDInUse, Message: "the loop id names another request's loop; choose another or none"}

// start takes in a start request. The order is: check everything; take the
// loop's lease, so that a crash from here on is noticed; request the sandbox,
// so that the journal need not hold its environment; append started; and only
// then is the request acknowledged. Redelivered after a crash in between, the
// same request does the same again, and each part knows that it is done.
func (r *Runner) start(ctx, hard context.Context, q request) verb {
	start, price, err := r.decodeStart(q)
	if err != nil {
		return r.refuse(ctx, q, err)
	}
	switch mine, err := r.startedBy(ctx, q, start.LoopID); {
	case err != nil:
		r.Log.Warn("journal not readable; trying again", "loop", start.LoopID, "err", err)
		return later(time.Second)
	case mine == yes:
		return done
	case mine == no:
		return r.refuse(ctx, q, errTaken)
	}
	key := leaseKey(q.path.Tenant, start.LoopID)
	if !r.claim(key) {
		return later(time.Second) // full, or this loop is being taken in right now
	}
	launched := false
	defer func() {
		if !launched {
			r.unclaim(key)
		}
	}()
	l, held, err := r.hold(ctx, hard, q.path.Tenant, start.LoopID, 4*time.Second)
	if err != nil {
		r.Log.Info("loop not taken in; trying again", "loop", start.LoopID, "err", err)
		return later(time.Second)
	}
	r.hook("leased", l.id)
	if err := r.begin(ctx, l, q, start, price); err != nil {
		l.letGo(held)
		var large *tooLargeError
		if errors.As(err, &large) {
			return r.refuse(ctx, q, &events.DataError{Code: events.CodeTooLarge, Message: err.Error()})
		}
		if errors.Is(err, errMoved) && q.deliveries > 2 { // what is left of an old loop's journal
			return r.refuse(ctx, q, errTaken)
		}
		l.log.Warn("loop not begun; trying again", "err", err)
		return later(500 * time.Millisecond)
	}
	launched = true
	r.launch(held, l, "started")
	return done
}

// begin requests the sandbox and appends started, over nothing but what is no
// part of a journal, such as the rejection of an earlier request.
func (r *Runner) begin(ctx context.Context, l *loop, q request, start events.LoopStart, price *events.LoopPrice) error {
	_, tip, err := bus.Last(ctx, r.loopStream, l.j.filter())
	if err != nil && tip == nil {
		return err
	}
	if tip != nil {
		if _, _, name, _ := splitLoop(tip.Subject); isOwners(name) {
			return errMoved
		}
		l.j.seq = tip.Sequence
	}
	data := &events.LoopStarted{Tenant: q.path.Tenant, VMID: start.VMID, Given: start.VMID != "", Start: start.Redacted(), Price: price}
	data.Request = q.id
	if _, err := l.j.event(events.LoopStartedName, data); err != nil {
		return err
	}
	if !data.Given {
		if data.VMID = start.Sandbox.VMID; data.VMID == "" {
			id := createRequest(l.tenant, l.id)
			data.VMID = events.DerivedVMID(l.tenant, id.Source, id.ID)
		}
		box := *start.Sandbox
		box.VMID = data.VMID
		if err := requestSandbox(ctx, r.JS, l.tenant, l.id, box); err != nil {
			return err
		}
		r.hook("sent:create", l.id)
	}
	ok, err := l.j.appendUnlessMoved(ctx, events.LoopStartedName, data)
	if err == nil && !ok {
		return errMoved
	}
	return err
}

// decodeStart checks the whole request, the model's part included, and finds
// the price of the model, nil where none is known.
func (r *Runner) decodeStart(q request) (events.LoopStart, *events.LoopPrice, error) {
	var start events.LoopStart
	if n := len(q.event.Data()); n > events.MaxLoopStart {
		return start, nil, &events.DataError{Code: events.CodeTooLarge, Message: fmt.Sprintf("the data has %d bytes, at most %d", n, events.MaxLoopStart)}
	}
	if err := q.decode(&start); err != nil {
		return start, nil, err
	}
	if err := start.Validate(); err != nil {
		return start, nil, err
	}
	if start.LoopID == "" {
		start.LoopID = events.DerivedVMID(q.path.Tenant, q.id.Source, q.id.ID)
	}
	var display *computer.Display
	if start.Sandbox != nil {
		display = start.Sandbox.Display
		if display == nil {
			display = &computer.DefaultDisplay
		}
	}
	m, err := r.makeModel(q.path.Tenant, start.LoopID, start, display)
	if err != nil {
		return start, nil, err
	}
	price, err := r.Prices.of(m, start.Limits)
	return start, price, err
}

// whose tells whether a loop was started by a given request.
type whose int

const (
	nobody whose = iota
	yes
	no
)

func (r *Runner) startedBy(ctx context.Context, q request, loop string) (whose, error) {
	e, raw, err := bus.Last(ctx, r.loopStream, events.LoopSubject(q.path.Tenant, loop, events.LoopStartedName))
	if err != nil || raw == nil {
		return nobody, err
	}
	var s events.LoopStarted
	if err := events.DecodeTolerant(e, &s); err != nil {
		return nobody, err
	}
	if s.Request == q.id {
		return yes, nil
	}
	return no, nil
}

// adopt takes on a loop whose owner is gone. It reports whether the loop needs
// no more attention: it runs here, or is finished.
func (r *Runner) adopt(ctx, hard context.Context, tenant, id string) bool {
	key := leaseKey(tenant, id)
	if !r.claim(key) {
		return r.owns(key)
	}
	launched := false
	defer func() {
		if !launched {
			r.unclaim(key)
		}
	}()
	_, end, err := bus.Last(ctx, r.loopStream, events.LoopSubject(tenant, id, events.LoopFinishedName))
	if err != nil || end != nil {
		return err == nil
	}
	l, held, err := r.hold(ctx, hard, tenant, id, adoptPatience)
	if err != nil {
		return false // its owner lives, or somebody else was first
	}
	if err := l.j.load(held); err != nil {
		l.letGo(held)
		if errors.Is(err, errCorrupt) {
			l.log.Error("loop cannot be taken over", "err", err)
			return true // until the next scan
		}
		if !errors.Is(err, context.Canceled) {
			l.log.Warn("journal not readable", "err", err)
		}
		return false
	}
	if l.j.state.started == nil || l.j.state.finished {
		l.letGo(held)
		return true
	}
	l.log.Info("loop taken over", "step", l.j.state.step, "entries", l.j.state.entries)
	launched = true
	r.launch(held, l, "adopted")
	return true
}
