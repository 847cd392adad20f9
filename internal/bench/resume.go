package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"berth/internal/bus"
	"berth/internal/events"
	"berth/internal/looprunner"
)

// resumeSteps is the length of the journal that is taken up.
const resumeSteps = 500

// loopResume measures how soon a runner that starts asks the model of a loop
// whose runner has stopped after 500 steps. The floor reads the same journal
// and appends one entry, with bare nats.go, making what it needs for that as
// Berth does: a consumer for the journal, one for the results.
func loopResume(ctx context.Context, opts options, print func(figure)) (err error) {
	name, wanted := opts.figureName("loop_resume", fmt.Sprintf("steps=%d", resumeSteps))
	if !wanted {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	w, err := newWorld(ctx, false)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	if err := givenSandboxes(ctx, w, 1); err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	g.Go(func() error { return answerActs(ctx, w) })
	var got, floor sample
	g.Go(func() error {
		defer stop()
		if err := recordLoop(ctx, w); err != nil {
			return err
		}
		for range max(3, int(10*opts.seconds)) {
			took, err := resumeByRunner(ctx, w)
			if err != nil {
				return err
			}
			got.each, got.all = append(got.each, took), got.all+took
			if took, err = resumeByFloor(ctx, w); err != nil {
				return fmt.Errorf("floor: %w", err)
			}
			floor.each, floor.all = append(floor.each, took), floor.all+took
		}
		return nil
	})
	if err := g.Wait(); err != nil {
		return err
	}
	print(compare(name, got, "the journal read and one entry appended, bare nats.go", floor))
	return nil
}

// recordLoop makes a journal of 500 steps; its runner stops.
func recordLoop(ctx context.Context, w *world) error {
	js, err := w.connect(ctx, "runner")
	if err != nil {
		return err
	}
	if err := startLoop(ctx, js, "loop-0", "vm-0"); err != nil {
		return err
	}
	return runUntil(ctx, js, "first", func(in looprunner.Turn) bool { return in.Step > resumeSteps })
}

// runUntil runs a runner until its model is asked what enough says is enough;
// then it stops in order.
func runUntil(ctx context.Context, js jetstream.JetStream, name string, enough func(looprunner.Turn) bool) error {
	running, stop := context.WithCancel(ctx)
	defer stop()
	r, err := newRunner(js, name, func() func(looprunner.Turn) bool {
		return func(in looprunner.Turn) bool {
			if enough(in) {
				stop()
			}
			return true // one more step, which the runner finishes before it stops
		}
	})
	if err != nil {
		return err
	}
	if err := r.Run(running); err != nil {
		return err
	}
	return ctx.Err()
}

func resumeByRunner(ctx context.Context, w *world) (time.Duration, error) {
	js, err := w.connect(ctx, "successor")
	if err != nil {
		return 0, err
	}
	begin := time.Now()
	var took time.Duration
	err = runUntil(ctx, js, fmt.Sprintf("successor-%d", begin.UnixNano()), func(looprunner.Turn) bool {
		if took == 0 {
			took = time.Since(begin)
		}
		return true
	})
	return took, err
}

func resumeByFloor(ctx context.Context, w *world) (time.Duration, error) {
	js, err := w.connect(ctx, "floor")
	if err != nil {
		return 0, err
	}
	begin := time.Now()
	filter := events.LoopSubject("default", "loop-0", ">")
	stream, err := js.Stream(ctx, bus.Loops)
	if err != nil {
		return 0, err
	}
	last, err := stream.GetLastMsgForSubject(ctx, filter)
	if err != nil {
		return 0, err
	}
	c, err := js.OrderedConsumer(ctx, bus.Loops, jetstream.OrderedConsumerConfig{FilterSubjects: []string{filter}})
	if err != nil {
		return 0, err
	}
	it, err := c.Messages()
	if err != nil {
		return 0, err
	}
	defer it.Stop()
	for {
		msg, err := it.Next()
		if err != nil {
			return 0, err
		}
		meta, err := msg.Metadata()
		if err != nil {
			return 0, err
		}
		if meta.Sequence.Stream >= last.Sequence {
			break
		}
	}
	results, err := hearResults(ctx, js)
	if err != nil {
		return 0, err
	}
	defer results.stop()
	// An entry of a name that no runner heeds.
	_, err = js.Publish(ctx, events.LoopSubject("default", "loop-0", "floor"), filler[:thinkingBytes],
		jetstream.WithExpectLastSequenceForSubject(last.Sequence, filter))
	return time.Since(begin), err
}

// serveCommands hands each command of the bench's server to handle, in a
// goroutine of its own, until ctx ends.
func serveCommands(ctx context.Context, js jetstream.JetStream, handle func(msg jetstream.Msg, id events.Request) error) error {
	consumer, err := js.Consumer(ctx, bus.Commands, benchID)
	if err != nil {
		return err
	}
	failed := make(chan error, 1)
	cc, err := consumer.Consume(func(msg jetstream.Msg) {
		go func() {
			var id events.Request
			err := json.Unmarshal(msg.Data(), &id)
			if err == nil {
				err = handle(msg, id)
			}
			if err != nil && ctx.Err() == nil {
				select {
				case failed <- err:
				default:
				}
			}
		}()
	})
	if err != nil {
		return err
	}
	defer cc.Stop()
	select {
	case <-ctx.Done():
		return nil
	case err := <-failed:
		return err
	}
}

// resultWaiters wakes who waits for the second message of a result subject.
type resultWaiters struct {
	stop func()

	mu      sync.Mutex
	second  map[string]bool
	waiting map[string]chan struct{}
}

func hearResults(ctx context.Context, js jetstream.JetStream) (*resultWaiters, error) {
	c, err := js.OrderedConsumer(ctx, bus.Results, jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{events.ResultSubject(benchID, "*", "*")}, DeliverPolicy: jetstream.DeliverNewPolicy})
	if err != nil {
		return nil, err
	}
	r := &resultWaiters{second: map[string]bool{}, waiting: map[string]chan struct{}{}}
	cc, err := c.Consume(func(msg jetstream.Msg) {
		token := msg.Subject()[strings.LastIndexByte(msg.Subject(), '.')+1:]
		r.mu.Lock()
		defer r.mu.Unlock()
		if !r.second[token] {
			r.second[token] = true
			return
		}
		delete(r.second, token)
		if done := r.waiting[token]; done != nil {
			close(done)
			delete(r.waiting, token)
		}
	})
	if err != nil {
		return nil, err
	}
	r.stop = cc.Stop
	return r, nil
}

func (r *resultWaiters) expect(token string) <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	done := make(chan struct{})
	r.waiting[token] = done
	return done
}
