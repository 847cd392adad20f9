package providers

import (
	"errors"
	"fmt"
	"time"
)

// Errors that callers branch on. Providers wrap them with what happened.
var (
	// ErrNotFound: there is no such sandbox (or batch) at the server.
	ErrNotFound = errors.New("not found")
	// ErrConflict: the vm exists under another fence.
	ErrConflict = errors.New("conflict")
	// ErrPaused: the sandbox is paused, which is an ErrConflict too. Nothing ran.
	ErrPaused = fmt.Errorf("the sandbox is paused; resume it first: %w", ErrConflict)
	// ErrFenceStale: the server has seen a newer fence or epoch. Nothing ran.
	ErrFenceStale = errors.New("fence is stale")
	// ErrUnsupported: the backend cannot do this. Nothing ran.
	ErrUnsupported = errors.New("unsupported")
	// ErrInvalid: the caller's mistake. Nothing ran.
	ErrInvalid = errors.New("invalid")
	// ErrFull: the server has no room. Nothing was made.
	ErrFull = errors.New("server is full")
	// ErrUnavailable: the server's fault; it feeds the breaker.
	ErrUnavailable = errors.New("server unavailable")
	// ErrLost: the sandbox died.
	ErrLost = errors.New("sandbox lost")
	// ErrTimeout: the server or sandbox gave no answer in time.
	ErrTimeout = errors.New("timed out")
)

// RateLimitError is a 429: wait as told. It is no failure of the server.
type RateLimitError struct{ RetryAfter time.Duration }

func (e *RateLimitError) Error() string {
	return fmt.Sprintf("rate limited; retry after %s", e.RetryAfter)
}

// ServerFault reports whether err counts against the server's breaker: its
// unavailability and its time-outs do; callers' mistakes, rate limits and
// cancellations do not.
func ServerFault(err error) bool {
	return errors.Is(err, ErrUnavailable) || errors.Is(err, ErrTimeout)
}

// NothingRan reports whether an Execute that failed with err is known to have
// run none of its actions.
func NothingRan(err error) bool {
	for _, e := range []error{ErrNotFound, ErrConflict, ErrFenceStale, ErrUnsupported, ErrInvalid} {
		if errors.Is(err, e) {
			return true
		}
	}
	var limited *RateLimitError
	return errors.As(err, &limited)
}
