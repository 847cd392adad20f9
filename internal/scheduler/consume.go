package scheduler

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/events"
)

// inFlight bounds the messages of one consumer that are handled at once.
const inFlight = 64

// pullExpiry bounds how long the server may go on sending to a scheduler whose
// packets vanish, or which was frozen: it is over before a successor can have
// the lease.
const pullExpiry = 2 * time.Second

// giveUpAfter tries a message is put aside as a dead letter.
const giveUpAfter = 20

// drop is the error of a message that can be neither obeyed nor answered.
type drop struct{ reason string }

func (d *drop) Error() string { return d.reason }

// delivery is one message of a consumer, decoded.
type delivery struct {
	jetstream.Msg
	meta  *jetstream.MsgMetadata
	event events.Event
	err   error // it is no CloudEvent
}

// handler handles one message: nil once its effect is durable; a *drop puts it
// aside; any other error has it tried again.
type handler func(ctx context.Context, d delivery) error

// consume handles the messages of a shared durable until ctx ends. Messages
// about one thing (lane names it) are handled one at a time in stream order,
// others in parallel. A term begins with what the one before has not
// acknowledged, in order (nats-server#6114).
func (t *term) consume(ctx context.Context, stream string, lane func(delivery) string, handle handler) error {
	for attempt := 0; ; attempt++ {
		err := t.consumeOnce(ctx, stream, lane, handle)
		if ctx.Err() != nil {
			return nil
		}
		t.log.Warn("consumer starts again", "stream", stream, "err", err)
		if bus.Pause(ctx, attempt) != nil {
			return nil
		}
	}
}

func (t *term) consumeOnce(ctx context.Context, stream string, lane func(delivery) string, handle handler) error {
	consumer, err := t.js.Consumer(ctx, stream, bus.SchedulerConsumer)
	if err != nil {
		return fmt.Errorf("consumer %s of %s: %w", bus.SchedulerConsumer, stream, err)
	}
	if _, err := t.js.ResetConsumer(ctx, stream, bus.SchedulerConsumer); err != nil {
		return fmt.Errorf("reset consumer %s of %s: %w", bus.SchedulerConsumer, stream, err)
	}
	ctx, cancel := context.WithCancel(ctx)
	lanes := newLanes(ctx, func(d delivery) { t.settle(ctx, stream, d, handle) })
	defer lanes.close()
	defer cancel()
	gone := make(chan error, 1)
	cc, err := consumer.Consume(func(msg jetstream.Msg) {
		meta, err := msg.Metadata()
		if err != nil {
			t.log.Error("message without metadata", "subject", msg.Subject(), "err", err)
			return
		}
		d := delivery{Msg: msg, meta: meta}
		d.event, d.err = events.Decode(msg.Headers(), msg.Data())
		lanes.put(lane(d), d)
	}, jetstream.PullMaxMessages(4*inFlight), jetstream.PullExpiry(pullExpiry), jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
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

// lanes run messages one at a time per key, in the order put, at most inFlight
// at once.
type lanes struct {
	run  func(delivery)
	keys *workqueue // that have a message waiting
	stop context.CancelFunc
	wg   sync.WaitGroup

	mu     sync.Mutex
	queues map[string][]delivery
	held   map[uint64]bool // delivered again while it waits or runs: ignored
}

func newLanes(ctx context.Context, run func(delivery)) *lanes {
	ctx, stop := context.WithCancel(ctx)
	l := &lanes{run: run, keys: newWorkqueue(), stop: stop, queues: map[string][]delivery{}, held: map[uint64]bool{}}
	for range inFlight {
		l.wg.Go(func() { l.work(ctx) })
	}
	return l
}

func (l *lanes) put(key string, d delivery) {
	seq := d.meta.Sequence.Stream
	l.mu.Lock()
	again := l.held[seq]
	if !again {
		l.held[seq] = true
		l.queues[key] = append(l.queues[key], d)
	}
	l.mu.Unlock()
	if !again {
		l.keys.add(key)
	}
}

func (l *lanes) work(ctx context.Context) {
	for {
		key, ok := l.keys.take(ctx)
		if !ok {
			return
		}
		l.mu.Lock()
		next := l.queues[key][0]
		l.mu.Unlock()
		l.run(next)
		l.mu.Lock()
		delete(l.held, next.meta.Sequence.Stream)
		rest := l.queues[key][1:]
		if l.queues[key] = rest; len(rest) == 0 {
			delete(l.queues, key)
		}
		l.mu.Unlock()
		if len(rest) > 0 {
			l.keys.add(key)
		}
		l.keys.done(key)
	}
}

// close returns when nothing runs; what waits is left to be delivered again.
func (l *lanes) close() {
	l.stop()
	l.wg.Wait()
}

// guarded turns a panic over one message into that message's dead letter.
func (t *term) guarded(ctx context.Context, d delivery, handle handler) (err error) {
	defer func() {
		if p := recover(); p != nil {
			t.log.Error("panic over a message", "subject", d.Subject(), "panic", p, "stack", string(debug.Stack()))
			err = &drop{fmt.Sprintf("panic: %v", p)}
		}
	}()
	return handle(ctx, d)
}

// settle handles one message to its end: acknowledged, or put aside; or left,
// when the term ends, to be delivered again. It is tried again in its place, so
// that what follows it in its lane does not pass it.
func (t *term) settle(ctx context.Context, stream string, msg delivery, handle handler) {
	var err error
	for attempt := range giveUpAfter {
		if err = t.guarded(ctx, msg, handle); err == nil {
			if err := msg.Ack(); err != nil && ctx.Err() == nil {
				t.log.Warn("message not acknowledged; delivered again", "subject", msg.Subject(), "err", err)
			}
			return
		}
		var dropped *drop
		if errors.As(err, &dropped) {
			break
		}
		if ctx.Err() != nil {
			return
		}
		t.log.Warn("message not handled; trying again", "subject", msg.Subject(), "err", err)
		if err := msg.InProgress(); err != nil {
			t.log.Debug("message not kept", "subject", msg.Subject(), "err", err)
		}
		if sleep(ctx, min(100*time.Millisecond<<min(attempt, 6), 4*time.Second)) != nil {
			return
		}
	}
	t.log.Warn("message put aside as a dead letter", "subject", msg.Subject(), "reason", err)
	for attempt := 0; ctx.Err() == nil; attempt++ {
		stored := bus.PublishDeadLetter(ctx, t.js, stream, bus.SchedulerConsumer, msg.Msg, err.Error())
		if stored == nil {
			stored = msg.Ack()
		}
		if stored == nil || sleep(ctx, min(100*time.Millisecond<<min(attempt, 6), 4*time.Second)) != nil {
			return
		}
		t.log.Warn("dead letter not stored; trying again", "subject", msg.Subject(), "err", stored)
	}
}

// sleep waits for d or the end of ctx.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}
