package scheduler

import (
	"context"
	"time"
)

// AsideAfter is asideAfter.
const AsideAfter = asideAfter

// SetTombstone shortens the day that an ended sandbox's record stays.
func SetTombstone(d time.Duration) (restore func()) {
	before := tombstone
	tombstone = d
	return func() { tombstone = before }
}

// RunTerm is active without a lease, as a scheduler is that wrongly believes
// to hold one.
func (s *Scheduler) RunTerm(ctx context.Context, epoch uint64) error {
	if err := s.open(ctx); err != nil {
		return err
	}
	return newTerm(s).run(ctx, func(ctx context.Context, lead func(context.Context, uint64) error) error { return lead(ctx, epoch) })
}
