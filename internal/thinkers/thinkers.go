// Package thinkers says which models this build has: what a loop-runner can
// let think, by the name that a loop.start request gives.
//
// Their credentials come from the environment, read once per process and then
// removed from it, so that no browser or program that is started later has
// them. A model whose variable is missing is there all the same: a loop that
// names it is rejected with the code noCredentials, and the message names the
// variable. docs/models.md lists the variables.
package thinkers

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"github.com/caarlos0/env/v11"

	"berth/internal/looprunner"
	"berth/internal/looprunner/script"
	"berth/internal/thinkers/anthropic"
	"berth/internal/thinkers/chat"
	"berth/internal/thinkers/openai"
	"berth/internal/thinkers/recorded"
	"berth/internal/thinkers/remote"
)

// Environment is what the models of a process have. It holds secrets.
type Environment struct {
	Anthropic anthropic.Environment
	OpenAI    openai.Environment
	Chat      chat.Environment
}

// variables are the environment variables of the models.
type variables struct {
	AnthropicKey string   `env:"ANTHROPIC_API_KEY,unset"`
	AnthropicURL string   `env:"ANTHROPIC_BASE_URL"`
	OpenAIKey    string   `env:"OPENAI_API_KEY,unset"`
	OpenAIURL    string   `env:"OPENAI_BASE_URL"`
	ChatKey      string   `env:"CHAT_API_KEY,unset"`
	ChatURLs     []string `env:"CHAT_BASE_URL"` // a list with commas; the first is the default
	ChatModel    string   `env:"CHAT_MODEL"`
}

// read takes the variables out of the process's environment. What fails here
// is a field's type, which no value of theirs can bring about.
var read = sync.OnceValues(func() (Environment, error) {
	var v variables
	if err := env.Parse(&v); err != nil {
		return Environment{}, fmt.Errorf("environment of the models: %w", err)
	}
	for i, u := range v.ChatURLs {
		v.ChatURLs[i] = strings.TrimSpace(u)
	}
	return Environment{
		Anthropic: anthropic.Environment{APIKey: strings.TrimSpace(v.AnthropicKey), BaseURL: v.AnthropicURL},
		OpenAI:    openai.Environment{APIKey: strings.TrimSpace(v.OpenAIKey), BaseURL: v.OpenAIURL},
		Chat:      chat.Environment{BaseURLs: v.ChatURLs, APIKey: strings.TrimSpace(v.ChatKey), Model: v.ChatModel},
	}, nil
})

// All returns the models by name, with the environment of this process. The
// map is the caller's.
func All() map[string]looprunner.ModelFactory {
	e, err := read()
	if err != nil { // every model that needs a key says that it has none
		return From(Environment{})
	}
	return From(e)
}

// From returns the models by name, with an environment of the caller's.
func From(e Environment) map[string]looprunner.ModelFactory {
	return map[string]looprunner.ModelFactory{
		script.Name:    script.New,
		anthropic.Name: anthropic.New(e.Anthropic),
		openai.Name:    openai.New(e.OpenAI),
		chat.Name:      chat.New(e.Chat),
		remote.Name:    remote.New,
		recorded.Name:  recorded.New,
	}
}

// Config is what operators say of the models beside their credentials. Berth
// brings no prices of its own: those of vendors change, and differ by contract.
type Config struct {
	PricesJSON string `env:"MODEL_PRICES_JSON"` // what tokens cost; see looprunner.Prices
}

// Prices reads the prices; the error names the variable.
func (c Config) Prices() (looprunner.Prices, error) {
	var p looprunner.Prices
	if strings.TrimSpace(c.PricesJSON) == "" {
		return p, nil
	}
	if err := p.UnmarshalText([]byte(c.PricesJSON)); err != nil {
		return nil, fmt.Errorf("MODEL_PRICES_JSON: %w", err)
	}
	return p, nil
}

// EnvironmentHelp describes what models read, in a program's usage.
const EnvironmentHelp = `  ANTHROPIC_API_KEY, ANTHROPIC_BASE_URL, OPENAI_API_KEY, OPENAI_BASE_URL
  CHAT_BASE_URL, CHAT_API_KEY, CHAT_MODEL  servers of chat completions, comma list; their key; the default model
  MODEL_PRICES_JSON    {"anthropic/claude-…": {"inputPerMillionUsd": …, "outputPerMillionUsd": …}, …}, for limits.spendUsd
`

// Names lists the models in alphabetical order.
func Names() []string { return slices.Sorted(maps.Keys(From(Environment{}))) }
