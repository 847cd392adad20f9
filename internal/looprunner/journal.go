package looprunner

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/events"
)

const (
	// callTimeout bounds one round trip, so that a lost answer is read back soon.
	callTimeout = 5 * time.Second
	// maxEntry is the largest entry that is appended; LOOPS takes 1 MiB with headers.
	maxEntry = 1000 << 10
)

// Errors of append.
var (
	// errMoved: an earlier owner's late write came first and has been folded;
	// look at the state again.
	errMoved = errors.New("the journal has moved on")
	// errOwned: a later owner writes this journal.
	errOwned = errors.New("another runner has the loop")
	// errCorrupt: an owner's entry does not have its type's data.
	errCorrupt = errors.New("the journal cannot be read")
)

// journal is one loop's journal as its owner holds it. It is not safe for
// concurrent use.
type journal struct {
	js     jetstream.JetStream
	stream jetstream.Stream
	tenant string
	loop   string
	runner string
	epoch  uint64 // of the lease
	hook   func(point string)
	log    *slog.Logger

	seq   uint64 // of the last entry folded
	state state
}

// entryData is what every entry's data embeds.
type entryData interface{ Head() *events.LoopEntry }

func (j *journal) filter() string { return events.LoopSubject(j.tenant, j.loop, ">") }

// parseEntry decodes a journal message. Where it is no CloudEvent the entry has
// its place only: whatever a stranger publishes there stops no loop.
func parseEntry(subject string, seq uint64, stored time.Time, header map[string][]string, data []byte) (entry, error) {
	e, err := events.Decode(header, data)
	if err != nil {
		return entry{seq: seq, stored: stored}, fmt.Errorf("journal entry %d: %w", seq, err)
	}
	return entry{name: subject[strings.LastIndexByte(subject, '.')+1:], seq: seq, stored: stored, header: header, event: e}, nil
}

// load folds the whole journal. A long one is streamed, then what came
// meanwhile is read one by one.
func (j *journal) load(ctx context.Context) error {
	j.state, j.seq = state{}, 0
	_, tip, err := bus.Last(ctx, j.stream, j.filter())
	if tip == nil || (err != nil && !errors.Is(err, events.ErrEnvelope)) {
		return err
	}
	making, cancel := context.WithTimeout(ctx, 2*callTimeout)
	defer cancel()
	c, err := j.js.OrderedConsumer(making, bus.Loops, jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{j.filter()}, InactiveThreshold: bus.TailInactive, MaxResetAttempts: 1})
	if err != nil {
		return fmt.Errorf("read journal: %w", err)
	}
	it, err := c.Messages()
	if err != nil {
		return fmt.Errorf("read journal: %w", err)
	}
	defer it.Stop()
	for j.seq < tip.Sequence {
		msg, err := it.Next(jetstream.NextContext(making))
		if err != nil {
			return fmt.Errorf("read journal: %w", err)
		}
		meta, err := msg.Metadata()
		if err != nil {
			return fmt.Errorf("read journal: %w", err)
		}
		e, err := parseEntry(msg.Subject(), meta.Sequence.Stream, meta.Timestamp, msg.Headers(), msg.Data())
		if err != nil {
			j.log.Warn("passed over", "err", err)
		}
		if err := j.fold(e); err != nil {
			return err
		}
	}
	_, err = j.sync(ctx, "")
	return err
}

func (j *journal) fold(e entry) error {
	j.seq = e.seq
	return j.state.apply(e)
}

// news is what sync found.
type news struct {
	mine  bool // the entry with the wanted id, by this very owner
	moved bool // an earlier owner's
	any   bool
}

// sync folds what has been appended since. want is the id of an entry whose
// acknowledgement is missing, or "".
func (j *journal) sync(ctx context.Context, want string) (news, error) {
	var found news
	for {
		call, cancel := context.WithTimeout(ctx, callTimeout)
		raw, err := j.stream.GetMsg(call, j.seq+1, jetstream.WithGetMsgSubject(j.filter()))
		cancel()
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return found, nil
		}
		if err != nil {
			return found, fmt.Errorf("read journal after %d: %w", j.seq, err)
		}
		e, err := parseEntry(raw.Subject, raw.Sequence, raw.Time, raw.Header, raw.Data)
		if err != nil {
			j.log.Warn("passed over", "err", err)
		}
		found.any = true
		if isOwners(e.name) {
			var head events.LoopEntry
			if err := events.DecodeTolerant(e.event, &head); err != nil {
				return found, fmt.Errorf("%w: entry %d: %w", errCorrupt, e.seq, err)
			}
			switch {
			case head.Runner == j.runner && head.Epoch == j.epoch && e.event.ID() == want:
				found.mine = true
			case head.Epoch > j.epoch:
				return found, fmt.Errorf("%w: %s at entry %d", errOwned, head.Runner, e.seq)
			default:
				found.moved = true
			}
		}
		if err := j.fold(e); err != nil {
			return found, err
		}
	}
}

// append stores an entry after the last one folded and folds it. A control
// entry that came first is folded and the append repeated; see errMoved and
// errOwned for the other entries. It goes on trying until ctx ends, since a
// bus that is away comes back.
func (j *journal) append(ctx context.Context, name string, d entryData) error {
	_, err := j.write(ctx, name, d, true)
	return err
}

// appendUnlessMoved is append, but gives up (false) where any entry came first.
func (j *journal) appendUnlessMoved(ctx context.Context, name string, d entryData) (bool, error) {
	return j.write(ctx, name, d, false)
}

func (j *journal) write(ctx context.Context, name string, d entryData, insist bool) (bool, error) {
	j.hook("append:" + name)
	for attempt := 0; ; attempt++ {
		if ctx.Err() != nil {
			return false, context.Cause(ctx)
		}
		e, err := j.event(name, d)
		if err != nil {
			return false, err
		}
		stored, msgErr := j.publish(ctx, name, e)
		if msgErr == nil {
			if reads(name) {
				stored.data = d
			}
			err := j.fold(stored)
			j.hook("appended:" + name)
			return true, err
		}
		if !bus.IsWrongSequence(msgErr) && attempt%20 == 0 {
			j.log.Warn("journal entry not stored; trying again", "entry", name, "err", msgErr)
		}
		if attempt > 0 || !bus.IsWrongSequence(msgErr) {
			if bus.Pause(ctx, attempt) != nil {
				return false, context.Cause(ctx)
			}
		}
		found, err := j.sync(ctx, e.ID())
		switch {
		case errors.Is(err, errOwned), errors.Is(err, errCorrupt):
			return false, err
		case err != nil: // not readable either; try again
		case found.mine:
			j.hook("appended:" + name)
			return true, nil
		case found.moved:
			return false, errMoved
		case found.any && !insist:
			return false, nil
		}
	}
}

// reads: an entry of this name holds nothing but what came from JSON, and
// plain values. What a model decided, and a start, are read back as everybody
// else will read them.
func reads(name string) bool {
	return name == events.LoopThinkingName || name == events.LoopObservedName || name == events.LoopActedName
}

// event fills the common fields. The id names the entry's place in the
// journal, so that a stored entry whose acknowledgement was lost is
// recognised.
func (j *journal) event(name string, d entryData) (events.Event, error) {
	h := d.Head()
	h.LoopID, h.Runner, h.Epoch, h.At = j.loop, j.runner, j.epoch, time.Now().UTC()
	if h.Step == 0 {
		h.Step = j.state.step
	}
	if j.state.started != nil {
		h.Request = j.state.started.Request
	}
	id := fmt.Sprintf("%s.%s.%d", j.tenant, j.loop, j.state.entries+1)
	e, err := events.New(events.LoopType(name), events.SourceLoopRunner, id, d)
	if err == nil && len(e.Data()) > maxEntry {
		err = &tooLargeError{name, len(e.Data())}
	}
	return e, err
}

// tooLargeError: the entry does not fit a message.
type tooLargeError struct {
	name string
	size int
}

func (e *tooLargeError) Error() string {
	return fmt.Sprintf("journal entry %s has %d bytes, at most %d", e.name, e.size, maxEntry)
}

func (j *journal) publish(ctx context.Context, name string, e events.Event) (entry, error) {
	msg, err := events.NewMessage(ctx, events.LoopSubject(j.tenant, j.loop, name), e)
	if err != nil {
		return entry{}, err
	}
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	ack, err := j.js.PublishMsg(call, msg, jetstream.WithExpectLastSequenceForSubject(j.seq, j.filter()))
	if err != nil {
		return entry{}, err
	}
	return entry{name: name, seq: ack.Sequence, stored: time.Now(), header: msg.Header, event: e}, nil
}
