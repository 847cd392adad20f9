// Package natsdtest gives tests a way to the bus that can fail.
package natsdtest

import (
	"errors"
	"net"
	"sync"

	"github.com/nats-io/nats.go"
)

// State of a gate.
type State string

// The states.
const (
	Open State = ""     // everything passes
	Cut  State = "cut"  // connections break, and none comes about
	Hole State = "hole" // what is sent vanishes and nothing arrives; the server sees the connection open
)

// Gate is one process's way to the bus, in process: nats.InProcessServer takes
// it. It is made for synctest bubbles: what waits in it waits for the gate.
type Gate struct {
	server func() nats.InProcessConnProvider

	mu    sync.Mutex
	state State
	conns []*conn
}

// New returns an open gate. server tells what stands behind it at the moment;
// nil: nothing.
func New(server func() nats.InProcessConnProvider) *Gate { return &Gate{server: server} }

// InProcessConn implements nats.InProcessConnProvider.
func (g *Gate) InProcessConn() (net.Conn, error) {
	g.mu.Lock()
	state := g.state
	g.mu.Unlock()
	server := g.server()
	if state != Open || server == nil {
		return nil, errors.New("no way to the bus")
	}
	inner, err := server.InProcessConn()
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: inner, healed: make(chan struct{})}
	g.mu.Lock()
	g.conns = append(g.conns, c)
	g.mu.Unlock()
	return c, nil
}

// Set changes the state; Open heals. A connection that was a hole breaks then:
// its stream of bytes has a gap.
func (g *Gate) Set(state State) {
	g.mu.Lock()
	g.state = state
	conns := g.conns
	if state != Hole {
		g.conns = nil
	}
	g.mu.Unlock()
	for _, c := range conns {
		if state == Hole {
			c.swallow()
		} else if state == Cut || c.isHole() {
			_ = c.Close() // nothing is told of a connection that a test breaks
		}
	}
}

// conn is one connection through a gate.
type conn struct {
	net.Conn
	mu     sync.Mutex
	hole   bool
	closed bool
	healed chan struct{}
}

func (c *conn) isHole() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.hole
}

func (c *conn) swallow() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hole = true
}

func (c *conn) Write(b []byte) (int, error) {
	if c.isHole() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.isHole() {
		<-c.healed
		return 0, net.ErrClosed
	}
	return n, err
}

func (c *conn) Close() error {
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
