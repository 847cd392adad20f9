package looprunner

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/events"
)

// controlNames are the journal entries that requests become.
var controlNames = map[events.Verb]string{
	events.Stop:    events.LoopStopName,
	events.Pause:   events.LoopPauseName,
	events.Resume:  events.LoopResumeName,
	events.Message: events.LoopMessageName,
}

func controlFilters() []string {
	return []string{
		events.LoopSubject("*", "*", events.LoopStopName), events.LoopSubject("*", "*", events.LoopPauseName),
		events.LoopSubject("*", "*", events.LoopResumeName), events.LoopSubject("*", "*", events.LoopMessageName),
	}
}

// control stores a stop, pause, resume or message in the loop's journal,
// whoever owns the loop: the owner reads it at its next append, and is woken
// by followControls. The request is acknowledged once it is stored.
func (r *Runner) control(ctx context.Context, q request) verb {
	var data events.LoopControlRequest
	if err := q.decode(&data); err != nil {
		return r.refuse(ctx, q, err)
	}
	if err := data.Validate(q.path.Verb); err != nil {
		return r.refuse(ctx, q, err)
	}
	err := r.appendControl(ctx, q, data)
	var d *events.DataError
	switch {
	case err == nil:
		return done
	case errors.As(err, &d) && d.Code == events.CodeNotFound && q.deliveries < unknownLoopTries:
		return later(500 * time.Millisecond)
	case errors.As(err, &d):
		return r.refuse(ctx, q, err)
	default:
		r.Log.Warn("control request not stored; trying again", "loop", data.LoopID, "err", err)
		return later(time.Second)
	}
}

// appendControl appends by compare-and-set on the journal's tail, so never
// after its end.
func (r *Runner) appendControl(ctx context.Context, q request, data events.LoopControlRequest) error {
	tenant, loop, name := q.path.Tenant, data.LoopID, controlNames[q.path.Verb]
	subject, filter := events.LoopSubject(tenant, loop, name), events.LoopSubject(tenant, loop, ">")
	for attempt := 0; ; attempt++ {
		previous, raw, err := bus.Last(ctx, r.loopStream, subject)
		if err != nil {
			return err
		}
		if raw != nil && previous.ID() == q.id.Token() {
			return nil // stored by an earlier delivery
		}
		_, tip, err := bus.Last(ctx, r.loopStream, filter)
		if err != nil && tip == nil { // what is no event has a sequence all the same
			return err
		}
		if tip == nil || !r.exists(ctx, tenant, loop) {
			return &events.DataError{Code: events.CodeNotFound, Message: fmt.Sprintf("no loop %q", loop)}
		}
		if _, _, name, _ := splitLoop(tip.Subject); name == events.LoopFinishedName || name == events.LoopEndingName {
			return &events.DataError{Code: events.CodeEnded, Message: fmt.Sprintf("loop %q has ended", loop)}
		}
		entry, err := events.New(events.LoopType(name), events.SourceLoopRunner, q.id.Token(), events.LoopControl{
			LoopEntry: events.LoopEntry{LoopID: loop, Request: q.id, At: time.Now().UTC(), Runner: r.Name}, Reason: data.Reason, Text: data.Text})
		if err != nil {
			return err
		}
		msg, err := events.NewMessage(ctx, subject, entry)
		if err != nil {
			return err
		}
		call, cancel := context.WithTimeout(ctx, callTimeout)
		_, err = r.JS.PublishMsg(call, msg, jetstream.WithExpectLastSequenceForSubject(tip.Sequence, filter))
		cancel()
		if err == nil {
			return nil
		}
		if !bus.IsWrongSequence(err) || attempt > 50 {
			return err
		}
		if attempt > 3 {
			if err := bus.Pause(ctx, attempt-4); err != nil {
				return err
			}
		}
	}
}

// followControls wakes the loops that control entries are for. A stop also
// ends whatever its loop is waiting for.
func (r *Runner) followControls(ctx context.Context, config jetstream.OrderedConsumerConfig) {
	t := bus.Tail{JS: r.JS, Stream: bus.Loops, Config: config, Log: r.Log}
	t.Run(ctx, func(msg jetstream.Msg) bool {
		tenant, id, name, ok := splitLoop(msg.Subject())
		if !ok {
			return true
		}
		r.mu.Lock()
		l := r.owned[leaseKey(tenant, id)]
		r.mu.Unlock()
		if l == nil {
			return true
		}
		if name == events.LoopStopName {
			if e, err := events.Decode(msg.Headers(), msg.Data()); err == nil {
				var c events.LoopControl
				if events.DecodeTolerant(e, &c) == nil {
					l.stopNow(&c)
				}
			}
		}
		l.wake()
		return true
	}, nil)
}
