package sandboxd

import (
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"berth/internal/computer"
)

func (s *Server) health(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	status := "ok"
	if s.draining {
		status = "draining"
	}
	s.mu.Unlock()
	s.json(w, http.StatusOK, map[string]string{"status": status, "bootId": s.boot})
}

func (s *Server) getCapacity(w http.ResponseWriter, _ *http.Request) error {
	s.mu.Lock()
	used, pending, warm := 0, 0, len(s.spares)
	boxes, spares := slices.Collect(maps.Values(s.boxes)), slices.Clone(s.spares)
	for _, b := range s.boxes {
		if b.state() == "starting" {
			pending++
		} else {
			used++
		}
	}
	s.mu.Unlock()
	attributes := s.machine.Attributes()
	attributes["warm"] = strconv.Itoa(warm)
	attributes["liveView"] = "vnc"
	if err := s.scriptsMissing(); err != nil || attributes["liveViewReason"] != "" {
		attributes["liveView"] = "pictures"
		if err != nil {
			attributes["liveViewReason"] = err.Error()
		}
	}
	memory, disk, err := s.free()
	if err != nil {
		return err
	}
	roles := s.opts.Roles
	if roles == nil {
		roles = []string{}
	}
	s.json(w, http.StatusOK, map[string]any{
		"maxContainers": s.opts.MaxContainers, "used": used, "pending": pending, "roles": roles, "capabilities": s.capabilities(), "attributes": attributes,
		"usage": s.usedBy(boxes, spares), "host": host{memory, disk},
	})
	return nil
}

// detail is a sandbox as it is answered.
type detail struct {
	SandboxID    string            `json:"sandboxID"`
	TemplateID   string            `json:"templateID"`
	State        string            `json:"state"`
	Metadata     map[string]string `json:"metadata"`
	StartedAt    time.Time         `json:"startedAt"`
	EndAt        *time.Time        `json:"endAt,omitempty"`
	WatchedAt    *time.Time        `json:"watchedAt,omitempty"`
	Display      computer.Display  `json:"display"`
	Capabilities []string          `json:"capabilities"`
	Usage        *usage            `json:"usage,omitempty"`
}

func (b *box) detail() detail {
	rec := b.record()
	d := detail{
		SandboxID: rec.ID, TemplateID: rec.Template, State: b.state(), Metadata: rec.Metadata, StartedAt: rec.StartedAt,
		Display: rec.Display, Capabilities: b.s.capabilities(), Usage: b.usage(),
	}
	if d.Metadata == nil {
		d.Metadata = map[string]string{}
	}
	if !rec.EndAt.IsZero() {
		d.EndAt = &rec.EndAt
	}
	if at := b.watched.Load(); at != nil {
		d.WatchedAt = at
	}
	return d
}

// newSandbox is the body of a create.
type newSandbox struct {
	SandboxID  string            `json:"sandboxID"`
	TemplateID string            `json:"templateID"`
	Timeout    int64             `json:"timeout"`
	Metadata   map[string]string `json:"metadata"`
	EnvVars    map[string]string `json:"envVars"`
	Display    *computer.Display `json:"display"`
}

func (s *Server) postSandbox(w http.ResponseWriter, r *http.Request) error {
	var body newSandbox
	if err := s.read(w, r, &body); err != nil {
		return err
	}
	o, err := body.order(r)
	if err == nil {
		err = s.knows(&o, body.Display != nil)
	}
	if err != nil {
		return err
	}
	b, err := s.create(r.Context(), o)
	if err != nil {
		return err
	}
	if !b.announce(r.Context()) {
		return b.kill("nobody waited for it any more")
	}
	d := b.detail()
	d.Usage = nil // the same key again answers the same
	s.json(w, http.StatusCreated, d)
	return nil
}

// order checks a create.
func (n newSandbox) order(r *http.Request) (order, error) {
	o := order{
		id: n.SandboxID, template: n.TemplateID, metadata: n.Metadata, env: n.EnvVars, timeout: time.Duration(n.Timeout) * time.Second, display: computer.DefaultDisplay,
	}
	if o.template == "" {
		o.template = DefaultTemplate
	}
	if n.Display != nil {
		o.display = *n.Display
	}
	var err error
	if o.key, err = idempotencyKey(r); err != nil {
		return o, err
	}
	if o.epoch, err = number(r, "Berth-Epoch"); err != nil {
		return o, err
	}
	if o.fence, err = fenceOf(n.Metadata); err != nil {
		return o, badInput("metadata.fence: %v", err)
	}
	if !identifier.MatchString(o.id) {
		return o, badInput("sandboxID: 1 to 64 letters, digits, _ or -")
	}
	if n.Timeout < 0 || n.Timeout > maxTimeout {
		return o, badInput("timeout: 0 to %d seconds", maxTimeout)
	}
	if err := o.display.Validate(); err != nil {
		return o, badInput("display: %v", err)
	}
	if len(n.Metadata) > maxVars || len(n.EnvVars) > maxVars {
		return o, badInput("at most %d entries of metadata and of envVars", maxVars)
	}
	size := 0
	for name, vars := range map[string]map[string]string{"metadata": n.Metadata, "envVars": n.EnvVars} {
		for k, v := range vars {
			size += len(k) + len(v)
			if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
				return o, badInput("%s: a name is not empty and has no '='; no value has a NUL", name)
			}
		}
	}
	if size > maxVarBytes {
		return o, badInput("metadata and envVars together have at most %d bytes", maxVarBytes)
	}
	return o, nil
}

func (s *Server) getSandboxes(w http.ResponseWriter, _ *http.Request) error {
	s.mu.Lock()
	boxes := slices.Collect(maps.Values(s.boxes))
	s.mu.Unlock()
	list := make([]detail, 0, len(boxes))
	for _, b := range boxes {
		list = append(list, b.detail())
	}
	slices.SortFunc(list, func(a, b detail) int {
		if c := a.StartedAt.Compare(b.StartedAt); c != 0 {
			return c
		}
		return strings.Compare(a.SandboxID, b.SandboxID)
	})
	s.json(w, http.StatusOK, list)
	return nil
}

func (s *Server) getSandbox(w http.ResponseWriter, r *http.Request) error {
	b := s.find(r.PathValue("id"))
	if b == nil {
		return errNone
	}
	s.json(w, http.StatusOK, b.detail())
	return nil
}

func (s *Server) deleteSandbox(w http.ResponseWriter, r *http.Request) error {
	b := s.find(r.PathValue("id"))
	if b == nil {
		return errNone
	}
	if err := b.kill("it was killed"); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) postTimeout(w http.ResponseWriter, r *http.Request) error {
	var body struct {
		Timeout *int64 `json:"timeout"`
	}
	if err := s.read(w, r, &body); err != nil {
		return err
	}
	if body.Timeout == nil || *body.Timeout < 0 || *body.Timeout > maxTimeout {
		return badInput("timeout: 0 to %d seconds", maxTimeout)
	}
	b := s.find(r.PathValue("id"))
	if b == nil {
		return errNone
	}
	if err := b.setTimeout(time.Duration(*body.Timeout) * time.Second); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
