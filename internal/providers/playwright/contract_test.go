package playwright

import (
	"log/slog"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"berth/internal/providers"
	"berth/internal/providers/providertest"
)

// testLogger logs to the test's output.
func testLogger(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Helper()
	w.t.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

// start starts a provider that is closed, with its sandboxes, with the test.
func start(t testing.TB, opts Options) *Provider {
	t.Helper()
	opts.ServerID = "playwright-01"
	if opts.StateDir == "" {
		opts.StateDir = t.TempDir()
	}
	if opts.Logger == nil {
		opts.Logger = testLogger(t)
	}
	p, err := New(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		if err := reapAll(opts.StateDir); err != nil {
			t.Errorf("reap: %v", err)
		}
	})
	return p
}

// find returns the browser of a sandbox that runs.
func (p *Provider) find(vm string) (*sandbox, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b, err := p.lookup(vm)
	if err != nil {
		return nil, err
	}
	if b.sandbox == nil {
		return nil, errPaused
	}
	return b.sandbox, nil
}

// browsersOf lists the live processes whose command line names dir.
func browsersOf(dir string) []int {
	var out []int
	eachProcess(func(pid int) {
		raw, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
		if s, statErr := readStat(pid); err == nil && statErr == nil && s.state != "Z" && strings.Contains(string(raw), dir) {
			out = append(out, pid)
		}
	})
	return out
}

func reapAll(dir string) error {
	for _, pid := range browsersOf(dir) {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && err != syscall.ESRCH {
			return err
		}
	}
	return nil
}

func TestContract(t *testing.T) {
	var dirs []string
	newProvider := func(t *testing.T, limit int) providers.Provider {
		dirs = append(dirs, t.TempDir())
		return start(t, Options{StateDir: dirs[len(dirs)-1], MaxContainers: limit, Spares: 1})
	}
	providertest.Exercise(t, func(t *testing.T) providers.Provider { return newProvider(t, 0) }, providertest.Options{
		ChecksFences: true,
		NewLimited:   func(t *testing.T) providers.Provider { return newProvider(t, 2) },
		Crash: func(t *testing.T, p providers.Provider, vm string) {
			s, err := p.(*Provider).find(vm)
			if err != nil {
				t.Fatal(err)
			}
			if err := syscall.Kill(s.proc.pid, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		},
		Strays: func(*testing.T) []string {
			var out []string
			for _, dir := range dirs {
				for _, pid := range browsersOf(dir) {
					out = append(out, "process "+strconv.Itoa(pid))
				}
			}
			return out
		},
	})
}
