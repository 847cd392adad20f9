package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"berth/internal/events"
)

const twoServers = `SANDBOX_SERVERS_JSON=[
	{"id":"playwright-01","provider":"playwright","maxContainers":4,"priority":5},
	{"id":"playwright-02","provider":"playwright","maxContainers":4}]`

// fleet is every program twice, each process under its user's grants.
type fleet struct {
	*natsServer
	processes []*process
}

func startFleet(t *testing.T) *fleet {
	t.Helper()
	state := t.TempDir()
	t.Cleanup(func() { endBrowsers(t, state) })
	f := provisioned(t, "playwright-01", "playwright-02")
	f.startPairs(t, twoServers, "BERTH_STATE_DIR="+state, "BERTH_PLAYWRIGHT_SPARES=1")
	f.healthy(t, "playwright-01", "playwright-02")
	return f
}

// provisioned is a NATS server with all that the programs need.
func provisioned(t *testing.T, servers ...string) *fleet {
	t.Helper()
	f := &fleet{natsServer: startNATS(t, [2]string(servers))}
	ids := strings.Join(servers, ",")
	out := mustBerth(t, "provision", "--server", f.url("operator"), "--servers", ids)
	for _, want := range []string{"made stream REQUESTS", "made stream OBJ_FRAMES", "made consumer scheduler of RESULTS", "made consumer " + servers[1] + "-kill of COMMANDS"} {
		if !strings.Contains(out, want) {
			t.Fatalf("provision did not say %q:\n%s", want, out)
		}
	}
	if out := mustBerth(t, "provision", "--server", f.url("operator"), "--servers", ids); !strings.Contains(out, "everything is as it should be") {
		t.Fatalf("provision twice: %s", out)
	}
	return f
}

// startPairs starts two of each program; env is the workers'.
func (f *fleet) startPairs(t *testing.T, env ...string) {
	t.Helper()
	for range 2 {
		f.start(t, "scheduler")
		f.start(t, "worker", env...)
		f.start(t, "loop-runner")
	}
}

func (f *fleet) start(t *testing.T, name string, env ...string) *process {
	t.Helper()
	p := start(t, program(name), append(env, "NATS_URL="+f.url(name), "LOG_LEVEL=debug"))
	f.processes = append(f.processes, p)
	return p
}

// healthy waits until the servers are.
func (f *fleet) healthy(t *testing.T, ids ...string) {
	t.Helper()
	_, js := f.connect(t, "operator")
	for _, id := range ids {
		awaitKey(t, js, "SERVERS", id, 40*time.Second, func(v view) error {
			if v.Health != "healthy" {
				return fmt.Errorf("%+v", v)
			}
			return nil
		})
	}
}

type view struct{ ID, Health, Admin, Worker string }

func (f *fleet) servers(t *testing.T) map[string]view {
	t.Helper()
	var list []view
	if err := json.Unmarshal([]byte(mustBerth(t, "servers", "--json", "--server", f.url("operator"))), &list); err != nil {
		t.Fatal(err)
	}
	out := map[string]view{}
	for _, v := range list {
		out[v.ID] = v
	}
	return out
}

// named finds the process by its unique name, which holds its process id.
func (f *fleet) named(t *testing.T, name string) *process {
	t.Helper()
	for _, p := range f.processes {
		if isNamed(p, name) {
			return p
		}
	}
	t.Fatalf("no process is called %q", name)
	return nil
}

func isNamed(p *process, name string) bool {
	return strings.Contains(name, "-"+strconv.Itoa(p.cmd.Process.Pid)+"-")
}

// seldom has the programs do what they do seldom, each of which needs grants.
func (f *fleet) seldom(t *testing.T) {
	t.Helper()
	_, js := f.connect(t, "operator")
	has := func(stream, subject string, want ...string) {
		t.Helper()
		await(t, js, stream, subject, 20*time.Second, func(data []byte) error {
			for _, w := range want {
				if !strings.Contains(string(data), w) {
					return fmt.Errorf("%s", data)
				}
			}
			return nil
		})
	}
	pub := func(user, subject, typ, id, data string) {
		t.Helper()
		cli(t, f.url(user), "--inbox-prefix", "_INBOX."+user, "pub", subject, fmt.Sprintf(`{"specversion":"1.0","id":%q,"source":"/e2e","type":%q,"data":%s}`, id, typ, data))
	}
	token := func(id string) string { return events.Token("/e2e", id) }

	// A sandbox by and for a tenant's service, driven through requests.
	pub("service", "request.default.sandbox.create", "berth.sandbox.create.v1", "g1", `{"vmId":"granted","idleTimeoutSeconds":600}`)
	has("EVENTS", "event.default.granted.ready", `"vmId":"granted"`)
	pub("service", "request.default.sandbox.act", "berth.command.act.v1", "g2", `{"vmId":"granted","actions":[{"type":"screenshot"}],"observe":true}`)
	has("EVENTS", "event.default.granted.finished", `"commandId":"g2"`, `"outcome":"ok"`)
	pub("service", "request.default.sandbox.extend", "berth.sandbox.extend.v1", "g3", `{"vmId":"granted","ttlSeconds":900}`)
	has("EVENTS", "event.default.granted.extended", `"id":"g3"`)
	pub("service", "request.default.sandbox.kill", "berth.sandbox.kill.v1", "g4", `{"vmId":"granted"}`)
	has("EVENTS", "event.default.granted.killed", `"vmId":"granted"`)
	// Refusals and dead letters.
	pub("service", "request.default.sandbox.create", "berth.sandbox.create.v1", "g5", `{"vmId":"bad","ttlSecond":1}`)
	has("EVENTS", "event.default.bad.rejected", `ttlSecond`) // where the requester listens
	pub("service", "request.default.loop.stop", "berth.loop.stop.v1", "g6", `{"loopId":"nobody"}`)
	has("EVENTS", "event.default.nobody.rejected", `notFound`)
	cli(t, f.url("service"), "--inbox-prefix", "_INBOX.service", "pub", "request.default.sandbox.create", "garbage")
	has("DEADLETTER", "deadletter.REQUESTS.scheduler", "garbage")
	cli(t, f.url("service"), "--inbox-prefix", "_INBOX.service", "pub", "request.default.loop.start", "garbage")
	has("DEADLETTER", "deadletter.REQUESTS.loop-runner", "garbage")
	cli(t, f.url("loop-runner"), "--inbox-prefix", "_INBOX.loop-runner", "pub", "sandbox.playwright-01.vm1.act", "garbage")
	has("DEADLETTER", "deadletter.COMMANDS.playwright-01", "garbage")
	// Commands that no worker is sent, or that one refuses.
	pub("loop-runner", "sandbox.ax102-01.vm1.act", "berth.command.act.v1", "g7", `{"actions":[{"type":"cursor"}]}`)
	has("RESULTS", "sandbox.ax102-01.vm1.result."+token("g7"), `"outcome":"rejected"`)
	pub("loop-runner", "sandbox.playwright-01.vm1.act", "berth.command.act.v1", "g8", `{"actions":[{"type":"cursor"}]}`)
	has("RESULTS", "sandbox.playwright-01.vm1.result."+token("g8"), `"outcome":"rejected"`)
	// What operators ask for.
	pub("operator", "request._.quota.set", "berth.quota.set.v1", "g9", `{"tenant":"other","maxSandboxes":3}`)
	has("EVENTS", "event._.other.quota", `"id":"g9"`)
	pub("operator", "request._.server.remove", "berth.server.remove.v1", "g10", `{"serverId":"playwright-01"}`)
	has("EVENTS", "event._.playwright-01.rejected", `"id":"g10"`)
}

// noViolations fails where a grant was missing.
func (f *fleet) noViolations(t *testing.T) {
	t.Helper()
	for _, p := range f.processes {
		for line := range strings.SplitSeq(p.output(), "\n") {
			if strings.Contains(strings.ToLower(line), "permissions violation") {
				t.Errorf("%s lacks a grant: %s", p.name, line)
			}
		}
	}
}

// endBrowsers ends what a killed worker has left.
func endBrowsers(t *testing.T, dir string) {
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Error(err)
	}
	for _, path := range procs {
		raw, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(raw), dir) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil || pid == os.Getpid() {
			continue
		}
		if p, err := os.FindProcess(pid); err == nil {
			_ = p.Kill() // it may have ended with its parent
		}
	}
}

// The three services, each twice, as separate processes under the grants of
// dev.conf do the main job; and what a user has no grant for is refused.
func TestProcessesUnderLeastGrants(t *testing.T) {
	t.Parallel()
	f := startFleet(t)
	out := mustBerth(t, "run", "--server", f.url("operator"), "--script", "../examples/main.json", "--out", t.TempDir())
	t.Log(out)
	if !strings.Contains(out, "succeeded after") {
		t.Fatalf("the main job:\n%s", out)
	}
	for _, args := range [][]string{{"cordon", "playwright-02"}, {"uncordon", "playwright-02"}, {"drain", "playwright-02"}, {"uncordon", "playwright-02"}} {
		mustBerth(t, append(args, "--server", f.url("operator"))...)
	}
	f.seldom(t)
	f.noViolations(t)
	refused := func(user, subject string) {
		t.Helper()
		nc, _ := f.connect(t, user)
		if err := nc.Publish(subject, []byte("{}")); err != nil {
			t.Fatal(err)
		}
		if err := nc.FlushTimeout(5 * time.Second); err != nil {
			t.Fatal(err)
		}
		// The refusal precedes the answer to the flush.
		if err := nc.LastError(); !errors.Is(err, nats.ErrPermissionViolation) {
			t.Errorf("%s may publish on %s: %v", user, subject, err)
		}
	}
	refused("worker", "sandbox.ax102-01.vm1.result.abc")
	refused("worker", "sandbox.playwright-01.vm1.act")
	refused("worker", "event.default.vm1.ready")
	refused("worker", "$JS.API.CONSUMER.CREATE.COMMANDS.spy")
	refused("worker", "$KV.PLACEMENTS.vm.vm1")
	refused("worker", "$KV.PLACEMENTS.server.ax102-01")
	refused("service", "sandbox.playwright-01.vm1.act")
	refused("service", "request.other.sandbox.create")
	refused("service", "request._.server.drain")
	refused("service", "$JS.API.STREAM.INFO.REQUESTS")
	refused("loop-runner", "sandbox.playwright-01.vm1.result.abc")
	refused("loop-runner", "$KV.PLACEMENTS.vm.vm1")
	refused("scheduler", "$KV.LEASES.server.playwright-01")
	refused("scheduler", "$JS.API.STREAM.DELETE.REQUESTS")
	refused("operator", "event.default.vm1.ready")
	for _, user := range []string{"worker", "service"} {
		nc, _ := f.connect(t, user)
		if _, err := nc.SubscribeSync("_INBOX.scheduler.>"); err != nil {
			t.Fatal(err)
		}
		if err := nc.Flush(); err != nil {
			t.Fatal(err)
		}
		eventually(t, 5*time.Second, user+" to be refused another's inbox", func() error {
			if errors.Is(nc.LastError(), nats.ErrPermissionViolation) {
				return nil
			}
			return errors.New("subscribed")
		})
	}
	for _, p := range f.processes {
		if code := p.terminate(); code != 0 {
			t.Errorf("%s exited with %d after SIGTERM", p.name, code)
		}
	}
}
