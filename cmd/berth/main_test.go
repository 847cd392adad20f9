package main

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rogpeppe/go-internal/testscript"

	"berth/internal/bus"
	"berth/internal/natsd"
	"berth/internal/program/programtest"
	"berth/internal/sandboxd"
)

func TestMain(m *testing.M) {
	sandboxd.TakeOver()
	testscript.Main(m, map[string]func(){"berth": func() { os.Exit(run()) }})
}

func TestScripts(t *testing.T) { programtest.Run(t, "testdata") }

func TestNearest(t *testing.T) {
	for name, want := range map[string]string{"sevrers": "servers", "server": "servers", "krdon": "cordon", "kil": "kill", "evnet": "events", "frobnicate": ""} {
		if got := nearest(name, commands()); got != want {
			t.Errorf("nearest(%q) = %q, want %q", name, got, want)
		}
	}
}

// What somebody changed on the server is told, with exit 1, and put right when
// asked.
func TestProvisionRepairs(t *testing.T) {
	srv, err := natsd.Start(natsd.Options{StoreDir: t.TempDir(), Addr: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer srv.Shutdown()
	berth := func(args ...string) (string, int) {
		var out bytes.Buffer
		code := perform(t.Context(), append(args, "--server", srv.URL()), strings.NewReader(""), &out, &out)
		return out.String(), code
	}
	if out, code := berth("provision"); code != 0 {
		t.Fatalf("exit %d: %s", code, out)
	}
	nc, err := nats.Connect("", srv.InProcess())
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	s, err := js.Stream(t.Context(), bus.Events)
	if err != nil {
		t.Fatal(err)
	}
	changed := s.CachedInfo().Config
	changed.MaxAge = time.Hour
	if _, err := js.UpdateStream(t.Context(), changed); err != nil {
		t.Fatal(err)
	}
	const what = "stream EVENTS: maxAge is 1h0m0s, want 168h0m0s"
	if out, code := berth("provision"); code != 1 || !strings.Contains(out, "drifted "+what) || !strings.Contains(out, "--repair") {
		t.Errorf("exit %d: %s", code, out)
	}
	if out, code := berth("provision", "--repair"); code != 0 || !strings.Contains(out, "repaired stream EVENTS: maxAge was 1h0m0s, is 168h0m0s") {
		t.Errorf("exit %d: %s", code, out)
	}
	if out, code := berth("provision", "--json"); code != 0 || !strings.Contains(out, `"drifted": []`) {
		t.Errorf("exit %d: %s", code, out)
	}
}

func FuzzParseScript(f *testing.F) {
	f.Add([]byte(`{"goal":"g","script":[{"type":"click","x":1,"y":2},{"check":"title","equals":"t"}]}`))
	f.Add([]byte(`[{"type":"wait","seconds":1}]`))
	f.Add([]byte(`{"script":[1,null,{}],"sandbox":{"ttlSeconds":-1},"limits":{"steps":-1}}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		file, faults := parseScript(raw)
		if len(faults) == 0 && (file == nil || len(file.items) == 0) {
			t.Fatalf("accepted %q as nothing", raw)
		}
	})
}
