package looprunner_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/looprunner/script"
	"berth/internal/natsd"
	"berth/internal/virtualtime"
)

var quiet = slog.New(slog.DiscardHandler)

// rig is a bus, a fake fleet and any number of runners in one bubble.
type rig struct {
	t     *testing.T
	dir   string
	srv   *natsd.Server
	nc    *nats.Conn
	js    jetstream.JetStream
	fleet *fleet

	processes []*process

	mu    sync.Mutex
	dial  nats.InProcessConnProvider // nil: the bus is away
	conns []net.Conn

	thoughts atomic.Int64 // calls of the model, of all runners
}

// bubble runs a test in virtual time. Bubbles with a server cannot run in
// parallel in one process: the server has process-wide goroutines
// (nats-server/v2/server/ats), which belong to the first bubble.
func bubble(t *testing.T, body func(g *rig)) {
	t.Helper()
	bubbleWithout(t, func(g *rig) {
		g.fleet = startFleet(g)
		defer g.fleet.stop()
		defer g.endRunners()
		body(g)
	})
}

// bubbleWithout has no fake fleet.
func bubbleWithout(t *testing.T, body func(g *rig)) {
	t.Helper()
	virtualtime.Test(t, func(t *testing.T) {
		g := &rig{t: t, dir: t.TempDir()}
		g.boot()
		g.nc, g.js = g.connect("test")
		if err := bus.Ensure(t.Context(), g.js, 1); err != nil {
			t.Fatal(err)
		}
		defer func() {
			g.endRunners()
			g.nc.Close()
			g.down()
		}()
		body(g)
	})
}

// endRunners ends the processes that a failed test has left.
func (g *rig) endRunners() {
	for _, p := range g.processes {
		p.kill()
		<-p.done
	}
}

func (g *rig) boot() {
	srv, err := natsd.Start(natsd.Options{StoreDir: g.dir})
	if err != nil {
		g.t.Fatal(err)
	}
	var o nats.Options
	if err := srv.InProcess()(&o); err != nil {
		g.t.Fatal(err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.srv, g.dial = srv, o.InProcessServer
}

// InProcessConn reaches the server that runs at the moment.
func (g *rig) InProcessConn() (net.Conn, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.dial == nil {
		return nil, errors.New("the bus is away")
	}
	c, err := g.dial.InProcessConn()
	if err == nil {
		g.conns = append(g.conns, c)
	}
	return c, err
}

// down shuts the bus down. Its clients are cut off first: a server that shuts
// down sleeps 50 ms with a lock held (signalPullConsumers), and where a request
// waits for that lock just then, a bubble's clock stands still for ever.
func (g *rig) down() {
	g.mu.Lock()
	g.dial = nil
	for _, c := range g.conns {
		_ = c.Close()
	}
	g.conns = nil
	g.mu.Unlock()
	time.Sleep(20 * time.Millisecond)
	g.srv.Shutdown()
}

// connect survives a restart of the server: the connection finds the new one.
func (g *rig) connect(name string) (*nats.Conn, jetstream.JetStream) {
	g.t.Helper()
	return g.connectBy(name, g)
}

func (g *rig) connectBy(name string, dial nats.InProcessConnProvider) (*nats.Conn, jetstream.JetStream) {
	g.t.Helper()
	nc, err := bus.Connect(g.t.Context(), bus.Config{}, name, quiet, nats.InProcessServer(dial))
	if err != nil {
		g.t.Fatal(err)
	}
	js, err := bus.JetStream(nc)
	if err != nil {
		g.t.Fatal(err)
	}
	return nc, js
}

// gate is a process's way to the bus, which can be shut and opened again.
type gate struct {
	g     *rig
	mu    sync.Mutex
	shut  bool
	conns []net.Conn
}

func (w *gate) InProcessConn() (net.Conn, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.shut {
		return nil, errors.New("the gate is shut")
	}
	c, err := w.g.InProcessConn()
	if err == nil {
		w.conns = append(w.conns, c)
	}
	return c, err
}

// set shuts the gate, which cuts what is connected, or opens it.
func (w *gate) set(shut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.shut = shut
	if shut {
		for _, c := range w.conns {
			_ = c.Close()
		}
		w.conns = nil
	}
}

// process is one runner with a connection of its own, so that it can die.
type process struct {
	g    *rig
	nc   *nats.Conn
	gate *gate
	stop context.CancelFunc
	done chan struct{}
	err  error
}

// runner starts a process. hook, where not nil, may kill it at any point.
func (g *rig) runner(name string, hook func(p *process, point, loop string), more ...func(*looprunner.Options)) *process {
	g.t.Helper()
	way := &gate{g: g}
	nc, js := g.connectBy(name, way)
	ctx, cancel := context.WithCancel(context.WithoutCancel(g.t.Context()))
	p := &process{g: g, nc: nc, gate: way, stop: cancel, done: make(chan struct{})}
	o := looprunner.Options{NC: nc, JS: js, Name: name, Log: quiet, Models: map[string]looprunner.ModelFactory{
		"script": g.counted(script.New),
	}}
	if hook != nil {
		o.Hook = func(point, loop string) { hook(p, point, loop) }
	}
	for _, f := range more {
		f(&o)
	}
	r, err := looprunner.New(o)
	if err != nil {
		g.t.Fatal(err)
	}
	g.processes = append(g.processes, p)
	go func() {
		defer close(p.done)
		p.err = r.Run(ctx)
	}()
	return p
}

// kill is kill -9: from now on the process reaches nobody.
func (p *process) kill() {
	p.nc.Close()
	p.stop()
}

// close is SIGTERM.
func (p *process) close() {
	p.g.t.Helper()
	p.stop()
	<-p.done
	if p.err != nil {
		p.g.t.Errorf("Run: %v", p.err)
	}
	p.nc.Close()
}

// counted counts the calls of a model.
func (g *rig) counted(f looprunner.ModelFactory) looprunner.ModelFactory {
	return func(s looprunner.Spec) (looprunner.Model, error) {
		m, err := f(s)
		if err != nil {
			return nil, err
		}
		return thinker(func(ctx context.Context, in looprunner.Turn) (looprunner.Decision, error) {
			g.thoughts.Add(1)
			return m.Think(ctx, in)
		}), nil
	}
}

type thinker func(ctx context.Context, in looprunner.Turn) (looprunner.Decision, error)

func (f thinker) Think(ctx context.Context, in looprunner.Turn) (looprunner.Decision, error) {
	return f(ctx, in)
}

// request publishes a CloudEvent as a service would.
func (g *rig) request(verb events.Verb, id string, data any) {
	g.t.Helper()
	g.requestAs("default", verb, events.LoopType(string(verb)), id, data)
}

func (g *rig) requestAs(tenant string, verb events.Verb, typ, id string, data any) {
	g.t.Helper()
	body := map[string]any{"specversion": "1.0", "type": typ, "source": "/test", "id": id, "datacontenttype": "application/json", "data": data}
	var raw bytes.Buffer
	enc := json.NewEncoder(&raw)
	enc.SetEscapeHTML(false) // as other languages write it
	if err := enc.Encode(body); err != nil {
		g.t.Fatal(err)
	}
	msg := nats.NewMsg(events.RequestSubject(tenant, "loop", verb))
	msg.Header.Set("Content-Type", "application/cloudevents+json")
	msg.Data = raw.Bytes()
	g.publish(msg)
}

func (g *rig) publish(msg *nats.Msg) {
	g.t.Helper()
	for attempt := 0; ; attempt++ {
		_, err := g.js.PublishMsg(g.t.Context(), msg)
		if err == nil {
			return
		}
		if attempt == 100 {
			g.t.Errorf("publish %s: %v", msg.Subject, err)
			return
		}
		time.Sleep(200 * time.Millisecond) // the bus may be away
	}
}

type object = map[string]any

// start requests a loop with a script.
func (g *rig) start(loop, items string, more object) {
	g.t.Helper()
	data := object{"loopId": loop, "model": object{"name": "script"}, "script": json.RawMessage(items)}
	for k, v := range more {
		data[k] = v
	}
	g.request(events.Start, "start-"+loop, data)
}

// journal reads a loop's journal to its end.
func (g *rig) journal(loop string) []looprunner.Entry {
	g.t.Helper()
	return g.journalUntil(loop, func(looprunner.Entry) bool { return false })
}

func (g *rig) journalUntil(loop string, enough func(looprunner.Entry) bool) []looprunner.Entry {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(g.t.Context(), 3*time.Hour)
	defer cancel()
	var out []looprunner.Entry
	for e, err := range looprunner.Follow(ctx, g.js, "default", loop) {
		if err != nil {
			g.t.Fatalf("follow %s after %s: %v", loop, names(out), err)
		}
		out = append(out, e)
		if enough(e) {
			break
		}
	}
	return out
}

func (g *rig) until(loop, name string) []looprunner.Entry {
	g.t.Helper()
	return g.journalUntil(loop, func(e looprunner.Entry) bool { return e.Name == name })
}

// finished waits for a loop's end and checks it.
func (g *rig) finished(loop, outcome, code string) ([]looprunner.Entry, events.LoopFinished) {
	g.t.Helper()
	j := g.journal(loop)
	f := decode[events.LoopFinished](g.t, j[len(j)-1])
	if f.Outcome != outcome || f.Code != code {
		g.t.Fatalf("loop %s ended %s (%s: %s), want %s (%s); journal %s", loop, f.Outcome, f.Code, f.Message, outcome, code, names(j))
	}
	return j, f
}

func decode[T any](t *testing.T, e looprunner.Entry) T {
	t.Helper()
	var v T
	if err := e.Decode(&v); err != nil {
		t.Fatalf("%s: %v", e.Name, err)
	}
	return v
}

func names(j []looprunner.Entry) string {
	out := make([]string, len(j))
	for i, e := range j {
		out[i] = e.Name
	}
	return strings.Join(out, " ")
}

// waitingMutex is a mutex whose holder may wait for time: who waits for a
// sync.Mutex keeps a bubble's clock from moving.
type waitingMutex struct {
	once sync.Once
	held chan struct{}
}

func (m *waitingMutex) Lock() {
	m.once.Do(func() { m.held = make(chan struct{}, 1) })
	m.held <- struct{}{}
}

func (m *waitingMutex) Unlock() { <-m.held }

// fleet plays the scheduler and a worker on the real streams: it makes a
// sandbox for every create, claims and executes commands, one sandbox at a
// time in order, and keeps the record that tests judge by.
type fleet struct {
	g      *rig
	cancel context.CancelFunc
	done   sync.WaitGroup
	js     jetstream.JetStream
	nc     *nats.Conn

	mu      waitingMutex
	boxes   map[string]*fakeSandbox
	creates []string
	kills   []string
	// script of behaviour
	refuse   func(vm string, data events.SandboxCreate) *events.Ended
	onAct    func(vm string, n int, a []computer.Action) *events.Finished // nil: ok
	readyIn  time.Duration
	actTakes time.Duration
	silent   bool // takes no commands
	noPics   bool // act results have no observation

	flicker   bool   // no two pictures are the same
	lateTitle string // every sandbox's title from its fifth observation on
	colour    color.RGBA
}

type fakeSandbox struct {
	vm, tenant string
	server     string
	request    events.Request
	display    computer.Display
	acts       []computer.Action // in order of effect: the oracle
	text, url  string
	clip       string
	dialogs    []computer.Dialog
	observes   int
	calls      int
	ended      bool
	titleAt    map[int]string // title from the n-th observation on
	colour     color.RGBA
}

func startFleet(g *rig) *fleet {
	f := &fleet{g: g, boxes: map[string]*fakeSandbox{}, colour: color.RGBA{10, 20, 30, 255}}
	f.nc, f.js = g.connect("fleet")
	ctx, cancel := context.WithCancel(context.WithoutCancel(g.t.Context()))
	f.cancel = cancel
	specs := append([]bus.ConsumerSpec{}, bus.ServerConsumers("fake-01", 10)...)
	if err := bus.EnsureConsumers(ctx, f.js, specs); err != nil {
		g.t.Fatal(err)
	}
	f.done.Go(func() { f.consume(ctx, bus.Requests, bus.SchedulerConsumer, f.request) })
	f.done.Go(func() { f.consume(ctx, bus.Commands, "fake-01", f.command) })
	return f
}

func (f *fleet) stop() {
	f.cancel()
	f.done.Wait()
	f.nc.Close()
}

// consume survives restarts of the server.
func (f *fleet) consume(ctx context.Context, stream, name string, handle func(context.Context, jetstream.Msg)) {
	for ctx.Err() == nil {
		c, err := f.js.Consumer(ctx, stream, name)
		if err == nil {
			var it jetstream.MessagesContext
			if it, err = c.Messages(jetstream.PullMaxMessages(16), jetstream.PullHeartbeat(time.Second), jetstream.PullExpiry(5*time.Second)); err == nil {
				stop := context.AfterFunc(ctx, it.Stop)
				for {
					msg, err := it.Next()
					if err != nil {
						break
					}
					handle(ctx, msg)
				}
				stop()
				it.Stop()
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (f *fleet) announce(ctx context.Context, tenant, vm, name string, data any) {
	stream, err := f.js.Stream(ctx, bus.Events)
	if err != nil {
		return
	}
	id := vm + "-" + name
	if ended, ok := data.(events.Ended); ok {
		id += "-" + ended.Request.Token()
	}
	e, err := events.New(events.SandboxType(name), events.SourceScheduler, id, data)
	if err == nil {
		err = bus.Announce(ctx, f.js, stream, events.EventSubject(tenant, vm, name), e)
	}
	if err != nil && ctx.Err() == nil {
		f.g.t.Errorf("fleet: announce %s: %v", name, err)
	}
}

// request plays the scheduler.
func (f *fleet) request(ctx context.Context, msg jetstream.Msg) {
	defer func() { _ = msg.Ack() }()
	p, err := events.ParseRequest(msg.Subject())
	if err != nil {
		f.g.t.Errorf("fleet: %v", err)
		return
	}
	e, err := events.Decode(msg.Headers(), msg.Data())
	if err != nil {
		f.g.t.Errorf("fleet: %v", err)
		return
	}
	switch p.Verb {
	case events.Create:
		var c events.SandboxCreate
		if err := events.DecodeStrict(e, &c); err != nil {
			f.g.t.Errorf("fleet: create: %v", err)
		}
		f.create(ctx, p.Tenant, c, events.RequestOf(e))
	case events.Kill:
		var k events.SandboxKill
		if err := events.DecodeStrict(e, &k); err != nil {
			f.g.t.Errorf("fleet: kill: %v", err)
		}
		f.mu.Lock()
		b := f.boxes[k.VMID]
		other := k.Request != nil && b != nil && b.request != *k.Request
		if !other {
			f.kills = append(f.kills, k.VMID)
		}
		f.mu.Unlock()
		if other {
			f.announce(ctx, p.Tenant, k.VMID, events.EventRejected, events.Ended{VMID: k.VMID, Code: events.CodeNotFound, Message: "another request's", Request: events.RequestOf(e)})
			return
		}
		f.end(ctx, k.VMID, events.EventKilled, events.CodeKilled)
	}
}

func (f *fleet) create(ctx context.Context, tenant string, c events.SandboxCreate, id events.Request) {
	f.mu.Lock()
	f.creates = append(f.creates, c.VMID)
	refuse := f.refuse
	before := f.boxes[c.VMID]
	wait := f.readyIn
	f.mu.Unlock()
	if before != nil {
		if before.request != id {
			f.done.Go(func() {
				select {
				case <-ctx.Done():
				case <-time.After(wait):
					f.announce(ctx, tenant, c.VMID, events.EventRejected, events.Ended{VMID: c.VMID, Code: events.CodeVMIDInUse, Message: "it is another's", Request: id})
				}
			})
		}
		return
	}
	if refuse != nil {
		if ended := refuse(c.VMID, c); ended != nil {
			ended.VMID, ended.Request = c.VMID, id
			f.announce(ctx, tenant, c.VMID, events.EventRejected, *ended)
			return
		}
	}
	d := computer.DefaultDisplay
	if c.Display != nil {
		d = *c.Display
	}
	f.mu.Lock()
	b := &fakeSandbox{vm: c.VMID, tenant: tenant, server: "fake-01", request: id, display: d, url: "about:blank", titleAt: map[int]string{}, colour: f.colour}
	if f.lateTitle != "" {
		b.titleAt[5] = f.lateTitle
	}
	f.boxes[c.VMID] = b
	f.mu.Unlock()
	f.done.Go(func() {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		f.announce(ctx, tenant, c.VMID, events.EventReady, events.Placed{VMID: c.VMID, ServerID: "fake-01", Fence: 7, Explanation: "the only one",
			Display: &d, Capabilities: []string{"browser"}, Request: id})
	})
}

// end ends a sandbox by itself.
func (f *fleet) end(ctx context.Context, vm, name, code string) {
	f.mu.Lock()
	b := f.boxes[vm]
	if b == nil || b.ended {
		f.mu.Unlock()
		return
	}
	b.ended = true
	tenant, id := b.tenant, b.request
	f.mu.Unlock()
	f.announce(ctx, tenant, vm, name, events.Ended{VMID: vm, ServerID: "fake-01", Code: code, Message: "because", Request: id})
}

// command plays the worker: claim, execute, finish, acknowledge.
func (f *fleet) command(ctx context.Context, msg jetstream.Msg) {
	f.mu.Lock()
	silent := f.silent
	f.mu.Unlock()
	if silent {
		_ = msg.Ack()
		return
	}
	defer func() { _ = msg.Ack() }()
	p, err := events.ParseCommand(msg.Subject())
	if err != nil {
		f.g.t.Errorf("fleet: %v", err)
		return
	}
	e, err := events.Decode(msg.Headers(), msg.Data())
	if err != nil {
		f.g.t.Errorf("fleet: %v", err)
		return
	}
	var c events.Command
	if err := events.DecodeStrict(e, &c); err != nil {
		f.g.t.Errorf("fleet: command: %v", err)
		return
	}
	id := events.RequestOf(e)
	subject := events.ResultSubject(p.Server, p.VM, id.Token())
	claim, ok := f.result(ctx, subject, 0, events.TypeStarted, events.Started{CommandID: id.ID, Source: id.Source, Command: p.Verb, Worker: "w", Fence: 7, Request: id})
	if !ok {
		return
	}
	began := time.Now()
	done := f.execute(ctx, p, c)
	done.CommandID, done.Source, done.Command, done.Request = id.ID, id.Source, p.Verb, id
	done.Timing = events.Timing{StartedAt: &began, FinishedAt: time.Now()}
	f.result(ctx, subject, claim, events.TypeFinished, done)
}

// result publishes until it knows.
func (f *fleet) result(ctx context.Context, subject string, last uint64, typ string, data any) (uint64, bool) {
	e, err := events.New(typ, events.SourceWorker, subject+typ, data)
	if err != nil {
		f.g.t.Errorf("fleet: %v", err)
		return 0, false
	}
	msg, err := events.NewMessage(ctx, subject, e)
	if err != nil {
		f.g.t.Errorf("fleet: %v", err)
		return 0, false
	}
	for attempt := 0; ctx.Err() == nil; attempt++ {
		seq, err := bus.PublishExpecting(ctx, f.js, msg, last)
		if err == nil {
			return seq, true
		}
		if bus.IsWrongSequence(err) || strings.Contains(err.Error(), "taken") {
			return 0, false
		}
		_ = bus.Pause(ctx, attempt)
	}
	return 0, false
}

func (f *fleet) execute(ctx context.Context, p events.CommandPath, c events.Command) events.Finished {
	f.mu.Lock()
	defer f.mu.Unlock()
	b := f.boxes[p.VM]
	reject := func(code, message string) events.Finished {
		return events.Finished{Outcome: computer.Rejected, Error: &computer.Fault{Code: code, Message: message}}
	}
	switch {
	case b == nil || b.ended:
		return reject(events.CodeNotFound, "no such sandbox")
	case c.Fence == nil || *c.Fence != 7:
		return reject(events.CodeFenceStale, "another fence")
	case c.Deadline == nil || time.Now().After(*c.Deadline):
		return reject(events.CodeDeadline, "too late")
	case p.Verb == events.Observe:
		return events.Finished{Outcome: computer.OK, Observation: f.observe(ctx, b)}
	}
	actions, err := computer.DecodeActions(c.Actions)
	if err != nil {
		return reject(events.CodeBadInput, err.Error())
	}
	if f.actTakes > 0 {
		f.mu.Unlock()
		time.Sleep(f.actTakes)
		f.mu.Lock()
	}
	b.calls++
	if f.onAct != nil {
		if done := f.onAct(p.VM, b.calls, actions); done != nil {
			if done.Outcome != computer.Rejected {
				b.acts = append(b.acts, actions...)
			}
			return *done
		}
	}
	done := events.Finished{Outcome: computer.OK}
	for _, a := range actions {
		done.Actions = append(done.Actions, b.apply(a))
	}
	if !f.noPics {
		done.Observation = f.observe(ctx, b)
	}
	return done
}

func (b *fakeSandbox) apply(a computer.Action) computer.ActionResult {
	b.acts = append(b.acts, a)
	r := computer.ActionResult{Outcome: computer.OK}
	switch a.Type {
	case computer.TypeText:
		b.text += *a.Text
		if strings.HasPrefix(*a.Text, "alert:") {
			b.dialogs = append(b.dialogs, computer.Dialog{Kind: "alert", Message: *a.Text, Answer: "accepted"})
		}
	case computer.Open:
		b.url = a.Target
	case computer.ClipboardWrite:
		b.clip = *a.Text
	case computer.ClipboardRead:
		r.Value, _ = json.Marshal(b.clip)
	case computer.Cursor:
		r.Value = json.RawMessage(`{"x": 1, "y": 2}`)
	}
	return r
}

// observe takes a picture; the caller holds f.mu.
func (f *fleet) observe(ctx context.Context, b *fakeSandbox) *computer.Observation {
	b.observes++
	title := b.text
	for from, t := range b.titleAt {
		if b.observes >= from {
			title = t
		}
	}
	shade := b.colour
	if f.flicker {
		shade.B = uint8(b.observes)
	}
	img := image.NewPaletted(image.Rect(0, 0, 40, 30), color.Palette{shade})
	var buf bytes.Buffer
	if err := png.Encode(&buf, img); err != nil {
		f.g.t.Errorf("fleet: %v", err)
	}
	object := fmt.Sprintf("%s/%d", b.vm, b.observes)
	f.put(ctx, object, buf.Bytes())
	o := &computer.Observation{Screenshot: computer.Picture{Object: object, MediaType: "image/png", Width: 40, Height: 30, SHA256: fmt.Sprintf("%x", sha256.Sum256(buf.Bytes()))},
		URL: b.url, Title: title, Dialogs: b.dialogs, Pages: []computer.Page{{URL: b.url, Active: true}}, TakenAt: time.Now()}
	b.dialogs = nil
	return o
}

// put stores an object as ObjectStore.Put does. That itself would leave a
// goroutine behind now and then: its publisher's may read the status channel
// after Put has let it go, and then waits for ever on nil (nats.go 1.55.0,
// jetstream/publish.go resetPendingAcksOnReconnect), which ends a bubble.
func (f *fleet) put(ctx context.Context, name string, data []byte) {
	id := strings.ReplaceAll(name, "/", "-")
	sum := sha256.Sum256(data)
	info, err := json.Marshal(map[string]any{"name": name, "bucket": "FRAMES", "nuid": id, "size": len(data), "chunks": 1,
		"digest": "SHA-256=" + base64.URLEncoding.EncodeToString(sum[:])})
	if err != nil {
		f.g.t.Errorf("fleet: %v", err)
	}
	meta := nats.NewMsg("$O.FRAMES.M." + base64.URLEncoding.EncodeToString([]byte(name)))
	meta.Header.Set("Nats-Rollup", "sub")
	meta.Data = info
	for _, msg := range []*nats.Msg{{Subject: "$O.FRAMES.C." + id, Data: data}, meta} {
		if _, err := f.js.PublishMsg(ctx, msg); err != nil && ctx.Err() == nil {
			f.g.t.Logf("fleet: frame: %v", err)
		}
	}
}

// acts is the oracle: what took effect in a sandbox, as types.
func (f *fleet) acts(vm string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	b := f.boxes[vm]
	if b == nil {
		return "no sandbox"
	}
	var out []string
	for _, a := range b.acts {
		s := string(a.Type)
		if a.Text != nil {
			s += ":" + *a.Text
		}
		out = append(out, s)
	}
	return strings.Join(out, " ")
}

func (f *fleet) set(change func(f *fleet)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

func (f *fleet) killed(vm string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Contains(f.kills, vm)
}

// vmOf is the derived vm id of a loop of tenant default.
func vmOf(loop string) string {
	return events.DerivedVMID("default", events.SourceLoopRunner, "default."+loop+".create")
}
