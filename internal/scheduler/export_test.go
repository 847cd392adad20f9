package scheduler

import "context"

// RunTerm is active without a lease, as a scheduler is that wrongly believes
// to hold one.
func (s *Scheduler) RunTerm(ctx context.Context, epoch uint64) error {
	if err := s.open(ctx); err != nil {
		return err
	}
	return newTerm(s, epoch).run(ctx)
}
