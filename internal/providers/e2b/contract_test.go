package e2b

import (
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"berth/internal/providers"
	"berth/internal/providers/providertest"
)

type testWriter struct{ t testing.TB }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

// connect opens a provider on a stand-in.
func connect(t testing.TB, s *standin, more ...func(*Options)) *Provider {
	t.Helper()
	opts := Options{ServerID: "e2b-01", APIKey: testKey, APIURL: s.url, SandboxURL: s.url, Clipboard: XClip, Logger: slog.New(slog.NewTextHandler(testWriter{t}, nil))}
	for _, f := range more {
		f(&opts)
	}
	p, err := New(t.Context(), opts)
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

// TestContract holds the provider to the suite, against the stand-in with real
// desktops. What actions do there is checked by effects_test.go: the suite's own
// page wants a window without a frame whose browser reports its dialogs.
func TestContract(t *testing.T) { // not in parallel: it counts goroutines
	var at *standin
	providertest.Exercise(t, func(t *testing.T) providers.Provider {
		at = startStandin(t)
		return connect(t, at)
	}, providertest.Options{
		NoPages: true, ChecksFences: true, Recalls: true,
		NewLimited: func(t *testing.T) providers.Provider { return connect(t, startStandin(t, "--max", "2")) },
		Crash: func(t *testing.T, p providers.Provider, vm string) {
			s, err := p.Get(t.Context(), vm)
			if err != nil {
				t.Fatal(err)
			}
			raw, err := os.ReadFile(filepath.Join(at.state, s.ID, "pid"))
			if err != nil {
				t.Fatal(err)
			}
			pid, err := strconv.Atoi(string(raw))
			if err == nil {
				err = syscall.Kill(pid, syscall.SIGKILL)
			}
			if err != nil {
				t.Fatal(err)
			}
		},
	})
}
