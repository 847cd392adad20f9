// Package natsd embeds a NATS server with JetStream: for `berth dev` and for
// tests. With no address it opens no socket, and then a whole server follows
// the fake clock of a testing/synctest bubble.
package natsd

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// Options of an embedded server.
type Options struct {
	StoreDir string // JetStream's files
	Addr     string // host:port to listen on; "" for in-process connections only
	Sync     bool   // sync_interval: always, so that an acknowledged write survives a power cut

	// Grants is a nats-server configuration file whose users and permissions
	// hold; the rest of it is ignored. Superuser, with itself as its password,
	// may do everything beside them.
	Grants    string
	Superuser string
}

// Server is a running embedded server.
type Server struct{ srv *server.Server }

// Start runs a server and returns when it accepts connections.
func Start(opts Options) (*Server, error) {
	o := &server.Options{
		ServerName: "berth-embedded",
		JetStream:  true,
		StoreDir:   opts.StoreDir,
		NoSigs:     true,
		NoLog:      true,
		DontListen: opts.Addr == "",
		SyncAlways: opts.Sync,
	}
	if opts.Addr != "" {
		host, port, err := net.SplitHostPort(opts.Addr)
		if err != nil {
			return nil, fmt.Errorf("NATS address %q: %w", opts.Addr, err)
		}
		p, err := strconv.Atoi(port)
		if err != nil || p < 0 || p > 65535 {
			return nil, fmt.Errorf("NATS address %q: bad port", opts.Addr)
		}
		if p == 0 {
			p = server.RANDOM_PORT
		}
		o.Host, o.Port = host, p
		// A port that somebody else has would otherwise end the process later.
		if p > 0 {
			l, err := net.Listen("tcp", opts.Addr)
			if err != nil {
				return nil, fmt.Errorf("NATS address: %w", err)
			}
			if err := l.Close(); err != nil {
				return nil, fmt.Errorf("NATS address: %w", err)
			}
		}
	}
	if opts.Grants != "" {
		granted, err := server.ProcessConfigFile(opts.Grants)
		if err != nil {
			return nil, fmt.Errorf("grants of %s: %w", opts.Grants, err)
		}
		o.Users = append(granted.Users, &server.User{Username: opts.Superuser, Password: opts.Superuser})
	}
	srv, err := server.NewServer(o)
	if err != nil {
		return nil, fmt.Errorf("embedded NATS server: %w", err)
	}
	srv.Start()
	if !srv.ReadyForConnections(10 * time.Second) {
		srv.Shutdown()
		srv.WaitForShutdown()
		return nil, errors.New("embedded NATS server did not become ready in 10 s; is its data directory in use or not writable?")
	}
	if !srv.JetStreamEnabled() {
		srv.Shutdown()
		srv.WaitForShutdown()
		return nil, fmt.Errorf("embedded NATS server: JetStream could not start in %q", opts.StoreDir)
	}
	return &Server{srv}, nil
}

// URL is the client URL, or "" for a server that does not listen.
func (s *Server) URL() string {
	if s.srv.Addr() == nil {
		return ""
	}
	return s.srv.ClientURL()
}

// InProcess is the option that connects without a socket.
func (s *Server) InProcess() nats.Option { return nats.InProcessServer(s.srv) }

// InProcessConn returns a new connection without a socket.
func (s *Server) InProcessConn() (net.Conn, error) { return s.srv.InProcessConn() }

// Shutdown stops the server and returns when it has stopped. It is to be
// called once.
func (s *Server) Shutdown() {
	s.srv.Shutdown()
	s.srv.WaitForShutdown()
}
