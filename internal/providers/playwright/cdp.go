package playwright

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/coder/websocket"
	pw "github.com/mxschmitt/playwright-go"
)

// maxMessage is more than any picture of the largest display.
const maxMessage = 256 << 20

// devtools is a connection of our own to a browser's DevTools, beside
// Playwright's: for what its API lacks, for pictures, which would otherwise
// travel through the driver, and because its calls end when their ctx does. It
// speaks to the browser itself (session "") and to pages by their sessions.
type devtools struct {
	ws   *websocket.Conn
	gone chan struct{} // closed when the connection is over

	mu       sync.Mutex
	last     int
	pending  map[int]pending
	handlers map[string]func(session string, params json.RawMessage)
}

// pending is a command without an answer yet.
type pending struct {
	session string
	answer  chan message // of capacity one
}

// message is one CDP message: an answer if it has an id, else an event.
type message struct {
	ID     int             `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
	Result json.RawMessage `json:"result"`
	Error  *struct {
		Message string `json:"message"`
	} `json:"error"`
	Session string `json:"sessionId"`
}

type params = map[string]any

var errDevtoolsGone = errors.New("the connection to the browser broke")

// dialDevtools connects. The connection outlives ctx, until close.
func dialDevtools(ctx context.Context, endpoint string, start func(func()) bool) (*devtools, error) {
	ws, _, err := websocket.Dial(ctx, endpoint, nil) //nolint:bodyclose // Dial takes care of the body, as it documents
	if err != nil {
		return nil, fmt.Errorf("connect to the browser: %w", err)
	}
	ws.SetReadLimit(maxMessage)
	c := &devtools{ws: ws, gone: make(chan struct{}), pending: map[int]pending{}, handlers: map[string]func(string, json.RawMessage){}}
	c.on("Target.detachedFromTarget", c.detached)
	if !start(c.read) {
		return nil, errors.Join(errKilled, ws.CloseNow())
	}
	return c, nil
}

// read distributes what comes until the connection is over.
func (c *devtools) read() {
	defer close(c.gone)
	for {
		_, raw, err := c.ws.Read(context.Background())
		if err != nil {
			c.close()
			return
		}
		var m message
		if err := json.Unmarshal(raw, &m); err != nil {
			continue // not CDP; whoever waits for it has a time-out
		}
		c.mu.Lock()
		waiter, handler := c.pending[m.ID], c.handlers[m.Method]
		delete(c.pending, m.ID)
		c.mu.Unlock()
		if m.ID != 0 && waiter.answer != nil {
			waiter.answer <- m
		} else if handler != nil {
			handler(m.Session, m.Params)
		}
	}
}

// detached fails the commands of a session that is over, since Chromium does
// not answer them.
func (c *devtools) detached(_ string, raw json.RawMessage) {
	var event struct {
		SessionID string `json:"sessionId"`
	}
	if err := json.Unmarshal(raw, &event); err != nil || event.SessionID == "" {
		return // no event that we know
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for id, p := range c.pending {
		if p.session == event.SessionID {
			delete(c.pending, id)
			close(p.answer)
		}
	}
}

// close ends the connection at once. The browser and its pages stay.
func (c *devtools) close() {
	_ = c.ws.CloseNow() // says only that it was closed already
}

// on sets the handler of an event. It runs on the connection's only reader:
// it must not block, and must not call call.
func (c *devtools) on(event string, handler func(session string, params json.RawMessage)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.handlers[event] = handler
}

// call runs a command and decodes its answer into out, unless that is nil. It
// returns when ctx ends; the command may run all the same.
func (c *devtools) call(ctx context.Context, session, method string, p params, out any) error {
	answer := make(chan message, 1)
	c.mu.Lock()
	c.last++
	id := c.last
	c.pending[id] = pending{session, answer}
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.pending, id)
		c.mu.Unlock()
	}()
	request := params{"id": id, "method": method, "params": p}
	if p == nil {
		request["params"] = params{}
	}
	if session != "" {
		request["sessionId"] = session
	}
	raw, err := json.Marshal(request)
	if err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	// Not ctx: a write that is cut off closes the connection.
	writeCtx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	err = c.ws.Write(writeCtx, websocket.MessageText, raw)
	cancel()
	if err != nil {
		return fmt.Errorf("%s: %w: %w", method, errDevtoolsGone, err)
	}
	select {
	case m, ok := <-answer:
		if !ok {
			return fmt.Errorf("%s: %w", method, pw.ErrTargetClosed)
		}
		if m.Error != nil {
			return fmt.Errorf("%s: %s", method, m.Error.Message)
		}
		if out == nil {
			return nil
		}
		if err := json.Unmarshal(m.Result, out); err != nil {
			return fmt.Errorf("%s: %w", method, err)
		}
		return nil
	case <-c.gone:
		return fmt.Errorf("%s: %w", method, errDevtoolsGone)
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", method, context.Cause(ctx))
	}
}

// attach opens a session with a target and returns its id.
func (c *devtools) attach(ctx context.Context, target string) (string, error) {
	var attached struct {
		SessionID string `json:"sessionId"`
	}
	err := c.call(ctx, "", "Target.attachToTarget", params{"targetId": target, "flatten": true}, &attached)
	return attached.SessionID, err
}
