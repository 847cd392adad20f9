package e2b

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
	"berth/internal/providers/httpapi"
)

const testToken = "token-hunter2"

// stub is a server that answers as a test says, both as the API and as a
// sandbox, and a provider on it that knows one sandbox.
type stub struct {
	*Provider
	http   *httptest.Server
	answer atomic.Pointer[http.HandlerFunc]
	log    *bytes.Buffer
}

func newStub(t *testing.T) *stub {
	t.Helper()
	s := &stub{log: &bytes.Buffer{}}
	s.http = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { (*s.answer.Load())(w, r) }))
	t.Cleanup(func() {
		s.http.CloseClientConnections()
		s.http.Close()
	})
	s.Provider = s.open(t, s.http.URL, nil)
	return s
}

func (s *stub) open(t *testing.T, url string, ca []byte) *Provider {
	t.Helper()
	p, err := open(Options{ServerID: "e2b-01", APIKey: testKey, APIURL: url, SandboxURL: url, CA: ca, Logger: slog.New(slog.NewTextHandler(s.log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	p.known(providers.Sandbox{ID: "sbx1", VM: "a", Fence: 1, Display: computer.DefaultDisplay}, place{"sbx1", testToken, "e2b.example"})
	return p
}

func (s *stub) set(h http.HandlerFunc) { s.answer.Store(&h) }

func clicks() providers.Batch {
	return providers.Batch{VM: "a", Key: "k", Actions: []computer.Action{{Type: computer.Cursor}}}
}

// rest makes every call of the API and inside every call of a sandbox, and
// returns their errors by name.
func (s *stub) rest(ctx context.Context) map[string]error {
	out := map[string]error{}
	_, out["Health"] = s.Health(ctx)
	_, out["Create"] = s.Create(ctx, providers.Spec{VM: "b", Fence: 1})
	_, out["Get"] = s.Get(ctx, "a")
	_, out["List"] = s.List(ctx)
	out["Kill"] = s.Kill(ctx, "b")
	out["SetTimeout"] = s.SetTimeout(ctx, "a", time.Minute)
	out["Pause"] = s.Pause(ctx, "a")
	out["Resume"] = s.Resume(ctx, "a")
	return out
}

func (s *stub) inside(ctx context.Context) map[string]error {
	out := map[string]error{}
	_, out["Execute"] = s.Execute(ctx, clicks())
	_, out["Recall"] = s.Recall(ctx, "a", "k")
	_, out["Observe"] = s.Observe(ctx, "a")
	_, out["StreamURL"] = s.StreamURL(ctx, "a")
	return out
}

// right is the status of success of a call.
func right(r *http.Request) int {
	switch {
	case r.Method == http.MethodDelete || strings.HasSuffix(r.URL.Path, "/timeout") || strings.HasSuffix(r.URL.Path, "/pause"):
		return http.StatusNoContent
	case r.Method == http.MethodPost && r.URL.Path == "/sandboxes":
		return http.StatusCreated
	default:
		return http.StatusOK
	}
}

// TestFaults: whatever E2B does wrong is a typed error, no call takes it for
// "there is none", and no key shows.
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
		t.Errorf("a redirect was followed, with the key %q and the token %q", r.Header.Get("X-API-Key"), r.Header.Get("X-Access-Token"))
	}))
	t.Cleanup(elsewhere.Close)
	unavailable := providers.ErrUnavailable
	lists := "Health Get List Kill Create" // begin with a list, whose refusal means that nobody knows
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		named  error  // of calls that name a sandbox
		fine   string // calls whose answer this is
	}{
		"400":                   {problem(400, ""), providers.ErrInvalid, ""},
		"401":                   {problem(401, ""), unavailable, ""},
		"403":                   {problem(403, ""), unavailable, ""},
		"404":                   {problem(404, ""), unavailable, ""}, // they look again, with a list
		"404 of something else": {status(404, "<html>nginx</html>"), unavailable, ""},
		"405":                   {status(405, ""), unavailable, ""},
		"409":                   {problem(409, ""), providers.ErrConflict, ""},
		"500":                   {problem(500, ""), unavailable, ""},
		"502":                   {status(502, "bad gateway"), unavailable, ""},
		"503":                   {problem(503, ""), unavailable, ""},
		"503 full":              {problem(503, "sandbox_capacity_unavailable"), providers.ErrFull, ""},
		"504":                   {problem(504, "sandbox_placement_timeout"), providers.ErrTimeout, ""},
		"redirect": {func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, elsewhere.URL, http.StatusTemporaryRedirect)
		}, unavailable, ""},
		"no JSON":         {func(w http.ResponseWriter, r *http.Request) { status(right(r), "{")(w, r) }, nil, "SetTimeout Pause Resume"},
		"null":            {func(w http.ResponseWriter, r *http.Request) { status(right(r), "null")(w, r) }, nil, "SetTimeout Pause Resume"},
		"an empty object": {func(w http.ResponseWriter, r *http.Request) { status(right(r), "{}")(w, r) }, nil, "SetTimeout Pause Resume"},
		"half an answer": {func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "1000")
			status(right(r), `[{"sandboxID":`)(w, r)
		}, unavailable, "SetTimeout Pause"},
		"it dies mid-call": {func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, unavailable, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStub(t)
			s.set(c.answer)
			check := func(call string, err, want error) {
				t.Helper()
				if strings.Contains(c.fine, call) {
					if err != nil {
						t.Errorf("%s: %v", call, err)
					}
					return
				}
				if !errors.Is(err, want) || strings.Contains(fmt.Sprint(err), testKey) || strings.Contains(fmt.Sprint(err), testToken) {
					t.Errorf("%s: %v; want %v", call, err, want)
				}
				if errors.Is(want, unavailable) && providers.NothingRan(err) {
					t.Errorf("%s: NothingRan(%v)", call, err)
				}
			}
			for call, err := range s.rest(t.Context()) {
				want := c.named
				if strings.Contains(lists, call) && (want == nil || errors.Is(want, providers.ErrInvalid) || errors.Is(want, providers.ErrConflict)) {
					want = unavailable
				}
				check(call, err, want)
			}
			for call, err := range s.inside(t.Context()) {
				check(call, err, unavailable)
			}
			if said := s.log.String(); strings.Contains(said, testKey) || strings.Contains(said, testToken) {
				t.Errorf("a key was logged: %s", said)
			}
		})
	}
}

// frames answers a call of a sandbox with messages, and everything else as if the
// sandbox ran.
func frames(messages ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasPrefix(r.URL.Path, "/process.Process/") {
			running(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/connect+json")
		for _, m := range messages {
			flags := byte(0)
			if !strings.HasPrefix(m, `{"event"`) {
				flags = 2
			}
			raw := envelope([]byte(m))
			raw[0] = flags
			if _, err := w.Write(raw); err != nil {
				return
			}
		}
	}
}

func running(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/health" {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	fmt.Fprintf(w, `{"sandboxID":"sbx1","state":"running","metadata":{"server":"e2b-01","vmId":"a","fence":"1"},"startedAt":%q}`, time.Now().Format(time.RFC3339))
}

func data(s string) string {
	raw, err := json.Marshal([]byte(s))
	if err != nil {
		panic(err)
	}
	return fmt.Sprintf(`{"event":{"data":{"stdout":%s}}}`, raw)
}

const (
	started = `{"event":{"start":{"pid":7}}}`
	exited  = `{"event":{"end":{"exited":true,"status":"exit status 0"}}}`
)

// TestStreams: a process's stream that is not what envd sends is a typed error,
// after which nobody claims to know.
func TestStreams(t *testing.T) {
	t.Parallel()
	good := data("B 1\nS 0\nE 0 at 0 3 26 0\nx:5 y:6 screen:0 window:99F\n")
	for name, c := range map[string]struct {
		messages []string
		want     error
	}{
		"good":                        {[]string{started, `{"event":{"keepalive":{}}}`, good, exited, "{}"}, nil},
		"in two parts":                {[]string{started, data("B 1\nS 0\nE 0 at 0 3 26 0\nx:5 y:6 scre"), data("en:0 window:99F\n"), exited, "{}"}, nil},
		"it ends without an end":      {[]string{started, data("B 1\nS 0\n")}, providers.ErrUnavailable},
		"an end before its time":      {[]string{started, "{}"}, providers.ErrUnavailable},
		"an error":                    {[]string{started, `{"error":{"code":"internal","message":"oops"}}`}, providers.ErrUnavailable},
		"its deadline":                {[]string{started, `{"error":{"code":"deadline_exceeded","message":"over"}}`}, providers.ErrTimeout},
		"no bash":                     {[]string{started, `{"event":{"end":{"exitCode":127,"exited":true}}}`, "{}"}, providers.ErrUnavailable},
		"a message that is no JSON":   {[]string{`{"event":`, "{}"}, providers.ErrUnavailable},
		"a record without sense":      {[]string{started, data("hello\n"), exited, "{}"}, providers.ErrUnavailable},
		"an action that is not there": {[]string{started, data("B 1\nS 5\n"), exited, "{}"}, providers.ErrUnavailable},
		"a size without end":          {[]string{started, data("B 1\nS 0\nE 0 at 0 3 99999999999 0\n"), exited, "{}"}, providers.ErrUnavailable},
		"a line without end":          {[]string{started, data(strings.Repeat("B", 1000)), exited, "{}"}, providers.ErrUnavailable},
		"an older epoch":              {[]string{started, data("X\n"), exited, "{}"}, providers.ErrFenceStale},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStub(t)
			s.set(frames(c.messages...))
			results, err := s.Execute(t.Context(), clicks())
			if !errors.Is(err, c.want) {
				t.Fatalf("%v, want %v", err, c.want)
			}
			if c.want == nil && (len(results) != 1 || string(results[0].Value) != `{"x":5,"y":6}`) {
				t.Errorf("results %+v", results)
			}
			if errors.Is(c.want, providers.ErrUnavailable) && providers.NothingRan(err) {
				t.Errorf("NothingRan(%v)", err)
			}
		})
	}
}

// TestProxy tells the answers of a sandbox's proxy apart (e2b#1381).
func TestProxy(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		proxy  string
		status int
		api    http.HandlerFunc
		want   error
		ran    bool
	}{
		"gone": {`{"message":"The sandbox was not found","code":502}`, 502, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusNotFound)
			fmt.Fprint(w, `{"code":404,"message":"none"}`)
		}, providers.ErrNotFound, false},
		"paused":     {`{"message":"The sandbox was not found","code":502}`, 502, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"sandboxID":"sbx1","state":"paused"}`) }, providers.ErrPaused, false},
		"port":       {`{"message":"not open","port":49983,"code":502}`, 502, running, providers.ErrUnavailable, true},
		"transition": {`{"message":"resuming","code":409}`, 409, running, providers.ErrConflict, false},
		"another":    {`{"message":"?","code":502}`, 502, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"sandboxID":"sbx2","state":"running"}`) }, providers.ErrUnavailable, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newStub(t)
			s.set(func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("E2b-Sandbox-Id") == "" {
					c.api(w, r)
					return
				}
				if r.URL.Path == "/health" {
					w.WriteHeader(http.StatusNoContent)
					return
				}
				w.WriteHeader(c.status)
				fmt.Fprint(w, c.proxy)
			})
			_, err := s.Execute(t.Context(), clicks())
			if !errors.Is(err, c.want) || providers.NothingRan(err) == c.ran {
				t.Errorf("%v; want %v", err, c.want)
			}
		})
	}
}

// TestTooMany: of the two answers 429 one is waited out, the other is a full
// server (e2b-dev/infra#1434).
func TestTooMany(t *testing.T) {
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
		for _, call := range []func() error{
			func() error { _, err := s.Execute(t.Context(), clicks()); return err },
			func() error { _, err := s.Create(t.Context(), providers.Spec{VM: "b"}); return err },
		} {
			err := call()
			var limited *providers.RateLimitError
			if !errors.As(err, &limited) || limited.RetryAfter != want || !providers.NothingRan(err) || providers.ServerFault(err) {
				t.Errorf("Retry-After %q: %v", header, err)
			}
		}
	}
	if _, err := s.Health(t.Context()); err != nil {
		t.Errorf("a rate limit counts as a fault: %v", err)
	}
	s.set(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			fmt.Fprint(w, "[]")
			return
		}
		w.WriteHeader(http.StatusTooManyRequests)
		fmt.Fprint(w, `{"code":429,"message":"you have reached the maximum number of concurrent E2B sandboxes (20)"}`)
	})
	if _, err := s.Create(t.Context(), providers.Spec{VM: "b"}); !errors.Is(err, providers.ErrFull) {
		t.Errorf("too many at a time: %v", err)
	}
}

// TestHugeAnswer: memory stays bounded, whatever comes.
func TestHugeAnswer(t *testing.T) {
	s := newStub(t)
	s.set(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/process") {
			if _, err := w.Write([]byte{0, 0x06, 0, 0, 0}); err != nil { // 100 MB announced
				return
			}
		}
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
	if _, err := s.Observe(t.Context(), "a"); !errors.Is(err, providers.ErrUnavailable) {
		t.Errorf("Observe: %v", err)
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 128<<20 {
		t.Errorf("two answers of 100 MB took %d MB", n>>20)
	}
}

// TestSilence: a server that says nothing, or drips, is left when ctx ends, and
// Close frees what hangs.
func TestSilence(t *testing.T) {
	t.Parallel()
	s := newStub(t)
	over := make(chan struct{})
	t.Cleanup(func() { close(over) })
	s.set(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(right(r))
		for {
			if _, err := io.WriteString(w, " "); err != nil {
				return
			}
			if err := http.NewResponseController(w).Flush(); err != nil {
				return
			}
			select {
			case <-over:
				return
			case <-r.Context().Done():
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	for call, f := range map[string]func(context.Context) error{
		"List":    func(ctx context.Context) error { _, err := s.List(ctx); return err },
		"Create":  func(ctx context.Context) error { _, err := s.Create(ctx, providers.Spec{VM: "b"}); return err },
		"Execute": func(ctx context.Context) error { _, err := s.Execute(ctx, clicks()); return err },
		"Observe": func(ctx context.Context) error { _, err := s.Observe(ctx, "a"); return err },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		began := time.Now()
		if err := f(ctx); !errors.Is(err, context.DeadlineExceeded) || time.Since(began) > 10*time.Second {
			t.Errorf("%s: %v after %v", call, err, time.Since(began))
		}
		cancel()
	}
	done := make(chan error, 1)
	go func() {
		_, err := s.Execute(t.Context(), clicks())
		done <- err
	}()
	select {
	case err := <-done:
		t.Fatalf("a call that hangs returned: %v", err)
	case <-time.After(100 * time.Millisecond): // the time in which a wrong answer would come
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, providers.ErrUnavailable) || providers.NothingRan(err) {
		t.Errorf("a call of a closed provider: %v", err)
	}
}

// TestTLS: a certificate that nobody vouches for is refused before the key is
// sent.
func TestTLS(t *testing.T) {
	t.Parallel()
	var asked atomic.Int64
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		fmt.Fprint(w, "[]")
	}))
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	server.StartTLS()
	t.Cleanup(server.Close)
	s := &stub{log: &bytes.Buffer{}}
	if _, err := s.open(t, server.URL, nil).Health(t.Context()); !errors.Is(err, providers.ErrUnavailable) || asked.Load() != 0 {
		t.Errorf("an unknown certificate: %v, %d requests", err, asked.Load())
	}
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	if _, err := s.open(t, server.URL, ca).Health(t.Context()); err != nil {
		t.Errorf("a certificate that was given: %v", err)
	}
}

// TestOptions: every bad one is named, none is echoed.
func TestOptions(t *testing.T) {
	t.Parallel()
	for what, change := range map[string]func(*Options){
		"no API key":  func(o *Options) { o.APIKey = "" },
		"API URL":     func(o *Options) { o.APIURL = "ftp://hunter2" },
		"sandbox URL": func(o *Options) { o.SandboxURL = "hunter2" },
		"domain":      func(o *Options) { o.Domain = "hunter2/x" },
		"CA":          func(o *Options) { o.CA = []byte("hunter2") },
		"clipboard":   func(o *Options) { o.Clipboard = "pbcopy" },
		"life":        func(o *Options) { o.MaxLife = time.Second },
	} {
		opts := Options{ServerID: "e2b-01", APIKey: testKey, APIURL: "https://a.example"}
		change(&opts)
		_, err := New(t.Context(), opts)
		if !errors.Is(err, providers.ErrInvalid) || !strings.Contains(err.Error(), what) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func FuzzRecord(f *testing.F) {
	f.Add([]byte("B 2\nS 0\nE 0 run 0 3 2 1\nabcS 1\nP 1 0 5 3 0\npngF\n"), 7)
	f.Add([]byte("B 1\nI 0\nF\n"), 1)
	f.Add([]byte("B 1\nQ 0 0 1 0 0\nX\nD\n"), 3)
	f.Fuzz(func(t *testing.T, raw []byte, cut int) {
		whole, parts := &record{}, &record{}
		wholeErr := whole.write(raw)
		cut = max(0, min(cut, len(raw)))
		partsErr := parts.write(raw[:cut])
		if partsErr == nil {
			partsErr = parts.write(raw[cut:])
		}
		if (wholeErr == nil) != (partsErr == nil) {
			t.Fatalf("%v at once, %v in parts", wholeErr, partsErr)
		}
		if wholeErr != nil {
			return
		}
		a, b := whole.conclude(), parts.conclude()
		if len(a) != len(b) || len(a) > computer.MaxActions {
			t.Fatalf("%d and %d results", len(a), len(b))
		}
		for i := range a {
			if a[i].Outcome != b[i].Outcome || a[i].Outcome == "" {
				t.Fatalf("result %d: %q and %q", i, a[i].Outcome, b[i].Outcome)
			}
		}
	})
}
