package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
	"berth/internal/worker"
)

// actRoundtrip measures an act from its publication to the receipt of its
// `finished`, through a worker whose provider does nothing. The floor makes the
// same durable writes and deliveries with bare nats.go: the command, the claim
// on an empty subject, the result after the claim, the acknowledgement.
func actRoundtrip(ctx context.Context, opts options, print func(figure)) error {
	for _, sync := range []bool{false, true} {
		for _, sandboxes := range []int{1, 10, 100} {
			name, wanted := opts.figureName("act_roundtrip", fmt.Sprintf("sandboxes=%d/%s", sandboxes, mode(sync)))
			if !wanted {
				continue
			}
			got, err := roundtripWorld(ctx, sync, sandboxes, opts.seconds, actByWorker)
			if err != nil {
				return err
			}
			floor, err := roundtripWorld(ctx, sync, sandboxes, opts.seconds, actByFloor)
			if err != nil {
				return fmt.Errorf("floor: %w", err)
			}
			print(compare(name, got, "same writes and deliveries, bare nats.go", floor))
		}
	}
	return nil
}

// benchID is the one server of this benchmark.
const benchID = "bench-01"

// executor serves the commands of benchID's sandboxes vm-0 … until ctx ends; it
// calls ready when it can.
type executor func(ctx context.Context, w *world, sandboxes int, ready func()) error

func roundtripWorld(ctx context.Context, sync bool, sandboxes int, seconds float64, execute executor) (sample, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	w, err := newWorld(ctx, sync)
	if err != nil {
		return sample{}, err
	}
	s, err := measureRoundtrips(ctx, w, sandboxes, seconds, execute)
	return s, errors.Join(err, w.close())
}

func measureRoundtrips(ctx context.Context, w *world, sandboxes int, seconds float64, execute executor) (sample, error) {
	js, err := w.connect(ctx, "callers")
	if err != nil {
		return sample{}, err
	}
	if err := bus.EnsureConsumers(ctx, js, bus.ServerConsumers(benchID, 1000)); err != nil {
		return sample{}, err
	}
	g, running := errgroup.WithContext(ctx)
	running, stop := context.WithCancel(running)
	defer stop()
	ready := make(chan struct{})
	g.Go(func() error { return execute(running, w, sandboxes, func() { close(ready) }) })
	var s sample
	g.Go(func() error {
		defer stop()
		select {
		case <-ready:
		case <-running.Done():
			return nil
		}
		var err error
		s, err = callActs(running, js, sandboxes, seconds)
		return err
	})
	return s, g.Wait()
}

// callActs has one caller per sandbox, each with one act open at a time.
func callActs(ctx context.Context, js jetstream.JetStream, sandboxes int, seconds float64) (sample, error) {
	var mu sync.Mutex
	waiting := map[string]chan struct{}{}
	finished, err := js.OrderedConsumer(ctx, bus.Results, jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{events.ResultSubject(benchID, "*", "*")}, DeliverPolicy: jetstream.DeliverNewPolicy})
	if err != nil {
		return sample{}, err
	}
	second := map[string]bool{} // the second message of a result subject is `finished`
	cc, err := finished.Consume(func(msg jetstream.Msg) {
		token := msg.Subject()[strings.LastIndexByte(msg.Subject(), '.')+1:]
		mu.Lock()
		defer mu.Unlock()
		if !second[token] {
			second[token] = true
			return
		}
		delete(second, token)
		if done := waiting[token]; done != nil {
			close(done)
			delete(waiting, token)
		}
	})
	if err != nil {
		return sample{}, err
	}
	defer cc.Stop()
	var s sample
	g, ctx := errgroup.WithContext(ctx)
	begin := time.Now()
	for i := range sandboxes {
		g.Go(func() error {
			for n := 0; time.Since(begin).Seconds() < seconds; n++ {
				id := fmt.Sprintf("act-%d-%d", i, n)
				done := make(chan struct{})
				mu.Lock()
				waiting[events.Token("/bench", id)] = done
				mu.Unlock()
				at := time.Now()
				if err := publishAct(ctx, js, fmt.Sprintf("vm-%d", i), id); err != nil {
					return err
				}
				select {
				case <-done:
				case <-ctx.Done():
					return fmt.Errorf("no result of %s: %w", id, ctx.Err())
				}
				took := time.Since(at)
				mu.Lock()
				s.each = append(s.each, took)
				mu.Unlock()
			}
			return nil
		})
	}
	err = g.Wait()
	s.all = time.Since(begin)
	return s, err
}

var oneClick = json.RawMessage(`[{"type":"click","x":10,"y":20}]`)

func publishAct(ctx context.Context, js jetstream.JetStream, vm, id string) error {
	e, err := events.New(events.CommandType(events.Act), "/bench", id, events.Command{Actions: oneClick})
	if err != nil {
		return err
	}
	msg, err := events.NewMessage(ctx, events.CommandSubject(benchID, vm, events.Act), e)
	if err != nil {
		return err
	}
	_, err = js.PublishMsg(ctx, msg)
	return err
}

// actByWorker runs the real worker over a provider that does nothing.
func actByWorker(ctx context.Context, w *world, sandboxes int, ready func()) error {
	return serve(ctx, w, noop{sandboxes}, sandboxes, ready)
}

// serve runs a worker over a provider that has the sandboxes vm-0 … with fence 1.
func serve(ctx context.Context, w *world, p providers.Provider, sandboxes int, ready func()) error {
	js, err := w.connect(ctx, "worker")
	if err != nil {
		return err
	}
	places, err := js.KeyValue(ctx, kv.BucketPlacements)
	if err != nil {
		return err
	}
	config := kv.ServerConfig{Provider: "bench", Roles: []string{"default"}, MaxContainers: 1000, Isolation: kv.IsolationNone}
	record := kv.Server{ID: benchID, Config: config, Admin: kv.Active, Allocs: map[string]kv.Alloc{}}
	for i := range sandboxes {
		record.Allocs[fmt.Sprintf("vm-%d", i)] = kv.Alloc{Attempt: "a", Fence: 1, Role: "default", Tenant: "default", Since: time.Now()}
	}
	if _, err := kv.Put(ctx, places, kv.ServerKey(benchID), record, 0); err != nil {
		return err
	}
	worker, err := worker.New(worker.Options{JS: js, Name: "bench", Log: slog.New(slog.DiscardHandler), Servers: []worker.Server{{
		ID: benchID, Config: config,
		Open: func(context.Context) (providers.Provider, error) { return p, nil },
	}}})
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return worker.Run(ctx) })
	g.Go(func() error {
		for ctx.Err() == nil {
			if _, _, err := kv.Get[kv.Server](ctx, places, kv.ServerKey(benchID)); err != nil {
				return err
			}
			beats, err := js.KeyValue(ctx, kv.BucketHeartbeats)
			if err != nil {
				return err
			}
			if beat, _, err := kv.Get[kv.Heartbeat](ctx, beats, benchID); err == nil && beat.Synced {
				ready()
				return nil
			}
			time.Sleep(20 * time.Millisecond)
		}
		return nil
	})
	return g.Wait()
}

// noop is a provider whose sandboxes are always there and whose actions have
// no effect and take no time.
type noop struct{ sandboxes int }

func (n noop) Info() providers.Info {
	return providers.Info{Kind: "bench", Capabilities: []string{providers.Browser}}
}
func (n noop) Health(context.Context) (providers.Health, error) {
	return providers.Health{BootID: "bench"}, nil
}
func (n noop) sandbox(vm string) providers.Sandbox {
	return providers.Sandbox{ID: vm, VM: vm, Fence: 1, State: providers.Running, Display: computer.DefaultDisplay}
}
func (n noop) Create(_ context.Context, spec providers.Spec) (providers.Sandbox, error) {
	return n.sandbox(spec.VM), nil
}
func (n noop) Get(_ context.Context, vm string) (providers.Sandbox, error) { return n.sandbox(vm), nil }
func (n noop) List(context.Context) ([]providers.Sandbox, error) {
	var all []providers.Sandbox
	for i := range n.sandboxes {
		all = append(all, n.sandbox(fmt.Sprintf("vm-%d", i)))
	}
	return all, nil
}
func (n noop) Kill(context.Context, string) error                      { return nil }
func (n noop) SetTimeout(context.Context, string, time.Duration) error { return nil }
func (n noop) Pause(context.Context, string) error                     { return providers.ErrUnsupported }
func (n noop) Resume(context.Context, string) error                    { return providers.ErrUnsupported }
func (n noop) Snapshot(context.Context, string) (string, error) {
	return "", providers.ErrUnsupported
}
func (n noop) Execute(_ context.Context, b providers.Batch) ([]providers.Result, error) {
	out := make([]providers.Result, len(b.Actions))
	for i := range out {
		out[i].Outcome = computer.OK
	}
	return out, nil
}
func (n noop) Recall(context.Context, string, string) (providers.Recollection, error) {
	return providers.Recollection{}, providers.ErrUnsupported
}
func (n noop) Observe(context.Context, string) (providers.View, error) {
	return providers.View{}, providers.ErrUnsupported
}
func (n noop) StreamURL(context.Context, string) (string, error) {
	return "", providers.ErrUnsupported
}
func (n noop) Close() error { return nil }

// The sizes of a worker's claim and result for one click.
const startedBytes, finishedBytes = 470, 600

// actByFloor claims and finishes each command and does nothing else.
func actByFloor(ctx context.Context, w *world, _ int, ready func()) error {
	js, err := w.connect(ctx, "floor")
	if err != nil {
		return err
	}
	consumer, err := js.Consumer(ctx, bus.Commands, benchID)
	if err != nil {
		return err
	}
	failed := make(chan error, 1)
	cc, err := consumer.Consume(func(msg jetstream.Msg) {
		go func() {
			if err := claimAndFinish(ctx, js, msg); err != nil && ctx.Err() == nil {
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
	ready()
	select {
	case <-ctx.Done():
		return nil
	case err := <-failed:
		return err
	}
}

func claimAndFinish(ctx context.Context, js jetstream.JetStream, msg jetstream.Msg) error {
	var e struct{ ID, Source string }
	if err := json.Unmarshal(msg.Data(), &e); err != nil {
		return err
	}
	vm := strings.Split(msg.Subject(), ".")[2]
	result := nats.NewMsg(events.ResultSubject(benchID, vm, events.Token(e.Source, e.ID)))
	result.Data = filler[:startedBytes]
	ack, err := js.PublishMsg(ctx, result, jetstream.WithExpectLastSequencePerSubject(0))
	if err != nil {
		return err
	}
	result = nats.NewMsg(result.Subject)
	result.Data = filler[:finishedBytes]
	if _, err := js.PublishMsg(ctx, result, jetstream.WithExpectLastSequencePerSubject(ack.Sequence)); err != nil {
		return err
	}
	return msg.Ack()
}
