package selfhosted

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"berth/api"
	"berth/internal/computer"
	"berth/internal/providers"
	"berth/internal/providers/httpapi"
)

// stub is a server that answers as a test says, and a provider on it.
type stub struct {
	*Provider
	http   *httptest.Server
	answer atomic.Pointer[http.HandlerFunc]
	calls  atomic.Int64
}

const capacity = `{"maxContainers":3,"used":0,"pending":0,"roles":[],"capabilities":["stream","desktop","shell"],"attributes":{}}`

func newStub(t *testing.T) *stub {
	t.Helper()
	s := &stub{}
	s.set(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, capacity) })
	s.http = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.calls.Add(1)
		(*s.answer.Load())(w, r)
	}))
	t.Cleanup(func() {
		s.http.CloseClientConnections()
		s.http.Close()
	})
	s.Provider = open(t, s.http.URL)
	return s
}

func (s *stub) set(h http.HandlerFunc) { s.answer.Store(&h) }

// all makes every call of the API and returns its errors, by name. Execute and
// Create are those that could have done something.
func (s *stub) all(ctx context.Context) map[string]error {
	out := map[string]error{}
	_, out["Health"] = s.Health(ctx)
	_, out["Create"] = s.Create(ctx, providers.Spec{VM: "a", Fence: 1})
	_, out["Get"] = s.Get(ctx, "a")
	_, out["List"] = s.List(ctx)
	out["Kill"] = s.Kill(ctx, "a")
	out["SetTimeout"] = s.SetTimeout(ctx, "a", time.Minute)
	_, out["Execute"] = s.Execute(ctx, clicks())
	_, out["Recall"] = s.Recall(ctx, "a", "k")
	_, out["Observe"] = s.Observe(ctx, "a")
	return out
}

func clicks() providers.Batch {
	return providers.Batch{VM: "a", Key: "k", Actions: []computer.Action{{Type: computer.Cursor}}}
}

// TestFaults: whatever a server does wrong is a typed error, and no call takes
// it for "there is none".
func TestFaults(t *testing.T) {
	t.Parallel()
	status := func(code int, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(code)
			fmt.Fprint(w, body)
		}
	}
	problem := func(code int, word string) http.HandlerFunc {
		return status(code, fmt.Sprintf(`{"code":%d,"error_code":%q,"message":"because"}`, code, word))
	}
	elsewhere := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		t.Errorf("a redirect was followed, with the key %q", r.Header.Get("X-API-Key"))
	}))
	t.Cleanup(elsewhere.Close)
	unavailable := providers.ErrUnavailable
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		want   error
		except string // calls whose answer this is
	}{
		"400":                   {problem(400, "badInput"), providers.ErrInvalid, ""},
		"401":                   {problem(401, "unauthorized"), unavailable, ""},
		"404":                   {problem(404, "notFound"), providers.ErrNotFound, "Kill"},
		"404 of something else": {status(404, "<html>nginx</html>"), unavailable, ""},
		"405 of something else": {status(405, ""), unavailable, ""},
		"409 stale":             {problem(409, "fence_stale"), providers.ErrFenceStale, ""},
		"409":                   {problem(409, "conflict"), providers.ErrConflict, ""},
		"410":                   {problem(410, "sandbox_lost"), providers.ErrLost, ""},
		"413":                   {problem(413, "tooLarge"), providers.ErrInvalid, ""},
		"500":                   {problem(500, "failed"), unavailable, ""},
		"501":                   {problem(501, "unsupported"), providers.ErrUnsupported, ""},
		"502":                   {status(502, "bad gateway"), unavailable, ""},
		"503":                   {problem(503, "shutting_down"), unavailable, ""},
		"507":                   {problem(507, "insufficient_storage"), providers.ErrFull, ""},
		"503 full":              {problem(503, "sandbox_capacity_unavailable"), providers.ErrFull, ""},
		"504":                   {problem(504, "timeout"), providers.ErrTimeout, ""},
		"redirect": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, elsewhere.URL, http.StatusTemporaryRedirect)
		}, unavailable, ""},
		"no JSON":         {func(w http.ResponseWriter, r *http.Request) { status(right(r), "{")(w, r) }, unavailable, "Kill SetTimeout"},
		"null":            {func(w http.ResponseWriter, r *http.Request) { status(right(r), "null")(w, r) }, unavailable, "Kill SetTimeout"},
		"an empty object": {func(w http.ResponseWriter, r *http.Request) { status(right(r), "{}")(w, r) }, unavailable, "Kill SetTimeout"},
		"half an answer": {func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "1000")
			status(right(r), `{"sandboxID":`)(w, r)
		}, unavailable, "Kill SetTimeout"},
		"it dies mid-call": {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, unavailable, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStub(t)
			s.set(c.answer)
			for call, err := range s.all(t.Context()) {
				if strings.Contains(c.except, call) {
					if err != nil {
						t.Errorf("%s: %v", call, err)
					}
					continue
				}
				if !errors.Is(err, c.want) || strings.Contains(fmt.Sprint(err), testKey) {
					t.Errorf("%s: %v; want %v", call, err, c.want)
				}
				if errors.Is(c.want, unavailable) && providers.NothingRan(err) {
					t.Errorf("%s: NothingRan(%v)", call, err)
				}
			}
		})
	}
}

// right is the status of success of a call.
func right(r *http.Request) int {
	switch {
	case r.Method == http.MethodDelete || strings.HasSuffix(r.URL.Path, "/timeout"):
		return 204
	case r.Method == http.MethodPost && r.URL.Path == "/sandboxes":
		return 201
	default:
		return 200
	}
}

func TestRateLimit(t *testing.T) {
	t.Parallel()
	s := newStub(t)
	for header, want := range map[string]time.Duration{
		"7": 7 * time.Second, "": time.Second, "soon": time.Second, "-3": 0, "999999": httpapi.MaxRetryAfter,
		time.Now().Add(time.Hour).UTC().Format(http.TimeFormat): httpapi.MaxRetryAfter, "Mon, 02 Jan 2006 15:04:05 GMT": 0,
	} {
		s.set(func(w http.ResponseWriter, _ *http.Request) {
			if header != "" {
				w.Header().Set("Retry-After", header)
			}
			w.WriteHeader(http.StatusTooManyRequests)
		})
		_, err := s.Execute(t.Context(), clicks())
		var limited *providers.RateLimitError
		if !errors.As(err, &limited) || limited.RetryAfter != want || !providers.NothingRan(err) {
			t.Errorf("Retry-After %q: %v", header, err)
		}
	}
}

// TestHugeAnswer: memory stays bounded, whatever comes.
func TestHugeAnswer(t *testing.T) {
	s := newStub(t)
	s.set(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(right(r))
		chunk := []byte(strings.Repeat(" ", 1<<20))
		for range 100 {
			if _, err := w.Write(chunk); err != nil {
				return
			}
		}
	})
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, err := s.List(t.Context()); !errors.Is(err, providers.ErrUnavailable) {
		t.Errorf("List: %v", err)
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 64<<20 {
		t.Errorf("a 100 MB answer took %d MB", n>>20)
	}
}

// TestSilence: a server that says nothing, or drips, is left when ctx or the
// call's own time ends, and Close frees what hangs.
func TestSilence(t *testing.T) {
	t.Parallel()
	s := newStub(t)
	drip := make(chan struct{})
	t.Cleanup(func() { close(drip) })
	s.set(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(right(r))
		for range 1000 {
			if _, err := io.WriteString(w, " "); err != nil {
				return
			}
			if err := http.NewResponseController(w).Flush(); err != nil {
				return
			}
			select {
			case <-drip:
				return
			case <-r.Context().Done():
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	began := time.Now()
	if _, err := s.Health(t.Context()); !errors.Is(err, providers.ErrTimeout) || time.Since(began) > 3*time.Second {
		t.Errorf("Health: %v after %v", err, time.Since(began))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	for call, err := range s.all(ctx) {
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", call, err)
		}
	}
	ended := make(chan error, 1)
	calls := s.calls.Load()
	go func() {
		_, err := s.Execute(t.Context(), clicks())
		ended <- err
	}()
	for s.calls.Load() == calls {
		runtime.Gosched()
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; !errors.Is(err, providers.ErrUnavailable) {
		t.Errorf("a call of a closed provider: %v", err)
	}
	if _, err := s.Get(t.Context(), "a"); !errors.Is(err, providers.ErrUnavailable) {
		t.Errorf("a call after Close: %v", err)
	}
}

// TestOpen: what cannot be opened says why, without the key or the password.
func TestOpen(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead := "http://u:hunter2@" + l.Addr().String()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for address, want := range map[string]error{
		dead: providers.ErrUnavailable, "ftp://hunter2@a": providers.ErrInvalid, "http://u:hunter2@a b/": providers.ErrInvalid, "": providers.ErrInvalid,
	} {
		_, err := New(t.Context(), Options{ServerID: "ax102-01", URL: address, APIKey: testKey})
		if !errors.Is(err, want) || strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), testKey) {
			t.Errorf("%q: %v", address, err)
		}
	}
}

// TestTLS: a server's own CA is trusted when it is given, and only then; an
// unencrypted address elsewhere is warned of.
func TestTLS(t *testing.T) {
	t.Parallel()
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, capacity) }))
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	server.StartTLS()
	t.Cleanup(server.Close)
	opts := Options{ServerID: "ax102-01", URL: server.URL, APIKey: testKey}
	if _, err := New(t.Context(), opts); !errors.Is(err, providers.ErrUnavailable) || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("an unknown CA: %v", err)
	}
	opts.CA = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	p, err := New(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	opts.CA = []byte("none")
	if _, err := New(t.Context(), opts); !errors.Is(err, providers.ErrInvalid) {
		t.Errorf("no CA: %v", err)
	}
}

// TestStreamURL: it holds a token and neither the key nor a password.
func TestStreamURL(t *testing.T) {
	t.Parallel()
	s := newStub(t)
	s.set(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"sandboxID":"a","state":"running","startedAt":"2026-01-01T00:00:00Z"}`)
	})
	s.client.base.User = url.UserPassword("u", "hunter2")
	text, err := s.StreamURL(t.Context(), "a")
	u, parseErr := url.Parse(text)
	if err != nil || parseErr != nil || strings.Contains(text, testKey) || strings.Contains(text, "hunter2") {
		t.Fatalf("%q, %v, %v", text, err, parseErr)
	}
	var expires int64
	if _, err := fmt.Sscan(u.Query().Get("expires"), &expires); err != nil || u.Query().Get("token") != api.StreamToken(testKey, "a", api.Look, expires) || u.Path != "/sandboxes/a/stream" {
		t.Errorf("%q: %v", text, err)
	}
}

// TestRefusedHere: what the server does not declare never reaches it.
func TestRefusedHere(t *testing.T) {
	t.Parallel()
	s := newStub(t)
	before := s.calls.Load()
	text := "x"
	_, err := s.Execute(t.Context(), providers.Batch{VM: "a", Actions: []computer.Action{{Type: computer.ClipboardWrite, Text: &text}}})
	if !errors.Is(err, providers.ErrUnsupported) {
		t.Errorf("clipboard: %v", err)
	}
	if err := s.Pause(t.Context(), "a"); !errors.Is(err, providers.ErrUnsupported) {
		t.Errorf("pause: %v", err)
	}
	if _, err := s.Get(t.Context(), "../capacity"); !errors.Is(err, providers.ErrNotFound) {
		t.Errorf("an odd id: %v", err)
	}
	if n := s.calls.Load(); n != before {
		t.Errorf("%d calls were made", n-before)
	}
}
