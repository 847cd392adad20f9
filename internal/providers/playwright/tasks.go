package playwright

import (
	"sync"
	"time"
)

// tasks counts goroutines so that an end can wait for them. Unlike a
// sync.WaitGroup it may be asked for a new one at any time: after wait has
// begun it refuses, so that nothing starts late.
type tasks struct {
	mu      sync.Mutex
	running int
	closed  bool
	idle    chan struct{} // made by the first wait
}

// Go runs fn in a goroutine and reports true, or false when it is too late.
func (t *tasks) Go(fn func()) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return false
	}
	t.running++
	go func() {
		defer t.finish()
		fn()
	}()
	return true
}

func (t *tasks) finish() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.running--
	if t.closed && t.running == 0 {
		close(t.idle)
	}
}

// wait refuses new goroutines and returns when the last one has ended: true, or
// false when that takes longer than limit.
func (t *tasks) wait(limit time.Duration) bool {
	t.mu.Lock()
	if !t.closed {
		t.closed = true
		t.idle = make(chan struct{})
		if t.running == 0 {
			close(t.idle)
		}
	}
	t.mu.Unlock()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-t.idle:
		return true
	case <-timer.C:
		return false
	}
}
