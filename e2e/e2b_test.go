package e2e

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"berth/internal/events"
)

const e2bKey = "e2b_0123456789abcdef0123456789abcdef01234567"

// TestE2BThenTheBrowser: programs as they are shipped, on E2B (the stand-in that
// the official clients know) with the browser behind it. What needs a shell is
// made at E2B, what needs none overflows to the browser, and the key is
// neither in a log nor on the bus.
func TestE2BThenTheBrowser(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "e2") // short: the sandboxes' sockets are below it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	standin := filepath.Join(dir, "e2bstandin")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", standin, "../internal/providers/e2b/e2bstandin").CombinedOutput(); err != nil {
		t.Fatalf("build the stand-in: %v\n%s", err, out)
	}
	for _, sub := range []string{"s", "state"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	key := filepath.Join(dir, "key")
	if err := os.WriteFile(key, []byte(e2bKey+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cloud := start(t, standin, []string{"E2B_API_KEY=" + e2bKey}, "--state", filepath.Join(dir, "s"), "--max", "1")
	cloud.until(30*time.Second, true, "http://")
	url := strings.TrimSpace(cloud.output())

	f := provisioned(t, "e2b-01", "playwright-01")
	f.start(t, "scheduler")
	f.start(t, "worker", "E2B_API_KEY_FILE="+key, "E2B_API_URL="+url, "E2B_SANDBOX_URL="+url, "SANDBOX_FALLBACK=on",
		"BERTH_STATE_DIR="+filepath.Join(dir, "state"), "BERTH_PLAYWRIGHT_SPARES=0")
	t.Cleanup(func() { endBrowsers(t, filepath.Join(dir, "state")) })
	f.healthy(t, "e2b-01", "playwright-01")

	_, js := f.connect(t, "operator")
	_, service := f.connect(t, "service")
	pub := func(noun, id, data string) {
		t.Helper()
		verb := noun[strings.LastIndex(noun, ".")+1:]
		typ := events.TypeSandboxCreate
		switch verb {
		case "act":
			typ = events.CommandType(events.Act)
		case "kill":
			typ = events.TypeSandboxKill
		}
		body := fmt.Sprintf(`{"specversion":"1.0","id":%q,"source":"/e2e","type":%q,"data":%s}`, id, typ, data)
		if _, err := service.Publish(t.Context(), "request.default."+noun, []byte(body)); err != nil {
			t.Fatal(err)
		}
	}
	hear := func(subject string, want ...string) {
		t.Helper()
		await(t, js, "EVENTS", subject, 90*time.Second, func(data []byte) error {
			for _, w := range want {
				if !strings.Contains(string(data), w) {
					return fmt.Errorf("%s", data)
				}
			}
			return nil
		})
	}
	pub("sandbox.create", "c1", `{"vmId":"one","requires":["shell"]}`)
	hear("event.default.one.ready", `"serverId":"e2b-01"`, `"streamUrl":"https://6080-`)
	// The account has room for one, Berth believes in twenty: E2B says so, and what
	// may goes elsewhere.
	pub("sandbox.create", "c2", `{"vmId":"two","requires":["shell"]}`)
	pub("sandbox.create", "c3", `{"vmId":"three","requires":["browser"]}`)
	hear("event.default.three.ready", `"serverId":"playwright-01"`)
	pub("sandbox.act", "a1", `{"vmId":"one","actions":[{"type":"click","x":40,"y":50},{"type":"run","argv":["id","-un"]},{"type":"cursor"}],"observe":true}`)
	hear("event.default.one.finished", `"commandId":"a1"`, `"outcome":"ok"`, `"stdout":"user\n"`, `{"x":40,"y":50}`, `"width":1280`)
	pub("sandbox.kill", "k1", `{"vmId":"one"}`)
	hear("event.default.one.killed", `"vmId":"one"`)
	hear("event.default.two.ready", `"serverId":"e2b-01"`)

	for _, p := range f.processes {
		if strings.Contains(p.output(), e2bKey) {
			t.Errorf("%s logs the key", p.name)
		}
	}
	args := f.cmd.Args
	store := args[slices.Index(args, "-sd")+1]
	looked := 0
	err = filepath.WalkDir(store, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil // it goes while it is looked at
		}
		raw, err := os.ReadFile(path)
		if err == nil {
			looked++
		}
		if bytes.Contains(raw, []byte(e2bKey)) {
			t.Errorf("the key is on the bus: %s", path)
		}
		return nil
	})
	if err != nil || looked == 0 {
		t.Errorf("the bus was not looked through: %d files, %v", looked, err)
	}
	f.noViolations(t)
}
