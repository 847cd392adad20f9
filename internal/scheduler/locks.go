package scheduler

import (
	"context"
	"sync"
	"sync/atomic"
)

// keyedMutex is one lock per key. It is made of channels, since a holder may
// wait for time and a mutex would then stand still in a synctest bubble.
type keyedMutex struct {
	locks sync.Map         // key → *keyLock
	again func(key string) // called after an unlock for which try was refused; may be nil
}

type keyLock struct {
	held    chan struct{}
	refused atomic.Bool
}

func (k *keyedMutex) entry(key string) *keyLock {
	v, there := k.locks.Load(key)
	if !there {
		v, _ = k.locks.LoadOrStore(key, &keyLock{held: make(chan struct{}, 1)})
	}
	return v.(*keyLock)
}

// lock waits for the key.
func (k *keyedMutex) lock(ctx context.Context, key string) (unlock func(), err error) {
	l := k.entry(key)
	select {
	case l.held <- struct{}{}:
		return func() { k.unlock(key, l) }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// try locks the key if nobody holds it; else again is called for the key once
// its holder has let go.
func (k *keyedMutex) try(key string) (unlock func(), ok bool) {
	l := k.entry(key)
	for range 2 {
		select {
		case l.held <- struct{}{}:
			l.refused.Store(false)
			return func() { k.unlock(key, l) }, true
		default:
			l.refused.Store(true) // and look once more, lest the holder has just gone
		}
	}
	return nil, false
}

func (k *keyedMutex) unlock(key string, l *keyLock) {
	<-l.held
	if l.refused.Swap(false) && k.again != nil {
		k.again(key)
	}
}

// forget drops a key that nobody will lock again.
func (k *keyedMutex) forget(key string) { k.locks.Delete(key) }
