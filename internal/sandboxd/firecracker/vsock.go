package firecracker

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"
)

// maxGreeting is the longest answer to CONNECT: "OK 4294967295\n".
const maxGreeting = 14

// ErrNobody is a port of the guest that nothing listens on, or not yet.
var ErrNobody = errors.New("nobody listens on the guest's port")

// DialVsock connects to a vsock port of a guest, through the unix socket that
// Firecracker serves for it: CONNECT, the port, a line end; the answer is OK and
// a number of the host's side. Where nobody listens Firecracker hangs up.
func DialVsock(ctx context.Context, socket string, port uint32) (_ net.Conn, err error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, fmt.Errorf("dial the guest: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, conn.Close())
		}
	}()
	// A ctx that ends breaks off the greeting.
	stop := context.AfterFunc(ctx, func() {
		if conn.SetDeadline(time.Unix(1, 0)) != nil {
			return // it is closed
		}
	})
	defer stop()
	if err := greet(conn, port); err != nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		return nil, err
	}
	if !stop() {
		return nil, context.Cause(ctx)
	}
	return conn, nil
}

// greet reads no byte beyond the answer's line: what follows is the guest's.
func greet(conn net.Conn, port uint32) error {
	if _, err := fmt.Fprintf(conn, "CONNECT %d\n", port); err != nil {
		return fmt.Errorf("%w: %w", ErrNobody, err)
	}
	var line []byte
	for b := make([]byte, 1); ; {
		if _, err := conn.Read(b); err != nil {
			return fmt.Errorf("%w: %w", ErrNobody, err)
		}
		if b[0] == '\n' {
			break
		}
		if line = append(line, b[0]); len(line) >= maxGreeting {
			return fmt.Errorf("the answer to CONNECT is no OK: %q", line)
		}
	}
	number, ok := strings.CutPrefix(string(line), "OK ")
	if _, err := strconv.ParseUint(number, 10, 32); !ok || err != nil {
		return fmt.Errorf("the answer to CONNECT is no OK: %q", line)
	}
	return nil
}
