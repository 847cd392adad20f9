package scheduler

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
)

// inFlight bounds the messages of one consumer that are handled at once.
const inFlight = 64

// giveUpAfter deliveries a message is put aside as a dead letter.
const giveUpAfter = 20

// drop is the error of a message that can be neither obeyed nor answered.
type drop struct{ reason string }

func (d *drop) Error() string { return d.reason }

// consume handles the messages of a shared durable until ctx ends. handle
// returns nil once the message's effect is durable; a *drop puts the message
// aside; any other error has it delivered again after a while.
func (t *term) consume(ctx context.Context, stream string, handle func(ctx context.Context, msg jetstream.Msg) error) error {
	for attempt := 0; ; attempt++ {
		err := t.consumeOnce(ctx, stream, handle)
		if ctx.Err() != nil {
			return nil
		}
		t.log.Warn("consumer starts again", "stream", stream, "err", err)
		if bus.Pause(ctx, attempt) != nil {
			return nil
		}
	}
}

func (t *term) consumeOnce(ctx context.Context, stream string, handle func(ctx context.Context, msg jetstream.Msg) error) error {
	consumer, err := t.js.Consumer(ctx, stream, bus.SchedulerConsumer)
	if err != nil {
		return fmt.Errorf("consumer %s of %s: %w", bus.SchedulerConsumer, stream, err)
	}
	slots := make(chan struct{}, inFlight)
	gone := make(chan error, 1)
	cc, err := consumer.Consume(func(msg jetstream.Msg) {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return // delivered again to whoever is active then
		}
		t.work.Go(func() {
			defer func() { <-slots }()
			t.settle(ctx, stream, msg, t.guarded(ctx, msg, handle))
		})
	}, jetstream.PullMaxMessages(inFlight), jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
		if errors.Is(err, jetstream.ErrConsumerDeleted) || errors.Is(err, jetstream.ErrConsumerNotFound) {
			select {
			case gone <- err:
			default:
			}
		}
	}))
	if err != nil {
		return fmt.Errorf("consume %s: %w", stream, err)
	}
	defer cc.Stop()
	select {
	case <-ctx.Done():
		return nil
	case err := <-gone:
		return err
	case <-cc.Closed():
		return errors.New("consumer closed")
	}
}

// guarded turns a panic over one message into that message's dead letter.
func (t *term) guarded(ctx context.Context, msg jetstream.Msg, handle func(context.Context, jetstream.Msg) error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			t.log.Error("panic over a message", "subject", msg.Subject(), "panic", p, "stack", string(debug.Stack()))
			err = &drop{fmt.Sprintf("panic: %v", p)}
		}
	}()
	return handle(ctx, msg)
}

// settle acknowledges, delays or puts aside one message; it is the only place
// that does.
func (t *term) settle(ctx context.Context, stream string, msg jetstream.Msg, err error) {
	if ctx.Err() != nil && err != nil {
		return // the next term has it delivered again
	}
	meta, metaErr := msg.Metadata()
	var dropped *drop
	switch {
	case err == nil:
		err = msg.Ack()
	case errors.As(err, &dropped) || metaErr == nil && meta.NumDelivered >= giveUpAfter:
		t.log.Warn("message put aside as a dead letter", "subject", msg.Subject(), "reason", err)
		if err = bus.PublishDeadLetter(ctx, t.js, stream, bus.SchedulerConsumer, msg, err.Error()); err == nil {
			err = msg.Ack()
		}
	default:
		delay := 250 * time.Millisecond
		if metaErr == nil {
			delay = min(delay<<min(meta.NumDelivered, 6), 10*time.Second)
		}
		t.log.Warn("message not handled; delivered again", "subject", msg.Subject(), "in", delay, "err", err)
		err = msg.NakWithDelay(delay)
	}
	if err != nil && ctx.Err() == nil {
		t.log.Warn("message not settled; delivered again", "subject", msg.Subject(), "err", err)
	}
}
