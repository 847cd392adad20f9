package desktop

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"

	"berth/internal/computer"
)

// Limits of what a desktop remembers.
const (
	Remembered     = 1000     // commands
	rememberImages = 16 << 20 // bytes of pictures in them; older pictures are forgotten first
)

// Errors of a command that is refused; nothing of it runs.
var (
	ErrStale    = errors.New("a newer fence or lease epoch has been seen")
	ErrConflict = errors.New("the sandbox has another fence")
)

// Command names a batch and who sends it.
type Command struct {
	Key   string
	Fence uint64 // 0: whoever is the present holder
	Epoch uint64 // 0: not checked
}

// ledger remembers the last commands, so that one that is sent again is not
// run again, and refuses those of a sender who is out of date.
type ledger struct {
	mu     sync.Mutex
	fence  uint64
	epoch  uint64
	byKey  map[string]*entry
	order  []*entry // oldest first
	images int      // bytes
}

// entry is one command.
type entry struct {
	key     string
	cancel  context.CancelCauseFunc
	done    chan struct{} // closed when it has finished
	results []Result
	err     error // of the batch as a whole
}

func newLedger() *ledger { return &ledger{byKey: map[string]*entry{}} }

// claim sets whose commands are taken from now on. Those of a sandbox that this
// desktop was copied from are forgotten: they are none of the new holder's.
func (l *ledger) claim(fence, epoch uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fence, l.epoch = fence, max(l.epoch, epoch)
	l.byKey, l.order, l.images = map[string]*entry{}, nil, 0
}

// check refuses a sender who is out of date, and remembers the newest epoch.
func (l *ledger) check(c Command) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case c.Fence != 0 && c.Fence < l.fence:
		return fmt.Errorf("fence %d, the sandbox has %d: %w", c.Fence, l.fence, ErrStale)
	case c.Fence != 0 && c.Fence > l.fence:
		return fmt.Errorf("fence %d, the sandbox has %d: %w", c.Fence, l.fence, ErrConflict)
	case c.Epoch != 0 && c.Epoch < l.epoch:
		return fmt.Errorf("lease epoch %d, seen %d: %w", c.Epoch, l.epoch, ErrStale)
	}
	l.epoch = max(l.epoch, c.Epoch)
	return nil
}

// begin enters a command, which cancel ends. fresh is false where it was
// entered before.
func (l *ledger) begin(key string, cancel context.CancelCauseFunc) (r *entry, fresh bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r := l.byKey[key]; r != nil {
		return r, false
	}
	r = &entry{key: key, cancel: cancel, done: make(chan struct{})}
	l.byKey[key] = r
	l.order = append(l.order, r)
	for len(l.order) > Remembered && l.order[0].finished() {
		l.images -= l.order[0].imageBytes()
		delete(l.byKey, l.order[0].key)
		l.order = slices.Delete(l.order, 0, 1)
	}
	return r, true
}

func (r *entry) finished() bool {
	select {
	case <-r.done:
		return true
	default:
		return false
	}
}

func (r *entry) imageBytes() int {
	n := 0
	for _, res := range r.results {
		n += len(res.Image)
	}
	return n
}

// finish writes down what became of a command.
func (l *ledger) finish(r *entry, results []Result, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r.results, r.err = results, err
	close(r.done)
	l.images += r.imageBytes()
	for _, old := range l.order {
		if l.images <= rememberImages || old == r {
			break
		}
		if old.finished() && old.imageBytes() > 0 {
			l.images -= old.imageBytes()
			kept := slices.Clone(old.results) // an answer may be on its way with the others
			for i := range kept {
				if kept[i].Image != nil {
					kept[i].Image, kept[i].Value = nil, forgotten
				}
			}
			old.results = kept
		}
	}
}

// find returns a command, or nil.
func (l *ledger) find(key string) *entry {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.byKey[key]
}

// outcome returns what a finished record says.
func (l *ledger) outcome(r *entry) ([]Result, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return r.results, r.err
}

// perform runs a command once: sent again it gets the first one's results,
// waiting for them where it still runs. A sender that goes away leaves it
// running, since nobody can tell one that died from one that gave up: its
// successor asks what became of it. It ends early by word (see cancel), with the
// desktop, or after computer.ActTime.
func (a *Agent) perform(ctx context.Context, c Command, actions []computer.Action) ([]Result, error) {
	run, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	if !a.enter() {
		cancel(nil)
		return nil, ErrDown
	}
	defer a.running.Done()
	r, fresh := a.ledger.begin(c.Key, cancel)
	if fresh {
		a.running.Go(func() {
			defer cancel(nil)
			bound, stop := context.WithTimeoutCause(run, computer.ActTime(actions), errActTime)
			defer stop()
			results, err := a.session.Execute(bound, actions)
			a.ledger.finish(r, results, err)
		})
	} else {
		cancel(nil)
	}
	select {
	case <-r.done:
		return a.ledger.outcome(r)
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// Why a command ends early.
var (
	errActTime   = errors.New("the actions took longer than they may")
	errCancelled = errors.New("cancelled by its sender")
)

// ActionAnswer is a Result as it travels in the server's API: a picture is an
// Image.
type ActionAnswer struct {
	Outcome computer.Outcome `json:"outcome"`
	Value   json.RawMessage  `json:"value,omitempty"`
	Error   *computer.Fault  `json:"error,omitempty"`
}

// Image is the value of a screenshot or zoom. Data is missing where the server
// has forgotten the picture of a command of long ago.
type Image struct {
	MediaType string `json:"mediaType"`
	Data      []byte `json:"data,omitempty"`
}

// forgotten is what is left of a picture.
var forgotten = json.RawMessage(`{"mediaType":"image/png"}`)

func answers(results []Result) ([]ActionAnswer, error) {
	out := make([]ActionAnswer, len(results))
	for i, r := range results {
		out[i] = ActionAnswer{Outcome: r.Outcome, Value: r.Value, Error: r.Error}
		if r.Image == nil {
			continue
		}
		raw, err := json.Marshal(Image{MediaType: "image/png", Data: r.Image})
		if err != nil {
			return nil, fmt.Errorf("encode a picture: %w", err)
		}
		out[i].Value = raw
	}
	return out, nil
}
