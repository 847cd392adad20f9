package scheduler

import (
	"context"
	"sync"
)

// workqueue hands keys to workers: a key is never with two workers at once,
// and one that is added while it is being worked on comes again afterwards.
type workqueue struct {
	mu      sync.Mutex
	ready   []string
	waiting map[string]bool // in ready
	busy    map[string]bool // with a worker
	again   map[string]bool // added while busy
	signal  chan struct{}
}

func newWorkqueue() *workqueue {
	return &workqueue{waiting: map[string]bool{}, busy: map[string]bool{}, again: map[string]bool{}, signal: make(chan struct{}, 1)}
}

func (q *workqueue) add(key string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.busy[key]:
		q.again[key] = true
		return
	case q.waiting[key]:
		return
	}
	q.waiting[key] = true
	q.ready = append(q.ready, key)
	q.poke()
}

// poke wakes one worker; the caller holds mu.
func (q *workqueue) poke() {
	select {
	case q.signal <- struct{}{}:
	default:
	}
}

// take blocks for the next key; ok is false when ctx has ended. The worker
// must call done with the key.
func (q *workqueue) take(ctx context.Context) (key string, ok bool) {
	for {
		q.mu.Lock()
		if len(q.ready) > 0 {
			key, q.ready = q.ready[0], q.ready[1:]
			delete(q.waiting, key)
			q.busy[key] = true
			if len(q.ready) > 0 {
				q.poke()
			}
			q.mu.Unlock()
			return key, true
		}
		q.mu.Unlock()
		select {
		case <-ctx.Done():
			return "", false
		case <-q.signal:
		}
	}
}

func (q *workqueue) done(key string) {
	q.mu.Lock()
	delete(q.busy, key)
	again := q.again[key]
	delete(q.again, key)
	q.mu.Unlock()
	if again {
		q.add(key)
	}
}
