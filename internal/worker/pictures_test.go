package worker

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
)

// shown is a provider that counts the pictures between it and the store, and
// takes a second for each.
type shown struct {
	providers.Provider
	mu      sync.Mutex
	now     int
	most    int
	padding int // bytes more than the picture has
}

func (p *shown) take(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.now += n
	p.most = max(p.most, p.now)
}

func (p *shown) Observe(ctx context.Context, vm string) (providers.View, error) {
	p.take(+1)
	defer p.take(-1)
	time.Sleep(time.Second)
	v, err := p.Provider.Observe(ctx, vm)
	v.PNG = append(v.PNG, make([]byte, p.padding)...)
	return v, err
}

func (p *shown) Execute(ctx context.Context, b providers.Batch) ([]providers.Result, error) {
	n := 0
	for _, a := range b.Actions {
		if a.Type == computer.Screenshot {
			n++
		}
	}
	p.take(n)
	defer p.take(-n)
	time.Sleep(time.Second)
	return p.Provider.Execute(ctx, b)
}

// Of all sandboxes of all servers no more pictures are in hand than there is
// room for, all come in the end, and what has no picture waits for none.
func TestPicturesHaveABound(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		p := &shown{Provider: w.fake(server1).Provider()}
		size := maxPictureBytes(computer.DefaultDisplay)
		w.startWith(Options{Name: "w1", PictureBytes: 4*size + 100, Servers: []Server{{ID: server1, Config: kv.ServerConfig{MaxContainers: 100},
			Open: func(context.Context) (providers.Provider, error) { return p, nil }}}})
		var all []sent
		for i := range 20 {
			w.ready(fmt.Sprint("vm", i))
		}
		start := time.Now()
		for i := range 20 {
			vm := fmt.Sprint("vm", i)
			switch i % 4 {
			case 0:
				shot := map[string]any{"type": "screenshot"}
				all = append(all, w.publish(vm, events.Act, "1", map[string]any{"observe": true, "actions": []any{shot, shot}}))
			default:
				all = append(all, w.publish(vm, events.Observe, "1", struct{}{}))
			}
		}
		blind := w.publish("vm1", events.Act, "2", act(click(1, 1))) // behind a picture of its own
		quick := w.publish("vm2", events.Kill, "2", struct{}{})
		if w.await(quick); time.Since(start) > 5*time.Second {
			t.Errorf("a kill took %s", time.Since(start))
		}
		for i, c := range append(all, blind) {
			if f := w.await(c); f.Outcome != computer.OK && c.vm != "vm2" {
				t.Errorf("command %d: %s", i, mustJSON(f))
			}
		}
		if p.most > 4 || p.most < 3 {
			t.Errorf("%d pictures at once, with room for 4", p.most)
		}
		// One that needs more than there is has it for itself, and waits no longer
		// than it may start.
		many := map[string]any{"actions": []any{}}
		for range 6 {
			many["actions"] = append(many["actions"].([]any), map[string]any{"type": "screenshot"})
		}
		if f := w.await(w.publish("vm3", events.Act, "3", many)); f.Outcome != computer.OK {
			t.Errorf("six pictures: %s", mustJSON(f))
		}
		first := w.publish("vm3", events.Act, "4", many)
		time.Sleep(100 * time.Millisecond)
		many["deadline"] = time.Now().Add(500 * time.Millisecond)
		late := w.publish("vm4", events.Act, "4", many)
		if f := w.await(late); f.Outcome != computer.Rejected || f.Error.Code != events.CodeDeadline || !strings.Contains(f.Error.Message, "pictures") {
			t.Errorf("past its start: %s", mustJSON(f))
		}
		w.await(first)
		// A picture that its display cannot have is not taken.
		p.padding = int(size)
		if f := w.await(w.publish("vm3", events.Observe, "5", struct{}{})); f.Outcome != computer.Failed || f.Error.Code != events.CodeNoPicture {
			t.Errorf("a picture that is too large: %s", mustJSON(f))
		}
	})
}
