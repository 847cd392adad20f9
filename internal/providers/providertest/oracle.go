package providertest

import (
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

//go:embed page.html
var pageHTML []byte

// event is one DOM event as the page saw it, or one of the page's own words:
// load, painted, scrolled, delivered, moved, answered, hangs, stored, kept.
type event struct {
	Seq         int     `json:"seq"`
	Type        string  `json:"type"`
	Target      string  `json:"target"` // element id
	Trusted     bool    `json:"trusted"`
	Doc         string  `json:"doc"` // the page's query: "", "?popup", "?next"
	X           float64 `json:"x"`   // client coordinates
	Y           float64 `json:"y"`
	Button      int     `json:"button"`
	Buttons     int     `json:"buttons"`
	Detail      int     `json:"detail"`
	Key         string  `json:"key"`
	Code        string  `json:"code"`
	Repeat      bool    `json:"repeat"`
	Mods        string  `json:"mods"` // "Control+Shift"
	DeltaX      float64 `json:"deltaX"`
	DeltaY      float64 `json:"deltaY"`
	DeltaMode   int     `json:"deltaMode"`
	Data        string  `json:"data"`
	Value       string  `json:"value"` // of the textarea
	InputType   string  `json:"inputType"`
	PointerType string  `json:"pointerType"`
	Width       int     `json:"width"`
	Height      int     `json:"height"`
	Ratio       float64 `json:"ratio"`
	Left        float64 `json:"left"`
	Top         float64 `json:"top"`
}

func (e event) at(x, y int) bool { return e.X == float64(x) && e.Y == float64(y) }

func (e event) String() string {
	s := e.Type
	for _, part := range []string{e.Target, e.Key, e.Mods, e.Data} {
		if part != "" {
			s += " " + part
		}
	}
	return fmt.Sprintf("%s (%g,%g)", s, e.X, e.Y)
}

// oracle serves pages and keeps what they report.
type oracle struct {
	server *httptest.Server
	base   string // the address that sandboxes use

	mu     sync.Mutex
	pages  map[string]*record
	serial int
}

// record is what one page has reported.
type record struct {
	url    string
	mu     sync.Mutex
	events []event
	came   chan struct{} // closed and renewed when events come
}

func newOracle(t *testing.T, reach func(string) string) *oracle {
	o := &oracle{pages: map[string]*record{}}
	o.server = httptest.NewServer(http.HandlerFunc(o.serve))
	o.base = o.server.URL
	if reach != nil {
		o.base = reach(o.server.URL)
	}
	t.Cleanup(func() {
		o.server.CloseClientConnections()
		o.server.Close()
	})
	return o
}

// page makes a new page; its address is its own.
func (o *oracle) page() *record {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.serial++
	id := fmt.Sprintf("p%d", o.serial)
	rec := &record{url: o.base + "/" + id + "/", came: make(chan struct{})}
	o.pages[id] = rec
	return rec
}

func (o *oracle) serve(w http.ResponseWriter, r *http.Request) {
	id, rest, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	switch {
	case id == "slow": // never answers
		<-r.Context().Done()
		return
	case rest == "download":
		w.Header().Set("Content-Disposition", `attachment; filename="cargo ñ.txt"`)
		fmt.Fprint(w, "the cargo")
		return
	}
	o.mu.Lock()
	rec := o.pages[id]
	o.mu.Unlock()
	if rec == nil {
		http.NotFound(w, r)
		return
	}
	if rest == "events" {
		var events []event
		if err := json.NewDecoder(r.Body).Decode(&events); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		rec.add(events)
		return
	}
	if r.URL.RawQuery == "cookie" {
		http.SetCookie(w, &http.Cookie{Name: "who", Value: id, Path: "/"})
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Cache-Control", "no-store")
	if _, err := w.Write(pageHTML); err != nil {
		return // the browser went away
	}
}

func (r *record) add(events []event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, events...)
	close(r.came)
	r.came = make(chan struct{})
}

// seen returns the events so far.
func (r *record) seen() []event {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]event(nil), r.events...)
}

// forget drops the events so far.
func (r *record) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = nil
}

// await returns the events as soon as enough is true of them, and fails the
// test after ten seconds.
func (r *record) await(t *testing.T, what string, enough func([]event) bool) []event {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	for {
		r.mu.Lock()
		events, came := append([]event(nil), r.events...), r.came
		r.mu.Unlock()
		if enough(events) {
			return events
		}
		select {
		case <-came:
		case <-ctx.Done():
			t.Fatalf("the page did not see %s; it saw:\n%s", what, list(events))
		}
	}
}

// quiet waits until the page has seen nothing for a while.
func (r *record) quiet(t *testing.T) {
	t.Helper()
	for {
		r.mu.Lock()
		came := r.came
		r.mu.Unlock()
		select {
		case <-came:
		case <-t.Context().Done():
			t.Fatal("the test has ended")
		case <-time.After(quietFor):
			return
		}
	}
}

// quietFor is several times what an event takes from the X server to the page
// and to this process on a machine with more work than processors.
const quietFor = 250 * time.Millisecond

// awaitType waits for an event of a type.
func (r *record) awaitType(t *testing.T, typ string) event {
	t.Helper()
	events := r.await(t, typ, func(es []event) bool { return len(only(es, typ)) > 0 })
	return only(events, typ)[0]
}

// only returns the events of the given types.
func only(events []event, types ...string) []event {
	var out []event
	for _, e := range events {
		for _, t := range types {
			if e.Type == t {
				out = append(out, e)
			}
		}
	}
	return out
}

func list(events []event) string {
	var b strings.Builder
	for _, e := range events {
		if e.Type != "mousemove" && e.Type != "dragover" {
			fmt.Fprintf(&b, "\t%s\n", e)
		}
	}
	return b.String()
}
