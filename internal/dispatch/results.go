// Package dispatch is the sender's side of commands: it follows their results.
//
// A sender expects a result before it publishes the command, and awaits it
// afterwards. Followers keeps one consumer for each server of which somebody
// waits for a result; each sandbox's own would skip through all the others'
// results. Everything here is safe for concurrent use.
package dispatch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
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

// ErrNotTaken means that the command's deadline is well past and nobody has claimed it.
var ErrNotTaken = errors.New("no worker took the command in time")

// Followers are the results that this process follows, by server.
type Followers struct {
	js     jetstream.JetStream
	stream jetstream.Stream // RESULTS
	log    *slog.Logger

	mu sync.Mutex
	by map[string]*Results
}

// Follow makes Followers that follow nothing yet. stream is RESULTS.
func Follow(js jetstream.JetStream, stream jetstream.Stream, log *slog.Logger) *Followers {
	return &Followers{js: js, stream: stream, log: log, by: map[string]*Results{}}
}

// Results follows the results of one server's sandboxes, and hands them to
// whoever waits.
type Results struct {
	stream jetstream.Stream // RESULTS
	server string
	stop   func()
	begun  chan struct{} // closed once the results are followed

	mu      sync.Mutex
	users   int // guarded by Followers.mu
	waiting map[key][]*Pending
}

// key names a command; several may wait for its result.
type key struct{ vm, token string }

// Pending is a result that somebody expects.
type Pending struct {
	key
	started  time.Time // when the claim was seen; zero: not yet
	finished *events.Finished
	changed  chan struct{} // capacity 1
}

// Of returns the results of a server once they are followed. Where ctx or quit
// ends first there is none, and ctx's cause, nil for quit, is the error; else
// Release must be called.
func (f *Followers) Of(ctx context.Context, server string, quit <-chan struct{}) (*Results, error) {
	f.mu.Lock()
	res := f.by[server]
	if res == nil {
		res = f.begin(context.WithoutCancel(ctx), server)
		f.by[server] = res
	}
	res.users++
	f.mu.Unlock()
	var err error
	select {
	case <-res.begun:
		return res, nil
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-quit:
	}
	f.Release(res)
	return nil, err
}

// begin begins to follow a server's results, in a goroutine that stop ends:
// whoever holds mu waits for no network.
func (f *Followers) begin(ctx context.Context, server string) *Results {
	following, cancel := context.WithCancel(ctx)
	res := &Results{stream: f.stream, server: server, begun: make(chan struct{}), waiting: map[key][]*Pending{}}
	var done sync.WaitGroup
	done.Go(func() {
		for attempt := 0; ; attempt++ {
			config, err := bus.NewestOf(following, f.js, bus.Results, events.ResultSubject(server, "*", "*"))
			if err == nil {
				close(res.begun)
				res.follow(following, bus.Tail{JS: f.js, Stream: bus.Results, Config: config, Log: f.log})
				return
			}
			if bus.Pause(following, attempt) != nil {
				return
			}
			f.log.Warn("results not readable; trying again", "server", server, "err", err)
		}
	})
	res.stop = func() { cancel(); done.Wait() }
	return res
}

// Release ends one use of a server's results; the last one ends the follower.
func (f *Followers) Release(res *Results) {
	f.mu.Lock()
	res.users--
	last := res.users == 0
	if last {
		delete(f.by, res.server)
	}
	f.mu.Unlock()
	if last {
		res.stop()
	}
}

func (r *Results) follow(ctx context.Context, t bus.Tail) {
	t.Run(ctx, func(msg jetstream.Msg) bool {
		p, err := events.ParseResult(msg.Subject())
		if err != nil {
			return true
		}
		k := key{p.VM, p.Token}
		r.mu.Lock()
		wanted := len(r.waiting[k]) > 0
		r.mu.Unlock()
		if wanted && isClaim(msg.Data()) {
			r.claimed(k)
			return true
		}
		if wanted {
			if e, err := events.Decode(msg.Headers(), msg.Data()); err == nil {
				r.take(k, e)
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
func (r *Results) claimed(k key) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.waiting[k] {
		if p.started.IsZero() {
			p.started = time.Now()
		}
	}
}

// Expect must be called before the command is published; Forget after.
func (r *Results) Expect(vm, token string) *Pending {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := &Pending{key: key{vm, token}, changed: make(chan struct{}, 1)}
	r.waiting[p.key] = append(r.waiting[p.key], p)
	return p
}

// Forget ends what Expect began.
func (r *Results) Forget(p *Pending) {
	r.mu.Lock()
	defer r.mu.Unlock()
	left := slices.DeleteFunc(r.waiting[p.key], func(o *Pending) bool { return o == p })
	if r.waiting[p.key] = left; len(left) == 0 {
		delete(r.waiting, p.key)
	}
}

func (r *Results) take(k key, e events.Event) {
	switch e.Type() {
	case events.TypeStarted:
		r.claimed(k)
	case events.TypeFinished:
		var f events.Finished
		if events.DecodeTolerant(e, &f) != nil {
			return
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, p := range r.waiting[k] {
			p.finished = &f
			select {
			case p.changed <- struct{}{}:
			default:
			}
		}
	}
}

// Read returns the result as far as it is known: nil until it is there, and when
// its claim was seen, zero where it was not.
func (r *Results) Read(p *Pending) (*events.Finished, time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return p.finished, p.started
}

// Look reads the result from the stream itself. An error means unknown, not
// that there is none.
func (r *Results) Look(ctx context.Context, p *Pending) error {
	e, raw, err := bus.Last(ctx, r.stream, events.ResultSubject(r.server, p.vm, p.token))
	if err == nil && raw != nil {
		r.take(p.key, e)
	}
	return err
}

// Await returns the command's finished; ErrNotTaken where nobody claimed it
// until pastDeadline after its deadline; or ctx's cause. A command that was
// claimed and has not finished within bound and takeoverTime after that is
// answered as unknown; bound is that of computer.FinishTime.
func (r *Results) Await(ctx context.Context, p *Pending, deadline time.Time, bound time.Duration) (*events.Finished, error) {
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	for {
		if f, _ := r.Read(p); f != nil {
			return f, nil
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-p.changed:
			continue
		case <-ticker.C:
		}
		if err := r.Look(ctx, p); err != nil {
			continue
		}
		f, started := r.Read(p)
		switch {
		case f != nil:
			return f, nil
		case started.IsZero() && time.Since(deadline) > pastDeadline:
			return nil, ErrNotTaken
		case !started.IsZero() && time.Since(started) > bound+takeoverTime:
			return &events.Finished{Outcome: computer.Unknown, Timing: events.Timing{FinishedAt: time.Now().UTC()},
				Error: &computer.Fault{Code: events.CodeTimeout, Message: "the command was started and has not finished in time"}}, nil
		}
	}
}

// frameTime bounds the fetching of a picture.
const frameTime = 10 * time.Second

// Frame fetches a picture from FRAMES by its object name.
func Frame(ctx context.Context, js jetstream.JetStream, object string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, frameTime)
	defer cancel()
	store, err := js.ObjectStore(ctx, kv.BucketFrames)
	if err != nil {
		return nil, fmt.Errorf("frames: %w", err)
	}
	raw, err := store.GetBytes(ctx, object)
	if err != nil {
		return nil, fmt.Errorf("frame %s: %w", object, err)
	}
	return raw, nil
}
