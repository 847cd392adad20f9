package sandboxd

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"berth/api"
	"berth/internal/computer"
)

// Limits of one request.
const (
	maxBody     = 1 << 20          // bytes
	readWithin  = 20 * time.Second // for the body to arrive, unless a test has less time
	writeWithin = time.Minute      // for the answer to be taken
	maxTimeout  = 30 * 24 * 3600   // seconds
	maxVars     = 64               // entries of metadata, and of envVars
	maxVarBytes = 32 << 10         // of both together
)

// problem is an error as it is answered.
type problem struct {
	status  int
	code    string // error_code: for programs
	message string
}

func (p *problem) Error() string { return p.message }

func badInput(format string, args ...any) error {
	return &problem{http.StatusBadRequest, computer.CodeBadInput, fmt.Sprintf(format, args...)}
}

// Handler serves the API.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", s.health)
	mux.HandleFunc("GET /docs", s.docs)
	mux.HandleFunc("GET /openapi.yaml", s.openAPI)
	for pattern, h := range map[string]func(http.ResponseWriter, *http.Request) error{
		"GET /capacity":                                 s.getCapacity,
		"POST /sandboxes":                               s.postSandbox,
		"GET /sandboxes":                                s.getSandboxes,
		"GET /sandboxes/{id}":                           s.getSandbox,
		"DELETE /sandboxes/{id}":                        s.deleteSandbox,
		"POST /sandboxes/{id}/timeout":                  s.postTimeout,
		"POST /sandboxes/{id}/pause":                    s.postPause,
		"POST /sandboxes/{id}/resume":                   s.postResume,
		"POST /sandboxes/{id}/snapshots":                s.postSnapshot,
		"DELETE /templates/{id}":                        s.deleteTemplate,
		"POST /sandboxes/{id}/computer/actions":         s.postActions,
		"GET /sandboxes/{id}/computer/actions/{key}":    s.getActions,
		"DELETE /sandboxes/{id}/computer/actions/{key}": s.deleteActions,
		"GET /sandboxes/{id}/computer/screenshot":       s.getScreenshot,
		"POST /sandboxes/{id}/stream/links":             s.postLink,
	} {
		mux.HandleFunc(pattern, s.answering(s.withKey(h)))
	}
	mux.HandleFunc("GET /sandboxes/{id}/stream", s.answering(s.withToken(s.getStream)))
	mux.HandleFunc("GET /sandboxes/{id}/stream/frame", s.answering(s.withToken(s.getFrame)))
	mux.HandleFunc("GET /sandboxes/{id}/stream/rfb", s.answering(s.withToken(s.getRFB)))
	mux.HandleFunc("GET "+scriptsPath+"{path...}", s.answering(s.getScript))
	mux.HandleFunc("/", s.answering(func(_ http.ResponseWriter, r *http.Request) error {
		return &problem{http.StatusNotFound, "notFound", fmt.Sprintf("no call %s %.100s; see /docs", r.Method, r.URL.Path)}
	}))
	return http.MaxBytesHandler(mux, maxBody)
}

type handler = func(http.ResponseWriter, *http.Request) error

// answering turns an error into the answer. Every answer must be taken in time.
func (s *Server) answering(h handler) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		within := s.readWithin
		if r.ContentLength == 0 {
			within = 0 // nothing more comes; that the client hangs up is noticed at any time
		}
		deadline(control.SetReadDeadline, within)
		err := h(w, r)
		if err == nil {
			return
		}
		var p *problem
		if !errors.As(err, &p) {
			p = s.explain(err)
		}
		if r.Context().Err() != nil && p.status != http.StatusRequestTimeout {
			return // nobody is there to read it
		}
		if p.status >= 500 && p.status != http.StatusServiceUnavailable && p.status != http.StatusNotImplemented && p.status != http.StatusInsufficientStorage {
			s.log.Error("a call failed", "method", r.Method, "path", r.URL.Path, "err", err)
		}
		s.json(w, p.status, errorBody{Code: p.status, ErrorCode: p.code, Message: p.message})
	}
}

// deadline sets a deadline; 0 takes it away. A connection that has none, as in
// a test's recorder, needs none.
func deadline(set func(time.Time) error, d time.Duration) {
	at := time.Time{}
	if d > 0 {
		at = time.Now().Add(d)
	}
	if err := set(at); err != nil {
		return
	}
}

// errorBody has the form of E2B's.
type errorBody struct {
	Code      int    `json:"code"`
	ErrorCode string `json:"error_code,omitempty"`
	Message   string `json:"message"`
}

// capacityUnavailable is E2B's word for a server that is full.
const capacityUnavailable = "sandbox_capacity_unavailable"

// explain finds the answer for an error of the server's own.
func (s *Server) explain(err error) *problem {
	var refusal *agentRefusal
	switch {
	case errors.Is(err, errCannot):
		return &problem{http.StatusNotImplemented, "unsupported", err.Error()}
	case errors.Is(err, errPaused):
		return &problem{http.StatusConflict, "paused", err.Error()}
	case errors.Is(err, errBusy):
		return &problem{http.StatusConflict, "busy", err.Error()}
	case errors.Is(err, errManyTemplate):
		return &problem{http.StatusConflict, "too_many_snapshots", err.Error()}
	case errors.Is(err, errNone), errors.Is(err, errNoTemplate):
		return &problem{http.StatusNotFound, "notFound", err.Error()}
	case errors.Is(err, errViewers):
		return &problem{http.StatusServiceUnavailable, "too_many_viewers", err.Error()}
	case errors.Is(err, errNoStore):
		return &problem{http.StatusInsufficientStorage, "insufficient_storage", err.Error()}
	case errors.Is(err, errFull), errors.Is(err, errDraining), errors.Is(err, errNoMemory), errors.Is(err, errNoDisk):
		return &problem{http.StatusServiceUnavailable, capacityUnavailable, err.Error()}
	case errors.Is(err, errClosed):
		return &problem{http.StatusServiceUnavailable, "shutting_down", err.Error()}
	case errors.Is(err, errTaken):
		return &problem{http.StatusConflict, "conflict", err.Error()}
	case errors.Is(err, errEnded):
		return &problem{http.StatusConflict, "sandbox_ended", err.Error()}
	case errors.Is(err, errKilled), errors.Is(err, errLost):
		return &problem{http.StatusGone, "sandbox_lost", err.Error()}
	case errors.Is(err, errSilent):
		return &problem{http.StatusInternalServerError, "silent", err.Error()}
	case errors.Is(err, errAgent):
		return &problem{http.StatusGone, "sandbox_lost", errAgent.Error()}
	case errors.As(err, &refusal):
		return &problem{refusal.status, refusal.Code, refusal.Message}
	default:
		return &problem{http.StatusInternalServerError, "failed", err.Error()}
	}
}

func (s *Server) json(w http.ResponseWriter, status int, body any) {
	raw, err := json.Marshal(body)
	if err != nil {
		status, raw = http.StatusInternalServerError, []byte(`{"code":500,"message":"the answer cannot be encoded"}`)
	}
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	s.write(w, status, raw)
}

func (s *Server) write(w http.ResponseWriter, status int, raw []byte) {
	deadline(http.NewResponseController(w).SetWriteDeadline, writeWithin)
	w.Header().Set("Content-Length", strconv.Itoa(len(raw)))
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	if _, err := w.Write(raw); err != nil {
		s.log.Debug("an answer was not taken", "err", err)
	}
}

// withKey lets nobody in without the key.
func (s *Server) withKey(h handler) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		if !s.hasKey(r) {
			return &problem{http.StatusUnauthorized, "unauthorized", "the header X-API-Key is missing or wrong"}
		}
		return h(w, r)
	}
}

func (s *Server) hasKey(r *http.Request) bool {
	sum := sha256.Sum256([]byte(r.Header.Get("X-API-Key")))
	return subtle.ConstantTimeCompare(sum[:], s.key[:]) == 1
}

// errLinkOver ends what a link has granted.
var errLinkOver = &problem{http.StatusUnauthorized, "unauthorized", "the address is no longer valid: its time is up"}

// withToken lets in who has the key, or a token for the live view with the
// access that is asked for; then the request's context ends with what is granted.
func (s *Server) withToken(h func(http.ResponseWriter, *http.Request, api.Access) error) handler {
	return func(w http.ResponseWriter, r *http.Request) error {
		q := r.URL.Query()
		access := api.Access(cmp.Or(q.Get("access"), string(api.Look)))
		expires, err := strconv.ParseInt(q.Get("expires"), 10, 64)
		token := api.StreamToken(s.opts.APIKey, r.PathValue("id"), access, expires)
		valid := err == nil && time.Now().Unix() < expires && hmac.Equal([]byte(token), []byte(q.Get("token")))
		if !valid && !s.hasKey(r) {
			return &problem{http.StatusUnauthorized, "unauthorized", "the address has no valid token for this, or its time is up"}
		}
		if access != api.Look && access != api.Control {
			return badInput("access: %s or %s", api.Look, api.Control)
		}
		if !s.hasKey(r) {
			granted, cancel := context.WithDeadlineCause(r.Context(), time.Unix(expires, 0), errLinkOver)
			defer cancel()
			r = r.WithContext(granted)
		}
		return h(w, r, access)
	}
}

// read decodes a body of JSON strictly.
func (s *Server) read(w http.ResponseWriter, r *http.Request, into any) error {
	raw, err := s.body(w, r)
	if err != nil {
		return err
	}
	dec := json.NewDecoder(strings.NewReader(string(raw)))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return badInput("the body: %s", strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return badInput("the body has text after its JSON value")
	}
	return nil
}

// body reads the whole body and takes its deadline away: from then on a client
// that hangs up is noticed at once.
func (s *Server) body(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	raw, err := io.ReadAll(r.Body)
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return nil, &problem{http.StatusRequestEntityTooLarge, computer.CodeTooLarge, fmt.Sprintf("the body has more than %d bytes", large.Limit)}
	case err != nil:
		w.Header().Set("Connection", "close")
		return nil, &problem{http.StatusRequestTimeout, "timeout", "the body did not arrive"}
	}
	deadline(http.NewResponseController(w).SetReadDeadline, 0)
	return raw, nil
}

// idempotencyKey reads the header, which every such call needs.
func idempotencyKey(r *http.Request) (string, error) {
	key := r.Header.Get("Idempotency-Key")
	if key == "" || len(key) > 128 || strings.ContainsFunc(key, func(c rune) bool { return c <= ' ' || c > '~' }) {
		return "", badInput("the header Idempotency-Key: 1 to 128 visible ASCII characters")
	}
	return key, nil
}

func number(r *http.Request, header string) (uint64, error) {
	text := r.Header.Get(header)
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, badInput("the header %s: a whole number", header)
	}
	return n, nil
}
