package desktop

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"berth/internal/computer"
)

// AgentConfig is what a sandbox's agent is told when it starts.
type AgentConfig struct {
	Display      computer.Display
	Home         string
	UID          int // of the person; 0: as the agent
	ServerUID    int
	Nested       bool
	BrowserFlags []string
	// Wake makes anew what must not be as it was when a snapshot was taken that
	// this machine has been made from; nil: there are none.
	Wake func(now time.Time, seed []byte) error `json:"-"`
}

// Agent serves one desktop to the host, over HTTP on whatever connects the two:
// a unix socket, or vsock out of a microVM. It is private to the server; the
// public API is the server's. Only the host can reach it: there is no key.
//
//	GET  /ready
//	PUT  /claim            {fence, epoch, env}
//	POST /actions          {key, fence, epoch, actions} → {actions}
//	GET  /actions/{key}    → {state, actions?}
//	DELETE /actions/{key}?epoch=N    cancels it
//	GET  /screenshot       → image/png, Berth-Cursor, Berth-Title
//	GET  /view?control=B   Upgrade: rfb; one viewer, who may act where B is true
//	PUT  /wake             {now, seed}; see AgentConfig.Wake
//
// It answers nothing before the desktop is ready.
type Agent struct {
	session *Session
	ledger  *ledger
	running sync.WaitGroup // commands at work, and calls that may begin one

	mu     sync.Mutex
	closed bool // no more of them
	wake   func(now time.Time, seed []byte) error
	log    *slog.Logger
}

// maxTitle bounds a window's title, in bytes.
const maxTitle = 1024

// Serve starts a desktop and serves it until it goes down, which the returned
// error explains, or ctx ends.
func Serve(ctx context.Context, l net.Listener, config AgentConfig, log *slog.Logger) error {
	s, err := Start(ctx, Options{
		Display: config.Display, Person: Person{UID: config.UID, GID: config.UID, Home: config.Home}, ServerUID: config.ServerUID,
		Nested: config.Nested, BrowserFlags: config.BrowserFlags, Logger: log,
	})
	if err != nil {
		return errors.Join(err, l.Close())
	}
	a := &Agent{session: s, ledger: newLedger(), wake: config.Wake, log: log}
	server := &http.Server{Handler: a.routes(), ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn)}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	select {
	case err = <-served:
	case <-s.Down():
		// What is under way answers that the desktop is gone, where it still can.
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 300*time.Millisecond)
		defer cancel()
		if server.Shutdown(grace) != nil {
			log.Debug("some requests did not end")
		}
		err = s.Err()
	case <-ctx.Done():
		err = server.Close()
	}
	err = errors.Join(err, s.Close())
	a.mu.Lock()
	a.closed = true
	a.mu.Unlock()
	a.running.Wait() // a closed desktop ends them
	return err
}

// enter counts a call that may begin a command; false: it is too late.
func (a *Agent) enter() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return false
	}
	a.running.Add(1)
	return true
}

func (a *Agent) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /ready", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	mux.HandleFunc("PUT /claim", a.claim)
	mux.HandleFunc("POST /actions", a.act)
	mux.HandleFunc("GET /actions/{key}", a.recall)
	mux.HandleFunc("DELETE /actions/{key}", a.cancel)
	mux.HandleFunc("GET /screenshot", a.screenshot)
	mux.HandleFunc("GET /view", a.view)
	if a.wake != nil {
		mux.HandleFunc("PUT /wake", a.wakeUp)
	}
	return mux
}

// Claim hands a desktop over to a sandbox.
type Claim struct {
	Fence uint64            `json:"fence"`
	Epoch uint64            `json:"epoch"`
	Env   map[string]string `json:"env,omitempty"`
}

func (a *Agent) claim(w http.ResponseWriter, r *http.Request) {
	var c Claim
	if !a.read(w, r, &c) {
		return
	}
	a.ledger.claim(c.Fence, c.Epoch)
	env := make([]string, 0, len(c.Env))
	for name, value := range c.Env {
		env = append(env, name+"="+value)
	}
	a.session.SetEnv(env)
	w.WriteHeader(http.StatusNoContent)
}

// Waking is what the host says after a machine was made from a snapshot.
type Waking struct {
	Now  time.Time `json:"now"`
	Seed []byte    `json:"seed"` // random bytes, at least 32
}

func (a *Agent) wakeUp(w http.ResponseWriter, r *http.Request) {
	var in Waking
	if !a.read(w, r, &in) {
		return
	}
	if in.Now.IsZero() || len(in.Seed) < 32 {
		a.answer(w, http.StatusBadRequest, Refusal{computer.CodeBadInput, "a time, and at least 32 bytes of seed"})
		return
	}
	if err := a.wake(in.Now, in.Seed); err != nil {
		a.refuse(w, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// Batch is a command on its way to the agent.
type Batch struct {
	Key     string          `json:"key"`
	Fence   uint64          `json:"fence,omitempty"`
	Epoch   uint64          `json:"epoch,omitempty"`
	Actions json.RawMessage `json:"actions"`
}

// Performed is what became of a batch.
type Performed struct {
	State   string         `json:"state"` // started, finished
	Actions []ActionAnswer `json:"actions,omitempty"`
}

// Refusal is the body of an answer that is no success. Code is one of the
// constants below.
type Refusal struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// Codes of a Refusal beside those of computer.InvalidError.
const (
	RefusedStale    = "fence_stale"
	RefusedConflict = "conflict"
	RefusedUnknown  = "notFound"
	RefusedDown     = "lost"
	RefusedMissing  = "unsupported" // a program that this needs is not there
	RefusedPlain    = "upgradeRequired"
	RefusedEnded    = "cancelled" // before any of it ran; or whoever asked went away and nobody reads this
)

func (a *Agent) act(w http.ResponseWriter, r *http.Request) {
	var b Batch
	if !a.read(w, r, &b) {
		return
	}
	c := Command{Key: b.Key, Fence: b.Fence, Epoch: b.Epoch}
	if err := a.ledger.check(c); err != nil {
		a.refuse(w, err)
		return
	}
	actions, err := computer.DecodeActions(b.Actions)
	if err == nil {
		err = Check(actions, a.session.screen.Size())
	}
	if err != nil {
		a.refuse(w, err)
		return
	}
	results, err := a.perform(r.Context(), c, actions)
	if err != nil && len(results) == 0 || errors.Is(err, ErrDown) {
		a.refuse(w, err)
		return
	}
	out, err := answers(results)
	if err != nil {
		a.refuse(w, err)
		return
	}
	a.answer(w, http.StatusOK, Performed{State: "finished", Actions: out})
}

func (a *Agent) recall(w http.ResponseWriter, r *http.Request) {
	rec := a.ledger.find(r.PathValue("key"))
	switch {
	case rec == nil:
		a.answer(w, http.StatusNotFound, Refusal{RefusedUnknown, "this command has not been seen, or is among those of long ago"})
	case !rec.finished():
		a.answer(w, http.StatusOK, Performed{State: "started"})
	default:
		results, _ := a.ledger.outcome(rec) // the error only says why it ended early; the outcomes say what that did
		out, err := answers(results)
		if err != nil {
			a.refuse(w, err)
			return
		}
		a.answer(w, http.StatusOK, Performed{State: "finished", Actions: out})
	}
}

// cancel has a command end early. It returns once that has ended, which then is
// recorded with the outcome unknown for the action it met.
func (a *Agent) cancel(w http.ResponseWriter, r *http.Request) {
	epoch, err := strconv.ParseUint(cmp.Or(r.URL.Query().Get("epoch"), "0"), 10, 64)
	if err != nil {
		a.answer(w, http.StatusBadRequest, Refusal{computer.CodeBadInput, "epoch: no number"})
		return
	}
	if err := a.ledger.check(Command{Epoch: epoch}); err != nil {
		a.refuse(w, err)
		return
	}
	rec := a.ledger.find(r.PathValue("key"))
	if rec == nil {
		a.answer(w, http.StatusNotFound, Refusal{RefusedUnknown, "this command has not been seen, or is among those of long ago"})
		return
	}
	rec.cancel(errCancelled)
	select {
	case <-rec.done:
		w.WriteHeader(http.StatusNoContent)
	case <-r.Context().Done():
	}
}

func (a *Agent) screenshot(w http.ResponseWriter, r *http.Request) {
	shot, err := a.session.Picture(r.Context())
	if err != nil {
		a.refuse(w, err)
		return
	}
	w.Header().Set("Content-Type", "image/png")
	w.Header().Set("Content-Length", strconv.Itoa(len(shot.PNG)))
	w.Header().Set("Berth-Cursor", fmt.Sprintf("%d,%d", shot.Cursor.X, shot.Cursor.Y))
	if title := strings.ToValidUTF8(shot.Title, "\uFFFD"); title != "" {
		w.Header().Set("Berth-Title", url.PathEscape(title[:min(len(title), maxTitle)]))
	}
	if _, err := w.Write(shot.PNG); err != nil {
		a.log.Debug("a picture was not taken", "err", err)
	}
}

// read decodes a request's body; where that fails it has answered.
func (a *Agent) read(w http.ResponseWriter, r *http.Request, into any) bool {
	raw, err := io.ReadAll(http.MaxBytesReader(w, r.Body, computer.MaxActionsRaw+64<<10))
	if err == nil {
		err = json.Unmarshal(raw, into)
	}
	if err != nil {
		a.answer(w, http.StatusBadRequest, Refusal{computer.CodeBadInput, err.Error()})
	}
	return err == nil
}

func (a *Agent) refuse(w http.ResponseWriter, err error) {
	status, code := http.StatusInternalServerError, codeFailed
	var invalid *computer.InvalidError
	switch {
	case errors.As(err, &invalid):
		status, code = http.StatusBadRequest, invalid.Code
	case errors.Is(err, ErrStale):
		status, code = http.StatusConflict, RefusedStale
	case errors.Is(err, ErrConflict):
		status, code = http.StatusConflict, RefusedConflict
	case errors.Is(err, ErrDown), errors.Is(err, errServer):
		status, code = http.StatusGone, RefusedDown
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded), errors.Is(err, errCancelled), errors.Is(err, errActTime):
		code = RefusedEnded
	}
	a.answer(w, status, Refusal{code, err.Error()})
}

func (a *Agent) answer(w http.ResponseWriter, status int, body any) {
	raw, err := json.Marshal(body)
	if err != nil {
		status, raw = http.StatusInternalServerError, []byte(`{"code":"failed","message":"the answer cannot be encoded"}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if _, err := w.Write(raw); err != nil {
		a.log.Debug("an answer was not taken", "err", err)
	}
}
