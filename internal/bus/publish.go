package bus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/events"
)

// ErrTaken says that the subject's last message is not the one that was expected.
var ErrTaken = errors.New("subject is taken")

// callTimeout bounds one publication, so that a lost acknowledgement is read
// back soon.
const callTimeout = 5 * time.Second

// PublishExpecting publishes msg if the last message on its subject has
// sequence last (0: the subject is empty). ErrTaken means that it was not
// stored now, though this very message may have been stored before; any other
// error leaves open whether it was.
func PublishExpecting(ctx context.Context, js jetstream.JetStream, msg *nats.Msg, last uint64) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	ack, err := js.PublishMsg(ctx, msg, jetstream.WithExpectLastSequencePerSubject(last))
	if err == nil {
		return ack.Sequence, nil
	}
	if IsWrongSequence(err) {
		return 0, fmt.Errorf("publish %s after sequence %d: %w", msg.Subject, last, ErrTaken)
	}
	return 0, fmt.Errorf("publish %s: %w", msg.Subject, err)
}

// IsWrongSequence recognises a failed expectation; single and replicated
// streams word it differently.
func IsWrongSequence(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && (api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence || api.ErrorCode == 10164)
}

// Last returns the last message on a subject of a stream, decoded, as the
// stream's leader has it. Sequence 0 means that there is none.
func Last(ctx context.Context, s jetstream.Stream, subject string) (events.Event, *jetstream.RawStreamMsg, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	raw, err := s.GetLastMsgForSubject(ctx, subject)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return events.Event{}, nil, nil
	}
	if err != nil {
		return events.Event{}, nil, fmt.Errorf("read last of %s: %w", subject, err)
	}
	e, err := events.Decode(raw.Header, raw.Data)
	if err != nil {
		return events.Event{}, raw, fmt.Errorf("read last of %s: %w", subject, err)
	}
	return e, raw, nil
}

// Announce publishes e on subject exactly once: where the subject's last
// message has the same (source, id) it is already announced. Use it for
// subjects on which an event's life has one message, such as
// event.<tenant>.<vm>.ready; an earlier life's message is followed, not
// mistaken for it.
func Announce(ctx context.Context, js jetstream.JetStream, stream jetstream.Stream, subject string, e events.Event) error {
	msg, err := events.NewMessage(ctx, subject, e)
	if err != nil {
		return err
	}
	var last uint64
	for attempt := 0; ; attempt++ {
		_, err := PublishExpecting(ctx, js, msg, last)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil || attempt > 20 {
			return err
		}
		if !errors.Is(err, ErrTaken) {
			if err := Pause(ctx, attempt); err != nil {
				return err
			}
		}
		previous, raw, err := Last(ctx, stream, subject)
		switch {
		case err == nil && raw == nil:
			last = 0
		case err == nil && previous.ID() == e.ID() && previous.Source() == e.Source():
			return nil
		case raw != nil:
			last = raw.Sequence
		}
	}
}

// Pause waits 5 ms doubling to 500 ms before another attempt.
func Pause(ctx context.Context, attempt int) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(min(5*time.Millisecond<<min(attempt, 7), 500*time.Millisecond)):
		return nil
	}
}
