package sandboxd

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"berth/internal/computer"
	"berth/internal/desktop"
)

// postActions hands a batch to the sandbox's agent. It is checked here first, so
// that what cannot run is refused also while the agent is busy.
func (s *Server) postActions(w http.ResponseWriter, r *http.Request) error {
	var body struct {
		Actions json.RawMessage `json:"actions"`
	}
	if err := s.read(w, r, &body); err != nil {
		return err
	}
	batch := desktop.Batch{Actions: body.Actions}
	var err error
	if batch.Key, err = idempotencyKey(r); err != nil {
		return err
	}
	if batch.Fence, err = number(r, "Berth-Fence"); err != nil {
		return err
	}
	if batch.Epoch, err = number(r, "Berth-Epoch"); err != nil {
		return err
	}
	b, done, err := s.usable(r.PathValue("id"))
	if err != nil {
		return err
	}
	defer done()
	actions, err := computer.DecodeActions(body.Actions)
	if err == nil {
		err = desktop.Check(actions, b.record().Display)
	}
	if err != nil {
		return invalid(err)
	}
	performed, err := b.guest.Agent().act(r.Context(), batch)
	if err != nil {
		return b.explain(r.Context(), err)
	}
	s.json(w, http.StatusOK, map[string]any{"actions": performed.Actions})
	return nil
}

func invalid(err error) error {
	var fault *computer.InvalidError
	if errors.As(err, &fault) {
		return &problem{http.StatusBadRequest, fault.Code, fault.Error()}
	}
	return err
}

func (s *Server) getActions(w http.ResponseWriter, r *http.Request) error {
	b, done, err := s.usable(r.PathValue("id"))
	if err != nil {
		return err
	}
	defer done()
	performed, err := b.guest.Agent().recall(r.Context(), r.PathValue("key"))
	if err != nil {
		return b.explain(r.Context(), err)
	}
	s.json(w, http.StatusOK, performed)
	return nil
}

// deleteActions cancels a batch that runs; it returns once that has ended.
func (s *Server) deleteActions(w http.ResponseWriter, r *http.Request) error {
	epoch, err := number(r, "Berth-Epoch")
	if err != nil {
		return err
	}
	b, done, err := s.usable(r.PathValue("id"))
	if err != nil {
		return err
	}
	defer done()
	if err := b.guest.Agent().cancel(r.Context(), r.PathValue("key"), epoch); err != nil {
		return b.explain(r.Context(), err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// pictureWithin bounds one picture.
const pictureWithin = 20 * time.Second

func (s *Server) getScreenshot(w http.ResponseWriter, r *http.Request) error {
	b, done, err := s.usable(r.PathValue("id"))
	if err != nil {
		return err
	}
	defer done()
	ctx, cancel := context.WithTimeoutCause(r.Context(), pictureWithin, &problem{http.StatusGatewayTimeout, "timeout", "the desktop gave no picture in " + pictureWithin.String()})
	defer cancel()
	png, header, err := b.guest.Agent().screenshot(ctx)
	if err != nil {
		return b.explain(ctx, err)
	}
	w.Header().Set("Content-Type", "image/png")
	w.Header().Set("Cache-Control", "no-store")
	for _, name := range []string{"Berth-Cursor", "Berth-Title"} {
		if value := header.Get(name); value != "" {
			w.Header().Set(name, value)
		}
	}
	s.write(w, http.StatusOK, png)
	return nil
}
