package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"berth/internal/bus"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/scheduler"
)

// inFlight is how many requests the requesters have open at once, and how many
// chains the floor has; the scheduler works on as many.
const inFlight = 64

var durableServers = []int{100, 1000, 5000}

// placementDurable measures from a create request's publication to the receipt
// of its `placed`, all writes between acknowledged. The floor does the same
// chain of dependent writes with bare nats.go: the sandbox's record, the
// server's record by compare-and-set, the sandbox's record again, the event,
// the command.
func placementDurable(ctx context.Context, opts options, print func(figure)) error {
	for _, sync := range []bool{false, true} {
		for _, servers := range durableServers {
			name, wanted := opts.figureName("placement_durable", fmt.Sprintf("servers=%d/%s", servers, mode(sync)))
			if !wanted {
				continue
			}
			n := int(6000 * opts.seconds) // the first second or so is warming up
			if sync {
				n /= 5
			}
			got, err := durableWorld(ctx, sync, servers, n, placeByScheduler)
			if err != nil {
				return err
			}
			floor, err := durableWorld(ctx, sync, servers, n, placeByFloor)
			if err != nil {
				return fmt.Errorf("floor: %w", err)
			}
			print(compare(name, got, "same chain of writes, bare nats.go", floor))
		}
	}
	return nil
}

// placerFunc serves create requests until ctx ends; it calls ready when it can.
type placerFunc func(ctx context.Context, w *world, servers int, ready func()) error

func durableWorld(ctx context.Context, sync bool, servers, n int, place placerFunc) (sample, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	w, err := newWorld(ctx, sync)
	if err != nil {
		return sample{}, err
	}
	s, err := measurePlacements(ctx, w, servers, n, place)
	return s, errors.Join(err, w.close())
}

func measurePlacements(ctx context.Context, w *world, servers, n int, place placerFunc) (sample, error) {
	js, err := w.connect(ctx, "requesters")
	if err != nil {
		return sample{}, err
	}
	if err := registerServers(ctx, js, servers); err != nil {
		return sample{}, err
	}
	g, running := errgroup.WithContext(ctx)
	running, stop := context.WithCancel(running)
	defer stop()
	ready := make(chan struct{})
	g.Go(func() error { return place(running, w, servers, func() { close(ready) }) })
	var s sample
	g.Go(func() error {
		defer stop()
		select {
		case <-ready:
		case <-running.Done():
			return nil
		}
		var err error
		s, err = requestPlacements(running, js, n)
		return err
	})
	return s, g.Wait()
}

// requestPlacements publishes n create requests, inFlight at a time, and times
// each until its placed event is received.
func requestPlacements(ctx context.Context, js jetstream.JetStream, n int) (sample, error) {
	published := make(map[string]time.Time, n)
	var mu sync.Mutex
	s := sample{each: make([]time.Duration, 0, n)}
	open := make(chan struct{}, inFlight)
	g, ctx := errgroup.WithContext(ctx)
	subscribed := time.Now()
	g.Go(func() error {
		return collect(ctx, js, bus.Events, "event.*.*.placed", n, func(subject string) {
			now := time.Now()
			vm := strings.Split(subject, ".")[2]
			mu.Lock()
			s.each = append(s.each, now.Sub(published[vm]))
			mu.Unlock()
			<-open
		})
	})
	time.Sleep(100 * time.Millisecond) // the consumer is there before the first request
	begin := time.Now()
	for i := range n {
		select {
		case open <- struct{}{}:
		case <-ctx.Done():
			return s, g.Wait()
		}
		vm := fmt.Sprintf("vm-%d", i)
		e, err := events.New(events.TypeSandboxCreate, "/bench", vm, events.SandboxCreate{VMID: vm})
		if err != nil {
			return s, err
		}
		msg, err := events.NewMessage(ctx, events.RequestSubject("default", "sandbox", events.Create), e)
		if err != nil {
			return s, err
		}
		mu.Lock()
		published[vm] = time.Now()
		mu.Unlock()
		if _, err := js.PublishMsgAsync(msg); err != nil {
			return s, err
		}
	}
	err := g.Wait()
	s.all = time.Since(begin)
	if s.all > time.Since(subscribed) {
		return s, errors.New("clock went backwards")
	}
	return s, err
}

// registerServers writes n servers with room for everything. Their consumers
// are the scheduler's to make; the floor has none.
func registerServers(ctx context.Context, js jetstream.JetStream, n int) error {
	places, err := js.KeyValue(ctx, kv.BucketPlacements)
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(inFlight)
	for i := range n {
		g.Go(func() error {
			s := benchServer(i)
			_, err := kv.Put(ctx, places, kv.ServerKey(s.ID), s, 0)
			return err
		})
	}
	return g.Wait()
}

func benchServer(i int) kv.Server {
	return kv.Server{ID: fmt.Sprintf("bench-%04d", i), Admin: kv.Active, Epoch: 1, Worker: "bench",
		Config: kv.ServerConfig{Provider: "bench", Roles: []string{"default"}, MaxContainers: 1000, Isolation: kv.IsolationRole, Capabilities: []string{"browser"}}}
}

// placeByScheduler runs the real scheduler beside heartbeats of every server.
func placeByScheduler(ctx context.Context, w *world, servers int, ready func()) error {
	js, err := w.connect(ctx, "scheduler")
	if err != nil {
		return err
	}
	beats, err := w.connect(ctx, "heartbeats")
	if err != nil {
		return err
	}
	log := slog.New(slog.DiscardHandler)
	if os.Getenv("BERTH_BENCH_LOG") != "" {
		log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	s, err := scheduler.New(scheduler.Options{JS: js, Name: "bench", Log: log})
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.Run(ctx) })
	g.Go(func() error { return beat(ctx, beats, servers) })
	g.Go(func() error {
		healthy := map[string]bool{}
		err := collect(ctx, beats, bus.Events, "event._.*.healthy", servers, func(subject string) { healthy[subject] = true })
		if err != nil {
			return err
		}
		commands, err := beats.Stream(ctx, bus.Commands)
		if err != nil {
			return err
		}
		for made := 0; made < 2*servers; { // by the scheduler, for each server
			time.Sleep(200 * time.Millisecond)
			info, err := commands.Info(ctx)
			if err != nil {
				return err
			}
			made = info.State.Consumers
		}
		time.Sleep(2 * time.Second) // the views of the fleet's start are written
		ready()
		return nil
	})
	return g.Wait()
}

// beat sends the heartbeats of n servers every 3 s.
func beat(ctx context.Context, js jetstream.JetStream, n int) error {
	for sequence := uint64(1); ctx.Err() == nil; sequence++ {
		for i := range n {
			id := benchServer(i).ID
			raw, err := json.Marshal(kv.Heartbeat{Server: id, Worker: "bench", Epoch: 1, BootID: "b", Breaker: "closed", Synced: true, Sequence: sequence})
			if err != nil {
				return err
			}
			if _, err := js.PublishAsync("$KV."+kv.BucketHeartbeats+"."+id, raw); err != nil {
				return err
			}
			if i%100 == 99 {
				time.Sleep(3 * time.Second * 100 / time.Duration(n) / 2)
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(1500 * time.Millisecond):
		}
	}
	return nil
}

// placeByFloor does what must be written for one placement and nothing else.
func placeByFloor(ctx context.Context, w *world, servers int, ready func()) error {
	js, err := w.connect(ctx, "floor")
	if err != nil {
		return err
	}
	places, err := js.KeyValue(ctx, kv.BucketPlacements)
	if err != nil {
		return err
	}
	consumer, err := js.Consumer(ctx, bus.Requests, bus.SchedulerConsumer)
	if err != nil {
		return err
	}
	f := &floor{js: js, places: places, servers: make([]floorServer, servers)}
	for i := range f.servers {
		entry, err := places.Get(ctx, kv.ServerKey(benchServer(i).ID))
		if err != nil {
			return err
		}
		f.servers[i].revision = entry.Revision()
	}
	var failed atomic.Pointer[error]
	slots := make(chan struct{}, inFlight)
	cc, err := consumer.Consume(func(msg jetstream.Msg) {
		slots <- struct{}{}
		go func() {
			defer func() { <-slots }()
			if err := f.place(ctx, msg); err != nil && ctx.Err() == nil {
				failed.Store(&err)
			}
		}()
	}, jetstream.PullMaxMessages(inFlight))
	if err != nil {
		return err
	}
	defer cc.Stop()
	ready()
	<-ctx.Done()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

type floor struct {
	js      jetstream.JetStream
	places  jetstream.KeyValue
	next    atomic.Uint64
	servers []floorServer
}

type floorServer struct {
	mu       sync.Mutex
	revision uint64
	used     int
}

// The sizes of what Berth writes: a record before and after its reservation, a
// server's record beside its allocations, one allocation, an event, a command.
const (
	vmBytes, reservedBytes       = 480, 800
	serverBytes, allocationBytes = 330, 150
	placedBytes, commandBytes    = 560, 640
)

var filler = []byte(strings.Repeat("x", 1<<20))

func (f *floor) place(ctx context.Context, msg jetstream.Msg) error {
	var e struct{ ID string }
	if err := json.Unmarshal(msg.Data(), &e); err != nil {
		return err
	}
	created, err := f.places.Create(ctx, kv.VMKey(e.ID), filler[:vmBytes])
	if err != nil {
		return err
	}
	if err := msg.Ack(); err != nil {
		return err
	}
	i := f.next.Add(1) % uint64(len(f.servers))
	id := benchServer(int(i)).ID
	s := &f.servers[i]
	s.mu.Lock()
	s.used++
	s.revision, err = f.places.Update(ctx, kv.ServerKey(id), filler[:serverBytes+s.used*allocationBytes], s.revision)
	s.mu.Unlock()
	if err != nil {
		return err
	}
	if _, err := f.places.Update(ctx, kv.VMKey(e.ID), filler[:reservedBytes], created); err != nil {
		return err
	}
	placed := nats.NewMsg(events.EventSubject("default", e.ID, events.EventPlaced))
	placed.Data = filler[:placedBytes]
	if _, err := f.js.PublishMsg(ctx, placed, jetstream.WithExpectLastSequencePerSubject(0)); err != nil {
		return err
	}
	command := nats.NewMsg(events.CommandSubject(id, e.ID, events.Create))
	command.Data = filler[:commandBytes]
	_, err = f.js.PublishMsg(ctx, command, jetstream.WithMsgID(e.ID))
	return err
}
