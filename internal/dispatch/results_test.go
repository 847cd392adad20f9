package dispatch

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/natsd"
	"berth/internal/virtualtime"
)

// While the bus does not answer, beginning to follow servers' results holds
// no lock; who waits for the same server asks once.
func TestResultsOfASilentBus(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		srv, err := natsd.Start(natsd.Options{StoreDir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		nc, err := nats.Connect("", srv.InProcess())
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			nc.Close()
			time.Sleep(20 * time.Millisecond)
			srv.Shutdown()
		}()
		asked := make(chan struct{}, 100)
		if _, err := nc.Subscribe("silent.>", func(*nats.Msg) { asked <- struct{}{} }); err != nil {
			t.Fatal(err)
		}
		js, err := jetstream.NewWithAPIPrefix(nc, "silent")
		if err != nil {
			t.Fatal(err)
		}
		f := Follow(js, nil, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		stopped := errors.New("stopped")
		got := make(chan error, 3)
		for _, server := range []string{"fake-01", "fake-01", "fake-02"} {
			go func() {
				_, err := f.Of(ctx, server, nil)
				got <- err
			}()
		}
		<-asked
		<-asked
		synctest.Wait() // hangs where one of them waits for the lock
		if !f.mu.TryLock() {
			t.Fatal("the lock is held over a call to the bus")
		}
		f.mu.Unlock()
		if n := len(asked); n != 0 {
			t.Errorf("%d more questions than servers", n)
		}
		cancel(stopped)
		for range 3 {
			if err := <-got; !errors.Is(err, stopped) {
				t.Errorf("%v, want the cause", err)
			}
		}
		if len(f.by) != 0 {
			t.Errorf("%d followers are left", len(f.by))
		}
	})
}
