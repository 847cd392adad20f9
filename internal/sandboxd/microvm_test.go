package sandboxd

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"berth/internal/sandboxd/firecracker/firecrackertest"
	"berth/internal/sandboxd/process"
)

// microOptions are those of a server with the stand-in for firecracker.
func microOptions(t testing.TB) Options {
	t.Helper()
	opts := options(t)
	opts.Machine, opts.Firecracker = MachineFirecracker, firecrackertest.Install(t)
	return opts
}

// run runs a shell command in a sandbox and returns what it prints.
func (w *world) run(t testing.TB, path, key, command string) string {
	t.Helper()
	argv, err := json.Marshal(command)
	if err != nil {
		t.Fatal(err)
	}
	got := w.act(t, path, key, `{"type":"run","argv":["sh","-c",`+string(argv)+`]}`)
	if got[0].Outcome != "ok" {
		t.Fatalf("%s: %s, %+v", command, got[0].Outcome, got[0].Error)
	}
	var v struct{ Stdout string }
	if err := json.Unmarshal(got[0].Value, &v); err != nil {
		t.Fatal(err)
	}
	return v.Stdout
}

func (w *world) state(t testing.TB, path string) string {
	t.Helper()
	var d detail
	w.want(t, 200, "GET", path, nil).into(t, &d)
	return d.State
}

// TestMicroVM: actions reach the desktop through the machine, the vsock
// handshake and the agent; pause stops what runs inside and resume continues it,
// with the time and a new seed; a snapshot is a template of its tenant's only.
func TestMicroVM(t *testing.T) {
	t.Parallel()
	w := serve(t, microOptions(t))
	var c struct {
		Capabilities []string
		Attributes   map[string]string
	}
	w.want(t, 200, "GET", "/capacity", nil).into(t, &c)
	if got := strings.Join(c.Capabilities, " "); got != "browser clipboard desktop files pause shell snapshot stream windows" ||
		c.Attributes["machine"] != "firecracker" || c.Attributes["firecracker"] != firecrackertest.Version {
		t.Errorf("capacity: %s, %v", got, c.Attributes)
	}
	path := w.create(t, "vm-a")
	if got := w.act(t, path, "move", `{"type":"click","x":40,"y":50},{"type":"cursor"}`); string(got[1].Value) != `{"x":40,"y":50}` {
		t.Errorf("the pointer is at %s", got[1].Value)
	}
	if n := len(w.want(t, 200, "GET", path+"/computer/screenshot", nil).body); n < 100 {
		t.Errorf("a picture of %d bytes", n)
	}
	before := w.run(t, path, "woken", "cat "+firecrackertest.Woken)
	if at, seed, _ := strings.Cut(strings.TrimSpace(before), " "); seed != "64" {
		t.Errorf("made from the snapshot of a new desktop, it was woken at %s with %s bytes", at, seed)
	}

	// A process inside that counts stands still while the sandbox is paused.
	w.run(t, path, "count", `(while :; do echo x >>ticks; sleep 0.02; done) >/dev/null 2>&1 &`)
	eventually(t, func() string {
		if w.run(t, path, randomHex(4), "cat ticks 2>/dev/null | wc -l") < "2" {
			return "nothing counts"
		}
		return ""
	})
	w.want(t, 204, "POST", path+"/pause", nil)
	w.want(t, 204, "POST", path+"/pause", nil) // it is paused already
	if s := w.state(t, path); s != "paused" {
		t.Errorf("after the pause it is %s", s)
	}
	if pid := w.find("vm-a").record().Guest.PID; pid != 0 {
		t.Errorf("process %d still has its memory", pid)
	}
	for _, call := range [][2]string{{"GET", "/computer/screenshot"}, {"GET", "/computer/actions/move"}, {"DELETE", "/computer/actions/move"}} {
		if a := w.want(t, 409, call[0], path+call[1], nil); a.code() != "paused" {
			t.Errorf("%s of a paused sandbox: %s", call[1], a.body)
		}
	}
	if a := w.want(t, 409, "POST", path+"/computer/actions", `{"actions":[{"type":"cursor"}]}`, "Idempotency-Key", "x"); a.code() != "paused" {
		t.Errorf("an action in a paused sandbox: %s", a.body)
	}
	w.want(t, 204, "POST", path+"/resume", nil)
	w.want(t, 204, "POST", path+"/resume", nil)
	if s := w.state(t, path); s != "running" {
		t.Errorf("after the resume it is %s", s)
	}
	if after := w.run(t, path, "woken-2", "cat "+firecrackertest.Woken); after == before {
		t.Error("the resumed agent was not given the time")
	}
	counted := w.run(t, path, "ticks", "wc -l <ticks")
	eventually(t, func() string {
		if w.run(t, path, randomHex(4), "wc -l <ticks") == counted {
			return "what ran inside does not go on"
		}
		return ""
	})
	// The record of commands is inside, and came along.
	if got := w.act(t, path, "move", `{"type":"click","x":40,"y":50},{"type":"cursor"}`); len(got) != 2 {
		t.Errorf("the command of before the pause, again: %+v", got)
	}
	w.want(t, 204, "POST", path+"/pause", nil) // and again
	w.want(t, 204, "DELETE", path, nil)
	w.want(t, 404, "GET", path, nil)
}

// TestSnapshot: a snapshot makes sandboxes of the same tenant and display, with a
// record of commands of their own.
func TestSnapshot(t *testing.T) {
	t.Parallel()
	w := serve(t, microOptions(t))
	create := func(status int, id, tenant, template string, more ...any) answer {
		body := map[string]any{"sandboxID": id, "templateID": template, "metadata": map[string]string{"fence": "7", "tenant": tenant}}
		for i := 0; i < len(more); i += 2 {
			body[more[i].(string)] = more[i+1]
		}
		return w.want(t, status, "POST", "/sandboxes", body, "Idempotency-Key", id)
	}
	create(201, "vm-a", "acme", "", "display", map[string]int{"width": 1000, "height": 700})
	w.act(t, "/sandboxes/vm-a", "once", `{"type":"cursor"}`)
	var kept struct{ SnapshotID string }
	w.want(t, 201, "POST", "/sandboxes/vm-a/snapshots", nil).into(t, &kept)
	if got := w.state(t, "/sandboxes/vm-a"); got != "running" {
		t.Errorf("the sandbox that was kept is %s", got)
	}
	w.act(t, "/sandboxes/vm-a", "on", `{"type":"cursor"}`)
	var d detail
	create(201, "vm-b", "acme", kept.SnapshotID).into(t, &d)
	if d.Display.Width != 1000 || d.TemplateID != kept.SnapshotID {
		t.Errorf("made from a snapshot: %+v", d)
	}
	w.want(t, 404, "GET", "/sandboxes/vm-b/computer/actions/once", nil)
	create(400, "vm-c", "other", kept.SnapshotID)
	create(400, "vm-c", "acme", kept.SnapshotID, "display", map[string]int{"width": 800, "height": 600})
	create(400, "vm-c", "acme", "snapshot-0000")
	create(400, "vm-c", "acme", baseTemplate)
	create(400, "vm-c", "acme", "../guests")

	w.want(t, 204, "POST", "/sandboxes/vm-b/pause", nil)
	var second struct{ SnapshotID string }
	w.want(t, 201, "POST", "/sandboxes/vm-b/snapshots", nil).into(t, &second)
	if got := w.state(t, "/sandboxes/vm-b"); got != "paused" {
		t.Errorf("a paused sandbox that was kept is %s", got)
	}
	for _, name := range []string{kept.SnapshotID, second.SnapshotID} {
		w.want(t, 204, "DELETE", "/templates/"+name, nil)
		w.want(t, 404, "DELETE", "/templates/"+name, nil)
	}
	create(400, "vm-c", "acme", kept.SnapshotID)
	w.want(t, 404, "DELETE", "/templates/"+baseTemplate, nil)
	w.want(t, 204, "POST", "/sandboxes/vm-b/resume", nil)
	w.act(t, "/sandboxes/vm-b", "on", `{"type":"cursor"}`)
}

// TestMicroVMRestart: another server takes over microVMs that run and that are
// paused, and its snapshot of a new desktop; a crash of one is a loss.
func TestMicroVMRestart(t *testing.T) {
	t.Parallel()
	opts := microOptions(t)
	opts.StateDir = state(t)
	first, err := New(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	w := expose(t, first)
	running, paused := w.create(t, "vm-a"), w.create(t, "vm-b")
	w.act(t, running, "once", `{"type":"move","x":7,"y":8}`)
	w.run(t, paused, "mark", "echo here >mark")
	w.want(t, 204, "POST", paused+"/pause", nil)
	base, err := os.Stat(filepath.Join(opts.StateDir, "templates", baseTemplate, "state"))
	if err != nil {
		t.Fatal(err)
	}
	boot := first.boot
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}

	w = serve(t, opts)
	if w.boot != boot {
		t.Error("the boot id changed")
	}
	if again, err := os.Stat(filepath.Join(opts.StateDir, "templates", baseTemplate, "state")); err != nil || !os.SameFile(base, again) {
		t.Errorf("the snapshot of a new desktop was made again: %v", err)
	}
	if a, b := w.state(t, running), w.state(t, paused); a != "running" || b != "paused" {
		t.Fatalf("taken over: %s and %s", a, b)
	}
	if got := w.act(t, running, "once", `{"type":"move","x":7,"y":8}`); got[0].Outcome != "ok" {
		t.Errorf("the command of before: %+v", got)
	}
	if got := w.act(t, running, "cursor", `{"type":"cursor"}`); string(got[0].Value) != `{"x":7,"y":8}` {
		t.Errorf("the pointer is at %s", got[0].Value)
	}
	w.want(t, 204, "POST", paused+"/resume", nil)
	if got := w.run(t, paused, "mark-2", "cat mark"); got != "here\n" {
		t.Errorf("the paused one has %q", got)
	}

	// The VMM dies.
	rec := w.find("vm-a").record()
	if err := syscall.Kill(rec.Guest.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() string {
		if w.find("vm-a") != nil {
			return "a microVM whose process died is still there"
		}
		return ""
	})
	w.want(t, 404, "GET", running+"/computer/screenshot", nil)
	// The inside dies: it reboots, which ends the microVM.
	got, err := w.call(t.Context(), t, "POST", paused+"/computer/actions", `{"actions":[{"type":"run","argv":["sh","-c","kill -9 $PPID"]}]}`, "Idempotency-Key", "kill")
	if err != nil || got.status != 410 && got.code() != "silent" { // which it is where the reboot takes long
		t.Errorf("a command that ends its own agent: %d %s, %v", got.status, got.body, err)
	}
	eventually(t, func() string {
		if w.find("vm-b") != nil {
			return "a microVM whose agent died is still there"
		}
		return ""
	})
}

// TestPauseFails: what Firecracker refuses, or does not survive, leaves a sandbox
// that runs, stays paused, or is lost, and the answer says which.
func TestPauseFails(t *testing.T) {
	t.Parallel()
	opts := microOptions(t)
	w := serve(t, opts)
	path := w.create(t, "vm-a")
	firecrackertest.Fault(t, opts.Firecracker, "refuse PUT /snapshot/create")
	if a := w.want(t, 500, "POST", path+"/pause", nil); !strings.Contains(string(a.body), "a fault that the test asked for") {
		t.Errorf("a snapshot that is refused: %s", a.body)
	}
	if s := w.state(t, path); s != "running" {
		t.Errorf("it is %s", s)
	}
	w.act(t, path, "on", `{"type":"cursor"}`)
	firecrackertest.Fault(t, opts.Firecracker, "")
	w.want(t, 204, "POST", path+"/pause", nil)
	for _, fault := range []string{"refuse PUT /snapshot/load", "die PUT /snapshot/load"} {
		firecrackertest.Fault(t, opts.Firecracker, fault)
		w.want(t, 500, "POST", path+"/resume", nil)
		if s := w.state(t, path); s != "paused" {
			t.Errorf("%s: it is %s", fault, s)
		}
	}
	firecrackertest.Fault(t, opts.Firecracker, "")
	w.want(t, 204, "POST", path+"/resume", nil)
	w.act(t, path, "on-2", `{"type":"cursor"}`)
	firecrackertest.Fault(t, opts.Firecracker, "die PUT /snapshot/create")
	if a := w.want(t, 410, "POST", path+"/pause", nil); a.code() != "sandbox_lost" {
		t.Errorf("the VMM died in the pause: %s", a.body)
	}
	w.want(t, 404, "GET", path, nil)
	firecrackertest.Fault(t, opts.Firecracker, "die PUT /snapshot/load")
	if a := w.want(t, 500, "POST", "/sandboxes", `{"sandboxID":"vm-b"}`, "Idempotency-Key", "b"); !strings.Contains(string(a.body), "snapshot/load") {
		t.Errorf("a create whose VMM died: %s", a.body)
	}
	left, err := os.ReadDir(filepath.Join(w.store.dir, "guests"))
	if err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// underWay counts the calls to the agent.
func (b *box) underWay() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.users
}

// TestPauseWaits: a pause waits for the command under way, refuses others
// meanwhile, and a kill breaks in on it.
func TestPauseWaits(t *testing.T) {
	t.Parallel()
	opts := microOptions(t)
	w := serve(t, opts)
	path := w.create(t, "vm-a")
	done := make(chan answer, 2)
	post := func(to string, body any, headers ...string) {
		a, err := w.call(t.Context(), t, "POST", path+to, body, headers...)
		if err != nil {
			t.Errorf("%s: %v", to, err)
		}
		done <- a
	}
	go post("/computer/actions", `{"actions":[{"type":"wait","seconds":0.5}]}`, "Idempotency-Key", "wait")
	eventually(t, func() string {
		if w.want(t, 200, "GET", path, nil); w.find("vm-a").underWay() == 0 {
			return "the command does not run"
		}
		return ""
	})
	w.want(t, 204, "POST", path+"/pause", nil)
	if a := <-done; a.status != 200 || !strings.Contains(string(a.body), `"ok"`) {
		t.Errorf("the command under way: %d %s", a.status, a.body)
	}
	w.want(t, 204, "POST", path+"/resume", nil)

	firecrackertest.Fault(t, opts.Firecracker, "hang PUT /snapshot/create")
	go post("/pause", nil)
	eventually(t, func() string {
		a, err := w.call(t.Context(), t, "POST", path+"/computer/actions", `{"actions":[{"type":"cursor"}]}`, "Idempotency-Key", randomHex(4))
		if err != nil || a.status != 409 || a.code() != "busy" {
			return fmt.Sprintf("while it is being paused: %s, %v", a.body, err)
		}
		return ""
	})
	pid, started := w.find("vm-a").guest.(*microvm).vm.Process()
	begun := time.Now()
	w.want(t, 204, "DELETE", path, nil)
	if a := <-done; a.status != 410 {
		t.Errorf("a pause of a sandbox that is killed: %d %s", a.status, a.body)
	}
	if _, err := process.Find(pid, started); err == nil || time.Since(begun) > 15*time.Second {
		t.Errorf("the kill took %v and process %d: %v", time.Since(begun), pid, err)
	}
}

// TestMicroVMStart: what is wrong with an image is said at start.
func TestMicroVMStart(t *testing.T) {
	t.Parallel()
	opts := microOptions(t)
	firecrackertest.Fault(t, opts.Firecracker, "refuse PUT /actions")
	opts.StateDir = state(t)
	if s, err := New(t.Context(), opts); err == nil || !strings.Contains(err.Error(), "does not come up") || !strings.Contains(err.Error(), "the test asked for") {
		t.Errorf("%v, %v", s, err)
	}
	if left, err := os.ReadDir(filepath.Join(opts.StateDir, "templates")); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	// Without snapshots desktops boot.
	firecrackertest.Fault(t, opts.Firecracker, "refuse PUT /snapshot/create")
	w := serve(t, opts)
	path := w.create(t, "vm-a")
	if got := w.run(t, path, "woken", "ls "+firecrackertest.Woken+" 2>/dev/null; true"); got != "" {
		t.Errorf("a booted one was woken")
	}
}
