package thinkers

import (
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/thinkers/anthropic"
	"berth/internal/thinkers/openai"
	"berth/internal/thinkers/vendors"
)

func TestNames(t *testing.T) {
	if got := Names(); !slices.Equal(got, []string{"anthropic", "bus", "chat", "openai", "replay", "script"}) {
		t.Errorf("models %v", got)
	}
}

// Keys leave the environment when they are read, and reach the models. The
// environment is read once in a process, so nothing else here may read it.
func TestEnvironment(t *testing.T) {
	t.Setenv("ANTHROPIC_API_KEY", " sk-ant-1 ")
	t.Setenv("OPENAI_API_KEY", "sk-2")
	t.Setenv("CHAT_API_KEY", "key-3")
	t.Setenv("CHAT_BASE_URL", "http://a.example/v1, http://b.example/v1")
	t.Setenv("CHAT_MODEL", "m")
	models := All()
	for _, name := range []string{"ANTHROPIC_API_KEY", "OPENAI_API_KEY", "CHAT_API_KEY"} {
		if v, ok := os.LookupEnv(name); ok {
			t.Errorf("%s is still there: %q", name, v)
		}
	}
	display := computer.DefaultDisplay
	for name, model := range map[string]string{anthropic.Name: `{"name":"anthropic"}`, openai.Name: `{"name":"openai"}`, "chat": `{"name":"chat","baseURL":"http://b.example/v1"}`} {
		if _, err := models[name](looprunner.Spec{Goal: "x", Model: json.RawMessage(model), Display: &display}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Without its variable a model says which one it needs, before anything runs.
func TestMissingCredentials(t *testing.T) {
	for name, variable := range map[string]string{"anthropic": "ANTHROPIC_API_KEY", "openai": "OPENAI_API_KEY", "chat": "CHAT_BASE_URL"} {
		_, err := From(Environment{})[name](looprunner.Spec{Goal: "x", Model: json.RawMessage(`{"name":"` + name + `","model":"m"}`)})
		var d *events.DataError
		if !errors.As(err, &d) || d.Code != vendors.CodeNoCredentials || !strings.Contains(d.Message, variable) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A model without a goal, or with a setting that it does not have, is refused.
func TestRefusals(t *testing.T) {
	models := From(Environment{Anthropic: anthropic.Environment{APIKey: "x"}, OpenAI: openai.Environment{APIKey: "x"}})
	for model, want := range map[string]string{
		`{"name":"anthropic","temprature":1}`:                                    `unknown field "temprature"`,
		`{"name":"anthropic","apiKey":"x"}`:                                      "set ANTHROPIC_API_KEY",
		`{"name":"anthropic","tool":"computer_1999"}`:                            "model.tool",
		`{"name":"anthropic","effort":"much"}`:                                   "model.effort",
		`{"name":"anthropic","model":"claude-opus-5-5","thinkingBudget":2000}`:   "model.thinkingBudget: claude-opus-5-5 takes none",
		`{"name":"anthropic","model":"claude-sonnet-4-5","thinkingBudget":9000}`: "model.thinkingBudget: 9000",
		`{"name":"anthropic","model":"claude-opus-5-5","thinking":false}`:        "model.thinking",
		`{"name":"openai","token":"x"}`:                                          "set OPENAI_API_KEY",
		`{"name":"openai","effort":"much"}`:                                      "model.effort",
		`{"name":"openai","acknowledgeSafetyChecks":[""]}`:                       "model.acknowledgeSafetyChecks",
		`{"name":"openai","keepScreenshots":99}`:                                 "model.keepScreenshots",
	} {
		var head struct {
			Name string `json:"name"`
		}
		if err := json.Unmarshal([]byte(model), &head); err != nil {
			t.Fatal(err)
		}
		_, err := models[head.Name](looprunner.Spec{Goal: "x", Model: json.RawMessage(model)})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", model, err, want)
		}
	}
	for _, name := range []string{"anthropic", "openai"} {
		if _, err := models[name](looprunner.Spec{Goal: " ", Model: json.RawMessage(`{"name":"` + name + `"}`)}); err == nil || !strings.HasPrefix(err.Error(), "goal:") {
			t.Errorf("%s without a goal: %v", name, err)
		}
	}
}
