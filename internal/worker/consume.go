package worker

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/events"
)

// pullBatch is how many messages may be on their way to us: few, since what a
// dead worker was sent its successor sees only after a reset.
const pullBatch = 64

// pullExpiry is how long the server keeps what this worker has asked it for. A
// worker that is frozen, or whose packets vanish, still has a connection as far
// as the server knows, and is sent what its successor waits for as long as it
// has asked for any. So it ends before the lease can be taken over, which is
// not before three quarters of its time.
func (w *Worker) pullExpiry() time.Duration { return max(w.opts.LeaseTTL/2, time.Second) }

// errGap: the consumer's sequence skipped, so a delivery was lost and would
// come again out of order.
var errGap = errors.New("gap in the consumer's sequence")

// errReconnected: what was on its way when the connection broke is lost.
var errReconnected = errors.New("reconnected")

// consume reads one consumer into lane until pulling ends. It resets the
// consumer before it reads, after a gap, after a reconnect, and when the
// consumer had to be made again, so that unfinished commands come in order.
// caughtUp is called when lane has all that was there before.
func (t *tenure) consume(pulling, work context.Context, spec bus.ConsumerSpec, lane *lanes, caughtUp func()) {
	log := t.log.With("consumer", spec.Durable)
	for attempt := 0; pulling.Err() == nil; attempt++ {
		began := time.Now()
		err := t.consumeOnce(pulling, work, spec, lane, caughtUp)
		if pulling.Err() != nil {
			return
		}
		if errors.Is(err, errGap) || errors.Is(err, errReconnected) {
			log.Info("consumer is read again from its first unfinished command", "err", err)
		} else {
			log.Warn("consumer not readable; trying again", "err", err)
		}
		if time.Since(began) > 10*time.Second {
			attempt = 0
		}
		if bus.Pause(pulling, attempt) != nil {
			return
		}
	}
}

// consumeOnce finds, resets and reads the consumer until something is wrong.
func (t *tenure) consumeOnce(pulling, work context.Context, spec bus.ConsumerSpec, lane *lanes, caughtUp func()) error {
	cons, known, err := t.consumer(pulling, spec)
	if err != nil {
		return err
	}
	reading, stop := context.WithCancelCause(pulling)
	defer stop(context.Canceled)
	defer t.watchConnection(reading, stop)()
	reset, err := t.js.ResetConsumer(reading, spec.Stream, spec.Durable)
	if err != nil {
		return fmt.Errorf("reset consumer: %w", err)
	}
	next := reset.Delivered.Consumer + 1
	if reset.NumPending == 0 {
		caughtUp()
	}
	expiry := t.w.pullExpiry()
	msgs, err := cons.Messages(jetstream.PullMaxMessages(pullBatch), jetstream.PullExpiry(expiry), jetstream.PullHeartbeat(expiry/2))
	if err != nil {
		return fmt.Errorf("read consumer: %w", err)
	}
	defer msgs.Stop()
	for {
		msg, err := msgs.Next(jetstream.NextContext(reading))
		switch {
		case reading.Err() != nil:
			return context.Cause(reading)
		case errors.Is(err, jetstream.ErrNoHeartbeat):
			if _, err := cons.Info(reading); err != nil {
				return fmt.Errorf("consumer is silent: %w", err)
			}
			continue
		case err != nil:
			return fmt.Errorf("read consumer: %w", err)
		}
		meta, err := msg.Metadata()
		if err != nil {
			return fmt.Errorf("message without metadata: %w", err)
		}
		if meta.Sequence.Consumer != next {
			return fmt.Errorf("%w: %d where %d was due", errGap, meta.Sequence.Consumer, next)
		}
		next++
		it := &item{msg: msg, seq: meta.Sequence.Stream, published: meta.Timestamp, fresh: meta.Sequence.Stream > known}
		key := "" // what names no vm is handled in a lane of its own
		if path, err := events.ParseCommand(msg.Subject()); err == nil {
			key = path.VM
			switch path.Verb {
			case events.Cancel:
				key += cancelLane // a kill waits for none
				it.names = t.target(it)
			case events.Kill:
				it.fresh = false // there is no backlog of them
			}
		}
		if !lane.put(work, key, it) {
			t.ack(it)
		}
		if meta.NumPending == 0 {
			caughtUp()
		}
	}
}

// consumer finds the consumer, or makes it where it is missing and this worker
// may. known is the sequence up to which commands were in the stream before:
// whoever read the consumer then has admitted them.
func (t *tenure) consumer(ctx context.Context, spec bus.ConsumerSpec) (cons jetstream.Consumer, known uint64, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	cons, err = t.js.Consumer(ctx, spec.Stream, spec.Durable)
	if errors.Is(err, jetstream.ErrConsumerNotFound) {
		making, stop := context.WithTimeout(ctx, 2*time.Second)
		err = bus.EnsureConsumers(making, t.js, []bus.ConsumerSpec{spec})
		stop()
		if err == nil {
			cons, err = t.js.Consumer(ctx, spec.Stream, spec.Durable)
		}
	}
	if err != nil {
		return nil, 0, fmt.Errorf("find consumer: %w", err)
	}
	known = cons.CachedInfo().Delivered.Stream
	if known == 0 {
		if s, err := t.js.Stream(ctx, spec.Stream); err == nil {
			known = s.CachedInfo().State.LastSeq
		}
	}
	return cons, known, nil
}

// watchConnection ends reading when the connection has come back after a
// break. The function returned stops watching.
func (t *tenure) watchConnection(reading context.Context, stop context.CancelCauseFunc) func() {
	nc := t.js.Conn()
	before := nc.Stats().Reconnects
	changes := nc.StatusChanged(nats.CONNECTED)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			if nc.Stats().Reconnects != before {
				stop(errReconnected)
				return
			}
			select {
			case <-reading.Done():
				return
			case _, ok := <-changes:
				if !ok {
					return
				}
			}
		}
	}()
	return func() {
		stop(context.Canceled)
		<-done
		nc.RemoveStatusListener(changes)
	}
}

// ack tells the consumer that a command is finished. A lost acknowledgement
// costs a redelivery, which the claims drop.
func (t *tenure) ack(it *item) {
	it.acked = true
	if err := it.msg.Ack(); err != nil && !errors.Is(err, jetstream.ErrMsgAlreadyAckd) {
		t.log.Debug("command not acknowledged", "seq", it.seq, "err", err)
	}
}
