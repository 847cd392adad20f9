package kv_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"pgregory.net/rapid"

	"berth/internal/bus"
	"berth/internal/kv"
	"berth/internal/natsd"
	"berth/internal/virtualtime"
)

// world is one virtual-time NATS server with Berth's buckets.
type world struct {
	t   *testing.T
	srv *natsd.Server
	wg  sync.WaitGroup
}

func newWorld(t *testing.T) *world {
	srv, err := natsd.Start(natsd.Options{StoreDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, srv: srv}
	t.Cleanup(func() { w.wg.Wait(); srv.Shutdown() })
	nc, js := w.connect()
	defer nc.Close()
	if err := bus.Ensure(t.Context(), js, 1); err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *world) connect() (*nats.Conn, jetstream.JetStream) {
	nc, err := nats.Connect("", w.srv.InProcess(), nats.ReconnectBufSize(-1))
	if err != nil {
		w.t.Fatal(err)
	}
	js, err := bus.JetStream(nc)
	if err != nil {
		w.t.Fatal(err)
	}
	return nc, js
}

// life is what a contender does with the lease once it has it.
type life struct {
	Hold  time.Duration
	Crash bool // it loses the bus and tells nobody; it stops when it no longer trusts its lease
}

// ledger checks that holds never overlap.
type ledger struct {
	mu      sync.Mutex
	holder  string
	epoch   uint64
	free    time.Time // since when nobody holds
	faults  []string
	holds   int
	longest time.Duration // that nobody held it
}

func (l *ledger) begin(name string, epoch uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.holder != "" {
		l.faults = append(l.faults, fmt.Sprintf("%s took it while %s trusted it", name, l.holder))
	}
	if epoch <= l.epoch {
		l.faults = append(l.faults, fmt.Sprintf("epoch %d after %d", epoch, l.epoch))
	}
	if l.holds++; l.holds > 1 {
		l.longest = max(l.longest, time.Since(l.free))
	}
	l.holder, l.epoch = name, epoch
}

func (l *ledger) end(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.holder == name {
		l.holder, l.free = "", time.Now()
	}
}

// contend lives the lives one after the other.
func (w *world) contend(ctx context.Context, name string, ttl time.Duration, lives []life, l *ledger) {
	for i, life := range lives {
		nc, js := w.connect()
		bucket, err := js.KeyValue(ctx, kv.BucketLeases)
		if err != nil {
			nc.Close()
			if ctx.Err() == nil {
				w.t.Error(err)
			}
			return
		}
		lease, held, err := kv.Acquire(ctx, bucket, kv.Terms{Key: "x", Holder: fmt.Sprintf("%s-%d", name, i), TTL: ttl}, slog.New(slog.DiscardHandler))
		if err != nil {
			nc.Close()
			return
		}
		l.begin(name, lease.Epoch)
		if life.Crash {
			time.Sleep(life.Hold)
			nc.Close()
			<-held.Done() // trusted until now, cut off as it is
			l.end(name)
			continue
		}
		select {
		case <-held.Done():
			l.end(name)
			if cause := context.Cause(held); errors.Is(cause, kv.ErrLeaseLost) {
				w.t.Errorf("%s lost its lease on a bus that works: %v", name, cause)
			}
		case <-time.After(life.Hold):
			l.end(name)
		}
		if err := lease.Release(context.WithoutCancel(ctx)); err != nil {
			w.t.Error(err)
		}
		nc.Close()
	}
}

// Whatever the holders do, two never trust the lease at once, every hold has a
// higher epoch, and after a crash it is taken within its TTL and a little more.
func TestLeaseIsExclusive(t *testing.T) {
	if f := flag.Lookup("rapid.checks"); f.Value.String() == f.DefValue {
		if err := flag.Set("rapid.checks", "12"); err != nil { // each is a NATS server's life; `make nightly` has 1,000
			t.Fatal(err)
		}
	}
	rapid.Check(t, func(rt *rapid.T) {
		ttl := time.Duration(rapid.IntRange(2, 10).Draw(rt, "ttl")) * time.Second
		var contenders [][]life
		for range rapid.IntRange(2, 4).Draw(rt, "contenders") {
			contenders = append(contenders, rapid.SliceOfN(rapid.Custom(func(rt *rapid.T) life {
				return life{Hold: time.Duration(rapid.IntRange(0, 15_000).Draw(rt, "holdMs")) * time.Millisecond, Crash: rapid.Bool().Draw(rt, "crash")}
			}), 1, 4).Draw(rt, "lives"))
		}
		l := &ledger{}
		virtualtime.Test(t, func(t *testing.T) {
			w := newWorld(t)
			for i, lives := range contenders {
				w.wg.Go(func() { w.contend(t.Context(), fmt.Sprint("c", i), ttl, lives, l) })
			}
			w.wg.Wait()
		})
		if len(l.faults) > 0 {
			rt.Fatalf("%v", l.faults)
		}
		if limit := ttl + 2*time.Second; l.longest > limit {
			rt.Fatalf("nobody held it for %s, more than %s", l.longest, limit)
		}
	})
}

// Concurrent compare-and-set loops lose no update, whoever wins each round.
func TestUpdateLosesNothing(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		w := newWorld(t)
		nc, js := w.connect()
		defer nc.Close()
		bucket, err := js.KeyValue(t.Context(), kv.BucketPlacements)
		if err != nil {
			t.Fatal(err)
		}
		type counter struct{ By map[string]int }
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				for n := range 10 {
					_, _, err := kv.Update(t.Context(), bucket, "counter", func(c *counter, _ uint64) error {
						if c.By == nil {
							c.By = map[string]int{}
						}
						c.By[fmt.Sprint(i)] = n + 1
						return nil
					})
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		c, _, err := kv.Get[counter](t.Context(), bucket, "counter")
		if err != nil || len(c.By) != 8 {
			t.Fatalf("%+v %v", c, err)
		}
		for who, n := range c.By {
			if n != 10 {
				t.Errorf("%s counted to %d", who, n)
			}
		}
		if _, err := kv.Put(t.Context(), bucket, "counter", c, 1); !errors.Is(err, kv.ErrConflict) {
			t.Errorf("a write over an old revision: %v", err)
		}
		if _, _, err := kv.Get[counter](t.Context(), bucket, "none"); !errors.Is(err, kv.ErrNotFound) {
			t.Errorf("a key without a value: %v", err)
		}
		if _, rev, err := kv.Update(t.Context(), bucket, "counter", func(*counter, uint64) error { return kv.ErrUnchanged }); err != nil || rev == 0 {
			t.Errorf("unchanged: %d %v", rev, err)
		}
	})
}

// A contender that is woken takes a released lease at once, also where it is
// woken a moment before the release can be read.
func TestWakeTakesAtOnce(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		w := newWorld(t)
		nc, js := w.connect()
		defer nc.Close()
		bucket, err := js.KeyValue(t.Context(), kv.BucketLeases)
		if err != nil {
			t.Fatal(err)
		}
		log, wake := slog.New(slog.DiscardHandler), make(chan struct{})
		terms := func(name string, wake chan struct{}) kv.Terms {
			return kv.Terms{Key: "x", Holder: name, TTL: 10 * time.Second, Wake: wake}
		}
		lease, _, err := kv.Acquire(t.Context(), bucket, terms("h0", nil), log)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 8 {
			taken := make(chan *kv.Lease)
			go func() {
				next, _, err := kv.Acquire(t.Context(), bucket, terms(fmt.Sprint("h", i+1), wake), log)
				if err != nil {
					t.Error(err)
				}
				taken <- next
			}()
			time.Sleep(3 * time.Second)
			start, early := time.Now(), time.Duration(i%2)*30*time.Millisecond
			wake <- struct{}{}
			time.Sleep(early)
			if err := lease.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
			if lease = <-taken; time.Since(start) > early+50*time.Millisecond {
				t.Errorf("taken %s after the wake, released %s after it", time.Since(start), early)
			}
		}
		if err := lease.Release(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
