package demoapp

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// client speaks to a fresh application as one browser would.
type client struct {
	t       *testing.T
	handler http.Handler
	cookie  *http.Cookie
}

func setup(t *testing.T) *client {
	t.Helper()
	t.Parallel()
	return &client{t: t, handler: newHandler(func() time.Time { return time.Unix(1_800_000_000, 0).UTC() })}
}

func (c *client) do(method, target, contentType string, body io.Reader) (int, string) {
	c.t.Helper()
	r := httptest.NewRequest(method, target, body)
	if contentType != "" {
		r.Header.Set("Content-Type", contentType)
	}
	if c.cookie != nil {
		r.AddCookie(c.cookie)
	}
	w := httptest.NewRecorder()
	c.handler.ServeHTTP(w, r)
	for _, k := range w.Result().Cookies() {
		c.cookie = k
	}
	return w.Code, w.Body.String()
}

func (c *client) get(target string) (int, string) { return c.do("GET", target, "", nil) }

func (c *client) post(path string, body any) (int, string) {
	c.t.Helper()
	raw, err := json.Marshal(body)
	if err != nil {
		c.t.Fatal(err)
	}
	return c.do("POST", path, "application/json", strings.NewReader(string(raw)))
}

// must posts what has to be accepted and returns the judgement.
func (c *client) must(path string, body any) Part {
	c.t.Helper()
	code, answer := c.post(path, body)
	if code != http.StatusOK {
		c.t.Fatalf("POST %s: %d %s", path, code, answer)
	}
	var a struct{ Part Part }
	if err := json.Unmarshal([]byte(answer), &a); err != nil {
		c.t.Fatal(err)
	}
	return a.Part
}

func (c *client) state() State {
	c.t.Helper()
	code, answer := c.get("/api/state")
	var s State
	if err := json.Unmarshal([]byte(answer), &s); code != http.StatusOK || err != nil {
		c.t.Fatalf("GET /api/state: %d %v %s", code, err, answer)
	}
	return s
}

func ev(kind, target string, more Event) Event {
	more.Kind, more.Target, more.Trusted = kind, target, true
	return more
}

// signals are what the events page asks for, as Chromium reports it.
func signals() []Event {
	shift, both := []string{"Shift"}, []string{"Control", "Shift"}
	return []Event{
		ev("click", "click", Event{Detail: 1}),
		ev("click", "double", Event{Detail: 1}), ev("click", "double", Event{Detail: 2}), ev("dblclick", "double", Event{Detail: 2}),
		ev("contextmenu", "right", Event{Button: 2}), ev("auxclick", "right", Event{Button: 2, Detail: 1}),
		ev("keydown", "page", Event{Key: "Shift", Code: "ShiftLeft", Mods: shift}), ev("click", "shift", Event{Detail: 1, Mods: shift}), ev("keyup", "page", Event{Key: "Shift", Code: "ShiftLeft"}),
		ev("wheel", "wheel", Event{DY: 100}), ev("wheel", "wheel", Event{DY: 200}),
		ev("keydown", "keys", Event{Key: "Control", Code: "ControlLeft", Mods: []string{"Control"}}),
		ev("keydown", "keys", Event{Key: "Shift", Code: "ShiftLeft", Mods: both}),
		ev("keydown", "keys", Event{Key: "K", Code: "KeyK", Mods: both}),
		ev("keydown", "keys", Event{Key: "K", Code: "KeyK", Mods: both, Repeat: true}),
		ev("keyup", "keys", Event{Key: "K", Code: "KeyK", Mods: both}),
		ev("keyup", "keys", Event{Key: "Shift", Code: "ShiftLeft", Mods: []string{"Control"}}),
		ev("keyup", "keys", Event{Key: "Control", Code: "ControlLeft"}),
		ev("input", "text", Event{Text: "ahoy"}), ev("input", "text", Event{Text: wantText}),
	}
}

func TestReportIsGreenOnlyWhenEveryPartIs(t *testing.T) {
	c := setup(t)
	if code, page := c.get("/"); code != 200 || !strings.Contains(page, "<title>overview: 0 of 4 done</title>") || !strings.Contains(page, "lamp-none") {
		t.Fatalf("GET /: %d %.300s", code, page)
	}
	if p := c.must("/api/form", formBrief); p.Title != "form: sent name=Zoë Ångström note=3 lines ok" || p.Status != OK {
		t.Errorf("form: %+v", p)
	}
	for _, after := range []int{0, 20, 40} {
		if code, body := c.get(fmt.Sprintf("/api/items?after=%d", after)); code != 200 {
			t.Fatalf("items: %d %s", code, body)
		}
	}
	if p := c.must("/api/list", map[string]int{"item": 60}); p.Title != "list: selected item 60 ok" || p.Status != OK {
		t.Errorf("list: %+v", p)
	}
	if p := c.must("/api/board", firstMove); p.Status != Begun || p.Title != "board: todo=11,13 doing=14,15,12 done=16" {
		t.Errorf("board: %+v", p)
	}
	if p := c.must("/api/board", map[string]any{"card": 15, "to": "done", "index": 0}); p.Status != OK || p.Title != "board: todo=11,13 doing=14,12 done=15,16 ok" {
		t.Errorf("board: %+v", p)
	}
	if got := c.state().Parts["report"]; got.Status != Begun || got.Title != "report: form ok, list ok, board ok, events missing" {
		t.Errorf("report before the events: %+v", got)
	}
	if p := c.must("/api/events", map[string]any{"events": signals()}); p.Status != OK || p.Title != "events: click=1 double=1 right=1 shift=1 wheel=+300 chord=Control+Shift+K text=ahoy, Zoë 😀 held=none ok" {
		t.Errorf("events: %+v", p)
	}
	if _, page := c.get("/report"); !strings.Contains(page, "<title>report: form ok, list ok, board ok, events ok</title>") || !strings.Contains(page, "lamp-ok") {
		t.Errorf("report page: %.400s", page)
	}
	s := c.state()
	if s.Form.Count != 1 || *s.Form.Sent != formBrief || s.List != (ListState{60, 1, 60}) || s.Board.Count != 2 || s.Events.Count != len(signals()) {
		t.Errorf("state: %+v", s)
	}
	c.must("/api/reset", map[string]string{"part": "board"})
	if got := c.state().Parts["report"].Title; got != "report: form ok, list ok, board missing, events ok" {
		t.Errorf("after a reset: %q", got)
	}
}

// firstMove is the first of the board's two moves.
var firstMove = map[string]any{"card": 12, "to": "doing", "index": 2}

// An action that runs twice has to show: this is what the page is for.
func TestEventsAreWrongWhenAnythingComesTwice(t *testing.T) {
	t.Parallel()
	all := signals()
	for i, e := range all {
		twice := e.Kind == "click" && e.Target != "double" || e.Kind == "auxclick" || e.Kind == "dblclick" || e.Kind == "wheel" && e.DY == 200 || e.Key == "K" && e.Kind == "keydown" && !e.Repeat
		if !twice {
			continue
		}
		s := newEvents()
		for j, f := range all {
			s.add(f)
			if i == j {
				s.add(f)
			}
		}
		if p := s.judge(); p.Status != Wrong {
			t.Errorf("%s on %s twice: %+v", e.Kind, e.Target, p)
		}
	}
	for i, e := range all {
		missing := e.Kind != "contextmenu" && e.Kind != "keyup" && !e.Repeat && !(e.Kind == "keydown" && e.Key != "K") &&
			!(e.Kind == "click" && e.Target == "double") && !(e.Kind == "wheel") && e.Text != "ahoy"
		if !missing {
			continue
		}
		s := newEvents()
		for j, f := range all {
			if i != j {
				s.add(f)
			}
		}
		if p := s.judge(); p.Status == OK {
			t.Errorf("without %s on %s: %+v", e.Kind, e.Target, p)
		}
	}
}

func TestEventsThatScriptsMakeUpDoNotCount(t *testing.T) {
	t.Parallel()
	s := newEvents()
	for _, e := range signals() {
		e.Trusted = false
		s.add(e)
	}
	if p := s.judge(); p.Status != Begun || s.Count != len(signals()) || s.Click != 0 || s.Chords != 0 {
		t.Errorf("%+v", p)
	}
}

func TestAHeldKeyIsNotDone(t *testing.T) {
	t.Parallel()
	s := newEvents()
	for _, e := range signals() {
		if e.Kind == "keyup" && e.Code == "ControlLeft" {
			continue
		}
		s.add(e)
	}
	if p := s.judge(); p.Status != Begun || !strings.HasSuffix(p.Title, "held=ControlLeft") {
		t.Errorf("%+v", p)
	}
}

func TestWrongAnswersAreRed(t *testing.T) {
	c := setup(t)
	c.get("/form")
	e := formBrief
	e.Note = strings.ReplaceAll(e.Note, "\n", " ")
	e.Terms = false
	if p := c.must("/api/form", e); p.Status != Wrong || p.Title != "form: sent name=Zoë Ångström note=1 lines wrong note,terms" {
		t.Errorf("form: %+v", p)
	}
	c.get("/api/items?after=0")
	if p := c.must("/api/list", map[string]int{"item": 7}); p.Status != Wrong || p.Title != "list: selected item 7 wrong" {
		t.Errorf("list: %+v", p)
	}
	if p := c.must("/api/board", map[string]any{"card": 11, "to": "done", "index": 1}); p.Status != Wrong || p.Title != "board: todo=12,13 doing=14,15 done=16,11 wrong" {
		t.Errorf("board: %+v", p)
	}
	if got := c.state().Parts["report"]; got.Status != Wrong || got.Title != "report: form wrong, list wrong, board wrong, events missing" {
		t.Errorf("report: %+v", got)
	}
}

func TestBadInputIsRefusedByName(t *testing.T) {
	c := setup(t)
	c.get("/")
	c.get("/api/items?after=0")
	before := c.state()
	long := strings.Repeat("x", 17<<10)
	many := make([]Event, maxBatch+1)
	for i := range many {
		many[i] = Event{Kind: "click"}
	}
	for _, tt := range []struct {
		path string
		body any
		want string
	}{
		{"/api/form", map[string]any{"nome": "x"}, `unknown field \"nome\"`},
		{"/api/form", map[string]any{"name": 7}, "name"},
		{"/api/form", map[string]any{"note": long}, `field \"note\": 17408 bytes, at most 16384`},
		{"/api/form", map[string]any{"berth": "moon"}, `field \"berth\"`},
		{"/api/form", "text", "not as expected"},
		{"/api/list", map[string]any{"item": 0}, `field \"item\": 1 to 60`},
		{"/api/list", map[string]any{"item": 61}, `field \"item\": 1 to 60`},
		{"/api/list", map[string]any{"item": 60}, "60 is not loaded yet, only 20 are"},
		{"/api/board", map[string]any{"card": 99, "to": "done"}, "no card 99"},
		{"/api/board", map[string]any{"card": 12, "to": "sea"}, `field \"to\"`},
		{"/api/board", map[string]any{"card": 12, "to": "done", "index": 2}, `field \"index\": 0 to 1`},
		{"/api/events", map[string]any{"events": []Event{}}, "1 to 200 at once, not 0"},
		{"/api/events", map[string]any{"events": many}, "1 to 200 at once, not 201"},
		{"/api/events", map[string]any{"events": []Event{{Kind: "click"}, {Kind: "smile"}}}, `event 1, field \"kind\"`},
		{"/api/events", map[string]any{"events": []Event{{Kind: "click", Target: "moon"}}}, `field \"target\"`},
		{"/api/events", map[string]any{"events": []Event{{Kind: "click", Button: 9}}}, `field \"button\"`},
		{"/api/events", map[string]any{"events": []Event{{Kind: "keydown", Mods: []string{"Hyper"}}}}, `field \"mods\"`},
		{"/api/events", map[string]any{"events": []Event{{Kind: "wheel", DY: 1e7}}}, `field \"dy\"`},
		{"/api/events", map[string]any{"events": []Event{{Kind: "input", Text: long}}}, `field \"text\"`},
		{"/api/reset", map[string]any{"part": "moon"}, `field \"part\"`},
		{"/api/form?run=no/slash", formBrief, `query \"run\"`},
	} {
		code, answer := c.post(tt.path, tt.body)
		if code != http.StatusBadRequest || !strings.Contains(answer, tt.want) || !strings.Contains(answer, `"code":400`) {
			t.Errorf("POST %s %.80v: %d %s, want 400 with %s", tt.path, tt.body, code, answer, tt.want)
		}
	}
	for _, body := range []string{"", "{", `{"item":1} {"item":2}`, `{"item":1}x`} {
		if code, answer := c.do("POST", "/api/list", "application/json", strings.NewReader(body)); code != http.StatusBadRequest {
			t.Errorf("body %q: %d %s", body, code, answer)
		}
	}
	for _, target := range []string{"/api/items?after=-1", "/api/items?after=61", "/api/items", "/api/state?run=", "/form?run=a%20b"} {
		if code, answer := c.get(target); code != http.StatusBadRequest {
			t.Errorf("GET %s: %d %s", target, code, answer)
		}
	}
	after := c.state()
	if a, b := fmt.Sprintf("%+v", before), fmt.Sprintf("%+v", after); a != b {
		t.Errorf("refused input changed the state:\n%s\n%s", a, b)
	}
}

func TestRequestsThatAreNotOurs(t *testing.T) {
	c := setup(t)
	if code, answer := c.post("/api/form", formBrief); code != 400 || !strings.Contains(answer, "no session") {
		t.Errorf("no session: %d %s", code, answer)
	}
	if code, answer := c.get("/api/state?run=never"); code != 404 || !strings.Contains(answer, "never") {
		t.Errorf("unknown session: %d %s", code, answer)
	}
	c.get("/")
	if code, answer := c.do("POST", "/api/form", "text/plain", strings.NewReader(`{}`)); code != 415 {
		t.Errorf("text/plain: %d %s", code, answer)
	}
	if code, _ := c.get("/api/form"); code != 405 {
		t.Errorf("GET /api/form: %d", code)
	}
	if code, _ := c.get("/nowhere"); code != 404 {
		t.Errorf("GET /nowhere: %d", code)
	}
	r := httptest.NewRequest(http.MethodPost, "/api/reset", strings.NewReader(`{"part":"all"}`))
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Sec-Fetch-Site", "cross-site")
	r.AddCookie(c.cookie)
	w := httptest.NewRecorder()
	c.handler.ServeHTTP(w, r)
	if w.Code != http.StatusForbidden {
		t.Errorf("from another site: %d %s", w.Code, w.Body)
	}
}

func TestBodyIsAtMostOneMebibyte(t *testing.T) {
	c := setup(t)
	c.get("/")
	pad := func(n int) io.Reader { return strings.NewReader(`{"item":1` + strings.Repeat(" ", n-10) + `}`) }
	c.get("/api/items?after=0")
	if code, answer := c.do("POST", "/api/list", "application/json", pad(maxBody)); code != 200 {
		t.Errorf("exactly %d bytes: %d %s", maxBody, code, answer)
	}
	if code, answer := c.do("POST", "/api/list", "application/json", pad(maxBody+1)); code != http.StatusRequestEntityTooLarge || !strings.Contains(answer, "over 1048576 bytes") {
		t.Errorf("one byte more: %d %s", code, answer)
	}
}

func TestSessionsAreApartAndBounded(t *testing.T) {
	c := setup(t)
	c.get("/?run=first")
	if c.cookie == nil || c.cookie.Value != "first" {
		t.Fatalf("?run= did not become the session: %v", c.cookie)
	}
	c.must("/api/form", formBrief)
	other := &client{t: t, handler: c.handler}
	other.get("/")
	if other.state().Form.Count != 0 || other.cookie.Value == "first" {
		t.Error("a second browser sees the first one's form")
	}
	now := time.Unix(0, 0)
	st := newStore(func() time.Time { now = now.Add(time.Second); return now })
	for i := range maxSessions {
		st.with(fmt.Sprint(i), func(*session) {})
	}
	st.with("0", func(*session) {}) // used again, so 1 is the oldest now
	st.with("new", func(*session) {})
	if len(st.sessions) != maxSessions {
		t.Errorf("%d sessions, want %d", len(st.sessions), maxSessions)
	}
	if _, ok := st.peek("0"); !ok {
		t.Error("a session in use was forgotten")
	}
	if _, ok := st.peek("1"); ok {
		t.Error("the least recently used session was kept")
	}
}

func TestRecordsAreBounded(t *testing.T) {
	t.Parallel()
	s, b := newEvents(), newBoard()
	for i := range maxEvents + 50 {
		s.add(ev("keydown", "keys", Event{Key: "a", Code: fmt.Sprint("Key", i)}))
	}
	if len(s.Log) != maxEvents || s.Dropped != 50 || s.Count != maxEvents+50 || len(s.Held) != maxHeld {
		t.Errorf("log %d, dropped %d, count %d, held %d", len(s.Log), s.Dropped, s.Count, len(s.Held))
	}
	for i := range maxMoves + 10 {
		if err := b.move(Move{Card: 11, To: columns[i%3]}); err != nil {
			t.Fatal(err)
		}
	}
	total := 0
	for _, ids := range b.Columns {
		total += len(ids)
	}
	if len(b.Moves) != maxMoves || b.Count != maxMoves+10 || total != len(cards) {
		t.Errorf("%d moves kept of %d, %d cards", len(b.Moves), b.Count, total)
	}
}

func TestEveryPageRendersAndLoadsNothingForeign(t *testing.T) {
	c := setup(t)
	for _, p := range []string{"/", "/form", "/list", "/board", "/events", "/windows", "/windows/note", "/report", "/static/style.css", "/static/common.js", "/static/icon.svg", "/files/manifest.csv"} {
		code, body := c.get(p)
		if code != 200 {
			t.Errorf("GET %s: %d", p, code)
		}
		rest := strings.ReplaceAll(body, "http://www.w3.org/2000/svg", "")
		if strings.Contains(rest, "http://") || strings.Contains(rest, "https://") || strings.Contains(body, "<no value>") {
			t.Errorf("GET %s refers to another host, or misses a value", p)
		}
	}
	code, answer := c.get("/api/sessions")
	if code != 200 || !strings.Contains(answer, "report: form missing, list missing, board missing, events missing") {
		t.Errorf("sessions: %d %s", code, answer)
	}
}
