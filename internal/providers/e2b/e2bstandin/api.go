package main

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	mrand "math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"berth/internal/sandboxd/jail"
)

// Times of a sandbox that a request leaves out, in seconds.
const (
	defaultTimeout = 15
	connectTimeout = 300 // of the second version of connect
)

const maxPage = 100 // sandboxes on a page

// templates that there are.
var templates = []string{"base", "desktop"}

// server holds the sandboxes.
type server struct {
	opts  options
	probe jail.Probe
	log   *slog.Logger
	mux   *http.ServeMux
	slots int // of the first sandbox; other programs on this machine count from others

	starts  sync.WaitGroup // creates under way
	mu      sync.Mutex
	boxes   map[string]*box
	closed  bool
	serial  int
	created []time.Time // within the last second
}

func newServer(opts options, probe jail.Probe, log *slog.Logger) *server {
	s := &server{opts: opts, probe: probe, log: log, mux: http.NewServeMux(), slots: mrand.IntN(jail.MaxSlots / 2), boxes: map[string]*box{}}
	for pattern, h := range map[string]func(http.ResponseWriter, *http.Request) error{
		"POST /sandboxes":                 s.create,
		"POST /v2/sandboxes":              s.create,
		"GET /v2/sandboxes":               s.list,
		"GET /sandboxes/{id}":             s.get,
		"DELETE /sandboxes/{id}":          s.kill,
		"POST /sandboxes/{id}/timeout":    s.timeout,
		"POST /sandboxes/{id}/refreshes":  s.refresh,
		"POST /sandboxes/{id}/pause":      s.pause,
		"POST /sandboxes/{id}/connect":    s.connect,
		"POST /v2/sandboxes/{id}/connect": s.connect,
	} {
		s.mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("X-API-Key") != s.opts.APIKey {
				refuse(w, &problem{Code: http.StatusUnauthorized, Message: "unauthorized, please check your API key"})
				return
			}
			if err := h(w, r); err != nil {
				refuse(w, err)
			}
		})
	}
	s.mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		refuse(w, &problem{Code: http.StatusNotFound, Message: "no such path"})
	})
	return s
}

// ServeHTTP tells the API's requests from those of sandboxes, which name one in
// their headers or in the host.
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if id, port, ok := addressed(r); ok {
		s.proxy(w, r, id, port)
		return
	}
	s.mux.ServeHTTP(w, r)
}

// problem is the API's error body.
type problem struct {
	Code       int    `json:"code"`
	ErrorCode  string `json:"error_code,omitempty"`
	Message    string `json:"message"`
	retryAfter int
}

func (p *problem) Error() string { return p.Message }

func refuse(w http.ResponseWriter, err error) {
	var p *problem
	if !errors.As(err, &p) {
		p = &problem{Code: http.StatusInternalServerError, Message: err.Error()}
	}
	if p.retryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(p.retryAfter))
	}
	answer(w, p.Code, p)
}

func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(body); err != nil {
		return // the client went away
	}
}

// read reads a body; fields that the description does not have are refused. An
// empty body is one without fields where it is optional.
func read(r *http.Request, into any, optional bool) error {
	raw, err := io.ReadAll(io.LimitReader(r.Body, 1<<20))
	if err != nil {
		return &problem{Code: http.StatusBadRequest, Message: "the body cannot be read"}
	}
	if len(raw) == 0 && optional {
		return nil
	}
	if !strings.HasPrefix(r.Header.Get("Content-Type"), "application/json") {
		return &problem{Code: http.StatusBadRequest, Message: "the body is not declared as application/json"}
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return &problem{Code: http.StatusBadRequest, Message: "bad body: " + err.Error()}
	}
	return nil
}

// newSandbox is what a create may say. What the stand-in cannot do is refused
// when it is asked for.
type newSandbox struct {
	TemplateID    string            `json:"templateID"`
	Timeout       *int              `json:"timeout"`
	Metadata      map[string]string `json:"metadata"`
	EnvVars       map[string]string `json:"envVars"`
	Secure        *bool             `json:"secure"`
	AutoPause     bool              `json:"autoPause"`
	AllowInternet *bool             `json:"allow_internet_access"`
	Network       json.RawMessage   `json:"network"`
	AutoResume    *struct {
		Enabled bool `json:"enabled"`
	} `json:"autoResume"`
}

func (s *server) create(w http.ResponseWriter, r *http.Request) error {
	var in newSandbox
	if err := read(r, &in, false); err != nil {
		return err
	}
	if in.TemplateID == "" {
		return &problem{Code: http.StatusBadRequest, Message: "templateID is required"}
	}
	if !slices.Contains(templates, in.TemplateID) {
		return &problem{Code: http.StatusNotFound, Message: fmt.Sprintf("template '%s' not found", in.TemplateID)}
	}
	if in.Network != nil || in.AutoResume != nil && in.AutoResume.Enabled {
		return &problem{Code: http.StatusBadRequest, Message: "the stand-in has no network rules and no automatic resume"}
	}
	seconds := defaultTimeout
	if in.Timeout != nil {
		seconds = *in.Timeout
	}
	if err := s.checkTimeout(seconds); err != nil {
		return err
	}
	b := &box{
		id: token(10), template: in.TemplateID, metadata: in.Metadata, autoPause: in.AutoPause, state: "starting",
		allowInternet: in.AllowInternet == nil || *in.AllowInternet, started: time.Now().UTC(), cut: make(chan struct{}),
	}
	if strings.HasPrefix(r.URL.Path, "/v2/") || in.Secure != nil && *in.Secure {
		b.token = token(16)
	}
	if err := s.admit(b); err != nil {
		return err
	}
	defer s.starts.Done()
	err := s.start(b, in.EnvVars)
	s.mu.Lock()
	if err == nil && s.closed {
		err = errors.Join(errors.New("the stand-in is closing"), b.stop())
	}
	if err != nil {
		delete(s.boxes, b.id)
	}
	s.mu.Unlock()
	if err != nil {
		return err
	}
	b.mu.Lock()
	b.state = running
	s.expire(b, time.Duration(seconds)*time.Second)
	b.mu.Unlock()
	go func() { // a sandbox whose processes have ended is gone
		<-b.process.Gone()
		s.remove(b)
	}()
	answer(w, http.StatusCreated, s.handle(b))
	return nil
}

// admit holds the limits: creates a second are a rate, sandboxes a number. What
// it admits is one of s.starts.
func (s *server) admit(b *box) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return &problem{Code: http.StatusServiceUnavailable, Message: "closing"}
	}
	now := time.Now()
	s.created = slices.DeleteFunc(s.created, func(t time.Time) bool { return now.Sub(t) >= time.Second })
	if len(s.created) >= s.opts.Creates {
		return &problem{Code: http.StatusTooManyRequests, Message: "rate limit exceeded", retryAfter: 1}
	}
	n := 0
	for _, other := range s.boxes {
		other.mu.Lock()
		if other.state != paused {
			n++
		}
		other.mu.Unlock()
	}
	if n >= s.opts.Max {
		return &problem{Code: http.StatusTooManyRequests, Message: fmt.Sprintf("you have reached the maximum number of concurrent sandboxes (%d)", s.opts.Max)}
	}
	s.created = append(s.created, now)
	b.slot = s.slots + s.serial%(jail.MaxSlots/2-1)
	s.serial++
	s.boxes[b.id] = b
	s.starts.Add(1)
	return nil
}

func (s *server) checkTimeout(seconds int) error {
	if seconds < 0 || time.Duration(seconds)*time.Second > s.opts.MaxLife {
		return &problem{Code: http.StatusBadRequest, Message: fmt.Sprintf("timeout cannot be greater than %d hours", int(s.opts.MaxLife.Hours()))}
	}
	return nil
}

func token(bytes int) string {
	raw := make([]byte, bytes)
	if _, err := rand.Read(raw); err != nil {
		panic(err) // crypto/rand does not fail
	}
	return hex.EncodeToString(raw)
}

// handle is what a client needs to reach a sandbox.
func (s *server) handle(b *box) map[string]any {
	out := map[string]any{"sandboxID": b.id, "templateID": b.template, "clientID": "standin", "envdVersion": envdVersion}
	if b.token != "" {
		out["envdAccessToken"] = b.token
	}
	return out
}

// described is a sandbox in lists; the detail has the token beside.
func (b *box) described() map[string]any {
	b.mu.Lock()
	defer b.mu.Unlock()
	state := running
	if b.state == paused || b.state == pausing {
		state = paused
	}
	return map[string]any{
		"sandboxID": b.id, "templateID": b.template, "clientID": "standin", "envdVersion": envdVersion, "state": state, "cpuCount": 2, "memoryMB": 2048,
		"diskSizeMB": 512, "startedAt": b.started.Format(time.RFC3339Nano), "endAt": b.end.UTC().Format(time.RFC3339Nano), "metadata": b.metadata,
	}
}

// list pages through the sandboxes, newest first.
func (s *server) list(w http.ResponseWriter, r *http.Request) error {
	q := r.URL.Query()
	for name := range q {
		if !slices.Contains([]string{"metadata", "state", "limit", "nextToken", "order", "startedAfter", "template"}, name) {
			return &problem{Code: http.StatusBadRequest, Message: "unknown parameter " + name}
		}
	}
	limit := maxPage
	if text := q.Get("limit"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > maxPage {
			return &problem{Code: http.StatusBadRequest, Message: fmt.Sprintf("limit: 1 to %d", maxPage)}
		}
		limit = n
	}
	want, err := url.ParseQuery(q.Get("metadata"))
	if err != nil {
		return &problem{Code: http.StatusBadRequest, Message: "metadata: not a query"}
	}
	var states []string
	for _, text := range q["state"] {
		states = append(states, strings.Split(text, ",")...)
	}
	var found []*box
	s.mu.Lock()
	for _, b := range s.boxes {
		found = append(found, b)
	}
	s.mu.Unlock()
	found = slices.DeleteFunc(found, func(b *box) bool {
		for name := range want { // both are encoded once more
			key, kerr := url.QueryUnescape(name)
			value, verr := url.QueryUnescape(want.Get(name))
			if kerr != nil || verr != nil || b.metadata[key] != value {
				return true
			}
		}
		d := b.described()
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.state == "starting" || b.state == ending || len(states) > 0 && !slices.Contains(states, d["state"].(string))
	})
	slices.SortFunc(found, func(a, b *box) int {
		if c := b.started.Compare(a.started); c != 0 {
			return c
		}
		return strings.Compare(a.id, b.id)
	})
	if after := q.Get("nextToken"); after != "" { // id and time of the page's last
		at, id, ok := strings.Cut(after, "_")
		when, err := strconv.ParseInt(at, 10, 64)
		if !ok || err != nil {
			return &problem{Code: http.StatusBadRequest, Message: "nextToken: not one of this server's"}
		}
		found = slices.DeleteFunc(found, func(b *box) bool {
			n := b.started.UnixNano()
			return n > when || n == when && b.id <= id
		})
	}
	if len(found) > limit {
		found = found[:limit]
		last := found[limit-1]
		w.Header().Set("X-Next-Token", fmt.Sprintf("%d_%s", last.started.UnixNano(), last.id))
	}
	out := make([]map[string]any, len(found))
	for i, b := range found {
		out[i] = b.described()
	}
	answer(w, http.StatusOK, out)
	return nil
}

func (s *server) find(r *http.Request) (*box, error) {
	id := r.PathValue("id")
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.boxes[id]
	if b == nil {
		return nil, &problem{Code: http.StatusNotFound, Message: fmt.Sprintf("sandbox %q not found", id)}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.state == "starting" || b.state == ending {
		return nil, &problem{Code: http.StatusNotFound, Message: fmt.Sprintf("sandbox %q not found", id)}
	}
	return b, nil
}

func (s *server) get(w http.ResponseWriter, r *http.Request) error {
	b, err := s.find(r)
	if err != nil {
		return err
	}
	out := b.described()
	if b.token != "" {
		out["envdAccessToken"] = b.token
	}
	answer(w, http.StatusOK, out)
	return nil
}

func (s *server) kill(w http.ResponseWriter, r *http.Request) error {
	b, err := s.find(r)
	if err != nil {
		return err
	}
	b.mu.Lock()
	b.state = ending
	b.mu.Unlock()
	if err := b.process.Kill(); err != nil {
		return err
	}
	s.remove(b)
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// remove forgets a sandbox whose processes have ended.
func (s *server) remove(b *box) {
	b.mu.Lock()
	b.state = ending
	if b.timer != nil {
		b.timer.Stop()
	}
	b.mu.Unlock()
	s.mu.Lock()
	_, here := s.boxes[b.id]
	delete(s.boxes, b.id)
	s.mu.Unlock()
	if here {
		if err := b.stop(); err != nil {
			s.log.Warn("a sandbox is not gone", "id", b.id, "err", err)
		}
	}
}

// expire sets the end of a sandbox; b.mu is held.
func (s *server) expire(b *box, d time.Duration) {
	if b.timer != nil {
		b.timer.Stop()
	}
	b.end = time.Now().Add(d)
	b.timer = time.AfterFunc(d, func() {
		b.mu.Lock()
		due := b.state == running && !time.Now().Before(b.end)
		if due && !b.autoPause {
			b.state = ending // before its calls break off
		}
		b.mu.Unlock()
		switch {
		case !due:
		case b.autoPause:
			if err := s.freeze(b); err != nil {
				s.log.Warn("not paused at its end", "id", b.id, "err", err)
			}
		default:
			if err := b.process.Kill(); err != nil {
				s.log.Warn("not killed at its end", "id", b.id, "err", err)
			}
			s.remove(b)
		}
	})
}

func (s *server) timeout(w http.ResponseWriter, r *http.Request) error {
	var in struct {
		Timeout *int `json:"timeout"`
	}
	b, err := s.find(r)
	if err == nil {
		err = read(r, &in, false)
	}
	if err == nil && in.Timeout == nil {
		err = &problem{Code: http.StatusBadRequest, Message: "timeout is required"}
	}
	if err == nil {
		err = s.checkTimeout(*in.Timeout)
	}
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.state != running {
		return &problem{Code: http.StatusNotFound, Message: fmt.Sprintf("sandbox %q is not running", b.id)}
	}
	s.expire(b, time.Duration(*in.Timeout)*time.Second)
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// refresh only moves the end further away.
func (s *server) refresh(w http.ResponseWriter, r *http.Request) error {
	in := struct {
		Duration int `json:"duration"`
	}{15}
	b, err := s.find(r)
	if err == nil {
		err = read(r, &in, true)
	}
	if err == nil {
		err = s.checkTimeout(in.Duration)
	}
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if d := time.Duration(in.Duration) * time.Second; b.state == running && time.Until(b.end) < d {
		s.expire(b, d)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// move takes a sandbox from one state through another to a third.
func (b *box) move(from, through, to, conflict string, do func() error) error {
	b.mu.Lock()
	if b.state != from {
		b.mu.Unlock()
		return &problem{Code: http.StatusConflict, Message: fmt.Sprintf("sandbox %s %s", b.id, conflict)}
	}
	b.state = through
	b.mu.Unlock()
	err := do()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.state == through {
		b.state = to
		if err != nil {
			b.state = from
		}
	}
	return err
}

func (s *server) freeze(b *box) error {
	return b.move(running, pausing, paused, "is not running", func() error {
		b.mu.Lock()
		close(b.cut)
		b.cut = make(chan struct{})
		b.mu.Unlock()
		b.transport.CloseIdleConnections()
		return b.signal(syscall.SIGSTOP)
	})
}

func (s *server) pause(w http.ResponseWriter, r *http.Request) error {
	var in struct {
		Memory *bool `json:"memory"`
	}
	b, err := s.find(r)
	if err == nil {
		err = read(r, &in, true)
	}
	if err == nil && in.Memory != nil && !*in.Memory {
		err = &problem{Code: http.StatusBadRequest, Message: "the stand-in pauses with memory only"}
	}
	if err == nil {
		err = s.freeze(b)
	}
	if err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// connect resumes a paused sandbox (201), or answers what is there (200). It
// moves the end further away only.
func (s *server) connect(w http.ResponseWriter, r *http.Request) error {
	var in struct {
		Timeout *int  `json:"timeout"`
		Memory  *bool `json:"memory"`
	}
	second := strings.HasPrefix(r.URL.Path, "/v2/")
	b, err := s.find(r)
	if err == nil {
		err = read(r, &in, second)
	}
	seconds := connectTimeout
	switch {
	case err != nil:
	case in.Timeout != nil:
		seconds = *in.Timeout
	case !second:
		err = &problem{Code: http.StatusBadRequest, Message: "timeout is required"}
	}
	if err == nil {
		err = s.checkTimeout(seconds)
	}
	if err != nil {
		return err
	}
	status := http.StatusOK
	b.mu.Lock()
	state := b.state
	b.mu.Unlock()
	if state != running {
		status = http.StatusCreated
		if err := b.move(paused, resuming, running, "is in transition", func() error { return b.signal(syscall.SIGCONT) }); err != nil {
			return err
		}
	}
	b.mu.Lock()
	if d := time.Duration(seconds) * time.Second; state != running || time.Until(b.end) < d {
		s.expire(b, d)
	}
	b.mu.Unlock()
	answer(w, status, s.handle(b))
	return nil
}

// close ends every sandbox; those that are starting are ended by their creates.
func (s *server) close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.starts.Wait()
	s.mu.Lock()
	var all []*box
	for _, b := range s.boxes {
		all = append(all, b)
	}
	s.mu.Unlock()
	var errs []error
	for _, b := range all {
		errs = append(errs, b.process.Kill())
		s.remove(b)
	}
	return errors.Join(errs...)
}
