package selfhosted

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"berth/internal/providers"
	"berth/internal/providers/providertest"
	"berth/internal/sandboxd"
	"berth/internal/sandboxd/firecracker/firecrackertest"
)

const testKey = "test-key-0123456789"

func TestMain(m *testing.M) {
	sandboxd.TakeOver()
	firecrackertest.Main(sandboxd.ServeAgent)
	// The tests wait for other processes most of the time: more of them at once
	// than there are processors.
	flag.Parse()
	if f := flag.Lookup("test.parallel"); f.Value.String() == f.DefValue {
		if err := f.Value.Set("6"); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

// server is a real sandboxd of a test, with real desktops.
type server struct {
	url, state string
}

func serve(t testing.TB, limit int) server { return serveOn(t, limit, sandboxd.MachineDesktop, nil) }

func serveOn(t testing.TB, limit int, machine string, change func(*sandboxd.Options)) server {
	t.Helper()
	if err := sandboxd.Missing(); err != nil {
		t.Fatal(err)
	}
	state, err := os.MkdirTemp("", "sh")
	if err != nil {
		t.Fatal(err)
	}
	opts := sandboxd.Options{
		StateDir: state, APIKey: testKey, MaxContainers: limit, Warm: 1, Machine: machine, Limits: sandboxd.DefaultLimits(),
		Logger: slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelWarn})),
	}
	if machine == sandboxd.MachineFirecracker {
		opts.Firecracker = firecrackertest.Install(t)
	}
	if change != nil {
		change(&opts)
	}
	s, err := sandboxd.New(t.Context(), opts)
	if err != nil {
		t.Fatal(errors.Join(err, os.RemoveAll(state)))
	}
	h := httptest.NewServer(s.Handler())
	t.Cleanup(func() {
		h.CloseClientConnections()
		h.Close()
		if err := errors.Join(s.Shutdown(), os.RemoveAll(state)); err != nil {
			t.Errorf("shutdown: %v", err)
		}
	})
	return server{h.URL, state}
}

func open(t testing.TB, url string) *Provider {
	t.Helper()
	p, err := New(t.Context(), Options{ServerID: "ax102-01", URL: url, APIKey: testKey, Logger: slog.New(slog.NewTextHandler(testWriter{t}, nil))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return p
}

// firstProcess finds the process of a vm's sandbox in the server's state.
func (s server) firstProcess(t *testing.T, vm string) int {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(s.state, "guests", "*", "record.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		var r struct {
			ID    string
			Guest struct{ PID int }
		}
		if raw, err := os.ReadFile(f); err == nil && json.Unmarshal(raw, &r) == nil && r.ID == vm {
			return r.Guest.PID
		}
	}
	t.Fatalf("no sandbox of vm %s", vm)
	return 0
}

// TestContract holds the provider to the suite, against a real server with real
// desktops. What a page sees of the actions is in TestPages, what other programs
// see in package desktop.
func TestContract(t *testing.T) {
	var at server
	providertest.Exercise(t, func(t *testing.T) providers.Provider {
		at = serve(t, 40)
		return open(t, at.url)
	}, providertest.Options{
		NoPages: true, ChecksFences: true, Recalls: true,
		NewLimited: func(t *testing.T) providers.Provider { return open(t, serve(t, 2).url) },
		Crash: func(t *testing.T, _ providers.Provider, vm string) {
			if err := syscall.Kill(at.firstProcess(t, vm), syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		},
		Strays: children,
	})
}

// TestPages holds the actions on a desktop to what its browser sees of them. The
// browser has the whole display, so that a pixel of the display is one of the
// page.
func TestPages(t *testing.T) {
	own := ownAddress(t)
	providertest.Exercise(t, func(t *testing.T) providers.Provider {
		return open(t, serveOn(t, 40, sandboxd.MachineDesktop, func(o *sandboxd.Options) {
			o.OpenNetworks, o.BrowserFlags = []string{own + "/32"}, []string{"--kiosk"}
		}).url)
	}, providertest.Options{
		PagesOnly: true, Window: true,
		Reach: func(local string) string { return forward(t, own, local) },
	})
}

// ownAddress is one of this machine's that is not loopback.
func ownAddress(t *testing.T) string {
	t.Helper()
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && n.IP.IsGlobalUnicast() {
			return n.IP.String()
		}
	}
	t.Fatal("this machine has no address but loopback; a desktop reaches no page of the test")
	return ""
}

// forward makes a server of this process's loopback interface reachable at an
// address that desktops reach.
func forward(t *testing.T, host, local string) string {
	t.Helper()
	to, err := url.Parse(local)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: httputil.NewSingleHostReverseProxy(to), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	t.Cleanup(func() {
		if err := errors.Join(s.Close(), <-served); !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("the forwarder: %v", err)
		}
	})
	return "http://" + l.Addr().String()
}

// TestMicroVMs holds the provider to the suite where the server makes microVMs,
// with the stand-in for firecracker and a real desktop behind each.
func TestMicroVMs(t *testing.T) {
	var at server
	providertest.Exercise(t, func(t *testing.T) providers.Provider {
		at = serveOn(t, 40, sandboxd.MachineFirecracker, nil)
		return open(t, at.url)
	}, providertest.Options{
		NoPages: true, ChecksFences: true, Recalls: true,
		Crash: func(t *testing.T, _ providers.Provider, vm string) {
			if err := syscall.Kill(at.firstProcess(t, vm), syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		},
		Strays: children,
	})
}

// children lists the processes that this one has started and that still run.
func children(t *testing.T) []string {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range entries {
		raw, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue
		}
		name, rest, _ := strings.Cut(string(raw), ") ")
		if f := strings.Fields(rest); len(f) > 1 && f[1] == strconv.Itoa(os.Getpid()) && f[0] != "Z" {
			out = append(out, fmt.Sprint("process ", name))
		}
	}
	return out
}
