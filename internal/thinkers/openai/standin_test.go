package openai

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
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

	"github.com/openai/openai-go/v3/responses"

	"berth/internal/looprunner"
	"berth/internal/thinkers/thinkertest"
	"berth/internal/thinkers/vendors"
)

type object = map[string]any

// reply is one scripted answer of the stand-in.
type reply struct {
	items      []object
	incomplete string // its reason
	failed     string // the response fails with this code

	status int // an error instead
	code   string
	say    string
	after  string // Retry-After
	cut    int    // the stream ends after that many events
	inline string // an error of this code within the stream, after cut events
}

func calls(id string, actions ...object) object {
	return object{"type": "computer_call", "id": "cu_" + id, "call_id": id, "status": "completed", "pending_safety_checks": []any{}, "actions": actions}
}

func function(id, name, args string) object {
	return object{"type": "function_call", "id": "fc_" + id, "call_id": id, "name": name, "arguments": args, "status": "completed"}
}

func message(s string) object {
	return object{"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
		"content": []any{object{"type": "output_text", "text": s, "annotations": []any{}, "logprobs": []any{}}}}
}

func reasoning(id string) object {
	return object{"type": "reasoning", "id": "rs_" + id, "summary": []any{}, "encrypted_content": "gAAA" + id}
}

// standin is OpenAI's Responses API as far as Berth uses it. It refuses what
// the vendor refuses, and plays a script: the n-th answer goes to the n-th
// request that is new, so that a request asked twice is answered twice alike.
type standin struct {
	t       *testing.T
	srv     *httptest.Server
	mu      sync.Mutex
	script  []reply
	bodies  []object
	answers map[string]int
	errors  int
	refused []string
	emitted map[string]bool // items that the model has said
}

func newStandin(t *testing.T, script ...reply) *standin {
	s := &standin{t: t, script: script, answers: map[string]int{}, emitted: map[string]bool{}}
	s.srv = httptest.NewServer(s)
	t.Cleanup(s.srv.Close)
	return s
}

func (s *standin) env() Environment {
	return Environment{APIKey: "sk-test-key", BaseURL: s.srv.URL + "/v1", Pauses: vendors.Pauses{First: time.Millisecond, Most: 2 * time.Millisecond}}
}

func (s *standin) desk(model string) *thinkertest.Desk {
	return &thinkertest.Desk{T: s.t, Factory: New(s.env()), Model: model}
}

func (s *standin) fail(w http.ResponseWriter, status int, code, say string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	raw, err := json.Marshal(object{"error": object{"message": say, "type": "invalid_request_error", "param": nil, "code": code}})
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
		s.fail(w, 400, "", err.Error())
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.Header.Get("Authorization") != "Bearer sk-test-key" {
		s.fail(w, 401, "invalid_api_key", "Incorrect API key provided")
		return
	}
	body, err := s.check(r, raw)
	if err != nil {
		s.refused = append(s.refused, err.Error())
		s.fail(w, 400, "", err.Error())
		return
	}
	key := hash(body)
	n, again := s.answers[key]
	if !again {
		n = len(s.answers) + s.errors
	}
	if n >= len(s.script) {
		s.refused = append(s.refused, "a request more than the script has")
		s.fail(w, 400, "", "the script is over")
		return
	}
	a := s.script[n]
	if a.status > 0 {
		s.errors++
		if a.after != "" {
			w.Header().Set("Retry-After", a.after)
		}
		s.fail(w, a.status, a.code, a.say)
		return
	}
	if a.cut > 0 || a.failed != "" {
		s.errors++
	} else if !again {
		s.answers[key] = n
		s.bodies = append(s.bodies, body)
	}
	s.stream(w, n, a, body)
}

// check refuses what the vendor refuses. The request is decoded by the SDK's
// own type; what that does not know is a field that the API has not, but for
// the `detail` of a computer screenshot, which is documented and not yet in the
// SDK.
func (s *standin) check(r *http.Request, raw []byte) (object, error) {
	if r.Method != http.MethodPost || r.URL.Path != "/v1/responses" {
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
	rest, _ := withoutDetail(body).(object)
	for i, item := range list(rest["input"]) {
		if s.emitted[hash(item)] {
			continue // the vendor takes its own items back as they came
		}
		var v any = &responses.ResponseInputItemUnionParam{}
		switch item.(object)["role"] { // a message by its role: the union has three kinds of one name
		case "user":
			v = &responses.EasyInputMessageParam{}
		case "assistant":
			v = &responses.ResponseOutputMessageParam{}
		}
		if err := known(fmt.Sprintf("input.%d", i), item, v); err != nil {
			return nil, err
		}
	}
	delete(rest, "input")
	if err := known("", rest, &responses.ResponseNewParams{}); err != nil {
		return nil, err
	}
	if body["store"] != false || fmt.Sprint(body["include"]) != "[reasoning.encrypted_content]" {
		return nil, fmt.Errorf("store, include: %v %v", body["store"], body["include"])
	}
	if err := checkTools(body); err != nil {
		return nil, err
	}
	return body, checkInput(body["input"].([]any))
}

// known decodes v by the SDK's type and compares what that makes of it.
func known(where string, v, into any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return fmt.Errorf("%s: %w", where, err)
	}
	back, err := json.Marshal(into)
	if err != nil {
		return err
	}
	var have, got any
	if err := errors.Join(json.Unmarshal(raw, &have), json.Unmarshal(back, &got)); err != nil {
		return err
	}
	if !reflect.DeepEqual(have, got) {
		return fmt.Errorf("%s: unknown parameter: %s", where, difference(have, got))
	}
	return nil
}

// withoutDetail leaves the one documented field out that the SDK lacks.
func withoutDetail(v any) any {
	switch v := v.(type) {
	case object:
		out := object{}
		for k, item := range v {
			if k == "detail" && v["type"] == "computer_screenshot" && item == "original" {
				continue
			}
			out[k] = withoutDetail(item)
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, item := range v {
			out[i] = withoutDetail(item)
		}
		return out
	}
	return v
}

func checkTools(body object) error {
	preview := strings.Contains(body["model"].(string), "computer-use-preview")
	n := 0
	for _, item := range body["tools"].([]any) {
		tool := item.(object)
		switch tool["type"] {
		case "computer":
			n++
			if preview || len(tool) != 1 {
				return fmt.Errorf("tools: %v is not for %v", tool, body["model"])
			}
		case "computer_use_preview":
			n++
			if !preview || body["truncation"] != "auto" || tool["display_width"] == nil {
				return fmt.Errorf("tools: computer_use_preview needs its model, truncation auto and a display")
			}
		}
	}
	if n != 1 {
		return fmt.Errorf("tools: %d computer tools", n)
	}
	return nil
}

// checkInput holds the order of items: every call has its output after it and
// before the model's next items, every output its call, every computer output
// a screenshot and all acknowledgements, every reasoning what it led to.
func checkInput(items []any) error {
	open, pending := map[string]string{}, map[string]int{}
	for i, raw := range items {
		item := raw.(object)
		kind, _ := item["type"].(string)
		if role := item["role"]; role == "user" || kind == "reasoning" || role == "assistant" {
			for id := range open {
				if role == "user" || !strings.HasPrefix(open[id], "new") {
					return fmt.Errorf("no tool output found for call %s before item %d", id, i)
				}
			}
		}
		switch kind {
		case "reasoning":
			if i+1 == len(items) || items[i+1].(object)["role"] == "user" || item["encrypted_content"] == nil {
				return fmt.Errorf("input.%d: reasoning was provided without its required following item", i)
			}
		case "computer_call", "function_call":
			open[item["call_id"].(string)] = "new " + kind
			if checks, ok := item["pending_safety_checks"].([]any); ok {
				pending[item["call_id"].(string)] = len(checks)
			}
		case "computer_call_output", "function_call_output":
			id := item["call_id"].(string)
			if !strings.HasSuffix(open[id], strings.TrimSuffix(kind, "_output")) || open[id] == "" {
				return fmt.Errorf("input.%d: no call found for output %s", i, id)
			}
			delete(open, id)
			if kind == "computer_call_output" {
				acks, _ := item["acknowledged_safety_checks"].([]any)
				if len(acks) != pending[id] {
					return fmt.Errorf("input.%d: %d safety checks acknowledged, %d pending", i, len(acks), pending[id])
				}
				if err := checkPicture(item["output"].(object)["image_url"]); err != nil {
					return fmt.Errorf("input.%d.output: %w", i, err)
				}
			}
		}
		for _, p := range list(item["content"]) {
			if part := p.(object); part["type"] == "input_image" {
				if err := checkPicture(part["image_url"]); err != nil {
					return fmt.Errorf("input.%d: %w", i, err)
				}
			}
		}
	}
	if len(open) > 0 {
		return fmt.Errorf("no tool output found for %v", open)
	}
	if last := items[len(items)-1].(object); last["role"] != "user" && !strings.HasSuffix(fmt.Sprint(last["type"]), "_output") {
		return fmt.Errorf("input: nothing to answer")
	}
	return nil
}

func list(v any) []any {
	l, _ := v.([]any)
	return l
}

func checkPicture(url any) error {
	text, _ := url.(string)
	head, data, ok := strings.Cut(text, ";base64,")
	if !ok {
		return fmt.Errorf("image_url: missing required parameter")
	}
	raw, err := base64.StdEncoding.DecodeString(data)
	if err != nil {
		return err
	}
	cfg, format, err := image.DecodeConfig(bytes.NewReader(raw))
	if err != nil || head != "data:image/"+format || max(cfg.Width, cfg.Height) > 1600 {
		return fmt.Errorf("image_url: %s of %d×%d: %w", head, cfg.Width, cfg.Height, err)
	}
	return nil
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
	return fmt.Sprintf("%.200v / %.200v", a, b)
}

// stream answers in server-sent events, as the vendor does.
func (s *standin) stream(w http.ResponseWriter, n int, a reply, body object) {
	w.Header().Set("Content-Type", "text/event-stream")
	sent := 0
	emit := func(kind string, v object) bool {
		if a.cut > 0 && sent == a.cut {
			return false
		}
		v["type"], v["sequence_number"] = kind, sent
		sent++
		raw, err := json.Marshal(v)
		if err != nil {
			s.t.Errorf("stand-in: %v", err)
		}
		if _, err := fmt.Fprintf(w, "event: %s\ndata: %s\n\n", kind, raw); err != nil {
			s.t.Logf("stand-in: %v", err)
		}
		return true
	}
	items := a.items
	if len(items) > 0 && body["reasoning"] == nil {
		items = append([]object{reasoning(fmt.Sprint(n))}, items...)
	}
	response := object{"id": fmt.Sprintf("resp_%d", n), "object": "response", "created_at": 1, "model": body["model"], "status": "in_progress", "output": []any{}, "error": nil,
		"incomplete_details": nil, "parallel_tool_calls": true, "tools": []any{}, "tool_choice": "auto"}
	ok := emit("response.created", object{"response": response})
	for i, item := range items {
		s.emitted[hash(normal(item))] = true
		ok = ok && emit("response.output_item.added", object{"output_index": i, "item": item})
		ok = ok && emit("response.output_item.done", object{"output_index": i, "item": item})
	}
	response["output"] = items
	response["usage"] = object{"input_tokens": 200, "output_tokens": 30, "total_tokens": 230, "input_tokens_details": object{"cached_tokens": 0}, "output_tokens_details": object{"reasoning_tokens": 10}}
	switch {
	case !ok:
	case a.failed != "":
		response["status"], response["error"] = "failed", object{"code": a.failed, "message": "it failed"}
		emit("response.failed", object{"response": response})
	case a.incomplete != "":
		response["status"], response["incomplete_details"] = "incomplete", object{"reason": a.incomplete}
		ok = emit("response.incomplete", object{"response": response})
	default:
		response["status"] = "completed"
		ok = emit("response.completed", object{"response": response})
	}
	if !ok && a.inline != "" {
		if _, err := fmt.Fprintf(w, "event: error\ndata: {\"type\":\"error\",\"code\":%q,\"message\":\"trouble\",\"param\":null,\"sequence_number\":9}\n\n", a.inline); err != nil {
			s.t.Logf("stand-in: %v", err)
		}
	}
}

// normal is v as it is once decoded.
func normal(v any) (out any) {
	raw, err := json.Marshal(v)
	if err == nil {
		err = json.Unmarshal(raw, &out)
	}
	if err != nil {
		panic(err)
	}
	return out
}

// input is the n-th answered request's input.
func (s *standin) input(n int) []any {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n >= len(s.bodies) {
		s.t.Fatalf("%d requests were answered; refused: %v", len(s.bodies), s.refused)
	}
	return s.bodies[n]["input"].([]any)
}

func (s *standin) clean() {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.refused) > 0 {
		s.t.Errorf("the vendor would refuse: %v", s.refused)
	}
}

// words are the texts of a request's items from the last model's item on.
func words(items []any) string {
	var out []string
	for i := len(items) - 1; i >= 0; i-- {
		item := items[i].(object)
		if kind := item["type"]; kind == "computer_call" || kind == "function_call" || item["role"] == "assistant" {
			break
		}
		if text, ok := item["output"].(string); ok {
			out = append([]string{text}, out...)
		}
		for _, p := range list(item["content"]) {
			if text, ok := p.(object)["text"].(string); ok {
				out = append([]string{text}, out...)
			}
		}
	}
	return strings.Join(out, "|")
}

var _ looprunner.Model = (*model)(nil)
