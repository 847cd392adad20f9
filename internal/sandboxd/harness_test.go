package sandboxd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3"
	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/getkin/kin-openapi/routers/gorillamux"

	"berth/api"
	"berth/internal/sandboxd/firecracker/firecrackertest"
)

const testKey = "test-key-0123456789"

func TestMain(m *testing.M) {
	TakeOver()
	firecrackertest.Main(ServeAgent)
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

// description is the API's, checked.
var description = sync.OnceValues(func() (routers.Router, error) {
	doc, err := openapi3.NewLoader().LoadFromData(api.Sandboxd)
	if err != nil {
		return nil, err
	}
	if err := doc.Validate(context.Background()); err != nil {
		return nil, err
	}
	openapi3filter.RegisterBodyDecoder("image/png", openapi3filter.FileBodyDecoder)
	openapi3filter.RegisterBodyDecoder("text/html", openapi3filter.FileBodyDecoder)
	return gorillamux.NewRouter(doc)
})

// world is a server of a test, and a client whose calls are held to the
// description.
type world struct {
	*Server
	http   *httptest.Server
	router routers.Router
}

// state makes a state directory with a short path.
func state(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sbx")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func options(t testing.TB) Options {
	t.Helper()
	if err := Missing(); err != nil {
		t.Fatal(err)
	}
	return Options{
		APIKey: testKey, MaxContainers: 5, Machine: "desktop", Limits: DefaultLimits(), Roles: []string{"default"},
		Logger: slog.New(slog.NewTextHandler(testWriter{t}, nil)),
	}
}

// serve starts a server that is shut down, with its sandboxes, with the test.
func serve(t testing.TB, opts Options) *world {
	t.Helper()
	if opts.StateDir == "" {
		opts.StateDir = state(t)
	}
	s, err := New(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	return expose(t, s)
}

func expose(t testing.TB, s *Server) *world {
	t.Helper()
	router, err := description()
	if err != nil {
		t.Fatal(err)
	}
	w := &world{Server: s, http: httptest.NewServer(s.Handler()), router: router}
	t.Cleanup(func() {
		w.http.CloseClientConnections()
		w.http.Close()
		if err := s.Shutdown(); err != nil && !errors.Is(err, os.ErrClosed) {
			t.Errorf("shutdown: %v", err)
		}
	})
	return w
}

// answer is what came back.
type answer struct {
	status int
	header http.Header
	body   []byte
}

func (a answer) into(t testing.TB, v any) {
	t.Helper()
	if err := json.Unmarshal(a.body, v); err != nil {
		t.Fatalf("%v: %s", err, a.body)
	}
}

// code returns the answer's error_code.
func (a answer) code() string {
	var e errorBody
	if json.Unmarshal(a.body, &e) != nil {
		return ""
	}
	return e.ErrorCode
}

// call makes a call and holds it and its answer to the description: a request
// that the server takes must be one that the description has.
func (w *world) call(ctx context.Context, t testing.TB, method, path string, body any, headers ...string) (answer, error) {
	t.Helper()
	var raw []byte
	switch b := body.(type) {
	case nil:
	case string:
		raw = []byte(b)
	default:
		var err error
		if raw, err = json.Marshal(b); err != nil {
			t.Fatal(err)
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, w.http.URL+path, bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-API-Key", testKey)
	if raw != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		return answer{}, err
	}
	got, err := io.ReadAll(resp.Body)
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		return answer{}, err
	}
	a := answer{resp.StatusCode, resp.Header, got}
	w.holds(t, req, raw, a)
	return a, nil
}

// holds checks a call against the description.
func (w *world) holds(t testing.TB, req *http.Request, raw []byte, a answer) {
	t.Helper()
	at := req.Clone(req.Context())
	at.URL.Scheme, at.URL.Host, at.Host = "", "", ""
	at.Body = io.NopCloser(bytes.NewReader(raw))
	route, params, err := w.router.FindRoute(at)
	if err != nil {
		if a.status != 404 && a.status != 405 {
			t.Errorf("%s %s is not described and answers %d", req.Method, req.URL.Path, a.status)
		}
		return
	}
	in := &openapi3filter.RequestValidationInput{Request: at, PathParams: params, Route: route, Options: &openapi3filter.Options{
		AuthenticationFunc: openapi3filter.NoopAuthenticationFunc, IncludeResponseStatus: true,
	}}
	if err := openapi3filter.ValidateRequest(context.Background(), in); err != nil && a.status < 300 {
		t.Errorf("%s %s took what the description refuses: %v", req.Method, req.URL.Path, err)
	}
	out := &openapi3filter.ResponseValidationInput{RequestValidationInput: in, Status: a.status, Header: a.header, Options: in.Options}
	out.SetBodyBytes(a.body)
	if err := openapi3filter.ValidateResponse(context.Background(), out); err != nil {
		t.Errorf("%s %s answers what is not described: %v\n%.500s", req.Method, req.URL.Path, err, a.body)
	}
}

// want makes a call that must answer status.
func (w *world) want(t testing.TB, status int, method, path string, body any, headers ...string) answer {
	t.Helper()
	a, err := w.call(t.Context(), t, method, path, body, headers...)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	if a.status != status {
		t.Fatalf("%s %s answers %d, want %d: %.500s", method, path, a.status, status, a.body)
	}
	return a
}

// create makes a sandbox with fence 7 and returns its path.
func (w *world) create(t testing.TB, id string) string {
	t.Helper()
	w.want(t, 201, "POST", "/sandboxes", map[string]any{"sandboxID": id, "metadata": map[string]string{"fence": "7"}}, "Idempotency-Key", id+"-7")
	return "/sandboxes/" + id
}

// act runs actions, given as JSON.
func (w *world) act(t testing.TB, path, key, actions string, headers ...string) []result {
	t.Helper()
	a := w.want(t, 200, "POST", path+"/computer/actions", `{"actions":[`+actions+`]}`, append(headers, "Idempotency-Key", key)...)
	var got struct{ Actions []result }
	a.into(t, &got)
	return got.Actions
}

type result struct {
	Outcome string
	Value   json.RawMessage
	Error   *struct{ Code, Message string }
}

// eventually polls until wrong says nothing.
func eventually(t testing.TB, wrong func() string) {
	t.Helper()
	deadline, tick := time.After(60*time.Second), time.NewTicker(10*time.Millisecond)
	defer tick.Stop()
	for {
		message := wrong()
		if message == "" {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal(message)
		}
	}
}

func newID(n int) string { return fmt.Sprintf("vm-%d", n) }
