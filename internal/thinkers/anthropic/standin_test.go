package anthropic

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"image"
	_ "image/jpeg"
	_ "image/png"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	sdk "github.com/anthropics/anthropic-sdk-go"

	"berth/internal/looprunner"
	"berth/internal/thinkers/thinkertest"
	"berth/internal/thinkers/vendors"
)

type object = map[string]any

// reply is one scripted answer of the stand-in.
type reply struct {
	blocks []object
	stop   string // "": tool_use where there is a call, else end_turn
	detail object // stop_details

	status int           // an error instead
	kind   string        // of the error
	say    string        // its message
	after  string        // Retry-After
	cut    int           // the stream ends after that many events
	inline string        // an error of this kind within the stream, after cut events
	raw    string        // input_json of the first call, as it stands
	hold   time.Duration // before the first byte
}

func text(s string) object { return object{"type": "text", "text": s} }

func call(id, name string, input object) object {
	return object{"type": "tool_use", "id": id, "name": name, "toolset_name": "computer", "input": input, "caller": object{"type": "direct"}}
}

func function(id, name string, input object) object {
	return object{"type": "tool_use", "id": id, "name": name, "input": input, "caller": object{"type": "direct"}}
}

// standin is Anthropic's Messages API as far as Berth uses it. It refuses what
// the vendor refuses, and plays a script: the n-th answer goes to the n-th
// request that is new, so that a request asked twice is answered twice alike.
type standin struct {
	t       *testing.T
	srv     *httptest.Server
	mu      sync.Mutex
	script  []reply
	bodies  []object // of the requests that were answered, in order
	answers map[string]int
	errors  int // requests that failed as scripted
	refused []string
	bound   map[string]string // signature → hash of what came before it
	dropped int
}

func newStandin(t *testing.T, script ...reply) *standin {
	s := &standin{t: t, script: script, answers: map[string]int{}, bound: map[string]string{}}
	s.srv = httptest.NewServer(s)
	t.Cleanup(s.srv.Close)
	return s
}

func (s *standin) env() Environment {
	return Environment{APIKey: "sk-ant-test-key", BaseURL: s.srv.URL, Pauses: vendors.Pauses{First: time.Millisecond, Most: 2 * time.Millisecond}}
}

func (s *standin) desk(model string) *thinkertest.Desk {
	return &thinkertest.Desk{T: s.t, Factory: New(s.env()), Model: model}
}

func (s *standin) fail(w http.ResponseWriter, status int, kind, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Request-Id", "req_1")
	w.WriteHeader(status)
	s.write(w, object{"type": "error", "error": object{"type": kind, "message": message}, "request_id": "req_1"})
}

func (s *standin) write(w io.Writer, v any) {
	raw, err := json.Marshal(v)
	if err == nil {
		_, err = w.Write(raw)
	}
	if err != nil {
		s.t.Errorf("stand-in: %v", err)
	}
}

func (s *standin) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	raw, err := io.ReadAll(r.Body)
	if err != nil {
		s.fail(w, 400, "invalid_request_error", err.Error())
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.Header.Get("X-Api-Key") != "sk-ant-test-key" || r.Header.Get("Authorization") != "" {
		s.fail(w, 401, "authentication_error", "invalid x-api-key")
		return
	}
	body, err := s.check(r, raw)
	if err != nil {
		s.refused = append(s.refused, err.Error())
		s.fail(w, 400, "invalid_request_error", err.Error())
		return
	}
	key := hash(body)
	n, again := s.answers[key]
	if !again {
		n = len(s.answers) + s.errors
	}
	if n >= len(s.script) {
		s.refused = append(s.refused, "a request more than the script has")
		s.fail(w, 400, "invalid_request_error", "the script is over")
		return
	}
	a := s.script[n]
	if a.status > 0 {
		s.errors++
		if a.after != "" {
			w.Header().Set("Retry-After", a.after)
		}
		s.fail(w, a.status, a.kind, a.say)
		return
	}
	if a.cut > 0 {
		s.errors++
	} else if !again {
		s.answers[key] = n
		s.bodies = append(s.bodies, body)
	}
	s.stream(w, n, a, body)
}

// check refuses what the vendor refuses. The request is decoded by the SDK's
// own type; what that does not know is a field that the API has not.
func (s *standin) check(r *http.Request, raw []byte) (object, error) {
	if r.Method != http.MethodPost || r.URL.Path != "/v1/messages" || r.Header.Get("Anthropic-Version") == "" {
		return nil, fmt.Errorf("%s %s", r.Method, r.URL)
	}
	var body object
	if err := json.Unmarshal(raw, &body); err != nil {
		return nil, err
	}
	if body["stream"] != true {
		return nil, fmt.Errorf("stream: want true")
	}
	delete(body, "stream")
	var params sdk.BetaMessageNewParams
	stripped, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(stripped, &params); err != nil {
		return nil, err
	}
	back, err := json.Marshal(params)
	if err != nil {
		return nil, err
	}
	var known object
	if err := json.Unmarshal(back, &known); err != nil {
		return nil, err
	}
	if !reflect.DeepEqual(body, known) {
		return nil, fmt.Errorf("extra inputs are not permitted: %s", difference(body, known))
	}
	betas := strings.Join(r.Header.Values("Anthropic-Beta"), ",")
	for _, check := range []func(object, string) error{s.checkTools, s.checkThinking, s.checkMessages} {
		if err := check(body, betas); err != nil {
			return nil, err
		}
	}
	if strings.Count(string(stripped), `"cache_control"`) > 4 {
		return nil, fmt.Errorf("a maximum of 4 blocks with cache_control may be provided")
	}
	if n, ok := body["max_tokens"].(float64); !ok || n < 1 {
		return nil, fmt.Errorf("max_tokens: field required")
	}
	return body, nil
}

func (s *standin) checkTools(body object, betas string) error {
	computers := 0
	for _, item := range body["tools"].([]any) {
		tool := item.(object)
		version, _ := tool["type"].(string)
		beta, isComputer := header[version]
		if !isComputer {
			if tool["name"] == toolset || tool["input_schema"] == nil {
				return fmt.Errorf("tools: %v", tool["name"])
			}
			continue
		}
		computers++
		if beta != "" && !strings.Contains(betas, beta) {
			return fmt.Errorf("tools: %s needs the header anthropic-beta: %s", version, beta)
		}
		if want := profileOf(body["model"].(string)).tool; version != want {
			return fmt.Errorf("'%s' does not support tool types: %s", body["model"], version)
		}
		if version != Toolset20260801 && (tool["display_width_px"] == nil || tool["name"] != toolset) {
			return fmt.Errorf("tools: display_width_px: field required")
		}
	}
	if computers != 1 {
		return fmt.Errorf("tools: %d computer tools", computers)
	}
	return nil
}

func (s *standin) checkThinking(body object, betas string) error {
	p := profileOf(body["model"].(string))
	thinking, ok := body["thinking"].(object)
	if !ok {
		return nil
	}
	switch thinking["type"] {
	case "enabled":
		if !p.budgeted || thinking["budget_tokens"].(float64) < 1024 || thinking["budget_tokens"].(float64) >= body["max_tokens"].(float64) {
			return fmt.Errorf("thinking.budget_tokens: not for this model, or out of range")
		}
	case "disabled":
		if p.binds {
			return fmt.Errorf("thinking.type: disabled is not supported")
		}
	}
	if thinking["block_binding"] != nil && !strings.Contains(betas, "thinking-binding-controls-2026-08-01") {
		return fmt.Errorf("thinking.block_binding: extra inputs are not permitted")
	}
	return nil
}

func (s *standin) checkMessages(body object, _ string) error {
	p := profileOf(body["model"].(string))
	pending := map[string]any{} // call → its toolset
	images, widest := 0, 0
	drop := false
	if thinking, ok := body["thinking"].(object); ok {
		if b, ok := thinking["block_binding"].(object); ok {
			drop = b["prefix_mismatch_behavior"] == "drop_block"
		}
	}
	for i, item := range body["messages"].([]any) {
		m := item.(object)
		content := m["content"].([]any)
		if role := []string{"user", "assistant"}[i%2]; m["role"] != role || len(content) == 0 {
			return fmt.Errorf("messages.%d: want %s with content", i, role)
		}
		if i%2 == 1 {
			if err := s.checkAnswer(body, i, content, p, drop, pending); err != nil {
				return err
			}
			continue
		}
		if err := checkResults(i, content, pending); err != nil {
			return err
		}
		for _, img := range pictures(content) {
			size, err := checkPicture(img, p)
			if err != nil {
				return fmt.Errorf("messages.%d: %w", i, err)
			}
			images++
			widest = max(widest, size)
		}
	}
	if len(pending) > 0 {
		return fmt.Errorf("messages: tool_use ids were found without tool_result blocks: %v", pending)
	}
	if images > 20 && widest > 2000 {
		return fmt.Errorf("messages: %d images, one of %d px; many-image requests take 2000 px", images, widest)
	}
	if len(body["messages"].([]any))%2 == 0 {
		return fmt.Errorf("messages: the last must be the user's")
	}
	return nil
}

func (s *standin) checkAnswer(body object, i int, content []any, p profile, drop bool, pending map[string]any) error {
	for j, item := range content {
		b := item.(object)
		switch b["type"] {
		case "tool_use":
			pending[b["id"].(string)] = b["toolset_name"]
		case "thinking":
			want, ours := s.bound[b["signature"].(string)]
			if !ours {
				return fmt.Errorf("messages.%d.content.%d: Invalid `signature` in `thinking` block", i, j)
			}
			if p.binds && want != prefix(body, i) {
				if !drop {
					return fmt.Errorf("messages.%d.content.%d: Invalid `signature` in `thinking` block. The block is bound to a different conversation", i, j)
				}
				s.dropped++
			}
		}
	}
	return nil
}

// checkResults holds the rules of tool results: first in their message, one
// for each call of the message before, of the same toolset, an error in words.
func checkResults(i int, content []any, pending map[string]any) error {
	others := false
	for j, item := range content {
		b := item.(object)
		if b["type"] != "tool_result" {
			others = true
			continue
		}
		id := b["tool_use_id"].(string)
		set, ok := pending[id]
		if !ok || others {
			return fmt.Errorf("messages.%d.content.%d: unexpected tool_use_id %q, or not at the beginning", i, j, id)
		}
		if set != b["toolset_name"] {
			return fmt.Errorf("messages.%d.content.%d: toolset_name must be that of its tool_use", i, j)
		}
		delete(pending, id)
		for _, part := range b["content"].([]any) {
			switch kind := part.(object)["type"]; {
			case kind != "text" && kind != "image":
				return fmt.Errorf("messages.%d.content.%d: only text and image", i, j)
			case kind == "image" && b["is_error"] == true:
				return fmt.Errorf("messages.%d.content.%d: all content must be type text if is_error is true", i, j)
			}
		}
	}
	if len(pending) > 0 {
		return fmt.Errorf("messages.%d: tool_use ids were found without tool_result blocks immediately after: %v", i, pending)
	}
	return nil
}

func pictures(content []any) []object {
	var out []object
	for _, item := range content {
		b := item.(object)
		if b["type"] == "image" {
			out = append(out, b)
		}
		if parts, ok := b["content"].([]any); ok {
			out = append(out, pictures(parts)...)
		}
	}
	return out
}

func checkPicture(img object, p profile) (int, error) {
	src := img["source"].(object)
	raw, err := base64.StdEncoding.DecodeString(src["data"].(string))
	if err != nil {
		return 0, err
	}
	cfg, format, err := image.DecodeConfig(bytes.NewReader(raw))
	if err != nil || src["media_type"] != "image/"+format {
		return 0, fmt.Errorf("image: %v is not %v: %w", format, src["media_type"], err)
	}
	edge, tokens := 1568, 1568
	if p.limits.Edge > 1568 || p.tool == Toolset20260801 {
		edge, tokens = 2576, 4784
	}
	if max(cfg.Width, cfg.Height) > edge || ((cfg.Width+27)/28)*((cfg.Height+27)/28) > tokens || len(src["data"].(string)) > 5<<20 {
		return 0, fmt.Errorf("image dimensions %d×%d exceed the model's limits", cfg.Width, cfg.Height)
	}
	return max(cfg.Width, cfg.Height), nil
}

// prefix is what a thinking block is bound to: all before its message, but for
// the marks of the cache.
func prefix(body object, i int) string {
	return hash(uncached([]any{body["system"], body["tools"], body["messages"].([]any)[:i]}))
}

func uncached(v any) any {
	switch v := v.(type) {
	case object:
		out := object{}
		for k, item := range v {
			if k != "cache_control" {
				out[k] = uncached(item)
			}
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, item := range v {
			out[i] = uncached(item)
		}
		return out
	}
	return v
}

func hash(v any) string {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:8])
}

func difference(a, b any) string {
	switch a := a.(type) {
	case object:
		b, _ := b.(object)
		for k, v := range a {
			if !reflect.DeepEqual(v, b[k]) {
				return k + "." + difference(v, b[k])
			}
		}
	case []any:
		b, _ := b.([]any)
		for i, v := range a {
			if i >= len(b) || !reflect.DeepEqual(v, b[i]) {
				if i < len(b) {
					return fmt.Sprintf("%d.%s", i, difference(v, b[i]))
				}
				return fmt.Sprint(i)
			}
		}
	}
	return fmt.Sprintf("%.100v / %.100v", a, b)
}

// stream answers in server-sent events, as the vendor does.
func (s *standin) stream(w http.ResponseWriter, n int, a reply, body object) {
	time.Sleep(a.hold)
	w.Header().Set("Content-Type", "text/event-stream")
	sent := 0
	emit := func(kind string, v object) bool {
		if a.cut > 0 && sent == a.cut {
			return false
		}
		sent++
		v["type"] = kind
		raw, err := json.Marshal(v)
		if err != nil {
			s.t.Errorf("stand-in: %v", err)
		}
		if _, err := fmt.Fprintf(w, "event: %s\ndata: %s\n\n", kind, raw); err != nil {
			s.t.Logf("stand-in: %v", err)
		}
		return true
	}
	blocks := slices.Clone(a.blocks)
	stop := a.stop
	if stop == "" {
		stop = "end_turn"
		if slices.ContainsFunc(blocks, func(b object) bool { return b["type"] == "tool_use" }) {
			stop = "tool_use"
		}
	}
	if thinking, ok := body["thinking"].(object); ok && thinking["type"] != "disabled" && len(blocks) > 0 {
		sig := fmt.Sprintf("sig-%d", n)
		s.bound[sig] = prefix(body, len(body["messages"].([]any)))
		blocks = append([]object{{"type": "thinking", "thinking": "I consider.", "signature": sig}}, blocks...)
	}
	usage := object{"input_tokens": 100, "output_tokens": 1, "cache_creation_input_tokens": 20, "cache_read_input_tokens": 3, "service_tier": "standard"}
	ok := emit("message_start", object{"message": object{"id": fmt.Sprintf("msg_%d", n), "type": "message", "role": "assistant", "model": body["model"],
		"content": []any{}, "stop_reason": nil, "stop_sequence": nil, "usage": usage}})
	for i, b := range blocks {
		ok = ok && s.block(emit, i, b, a)
	}
	ok = ok && emit("message_delta", object{"delta": object{"stop_reason": stop, "stop_sequence": nil, "stop_details": a.detail}, "usage": object{"output_tokens": 40}})
	ok = ok && emit("message_stop", object{})
	if !ok && a.inline != "" {
		if _, err := fmt.Fprintf(w, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":%q,\"message\":\"Overloaded\"}}\n\n", a.inline); err != nil {
			s.t.Logf("stand-in: %v", err)
		}
	}
}

func (s *standin) block(emit func(string, object) bool, i int, b object, a reply) bool {
	start, deltas := object{}, []object{}
	for k, v := range b {
		start[k] = v
	}
	switch b["type"] {
	case "text":
		start["text"] = ""
		deltas = append(deltas, object{"type": "text_delta", "text": b["text"]})
	case "thinking":
		start["thinking"], start["signature"] = "", ""
		deltas = append(deltas, object{"type": "thinking_delta", "thinking": b["thinking"]}, object{"type": "signature_delta", "signature": b["signature"]})
	case "tool_use":
		start["input"] = object{}
		raw, err := json.Marshal(b["input"])
		if err != nil {
			s.t.Errorf("stand-in: %v", err)
		}
		if a.raw != "" {
			raw = []byte(a.raw)
		}
		for piece := range slices.Chunk([]rune(string(raw)), 7) { // as they come
			deltas = append(deltas, object{"type": "input_json_delta", "partial_json": string(piece)})
		}
	}
	ok := emit("content_block_start", object{"index": i, "content_block": start})
	for _, d := range deltas {
		ok = ok && emit("content_block_delta", object{"index": i, "delta": d})
	}
	return ok && emit("content_block_stop", object{"index": i})
}

// body is the n-th answered request.
func (s *standin) body(n int) object {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n >= len(s.bodies) {
		s.t.Fatalf("%d requests were answered; refused: %v", len(s.bodies), s.refused)
	}
	return s.bodies[n]
}

// last is the content of a request's last message.
func (s *standin) last(n int) []any {
	m := s.body(n)["messages"].([]any)
	return m[len(m)-1].(object)["content"].([]any)
}

func (s *standin) clean() {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.refused) > 0 {
		s.t.Errorf("the vendor would refuse: %v", s.refused)
	}
}

func results(content []any) []object {
	var out []object
	for _, item := range content {
		if b := item.(object); b["type"] == "tool_result" {
			out = append(out, b)
		}
	}
	return out
}

func words(b object) string {
	var out []string
	for _, part := range b["content"].([]any) {
		if p := part.(object); p["type"] == "text" {
			out = append(out, p["text"].(string))
		}
	}
	return strings.Join(out, "|")
}

var _ looprunner.Model = (*model)(nil)

// try is what check says to a body.
func (s *standin) try(raw []byte) error {
	r := httptest.NewRequest(http.MethodPost, "/v1/messages?beta=true", nil)
	r.Header.Set("Anthropic-Version", "2023-06-01")
	r.Header.Set("Anthropic-Beta", "thinking-binding-controls-2026-08-01")
	_, err := s.check(r, raw)
	return err
}
