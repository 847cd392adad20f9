package berth_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// rule holds which packages may come into which. Patterns are import paths of
// this module without "berth/"; one that ends in /... has everything below.
type rule struct {
	in     []string // packages the rule is about
	not    []string // must not be among their dependencies, near or far
	direct bool     // only their own imports count
	except []string // packages that may all the same
	why    string
}

var roles = []string{"internal/scheduler", "internal/worker", "internal/looprunner/..."}

var rules = []rule{
	{in: []string{"internal/..."}, not: []string{"cmd/..."}, why: "cmd only wires; what is worth importing lives in internal"},
	{in: []string{"internal/events", "internal/placement", "internal/providers", "internal/kv", "internal/bus", "internal/computer", "internal/natsd", "internal/telemetry"},
		not: append([]string{"internal/program", "internal/registry", "internal/devstack"}, roles...),
		why: "imports run one way: cmd → roles → {events, placement, providers, kv}"},
	{in: []string{"internal/events"}, not: []string{"internal/placement", "internal/providers/...", "internal/kv"}, why: "the wire knows no record, no decision and no backend"},
	{in: []string{"internal/placement"}, not: []string{"internal/..."}, why: "placement decides on a snapshot and others act: it knows the standard library only, so that a decision can be replayed from its inputs"},
	{in: []string{"internal/providers/..."}, not: []string{"internal/placement", "internal/kv", "internal/bus", "internal/events"}, except: []string{"internal/providers/providertest"},
		why: "a provider speaks for one server and knows no bus and no fleet; the worker stands between"},
	{in: []string{"internal/kv"}, not: []string{"internal/placement", "internal/providers/..."}, why: "records are plain data; who decides on them and who acts stand above. They keep requests as these came in, so kv does know the wire (ADR 2)"},
	{in: []string{"internal/scheduler"}, not: []string{"internal/worker", "internal/looprunner/...", "internal/providers/..."},
		why: "roles meet on the bus only, and the scheduler knows servers by their records, never by their provider"},
	{in: []string{"internal/looprunner/..."}, not: []string{"internal/scheduler", "internal/worker", "internal/providers/..."},
		why: "a loop reaches its sandbox over the bus only, so that one server can become many behind it"},
	{in: []string{"internal/worker"}, not: []string{"internal/scheduler", "internal/looprunner/...", "internal/placement"},
		why: "roles meet on the bus only; a worker accepts or refuses by the record, it does not place"},
	{in: []string{"internal/worker"}, not: []string{"internal/providers/..."}, except: []string{"internal/providers"},
		why: "the worker drives the interface; which backend stands behind it is the registry's choice"},
	{in: []string{"internal/..."}, not: []string{"internal/natsd"}, direct: true, except: []string{"internal/devstack", "internal/program/programtest", "internal/bench"},
		why: "the services are clients of a NATS server that somebody else runs; only the dev stack, the tool, the benchmark and tests embed one"},
	{in: []string{"cmd/scheduler", "cmd/worker", "cmd/loop-runner"}, not: []string{"internal/natsd", "internal/demoapp", "internal/devstack"},
		why: "a service ships neither a NATS server nor the demo"},
	{in: []string{"cmd/scheduler", "cmd/loop-runner"}, not: []string{"internal/providers/...", "internal/registry"}, why: "only a worker holds keys to servers"},
	{in: []string{"internal/replay"}, not: []string{"internal/scheduler", "internal/worker", "internal/providers/...", "internal/thinkers/..."},
		why: "a loop is retold from its journal alone, whoever thought in it and wherever it ran"},
	{in: []string{"internal/sandboxd/...", "internal/desktop", "cmd/sandboxd"}, not: []string{"internal/bus", "internal/kv", "internal/events", "internal/program"},
		why: "a self-hosted server is driven over HTTP and holds no key to the bus"},
	{in: []string{"internal/...", "cmd/..."}, not: []string{"internal/sandboxd/firecracker/firecrackertest", "internal/providers/playwright/browsertest"}, why: "a stand-in for microVMs and a browser of a test are for tests; no program ships them"},
	{in: []string{"internal/sandboxd/firecracker", "internal/sandboxd/jail", "internal/sandboxd/process"}, not: []string{"internal/desktop", "internal/sandboxd"},
		why: "what holds a sandbox knows nothing of what runs inside; package sandboxd brings the two together"},
	{in: []string{"internal/fleet", "internal/dispatch"}, not: append([]string{"internal/placement", "internal/program", "internal/registry", "internal/devstack"}, roles...),
		why: "the fleet is a client of the bus like any other; the roles are met there"},
	{in: []string{"internal/...", "cmd/..."}, not: []string{"internal/virtualtime"}, why: "virtual time is for tests"},
	{in: []string{"internal/computer"}, not: []string{"internal/..."}, why: "the vocabulary stands below everything"},
}

// stdlibOnly import nothing from outside the standard library.
var stdlibOnly = map[string]string{
	"internal/placement": "see above",
	"internal/computer":  "scripts, models and providers in any program can use the vocabulary",
	"internal/demoapp":   "what is driven shares no code with what drives it, or both could be wrong together",
}

type listed struct {
	ImportPath string
	Imports    []string
	Deps       []string
}

func listPackages(t *testing.T) []listed {
	t.Helper()
	cmd := exec.Command("go", "list", "-deps=false", "-json=ImportPath,Imports,Deps", "./...")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.String())
	}
	var packages []listed
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return packages
		} else if err != nil {
			t.Fatal(err)
		}
		packages = append(packages, p)
	}
}

func matches(pkg string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		if below, ok := strings.CutSuffix(p, "/..."); ok {
			return pkg == below || strings.HasPrefix(pkg, below+"/")
		}
		return pkg == p
	})
}

// TestLayout holds who may import whom, each rule with its reason.
func TestLayout(t *testing.T) {
	packages := listPackages(t)
	for _, r := range rules {
		met := false
		for _, p := range packages {
			name := strings.TrimPrefix(p.ImportPath, "berth/")
			if !matches(name, r.in) || matches(name, r.except) {
				continue
			}
			met = true
			deps := p.Deps
			if r.direct {
				deps = p.Imports
			}
			for _, d := range deps {
				dep, ours := strings.CutPrefix(d, "berth/")
				if ours && dep != name && matches(dep, r.not) && !matches(dep, r.except) {
					t.Errorf("%s comes to import %s: %s", name, dep, r.why)
				}
			}
		}
		if !met {
			t.Errorf("no package is met by the rule about %v; is it out of date?", r.in)
		}
	}
	for _, p := range packages {
		name := strings.TrimPrefix(p.ImportPath, "berth/")
		why, ok := stdlibOnly[name]
		if !ok {
			continue
		}
		for _, d := range p.Deps {
			if first, _, _ := strings.Cut(d, "/"); strings.Contains(first, ".") {
				t.Errorf("%s depends on %s, want the standard library only: %s", name, d, why)
			}
		}
	}
}
