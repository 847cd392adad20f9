package e2b

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"berth/internal/providers"
	"berth/internal/providers/httpapi"
)

// envdPort is where a sandbox's envd listens.
const envdPort = 49983

// Bounds of a process's stream. A keepalive comes at least every keepalive; one
// that is silent for silence is given up.
const (
	maxMessage = 4 << 20  // bytes of one message
	maxOutput  = 64 << 20 // bytes of one process's output
	keepalive  = 10 * time.Second
	silence    = 35 * time.Second
	startTime  = 20 * time.Second // from the call to the process's start
)

// Errors of a sandbox's proxy. They are looked into before a caller sees them.
var (
	errGone   = errors.New("the sandbox is gone or paused") // 502
	errMoving = errors.New("the sandbox changes its state") // 409
)

// place is where one sandbox is reached.
type place struct {
	id     string
	token  string // of envd; "" : none
	domain string
}

// base is the address of the sandbox's port.
func (c *client) base(at place, port int) *url.URL {
	if c.sandboxes != nil {
		return c.sandboxes
	}
	return &url.URL{Scheme: "https", Host: fmt.Sprintf("%d-%s.%s", port, at.id, at.domain)}
}

// process is what to start.
type process struct {
	args  []string // of /bin/bash
	tag   string
	limit time.Duration // envd ends it then
}

// Messages of process.Process/Start, as far as they are used, in protobuf's
// JSON.
type startRequest struct {
	Process struct {
		Cmd  string            `json:"cmd"`
		Args []string          `json:"args"`
		Envs map[string]string `json:"envs"`
	} `json:"process"`
	Tag   string `json:"tag,omitempty"`
	Stdin bool   `json:"stdin"`
}

type startResponse struct {
	Event struct {
		Start *struct {
			PID int `json:"pid"`
		} `json:"start"`
		Data *struct {
			Stdout []byte `json:"stdout"`
			Stderr []byte `json:"stderr"`
		} `json:"data"`
		End *struct {
			ExitCode int    `json:"exitCode"` // left out where it is 0
			Exited   bool   `json:"exited"`
			Status   string `json:"status"`
			Error    string `json:"error"`
		} `json:"end"`
	} `json:"event"`
}

// ended is how a process came to its end.
type ended struct {
	code   int
	status string
	stderr []byte // its last part
}

const keptStderr = 2 << 10

// start starts a process and hands its output on as it comes; it returns when
// the process has ended. The process goes on when start returns early. started
// tells whether the sandbox had said that it runs.
func (c *client) start(ctx context.Context, at place, p process, output func([]byte) error) (end ended, started bool, err error) {
	bound, cancel := c.bound(ctx, 0)
	defer cancel()
	quiet, hush := context.WithCancelCause(bound)
	defer hush(nil)
	timer := time.AfterFunc(startTime, func() { hush(fmt.Errorf("the sandbox says nothing: %w", providers.ErrTimeout)) })
	defer timer.Stop()

	var in startRequest
	in.Process.Cmd, in.Process.Args, in.Process.Envs, in.Tag = "/bin/bash", p.args, map[string]string{"DISPLAY": ":0"}, p.tag
	raw, err := json.Marshal(in)
	if err != nil {
		return end, false, fmt.Errorf("%w: %w", providers.ErrInvalid, err)
	}
	header := map[string]string{
		"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1", "Keepalive-Ping-Interval": strconv.Itoa(int(keepalive / time.Second)),
	}
	if p.limit > 0 {
		header["Connect-Timeout-Ms"] = strconv.FormatInt(p.limit.Milliseconds(), 10)
	}
	resp, err := c.envd(quiet, at, "/process.Process/Start", envelope(raw), header)
	if err != nil {
		return end, false, err
	}
	defer func() {
		if closeErr := resp.Body.Close(); err == nil && closeErr != nil {
			err = httpapi.Fault(quiet, closeErr)
		}
	}()
	body, total, over := bufio.NewReaderSize(resp.Body, 64<<10), 0, false
	for {
		flags, raw, err := message(body)
		switch {
		case err != nil && (over && errors.Is(err, io.EOF)):
			return end, started, nil
		case err != nil:
			return end, started, httpapi.Fault(quiet, err)
		case flags&0x02 != 0:
			return end, started, endOf(raw, over)
		}
		timer.Reset(silence)
		var m startResponse
		if err := httpapi.Decode(raw, &m); err != nil {
			return end, started, err
		}
		switch e := m.Event; {
		case e.Start != nil:
			started = true
		case e.Data != nil:
			if total += len(e.Data.Stdout) + len(e.Data.Stderr); total > maxOutput {
				return end, started, fmt.Errorf("a process said more than %d bytes: %w", maxOutput, providers.ErrUnavailable)
			}
			end.stderr = append(end.stderr, e.Data.Stderr...)
			end.stderr = end.stderr[max(0, len(end.stderr)-keptStderr):]
			if err := output(e.Data.Stdout); err != nil {
				return end, started, err
			}
		case e.End != nil:
			end.code, end.status, over = e.End.ExitCode, e.End.Status, true
		}
	}
}

// endOf reads the message that ends a stream.
func endOf(raw []byte, over bool) error {
	var m struct {
		Error *struct {
			Code    string `json:"code"`
			Message string `json:"message"`
		} `json:"error"`
	}
	if err := httpapi.Decode(raw, &m); err != nil {
		return err
	}
	switch {
	case m.Error == nil && over:
		return nil
	case m.Error == nil:
		return fmt.Errorf("a process's stream ended before the process: %w", providers.ErrUnavailable)
	}
	kind := providers.ErrUnavailable
	switch m.Error.Code {
	case "deadline_exceeded":
		kind = providers.ErrTimeout
	case "invalid_argument":
		kind = providers.ErrInvalid
	}
	return fmt.Errorf("envd: %s: %.300s: %w", m.Error.Code, m.Error.Message, kind)
}

func envelope(raw []byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(raw))), raw...)
}

// message reads one envelope (Connect protocol, "Streaming RPCs").
func message(r io.Reader) (flags byte, raw []byte, err error) {
	head := make([]byte, 5)
	if _, err := io.ReadFull(r, head); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(head[1:])
	if n > maxMessage || head[0]&^0x02 != 0 {
		return 0, nil, fmt.Errorf("an envelope of %d bytes with flags %#x: %w", n, head[0], providers.ErrUnavailable)
	}
	raw = make([]byte, n)
	if _, err := io.ReadFull(r, raw); err != nil {
		return 0, nil, fmt.Errorf("half a message: %w", errors.Join(io.ErrUnexpectedEOF, err))
	}
	return head[0], raw, nil
}

// envd makes a call of a sandbox's envd and returns an answer of status 200,
// whose body the caller closes.
func (c *client) envd(ctx context.Context, at place, path string, body []byte, header map[string]string) (*http.Response, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	to := c.base(at, envdPort).JoinPath(path)
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, to.String(), bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("%w: the request cannot be made", providers.ErrInvalid) // the error itself would tell the URL
	}
	req.GetBody = nil // nothing is started twice: a connection that breaks is not tried again
	req.Header.Set("User-Agent", "berth")
	for name, value := range header {
		req.Header.Set(name, value)
	}
	req.Header.Set("E2b-Sandbox-Id", at.id)
	req.Header.Set("E2b-Sandbox-Port", strconv.Itoa(envdPort))
	req.SetBasicAuth("user", "") // who the process runs as
	if at.token != "" {
		req.Header.Set("X-Access-Token", at.token)
	}
	resp, err := c.transport.RoundTrip(req)
	if err != nil {
		return nil, httpapi.Fault(ctx, err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	raw, err := httpapi.ReadAll(resp, maxProblem)
	if err != nil && !errors.Is(err, httpapi.ErrTooLong) {
		return nil, httpapi.Fault(ctx, err)
	}
	return nil, sandboxProblem(resp.StatusCode, resp.Header, raw)
}

// alive asks whether envd answers; the error says what stands in the way.
func (c *client) alive(ctx context.Context, at place) error {
	bound, cancel := c.bound(ctx, 2*time.Second)
	defer cancel()
	req, err := request(bound, http.MethodGet, c.base(at, envdPort).JoinPath("health"), nil)
	if err != nil {
		return err
	}
	req.Header.Set("E2b-Sandbox-Id", at.id)
	req.Header.Set("E2b-Sandbox-Port", strconv.Itoa(envdPort))
	resp, err := c.transport.RoundTrip(req) //nolint:bodyclose // ReadAll closes it
	if err != nil {
		return httpapi.Fault(bound, err)
	}
	raw, err := httpapi.ReadAll(resp, maxProblem)
	switch {
	case err != nil && !errors.Is(err, httpapi.ErrTooLong):
		return httpapi.Fault(bound, err)
	case resp.StatusCode == http.StatusNoContent:
		return nil
	}
	return sandboxProblem(resp.StatusCode, resp.Header, raw)
}

// sandboxProblem turns an answer of a sandbox's proxy or envd that is no success into
// an error. Nothing was started.
func sandboxProblem(status int, header http.Header, raw []byte) error {
	var body struct {
		Port    int    `json:"port"`
		Message string `json:"message"`
	}
	described := json.Unmarshal(raw, &body) == nil && body.Message != ""
	switch {
	case status == http.StatusTooManyRequests:
		return &providers.RateLimitError{RetryAfter: httpapi.RetryAfter(header.Get("Retry-After"))}
	case status == http.StatusBadGateway && described && body.Port != 0:
		return fmt.Errorf("the sandbox runs, and nothing listens on its port %d: %w", body.Port, providers.ErrUnavailable)
	case status == http.StatusBadGateway && described:
		return errGone
	case status == http.StatusConflict:
		return errMoving
	case status >= 300 && status < 400:
		return fmt.Errorf("the sandbox redirects elsewhere (status %d), which is not followed: %w", status, providers.ErrUnavailable)
	}
	return fmt.Errorf("the sandbox answers status %d: %w", status, providers.ErrUnavailable)
}
