package remote

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	_ "image/jpeg"
	_ "image/png"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/natsd"
	"berth/internal/thinkers/thinkertest"
	"berth/internal/thinkers/vendors"
)

// server is a NATS server, and a connection to it.
func server(t *testing.T, o natsd.Options) (*natsd.Server, *nats.Conn) {
	t.Helper()
	o.StoreDir = t.TempDir()
	srv, err := natsd.Start(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Shutdown)
	nc, err := nats.Connect("", srv.InProcess())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return srv, nc
}

// thinker answers at think.<name>.
func thinker(t *testing.T, nc *nats.Conn, name string, think func(msg *nats.Msg, r Request) *nats.Msg) {
	t.Helper()
	sub, err := nc.QueueSubscribe(Subject(name), "thinkers", func(msg *nats.Msg) {
		e, err := events.Decode(msg.Header, msg.Data)
		if err != nil || e.Type() != TypeRequest {
			t.Errorf("request: %v, type %s", err, e.Type())
			return
		}
		var r Request
		if err := events.DecodeStrict(e, &r); err != nil {
			t.Errorf("request: %v", err)
		}
		if answer := think(msg, r); answer != nil {
			if err := msg.RespondMsg(answer); err != nil {
				t.Errorf("respond: %v", err)
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sub.Unsubscribe(); err != nil && !errors.Is(err, nats.ErrConnectionClosed) {
			t.Errorf("unsubscribe: %v", err)
		}
	})
}

func bare(s string) *nats.Msg { return &nats.Msg{Data: []byte(s)} }

func desk(t *testing.T, nc *nats.Conn, model string) *thinkertest.Desk {
	return &thinkertest.Desk{T: t, Model: model, Factory: func(spec looprunner.Spec) (looprunner.Model, error) {
		spec.NC = nc
		return New(spec)
	}}
}

// A thinker is told what was done and what came of it, and its state is given
// back to it; its reply may be bare JSON or a CloudEvent in either mode.
func TestConversation(t *testing.T) {
	_, nc := server(t, natsd.Options{})
	var asked []Request
	var ids []string
	thinker(t, nc, "t1", func(msg *nats.Msg, r Request) *nats.Msg {
		e, err := events.Decode(msg.Header, msg.Data)
		if err != nil {
			t.Error(err)
		}
		asked, ids = append(asked, r), append(ids, e.ID())
		switch r.Step {
		case 1:
			return bare(`{"actions":[{"type":"click","x":5,"y":6},{"type":"clipboardRead"}],"label":"look there","state":{"n":1},"usage":{"inputTokens":3,"outputTokens":2}}`)
		case 2:
			return &nats.Msg{Header: nats.Header{"ce-specversion": {"1.0"}, "ce-type": {TypeReply}, "ce-id": {"1"}, "ce-source": {"/t"}, "Content-Type": {"application/json"}},
				Data: []byte(`{"observe":true,"waitSeconds":0.01}`)}
		case 3:
			return bare(`{"specversion":"1.0","type":"` + TypeReply + `","id":"2","source":"/t","data":{"needsInput":"Which?","state":[2]}}`)
		default:
			return bare(`{"done":true,"label":"all done"}`)
		}
	})
	d := desk(t, nc, `{"name":"bus","thinker":"t1","options":{"mood":"calm"},"picture":true}`)
	d.Capabilities = []string{"clipboard"}
	d.Say = map[int][]string{4: {"the first"}}
	if last := d.Run(5); last.Label != "all done" || d.Usage != (events.LoopUsage{InputTokens: 3, OutputTokens: 2}) {
		t.Errorf("%+v %+v", last, d.Usage)
	}
	if d.Did() != `{"type":"click","x":5,"y":6,"button":"left","count":1} {"type":"clipboardRead"}` {
		t.Errorf("did %s", d.Did())
	}
	one, two, four := asked[0], asked[1], asked[3]
	if one.Last != nil || string(one.Options) != `{"mood":"calm"}` || one.Picture == nil || one.Picture.Width != 1280 || !bytes.Equal(one.Picture.Data, d.Frame(one.Observation.Screenshot.Object)) {
		t.Errorf("first request %+v", one)
	}
	if two.Last == nil || two.Last.Outcome != computer.OK || string(two.Last.Results[1].Value) != `"copied"` || string(two.State) != `{"n":1}` || two.Last.Label != "look there" {
		t.Errorf("second request %+v", two.Last)
	}
	if len(four.Messages) != 1 || four.Last.NeedsInput != "Which?" || string(four.State) != "[2]" {
		t.Errorf("fourth request %+v", four)
	}
	if fmt.Sprint(ids) != "[default.l1.1.0 default.l1.2.1 default.l1.3.2 default.l1.4.3]" {
		t.Errorf("ids %v", ids)
	}
}

// Every fault of a reply ends the loop with a message that names the field.
func TestBadReplies(t *testing.T) {
	_, nc := server(t, natsd.Options{})
	reply := ""
	thinker(t, nc, "t1", func(*nats.Msg, Request) *nats.Msg { return bare(reply) })
	for in, want := range map[string]string{
		``:                                     "EOF",
		`[]`:                                   "does not fit",
		`{}`:                                   "needs one of actions",
		`{"actoins":[]}`:                       `unknown field "actoins"`,
		`{"done":"yes"}`:                       "done: a JSON string does not fit here",
		`{"done":true,"observe":true}`:         "observe, done: only one",
		`{"done":true} x`:                      "text after",
		`{"actions":[]}`:                       "at least one action",
		`{"actions":[{"type":"click","x":1}]}`: `field "y"`,
		`{"actions":[{"type":"click","x":1,"y":5000}]}`:                                `field "x": 1,5000 is outside`,
		`{"actions":[{"type":"wait","seconds":1,"z":2}]}`:                              `field "z"`,
		`{"actions":[{"type":"run","argv":["ls"]}]}`:                                   "the action run is off",
		`{"observe":true,"waitSeconds":-1}`:                                            "waitSeconds",
		`{"done":true,"waitSeconds":1}`:                                                "waitSeconds: only with observe",
		`{"failed":{"code":"x"}}`:                                                      "failed: needs a code and a message",
		`{"done":true,"usage":{"inputTokens":-1}}`:                                     "usage",
		`{"specversion":"1.0","type":"x","id":"1"}`:                                    "source",
		`{"specversion":"1.0","type":"x","id":"1","source":"/s","data":{"done":true}}`: "type: \"x\", want " + TypeReply,
		`{"done":true,"state":"` + strings.Repeat("x", maxState) + `"}`:                "state:",
	} {
		reply = in
		err := desk(t, nc, `{"name":"bus","thinker":"t1"}`).Step()
		var fault *computer.Fault
		if !errors.As(err, &fault) || fault.Code != vendors.CodeMalformed || !strings.Contains(fault.Message, want) || !strings.Contains(fault.Message, "think.t1") {
			t.Errorf("%.60s: %v, want %s", in, err, want)
		}
	}
	reply = `{"failed":{"code":"noMoney","message":"the account is empty"}}`
	d := desk(t, nc, `{"name":"bus","thinker":"t1"}`)
	if err := d.Step(); err != nil || d.Last.Failed.Code != "noMoney" {
		t.Errorf("%v %+v", err, d.Last)
	}
}

func TestAbsence(t *testing.T) {
	_, nc := server(t, natsd.Options{})
	t.Run("late", func(t *testing.T) {
		var done sync.WaitGroup
		done.Go(func() {
			time.Sleep(600 * time.Millisecond)
			if _, err := nc.Subscribe(Subject("late"), func(msg *nats.Msg) {
				if err := msg.Respond([]byte(`{"done":true}`)); err != nil {
					t.Error(err)
				}
			}); err != nil {
				t.Error(err)
			}
		})
		if err := desk(t, nc, `{"name":"bus","thinker":"late"}`).Step(); err != nil {
			t.Error(err)
		}
		done.Wait()
	})
	t.Run("silent", func(t *testing.T) {
		var asked atomic.Int64
		thinker(t, nc, "silent", func(*nats.Msg, Request) *nats.Msg { asked.Add(1); return nil })
		err := desk(t, nc, `{"name":"bus","thinker":"silent","timeoutSeconds":0.2}`).Step()
		var fault *computer.Fault
		if !errors.As(err, &fault) || fault.Code != events.CodeTimeout || asked.Load() != 1 {
			t.Errorf("%v after %d requests", err, asked.Load())
		}
	})
	t.Run("error", func(t *testing.T) {
		thinker(t, nc, "broken", func(*nats.Msg, Request) *nats.Msg {
			return &nats.Msg{Header: nats.Header{"Nats-Service-Error": {"out of order"}, "Nats-Service-Error-Code": {"500"}}}
		})
		err := desk(t, nc, `{"name":"bus","thinker":"broken"}`).Step()
		var fault *computer.Fault
		if !errors.As(err, &fault) || fault.Code != vendors.CodeUnavailable || !strings.Contains(fault.Message, "500 out of order") {
			t.Error(err)
		}
	})
	t.Run("nobody", func(t *testing.T) {
		began := time.Now()
		err := desk(t, nc, `{"name":"bus","thinker":"nobody"}`).Step()
		var fault *computer.Fault
		if !errors.As(err, &fault) || fault.Code != CodeNoThinker || time.Since(began) < absence {
			t.Errorf("%v after %s", err, time.Since(began))
		}
	})
}

// A picture that is too large for a message is made smaller.
func TestLargePicture(t *testing.T) {
	_, nc := server(t, natsd.Options{})
	var got Request
	thinker(t, nc, "t1", func(_ *nats.Msg, r Request) *nats.Msg { got = r; return bare(`{"done":true}`) })
	d := desk(t, nc, `{"name":"bus","thinker":"t1","picture":true}`)
	d.Goal = strings.Repeat("long ", 180_000) // 900 kB
	d.Display = computer.Display{Width: 3840, Height: 2160}
	if err := d.Step(); err != nil {
		t.Fatal(err)
	}
	cfg, format, err := image.DecodeConfig(bytes.NewReader(got.Picture.Data))
	if err != nil || cfg.Width != got.Picture.Width || got.Picture.MediaType != "image/"+format || base64.StdEncoding.EncodedLen(len(got.Picture.Data)) > 1<<20 {
		t.Errorf("%d bytes of %s: %v", len(got.Picture.Data), got.Picture.MediaType, err)
	}
	d = desk(t, nc, `{"name":"bus","thinker":"t1","picture":true}`)
	d.Goal = strings.Repeat("x", 1<<20-10_000)
	var fault *computer.Fault
	if err := d.Step(); !errors.As(err, &fault) || fault.Code != events.CodeTooLarge {
		t.Error(err)
	}
}

func TestSettings(t *testing.T) {
	_, nc := server(t, natsd.Options{})
	for model, want := range map[string]string{
		`{"name":"bus"}`:                                   "",
		`{"name":"bus","thinker":"a.b"}`:                   "model.thinker",
		`{"name":"bus","timeoutSeconds":-1}`:               "model.timeoutSeconds",
		`{"name":"bus","pictures":true}`:                   `unknown field "pictures"`,
		`{"name":"bus","options":{"apiKey":"x"}}`:          "model.options.apiKey: looks like a credential",
		`{"name":"bus","options":{"a":["sk-0123456789"]}}`: "model.options.a[0]",
		`{"name":"bus","deny":["fly"]}`:                    "unknown action",
	} {
		_, err := New(looprunner.Spec{Model: json.RawMessage(model), NC: nc})
		if (err == nil) != (want == "") || (err != nil && !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", model, err, want)
		}
	}
}

// The example in examples/thinker, as it is, thinks for a whole loop on the
// real loop-runner: it finishes, is not there, and says why it cannot.
func TestExampleThinker(t *testing.T) {
	srv, _ := server(t, natsd.Options{Addr: "127.0.0.1:0"})
	start(t, srv)
	w := thinkertest.NewWorld(t, srv.InProcess())
	w.Runner("r", map[string]looprunner.ModelFactory{Name: New}, nil)
	w.Start("l1", "open https://shop.example/ then click 3,4 then type hello world then press Control+Enter", `{"name":"bus","thinker":"example"}`)
	j, f := w.Finished("l1")
	if f.Outcome != events.LoopSucceeded || w.Acts(j) != "open:https://shop.example/ click:3,4 type:hello world key:Control+Enter" {
		t.Errorf("%s %s: %s; acts %s", f.Outcome, f.Code, f.Message, w.Acts(j))
	}
	w.Start("l2", "dance", `{"name":"bus","thinker":"example"}`)
	if _, f := w.Finished("l2"); f.Outcome != events.LoopFailed || !strings.Contains(f.Message, `cannot understand the step "dance"`) {
		t.Errorf("%+v", f)
	}
}

// start installs the example from its lock file and runs it.
func start(t *testing.T, srv *natsd.Server) {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"package.json", "package-lock.json", "thinker.js"} {
		raw, err := os.ReadFile(filepath.Join("..", "..", "..", "examples", "thinker", name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), raw, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	install := exec.CommandContext(t.Context(), "npm", "ci", "--silent", "--no-audit", "--no-fund")
	install.Dir = dir
	if out, err := install.CombinedOutput(); err != nil {
		t.Fatalf("npm ci: %v\n%s", err, out)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	run := exec.CommandContext(ctx, "node", "thinker.js", "example")
	run.Dir, run.Env = dir, append(os.Environ(), "NATS_URL="+srv.URL())
	run.Cancel = func() error { return run.Process.Signal(os.Interrupt) }
	var stderr bytes.Buffer
	run.Stderr = &stderr
	stdout, err := run.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := run.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stop()
		if err := run.Wait(); err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("thinker: %v\n%s", err, stderr.String())
		}
	})
	line := make([]byte, 64)
	n, err := stdout.Read(line)
	if err != nil && !errors.Is(err, io.EOF) || !strings.HasPrefix(string(line[:n]), "thinking at think.example") {
		t.Fatalf("the thinker says %q: %v\n%s", line[:n], err, stderr.String())
	}
}

// A limit that counts tokens needs them told; none is told as zero.
func TestTokensMustBeTold(t *testing.T) {
	_, nc := server(t, natsd.Options{})
	thinker(t, nc, "t1", func(_ *nats.Msg, r Request) *nats.Msg {
		if r.Step == 1 {
			return bare(`{"observe":true,"usage":{"inputTokens":0,"outputTokens":0}}`)
		}
		return bare(`{"observe":true}`)
	})
	for name, limits := range map[string]events.LoopLimits{"tokens": {Tokens: 100}, "spend": {SpendUSD: 1}, "none": {}} {
		m, err := New(looprunner.Spec{Model: json.RawMessage(`{"name":"bus","thinker":"t1"}`), NC: nc, Limits: limits})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := m.Think(t.Context(), looprunner.Turn{Step: 1}); err != nil {
			t.Errorf("%s: told as zero: %v", name, err)
		}
		_, err = m.Think(t.Context(), looprunner.Turn{Step: 2})
		var f *computer.Fault
		if silent := errors.As(err, &f) && f.Code == vendors.CodeNoUsage; silent != (name != "none") {
			t.Errorf("%s: not told: %v", name, err)
		}
	}
}
