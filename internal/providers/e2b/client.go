package e2b

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
	"slices"
	"strings"
	"time"

	"berth/internal/providers"
	"berth/internal/providers/httpapi"
)

// What E2B may answer at most, in bytes.
const (
	maxAnswer  = 8 << 20
	maxProblem = 64 << 10
)

// errClosed is what calls of a closed provider end with.
var errClosed = fmt.Errorf("the provider is closed: %w", providers.ErrUnavailable)

var errNoAnswer = fmt.Errorf("no answer in time: %w", providers.ErrTimeout)

// client speaks to the REST API and to sandboxes.
type client struct {
	api       *url.URL
	key       string
	sandboxes *url.URL // where all sandboxes are reached; nil: each at a host of its own
	transport *http.Transport
	ctx       context.Context // ends with Close
	closing   context.CancelCauseFunc
}

func newClient(api, sandboxes *url.URL, key string, roots *x509.CertPool) *client {
	c := &client{api: api, key: key, sandboxes: sandboxes, transport: &http.Transport{
		Proxy:               http.ProxyFromEnvironment,
		DialContext:         (&net.Dialer{Timeout: 5 * time.Second, KeepAlive: 15 * time.Second}).DialContext,
		TLSClientConfig:     &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout: 5 * time.Second, MaxIdleConnsPerHost: 32, IdleConnTimeout: 90 * time.Second,
		MaxResponseHeaderBytes: 64 << 10, DisableCompression: true, // a small answer must not unpack to a large one
	}}
	c.ctx, c.closing = context.WithCancelCause(context.Background())
	return c
}

func (c *client) close() {
	c.closing(errClosed)
	c.transport.CloseIdleConnections()
}

// bound ends with ctx, with the provider, and after within if that is not 0.
func (c *client) bound(ctx context.Context, within time.Duration) (context.Context, context.CancelFunc) {
	bound, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(c.ctx, func() { cancel(errClosed) })
	done := func() { stop(); cancel(nil) }
	if within <= 0 {
		return bound, done
	}
	timed, end := context.WithTimeoutCause(bound, within, errNoAnswer)
	return timed, func() { end(); done() }
}

// call is one call of the REST API.
type call struct {
	method string
	path   []string // elements; escaped here
	query  url.Values
	body   any // nil: none
	want   []int
	within time.Duration
}

// do makes a call and returns the answer's body.
func (c *client) do(ctx context.Context, in call) (http.Header, []byte, error) {
	header, raw, err := c.rest(ctx, in)
	if err != nil {
		return nil, nil, fmt.Errorf("%s /%s: %w", in.method, strings.Join(in.path, "/"), err)
	}
	return header, raw, nil
}

func (c *client) rest(ctx context.Context, in call) (http.Header, []byte, error) {
	if ctx.Err() != nil {
		return nil, nil, context.Cause(ctx)
	}
	bound, cancel := c.bound(ctx, in.within)
	defer cancel()
	to := c.api.JoinPath(in.path...)
	to.RawQuery = in.query.Encode()
	req, err := request(bound, in.method, to, in.body)
	if err != nil {
		return nil, nil, err
	}
	req.Header.Set("X-API-Key", c.key)
	req.Header.Set("Accept", "application/json")
	resp, err := c.transport.RoundTrip(req) //nolint:bodyclose // ReadAll closes it. A Client would follow redirects and send the key along
	if err != nil {
		return nil, nil, httpapi.Fault(bound, err)
	}
	limit := int64(maxAnswer)
	if !slices.Contains(in.want, resp.StatusCode) {
		limit = maxProblem
	}
	raw, err := httpapi.ReadAll(resp, limit)
	switch {
	case !slices.Contains(in.want, resp.StatusCode) && (err == nil || errors.Is(err, httpapi.ErrTooLong)):
		return nil, nil, problem(resp, raw)
	case err != nil:
		return nil, nil, httpapi.Fault(bound, err)
	}
	return resp.Header, raw, nil
}

func request(ctx context.Context, method string, to *url.URL, body any) (*http.Request, error) {
	var reader io.Reader
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", providers.ErrInvalid, err)
		}
		reader = bytes.NewReader(raw)
	}
	req, err := http.NewRequestWithContext(ctx, method, to.String(), reader)
	if err != nil {
		return nil, fmt.Errorf("%w: the request cannot be made", providers.ErrInvalid) // the error itself would tell the URL
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	req.Header.Set("User-Agent", "berth")
	if u := to.User; u != nil {
		password, _ := u.Password()
		req.SetBasicAuth(u.Username(), password)
	}
	return req, nil
}

// problem turns an answer of the API that is no success into an error.
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
		// Two different waits (e2b-dev/infra#1434): a rate comes back by itself,
		// room only when a sandbox ends. The message is all that tells them apart.
		if described && strings.Contains(strings.ToLower(body.Message), "concurrent") {
			return say(providers.ErrFull)
		}
		return &providers.RateLimitError{RetryAfter: httpapi.RetryAfter(resp.Header.Get("Retry-After"))}
	case status >= 300 && status < 400:
		return fmt.Errorf("it redirects elsewhere (status %d), which is not followed: %w", status, providers.ErrUnavailable)
	case status == http.StatusUnauthorized || status == http.StatusForbidden:
		return fmt.Errorf("it does not take the API key (status %d): %w", status, providers.ErrUnavailable)
	case !described: // a proxy, or something else altogether
		return fmt.Errorf("status %d without the API's error body: is this address E2B's API? %w", status, providers.ErrUnavailable)
	}
	switch status {
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge:
		return say(providers.ErrInvalid)
	case http.StatusNotFound:
		return say(providers.ErrNotFound)
	case http.StatusConflict:
		return say(providers.ErrConflict)
	case http.StatusServiceUnavailable:
		if body.ErrorCode == "sandbox_capacity_unavailable" || body.ErrorCode == "sandbox_no_compatible_node" {
			return say(providers.ErrFull)
		}
	case http.StatusGatewayTimeout, http.StatusRequestTimeout:
		return say(providers.ErrTimeout)
	}
	return say(providers.ErrUnavailable)
}
