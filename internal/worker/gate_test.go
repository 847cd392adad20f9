package worker

import (
	"errors"
	"net"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"berth/internal/natsd"
)

// gate is a process's way to the bus. It can be cut (connections break and none
// comes about) and made a black hole (what is sent vanishes, nothing arrives),
// and it leads to whatever server the world has at the moment.
type gate struct {
	w *world

	mu    sync.Mutex
	state string // "", "cut", "hole"
	conns []*gatedConn
}

// InProcessConn implements nats.InProcessConnProvider.
func (g *gate) InProcessConn() (net.Conn, error) {
	g.mu.Lock()
	state := g.state
	g.mu.Unlock()
	g.w.srvMu.Lock()
	srv := g.w.srv
	g.w.srvMu.Unlock()
	if state != "" || srv == nil {
		return nil, errors.New("no way to the bus")
	}
	var o nats.Options
	if err := srv.InProcess()(&o); err != nil {
		return nil, err
	}
	inner, err := o.InProcessServer.InProcessConn()
	if err != nil {
		return nil, err
	}
	c := &gatedConn{Conn: inner, g: g, healed: make(chan struct{})}
	g.mu.Lock()
	g.conns = append(g.conns, c)
	g.mu.Unlock()
	return c, nil
}

// set changes the state; "" heals.
func (g *gate) set(state string) {
	g.w.reconnected = true
	g.mu.Lock()
	g.state = state
	conns := g.conns
	if state != "hole" {
		g.conns = nil
	}
	g.mu.Unlock()
	for _, c := range conns {
		if state == "hole" {
			c.swallow()
		} else {
			// After a hole the stream of bytes has a gap: such a connection breaks.
			if state == "cut" || c.isHole() {
				_ = c.Close()
			}
		}
	}
}

// gatedConn is one connection through a gate.
type gatedConn struct {
	net.Conn
	g      *gate
	mu     sync.Mutex
	hole   bool
	closed bool
	healed chan struct{}
}

func (c *gatedConn) isHole() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.hole
}

// swallow makes the connection a black hole: the server sees it open.
func (c *gatedConn) swallow() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hole = true
}

func (c *gatedConn) Write(b []byte) (int, error) {
	if c.isHole() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

func (c *gatedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.isHole() {
		<-c.healed
		return 0, net.ErrClosed
	}
	return n, err
}

func (c *gatedConn) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	close(c.healed)
	c.mu.Unlock()
	return c.Conn.Close()
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
