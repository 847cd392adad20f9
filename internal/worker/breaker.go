package worker

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"

	"berth/internal/kv"
	"berth/internal/providers"
)

// The breaker opens after 3 failures in a row that are the server's fault, or
// where at least half of at least 10 calls in 30 s failed so; after 15 s one
// call decides whether it closes.
const (
	breakerRow     = 3
	breakerCalls   = 10
	breakerWindow  = 30 * time.Second
	breakerOpenFor = 15 * time.Second
)

// breaker judges a server by how calls at its provider fare. Creates it holds
// up; all else is done whatever it says, and reported.
//
// Answers count when they come, not when their call began: gobreaker drops what
// is older than its window, and calls that hang end later than that. And a long
// act must not be what a half-open breaker waits for. So a call that is only
// reported, or that a closed breaker lets through, takes both of gobreaker's
// steps at its end, unless the state has changed since its begin: a late answer
// of an older generation changes nothing (sony/gobreaker does the same for the
// calls that it knows of from their begin).
//
// A sandbox that hangs (a page in an endless loop, a desktop out of memory) lets
// every call at it time out, and that is not the server's fault. So time-outs
// count once per sandbox, until it answers again: it takes several sandboxes, or
// creates, to open the breaker by silence.
type breaker struct {
	steps      *gobreaker.TwoStepCircuitBreaker[struct{}]
	generation atomic.Uint64 // changes with the state

	mu   sync.Mutex      // a report is one step
	hung map[string]bool // sandboxes whose last answer was none
}

// errHung: a sandbox that had not answered before has not again.
var errHung = errors.New("the sandbox still hangs")

// newBreaker calls changed, which must not block, when the state changes.
func newBreaker(server string, changed func()) *breaker {
	b := &breaker{hung: map[string]bool{}}
	b.steps = gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		Name: server, MaxRequests: 1, Interval: breakerWindow, BucketPeriod: breakerWindow / 10, Timeout: breakerOpenFor,
		ReadyToTrip: func(c gobreaker.Counts) bool {
			return c.ConsecutiveFailures >= breakerRow || c.Requests >= breakerCalls && 2*c.TotalFailures >= c.Requests
		},
		OnStateChange: func(string, gobreaker.State, gobreaker.State) {
			b.generation.Add(1)
			changed()
		},
		IsSuccessful: func(err error) bool { return !serverFault(err) },
		// An answer that is nobody's merit or fault says nothing.
		IsExcluded: func(err error) bool {
			var limited *providers.RateLimitError
			return errors.As(err, &limited) || errors.Is(err, errHung) || errors.Is(err, context.Canceled) || errors.Is(err, errKilled) || errors.Is(err, errCancelled) ||
				errors.Is(err, errStopping) || errors.Is(err, errAbandoned) || errors.Is(err, kv.ErrLeaseLost)
		},
	})
	return b
}

// serverFault also counts the time-outs that the worker sets.
func serverFault(err error) bool { return providers.ServerFault(err) || timedOut(err) }

func timedOut(err error) bool {
	return errors.Is(err, providers.ErrTimeout) || errors.Is(err, errTimedOut) || errors.Is(err, context.DeadlineExceeded)
}

// String is the state: closed, half-open or open.
func (b *breaker) String() string { return b.steps.State().String() }

// begin is called before a call at a sandbox, which nothing holds up, and done
// once with its answer.
func (b *breaker) begin(vm string) (done func(error)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	report := b.later()
	return func(err error) { report(b.hangs(vm, err)) }
}

// hangs replaces a sandbox's second time-out in a row, and any further one.
func (b *breaker) hangs(vm string, err error) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case !timedOut(err) && (err == nil || providers.NothingRan(err) || errors.Is(err, providers.ErrLost)):
		delete(b.hung, vm)
	case timedOut(err) && !errors.Is(err, providers.ErrUnavailable):
		if b.hung[vm] {
			return errHung
		}
		b.hung[vm] = true
	}
	return err
}

// forget is told of a sandbox that is no more.
func (b *breaker) forget(vm string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.hung, vm)
}

// allow is called before a call that an open breaker refuses, and a half-open
// one while it tries another; done once with its answer.
func (b *breaker) allow() (done func(error), err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.steps.State() == gobreaker.StateClosed {
		return b.later(), nil
	}
	report, err := b.steps.Allow()
	if err != nil {
		return nil, err
	}
	return func(err error) {
		b.mu.Lock()
		defer b.mu.Unlock()
		report(err)
	}, nil
}

// later reports a call at its end. The caller holds b.mu.
func (b *breaker) later() func(error) {
	b.steps.State() // an open breaker whose time is up becomes half-open only when it is looked at
	began := b.generation.Load()
	return func(err error) {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.steps.State(); b.generation.Load() != began {
			return
		}
		if report, refused := b.steps.Allow(); refused == nil {
			report(err)
		}
	}
}
