package bus_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"berth/internal/bus"
	"berth/internal/events"
	"berth/internal/natsd"
	"berth/internal/virtualtime"
)

// Everything is made, comes out as defined, and making it again changes
// nothing; all of it in virtual time.
func TestEnsureMakesWhatCheckWants(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		srv, err := natsd.Start(natsd.Options{StoreDir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		defer srv.Shutdown()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		nc, err := bus.Connect(ctx, bus.Config{}, "test", slog.New(slog.DiscardHandler), srv.InProcess())
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		js, err := bus.JetStream(nc)
		if err != nil {
			t.Fatal(err)
		}
		before, err := bus.Check(ctx, js, 1)
		if err != nil {
			t.Fatal(err)
		}
		if len(before) != len(bus.Streams(1))+len(bus.SharedConsumers()) {
			t.Fatalf("on an empty server %d things are missing: %v", len(before), before)
		}
		for range 2 {
			if err := bus.Await(ctx, js, 1, slog.New(slog.DiscardHandler)); err != nil {
				t.Fatal(err)
			}
			if drifts, err := bus.Check(ctx, js, 1); err != nil || len(drifts) > 0 {
				t.Fatalf("drift after Ensure: %v %v", drifts, err)
			}
		}
		if err := bus.EnsureConsumers(ctx, js, bus.ServerConsumers("ax102-01", 1000)); err != nil {
			t.Fatal(err)
		}
	})
}

// Records that decide things are read through their stream's leader (H12:
// nats-server#4162, nats-server#4710).
func TestRecordsAreReadFromTheLeader(t *testing.T) {
	for _, s := range bus.Streams(3) {
		if decides := strings.HasPrefix(s.Name, "KV_"); decides && s.AllowDirect {
			t.Errorf("replicas may answer reads of %s", s.Name)
		}
	}
}

// An announcement is stored once however often it is made, and a later life
// of the same vm id is announced again.
func TestAnnounceOnce(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		srv, err := natsd.Start(natsd.Options{StoreDir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		defer srv.Shutdown()
		nc, err := nats.Connect("", srv.InProcess())
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		js, err := bus.JetStream(nc)
		if err != nil {
			t.Fatal(err)
		}
		ctx := t.Context()
		if err := bus.Ensure(ctx, js, 1); err != nil {
			t.Fatal(err)
		}
		stream, err := js.Stream(ctx, bus.Events)
		if err != nil {
			t.Fatal(err)
		}
		subject := events.EventSubject("default", "a", events.EventReady)
		for _, id := range []string{"a-1-ready", "a-1-ready", "a-2-ready", "a-2-ready"} {
			e, err := events.New(events.SandboxType("ready"), events.SourceScheduler, id, map[string]string{"vmId": "a"})
			if err != nil {
				t.Fatal(err)
			}
			if err := bus.Announce(ctx, js, stream, subject, e); err != nil {
				t.Fatal(err)
			}
		}
		info, err := stream.Info(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if info.State.Msgs != 2 {
			t.Errorf("%d messages stored, want 2", info.State.Msgs)
		}
	})
}
