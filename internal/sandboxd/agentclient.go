package sandboxd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"berth/internal/desktop"
)

// What an agent may answer at most, in bytes: it is inside and not trusted.
const (
	maxPicture = 64 << 20
	maxAnswer  = 96 << 20 // pictures of a whole batch, in base64
)

// errAgent: the connection to the agent broke; the sandbox is or will be gone.
var errAgent = errors.New("the sandbox does not answer")

// agentClient speaks to the agent of one sandbox.
type agentClient struct {
	http *http.Client
	dial func(context.Context) (net.Conn, error)
}

// dialUnix connects to an agent on a unix socket.
func dialUnix(socket string) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) { return (&net.Dialer{}).DialContext(ctx, "unix", socket) }
}

func newAgentClient(dial func(context.Context) (net.Conn, error)) *agentClient {
	transport := &http.Transport{
		DialContext:         func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
		MaxIdleConnsPerHost: 4, IdleConnTimeout: time.Minute, DisableCompression: true, MaxResponseHeaderBytes: 16 << 10,
	}
	client := &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	return &agentClient{http: client, dial: dial}
}

func (c *agentClient) close() { c.http.CloseIdleConnections() }

// do sends a request and returns the answer's header and body, or an
// *agentRefusal where that is no success.
func (c *agentClient) do(ctx context.Context, method, path string, body any, limit int64) (http.Header, []byte, error) {
	var reader io.Reader
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			return nil, nil, fmt.Errorf("encode a request: %w", err)
		}
		reader = bytes.NewReader(raw)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://agent"+path, reader)
	if err != nil {
		return nil, nil, fmt.Errorf("make a request: %w", err)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, nil, agentFault(ctx, err)
	}
	raw, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return nil, nil, agentFault(ctx, err)
	}
	if int64(len(raw)) > limit {
		return nil, nil, fmt.Errorf("%w: more than %d bytes", errAgent, limit)
	}
	if resp.StatusCode >= 300 {
		return nil, nil, refused(resp.StatusCode, raw)
	}
	return resp.Header, raw, nil
}

// refused reads an answer that is no success.
func refused(status int, raw []byte) error {
	refusal := &agentRefusal{status: status}
	if err := json.Unmarshal(raw, &refusal.Refusal); err != nil {
		return fmt.Errorf("%w: status %d and no reason", errAgent, status)
	}
	return refusal
}

func agentFault(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return fmt.Errorf("%w: %w", errAgent, err)
}

// agentRefusal is an answer that is no success.
type agentRefusal struct {
	status int
	desktop.Refusal
}

func (r *agentRefusal) Error() string { return r.Code + ": " + r.Message }

func (c *agentClient) ready(ctx context.Context) error {
	_, _, err := c.do(ctx, http.MethodGet, "/ready", nil, 1<<10)
	return err
}

func (c *agentClient) claim(ctx context.Context, claim desktop.Claim) error {
	_, _, err := c.do(ctx, http.MethodPut, "/claim", claim, 1<<10)
	return err
}

// wake tells the agent of a machine made from a snapshot the time, and a seed.
func (c *agentClient) wake(ctx context.Context, in desktop.Waking) error {
	_, _, err := c.do(ctx, http.MethodPut, "/wake", in, 1<<10)
	return err
}

// act runs a batch; the answer is the API's, as it stands.
func (c *agentClient) act(ctx context.Context, b desktop.Batch) (desktop.Performed, error) {
	return c.performed(ctx, http.MethodPost, "/actions", b)
}

func (c *agentClient) recall(ctx context.Context, key string) (desktop.Performed, error) {
	return c.performed(ctx, http.MethodGet, "/actions/"+url.PathEscape(key), nil)
}

func (c *agentClient) cancel(ctx context.Context, key string, epoch uint64) error {
	_, _, err := c.do(ctx, http.MethodDelete, "/actions/"+url.PathEscape(key)+"?epoch="+strconv.FormatUint(epoch, 10), nil, 1<<10)
	return err
}

func (c *agentClient) performed(ctx context.Context, method, path string, body any) (desktop.Performed, error) {
	_, raw, err := c.do(ctx, method, path, body, maxAnswer)
	if err != nil {
		return desktop.Performed{}, err
	}
	var p desktop.Performed
	if err := json.Unmarshal(raw, &p); err != nil {
		return p, fmt.Errorf("%w: %w", errAgent, err)
	}
	return p, nil
}

// screenshot returns a PNG, and the headers that go with it.
func (c *agentClient) screenshot(ctx context.Context) ([]byte, http.Header, error) {
	header, raw, err := c.do(ctx, http.MethodGet, "/screenshot", nil, maxPicture)
	return raw, header, err
}
