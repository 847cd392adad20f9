package worker

import (
	"context"
	"errors"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
)

// killMark is the last kill of a vm.
type killMark struct {
	seq    uint64 // in COMMANDS
	fence  uint64
	at     time.Time
	failed bool // the provider did not confirm it: the sandbox may live
}

// ended reports whether a kill has ended, or is about to end, this life of the vm.
func (k killMark) ended(fence uint64) bool { return k.fence >= fence && !k.at.IsZero() && !k.failed }

// overtake handles one delivered message of the server's second consumer. Kills
// of one vm run one at a time, and so do cancels; they wait for nothing else.
func (t *tenure) overtake(ctx context.Context, it *item) {
	if isCancel(it.msg.Subject()) {
		t.handle(ctx, it, t.admitCancel, t.callOff)
		return
	}
	t.handle(ctx, it, t.admitKill, t.destroy)
}

// admitKill decides whether there is something to kill: an allocation here, a
// placement here that has not ended, or a sandbox that nobody knows. A fence
// that the kill names must be that of the vm's present life.
func (t *tenure) admitKill(ctx context.Context, c *command) (*computer.Fault, error) {
	if time.Now().After(c.deadline) {
		return fault(events.CodeDeadline, "not started by %s", c.deadline.UTC().Format(time.RFC3339Nano)), nil
	}
	present, refused, err := t.present(ctx, c.VM)
	if err != nil || refused != nil {
		return refused, err
	}
	c.fence = present
	if f := c.data.Fence; f != nil && *f != present {
		return fault(events.CodeFenceStale, "fence %d; vm %s has %d", *f, c.VM, present), nil
	}
	return nil, nil
}

// present finds the fence of a vm's present life on this server.
func (t *tenure) present(ctx context.Context, vm string) (uint64, *computer.Fault, error) {
	s, err := t.record(ctx)
	if err != nil {
		return 0, nil, err
	}
	if a, ok := s.Allocs[vm]; ok {
		return a.Fence, nil, nil
	}
	p, err := t.where(ctx, vm)
	if err != nil {
		return 0, nil, err
	}
	refused := t.elsewhere(vm, p)
	if refused == nil {
		return p.Fence, nil, nil
	}
	look, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	sb, err := bounded(look, func(ctx context.Context) (providers.Sandbox, error) { return t.provider.Get(ctx, vm) })
	switch {
	case err == nil:
		return sb.Fence, nil, nil
	case ctx.Err() != nil:
		return 0, nil, context.Cause(ctx)
	}
	return 0, refused, nil
}

// destroy ends a sandbox: what waits for it is rejected, what runs in it is
// cancelled, and then the provider kills it.
func (t *tenure) destroy(ctx context.Context, c *command) verdict {
	if !t.lease.Trusted() || ctx.Err() != nil {
		return verdict{silent: true} // the successor kills
	}
	began := time.Now()
	t.mu.Lock()
	t.killed[c.VM] = killMark{seq: max(t.killed[c.VM].seq, c.seq), fence: c.fence, at: began}
	t.mu.Unlock()
	t.forget(c.VM, c.fence)
	t.commands.cancelBefore(c.VM, c.seq, errKilled)
	defer t.lock(c.VM)()
	err := t.end(ctx, c.VM)
	v := verdict{outcome: computer.OK, began: began, ran: time.Since(began)}
	if err == nil {
		t.forget(c.VM, c.fence)
		t.at(AfterKill, c.VM)
	}
	ask(t.look)
	switch cause := context.Cause(ctx); {
	case err == nil:
	case errors.Is(cause, kv.ErrLeaseLost) || errors.Is(cause, errStopping):
		v.silent = true // the successor kills
	default:
		v.outcome, v.fault = computer.Failed, faultOf(err)
		t.mu.Lock()
		k := t.killed[c.VM]
		k.failed = true
		t.killed[c.VM] = k
		t.mu.Unlock()
	}
	return v
}
