package demoapp

import (
	"bytes"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"io"
	"io/fs"
	"mime"
	"net/http"
	"strconv"
	"time"
)

//go:embed pages static
var files embed.FS

const (
	maxBody    = 1 << 20 // bytes of a request
	maxBatch   = 200     // events in one request
	cookieName = "berth_demo"
)

type app struct {
	store *store
	pages *template.Template
	now   func() time.Time
}

// Handler returns the application with a state of its own.
func Handler() http.Handler { return newHandler(time.Now) }

func newHandler(now func() time.Time) http.Handler {
	a := &app{
		store: newStore(now),
		pages: template.Must(template.New("").ParseFS(files, "pages/*.html")),
		now:   now,
	}
	static, err := fs.Sub(files, "static")
	if err != nil {
		panic(err) // the folder is embedded, see above
	}
	mux := http.NewServeMux()
	for path, name := range map[string]string{
		"/{$}": "overview", "/form": "form", "/list": "list", "/board": "board",
		"/events": "events", "/windows": "windows", "/windows/note": "note", "/report": "report",
	} {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) { a.page(w, r, name) })
	}
	mux.Handle("GET /static/", http.StripPrefix("/static/", http.FileServerFS(static)))
	mux.HandleFunc("GET /files/manifest.csv", manifest)
	mux.HandleFunc("GET /api/state", a.getState)
	mux.HandleFunc("GET /api/sessions", a.getSessions)
	mux.HandleFunc("GET /api/items", a.getItems)
	mux.HandleFunc("POST /api/form", a.postForm)
	mux.HandleFunc("POST /api/list", a.postList)
	mux.HandleFunc("POST /api/board", a.postBoard)
	mux.HandleFunc("POST /api/events", a.postEvents)
	mux.HandleFunc("POST /api/reset", a.postReset)
	return http.NewCrossOriginProtection().Handler(secure(mux))
}

// secure sets the headers that every answer has. The pages use only what this
// host serves.
func secure(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'self'; img-src 'self' data:; frame-ancestors 'self'; base-uri 'none'; form-action 'self'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-store")
		next.ServeHTTP(w, r)
	})
}

// fault is an answer other than 200.
type fault struct {
	status  int
	message string
}

func (f *fault) Error() string { return f.message }

func badRequest(format string, args ...any) error {
	return &fault{http.StatusBadRequest, fmt.Sprintf(format, args...)}
}

// session names the request's session: ?run=ID, else the cookie, else "".
func (a *app) session(r *http.Request) (string, error) {
	if q := r.URL.Query(); q.Has("run") {
		id := q.Get("run")
		if !runID.MatchString(id) {
			return "", badRequest(`query "run": letters, digits, _ and -, 1 to 64 of them`)
		}
		return id, nil
	}
	if c, err := r.Cookie(cookieName); err == nil && runID.MatchString(c.Value) {
		return c.Value, nil
	}
	return "", nil
}

// needSession is session for the calls that mean nothing without one.
func (a *app) needSession(r *http.Request) (string, error) {
	id, err := a.session(r)
	if err == nil && id == "" {
		err = badRequest("no session: open a page first, or add ?run=ID")
	}
	return id, err
}

// page is what a template sees.
type page struct {
	Name  string // of the template
	Title string
	Lamp  Status
	State State
	View  any
	Nav   []navItem
}

type navItem struct {
	Path, Label string
	Current     bool
}

var navigation = []navItem{
	{Path: "/", Label: "Overview"}, {Path: "/form", Label: "Form"}, {Path: "/list", Label: "List"}, {Path: "/board", Label: "Board"},
	{Path: "/events", Label: "Events"}, {Path: "/windows", Label: "Windows"}, {Path: "/report", Label: "Report"},
}

func (a *app) page(w http.ResponseWriter, r *http.Request, name string) {
	id, err := a.session(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if c, err := r.Cookie(cookieName); id == "" || err != nil || c.Value != id {
		if id == "" {
			id = newRunID()
		}
		http.SetCookie(w, &http.Cookie{Name: cookieName, Value: id, Path: "/", HttpOnly: true, SameSite: http.SameSiteLaxMode})
	}
	p := page{Name: name, Title: name + ": nothing yet", Lamp: None}
	a.store.with(id, func(s *session) {
		if name == "list" {
			s.list.Loaded = 0 // the page starts again with the first batch
		}
		p.State = s.state()
		p.View = view(s, name)
	})
	if part, ok := p.State.Parts[name]; ok {
		p.Title, p.Lamp = part.Title, part.Status
	}
	for _, n := range navigation {
		n.Current = n.Path == r.URL.Path
		p.Nav = append(p.Nav, n)
	}
	var b bytes.Buffer
	if err := a.pages.ExecuteTemplate(&b, name+".html", p); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = b.WriteTo(w)
}

// row is a line of the overview and of the report.
type row struct {
	Name, Path, Label, Word string
	Part                    Part
	Facts                   string
}

// view is what a page or its script shows beside the part's judgement.
func view(s *session, name string) any {
	switch name {
	case "form":
		return map[string]any{"brief": formBrief, "berth": berths[formBrief.Berth], "sent": s.form.clone().Sent, "count": s.form.Count}
	case "list":
		return s.list
	case "board":
		return map[string]any{"columns": s.board.clone().Columns, "cards": cards, "count": s.board.Count}
	case "events":
		tail := s.events.Log[max(0, len(s.events.Log)-12):]
		return map[string]any{"tasks": s.events.tasks(), "count": s.events.Count, "held": append([]string{}, s.events.Held...), "text": s.events.Text, "log": append([]Event{}, tail...)}
	case "overview", "report":
		parts := s.parts()
		facts := map[string]string{
			"form":   fmt.Sprintf("%d sent", s.form.Count),
			"list":   fmt.Sprintf("%d of %d loaded, %d selected", s.list.Loaded, listTotal, s.list.Count),
			"board":  fmt.Sprintf("%d moves", s.board.Count),
			"events": fmt.Sprintf("%d events", s.events.Count),
		}
		labels := map[string]string{"form": "Form", "list": "List", "board": "Board", "events": "Events"}
		words := map[Status]string{None: "Not yet", Begun: "Under way", OK: "Done", Wrong: "Not right"}
		rows := make([]row, 0, len(partNames))
		for _, n := range partNames {
			rows = append(rows, row{n, "/" + n, labels[n], words[parts[n].Status], parts[n], facts[n]})
		}
		return rows
	}
	return nil
}

func (a *app) getState(w http.ResponseWriter, r *http.Request) {
	id, err := a.needSession(r)
	if err != nil {
		writeError(w, err)
		return
	}
	s, ok := a.store.peek(id)
	if !ok {
		writeError(w, &fault{http.StatusNotFound, fmt.Sprintf("no session %q: it never opened a page, or was forgotten", id)})
		return
	}
	writeJSON(w, http.StatusOK, s)
}

func (a *app) getSessions(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{"sessions": a.store.statuses()})
}

func (a *app) getItems(w http.ResponseWriter, r *http.Request) {
	id, err := a.needSession(r)
	if err != nil {
		writeError(w, err)
		return
	}
	after, err := strconv.Atoi(r.URL.Query().Get("after"))
	if err != nil {
		writeError(w, badRequest(`query "after": a number, 0 to %d`, listTotal))
		return
	}
	var items []Item
	var part Part
	a.store.with(id, func(s *session) {
		items, err = s.list.load(after)
		part = s.list.judge()
	})
	if err != nil {
		writeError(w, badRequest("%v", err))
		return
	}
	writeJSON(w, http.StatusOK, map[string]any{"items": items, "total": listTotal, "part": part})
}

func (a *app) postForm(w http.ResponseWriter, r *http.Request) {
	var in FormEntry
	a.post(w, r, "form", &in, func() error { return in.validate() }, func(s *session) error {
		s.form.submit(in)
		return nil
	})
}

func (a *app) postList(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Item int `json:"item"`
	}
	a.post(w, r, "list", &in, nil, func(s *session) error { return s.list.choose(in.Item) })
}

func (a *app) postBoard(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Card  int    `json:"card"`
		To    string `json:"to"`
		Index int    `json:"index"`
	}
	a.post(w, r, "board", &in, nil, func(s *session) error {
		return s.board.move(Move{Card: in.Card, To: in.To, Index: in.Index, At: a.now()})
	})
}

func (a *app) postEvents(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Events []Event `json:"events"`
	}
	a.post(w, r, "events", &in, func() error {
		if n := len(in.Events); n == 0 || n > maxBatch {
			return fmt.Errorf("field %q: 1 to %d at once, not %d", "events", maxBatch, n)
		}
		for i := range in.Events {
			if err := in.Events[i].validate(); err != nil {
				return fmt.Errorf("event %d, %w", i, err)
			}
			in.Events[i].At = a.now()
		}
		return nil
	}, func(s *session) error {
		for _, e := range in.Events {
			s.events.add(e)
		}
		return nil
	})
}

func (a *app) postReset(w http.ResponseWriter, r *http.Request) {
	var in struct {
		Part string `json:"part"`
	}
	a.post(w, r, "overview", &in, nil, func(s *session) error {
		if !s.reset(in.Part) {
			return fmt.Errorf("field %q: form, list, board, events or all", "part")
		}
		return nil
	})
}

// post decodes a body into in, checks it, and applies it to the session. The
// answer is {part, view}. Nothing is applied when anything is at fault.
func (a *app) post(w http.ResponseWriter, r *http.Request, name string, in any, check func() error, apply func(*session) error) {
	id, err := a.needSession(r)
	if err == nil {
		err = decode(w, r, in)
	}
	if err == nil && check != nil {
		if bad := check(); bad != nil {
			err = badRequest("%v", bad)
		}
	}
	if err != nil {
		writeError(w, err)
		return
	}
	out := map[string]any{}
	a.store.with(id, func(s *session) {
		if bad := apply(s); bad != nil {
			err = badRequest("%v", bad)
			return
		}
		out["part"], out["view"] = s.parts()[name], view(s, name)
	})
	if err != nil {
		writeError(w, err)
		return
	}
	writeJSON(w, http.StatusOK, out)
}

// decode reads one JSON value of at most maxBody bytes and refuses unknown
// fields.
func decode(w http.ResponseWriter, r *http.Request, v any) error {
	if t, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || t != "application/json" {
		return &fault{http.StatusUnsupportedMediaType, "the body must be application/json"}
	}
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody))
	dec.DisallowUnknownFields()
	err := dec.Decode(v)
	if err == nil {
		if _, more := dec.Token(); more != io.EOF {
			err = more
			if err == nil {
				err = errors.New("text after the JSON value")
			}
		}
	}
	var large *http.MaxBytesError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &large):
		return &fault{http.StatusRequestEntityTooLarge, fmt.Sprintf("the body is over %d bytes", maxBody)}
	case errors.Is(err, io.EOF):
		return badRequest("the body is empty")
	default:
		return badRequest("the body is not as expected: %v", err)
	}
}

// writeError answers {code, message}, as the other HTTP APIs of Berth do.
func writeError(w http.ResponseWriter, err error) {
	status := http.StatusInternalServerError
	var f *fault
	if errors.As(err, &f) {
		status = f.status
	}
	writeJSON(w, status, map[string]any{"code": status, "message": err.Error()})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.WriteHeader(status)
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(v) // the client is gone; there is nobody to tell
}

// manifest is the download of the windows page.
func manifest(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/csv; charset=utf-8")
	w.Header().Set("Content-Disposition", `attachment; filename="manifest.csv"`)
	fmt.Fprintln(w, "number,goods,port,kilos")
	for n := 1; n <= listTotal; n++ {
		i := item(n)
		fmt.Fprintf(w, "%d,%s,%s,%d\n", i.Number, i.Goods, i.Port, i.Kilos)
	}
}
