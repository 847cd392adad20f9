package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/kv"
)

// Times of the balance between workers.
const (
	helloEvery   = 2 * time.Second        // ± 10 %, between two announcements; one is due at once when something changes
	helloTime    = 2 * time.Second        // for one
	helloSeldom  = 30 * time.Second       // between two that fail, at most
	listenTime   = 250 * time.Millisecond // before a worker takes its first server, for peers to answer
	settleTime   = 5 * time.Second        // before a worker asks for its first
	askTime      = 20 * time.Second       // that an asker waits for the other to begin
	giftTime     = 5 * time.Second        // for which a server that was given up is kept for whom it is for
	handOverTime = 10 * time.Second       // for what runs on a server that is to be handed over; then it stays
	minHold      = 15 * time.Second       // before a server is handed over
	minRest      = 30 * time.Second       // of what went wrong: doubled each time, up to maxRest
	maxRest      = 16 * time.Minute
	surplusTime  = time.Second            // that a free server is left to peers that have fewer
	surplusUnit  = 250 * time.Millisecond // and for each server more than theirs
	surplusMax   = 2500 * time.Millisecond
	failedMax    = surplusMax + time.Second // that it is left to peers by one that could not serve it
)

// presence is LEASES `worker.<name>`: what a worker tells its peers. It decides
// nothing that has to be safe; leases and claims do.
type presence struct {
	Worker string   `json:"worker"`
	Serves []string `json:"serves"`          // the servers of its registry
	Holds  []string `json:"holds"`           // those whose lease it has
	Asks   string   `json:"asks,omitempty"`  // the worker that is to hand over one of its servers
	Gives  *gift    `json:"gives,omitempty"` // the server that it hands over
}

// gift is a server on its way from one worker to another.
type gift struct {
	Server string `json:"server"`
	To     string `json:"to"`
}

// peer is another worker, by its last announcement.
type peer struct {
	presence
	heard time.Time
}

// hold is a server whose lease this worker has.
type hold struct {
	server string
	since  time.Time
	give   chan struct{} // asks the tenure to hand over
	load   func() int    // commands that it works on
}

// rest is how long something that went wrong is left alone.
type rest struct {
	until time.Time
	n     int
}

// roster is what a worker knows of its peers and holds itself, and what follows
// from that: how long it leaves a free server to others, whom it asks for one,
// and which it hands over.
//
// A worker that has at least two servers fewer than a peer asks that peer for
// one, and the peer hands over one that both can serve. So every hand-over
// evens out, none is worth taking back, and nothing moves between workers whose
// numbers differ by one. An asker asks one peer at a time and a giver gives one
// server at a time, so no news that is late can move more than one too many.
type roster struct {
	me     string
	serves []string
	life   time.Duration // of a peer that is not heard any more

	mu        sync.Mutex
	began     time.Time
	peers     map[string]*peer
	held      map[string]*hold
	turns     []*ticket // those that wait for their turn, in order of arrival
	asks      string
	askedAt   time.Time
	gives     *gift
	released  time.Time       // zero: what is given is still held
	rests     map[string]rest // by peer or server
	greet     bool            // a newcomer is to hear of this worker
	refreshed chan struct{}   // closed and renewed when something has changed
	news      chan struct{}   // something is to be told or decided
}

func newRoster(me string, serves []string, life time.Duration) *roster {
	return &roster{
		me: me, serves: slices.Sorted(slices.Values(serves)), life: life, began: time.Now(),
		peers: map[string]*peer{}, held: map[string]*hold{}, rests: map[string]rest{},
		refreshed: make(chan struct{}), news: make(chan struct{}, 1),
	}
}

// change wakes who waits for a turn, and whoever tells and decides. The caller
// holds r.mu.
func (r *roster) change() {
	close(r.refreshed)
	r.refreshed = make(chan struct{})
	ask(r.news)
}

// hear takes a peer's announcement in.
func (r *roster) hear(p presence) {
	if p.Worker == "" || p.Worker == r.me {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	now, before := time.Now(), r.peers[p.Worker]
	r.peers[p.Worker] = &peer{p, now}
	if before == nil || now.Sub(before.heard) >= r.life {
		r.greet = true
		r.change()
	} else if !slices.Equal(before.Holds, p.Holds) || before.Asks != p.Asks || !same(before.Gives, p.Gives) {
		r.change()
	}
}

func same(a, b *gift) bool { return a == b || a != nil && b != nil && *a == *b }

// leave forgets a peer that has said goodbye.
func (r *roster) leave(key string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.peers, func(name string, _ *peer) bool { return presenceKey(name) == key })
	r.change()
}

// take notes a lease that is held from now on.
func (r *roster) take(h *hold) {
	r.mu.Lock()
	defer r.mu.Unlock()
	h.since = time.Now()
	r.askedAt = h.since // not in vain
	r.held[h.server] = h
	r.change()
}

// drop notes that a lease is held no more. handed: as a gift.
func (r *roster) drop(server string, handed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.held, server)
	if r.gives != nil && r.gives.Server == server {
		if r.released = time.Now(); !handed {
			r.gives = nil
		}
	}
	r.change()
}

// keep notes that a server could not be handed over: it was too busy.
func (r *roster) keep(server string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.gives != nil && r.gives.Server == server {
		r.gives = nil
		r.tire(server, time.Now())
		r.change()
	}
}

// fail notes that a server could not be served although its lease was held: for
// want of a key or a way to it, perhaps. Its lease is left to peers first, and
// none is told that this worker could serve it, until it has rested.
func (r *roster) fail(server string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.tire(server, time.Now())
	r.change()
}

// tire lets something rest. The caller holds r.mu.
func (r *roster) tire(what string, now time.Time) {
	t := r.rests[what]
	t.until = now.Add(min(minRest<<min(t.n, 10), maxRest))
	t.n++
	r.rests[what] = t
}

func (r *roster) resting(what string, now time.Time) bool { return now.Before(r.rests[what].until) }

// living lists the peers that were heard of late, by name. The caller holds
// r.mu.
func (r *roster) living(now time.Time) []*peer {
	var out []*peer
	for _, name := range slices.Sorted(maps.Keys(r.peers)) {
		if p := r.peers[name]; now.Sub(p.heard) < r.life {
			out = append(out, p)
		}
	}
	return out
}

// patience is how long this worker leaves a free server to its peers before it
// takes it: not at all where it has no more than any peer that could, and has
// no more of those that wait for their turn before it. forOther: it is somebody
// else's gift, and not to be taken.
func (r *roster) patience(server string, t *ticket, now time.Time) (d time.Duration, forOther bool) {
	living := r.living(now)
	to := func(g *gift) bool {
		return g != nil && g.Server == server && g.To != r.me && slices.ContainsFunc(living, func(p *peer) bool { return p.Worker == g.To })
	}
	if to(r.gives) {
		return 0, true
	}
	least := -1
	for _, p := range living {
		if to(p.Gives) {
			return 0, true
		}
		if p.Gives != nil && p.Gives.Server == server && p.Gives.To == r.me {
			return 0, false
		}
		if n := len(p.Holds); slices.Contains(p.Serves, server) && (least < 0 || n < least) {
			least = n
		}
	}
	if least >= 0 && r.resting(server, now) {
		return failedMax, false
	}
	surplus := len(r.held) + slices.Index(r.turns, t) - least
	if least < 0 || surplus <= 0 {
		return 0, false
	}
	return min(surplusTime+time.Duration(surplus)*surplusUnit, surplusMax), false
}

// turn waits until this worker may take a free server. done ends the turn.
func (r *roster) turn(ctx context.Context, server string) (done func()) {
	mine := new(ticket)
	r.mu.Lock()
	r.turns = append(r.turns, mine)
	r.mu.Unlock()
	done = func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if i := slices.Index(r.turns, mine); i >= 0 {
			r.turns = slices.Delete(r.turns, i, i+1)
			r.change()
		}
	}
	start, jitter := time.Now(), rand.N(surplusUnit/10)
	for {
		now := time.Now()
		r.mu.Lock()
		d, forOther := r.patience(server, mine, now)
		refreshed := r.refreshed
		r.mu.Unlock()
		left := d + jitter - now.Sub(start)
		if forOther {
			left = surplusUnit // until the gift has arrived, or its giver or taker is gone
		} else if left <= 0 {
			return done
		}
		timer := time.NewTimer(left)
		select {
		case <-ctx.Done():
			timer.Stop()
			return done
		case <-refreshed:
			timer.Stop()
		case <-timer.C:
		}
	}
}

// decide begins and ends what this worker asks for and gives. It returns the
// hold that is to be handed over now, if any.
func (r *roster) decide(now time.Time, log *slog.Logger) *hold {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.prune(now)
	living := r.living(now)
	r.endGift(living, now, log)
	r.endAsk(living, now, log)
	if r.asks == "" && now.Sub(r.began) >= settleTime {
		if name := r.richest(living, now); name != "" {
			r.asks, r.askedAt = name, now
			r.change()
		}
	}
	if r.gives != nil {
		return nil
	}
	h, to := r.surplus(living, now)
	if h == nil {
		return nil
	}
	log.Info("server is handed over for balance", "server", h.server, "to", to)
	r.gives, r.released = &gift{h.server, to}, time.Time{}
	r.change()
	return h
}

// prune forgets peers that are long gone, and what has rested long enough to
// begin anew. The caller holds r.mu.
func (r *roster) prune(now time.Time) {
	maps.DeleteFunc(r.peers, func(_ string, p *peer) bool { return now.Sub(p.heard) > 10*r.life })
	maps.DeleteFunc(r.rests, func(_ string, t rest) bool { return now.Sub(t.until) > maxRest })
}

// endGift ends a gift that has arrived, or has not in good time. The caller
// holds r.mu.
func (r *roster) endGift(living []*peer, now time.Time, log *slog.Logger) {
	g := r.gives
	if g == nil || r.released.IsZero() {
		return
	}
	arrived := slices.ContainsFunc(living, func(p *peer) bool { return p.Worker == g.To && slices.Contains(p.Holds, g.Server) })
	switch {
	case arrived:
		delete(r.rests, g.To)
		delete(r.rests, g.Server)
	case now.Sub(r.released) < giftTime:
		return
	default:
		log.Warn("a server that was handed over was not taken", "server", g.Server, "to", g.To)
		r.tire(g.To, now)
		r.tire(g.Server, now)
	}
	r.gives = nil
	r.change()
}

// endAsk ends a question that is answered, idle or in vain. The caller holds
// r.mu.
func (r *roster) endAsk(living []*peer, now time.Time, log *slog.Logger) {
	if r.asks == "" {
		return
	}
	for _, p := range living {
		switch {
		case p.Worker != r.asks || len(p.Holds) < len(r.held)+2 && (p.Gives == nil || p.Gives.To != r.me):
			continue
		case now.Sub(r.askedAt) < askTime || p.Gives != nil && p.Gives.To == r.me:
			return
		}
		log.Info("asked for a server in vain", "peer", p.Worker)
		r.tire(p.Worker, now)
	}
	r.asks = ""
	r.change()
}

// richest is the peer to ask for a server: the one that has the most, and at
// least two more than this worker. The caller holds r.mu.
func (r *roster) richest(living []*peer, now time.Time) string {
	name, most := "", len(r.held)+len(r.turns)+1
	for _, p := range living {
		if len(p.Holds) <= most || r.resting(p.Worker, now) {
			continue
		}
		if slices.ContainsFunc(p.Holds, func(s string) bool { return slices.Contains(r.serves, s) && !r.resting(s, now) }) {
			name, most = p.Worker, len(p.Holds)
		}
	}
	return name
}

// surplus is what to hand over, and to whom: of the peers that ask, to the one
// that has the fewest; of what both can serve, what is least busy. The caller
// holds r.mu.
func (r *roster) surplus(living []*peer, now time.Time) (*hold, string) {
	asking := slices.DeleteFunc(living, func(p *peer) bool {
		return p.Asks != r.me || len(p.Holds)+2 > len(r.held) || r.resting(p.Worker, now)
	})
	slices.SortStableFunc(asking, func(a, b *peer) int { return len(a.Holds) - len(b.Holds) })
	for _, p := range asking {
		var best *hold
		least := 0
		for _, s := range slices.Sorted(maps.Keys(r.held)) {
			h := r.held[s]
			if !slices.Contains(p.Serves, s) || now.Sub(h.since) < minHold || r.resting(s, now) {
				continue
			}
			if n := h.load(); best == nil || n < least {
				best, least = h, n
			}
		}
		if best != nil {
			return best, p.Worker
		}
	}
	return nil, ""
}

// announcement is what there is to tell; greet, that somebody new is to hear it.
func (r *roster) announcement() (p presence, greet bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	greet, r.greet = r.greet, false
	now := time.Now()
	serves := slices.DeleteFunc(slices.Clone(r.serves), func(s string) bool { return r.held[s] == nil && r.resting(s, now) })
	return presence{Worker: r.me, Serves: serves, Holds: slices.Sorted(maps.Keys(r.held)), Asks: r.asks, Gives: r.gives}, greet
}

// Keys and subjects of what workers tell each other.
func presenceKey(worker string) string {
	return "worker." + strings.Map(func(r rune) rune {
		if r == '-' || r == '_' || '0' <= r && r <= '9' || 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' {
			return r
		}
		return '-'
	}, worker)
}

func leaseKey(server string) string { return "server." + server }

const leaseSubjects = "$KV." + kv.BucketLeases + "."

// listen hears peers' announcements, and releases of this worker's servers.
// A core subscription does: it costs the bus nothing, a worker may make no
// consumer, and what is missed is heard two seconds later or found by polling.
func (w *Worker) listen() (stop func(), err error) {
	nc := w.opts.JS.Conn()
	var subs []*nats.Subscription
	stop = func() {
		for _, s := range subs {
			_ = s.Unsubscribe() // fails where the connection is closed
		}
	}
	gone := func(m *nats.Msg) bool {
		op := m.Header.Get("KV-Operation")
		return op == "DEL" || op == "PURGE"
	}
	s, err := nc.Subscribe(leaseSubjects+"worker.*", func(m *nats.Msg) {
		if gone(m) {
			w.roster.leave(strings.TrimPrefix(m.Subject, leaseSubjects))
			return
		}
		var p presence
		err := json.Unmarshal(m.Data, &p)
		if err == nil && m.Subject != leaseSubjects+presenceKey(p.Worker) {
			err = fmt.Errorf("it is of worker %.80q", p.Worker)
		}
		if err != nil {
			w.opts.Log.Warn("a worker's announcement is not taken", "subject", m.Subject, "err", err)
			return
		}
		w.roster.hear(p)
	})
	if err != nil {
		return stop, fmt.Errorf("hear peers: %w", err)
	}
	subs = append(subs, s)
	for server, wake := range w.wakes {
		s, err := nc.Subscribe(leaseSubjects+leaseKey(server), func(m *nats.Msg) {
			if gone(m) {
				ask(wake)
			}
		})
		if err != nil {
			stop()
			return stop, fmt.Errorf("hear releases of %s: %w", server, err)
		}
		subs = append(subs, s)
	}
	return stop, nil
}

// meet announces this worker to its peers and decides what is asked for and
// given, until ctx ends; then it says goodbye, and peers leave this worker no
// more servers.
func (w *Worker) meet(ctx, alive context.Context, leases jetstream.KeyValue) {
	defer w.goodbye(alive, leases)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(alive, cancel)()
	failures := 0
	var told presence
	var due time.Time
	for ctx.Err() == nil {
		now := time.Now()
		if h := w.roster.decide(now, w.opts.Log); h != nil {
			ask(h.give)
		}
		p, greet := w.roster.announcement()
		changed := greet || !slices.Equal(told.Holds, p.Holds) || told.Asks != p.Asks || !same(told.Gives, p.Gives)
		if !now.Before(due) || changed && failures == 0 {
			if err := w.hello(ctx, leases, p); err == nil {
				told, failures = p, 0
			} else if failures++; failures == 1 && ctx.Err() == nil {
				w.opts.Log.Warn("peers do not hear of this worker", "err", err)
			}
			due = now.Add(min((helloEvery*9/10+rand.N(helloEvery/5))<<min(failures, 8), helloSeldom))
		}
		timer := time.NewTimer(time.Until(due))
		select {
		case <-ctx.Done():
		case <-w.roster.news:
		case <-timer.C:
		}
		timer.Stop()
	}
}

func (w *Worker) hello(ctx context.Context, leases jetstream.KeyValue, p presence) error {
	raw, err := json.Marshal(p)
	if err != nil {
		return fmt.Errorf("encode announcement: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, helloTime)
	defer cancel()
	_, err = leases.Put(ctx, presenceKey(p.Worker), raw)
	return err
}

func (w *Worker) goodbye(ctx context.Context, leases jetstream.KeyValue) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if err := leases.Delete(ctx, presenceKey(w.opts.Name)); err != nil && ctx.Err() == nil {
		w.opts.Log.Debug("no goodbye", "err", err)
	}
}
