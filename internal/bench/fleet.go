package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"berth/internal/bus"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/natsd"
	"berth/internal/scheduler"
)

// schedulerFleet measures a scheduler beside 5,000 servers and 100,000 placed
// sandboxes: how long one that starts takes to know them all, how long one that
// stood by takes from the clean stop of its predecessor until it serves, and the
// resident memory of a process that does nothing else. The NATS server is
// another process.
func schedulerFleet(ctx context.Context, _ options, print func(figure)) error {
	const servers, sandboxes = 5000, 100_000
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	url, stop, err := natsProcess(ctx)
	if err != nil {
		return err
	}
	defer stop()
	log := slog.New(slog.DiscardHandler)
	nc, err := bus.Connect(ctx, bus.Config{URL: url}, "fleet", log)
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := bus.JetStream(nc)
	if err != nil {
		return err
	}
	if err := bus.Ensure(ctx, js, 1); err != nil {
		return err
	}
	if err := writeFleet(ctx, js, servers, sandboxes); err != nil {
		return err
	}
	cold, warm, rss, err := schedulerProcess(ctx, url)
	if err != nil {
		return err
	}
	size := fmt.Sprintf("servers=%d/sandboxes=%d", servers, sandboxes)
	print(figure{Name: "scheduler_restart/" + size, N: 1, P50us: float64(cold.Microseconds()), P99us: float64(cold.Microseconds())})
	print(figure{Name: "scheduler_takeover/" + size, N: 1, P50us: float64(warm.Microseconds()), P99us: float64(warm.Microseconds())})
	print(figure{Name: "scheduler_memory_MB", N: rss >> 20})
	return nil
}

// writeFleet writes the records of a fleet that is in the middle of its work.
func writeFleet(ctx context.Context, js jetstream.JetStream, servers, sandboxes int) error {
	put := func(key string, v any) error {
		raw, err := json.Marshal(v)
		if err != nil {
			return err
		}
		_, err = js.PublishAsync("$KV."+kv.BucketPlacements+"."+key, raw)
		return err
	}
	records := make([]kv.Server, servers)
	for i := range records {
		records[i] = benchServer(i)
		records[i].Allocs = map[string]kv.Alloc{}
	}
	now := time.Now().UTC()
	ttl, wait := 7200.0, 300.0
	expires := now.Add(2 * time.Hour)
	for i := range sandboxes {
		vm := events.DerivedVMID("default", "/bench", strconv.Itoa(i))
		s := &records[i%servers]
		s.Allocs[vm] = kv.Alloc{Attempt: vm[:22], Fence: 7, Role: "default", Tenant: "default", Since: now}
		err := put(kv.VMKey(vm), kv.Placement{
			VMID: vm, ServerID: s.ID, Tenant: "default", Role: "default", Phase: kv.Ready, Fence: 7, Request: events.Request{Source: "/bench", ID: strconv.Itoa(i)},
			CreatedAt: now, ReadyAt: &now, ExpiresAt: &expires, Deadline: now.Add(5 * time.Minute), Order: uint64(i), Attempt: vm[:22], Attempts: 1, ReservedAt: &now,
			Spec:        &events.SandboxCreate{VMID: vm, Role: "default", TTLSeconds: &ttl, QueueTimeoutSeconds: &wait},
			Explanation: s.ID + `, best of 4000 open with role "default", of 5000: priority 0, affinity 0, 10/1000 used`,
			Info:        &events.SandboxInfo{Capabilities: []string{"browser", "clipboard"}},
		})
		if err != nil {
			return err
		}
	}
	for _, s := range records {
		if err := put(kv.ServerKey(s.ID), s); err != nil {
			return err
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-ctx.Done():
		return ctx.Err()
	}
	// The watermark: all of this was announced.
	return put("scheduler", map[string]uint64{"announced": uint64(servers + sandboxes)})
}

// The bench runs itself again for what must be a process of its own.
const (
	childServer    = "child-nats-server"
	childScheduler = "child-scheduler"
)

// child runs such a process; it returns false where args name none.
func child(ctx context.Context, args []string) (bool, error) {
	if len(args) != 2 {
		return false, nil
	}
	switch args[0] {
	case childServer:
		srv, err := natsd.Start(natsd.Options{StoreDir: args[1], Addr: "127.0.0.1:0"})
		if err != nil {
			return true, err
		}
		fmt.Println(srv.URL())
		_, err = io.Copy(io.Discard, os.Stdin) // until the parent has gone
		srv.Shutdown()
		return true, err
	case childScheduler:
		return true, runScheduler(ctx, args[1])
	}
	return false, nil
}

// runScheduler starts a scheduler that stands by, since the lease is taken. It
// reports how long it takes until it follows the fleet, how long after the
// release of the lease until it leads, and its resident memory some seconds
// later.
func runScheduler(ctx context.Context, url string) error {
	nc, err := bus.Connect(ctx, bus.Config{URL: url}, "scheduler", slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := bus.JetStream(nc)
	if err != nil {
		return err
	}
	leases, err := js.KeyValue(ctx, kv.BucketLeases)
	if err != nil {
		return err
	}
	before, _, err := kv.Acquire(ctx, leases, kv.Terms{Key: "scheduler", Holder: "before", TTL: kv.LeaseBucketTTL}, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	following, leading := make(chan struct{}), make(chan struct{})
	s, err := scheduler.New(scheduler.Options{JS: js, Name: "bench", Log: slog.New(&awaiting{map[string]chan struct{}{"following": following, "leading": leading}})})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	begin := time.Now()
	g.Go(func() error { return s.Run(ctx) })
	g.Go(func() error {
		defer cancel()
		var took [2]time.Duration
		for i, reached := range []chan struct{}{following, leading} {
			select {
			case <-reached:
				took[i] = time.Since(begin)
			case <-ctx.Done():
				return ctx.Err()
			}
			if i == 0 {
				begin = time.Now()
				if err := before.Release(ctx); err != nil {
					return err
				}
			}
		}
		time.Sleep(10 * time.Second) // it works: 100,000 clocks, 5,000 servers that fall silent
		runtime.GC()
		rss, err := residentMemory()
		if err != nil {
			return err
		}
		fmt.Println(took[0].Microseconds(), took[1].Microseconds(), rss)
		return nil
	})
	return g.Wait()
}

// awaiting is a log handler that waits for messages.
type awaiting struct{ seen map[string]chan struct{} }

func (a *awaiting) Enabled(context.Context, slog.Level) bool { return true }
func (a *awaiting) Handle(_ context.Context, r slog.Record) error {
	if seen := a.seen[r.Message]; seen != nil {
		close(seen)
	}
	return nil
}
func (a *awaiting) WithAttrs([]slog.Attr) slog.Handler { return a }
func (a *awaiting) WithGroup(string) slog.Handler      { return a }

// residentMemory reads this process's resident set in bytes.
func residentMemory() (int, error) {
	raw, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(raw))
	if len(fields) < 2 {
		return 0, errors.New("/proc/self/statm is not readable")
	}
	pages, err := strconv.Atoi(fields[1])
	return pages * os.Getpagesize(), err
}

func natsProcess(ctx context.Context) (url string, stop func(), err error) {
	dir, err := os.MkdirTemp("", "berth-bench-")
	if err != nil {
		return "", nil, err
	}
	cmd := exec.CommandContext(ctx, os.Args[0], childServer, dir)
	in, err := cmd.StdinPipe()
	if err != nil {
		return "", nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", nil, err
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return "", nil, err
	}
	stop = func() {
		err := errors.Join(in.Close(), cmd.Wait(), os.RemoveAll(dir))
		if err != nil {
			fmt.Fprintln(os.Stderr, "bench: nats-server:", err)
		}
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		stop()
		return "", nil, fmt.Errorf("nats-server did not say where it listens: %w", err)
	}
	return strings.TrimSpace(line), stop, nil
}

func schedulerProcess(ctx context.Context, url string) (cold, warm time.Duration, rss int, err error) {
	cmd := exec.CommandContext(ctx, os.Args[0], childScheduler, url)
	cmd.Stderr = os.Stderr
	raw, err := cmd.Output()
	if err != nil {
		return 0, 0, 0, fmt.Errorf("scheduler: %w", err)
	}
	var us [2]int64
	if _, err := fmt.Sscan(string(raw), &us[0], &us[1], &rss); err != nil {
		return 0, 0, 0, fmt.Errorf("scheduler said %q: %w", raw, err)
	}
	return time.Duration(us[0]) * time.Microsecond, time.Duration(us[1]) * time.Microsecond, rss, nil
}
