package vendors

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"berth/internal/events"
)

// Anything that looks like a credential is refused, wherever it stands, and is
// not repeated in the message.
func TestDecodeRefuses(t *testing.T) {
	for in, want := range map[string]string{
		`{"apiKey":"hunter2"}`:                            "model.apiKey: looks like a credential, which has no place in a request; set THE_KEY",
		`{"api_key":"hunter2"}`:                           "model.api_key: looks like",
		`{"API-Key":"hunter2"}`:                           "model.API-Key: looks like",
		`{"accessToken":"hunter2"}`:                       "model.accessToken: looks like",
		`{"token":"hunter2"}`:                             "model.token: looks like",
		`{"headers":{"a":"hunter2"}}`:                     "model.headers: looks like",
		`{"x":{"password":"hunter2"}}`:                    "model.x.password: looks like",
		`{"model":"sk-ant-api03-hunter2hunter2"}`:         "model.model: looks like",
		`{"instructions":"Bearer hunter2hunter2hunter2"}`: "model.instructions: looks like",
		`{"maxToken":5}`:                                  "model.maxToken: looks like", // rather one too many
		`{"mode1":"x"}`:                                   `unknown field "mode1"`,
		`{"maxTokens":"5"}`:                               "model.maxTokens: a JSON string",
		`[]`:                                              "not a JSON object",
		`{"name":"x"} y`:                                  "not a JSON object",
	} {
		var s Settings
		err := Decode(json.RawMessage(in), &s, "THE_KEY")
		var d *events.DataError
		if !errors.As(err, &d) || !strings.Contains(d.Message, want) || strings.Contains(d.Message, "hunter2") {
			t.Errorf("%s: %v, want %s", in, err, want)
		}
	}
}

func TestSettings(t *testing.T) {
	var s Settings
	if err := Decode(json.RawMessage(`{"name":"x","maxTokens":1000,"allow":["run"]}`), &s, ""); err != nil {
		t.Fatal(err)
	}
	if err := s.Check("m", 5000, 1000); err != nil || s.Model != "m" || s.MaxTokens != 1000 || s.KeepScreenshots != 5 || s.ImageEdge != 1000 || *s.Retries != 5 {
		t.Errorf("%+v %v", s, err)
	}
	for in, want := range map[string]string{
		`{"maxTokens":5}`: "model.maxTokens: 5 is not in 256", `{"keepScreenshots":21}`: "model.keepScreenshots", `{"imageEdge":5000}`: "model.imageEdge",
		`{"retries":-1}`: "model.retries", `{"allow":["fly"]}`: `model.allow: unknown action "fly"`, `{"model":"a\u0000b"}`: "model.model",
		`{"instructions":"` + strings.Repeat("x", MaxInstructions+1) + `"}`: "model.instructions",
	} {
		var s Settings
		if err := Decode(json.RawMessage(in), &s, ""); err != nil {
			t.Fatal(err)
		}
		if err := s.Check("m", 5000, 1000); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40s: %v, want %s", in, err, want)
		}
	}
}

// However a conversation grows, a request holds at most limit pictures and at
// least keep of them (or all), what is left out never comes back, and between
// two cuts nothing is.
func TestLeftOutProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 30).Draw(t, "limit")
		keep := rapid.IntRange(1, limit).Draw(t, "keep")
		before := 0
		for n := range 200 {
			out := LeftOut(n, keep, limit)
			left := n - out
			if left > limit || left < min(n, keep) || out < before {
				t.Fatalf("%d pictures: %d left out, %d before", n, out, before)
			}
			if out != before && left != keep {
				t.Fatalf("a cut at %d pictures leaves %d, want %d", n, left, keep)
			}
			before = out
		}
	})
}

func TestShorten(t *testing.T) {
	var s State
	n, rounds := 40, 0
	for s.Shorten(n) {
		rounds++
	}
	if s.From != n || rounds > 8 {
		t.Errorf("%+v after %d rounds", s, rounds)
	}
	if none := (State{}); !none.Shorten(0) || none.Shorten(0) {
		t.Error("nothing but pictures can be left out, once")
	}
}

func TestAgain(t *testing.T) {
	quick := Pauses{time.Microsecond, time.Microsecond}
	cut := &APIError{Vendor: "v", Cut: true, Message: "broke off"}
	tries := 0
	err := Again(t.Context(), 3, quick, func(context.Context) error { tries++; return cut })
	if !errors.Is(err, error(cut)) || tries != 4 {
		t.Errorf("%v after %d tries", err, tries)
	}
	tries = 0
	if err := Again(t.Context(), 3, quick, func(context.Context) error { tries++; return &APIError{Status: 400} }); err == nil || tries != 1 {
		t.Errorf("%v after %d tries", err, tries)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	stopped := errors.New("stopped")
	err = Again(ctx, 3, Pauses{time.Hour, time.Hour}, func(context.Context) error { cancel(stopped); return cut })
	if !errors.Is(err, stopped) {
		t.Error(err)
	}
}

func TestFaults(t *testing.T) {
	for want, list := range map[string][]APIError{
		CodeContextTooLong: {{Status: 413}, {Status: 400, Message: "prompt is too long: 5 tokens"}, {Status: 400, Kind: "context_length_exceeded"}, {Status: 400, Message: "the request exceeds the available context size"}},
		CodeBadCredentials: {{Status: 401}, {Status: 403}},
		CodeRateLimited:    {{Status: 429}, {Status: 200, Kind: "rate_limit_error"}},
		CodeUnavailable:    {{Status: 500}, {Status: 529}, {Status: 408}, {Status: 0}, {Cut: true}, {Status: 200, Kind: "overloaded_error"}},
		CodeRefused:        {{Status: 200, Kind: "bio_policy"}, {Status: 400, Kind: "content_filter"}},
		CodeRejected:       {{Status: 400}, {Status: 404}, {Status: 422}},
	} {
		for _, e := range list {
			if got := e.Fault(); got.Code != want {
				t.Errorf("%+v: %s, want %s", e, got.Code, want)
			}
		}
	}
}
