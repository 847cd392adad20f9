package scheduler_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"berth/internal/events"
	"berth/internal/registry"
)

// TestFallback: a fleet as SANDBOX_FALLBACK=on makes it prefers its own host,
// overflows to E2B, and takes the browser last; what the browser lacks waits
// rather than go there.
func TestFallback(t *testing.T) {
	servers, faults := registry.Config{ServerURL: "http://own.example", E2BKey: "key", Fallback: "on"}.Load()
	if len(faults) > 0 {
		t.Fatal(faults)
	}
	can := map[registry.Kind][]string{
		registry.SelfHosted: {"browser", "desktop", "shell"}, registry.E2B: {"browser", "desktop", "pause", "shell"}, registry.Playwright: {"browser", "clipboard", "pause", "snapshot"},
	}
	run(t, func(t *testing.T, b *bundle) {
		workers := map[registry.Kind]*fakeWorker{}
		for _, s := range slices.Backward(servers) { // the last choice registers first
			s.Config.MaxContainers, s.Config.Capabilities = 2, can[s.Kind]
			workers[s.Kind] = b.worker(s.ID, s.Config)
			defer workers[s.Kind].stop()
		}
		b.until(10*time.Second, "all healthy", func() bool { return len(b.events("event._.*.healthy")) == len(servers) })
		place := func(vm string, requires ...string) string {
			t.Helper()
			b.create("default", "r-"+vm, map[string]any{"vmId": vm, "requires": requires, "queueTimeoutSeconds": 600})
			return fmt.Sprint(b.untilEvent(10*time.Second, "default", vm, "ready")["serverId"])
		}
		var got []string
		for i := range 4 {
			got = append(got, place(fmt.Sprintf("shell-%d", i), "shell"))
		}
		if want := []string{"selfhosted-01", "selfhosted-01", "e2b-01", "e2b-01"}; !slices.Equal(got, want) {
			t.Errorf("sandboxes with a shell went to %v, want %v", got, want)
		}
		b.create("default", "r-shell-4", map[string]any{"vmId": "shell-4", "requires": []string{"shell"}, "queueTimeoutSeconds": 600})
		queued := fmt.Sprint(b.untilEvent(10*time.Second, "default", "shell-4", "queued")["explanation"])
		if !strings.Contains(queued, "2 full") || !strings.Contains(queued, "1 lacks") {
			t.Errorf("the fifth: %s", queued)
		}
		if at := place("any-0"); at != "playwright-01" {
			t.Errorf("one that needs no shell went to %s, want the last resort", at)
		}
		if at := place("clip-0", "clipboard"); at != "playwright-01" {
			t.Errorf("one that needs a clipboard went to %s", at)
		}
		// A slot at E2B is for the one that waits for a shell.
		b.request("default", "sandbox", events.Kill, events.TypeSandboxKill, "k1", map[string]any{"vmId": "shell-2"})
		if at := fmt.Sprint(b.untilEvent(70*time.Second, "default", "shell-4", "ready")["serverId"]); at != "e2b-01" {
			t.Errorf("the fifth went to %s", at)
		}
		workers[registry.Playwright].mu.Lock()
		defer workers[registry.Playwright].mu.Unlock()
		for vm := range workers[registry.Playwright].live {
			if strings.HasPrefix(vm, "shell") {
				t.Errorf("%s landed on the browser", vm)
			}
		}
	})
}
