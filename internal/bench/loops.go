package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/looprunner"
)

// loopStep measures a loop's step, from one question to the model to the next:
// two journal entries, the act with its observation through a worker that does
// nothing, and the entry of its result. The floor makes the same durable writes
// and deliveries, of the same sizes, with bare nats.go; the worker is the same.
func loopStep(ctx context.Context, opts options, print func(figure)) error {
	for _, sync := range []bool{false, true} {
		for _, loops := range []int{1, 200} {
			name, wanted := opts.figureName("loop_step", fmt.Sprintf("loops=%d/%s", loops, mode(sync)))
			if !wanted {
				continue
			}
			seconds := min(opts.seconds, 3) // a loop has 10,000 steps
			got, err := loopWorld(ctx, sync, loops, seconds, stepByRunner)
			if err != nil {
				return err
			}
			floor, err := loopWorld(ctx, sync, loops, seconds, stepByFloor)
			if err != nil {
				return fmt.Errorf("floor: %w", err)
			}
			print(compare(name, got, "same writes and deliveries, bare nats.go", floor))
		}
	}
	return nil
}

// stepper makes n loops take steps until ctx ends.
type stepper func(ctx context.Context, w *world, loops int, steps *stepTimes) error

// stepTimes are the times between a loop's steps, taken while it measures.
type stepTimes struct {
	loops     int
	going     atomic.Int64 // loops that have taken a step
	ready     chan struct{}
	measuring atomic.Bool

	mu   sync.Mutex
	each []time.Duration
}

// clock is one loop's.
type clock struct {
	all  *stepTimes
	last time.Time
	n    int
}

// tick is called where a step begins.
func (c *clock) tick() {
	now := time.Now()
	if c.n++; c.n == 2 && c.all.going.Add(1) == int64(c.all.loops) {
		close(c.all.ready)
	}
	if c.all.measuring.Load() && !c.last.IsZero() {
		c.all.mu.Lock()
		c.all.each = append(c.all.each, now.Sub(c.last))
		c.all.mu.Unlock()
	}
	c.last = now
}

func loopWorld(ctx context.Context, sync bool, loops int, seconds float64, step stepper) (s sample, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	w, err := newWorld(ctx, sync)
	if err != nil {
		return sample{}, err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	if err := givenSandboxes(ctx, w, loops); err != nil {
		return sample{}, err
	}
	times := &stepTimes{loops: loops, ready: make(chan struct{})}
	g, running := errgroup.WithContext(ctx)
	running, stop := context.WithCancel(running)
	defer stop()
	g.Go(func() error { return answerActs(running, w) })
	g.Go(func() error { return step(running, w, loops, times) })
	g.Go(func() error {
		defer stop()
		select {
		case <-times.ready:
		case <-running.Done():
			return context.Cause(running)
		}
		times.measuring.Store(true)
		begin := time.Now()
		select {
		case <-time.After(time.Duration(seconds * float64(time.Second))):
		case <-running.Done():
		}
		times.measuring.Store(false)
		s.all = time.Since(begin)
		return nil
	})
	err = g.Wait()
	times.mu.Lock()
	defer times.mu.Unlock()
	s.each = times.each
	if err == nil && len(s.each) == 0 {
		err = fmt.Errorf("no loop took a step in %.1f s: this machine is too busy; measure for longer", seconds)
	}
	return s, err
}

// givenSandboxes are ready, one for each loop.
func givenSandboxes(ctx context.Context, w *world, n int) error {
	js, err := w.connect(ctx, "setup")
	if err != nil {
		return err
	}
	places, err := js.KeyValue(ctx, kv.BucketPlacements)
	if err != nil {
		return err
	}
	if err := bus.EnsureConsumers(ctx, js, bus.ServerConsumers(benchID, 1000)); err != nil {
		return err
	}
	for i := range n {
		vm := fmt.Sprintf("vm-%d", i)
		p := kv.Placement{VMID: vm, ServerID: benchID, Tenant: "default", Role: "default", Phase: kv.Ready, Fence: 1,
			Info: &events.SandboxInfo{Display: computer.DefaultDisplay, Capabilities: []string{"browser"}}}
		if _, err := kv.Put(ctx, places, kv.VMKey(vm), p, 0); err != nil {
			return err
		}
	}
	return nil
}

// observed is what every command of the benchmark comes to.
var observed = computer.Observation{URL: "http://127.0.0.1:8088/form", Title: "form: nothing yet", TakenAt: time.Now().UTC(),
	Screenshot: computer.Picture{Object: "vm/" + strings.Repeat("a", 64), MediaType: "image/png", Width: 1280, Height: 800, Bytes: 60_000, SHA256: strings.Repeat("a", 64)},
	Pages:      []computer.Page{{URL: "http://127.0.0.1:8088/form", Title: "form: nothing yet", Active: true}}}

// answerActs claims and finishes each command with messages made beforehand.
func answerActs(ctx context.Context, w *world) error {
	js, err := w.connect(ctx, "worker")
	if err != nil {
		return err
	}
	started, err := encoded(events.TypeStarted, events.Started{CommandID: "x", Source: events.SourceLoopRunner, Worker: "bench", Fence: 1})
	if err != nil {
		return err
	}
	now := time.Now().UTC()
	finished, err := encoded(events.TypeFinished, events.Finished{CommandID: "x", Source: events.SourceLoopRunner, Outcome: computer.OK,
		Actions: []computer.ActionResult{{Outcome: computer.OK}}, Observation: &observed, Timing: events.Timing{StartedAt: &now, FinishedAt: now}})
	if err != nil {
		return err
	}
	return serveCommands(ctx, js, func(msg jetstream.Msg, id events.Request) error {
		vm := strings.Split(msg.Subject(), ".")[2]
		claim := nats.NewMsg(events.ResultSubject(benchID, vm, id.Token()))
		claim.Header.Set("Content-Type", started.Header.Get("Content-Type"))
		claim.Data = started.Data
		ack, err := js.PublishMsg(ctx, claim, jetstream.WithExpectLastSequencePerSubject(0))
		if err != nil {
			return err
		}
		result := nats.NewMsg(claim.Subject)
		result.Header.Set("Content-Type", finished.Header.Get("Content-Type"))
		result.Data = finished.Data
		if _, err := js.PublishMsg(ctx, result, jetstream.WithExpectLastSequencePerSubject(ack.Sequence)); err != nil {
			return err
		}
		return msg.Ack()
	})
}

func encoded(typ string, data any) (*nats.Msg, error) {
	e, err := events.New(typ, events.SourceWorker, "bench", data)
	if err != nil {
		return nil, err
	}
	return events.NewMessage(context.Background(), "none", e)
}

// stepByRunner runs the loops in one real runner.
func stepByRunner(ctx context.Context, w *world, loops int, times *stepTimes) error {
	js, err := w.connect(ctx, "runner")
	if err != nil {
		return err
	}
	r, err := newRunner(js, "bench", func() func(looprunner.Turn) bool {
		c := &clock{all: times}
		return func(looprunner.Turn) bool { c.tick(); return true }
	})
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return r.Run(ctx) })
	g.Go(func() error {
		for i := range loops {
			if err := startLoop(ctx, js, fmt.Sprintf("loop-%d", i), fmt.Sprintf("vm-%d", i)); err != nil && ctx.Err() == nil {
				return err
			}
		}
		return nil
	})
	return g.Wait()
}

// noopModel acts as long as more says so.
type noopModel struct {
	more func(looprunner.Turn) bool
}

func (noopModel) PricedAs() string { return "" }

func (m noopModel) Think(_ context.Context, in looprunner.Turn) (looprunner.Decision, error) {
	if !m.more(in) {
		return looprunner.Decision{Done: true}, nil
	}
	return looprunner.Decision{Actions: []computer.Action{{Type: computer.Cursor}}}, nil
}

// newRunner has the model noop; begin is called for each loop.
func newRunner(js jetstream.JetStream, name string, begin func() func(looprunner.Turn) bool) (*looprunner.Runner, error) {
	return looprunner.New(looprunner.Options{NC: js.Conn(), JS: js, Name: name, Log: slog.New(slog.DiscardHandler),
		Models: map[string]looprunner.ModelFactory{"noop": func(looprunner.Spec) (looprunner.Model, error) { return noopModel{begin()}, nil }}})
}

func startLoop(ctx context.Context, js jetstream.JetStream, loop, vm string) error {
	e, err := events.New(events.TypeLoopStart, "/bench", loop, map[string]any{"loopId": loop, "vmId": vm, "goal": "none", "model": map[string]string{"name": "noop"},
		"limits": map[string]any{"steps": events.MaxLoopSteps, "repeatedScreens": 0, "repeatedActions": 0}})
	if err != nil {
		return err
	}
	msg, err := events.NewMessage(ctx, events.RequestSubject("default", "loop", events.Start), e)
	if err != nil {
		return err
	}
	_, err = js.PublishMsg(ctx, msg)
	return err
}

// The sizes of what Berth writes in a step: the question, the answer, the
// command, what became of it.
const (
	thinkingBytes, decidedBytes = 470, 570
	actBytes, actedBytes        = 440, 1400
)

// stepByFloor does what must be written and heard for the steps and nothing else.
func stepByFloor(ctx context.Context, w *world, loops int, times *stepTimes) error {
	js, err := w.connect(ctx, "floor")
	if err != nil {
		return err
	}
	results, err := hearResults(ctx, js)
	if err != nil {
		return err
	}
	defer results.stop()
	g, ctx := errgroup.WithContext(ctx)
	for i := range loops {
		g.Go(func() error {
			f := &floorLoop{js: js, results: results, loop: fmt.Sprintf("loop-%d", i), vm: fmt.Sprintf("vm-%d", i)}
			c := &clock{all: times}
			for n := 0; ctx.Err() == nil; n++ {
				c.tick()
				if err := f.step(ctx, n); err != nil && ctx.Err() == nil {
					return err
				}
			}
			return nil
		})
	}
	return g.Wait()
}

type floorLoop struct {
	js       jetstream.JetStream
	results  *resultWaiters
	loop, vm string
	seq      uint64
}

func (f *floorLoop) append(ctx context.Context, name string, bytes int) error {
	msg := nats.NewMsg(events.LoopSubject("default", f.loop, name))
	msg.Data = filler[:bytes]
	ack, err := f.js.PublishMsg(ctx, msg, jetstream.WithExpectLastSequenceForSubject(f.seq, events.LoopSubject("default", f.loop, ">")))
	if err == nil {
		f.seq = ack.Sequence
	}
	return err
}

func (f *floorLoop) step(ctx context.Context, n int) error {
	if n > 0 {
		if err := f.append(ctx, events.LoopActedName, actedBytes); err != nil {
			return err
		}
	}
	if err := f.append(ctx, events.LoopThinkingName, thinkingBytes); err != nil {
		return err
	}
	if err := f.append(ctx, events.LoopDecidedName, decidedBytes); err != nil {
		return err
	}
	id := events.Request{Source: events.SourceLoopRunner, ID: fmt.Sprintf("default.%s.%d.1", f.loop, n)}
	done := f.results.expect(id.Token())
	msg := nats.NewMsg(events.CommandSubject(benchID, f.vm, events.Act))
	msg.Data = fmt.Appendf(nil, `{"id":%q,"source":%q,"data":%q}`, id.ID, id.Source, filler[:actBytes])
	if _, err := f.js.PublishMsg(ctx, msg, jetstream.WithMsgID(id.Token())); err != nil {
		return err
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
