package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/providers"
	"berth/internal/providers/playwright"
)

// browserClicks is how many clicks act_browser measures each way, at least.
const browserClicks = 100

// actBrowser measures clicks in a real Chromium. In turn one goes to the
// provider directly, and one through the bus: published, claimed, executed,
// finished, received. The floor is the direct click. act_browser_overhead is, of
// each act, what it took less what its own provider call took: what the bus and
// the worker cost, free of the browser's noise.
func actBrowser(ctx context.Context, opts options, print func(figure)) error {
	p, err := playwright.New(ctx, playwright.Options{ServerID: benchID, Ephemeral: true, Spares: -1})
	if err != nil {
		return err
	}
	err = clickBrowser(ctx, opts, p, print)
	return errors.Join(err, p.Close())
}

// timed is a provider that others have opened and close, which notes what each
// Execute took.
type timed struct {
	providers.Provider

	mu   sync.Mutex
	took map[string]time.Duration // by key
}

func (p *timed) Execute(ctx context.Context, b providers.Batch) ([]providers.Result, error) {
	began := time.Now()
	results, err := p.Provider.Execute(ctx, b)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.took[b.Key] = time.Since(began)
	return results, err
}

func (p *timed) Close() error { return nil }

// clickCounter counts the clicks it gets in its title.
const clickCounter = `data:text/html,<title>0</title><body onclick="document.title=+document.title+1" style="height:700px">`

func clickBrowser(ctx context.Context, opts options, p providers.Provider, print func(figure)) error {
	const vm = "vm-0"
	if _, err := p.Create(ctx, providers.Spec{VM: vm, Fence: 1, Tenant: "default", Role: "default"}); err != nil {
		return err
	}
	click, err := computer.DecodeActions(oneClick)
	if err != nil {
		return err
	}
	open := providers.Batch{VM: vm, Fence: 1, Key: "open", Actions: []computer.Action{{Type: computer.Open, Target: clickCounter}}}
	if err := executed(p.Execute(ctx, open)); err != nil {
		return fmt.Errorf("open the page: %w", err)
	}
	w, err := newWorld(ctx, false)
	if err != nil {
		return err
	}
	over := &timed{Provider: p, took: map[string]time.Duration{}}
	clicks, err := throughBus(ctx, w, over, func(ctx context.Context, act func(id string) (time.Duration, error)) (c clicked, err error) {
		for i, begin := 0, time.Now(); i < browserClicks || time.Since(begin).Seconds() < opts.seconds; i++ {
			key, began := fmt.Sprint("direct-", i), time.Now()
			if err := executed(p.Execute(ctx, providers.Batch{VM: vm, Fence: 1, Key: key, Actions: click})); err != nil {
				return c, fmt.Errorf("direct click: %w", err)
			}
			c.direct.add(time.Since(began))
			id := fmt.Sprint("act-", i)
			d, err := act(id)
			if err != nil {
				return c, err
			}
			over.mu.Lock()
			inside := over.took[events.Token("/bench", id)]
			over.mu.Unlock()
			c.bus.add(d)
			c.overhead.add(d - inside)
		}
		return c, nil
	})
	if err = errors.Join(err, w.close()); err != nil {
		return err
	}
	view, err := p.Observe(ctx, vm)
	if err != nil {
		return err
	}
	if want := fmt.Sprint(2 * len(clicks.bus.each)); view.Observation.Title != want {
		return fmt.Errorf("the page counted %s clicks of %s", view.Observation.Title, want)
	}
	print(compare("act_browser", clicks.bus, "the same click, directly at the provider", clicks.direct))
	print(figure{Name: "act_browser_overhead", N: len(clicks.overhead.each), PerSecond: clicks.overhead.rate(),
		P50us: clicks.overhead.percentile(0.5), P99us: clicks.overhead.percentile(0.99)})
	return nil
}

// clicked are the samples of act_browser.
type clicked struct{ direct, bus, overhead sample }

func (s *sample) add(d time.Duration) {
	s.each = append(s.each, d)
	s.all += d
}

// executed is Execute's error, or that of the action that did not run.
func executed(results []providers.Result, err error) error {
	for _, r := range results {
		if err == nil && r.Outcome != computer.OK {
			err = fmt.Errorf("outcome %s: %w", r.Outcome, r.Error)
		}
	}
	return err
}

// throughBus serves benchID over the provider while fn calls acts, each of
// which returns how long it took from its publication to its `finished`.
func throughBus(ctx context.Context, w *world, p providers.Provider, fn func(context.Context, func(id string) (time.Duration, error)) (clicked, error)) (c clicked, err error) {
	js, err := w.connect(ctx, "callers")
	if err != nil {
		return c, err
	}
	if err := bus.EnsureConsumers(ctx, js, bus.ServerConsumers(benchID, 1000)); err != nil {
		return c, err
	}
	results := make(chan jetstream.Msg, 16)
	cons, err := js.OrderedConsumer(ctx, bus.Results, jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{events.ResultSubject(benchID, "*", "*")}, DeliverPolicy: jetstream.DeliverNewPolicy})
	if err != nil {
		return c, err
	}
	g, running := errgroup.WithContext(ctx)
	running, stop := context.WithCancel(running)
	defer stop()
	cc, err := cons.Consume(func(msg jetstream.Msg) {
		select {
		case results <- msg:
		case <-running.Done():
		}
	})
	if err != nil {
		return c, err
	}
	defer cc.Stop()
	ready := make(chan struct{})
	g.Go(func() error { return serve(running, w, p, 1, func() { close(ready) }) })
	g.Go(func() error {
		defer stop()
		select {
		case <-ready:
		case <-running.Done():
			return nil
		}
		var err error
		c, err = fn(running, func(id string) (time.Duration, error) { return roundtrip(running, js, results, id) })
		return err
	})
	err = g.Wait()
	return c, err
}

// roundtrip publishes one act and waits for its result, which must be ok.
func roundtrip(ctx context.Context, js jetstream.JetStream, results <-chan jetstream.Msg, id string) (time.Duration, error) {
	began := time.Now()
	if err := publishAct(ctx, js, "vm-0", id); err != nil {
		return 0, err
	}
	for {
		select {
		case msg := <-results:
			if !strings.HasSuffix(msg.Subject(), "."+events.Token("/bench", id)) {
				continue
			}
			took := time.Since(began)
			e, err := events.Decode(nil, msg.Data())
			if err != nil {
				return 0, err
			}
			if e.Type() != events.TypeFinished {
				continue
			}
			var f events.Finished
			if err := events.DecodeTolerant(e, &f); err != nil {
				return 0, err
			}
			if f.Outcome != computer.OK {
				return 0, fmt.Errorf("act %s is %s: %w", id, f.Outcome, f.Error)
			}
			return took, nil
		case <-ctx.Done():
			return 0, fmt.Errorf("no result of %s: %w", id, context.Cause(ctx))
		}
	}
}
