package sandboxd

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/coder/websocket"

	"berth/api"
	"berth/internal/desktop"
)

// Limits of the live view. What a sandbox sends is copied and never read: it is
// for the viewer's browser to understand, and to distrust.
const (
	maxViewers    = 200      // of all sandboxes
	maxBoxViewers = 8        // of one: each is a process in it
	maxInput      = 64 << 10 // bytes of one message of a viewer's
	viewBuffer    = 32 << 10 // bytes in hand towards a viewer

	takeWithin   = 30 * time.Second // for a viewer to take what is sent, unless a test has less time
	inputWithin  = 10 * time.Second // for the sandbox to take a viewer's input
	pingEvery    = 20 * time.Second // a viewer that is gone without a word is noticed by the next
	watchedEvery = time.Second
	partWithin   = 2 * time.Second // for the sandbox to hang up after a viewer's end
)

var (
	errViewers = fmt.Errorf("as many watch as can: %d of one sandbox, %d of all; close a page", maxBoxViewers, maxViewers)
	errLeave   = errors.New("the sandbox is being paused or kept")
	errLeft    = errors.New("the viewer has gone")
)

// addViewer counts a viewer, until done. leave is closed when it must go.
func (b *box) addViewer() (leave <-chan struct{}, done func(), err error) {
	release, err := b.use()
	if err != nil {
		return nil, nil, err
	}
	if leave, err = b.seat(); err != nil {
		release()
		return nil, nil, err
	}
	return leave, func() {
		b.mu.Lock()
		b.viewers--
		b.mu.Unlock()
		<-b.s.viewers
		release()
	}, nil
}

// seat takes a viewer's place.
func (b *box) seat() (leave <-chan struct{}, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.held { // since the call that let it in; who holds has sent the others away
		return nil, errBusy
	}
	if b.viewers >= maxBoxViewers {
		return nil, errViewers
	}
	select {
	case b.s.viewers <- struct{}{}:
	default:
		return nil, errViewers
	}
	b.viewers++
	if b.leave == nil {
		b.leave = make(chan struct{})
	}
	return b.leave, nil
}

// dismiss sends the viewers away; b.mu is held.
func (b *box) dismiss() {
	if b.leave != nil {
		close(b.leave)
		b.leave = nil
	}
}

// getRFB is a viewer's connection: RFB in binary messages of a WebSocket. Without
// an Upgrade it answers why there is none, or 426: a page that was refused asks
// so for the reason, which browsers do not tell.
func (s *Server) getRFB(w http.ResponseWriter, r *http.Request, access api.Access) error {
	if !sameOrigin(r) {
		return &problem{http.StatusForbidden, "wrong_origin", "the live view can be opened from this server's own pages only; a proxy in front must pass the header Host on"}
	}
	b, err := s.running(r.PathValue("id"))
	if err != nil {
		return err
	}
	leave, done, err := b.addViewer()
	if err != nil {
		return err
	}
	defer done()
	if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		if err := s.viewable(r.Context(), b); err != nil {
			return b.explain(r.Context(), err)
		}
		return &problem{http.StatusUpgradeRequired, "upgradeRequired", "this is for a WebSocket"}
	}
	conn, err := b.guest.Agent().view(r.Context(), access == api.Control)
	if err != nil {
		return b.explain(r.Context(), err)
	}
	defer func() { s.dropError(conn.Close()) }()
	ws, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true, CompressionMode: websocket.CompressionDisabled}) // Origin: above
	if err != nil {
		s.log.Debug("no viewer", "err", err) // it has been answered
		return nil
	}
	ws.SetReadLimit(maxInput)
	s.log.Info("a viewer came", "sandbox", b.record().ID, "access", string(access))
	err = s.relay(r.Context(), b, ws, conn, leave)
	s.log.Info("a viewer went", "sandbox", b.record().ID, "why", err)
	return nil
}

// sameOrigin tells whether a request comes from a page of this server, or from no
// page at all.
func sameOrigin(r *http.Request) bool {
	origin := r.Header.Get("Origin")
	if origin == "" {
		return true
	}
	u, err := url.Parse(origin)
	return err == nil && strings.EqualFold(u.Host, r.Host)
}

func (s *Server) dropError(err error) {
	if err != nil {
		s.log.Debug("closing", "err", err)
	}
}

// relay copies between a viewer and the agent until one of them ends, or the
// viewer must go, as when what it is granted ends. It returns why it ended, once the agent has hung up or its time
// for that is over: x11vnc has then ended.
func (s *Server) relay(granted context.Context, b *box, ws *websocket.Conn, conn *viewConn, leave <-chan struct{}) error {
	sending, stop := context.WithCancelCause(context.Background())
	defer stop(nil)
	reading, stopReading := context.WithCancel(context.Background())
	defer stopReading()
	over, down, up := make(chan error, 3), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(up)
		over <- input(reading, ws, conn)
	}()
	go func() {
		defer close(down)
		over <- s.output(sending, ws, conn)
		_, _ = io.Copy(io.Discard, conn) // until it hangs up
	}()
	reason := s.attend(granted, sending, b, ws, leave, over)
	stop(reason)
	s.dropError(conn.CloseWrite())
	s.dropError(conn.SetReadDeadline(time.Now().Add(partWithin)))
	<-down
	code, text := websocket.StatusGoingAway, reason.Error()
	if errors.Is(reason, errLeft) {
		code, text = websocket.StatusNormalClosure, ""
	}
	s.dropError(ws.Close(code, text[:min(len(text), 120)]))
	stopReading()
	<-up
	return reason
}

// attend notes that the sandbox is watched, until there is a reason to end that.
func (s *Server) attend(granted, ctx context.Context, b *box, ws *websocket.Conn, leave <-chan struct{}, over <-chan error) error {
	pings := make(chan error, 1)
	go func() { pings <- ping(ctx, ws) }()
	tick := time.NewTicker(watchedEvery)
	defer tick.Stop()
	for {
		now := time.Now().UTC()
		b.watched.Store(&now)
		select {
		case <-tick.C:
		case err := <-over:
			return err
		case err := <-pings:
			return err
		case <-granted.Done():
			return context.Cause(granted)
		case <-leave:
			return errLeave
		case <-b.gone:
			return errLost
		case <-s.ctx.Done():
			return errClosed
		}
	}
}

// ping returns when the viewer no longer answers.
func ping(ctx context.Context, ws *websocket.Conn) error {
	tick := time.NewTicker(pingEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		within, cancel := context.WithTimeout(ctx, pingEvery)
		err := ws.Ping(within)
		cancel()
		if err != nil {
			return fmt.Errorf("%w: it does not answer", errLeft)
		}
	}
}

// input copies what a viewer sends.
func input(ctx context.Context, ws *websocket.Conn, conn net.Conn) error {
	buf := make([]byte, 4<<10)
	for {
		kind, message, err := ws.Reader(ctx)
		if err == nil && kind != websocket.MessageBinary {
			err = errors.New("a message of text")
		}
		if err != nil {
			return fmt.Errorf("%w: %w", errLeft, err)
		}
		if err := conn.SetWriteDeadline(time.Now().Add(inputWithin)); err != nil {
			return fmt.Errorf("%w: %w", errAgent, err)
		}
		if _, err := io.CopyBuffer(struct{ io.Writer }{conn}, message, buf); err != nil {
			return fmt.Errorf("%w: %w", errLeft, err)
		}
	}
}

// output copies what the agent sends. A viewer that does not take it in time is
// given up.
func (s *Server) output(ctx context.Context, ws *websocket.Conn, conn net.Conn) error {
	buf := make([]byte, viewBuffer)
	for {
		n, err := conn.Read(buf)
		if n > 0 {
			within, cancel := context.WithTimeout(ctx, s.takeWithin)
			err := ws.Write(within, websocket.MessageBinary, buf[:n])
			cancel()
			if err != nil {
				return fmt.Errorf("%w: %w", errLeft, err)
			}
		}
		if err != nil {
			return errors.New("the desktop's view has ended")
		}
	}
}

// viewable says why a sandbox can be shown in pictures only; nil: it can be more,
// or that cannot be asked now.
func (s *Server) viewable(ctx context.Context, b *box) error {
	if err := s.scriptsMissing(); err != nil {
		return &problem{http.StatusNotImplemented, "unsupported", err.Error()}
	}
	done, err := b.use()
	if err != nil {
		return nil
	}
	defer done()
	return b.guest.Agent().viewable(ctx)
}

// viewable asks an agent whether it can show its desktop.
func (c *agentClient) viewable(ctx context.Context) error {
	_, _, err := c.do(ctx, http.MethodGet, "/view", nil, 4<<10)
	var refusal *agentRefusal
	if errors.As(err, &refusal) && refusal.Code == desktop.RefusedPlain {
		return nil
	}
	return err
}

// view opens a viewer's connection to an agent, on a connection of its own.
func (c *agentClient) view(ctx context.Context, control bool) (_ *viewConn, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, pictureWithin, fmt.Errorf("%w in %s", errAgent, pictureWithin))
	defer cancel()
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, agentFault(ctx, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, conn.Close())
		}
	}()
	stop := context.AfterFunc(ctx, func() {
		if conn.SetDeadline(time.Unix(1, 0)) != nil {
			return // it is closed
		}
	})
	defer stop()
	_, err = fmt.Fprintf(conn, "GET /view?control=%t HTTP/1.1\r\nHost: agent\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", control, desktop.ViewProtocol)
	if err != nil {
		return nil, agentFault(ctx, err)
	}
	// An answer has a bound; what comes after it has none.
	limited := &io.LimitedReader{R: conn, N: 16 << 10}
	reader := bufio.NewReader(limited)
	resp, err := http.ReadResponse(reader, nil)
	if err != nil {
		return nil, agentFault(ctx, err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		raw, err := io.ReadAll(resp.Body)
		return nil, errors.Join(refused(resp.StatusCode, raw), err, resp.Body.Close())
	}
	if !stop() {
		return nil, agentFault(ctx, context.Cause(ctx))
	}
	rest, err := reader.Peek(reader.Buffered())
	if err != nil {
		return nil, agentFault(ctx, err)
	}
	return &viewConn{Conn: conn, first: rest}, nil
}

// viewConn is a connection of which a part has been read already.
type viewConn struct {
	net.Conn
	first []byte
}

func (c *viewConn) Read(p []byte) (int, error) {
	if len(c.first) > 0 {
		n := copy(p, c.first)
		c.first = c.first[n:]
		return n, nil
	}
	return c.Conn.Read(p)
}

// CloseWrite tells the agent that the viewer has gone.
func (c *viewConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Close()
}
