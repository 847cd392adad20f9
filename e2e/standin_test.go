package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
	"berth/internal/providers/providertest"
)

// standIn is a self-hosted server (api/sandboxd.yaml) of the test: it checks
// fences and epochs, remembers batches by their key, and its record of effects
// is the oracle. A request can be held up before it is looked at, as one that
// is late on its way.
type standIn struct {
	*providertest.Fake
	url  string
	does providers.Provider

	picture []byte // what every sandbox looks like; nil: as the fake has it

	mu    sync.Mutex
	delay map[string]*delay // by idempotency key
}

// delay is a request that is held up.
type delay struct {
	arrived chan struct{} // closed when it has come
	release chan struct{} // to be closed when it is to go on
	done    chan int      // its status
}

const standInKey = "stand-in-key-0123456789"

func startStandIn(t *testing.T, id string) *standIn {
	t.Helper()
	s := &standIn{Fake: providertest.NewFake(providertest.FakeOptions{ServerID: id, Recall: true, CheckFences: true}), delay: map[string]*delay{}}
	s.does = s.Provider()
	mux := http.NewServeMux()
	handle := func(pattern string, fn func(w http.ResponseWriter, r *http.Request) error) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("X-API-Key") != standInKey && r.URL.Path != "/health" {
				http.Error(w, "no key", http.StatusUnauthorized)
				return
			}
			if err := fn(w, r); err != nil {
				status, code := http.StatusServiceUnavailable, ""
				switch {
				case errors.Is(err, providers.ErrNotFound):
					status = http.StatusNotFound
				case errors.Is(err, providers.ErrFenceStale):
					status, code = http.StatusConflict, "fence_stale"
				case errors.Is(err, providers.ErrInvalid):
					status = http.StatusBadRequest
				}
				_ = reply(w, status, map[string]any{"code": status, "error_code": code, "message": err.Error()})
			}
		})
	}
	handle("GET /health", func(w http.ResponseWriter, _ *http.Request) error {
		return reply(w, http.StatusOK, map[string]any{"status": "ok", "bootId": "boot-1"})
	})
	handle("GET /capacity", func(w http.ResponseWriter, _ *http.Request) error {
		return reply(w, http.StatusOK, map[string]any{"maxContainers": 1000, "capabilities": s.does.Info().Capabilities})
	})
	handle("POST /sandboxes", func(w http.ResponseWriter, r *http.Request) error {
		var body struct {
			SandboxID string
			Metadata  map[string]string
			Display   computer.Display
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			return fmt.Errorf("%w: %w", providers.ErrInvalid, err)
		}
		box, err := s.does.Create(r.Context(), providers.Spec{VM: body.SandboxID, Fence: number(body.Metadata["fence"]), Tenant: body.Metadata["tenant"],
			Role: body.Metadata["role"], Display: body.Display, LeaseEpoch: number(r.Header.Get("Berth-Epoch"))})
		if err != nil {
			return err
		}
		return reply(w, http.StatusCreated, described(box))
	})
	handle("GET /sandboxes", func(w http.ResponseWriter, r *http.Request) error {
		list, err := s.does.List(r.Context())
		if err != nil {
			return err
		}
		out := []map[string]any{}
		for _, box := range list {
			out = append(out, described(box))
		}
		return reply(w, http.StatusOK, out)
	})
	handle("GET /sandboxes/{id}", func(w http.ResponseWriter, r *http.Request) error {
		box, err := s.does.Get(r.Context(), r.PathValue("id"))
		if err != nil {
			return err
		}
		return reply(w, http.StatusOK, described(box))
	})
	handle("DELETE /sandboxes/{id}", func(w http.ResponseWriter, r *http.Request) error {
		if err := s.does.Kill(r.Context(), r.PathValue("id")); err != nil {
			return err
		}
		return reply(w, http.StatusNoContent, nil)
	})
	handle("POST /sandboxes/{id}/timeout", func(w http.ResponseWriter, _ *http.Request) error {
		return reply(w, http.StatusNoContent, nil)
	})
	handle("POST /sandboxes/{id}/computer/actions", s.execute)
	handle("GET /sandboxes/{id}/computer/actions/{key}", func(w http.ResponseWriter, r *http.Request) error {
		rec, err := s.does.Recall(r.Context(), r.PathValue("id"), r.PathValue("key"))
		if err != nil {
			return err
		}
		if !rec.Finished {
			return reply(w, http.StatusOK, map[string]any{"state": "started"})
		}
		return reply(w, http.StatusOK, map[string]any{"state": "finished", "actions": answers(rec.Results)})
	})
	handle("GET /sandboxes/{id}/computer/screenshot", func(w http.ResponseWriter, r *http.Request) error {
		view, err := s.does.Observe(r.Context(), r.PathValue("id"))
		if err != nil {
			return err
		}
		if s.picture != nil {
			view.PNG = s.picture
		}
		w.Header().Set("Content-Type", "image/png")
		_, err = w.Write(view.PNG)
		return err
	})
	srv := httptest.NewServer(mux)
	s.url = srv.URL
	t.Cleanup(func() {
		srv.CloseClientConnections()
		srv.Close()
		s.Shutdown()
	})
	return s
}

// execute runs a batch, once it is let.
func (s *standIn) execute(w http.ResponseWriter, r *http.Request) error {
	var body struct{ Actions json.RawMessage }
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		return fmt.Errorf("%w: %w", providers.ErrInvalid, err)
	}
	actions, err := computer.DecodeActions(body.Actions)
	if err != nil {
		return fmt.Errorf("%w: %w", providers.ErrInvalid, err)
	}
	key := r.Header.Get("Idempotency-Key")
	s.mu.Lock()
	d := s.delay[key]
	delete(s.delay, key)
	s.mu.Unlock()
	if d != nil {
		close(d.arrived)
		<-d.release
	}
	results, err := s.does.Execute(r.Context(), providers.Batch{VM: r.PathValue("id"), Key: key, Actions: actions,
		Fence: number(r.Header.Get("Berth-Fence")), Epoch: number(r.Header.Get("Berth-Epoch"))})
	if d != nil {
		status := http.StatusOK
		if errors.Is(err, providers.ErrFenceStale) {
			status = http.StatusConflict
		}
		d.done <- status
	}
	if err != nil {
		return err
	}
	return reply(w, http.StatusOK, map[string]any{"actions": answers(results)})
}

// holdUp has the request of a key wait.
func (s *standIn) holdUp(key string) *delay {
	d := &delay{make(chan struct{}), make(chan struct{}), make(chan int, 1)}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.delay[key] = d
	return d
}

func number(text string) uint64 {
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0 // not given
	}
	return n
}

func described(s providers.Sandbox) map[string]any {
	end := s.ExpiresAt
	if end.IsZero() {
		end = time.Now().Add(time.Hour)
	}
	return map[string]any{"sandboxID": s.VM, "state": s.State, "startedAt": s.CreatedAt, "endAt": end, "display": s.Display, "capabilities": s.Capabilities,
		"metadata": map[string]string{"vmId": s.VM, "fence": strconv.FormatUint(s.Fence, 10), "tenant": s.Tenant, "role": s.Role}}
}

func answers(results []providers.Result) []computer.ActionResult {
	out := make([]computer.ActionResult, len(results))
	for i, r := range results {
		out[i] = r.ActionResult
	}
	return out
}

// reply writes JSON; nobody could be told of a connection that is gone.
func reply(w http.ResponseWriter, status int, body any) error {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if body != nil {
		_ = json.NewEncoder(w).Encode(body)
	}
	return nil
}
