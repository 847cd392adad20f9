package kv

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// LeaseBucketTTL is the TTL of the LEASES bucket: the longest that a dead
// holder's lease is in the way of anybody.
const LeaseBucketTTL = 12 * time.Second

// Terms of a lease.
type Terms struct {
	Key    string        // in LEASES
	Holder string        // unique name of this process
	TTL    time.Duration // how long one renewal holds; at most LeaseBucketTTL

	// Turn, where set, is called whenever the lease is found free. It may wait,
	// so that contenders for many leases share them; done is called after the
	// attempt to take it.
	Turn func(ctx context.Context) (done func())

	// Wake, where set, makes Acquire look at once: for a contender that hears of
	// a release. What it hears can be ahead of what a read shows, so it looks
	// again a few times soon after.
	Wake <-chan struct{}
}

// wakeLooks is how often Acquire looks in quick succession after a Wake: 5 ms,
// then 10, 20 … after the look before, 315 ms in all.
const wakeLooks = 6

// leaseValue is what the bucket holds. Epoch is the revision that began this
// hold; 0 in the very first write, whose revision it is.
type leaseValue struct {
	Holder string `json:"holder"`
	Epoch  uint64 `json:"epoch"`
}

// ErrLeaseLost is the cause of a lost lease's context.
var ErrLeaseLost = errors.New("lease lost")

// Lease is a hold on a key that nobody else has.
//
// A holder trusts it for TTL less a margin of a quarter from the moment it
// sent its last successful renewal. Another takes it over only when the key is
// gone (released, or expired after the bucket's TTL) or has not changed for a
// whole TTL of the other's own monotonic clock, and then by compare-and-set.
// So two processes never both trust it as long as their clocks run at rates
// within a quarter of each other.
type Lease struct {
	Epoch uint64 // grows with every change of holder; what fences are made of

	bucket jetstream.KeyValue
	terms  Terms
	log    *slog.Logger
	cancel context.CancelCauseFunc
	done   chan struct{}
	rev    uint64 // owned by renew; read by Release after done
	until  atomic.Pointer[time.Time]
}

// Trusted reports whether the hold can be trusted at this moment. A process
// that was frozen sees false at once, while the context's end takes until its
// timers have run.
func (l *Lease) Trusted() bool { return time.Now().Before(*l.until.Load()) }

// trust notes a renewal that was sent at the given moment.
func (l *Lease) trust(sent time.Time) {
	end := sent.Add(l.terms.TTL - l.terms.margin())
	l.until.Store(&end)
}

// Acquire blocks until the lease is held or ctx ends. The returned context is
// a child of ctx and is cancelled, with ErrLeaseLost as its cause, as soon as
// the hold can no longer be trusted. Release must be called.
func Acquire(ctx context.Context, b jetstream.KeyValue, terms Terms, log *slog.Logger) (*Lease, context.Context, error) {
	var seen uint64
	var since time.Time
	poll := min(terms.TTL/8, 700*time.Millisecond)
	for woken := 0; ; {
		l, current, err := tryAcquire(ctx, b, terms, seen, since)
		if err == nil && l != nil {
			l.log = log
			held, cancel := context.WithCancelCause(ctx)
			l.cancel, l.done = cancel, make(chan struct{})
			go l.renew(held, l.until.Load().Add(l.terms.margin()-l.terms.TTL))
			return l, held, nil
		}
		if ctx.Err() != nil {
			return nil, nil, context.Cause(ctx)
		}
		if err != nil {
			log.Warn("lease not readable; trying again", "lease", terms.Key, "err", err)
		} else if current != seen {
			seen, since = current, time.Now()
		}
		wait := poll/2 + rand.N(poll/2+1)
		if woken > 0 {
			wait = min(wait, 5*time.Millisecond<<(wakeLooks-woken))
			woken--
		}
		select {
		case <-ctx.Done():
			return nil, nil, context.Cause(ctx)
		case <-terms.Wake:
			woken = wakeLooks
		case <-time.After(wait):
		}
	}
}

// tryAcquire takes the lease if it is free, or unchanged at revision seen since
// a whole TTL. Otherwise it returns the key's present revision.
func tryAcquire(ctx context.Context, b jetstream.KeyValue, terms Terms, seen uint64, since time.Time) (*Lease, uint64, error) {
	_, rev, err := Get[leaseValue](ctx, b, terms.Key)
	if errors.Is(err, ErrNotFound) {
		rev, err = 0, nil
	}
	if err != nil {
		return nil, seen, err
	}
	if rev != 0 && (rev != seen || time.Since(since) < terms.TTL) {
		return nil, rev, nil
	}
	if terms.Turn != nil {
		done := terms.Turn(ctx)
		defer done()
	}
	sent := time.Now()
	next, err := Put(ctx, b, terms.Key, leaseValue{Holder: terms.Holder}, rev)
	if errors.Is(err, ErrConflict) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	l := &Lease{Epoch: next, bucket: b, terms: terms, rev: next}
	l.trust(sent)
	return l, next, nil
}

// margin is what a holder leaves unused at the end of its lease.
func (t Terms) margin() time.Duration { return t.TTL / 4 }

// renew writes the lease every TTL/4 until ctx ends or the hold is lost.
func (l *Lease) renew(ctx context.Context, trustedFrom time.Time) {
	defer close(l.done)
	interval := l.terms.TTL / 4
	for {
		end := trustedFrom.Add(l.terms.TTL - l.terms.margin())
		wait := min(interval, time.Until(end))
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		if time.Since(trustedFrom) >= l.terms.TTL-l.terms.margin() {
			l.lose(fmt.Errorf("%w: %s not renewed in %s", ErrLeaseLost, l.terms.Key, l.terms.TTL-l.terms.margin()))
			return
		}
		sent := time.Now()
		call, stop := context.WithDeadline(ctx, end)
		rev, err := Put(call, l.bucket, l.terms.Key, leaseValue{Holder: l.terms.Holder, Epoch: l.Epoch}, l.rev)
		stop()
		if err != nil && ctx.Err() == nil {
			err = l.reconcile(ctx, end, err)
		}
		switch {
		case err == nil:
			l.rev, trustedFrom = rev, sent
			l.trust(sent)
			interval = l.terms.TTL / 4
		case errors.Is(err, ErrConflict):
			l.lose(fmt.Errorf("%w: %s was taken over", ErrLeaseLost, l.terms.Key))
			return
		case ctx.Err() != nil:
			return
		default:
			interval = l.terms.TTL / 16
			l.log.Warn("lease not renewed; trying again", "lease", l.terms.Key, "err", err)
		}
	}
}

// reconcile reads the key after a renewal that failed. If the value is still
// ours, its revision is the one to replace next; the hold is not extended,
// since nobody can say when the write that made it was sent. ErrConflict means
// that somebody else has the lease, or that it is gone.
func (l *Lease) reconcile(ctx context.Context, end time.Time, cause error) error {
	ctx, stop := context.WithDeadline(ctx, end)
	defer stop()
	v, rev, err := Get[leaseValue](ctx, l.bucket, l.terms.Key)
	switch {
	case errors.Is(err, ErrNotFound):
		return ErrConflict
	case err == nil && v.Holder != l.terms.Holder:
		return ErrConflict
	case err == nil:
		l.rev = rev
	}
	return fmt.Errorf("not confirmed: %s", cause) //nolint:errorlint // a conflict with our own write is none any more: it must not be taken for one
}

func (l *Lease) lose(err error) {
	l.log.Error("lease lost", "lease", l.terms.Key, "err", err)
	l.cancel(err)
}

// Release gives the lease up at once, so that a successor need not wait. It is
// to be called exactly once, after everything that relied on the hold has
// stopped.
func (l *Lease) Release(ctx context.Context) error {
	l.cancel(context.Canceled)
	<-l.done
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err := l.bucket.Delete(ctx, l.terms.Key, jetstream.LastRevision(l.rev))
	if err != nil && !isWrongSequence(err) {
		return fmt.Errorf("release lease %s: %w", l.terms.Key, err)
	}
	return nil
}
