package worker

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
)

// Times of a sandbox's life at its provider.
const (
	killTime = 30 * time.Second // for a provider to confirm a kill
	// The provider's own end of life lies behind Berth's clocks and is moved on
	// while the allocation stands.
	lifeMargin  = 10 * time.Minute
	lifeRenewal = 20 * time.Minute
)

// vmLock serialises what makes and ends a vm's sandbox at the provider, so
// that a kill meant for one life does not meet the next.
type vmLock struct {
	sync.Mutex
	users int
}

func (t *tenure) lock(vm string) (unlock func()) {
	l, leave := t.vmLock(vm)
	l.Lock()
	return leave
}

// tryLock returns nil where somebody has the lock.
func (t *tenure) tryLock(vm string) (unlock func()) {
	l, leave := t.vmLock(vm)
	if !l.TryLock() {
		t.mu.Lock()
		defer t.mu.Unlock()
		l.users--
		return nil
	}
	return leave
}

func (t *tenure) vmLock(vm string) (l *vmLock, unlock func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	l = t.locks[vm]
	if l == nil {
		l = &vmLock{}
		t.locks[vm] = l
	}
	l.users++
	return l, func() {
		l.Unlock()
		t.mu.Lock()
		defer t.mu.Unlock()
		if l.users--; l.users == 0 {
			delete(t.locks, vm)
		}
	}
}

// make creates a sandbox. Whatever goes wrong after the provider was called,
// the sandbox is killed before that is said.
func (t *tenure) make(ctx context.Context, c *command) verdict {
	defer t.lock(c.VM)()
	done, err := t.breaker.allow()
	if err != nil {
		return verdict{outcome: computer.Rejected, fault: fault(events.CodeUnavailable, "server %s: %v", t.server.ID, err)}
	}
	began := time.Now()
	bound, cancel := context.WithTimeoutCause(ctx, createTime, errTimedOut)
	s, err := t.provision(bound, c)
	cancel()
	ran := time.Since(began)
	done(err)
	t.logPanic(err)
	if err == nil {
		t.at(AfterCreate, c.VM)
		if cause := context.Cause(ctx); errors.Is(cause, errKilled) {
			err = cause
		}
	}
	if err != nil {
		v := t.undo(ctx, c, err)
		v.ran = ran
		return v
	}
	t.admitted(c, s)
	return verdict{outcome: computer.OK, ran: ran, sandbox: t.describe(ctx, s)}
}

// admitted takes a sandbox into service.
func (t *tenure) admitted(c *command, s providers.Sandbox) {
	b := boxOf(s)
	b.fence = c.fence
	t.adopt(c.VM, b)
	t.mu.Lock()
	delete(t.orphan, placement{c.VM, c.fence})
	t.mu.Unlock()
	ask(t.look)
}

// provision calls Create. A rate limit is waited out; a leftover of an earlier
// life of the vm, which has no allocation any more, is killed first.
func (t *tenure) provision(ctx context.Context, c *command) (providers.Sandbox, error) {
	d := c.create
	template, server := events.SplitTemplate(d.Template)
	if server != t.server.ID {
		template = d.Template
	}
	spec := providers.Spec{
		VM: c.VM, Fence: c.fence, Tenant: d.Tenant, Role: d.Role, Owner: d.Owner, Session: d.Session, Template: template,
		Display: d.Display, Env: d.Env, Metadata: d.Metadata, ServerID: t.server.ID, LeaseEpoch: t.lease.Epoch,
	}
	if d.TTLSeconds > 0 {
		spec.Timeout = events.Seconds(d.TTLSeconds) + lifeMargin
	}
	for cleared := false; ; {
		s, err := bounded(ctx, func(ctx context.Context) (providers.Sandbox, error) { return t.provider.Create(ctx, spec) })
		var limited *providers.RateLimitError
		switch {
		case errors.As(err, &limited) && sleep(ctx, max(limited.RetryAfter, 100*time.Millisecond)):
			continue
		case errors.Is(err, providers.ErrConflict) && !cleared:
			cleared = true
			old, gerr := bounded(ctx, func(ctx context.Context) (providers.Sandbox, error) { return t.provider.Get(ctx, c.VM) })
			if gerr == nil && old.Fence < c.fence {
				t.log.Warn("killing a leftover of an earlier placement", "vm", c.VM, "fence", old.Fence)
				t.forget(c.VM, old.Fence)
				if t.end(ctx, c.VM) == nil {
					continue
				}
			}
		}
		return s, err
	}
}

// undo ends a create that failed with err.
func (t *tenure) undo(ctx context.Context, c *command, err error) verdict {
	v := verdict{outcome: computer.Failed, fault: faultOf(err)}
	if (errors.Is(err, providers.ErrFull) || providers.NothingRan(err)) && ctx.Err() == nil {
		v.outcome = computer.Rejected // nothing was made
	}
	t.forget(c.VM, c.fence)
	if cause := context.Cause(ctx); errors.Is(cause, errAbandoned) || errors.Is(cause, kv.ErrLeaseLost) {
		return verdict{silent: true} // the successor looks what is there; it may be in use by then
	}
	// Also after a kill or at the end of the grace period, which is over then.
	patience := killTime
	if errors.Is(context.Cause(ctx), errStopping) {
		patience = lingerTime
	}
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	if kerr := t.end(clean, c.VM); kerr != nil && v.outcome == computer.Failed {
		v.outcome = computer.Unknown
		v.fault.Message = clip(v.fault.Message+"; and the server did not confirm that nothing is left: "+kerr.Error(), 4<<10)
	}
	return v
}

// end kills a vm's sandbox at the provider, again and again until it is
// confirmed, ctx ends or killTime has passed. The caller holds the vm's lock.
func (t *tenure) end(ctx context.Context, vm string) error {
	ctx, cancel := context.WithTimeout(ctx, killTime)
	defer cancel()
	var err error
	for attempt := 0; ; attempt++ {
		call, stop := context.WithTimeout(ctx, lookTime)
		_, err = watched(call, t, vm, func(ctx context.Context) (struct{}, error) { return struct{}{}, t.provider.Kill(ctx, vm) })
		stop()
		if err == nil || errors.Is(err, providers.ErrNotFound) {
			return nil
		}
		wait := 200 * time.Millisecond << min(attempt, 4)
		var limited *providers.RateLimitError
		if errors.As(err, &limited) {
			wait = max(wait, limited.RetryAfter)
		}
		if !sleep(ctx, wait) {
			return fmt.Errorf("kill vm %s: %w", vm, err)
		}
	}
}

// describe is what the fleet is told about a new sandbox.
func (t *tenure) describe(ctx context.Context, s providers.Sandbox) *events.SandboxInfo {
	info := &events.SandboxInfo{Display: s.Display, Capabilities: s.Capabilities}
	if slices.Contains(s.Capabilities, providers.Stream) {
		ctx, cancel := context.WithTimeout(ctx, lookTime)
		defer cancel()
		url, err := bounded(ctx, func(ctx context.Context) (string, error) { return t.provider.StreamURL(ctx, s.VM) })
		if err != nil {
			t.log.Warn("no live view", "vm", s.VM, "err", err)
		}
		info.StreamURL = url
	}
	return info
}
