package demoapp

import (
	"crypto/rand"
	"regexp"
	"sync"
	"time"
)

// Bounds of what is kept in memory.
const (
	maxSessions = 64
	maxEvents   = 500 // of one session; older ones are dropped and counted
	maxMoves    = 200 // of one session's board
)

// Status of a part of the application.
type Status string

// The statuses. The lamp is grey for None and Begun, green for OK, red for
// Wrong.
const (
	None  Status = "none"  // nothing arrived yet
	Begun Status = "begun" // nothing wrong so far, not all done
	OK    Status = "ok"    // done, exactly as the page asks
	Wrong Status = "wrong" // something arrived that the page does not ask for
)

// Part is the judgement of one page. Title is its document.title, and Detail
// a sentence for people.
type Part struct {
	Status Status `json:"status"`
	Title  string `json:"title"`
	Detail string `json:"detail"`
}

// State is everything recorded in one session, as GET /api/state answers it.
type State struct {
	Run    string          `json:"run"`
	Parts  map[string]Part `json:"parts"` // form, list, board, events, overview, report
	Form   FormState       `json:"form"`
	List   ListState       `json:"list"`
	Board  BoardState      `json:"board"`
	Events EventsState     `json:"events"`
}

// session is guarded by its store's mutex.
type session struct {
	id     string
	used   time.Time
	form   FormState
	list   ListState
	board  BoardState
	events EventsState
}

func newSession(id string) *session {
	return &session{id: id, board: newBoard(), events: newEvents()}
}

// partNames in the order in which the overview and the report show them.
var partNames = []string{"form", "list", "board", "events"}

func (s *session) parts() map[string]Part {
	m := map[string]Part{
		"form":   s.form.judge(),
		"list":   s.list.judge(),
		"board":  s.board.judge(),
		"events": s.events.judge(),
	}
	m["report"] = report(m)
	m["overview"] = overview(m)
	return m
}

// state copies the session, so that it can be encoded without the lock.
func (s *session) state() State {
	return State{
		Run: s.id, Parts: s.parts(),
		Form: s.form.clone(), List: s.list, Board: s.board.clone(), Events: s.events.clone(),
	}
}

// reset forgets one part, or all of them.
func (s *session) reset(part string) bool {
	fresh := newSession(s.id)
	switch part {
	case "form":
		s.form = fresh.form
	case "list":
		s.list = fresh.list
	case "board":
		s.board = fresh.board
	case "events":
		s.events = fresh.events
	case "all":
		s.form, s.list, s.board, s.events = fresh.form, fresh.list, fresh.board, fresh.events
	default:
		return false
	}
	return true
}

// store holds the sessions. When it is full the least recently used one is
// forgotten.
type store struct {
	now func() time.Time

	mu       sync.Mutex
	sessions map[string]*session
}

func newStore(now func() time.Time) *store {
	return &store{now: now, sessions: map[string]*session{}}
}

var runID = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

func newRunID() string { return rand.Text() }

// with runs f on the session, which is made when it is not there. f must not
// keep s.
func (st *store) with(id string, f func(s *session)) {
	st.mu.Lock()
	defer st.mu.Unlock()
	s := st.sessions[id]
	if s == nil {
		st.evict()
		s = newSession(id)
		st.sessions[id] = s
	}
	s.used = st.now()
	f(s)
}

// evict makes room for one session.
func (st *store) evict() {
	for len(st.sessions) >= maxSessions {
		var oldest *session
		for _, s := range st.sessions {
			if oldest == nil || s.used.Before(oldest.used) {
				oldest = s
			}
		}
		delete(st.sessions, oldest.id)
	}
}

// peek copies a session's state; false when there is none of this name.
func (st *store) peek(id string) (State, bool) {
	st.mu.Lock()
	defer st.mu.Unlock()
	s := st.sessions[id]
	if s == nil {
		return State{}, false
	}
	return s.state(), true
}

// statuses lists the report title of every session.
func (st *store) statuses() map[string]string {
	st.mu.Lock()
	defer st.mu.Unlock()
	out := make(map[string]string, len(st.sessions))
	for id, s := range st.sessions {
		out[id] = s.parts()["report"].Title
	}
	return out
}
