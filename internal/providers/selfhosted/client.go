package selfhosted

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"berth/internal/providers"
	"berth/internal/providers/httpapi"
)

// What a server may answer at most, in bytes.
const (
	maxAnswer   = 8 << 20
	maxPicture  = 32 << 20
	maxPictures = 64 << 20 // of a batch, in base64
	maxProblem  = 64 << 10
)

// errClosed is what calls of a closed provider end with.
var errClosed = fmt.Errorf("the provider is closed: %w", providers.ErrUnavailable)

// client speaks to one server.
type client struct {
	base      *url.URL
	key       string
	transport *http.Transport
	ctx       context.Context // ends with Close
	closing   context.CancelCauseFunc
}

func newClient(base *url.URL, key string, roots *x509.CertPool) *client {
	c := &client{base: base, key: key, transport: &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
		TLSClientConfig:     &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout: 5 * time.Second, MaxIdleConnsPerHost: 16, IdleConnTimeout: 90 * time.Second,
		MaxResponseHeaderBytes: 64 << 10, DisableCompression: true, // a small answer must not unpack to a large one
	}}
	c.ctx, c.closing = context.WithCancelCause(context.Background())
	return c
}

func (c *client) close() {
	c.closing(errClosed)
	c.transport.CloseIdleConnections()
}

// call is one call to make.
type call struct {
	method string
	path   []string // elements; escaped here
	body   any      // nil: none
	header map[string]string
	want   int // the status of success
	limit  int64
	within time.Duration // 0: as long as ctx
}

var errNoAnswer = fmt.Errorf("no answer in time: %w", providers.ErrTimeout)

// do makes a call and returns the answer's body.
func (c *client) do(ctx context.Context, in call) (http.Header, []byte, error) {
	what := in.method + " /" + strings.Join(in.path, "/")
	header, raw, err := c.send(ctx, in)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", what, err)
	}
	return header, raw, nil
}

func (c *client) send(ctx context.Context, in call) (http.Header, []byte, error) {
	if ctx.Err() != nil {
		return nil, nil, context.Cause(ctx)
	}
	bound, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(c.ctx, func() { cancel(errClosed) })()
	if in.within > 0 {
		var stop context.CancelFunc
		bound, stop = context.WithTimeoutCause(bound, in.within, errNoAnswer)
		defer stop()
	}
	req, err := c.request(bound, in)
	if err != nil {
		return nil, nil, err
	}
	resp, err := c.transport.RoundTrip(req) //nolint:bodyclose // ReadAll closes it. A Client would follow redirects and send the key along
	if err != nil {
		return nil, nil, httpapi.Fault(bound, err)
	}
	limit := in.limit
	if resp.StatusCode != in.want {
		limit = maxProblem
	}
	raw, err := httpapi.ReadAll(resp, limit)
	long := errors.Is(err, httpapi.ErrTooLong)
	switch {
	case resp.StatusCode != in.want && (err == nil || long):
		return nil, nil, problem(resp, raw)
	case long:
		return nil, nil, fmt.Errorf("the answer has more than %d bytes: %w", limit, providers.ErrUnavailable)
	case err != nil:
		return nil, nil, httpapi.Fault(bound, err)
	}
	return resp.Header, raw, nil
}

func (c *client) request(ctx context.Context, in call) (*http.Request, error) {
	var body io.Reader
	if in.body != nil {
		raw, err := json.Marshal(in.body)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", providers.ErrInvalid, err)
		}
		body = bytes.NewReader(raw)
	}
	req, err := http.NewRequestWithContext(ctx, in.method, c.base.JoinPath(in.path...).String(), body)
	if err != nil {
		return nil, fmt.Errorf("%w: the request cannot be made", providers.ErrInvalid) // the error itself would tell the URL
	}
	req.Header.Set("X-API-Key", c.key)
	req.Header.Set("Accept", "application/json, image/png")
	if in.body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	for name, value := range in.header {
		req.Header.Set(name, value)
	}
	if u := c.base.User; u != nil && req.Header.Get("Authorization") == "" {
		password, _ := u.Password()
		req.SetBasicAuth(u.Username(), password)
	}
	return req, nil
}

// problem turns an answer that is no success into an error.
func problem(resp *http.Response, raw []byte) error {
	var body struct {
		Code      int    `json:"code"`
		ErrorCode string `json:"error_code"`
		Message   string `json:"message"`
	}
	status := resp.StatusCode
	described := json.Unmarshal(raw, &body) == nil && body.Code == status
	say := func(kind error) error {
		if described && body.Message != "" {
			return fmt.Errorf("%.500s: %w", body.Message, kind)
		}
		return fmt.Errorf("status %d: %w", status, kind)
	}
	switch {
	case status == http.StatusTooManyRequests:
		return &providers.RateLimitError{RetryAfter: httpapi.RetryAfter(resp.Header.Get("Retry-After"))}
	case status >= 300 && status < 400:
		return fmt.Errorf("it redirects elsewhere (status %d), which is not followed: %w", status, providers.ErrUnavailable)
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		return fmt.Errorf("it does not take the API key (status %d): %w", status, providers.ErrUnavailable)
	case !described: // a proxy, or something else altogether
		return fmt.Errorf("status %d without the API's error body: is this address a sandbox server? %w", status, providers.ErrUnavailable)
	}
	switch status {
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge:
		return say(providers.ErrInvalid)
	case http.StatusNotFound:
		return say(providers.ErrNotFound)
	case http.StatusConflict:
		switch body.ErrorCode {
		case "fence_stale":
			return say(providers.ErrFenceStale)
		case "paused":
			return say(providers.ErrPaused)
		}
		return say(providers.ErrConflict)
	case http.StatusGone:
		return say(providers.ErrLost)
	case http.StatusNotImplemented:
		return say(providers.ErrUnsupported)
	case http.StatusInsufficientStorage:
		return say(providers.ErrFull)
	case http.StatusServiceUnavailable:
		if body.ErrorCode == "sandbox_capacity_unavailable" {
			return say(providers.ErrFull)
		}
	case http.StatusGatewayTimeout, http.StatusRequestTimeout:
		return say(providers.ErrTimeout)
	}
	return say(providers.ErrUnavailable)
}
