package looprunner

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/natsd"
	"berth/internal/virtualtime"
)

// While the bus does not answer, beginning to follow servers' results keeps
// nobody from the runner's own books; loops of one server ask once.
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
		r, err := New(Options{NC: nc, JS: js, Name: "a", Models: map[string]ModelFactory{"m": nil}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		stopped := errors.New("stopped")
		got := make(chan error, 3)
		for _, server := range []string{"fake-01", "fake-01", "fake-02"} {
			go func() {
				_, err := r.resultsOf(ctx, server)
				got <- err
			}()
		}
		<-asked
		<-asked
		synctest.Wait() // hangs where one of them waits for the lock
		if !r.mu.TryLock() {
			t.Fatal("the runner's lock is held over a call to the bus")
		}
		r.mu.Unlock()
		if n := len(asked); n != 0 {
			t.Errorf("%d more questions than servers", n)
		}
		cancel(stopped)
		for range 3 {
			if err := <-got; !errors.Is(err, stopped) {
				t.Errorf("%v, want the cause", err)
			}
		}
		if len(r.results) != 0 {
			t.Errorf("%d followers are left", len(r.results))
		}
	})
}
