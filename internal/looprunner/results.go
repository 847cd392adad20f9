package looprunner

import (
	"bytes"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
)

const (
	// pastDeadline is how long after a command's deadline it is taken for
	// certain that no worker will start it any more: clocks differ by less.
	pastDeadline = 15 * time.Second
	// takeoverTime is what a started command may take beyond the time in which a
	// worker that lives finishes it, before its outcome is called unknown: time for
	// a successor to take over, and for the bus.
	takeoverTime = time.Minute
	// lookEvery is how often a result that is waited for is read from the
	// stream, should the follower have been blind.
	lookEvery = 10 * time.Second
)

// errNotTaken: the command's deadline is well past and nobody has claimed it.
var errNotTaken = errors.New("no worker took the command in time")

// results follows the results of one server's sandboxes for all loops of this
// process that have one there, and hands them to whoever waits. One consumer
// per server costs less than one per loop: each of those would skip through
// all the others' results.
type results struct {
	stream jetstream.Stream // RESULTS
	server string
	stop   func()
	begun  chan struct{} // closed once the results are followed

	mu      sync.Mutex
	users   int                       // guarded by Runner.mu
	waiting map[string]*pendingResult // by token
}

type pendingResult struct {
	vm       string
	started  time.Time // when the claim was seen; zero: not yet
	finished *events.Finished
	changed  chan struct{} // capacity 1
}

// resultsOf returns the results of a server once they are followed. The error
// is ctx's cause, or errDrained. Where there is none release must be called.
func (r *Runner) resultsOf(ctx context.Context, server string) (*results, error) {
	r.mu.Lock()
	res := r.results[server]
	if res == nil {
		res = r.followResults(context.WithoutCancel(ctx), server)
		r.results[server] = res
	}
	res.users++
	r.mu.Unlock()
	var err error
	select {
	case <-res.begun:
		return res, nil
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-r.draining:
		err = errDrained
	}
	r.release(res)
	return nil, err
}

// followResults begins to follow a server's results, in a goroutine that stop
// ends: whoever holds Runner.mu waits for no network.
func (r *Runner) followResults(ctx context.Context, server string) *results {
	following, cancel := context.WithCancel(ctx)
	res := &results{stream: r.resultStream, server: server, begun: make(chan struct{}), waiting: map[string]*pendingResult{}}
	var done sync.WaitGroup
	done.Go(func() {
		for attempt := 0; ; attempt++ {
			config, err := newestOf(following, r.JS, bus.Results, events.ResultSubject(server, "*", "*"))
			if err == nil {
				close(res.begun)
				res.follow(following, tail{js: r.JS, stream: bus.Results, config: config, log: r.Log})
				return
			}
			if bus.Pause(following, attempt) != nil {
				return
			}
			r.Log.Warn("results not readable; trying again", "server", server, "err", err)
		}
	})
	res.stop = func() { cancel(); done.Wait() }
	return res
}

// release ends one use of a server's results; the last one ends the follower.
func (r *Runner) release(res *results) {
	r.mu.Lock()
	res.users--
	last := res.users == 0
	if last {
		delete(r.results, res.server)
	}
	r.mu.Unlock()
	if last {
		res.stop()
	}
}

func (r *results) follow(ctx context.Context, t tail) {
	t.run(ctx, func(msg jetstream.Msg) bool {
		p, err := events.ParseResult(msg.Subject())
		if err != nil {
			return true
		}
		r.mu.Lock()
		_, wanted := r.waiting[p.Token]
		r.mu.Unlock()
		if wanted && isClaim(msg.Data()) {
			r.claimed(p.Token)
			return true
		}
		if wanted {
			if e, err := events.Decode(msg.Headers(), msg.Data()); err == nil {
				r.take(p.Token, e)
			}
		}
		return true
	}, nil)
}

// isClaim tells a `started` from a `finished` without decoding it; where it
// cannot it says no.
func isClaim(data []byte) bool {
	return bytes.Contains(data, []byte(`"type":"`+events.TypeStarted+`"`)) && !bytes.Contains(data, []byte(events.TypeFinished))
}

// claimed notes that a command is being carried out.
func (r *results) claimed(token string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.waiting[token]; p != nil && p.started.IsZero() {
		p.started = time.Now()
	}
}

// expect must be called before the command is published; forget after.
func (r *results) expect(vm, token string) *pendingResult {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := &pendingResult{vm: vm, changed: make(chan struct{}, 1)}
	r.waiting[token] = p
	return p
}

func (r *results) forget(token string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.waiting, token)
}

func (r *results) take(token string, e events.Event) {
	switch e.Type() {
	case events.TypeStarted:
		r.claimed(token)
	case events.TypeFinished:
		var f events.Finished
		if events.DecodeTolerant(e, &f) != nil {
			return
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		p := r.waiting[token]
		if p == nil {
			return
		}
		p.finished = &f
		select {
		case p.changed <- struct{}{}:
		default:
		}
	}
}

func (r *results) read(p *pendingResult) (*events.Finished, time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return p.finished, p.started
}

// look reads the result from the stream itself. An error means unknown, not
// that there is none.
func (r *results) look(ctx context.Context, vm, token string) error {
	e, raw, err := bus.Last(ctx, r.stream, events.ResultSubject(r.server, vm, token))
	if err == nil && raw != nil {
		r.take(token, e)
	}
	return err
}

// await returns the command's finished; errNotTaken where nobody claimed it
// until pastDeadline after its deadline; or ctx's cause. A command that was
// claimed and has not finished within bound and takeoverTime after that is
// answered as unknown; bound is that of computer.FinishTime.
func (r *results) await(ctx context.Context, token string, p *pendingResult, deadline time.Time, bound time.Duration) (*events.Finished, error) {
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	for {
		if f, _ := r.read(p); f != nil {
			return f, nil
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-p.changed:
			continue
		case <-ticker.C:
		}
		if err := r.look(ctx, p.vm, token); err != nil {
			continue
		}
		f, started := r.read(p)
		switch {
		case f != nil:
			return f, nil
		case started.IsZero() && time.Since(deadline) > pastDeadline:
			return nil, errNotTaken
		case !started.IsZero() && time.Since(started) > bound+takeoverTime:
			return &events.Finished{Outcome: computer.Unknown, Timing: events.Timing{FinishedAt: time.Now().UTC()},
				Error: &computer.Fault{Code: events.CodeTimeout, Message: "the command was started and has not finished in time"}}, nil
		}
	}
}
