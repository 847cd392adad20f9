package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/looprunner"
)

// leader is the name of the active scheduler.
func (f *fleet) leader(t *testing.T) string {
	t.Helper()
	_, js := f.connect(t, "operator")
	leases, err := js.KeyValue(t.Context(), kv.BucketLeases)
	if err != nil {
		t.Fatal(err)
	}
	entry, err := leases.Get(t.Context(), "scheduler")
	if err != nil {
		t.Fatal(err)
	}
	var lease struct{ Holder string }
	if err := json.Unmarshal(entry.Value(), &lease); err != nil {
		t.Fatal(err)
	}
	return lease.Holder
}

// One of each pair of programs is killed while a loop runs; the other finishes
// what it held, in the same sandbox, and no act runs twice.
func TestTheOtherOfEachPairFinishes(t *testing.T) {
	t.Parallel()
	f := startFleet(t)
	script := map[string]any{"goal": "outlive a crash of everything", "sandbox": map[string]any{"vmId": "survivor"}}
	items := []any{
		map[string]any{"type": "open", "target": "{{demo}}/events"},
		map[string]any{"type": "click", "x": 160, "y": 254, "name": "one click"},
		map[string]any{"check": "title", "contains": "click=1 "},
	}
	for range 20 {
		items = append(items, map[string]any{"type": "wait", "seconds": 0.4, "unknown": "continue"})
	}
	script["script"] = append(items, map[string]any{"check": "title", "contains": "click=1 ", "name": "still one click"})
	raw, err := json.Marshal(script)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "long.json")
	if err := os.WriteFile(path, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	out := t.TempDir()
	r := start(t, program("berth"), nil, "run", "--server", f.url("operator"), "--script", path, "--out", out)
	r.until(30*time.Second, true, "   4  wait")
	_, js := f.connect(t, "operator")
	ctx := t.Context()

	// The active scheduler, just before a sandbox is asked for: the other places it.
	placements, err := js.KeyValue(ctx, kv.BucketPlacements)
	if err != nil {
		t.Fatal(err)
	}
	rec, _, err := kv.Get[kv.Placement](ctx, placements, kv.VMKey("survivor"))
	if err != nil {
		t.Fatal(err)
	}
	worker := f.servers(t)[rec.ServerID].Worker
	f.named(t, f.leader(t)).kill()
	killed := time.Now()
	const create = `{"specversion":"1.0","id":"after","source":"/e2e","type":"berth.sandbox.create.v1","data":{"vmId":"after","queueTimeoutSeconds":120}}`
	cli(t, f.url("service"), "--inbox-prefix", "_INBOX.service", "pub", "request.default.sandbox.create", create)

	// In the middle of an act the worker that serves the sandbox's server, and
	// the runner that owns the loop: others adopt the browser and the journal.
	loop := strings.TrimSuffix(strings.Fields(r.line("loop "))[0], ":")
	var runner string
	for e, err := range looprunner.Follow(ctx, js, "default", loop) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Name == events.LoopDecidedName && time.Since(e.Stored) < time.Second {
			f.named(t, worker).kill()
			runner = e.Head.Runner
			f.named(t, runner).kill()
			break
		}
	}
	for e, err := range looprunner.Follow(ctx, js, "default", loop) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Head.Runner != runner && e.Name == events.LoopActedName {
			t.Logf("the loop went on %s after its runner and worker were killed", e.Stored.Sub(killed).Round(time.Millisecond))
			break
		}
	}
	awaitKey(t, js, kv.BucketPlacements, kv.VMKey("after"), 60*time.Second, func(rec kv.Placement) error {
		if rec.Phase != kv.Ready {
			return fmt.Errorf("phase %s", rec.Phase)
		}
		t.Logf("a sandbox was ready %s after its scheduler was killed", rec.ReadyAt.Sub(killed).Round(time.Millisecond))
		return nil
	})

	if code := r.wait(90 * time.Second); code != 0 {
		t.Fatalf("the loop did not outlive the crashes: exit %d", code)
	}
	if other := f.servers(t)[rec.ServerID].Worker; other == worker {
		t.Errorf("server %s is still said to be served by the dead worker", rec.ServerID)
	}
	acts := map[string]int{}
	for e, err := range looprunner.Follow(ctx, js, "default", loop) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Name == events.LoopActedName {
			var v events.LoopActed
			if err := e.Decode(&v); err != nil {
				t.Fatal(err)
			}
			acts[v.Command.ID]++
		}
	}
	for id, n := range acts {
		if n > 1 {
			t.Errorf("act %s is %d times in the journal", id, n)
		}
	}
	mustBerth(t, "kill", "after", "--server", f.url("operator"))
	f.noViolations(t)
}
