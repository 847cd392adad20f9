package looprunner_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/natsd"
)

// bench is a bus on the real clock with a fleet that does nothing, as fast as
// it can.
type bench struct {
	b   *testing.B
	srv *natsd.Server
	js  jetstream.JetStream
}

func newBench(b *testing.B) *bench {
	srv, err := natsd.Start(natsd.Options{StoreDir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(srv.Shutdown)
	g := &bench{b: b, srv: srv}
	g.js = g.connect("bench")
	if err := bus.Ensure(b.Context(), g.js, 1); err != nil {
		b.Fatal(err)
	}
	if err := bus.EnsureConsumers(b.Context(), g.js, bus.ServerConsumers("fake-01", 1000)); err != nil {
		b.Fatal(err)
	}
	fleet := g.connect("fleet")
	g.consume(fleet, bus.Requests, bus.SchedulerConsumer, func(msg jetstream.Msg, e events.Event) {
		var c events.SandboxCreate
		p, err := events.ParseRequest(msg.Subject())
		if err != nil || p.Verb != events.Create || json.Unmarshal(e.Data(), &c) != nil {
			return
		}
		g.say(fleet, events.EventSubject(p.Tenant, c.VMID, "ready"), events.SandboxType("ready"), events.Placed{VMID: c.VMID, ServerID: "fake-01", Fence: 7, Request: events.RequestOf(e)})
	})
	g.consume(fleet, bus.Commands, "fake-01", func(msg jetstream.Msg, e events.Event) {
		p, err := events.ParseCommand(msg.Subject())
		if err != nil {
			return
		}
		id := events.RequestOf(e)
		subject := events.ResultSubject(p.Server, p.VM, id.Token())
		g.say(fleet, subject, events.TypeStarted, events.Started{CommandID: id.ID})
		g.say(fleet, subject, events.TypeFinished, events.Finished{Outcome: computer.OK, Observation: &computer.Observation{Title: "x", TakenAt: time.Now()}})
	})
	return g
}

func (g *bench) connect(name string) jetstream.JetStream {
	nc, err := nats.Connect("", g.srv.InProcess(), nats.Name(name))
	if err != nil {
		g.b.Fatal(err)
	}
	g.b.Cleanup(nc.Close)
	js, err := bus.JetStream(nc)
	if err != nil {
		g.b.Fatal(err)
	}
	return js
}

func (g *bench) consume(js jetstream.JetStream, stream, name string, handle func(jetstream.Msg, events.Event)) {
	c, err := js.Consumer(g.b.Context(), stream, name)
	if err != nil {
		g.b.Fatal(err)
	}
	slots := make(chan struct{}, 64)
	cc, err := c.Consume(func(msg jetstream.Msg) {
		slots <- struct{}{}
		go func() {
			defer func() { <-slots }()
			if e, err := events.Decode(msg.Headers(), msg.Data()); err == nil {
				handle(msg, e)
			}
			_ = msg.Ack()
		}()
	})
	if err != nil {
		g.b.Fatal(err)
	}
	g.b.Cleanup(cc.Stop)
}

func (g *bench) say(js jetstream.JetStream, subject, typ string, data any) {
	e, err := events.New(typ, events.SourceWorker, "x", data)
	if err != nil {
		g.b.Error(err)
		return
	}
	msg, err := events.NewMessage(context.Background(), subject, e)
	if err == nil {
		_, err = js.PublishMsg(context.Background(), msg)
	}
	if err != nil && !strings.Contains(err.Error(), "closed") {
		g.b.Error(err)
	}
}

// steps is a model that acts n times.
func steps(n int) looprunner.ModelFactory {
	return func(looprunner.Spec) (looprunner.Model, error) {
		return thinker(func(_ context.Context, in looprunner.Turn) (looprunner.Decision, error) {
			if in.Step > n {
				return looprunner.Decision{Done: true}, nil
			}
			return looprunner.Decision{Actions: []computer.Action{{Type: computer.Cursor}}}, nil
		}), nil
	}
}

func (g *bench) run(name string, n int) (stop func()) {
	js := g.connect(name)
	r, err := looprunner.New(looprunner.Options{NC: js.Conn(), JS: js, Name: name, Models: map[string]looprunner.ModelFactory{"noop": steps(n)}})
	if err != nil {
		g.b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	return func() {
		cancel()
		if err := <-done; err != nil {
			g.b.Error(err)
		}
	}
}

func (g *bench) start(loop string) {
	e, err := events.New(events.TypeLoopStart, "/bench", loop, object{"loopId": loop, "model": object{"name": "noop"}, "keep": true, "limits": object{"steps": 10000}})
	if err != nil {
		g.b.Fatal(err)
	}
	msg, err := events.NewMessage(g.b.Context(), events.RequestSubject("default", "loop", events.Start), e)
	if err == nil {
		_, err = g.js.PublishMsg(g.b.Context(), msg)
	}
	if err != nil {
		g.b.Fatal(err)
	}
}

// One loop alone: the time of a step, from one thinking to the next.
func BenchmarkStep(b *testing.B) {
	const n = 1000
	for range b.N {
		g := newBench(b)
		stop := g.run("a", n)
		g.start("l")
		var took []time.Duration
		var last time.Time
		for e, err := range looprunner.Follow(b.Context(), g.js, "default", "l") {
			if err != nil {
				b.Fatal(err)
			}
			if e.Name == "thinking" {
				if !last.IsZero() {
					took = append(took, e.Stored.Sub(last))
				}
				last = e.Stored
			}
		}
		stop()
		slices.Sort(took)
		b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
		b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
	}
}

// 200 loops in one process.
func BenchmarkStepsOf200Loops(b *testing.B) {
	const loops, n = 200, 50
	for range b.N {
		g := newBench(b)
		stop := g.run("a", n)
		began := time.Now()
		for i := range loops {
			g.start(fmt.Sprintf("l%d", i))
		}
		for i := range loops {
			for _, err := range looprunner.Follow(b.Context(), g.js, "default", fmt.Sprintf("l%d", i)) {
				if err != nil {
					b.Fatal(err)
				}
			}
		}
		b.ReportMetric(loops*n/time.Since(began).Seconds(), "steps/s")
		stop()
	}
}

// Taking over a loop with a journal of 500 steps, from the lease's release to
// the first entry of the successor.
func BenchmarkResume(b *testing.B) {
	const n = 500
	for range b.N {
		g := newBench(b)
		stop := g.run("a", 1_000_000)
		g.start("l")
		for e, err := range looprunner.Follow(b.Context(), g.js, "default", "l") {
			if err != nil {
				b.Fatal(err)
			}
			if e.Head.Step == n {
				break
			}
		}
		stop()
		began := time.Now()
		stop = g.run("b", 0)
		var first time.Time
		for e, err := range looprunner.Follow(b.Context(), g.js, "default", "l") {
			if err != nil {
				b.Fatal(err)
			}
			if e.Head.Runner == "b" && first.IsZero() {
				first = e.Stored
				b.ReportMetric(float64(e.Stored.Sub(began).Microseconds())/1000, "ms")
				b.ReportMetric(float64(e.Head.Step), "steps")
			}
		}
		stop()
	}
}
