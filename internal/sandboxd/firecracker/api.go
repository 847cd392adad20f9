package firecracker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"
)

// How long a call may take, and how much an answer may be.
const (
	callWithin     = 5 * time.Second
	bootWithin     = 15 * time.Second // InstanceStart reads the kernel and the initrd
	snapshotWithin = 90 * time.Second // a full snapshot writes all of the memory
	maxAnswer      = 64 << 10         // bytes
)

// APIError is a call that Firecracker refused. After a refused LoadSnapshot its
// process ends by itself.
type APIError struct {
	Method, Path string
	Status       int    // HTTP
	Message      string // its fault_message; "" where it gave none
}

func (e *APIError) Error() string {
	if e.Message == "" {
		return fmt.Sprintf("firecracker: %s %s: status %d", e.Method, e.Path, e.Status)
	}
	return fmt.Sprintf("firecracker: %s %s: %.500s", e.Method, e.Path, e.Message)
}

// errAnswer: what answers on the socket is no Firecracker, or another version.
var errAnswer = errors.New("firecracker: the answer is not what its API describes")

// Client speaks to one Firecracker process. It is safe for concurrent use; the
// process takes one call at a time.
type Client struct{ http *http.Client }

// NewClient returns a client of the API socket at a path. Nothing is dialled yet.
func NewClient(socket string) *Client {
	return &Client{&http.Client{
		Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "unix", socket)
			},
			MaxIdleConnsPerHost: 1, IdleConnTimeout: time.Minute, DisableCompression: true, MaxResponseHeaderBytes: 16 << 10,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// Close gives idle connections back.
func (c *Client) Close() { c.http.CloseIdleConnections() }

func (c *Client) do(ctx context.Context, within time.Duration, method, path string, body, into any) error {
	ctx, cancel := context.WithTimeoutCause(ctx, within, fmt.Errorf("firecracker: %s %s: no answer in %s", method, path, within))
	defer cancel()
	var reader io.Reader
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			return fmt.Errorf("encode a call of firecracker: %w", err)
		}
		reader = bytes.NewReader(raw)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://localhost"+path, reader)
	if err != nil {
		return fmt.Errorf("make a call of firecracker: %w", err)
	}
	req.Header.Set("Accept", "application/json")
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return fault(ctx, method, path, err)
	}
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return fault(ctx, method, path, err)
	}
	switch {
	case len(raw) > maxAnswer:
		return fmt.Errorf("%w: %s %s: more than %d bytes", errAnswer, method, path, maxAnswer)
	case resp.StatusCode >= 300:
		refusal := &APIError{Method: method, Path: path, Status: resp.StatusCode}
		var said struct {
			Message string `json:"fault_message"`
		}
		if json.Unmarshal(raw, &said) == nil {
			refusal.Message = said.Message
		}
		return refusal
	case into == nil:
		return nil
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return fmt.Errorf("%w: %s %s: %w", errAnswer, method, path, err)
	}
	return nil
}

// fault tells who ended a call: the caller or its time, else the socket.
func fault(ctx context.Context, method, path string, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return fmt.Errorf("firecracker: %s %s: %w", method, path, err)
}

// InstanceInfo is what a microVM is.
type InstanceInfo struct {
	ID      string `json:"id"`
	State   string `json:"state"` // one of the states below
	Version string `json:"vmm_version"`
}

// States of an instance.
const (
	StateNotStarted = "Not started"
	StateRunning    = "Running"
	StatePaused     = "Paused"
)

// Info tells what the microVM is.
func (c *Client) Info(ctx context.Context) (InstanceInfo, error) {
	var info InstanceInfo
	err := c.do(ctx, callWithin, http.MethodGet, "/", nil, &info)
	if err == nil && info.State == "" {
		err = fmt.Errorf("%w: GET / names no state", errAnswer)
	}
	return info, err
}

// MachineConfig sizes a microVM.
type MachineConfig struct {
	VCPUs     int `json:"vcpu_count"`   // 1 to 32
	MemoryMiB int `json:"mem_size_mib"` // MiB
}

// PutMachineConfig sizes the microVM; before its start only.
func (c *Client) PutMachineConfig(ctx context.Context, m MachineConfig) error {
	return c.do(ctx, callWithin, http.MethodPut, "/machine-config", m, nil)
}

// BootSource says what is booted.
type BootSource struct {
	Kernel string `json:"kernel_image_path"`
	Initrd string `json:"initrd_path,omitempty"`
	Args   string `json:"boot_args,omitempty"`
}

// PutBootSource says what is booted; before the start only.
func (c *Client) PutBootSource(ctx context.Context, b BootSource) error {
	return c.do(ctx, callWithin, http.MethodPut, "/boot-source", b, nil)
}

// Drive is a block device. The root device is /dev/vda inside.
type Drive struct {
	ID       string `json:"drive_id"`
	Path     string `json:"path_on_host"`
	Root     bool   `json:"is_root_device"`
	ReadOnly bool   `json:"is_read_only"`
}

// PutDrive adds a drive; before the start only.
func (c *Client) PutDrive(ctx context.Context, d Drive) error {
	return c.do(ctx, callWithin, http.MethodPut, "/drives/"+d.ID, d, nil)
}

// Vsock is the device that connects host and guest.
type Vsock struct {
	CID  uint32 `json:"guest_cid"` // 3 and more; known inside this microVM only
	Path string `json:"uds_path"`
}

// PutVsock adds the vsock device; before the start only.
func (c *Client) PutVsock(ctx context.Context, v Vsock) error {
	return c.do(ctx, callWithin, http.MethodPut, "/vsock", v, nil)
}

// PutEntropy adds a virtio-rng device; before the start only.
func (c *Client) PutEntropy(ctx context.Context) error {
	return c.do(ctx, callWithin, http.MethodPut, "/entropy", struct{}{}, nil)
}

// Start boots the microVM.
func (c *Client) Start(ctx context.Context) error {
	return c.do(ctx, bootWithin, http.MethodPut, "/actions", map[string]string{"action_type": "InstanceStart"}, nil)
}

// Pause stops the processors of a microVM that was started.
func (c *Client) Pause(ctx context.Context) error { return c.patch(ctx, "Paused") }

// Resume lets them go on.
func (c *Client) Resume(ctx context.Context) error { return c.patch(ctx, "Resumed") }

func (c *Client) patch(ctx context.Context, state string) error {
	return c.do(ctx, callWithin, http.MethodPatch, "/vm", map[string]string{"state": state}, nil)
}

// Snapshot names the two files of a snapshot.
type Snapshot struct{ State, Memory string }

// CreateSnapshot writes a full snapshot of a paused microVM. Connections over
// vsock end with it.
func (c *Client) CreateSnapshot(ctx context.Context, s Snapshot) error {
	return c.do(ctx, snapshotWithin, http.MethodPut, "/snapshot/create", map[string]string{
		"snapshot_type": "Full", "snapshot_path": s.State, "mem_file_path": s.Memory,
	}, nil)
}

// LoadSnapshot makes the microVM from a snapshot, paused; before anything has
// been configured only. The memory file must stay as it is for the VM's life.
func (c *Client) LoadSnapshot(ctx context.Context, s Snapshot) error {
	return c.do(ctx, snapshotWithin, http.MethodPut, "/snapshot/load", map[string]any{
		"snapshot_path": s.State, "mem_backend": map[string]string{"backend_type": "File", "backend_path": s.Memory}, "resume_vm": false,
	}, nil)
}
