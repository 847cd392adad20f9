package thinkertest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
)

// World is a bus with the real streams, and a fake scheduler and worker that
// make a sandbox for every request and carry out what they are told. Tests run
// real loop-runners in it, in real time, because models talk over sockets.
type World struct {
	T       testing.TB
	JS      jetstream.JetStream
	NC      *nats.Conn
	Display computer.Display

	dial  nats.Option
	log   *slog.Logger
	mu    sync.Mutex
	acts  map[string][]computer.Action // by sandbox, in order of effect
	made  map[string]events.Request    // by sandbox: the request that made it
	shots int
	work  sync.WaitGroup
}

// NewWorld makes a world on a server that dial reaches. It ends with the test.
func NewWorld(t testing.TB, dial nats.Option) *World {
	w := &World{T: t, Display: computer.DefaultDisplay, dial: dial, log: slog.New(slog.DiscardHandler), acts: map[string][]computer.Action{}, made: map[string]events.Request{}}
	w.NC, w.JS = w.connect("world")
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	if err := bus.Ensure(ctx, w.JS, 1); err != nil {
		t.Fatal(err)
	}
	if err := bus.EnsureConsumers(ctx, w.JS, bus.ServerConsumers("fake-01", 10)); err != nil {
		t.Fatal(err)
	}
	w.work.Go(func() { w.consume(ctx, bus.Requests, bus.SchedulerConsumer, w.request) })
	w.work.Go(func() { w.consume(ctx, bus.Commands, "fake-01", w.command) })
	t.Cleanup(func() {
		stop()
		w.work.Wait()
		w.NC.Close()
	})
	return w
}

func (w *World) connect(name string) (*nats.Conn, jetstream.JetStream) {
	nc, err := bus.Connect(w.T.Context(), bus.Config{}, name, w.log, w.dial)
	if err != nil {
		w.T.Fatal(err)
	}
	js, err := bus.JetStream(nc)
	if err != nil {
		w.T.Fatal(err)
	}
	return nc, js
}

// Runner starts a loop-runner process with these models. hook, where not nil,
// is called at every point of every loop; die cuts the process off for good.
func (w *World) Runner(name string, models map[string]looprunner.ModelFactory, hook func(point string, die func())) {
	nc, js := w.connect(name)
	o := looprunner.Options{NC: nc, JS: js, Name: name, Models: models, Log: w.log}
	if hook != nil {
		o.Hook = func(point, _ string) { hook(point, nc.Close) }
	}
	r, err := looprunner.New(o)
	if err != nil {
		w.T.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(w.T.Context()))
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := r.Run(ctx); err != nil {
			w.T.Errorf("runner %s: %v", name, err)
		}
	}()
	w.T.Cleanup(func() {
		stop()
		<-done
		nc.Close()
	})
}

// Start requests a loop.
func (w *World) Start(loop, goal, model string) {
	w.T.Helper()
	w.publish("start-"+loop, events.Start, events.TypeLoopStart, map[string]any{"loopId": loop, "goal": goal, "model": json.RawMessage(model),
		"sandbox": map[string]any{"display": w.Display}})
}

// Say sends a message to a loop.
func (w *World) Say(loop, text string) {
	w.T.Helper()
	w.publish("say-"+loop, events.Message, events.TypeLoopMessage, map[string]any{"loopId": loop, "text": text})
}

func (w *World) publish(id string, verb events.Verb, typ string, data any) {
	w.T.Helper()
	e, err := events.New(typ, "/test", id, data)
	if err != nil {
		w.T.Fatal(err)
	}
	msg, err := events.NewMessage(w.T.Context(), events.RequestSubject("default", "loop", verb), e)
	if err != nil {
		w.T.Fatal(err)
	}
	if _, err := w.JS.PublishMsg(w.T.Context(), msg); err != nil {
		w.T.Fatal(err)
	}
}

// Until reads a loop's journal up to the first entry with this name.
func (w *World) Until(loop, name string) []looprunner.Entry {
	w.T.Helper()
	ctx, cancel := context.WithTimeout(w.T.Context(), time.Minute)
	defer cancel()
	var out []looprunner.Entry
	for e, err := range looprunner.Follow(ctx, w.JS, "default", loop) {
		if err != nil {
			w.T.Fatalf("journal of %s: %v after %s", loop, err, Names(out))
		}
		out = append(out, e)
		if e.Name == name {
			return out
		}
	}
	w.T.Fatalf("journal of %s ended without %s: %s", loop, name, Names(out))
	return nil
}

// Finished waits for a loop's end.
func (w *World) Finished(loop string) ([]looprunner.Entry, events.LoopFinished) {
	w.T.Helper()
	j := w.Until(loop, events.LoopFinishedName)
	var f events.LoopFinished
	if err := j[len(j)-1].Decode(&f); err != nil {
		w.T.Fatal(err)
	}
	return j, f
}

// Names lists the entries of a journal.
func Names(j []looprunner.Entry) string {
	out := make([]string, len(j))
	for i, e := range j {
		out[i] = e.Name
	}
	return strings.Join(out, " ")
}

// Acts is what took effect in the sandbox of a journal's loop, in short.
func (w *World) Acts(j []looprunner.Entry) string {
	w.T.Helper()
	var started events.LoopStarted
	if err := j[0].Decode(&started); err != nil {
		w.T.Fatal(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	parts := make([]string, len(w.acts[started.VMID]))
	for i, a := range w.acts[started.VMID] {
		parts[i] = string(a.Type)
		switch {
		case a.Text != nil:
			parts[i] += ":" + *a.Text
		case a.X != nil:
			parts[i] += fmt.Sprintf(":%d,%d", *a.X, *a.Y)
		case len(a.Keys) > 0:
			parts[i] += ":" + strings.Join(a.Keys, "+")
		case a.Target != "":
			parts[i] += ":" + a.Target
		}
	}
	return strings.Join(parts, " ")
}

func (w *World) consume(ctx context.Context, stream, name string, handle func(context.Context, jetstream.Msg) error) {
	c, err := w.JS.Consumer(ctx, stream, name)
	if err != nil {
		w.T.Errorf("consumer %s: %v", name, err)
		return
	}
	it, err := c.Messages(jetstream.PullMaxMessages(16))
	if err != nil {
		w.T.Errorf("consumer %s: %v", name, err)
		return
	}
	defer it.Stop()
	for {
		msg, err := it.Next(jetstream.NextContext(ctx))
		if err != nil {
			if ctx.Err() == nil {
				w.T.Errorf("consumer %s: %v", name, err)
			}
			return
		}
		if err := handle(ctx, msg); err != nil && ctx.Err() == nil {
			w.T.Errorf("%s: %v", msg.Subject(), err)
		}
		if err := msg.Ack(); err != nil && ctx.Err() == nil {
			w.T.Errorf("ack: %v", err)
		}
	}
}

// request plays the scheduler.
func (w *World) request(ctx context.Context, msg jetstream.Msg) error {
	p, err := events.ParseRequest(msg.Subject())
	if err != nil {
		return err
	}
	e, err := events.Decode(msg.Headers(), msg.Data())
	if err != nil {
		return err
	}
	switch p.Verb {
	case events.Create:
		var c events.SandboxCreate
		if err := events.DecodeStrict(e, &c); err != nil {
			return err
		}
		w.mu.Lock()
		w.made[c.VMID] = events.RequestOf(e)
		w.mu.Unlock()
		return w.announce(ctx, p.Tenant, c.VMID, events.EventReady, events.Placed{VMID: c.VMID, ServerID: "fake-01", Fence: 7, Display: &w.Display,
			Capabilities: []string{"browser"}, Request: events.RequestOf(e)})
	case events.Kill:
		var k events.SandboxKill
		if err := events.DecodeStrict(e, &k); err != nil {
			return err
		}
		w.mu.Lock()
		made := w.made[k.VMID]
		w.mu.Unlock()
		return w.announce(ctx, p.Tenant, k.VMID, events.EventKilled, events.Ended{VMID: k.VMID, ServerID: "fake-01", Code: events.CodeKilled, Message: "on request", Request: made})
	}
	return nil
}

func (w *World) announce(ctx context.Context, tenant, vm, name string, data any) error {
	stream, err := w.JS.Stream(ctx, bus.Events)
	if err != nil {
		return err
	}
	e, err := events.New(events.SandboxType(name), events.SourceScheduler, vm+"-"+name, data)
	if err != nil {
		return err
	}
	return bus.Announce(ctx, w.JS, stream, events.EventSubject(tenant, vm, name), e)
}

// command plays the worker: claim, execute, finish.
func (w *World) command(ctx context.Context, msg jetstream.Msg) error {
	p, err := events.ParseCommand(msg.Subject())
	if err != nil {
		return err
	}
	e, err := events.Decode(msg.Headers(), msg.Data())
	if err != nil {
		return err
	}
	var c events.Command
	if err := events.DecodeStrict(e, &c); err != nil {
		return err
	}
	id := events.RequestOf(e)
	subject := events.ResultSubject(p.Server, p.VM, id.Token())
	claim, err := w.result(ctx, subject, 0, events.TypeStarted, events.Started{CommandID: id.ID, Source: id.Source, Command: p.Verb, Worker: "w", Fence: 7, Request: id})
	if bus.IsWrongSequence(err) {
		return nil // somebody has it
	}
	if err != nil {
		return err
	}
	now := time.Now()
	done := events.Finished{CommandID: id.ID, Source: id.Source, Command: p.Verb, Request: id, Outcome: computer.OK, Timing: events.Timing{StartedAt: &now, FinishedAt: now}}
	if p.Verb == events.Act {
		actions, err := computer.DecodeActions(c.Actions)
		if err != nil {
			return err
		}
		w.mu.Lock()
		w.acts[p.VM] = append(w.acts[p.VM], actions...)
		w.mu.Unlock()
		for range actions {
			done.Actions = append(done.Actions, computer.ActionResult{Outcome: computer.OK})
		}
	}
	if done.Observation, err = w.observe(ctx, p.VM); err != nil {
		return err
	}
	_, err = w.result(ctx, subject, claim, events.TypeFinished, done)
	return err
}

func (w *World) result(ctx context.Context, subject string, last uint64, typ string, data any) (uint64, error) {
	e, err := events.New(typ, events.SourceWorker, subject+typ, data)
	if err != nil {
		return 0, err
	}
	msg, err := events.NewMessage(ctx, subject, e)
	if err != nil {
		return 0, err
	}
	return bus.PublishExpecting(ctx, w.JS, msg, last)
}

// observe stores a picture in FRAMES.
func (w *World) observe(ctx context.Context, vm string) (*computer.Observation, error) {
	w.mu.Lock()
	w.shots++
	n := w.shots
	w.mu.Unlock()
	img := image.NewPaletted(image.Rect(0, 0, w.Display.Width, w.Display.Height), color.Palette{color.RGBA{uint8(n), 30, 60, 255}, color.White})
	var buf bytes.Buffer
	if err := png.Encode(&buf, img); err != nil {
		return nil, err
	}
	store, err := w.JS.ObjectStore(ctx, "FRAMES")
	if err != nil {
		return nil, err
	}
	object := fmt.Sprintf("%s/%d", vm, n)
	if _, err := store.PutBytes(ctx, object, buf.Bytes()); err != nil {
		return nil, err
	}
	return &computer.Observation{Screenshot: computer.Picture{Object: object, MediaType: "image/png", Width: w.Display.Width, Height: w.Display.Height, Bytes: buf.Len()},
		Title: fmt.Sprintf("Page %d", n), TakenAt: time.Now()}, nil
}
