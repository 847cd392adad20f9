package looprunner

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/dispatch"
	"berth/internal/events"
)

// Entry is one entry of a journal, for those who read along. Name is one of
// the events.Loop…Name constants.
type Entry struct {
	Name     string
	Sequence uint64 // in LOOPS
	Stored   time.Time
	Type     string
	Head     events.LoopEntry // of a rejected: only LoopID and Request
	Data     json.RawMessage
}

// Decode reads the entry's data into one of the events.Loop… types.
func (e Entry) Decode(v any) error { return json.Unmarshal(e.Data, v) }

// Follow yields a loop's journal from its beginning, waiting for what is still
// to come, until it has yielded finished, the caller stops, or ctx ends, whose
// cause is then yielded as the error. It survives reconnects and restarts of
// the server, and waits for a loop that has not begun. A refused start shows
// as rejected, whose Head.Request tells whose it was; it does not end the
// journal, as the loop id may be started by another request afterwards. What
// is no CloudEvent is passed over.
func Follow(ctx context.Context, js jetstream.JetStream, tenant, loop string) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		stopped := false
		t := bus.Tail{JS: js, Stream: bus.Loops, Log: slog.New(slog.DiscardHandler),
			Config: jetstream.OrderedConsumerConfig{FilterSubjects: []string{events.LoopSubject(tenant, loop, ">")}, DeliverPolicy: jetstream.DeliverAllPolicy}}
		t.Run(ctx, func(msg jetstream.Msg) bool {
			e, err := journalEntry(msg)
			if err == nil {
				stopped = !yield(e, nil) || e.Name == events.LoopFinishedName
			}
			return !stopped
		}, nil)
		if !stopped {
			yield(Entry{}, context.Cause(ctx))
		}
	}
}

// Read returns a loop's journal as it is now, without waiting for what is still
// to come; nothing where there is none. Rejections of starts, which are no part
// of a journal, and what is no CloudEvent are left out.
func Read(ctx context.Context, js jetstream.JetStream, tenant, loop string) ([]Entry, error) {
	fail := func(err error) ([]Entry, error) {
		return nil, fmt.Errorf("read the journal of loop %s: %w", loop, err)
	}
	making, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	filter := events.LoopSubject(tenant, loop, ">")
	s, err := js.Stream(making, bus.Loops)
	if err != nil {
		return fail(err)
	}
	_, tip, err := bus.Last(making, s, filter)
	if tip == nil {
		if err != nil {
			return fail(err)
		}
		return nil, nil
	}
	c, err := js.OrderedConsumer(making, bus.Loops, jetstream.OrderedConsumerConfig{FilterSubjects: []string{filter}, InactiveThreshold: bus.TailInactive, MaxResetAttempts: 1})
	if err != nil {
		return fail(err)
	}
	it, err := c.Messages()
	if err != nil {
		return fail(err)
	}
	defer it.Stop()
	var out []Entry
	for {
		next, cancel := context.WithTimeout(ctx, 2*callTimeout)
		msg, err := it.Next(jetstream.NextContext(next))
		cancel()
		if err != nil {
			return fail(err)
		}
		if e, err := journalEntry(msg); err == nil && e.Name != events.LoopRejectedName {
			out = append(out, e)
		}
		if meta, err := msg.Metadata(); err != nil || meta.Sequence.Stream >= tip.Sequence {
			return out, err
		}
	}
}

func journalEntry(msg jetstream.Msg) (Entry, error) {
	meta, err := msg.Metadata()
	if err != nil {
		return Entry{}, err
	}
	raw, err := parseEntry(msg.Subject(), meta.Sequence.Stream, meta.Timestamp, msg.Headers(), msg.Data())
	if err != nil {
		return Entry{}, err
	}
	e := Entry{Name: raw.name, Sequence: raw.seq, Stored: raw.stored, Type: raw.event.Type(), Data: raw.event.Data()}
	if events.DecodeTolerant(raw.event, &e.Head) != nil {
		e.Head = events.LoopEntry{} // a stranger's
	}
	return e, nil
}

// frame is dispatch.Frame, tried for a while: a picture that an observation names is
// there, even if the bus is away for the moment.
func frame(ctx context.Context, js jetstream.JetStream, object string) ([]byte, error) {
	for attempt := 0; ; attempt++ {
		raw, err := dispatch.Frame(ctx, js, object)
		if err == nil || attempt >= 20 {
			return raw, err
		}
		if bus.Pause(ctx, attempt) != nil {
			return nil, context.Cause(ctx)
		}
	}
}
