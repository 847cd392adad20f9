package chat

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	_ "image/jpeg"
	_ "image/png"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	sdk "github.com/openai/openai-go/v3"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/thinkers/thinkertest"
	"berth/internal/thinkers/vendors"
)

type object = map[string]any

// reply is one scripted answer: text, and calls as id, name, arguments.
type reply struct {
	text   string
	calls  [][3]string
	finish string // "": as the content says
	status int
	say    string
	cut    bool // no finish_reason comes
}

// standin is a server of chat completions. It refuses what such servers
// refuse.
type standin struct {
	t       *testing.T
	srv     *httptest.Server
	mu      sync.Mutex
	key     string // "": none is to be sent
	script  []reply
	bodies  []object
	answers map[string]int
	errors  int
	refused []string
}

func newStandin(t *testing.T, script ...reply) *standin {
	s := &standin{t: t, script: script, answers: map[string]int{}}
	s.srv = httptest.NewServer(s)
	t.Cleanup(s.srv.Close)
	return s
}

func (s *standin) env() Environment {
	return Environment{BaseURLs: []string{s.srv.URL + "/v1"}, APIKey: s.key, Pauses: vendors.Pauses{First: time.Millisecond, Most: 2 * time.Millisecond}}
}

func (s *standin) desk(model string) *thinkertest.Desk {
	return &thinkertest.Desk{T: s.t, Factory: New(s.env()), Model: model}
}

func (s *standin) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fail := func(status int, say string) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		raw, err := json.Marshal(object{"error": object{"message": say, "type": "error", "code": nil, "param": nil}})
		if err == nil {
			_, err = w.Write(raw)
		}
		if err != nil {
			s.t.Error(err)
		}
	}
	raw, err := io.ReadAll(r.Body)
	if err != nil {
		s.t.Error(err)
	}
	if want := map[bool]string{true: "", false: "Bearer " + s.key}[s.key == ""]; r.Header.Get("Authorization") != want {
		fail(401, "no")
		return
	}
	if r.URL.Path != "/v1/chat/completions" {
		fail(404, r.URL.Path)
		return
	}
	body, err := check(raw)
	if err != nil {
		s.refused = append(s.refused, err.Error())
		fail(400, err.Error())
		return
	}
	n, again := s.answers[string(raw)]
	if !again {
		n = len(s.answers) + s.errors
	}
	if n >= len(s.script) {
		s.refused = append(s.refused, "the script is over")
		fail(400, "the script is over")
		return
	}
	a := s.script[n]
	if a.status > 0 {
		s.errors++
		fail(a.status, a.say)
		return
	}
	if a.cut {
		s.errors++
	} else if !again {
		s.answers[string(raw)] = n
		s.bodies = append(s.bodies, body)
	}
	s.stream(w, a)
}

func (s *standin) stream(w http.ResponseWriter, a reply) {
	w.Header().Set("Content-Type", "text/event-stream")
	emit := func(v object) {
		raw, err := json.Marshal(v)
		if err == nil {
			_, err = fmt.Fprintf(w, "data: %s\n\n", raw)
		}
		if err != nil {
			s.t.Error(err)
		}
	}
	chunk := func(delta object, finish any) {
		emit(object{"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "local", "choices": []any{object{"index": 0, "delta": delta, "finish_reason": finish}}})
	}
	chunk(object{"role": "assistant", "content": ""}, nil)
	for _, piece := range strings.SplitAfter(a.text, " ") {
		chunk(object{"content": piece}, nil)
	}
	for i, c := range a.calls {
		chunk(object{"tool_calls": []any{object{"index": i, "id": c[0], "type": "function", "function": object{"name": c[1], "arguments": ""}}}}, nil)
		for piece := range strings.SplitAfterSeq(c[2], ",") {
			chunk(object{"tool_calls": []any{object{"index": i, "function": object{"arguments": piece}}}}, nil)
		}
	}
	if a.cut {
		return
	}
	finish := a.finish
	if finish == "" {
		finish = map[bool]string{true: "tool_calls", false: "stop"}[len(a.calls) > 0]
	}
	chunk(object{}, finish)
	emit(object{"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "local", "choices": []any{}, "usage": object{"prompt_tokens": 50, "completion_tokens": 5, "total_tokens": 55}})
	if _, err := io.WriteString(w, "data: [DONE]\n\n"); err != nil {
		s.t.Error(err)
	}
}

// check decodes a request by the SDK's own type, refuses what that does not
// know, and holds the order of messages: the system's first, then the user's;
// after an answer with calls one tool message for each, then the user's.
func check(raw []byte) (object, error) {
	var body, known object
	if err := json.Unmarshal(raw, &body); err != nil {
		return nil, err
	}
	delete(body, "stream")
	stripped, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	var p sdk.ChatCompletionNewParams
	if err := json.Unmarshal(stripped, &p); err != nil {
		return nil, err
	}
	back, err := json.Marshal(p)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(back, &known); err != nil {
		return nil, err
	}
	if !reflect.DeepEqual(body, known) {
		return nil, fmt.Errorf("unknown field in %.300s, known %.300s", stripped, back)
	}
	open := []string{}
	images := 0
	for i, item := range body["messages"].([]any) {
		m := item.(object)
		switch m["role"] {
		case "system":
			if i != 0 {
				return nil, errors.New("system message not first")
			}
		case "assistant":
			for _, c := range list(m["tool_calls"]) {
				open = append(open, c.(object)["id"].(string))
				if args := c.(object)["function"].(object)["arguments"].(string); !json.Valid([]byte(args)) {
					return nil, fmt.Errorf("arguments %q", args)
				}
			}
		case "tool":
			if len(open) == 0 || open[0] != m["tool_call_id"] {
				return nil, fmt.Errorf("messages.%d: tool message for %v, open %v", i, m["tool_call_id"], open)
			}
			open = open[1:]
		case "user":
			if len(open) > 0 {
				return nil, fmt.Errorf("messages.%d: calls %v have no answer", i, open)
			}
			for _, part := range list(m["content"]) {
				if u, ok := part.(object)["image_url"].(object); ok {
					images++
					if err := checkPicture(u["url"].(string)); err != nil {
						return nil, err
					}
				}
			}
		}
	}
	if images < 1 || images > vendors.MaxPictures {
		return nil, fmt.Errorf("%d pictures", images)
	}
	return body, nil
}

func list(v any) []any {
	l, _ := v.([]any)
	return l
}

func checkPicture(url string) error {
	head, data, _ := strings.Cut(url, ";base64,")
	raw, err := base64.StdEncoding.DecodeString(data)
	if err != nil {
		return err
	}
	cfg, format, err := image.DecodeConfig(bytes.NewReader(raw))
	if err != nil || head != "data:image/"+format || max(cfg.Width, cfg.Height) > 1280 {
		return fmt.Errorf("%s of %d×%d: %w", head, cfg.Width, cfg.Height, err)
	}
	return nil
}

func (s *standin) clean() {
	s.t.Helper()
	if len(s.refused) > 0 {
		s.t.Errorf("a server would refuse: %v", s.refused)
	}
}

// tools are the answers to the calls of the turn before the n-th request.
func (s *standin) tools(n int) []string {
	var out []string
	messages := s.bodies[n]["messages"].([]any)
	for i := len(messages) - 1; i >= 0 && messages[i].(object)["role"] != "assistant"; i-- {
		if m := messages[i].(object); m["role"] == "tool" {
			out = append([]string{m["content"].(string)}, out...)
		}
	}
	return out
}

const local = `{"name":"chat","model":"qwen3-vl"}`

// A conversation that uses every function.
func TestEveryFunction(t *testing.T) {
	c := func(name, args string) [3]string { return [3]string{"", name, args} } // such as servers that name no call
	s := newStandin(t,
		reply{text: "I look first.", calls: [][3]string{c("screenshot", "")}},
		reply{calls: [][3]string{
			c("click", `{"x":0,"y":0}`), c("click", `{"x":1279,"y":799,"button":"right","count":2,"modifiers":["ctrl"]}`), c("move", `{"x":5,"y":6}`),
			c("drag", `{"path":[{"x":1,"y":2},{"x":3,"y":4}]}`), c("scroll", `{"x":9,"y":9,"dy":3}`), c("scroll", `{"x":9,"y":9,"dy":-400}`),
			c("mouseDown", `{}`), c("mouseUp", `{"button":"left"}`)}},
		reply{calls: [][3]string{
			c("type", `{"text":"美\n"}`), c("key", `{"keys":["ctrl","A"]}`), c("hold", `{"keys":["Shift"],"seconds":1}`), c("wait", `{"seconds":0.5}`), c("cursor", `{}`),
			c("zoom", `{"region":{"x":10,"y":20,"width":300,"height":200}}`), c("open", `{"target":"https://example.org/"}`),
			c("run", `{"argv":["true"]}`), c("clipboardWrite", `{"text":"x"}`), c("clipboardRead", `{}`)}},
		reply{calls: [][3]string{c("askUser", `{"question":"Which?"}`)}},
		reply{calls: [][3]string{c("done", `{"summary":"Saved it."}`)}})
	s.key = "secret-of-the-gateway"
	d := s.desk(`{"name":"chat","model":"qwen3-vl","allow":["run"]}`)
	d.Capabilities = []string{"shell", "clipboard"}
	d.Say = map[int][]string{5: {"the first"}}
	d.Crash = true
	last := d.Run(9)
	s.clean()
	if !last.Done || last.Label != "Saved it." {
		t.Errorf("%+v", last)
	}
	want := `{"type":"click","x":0,"y":0,"button":"left","count":1} {"type":"click","x":1279,"y":799,"button":"right","count":2,"modifiers":["Control"]} {"type":"move","x":5,"y":6} ` +
		`{"type":"drag","button":"left","path":[{"x":1,"y":2},{"x":3,"y":4}]} {"type":"scroll","x":9,"y":9,"dy":3} {"type":"scroll","x":9,"y":9,"dy":-100} ` +
		`{"type":"mouseDown","button":"left"} {"type":"mouseUp","button":"left"} {"type":"type","text":"美\n"} {"type":"key","keys":["Control","a"],"repeat":1} ` +
		`{"type":"hold","keys":["Shift"],"seconds":1} {"type":"wait","seconds":0.5} {"type":"cursor"} {"type":"zoom","region":{"x":10,"y":20,"width":300,"height":200}} ` +
		`{"type":"open","target":"https://example.org/"} {"type":"run","argv":["true"]} {"type":"clipboardWrite","text":"x"} {"type":"clipboardRead"}`
	if got := d.Did(); got != want {
		t.Errorf("did\n%s\nwant\n%s", got, want)
	}
	if got := strings.Join(s.tools(3), "|"); got != "OK|OK|OK|OK|X=640, Y=400|OK|OK|exit code 3\nstdout:\nout\nstderr:\nerr|OK|copied" {
		t.Errorf("told %q", got)
	}
	if got := s.tools(4); got[0] != "A person answers: the first" {
		t.Errorf("told %q", got)
	}
	if d.Usage != (events.LoopUsage{InputTokens: 250, OutputTokens: 25}) {
		t.Errorf("usage %+v", d.Usage)
	}
}

// Coordinates are pixels of the picture that was sent, or thousandths of it.
func TestCoordinates(t *testing.T) {
	for kind, c := range map[string]struct {
		args string
		want computer.Point
	}{
		"pixels":     {`{"x":640,"y":400}`, computer.Point{X: 1281, Y: 801}},
		"normalized": {`{"x":500,"y":1000}`, computer.Point{X: 1281, Y: 1599}},
	} {
		s := newStandin(t, reply{calls: [][3]string{{"a", "click", c.args}}}, reply{calls: [][3]string{{"b", "done", `{"summary":"x"}`}}})
		d := s.desk(`{"name":"chat","model":"m","coordinates":"` + kind + `"}`)
		d.Display = computer.Display{Width: 2560, Height: 1600}
		d.Run(3)
		s.clean()
		if got := d.Acts[0].Point(); got != c.want {
			t.Errorf("%s: clicked %v, want %v", kind, got, c.want)
		}
	}
}

func TestFaultyAnswers(t *testing.T) {
	done := reply{calls: [][3]string{{"z", "done", `{"summary":"x"}`}}}
	for name, c := range map[string]struct {
		r    reply
		want string
	}{
		"no tool":      {reply{calls: [][3]string{{"a", "fly", "{}"}}}, `unsupported: there is no tool "fly"`},
		"broken":       {reply{calls: [][3]string{{"a", "click", `{"x":1,`}}}, "malformed: the arguments of click"},
		"out of range": {reply{calls: [][3]string{{"a", "click", `{"x":4000,"y":1}`}}}, "outOfRange"},
		"text":         {reply{calls: [][3]string{{"a", "click", `{"x":"1","y":1}`}}}, "badInput: x"},
		"missing":      {reply{calls: [][3]string{{"a", "click", `{"x":1}`}}}, `badInput: y: action "click" needs it`},
		"not allowed":  {reply{calls: [][3]string{{"a", "run", `{"argv":["rm"]}`}}}, `unsupported: there is no tool "run"`},
		"done too":     {reply{calls: [][3]string{{"a", "wait", `{"seconds":0}`}, {"b", "done", `{"summary":"x"}`}}}, "call done alone"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStandin(t, c.r, done)
			s.desk(local).Run(3)
			s.clean()
			if got := strings.Join(s.tools(1), "|"); !strings.Contains(got, c.want) {
				t.Errorf("told %q, want %q", got, c.want)
			}
		})
	}
	t.Run("words only", func(t *testing.T) {
		s := newStandin(t, reply{text: "I think I should click."}, reply{text: "Hm", finish: "length"}, done)
		s.desk(local).Run(4)
		s.clean()
		if raw := fmt.Sprint(s.bodies[2]); !strings.Contains(raw, "You called no tool") || !strings.Contains(raw, "cut off at 2048 tokens") {
			t.Error("the model is not told")
		}
	})
	t.Run("for ever", func(t *testing.T) {
		s := newStandin(t, reply{text: "a"}, reply{text: "b"}, reply{text: "c"}, reply{text: "d"})
		if last := s.desk(local).Run(5); last.Failed == nil || last.Failed.Code != vendors.CodeMalformed {
			t.Errorf("%+v", last)
		}
	})
}

func TestErrors(t *testing.T) {
	done := reply{calls: [][3]string{{"z", "done", `{"summary":"x"}`}}}
	for name, c := range map[string]struct {
		script []reply
		code   string
	}{
		"429":     {[]reply{{status: 429}, done}, ""},
		"500":     {[]reply{{status: 500}, done}, ""},
		"cut":     {[]reply{{text: "abc", cut: true}, done}, ""},
		"503":     {[]reply{{status: 503}, {status: 503}}, vendors.CodeUnavailable},
		"401":     {[]reply{{status: 401}}, vendors.CodeBadCredentials},
		"400":     {[]reply{{status: 400, say: "no tools here"}}, vendors.CodeRejected},
		"long":    {[]reply{{status: 400, say: "This model's maximum context length is 4096 tokens"}, {status: 400, say: "maximum context length"}}, vendors.CodeContextTooLong},
		"refusal": {[]reply{{text: "no", finish: "content_filter"}}, vendors.CodeRefused},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStandin(t, c.script...)
			d := s.desk(`{"name":"chat","model":"m","retries":1}`)
			err := d.Step()
			var fault *computer.Fault
			switch {
			case c.code == vendors.CodeRefused:
				if d.Last.Failed == nil || d.Last.Failed.Code != c.code {
					t.Errorf("%v %+v", err, d.Last)
				}
			case c.code == "" && (err != nil || !d.Last.Done):
				t.Errorf("%v %+v", err, d.Last)
			case c.code != "" && (!errors.As(err, &fault) || fault.Code != c.code):
				t.Errorf("%v, want %s", err, c.code)
			}
		})
	}
}

// Old pictures are left out in batches.
func TestTrimming(t *testing.T) {
	var script []reply
	for i := range 30 {
		script = append(script, reply{calls: [][3]string{{fmt.Sprint("c", i), "wait", `{"seconds":0}`}}})
	}
	s := newStandin(t, append(script, reply{calls: [][3]string{{"z", "done", `{"summary":"x"}`}}})...)
	d := s.desk(local)
	d.Display = computer.Display{Width: 320, Height: 200}
	d.Run(32)
	s.clean()
	if raw := fmt.Sprint(s.bodies[30]); strings.Count(raw, gonePicture) != 16 {
		t.Errorf("%d pictures are left out", strings.Count(raw, gonePicture))
	}
}

// The servers are the operator's choice.
func TestServers(t *testing.T) {
	env := Environment{BaseURLs: []string{"http://a.example/v1", "http://b.example/v1"}}
	for model, want := range map[string]string{
		`{"name":"chat","model":"m"}`:                                    "",
		`{"name":"chat","model":"m","baseURL":"http://b.example/v1"}`:    "",
		`{"name":"chat","model":"m","baseURL":"http://evil.example/v1"}`: events.CodeForbidden,
		`{"name":"chat"}`: events.CodeBadInput,
		`{"name":"chat","model":"m","coordinates":"polar"}`: events.CodeBadInput,
		`{"name":"chat","model":"m","temperature":3}`:       events.CodeBadInput,
	} {
		_, err := New(env)(looprunner.Spec{Goal: "x", Model: json.RawMessage(model)})
		var d *events.DataError
		if (err == nil) != (want == "") || (want != "" && (!errors.As(err, &d) || d.Code != want)) {
			t.Errorf("%s: %v, want %q", model, err, want)
		}
	}
	_, err := New(Environment{})(looprunner.Spec{Goal: "x", Model: json.RawMessage(local)})
	if err == nil || !strings.Contains(err.Error(), URLVariable) {
		t.Error(err)
	}
}
