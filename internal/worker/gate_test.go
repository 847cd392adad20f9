package worker

import (
	"time"

	"github.com/nats-io/nats.go"

	"berth/internal/natsd"
	"berth/internal/natsd/natsdtest"
)

// gate is a process's way to the bus, which leads to whatever server the world
// has at the moment.
type gate struct {
	w *world
	*natsdtest.Gate
}

func newGate(w *world) *gate {
	return &gate{w, natsdtest.New(func() nats.InProcessConnProvider {
		w.srvMu.Lock()
		defer w.srvMu.Unlock()
		var o nats.Options
		if w.srv == nil || w.srv.InProcess()(&o) != nil {
			return nil
		}
		return o.InProcessServer
	})}
}

// set changes the state; "" heals.
func (g *gate) set(state string) {
	g.w.reconnected = true
	g.Set(natsdtest.State(state))
}

// outage stops the bus for a while and starts it again on the same files.
func (w *world) outage(d time.Duration) {
	w.Helper()
	w.reconnected = true
	w.srvMu.Lock()
	srv := w.srv
	w.srv = nil
	w.srvMu.Unlock()
	srv.Shutdown()
	time.Sleep(d)
	srv, err := natsd.Start(natsd.Options{StoreDir: w.dir})
	if err != nil {
		w.Fatal(err)
	}
	w.srvMu.Lock()
	w.srv = srv
	w.srvMu.Unlock()
	w.until("the test is connected again", time.Minute, w.nc.IsConnected)
}
