package guest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/vsock"
)

func TestCommandLine(t *testing.T) {
	config := json.RawMessage(`{"Home":"/home/user é","UID":1000}`)
	line := "console=ttyS0 root=/dev/vda " + CommandLine(config, 512<<20) + " pci=off\n"
	got, files, err := Parse(line)
	if err != nil || !bytes.Equal(got, config) || files != 512<<20 {
		t.Errorf("%s, %d, %v", got, files, err)
	}
	for _, line := range []string{"", "berth.agent=e30", "berth.files=1", "berth.agent=! berth.files=1", "berth.agent=e30 berth.files=x", "berth.agent=e30 berth.files=0"} {
		if _, _, err := Parse(line); err == nil {
			t.Errorf("%q is taken", line)
		}
	}
}

// FuzzParse: any command line gives what CommandLine can write, or an error.
func FuzzParse(f *testing.F) {
	f.Add(CommandLine(json.RawMessage(`{}`), 1))
	f.Add("berth.agent= berth.files=-1")
	f.Fuzz(func(t *testing.T, line string) {
		config, files, err := Parse(line)
		if err != nil {
			return
		}
		again, n, err := Parse(CommandLine(config, files))
		if err != nil || !bytes.Equal(again, config) || n != files {
			t.Errorf("%q: %s, %d, %v", line, again, n, err)
		}
	})
}

// TestReseed: the kernel takes the seed, from whoever may give one.
func TestReseed(t *testing.T) {
	if err := Reseed(bytes.Repeat([]byte("seed"), 16)); err != nil {
		t.Errorf("as root: %v", err)
	}
}

// from is a connection of somebody.
type from struct {
	net.Conn
	addr   net.Addr
	closed chan struct{}
}

func (c from) RemoteAddr() net.Addr { return c.addr }
func (c from) Close() error {
	close(c.closed)
	return nil
}

type queue chan net.Conn

func (q queue) Accept() (net.Conn, error) {
	c, ok := <-q
	if !ok {
		return nil, net.ErrClosed
	}
	return c, nil
}
func (q queue) Close() error   { return nil }
func (q queue) Addr() net.Addr { return &vsock.Addr{} }

// TestHostOnly: a program in the guest cannot speak to the agent as the host does.
func TestHostOnly(t *testing.T) {
	strangers := []from{
		{addr: &vsock.Addr{ContextID: vsock.Local, Port: 5}, closed: make(chan struct{})},
		{addr: &vsock.Addr{ContextID: 3, Port: 5}, closed: make(chan struct{})},
		{addr: &net.UnixAddr{Name: "x"}, closed: make(chan struct{})},
	}
	host := from{addr: &vsock.Addr{ContextID: vsock.Host, Port: 5}}
	q := make(queue, len(strangers)+1)
	for _, s := range strangers {
		q <- s
	}
	q <- host
	close(q)
	got, err := hostOnly{q}.Accept()
	if err != nil || got.RemoteAddr() != host.addr {
		t.Errorf("accepted %v, %v", got, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for i, s := range strangers {
		select {
		case <-s.closed:
		case <-ctx.Done():
			t.Errorf("stranger %d is still connected", i)
		}
	}
	if _, err := (hostOnly{q}).Accept(); !errors.Is(err, net.ErrClosed) || strings.Contains(err.Error(), "vsock") {
		t.Errorf("after the end: %v", err)
	}
}
