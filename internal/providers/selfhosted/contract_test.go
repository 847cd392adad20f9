package selfhosted

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/http/httptest"
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

func serve(t testing.TB, limit int) server { return serveOn(t, limit, sandboxd.MachineDesktop) }

func serveOn(t testing.TB, limit int, machine string) server {
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
// desktops. What actions do on a desktop is checked where the X server is within
// reach, in package desktop; the suite's own page wants a window without a frame
// whose browser reports its dialogs.
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

// TestMicroVMs holds the provider to the suite where the server makes microVMs,
// with the stand-in for firecracker and a real desktop behind each.
func TestMicroVMs(t *testing.T) {
	var at server
	providertest.Exercise(t, func(t *testing.T) providers.Provider {
		at = serveOn(t, 40, sandboxd.MachineFirecracker)
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
