package providertest

import (
	"context"
	"slices"
	"time"

	"berth/internal/computer"
)

// Call is one call at a Fake, as hooks and rules see it. Method is a Provider
// method's name, or "Action" for each action of a batch just before its effect.
type Call struct {
	Method string
	VM     string
	Fence  uint64
	Epoch  uint64
	Key    string
	Index  int             // of the action
	Action computer.Action // of the action
	Client int
}

// Injection is what befalls a call. Its parts happen in the order of the
// fields; the zero value is a call that nothing befalls.
type Injection struct {
	Latency time.Duration // passes before the effect
	Hang    bool          // waits until ctx ends, or the sandbox dies, or the client is closed
	Crash   bool          // the sandbox dies just before the effect
	Err     error         // the call fails instead of taking effect; of an action, a *computer.Fault makes it failed and any other error ends the batch with it
	// After the effect:
	CrashAfter  bool          // the sandbox dies just after the effect
	AnswerAfter time.Duration // passes between the effect and the answer
	AnswerErr   error         // the effect happened, and the caller gets this error all the same
}

type rule struct {
	method, vm string
	times      int // left; negative: without end
	inject     Injection
}

// OnCall sets a function that decides what befalls each call; nil removes it.
// It runs outside the fake's locks and may call the fake. Rules of Inject come
// first.
func (f *Fake) OnCall(hook func(Call) Injection) { f.set(func() { f.hook = hook }) }

// Inject lets an injection befall the next times calls (negative: all) of a
// method ("": every method, actions not among them) on a vm ("": every vm).
// The function returned takes it back.
func (f *Fake) Inject(method, vm string, times int, inject Injection) (remove func()) {
	r := &rule{method, vm, times, inject}
	f.set(func() { f.rules = append(f.rules, r) })
	return func() {
		f.set(func() { f.rules = slices.DeleteFunc(f.rules, func(o *rule) bool { return o == r }) })
	}
}

// befall finds what befalls a call.
func (f *Fake) befall(call Call) Injection {
	f.mu.Lock()
	for _, r := range f.rules {
		if r.times == 0 || r.vm != "" && r.vm != call.VM {
			continue
		}
		if r.method == call.Method || r.method == "" && call.Method != "Action" {
			r.times--
			f.mu.Unlock()
			return r.inject
		}
	}
	hook := f.hook
	f.mu.Unlock()
	if hook == nil {
		return Injection{}
	}
	return hook(call)
}

// pass waits for d. It returns early with the reason when ctx or one of the
// channels ends it; nil channels never do.
func pass(ctx context.Context, d time.Duration, ends ...end) error {
	if d <= 0 {
		return ended(ctx, ends)
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	return await(ctx, timer.C, ends)
}

// hang waits until something ends it, and returns that reason.
func hang(ctx context.Context, ends ...end) error { return await(ctx, nil, ends) }

// end is a channel whose closing ends a wait, and the error it then gives.
type end struct {
	ch  <-chan struct{}
	err func() error
}

// await takes up to three ends: the sandbox's, the client's, the server's.
func await(ctx context.Context, until <-chan time.Time, ends []end) error {
	var e [3]end
	copy(e[:], ends)
	select {
	case <-until:
		return ended(ctx, ends)
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-e[0].ch:
		return e[0].err()
	case <-e[1].ch:
		return e[1].err()
	case <-e[2].ch:
		return e[2].err()
	}
}

func ended(ctx context.Context, ends []end) error {
	for _, e := range ends {
		select {
		case <-e.ch:
			return e.err()
		default:
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}
