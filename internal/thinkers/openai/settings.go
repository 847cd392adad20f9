package openai

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"

	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/responses"
	"github.com/openai/openai-go/v3/shared"

	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/thinkers/screen"
	"berth/internal/thinkers/vendors"
)

// Name is the model's name in a start request.
const Name = "openai"

// Variable is the environment variable of the key.
const Variable = "OPENAI_API_KEY"

const (
	defaultModel     = shared.ChatModelGPT5_5
	defaultMaxTokens = 8192
	// defaultEdge is what OpenAI recommends where pictures are made smaller:
	// 1440×900 or 1600×900.
	defaultEdge = 1600
	maxImage    = 8 << 20 // bytes
	// maxFaults is how many answers in a row may come to nothing.
	maxFaults = 3
)

// Environment is what a process has for this model. It holds a secret.
type Environment struct {
	APIKey  string
	BaseURL string         // "": OpenAI's
	HTTP    *http.Client   // nil: the default one
	Pauses  vendors.Pauses // zero: the usual ones
}

// settings is the `model` object.
type settings struct {
	vendors.Settings
	Effort                  string   `json:"effort"`
	AcknowledgeSafetyChecks []string `json:"acknowledgeSafetyChecks"` // codes
}

var efforts = []string{"none", "minimal", "low", "medium", "high", "xhigh"}

// preview reports a model that has the older tool.
func (s settings) preview() bool { return strings.Contains(s.Model, "computer-use-preview") }

func parse(raw json.RawMessage) (settings, error) {
	var s settings
	if err := vendors.Decode(raw, &s, Variable); err != nil {
		return s, err
	}
	if err := s.Check(defaultModel, defaultMaxTokens, defaultEdge); err != nil {
		return s, err
	}
	if s.Effort != "" && !slices.Contains(efforts, s.Effort) {
		return s, events.BadInput("model.effort: one of %s", strings.Join(efforts, ", "))
	}
	for _, code := range s.AcknowledgeSafetyChecks {
		if code == "" || len(code) > 100 {
			return s, events.BadInput("model.acknowledgeSafetyChecks: a code has 1 to 100 bytes")
		}
	}
	return s, nil
}

// Options are those of a client of OpenAI's SDK that takes nothing from the
// environment by itself.
func Options(base, key string, client *http.Client, retries int) []option.RequestOption {
	if client == nil {
		client = http.DefaultClient
	}
	opts := []option.RequestOption{option.WithEnvironmentProduction(), option.WithHTTPClient(client), option.WithMaxRetries(retries), option.WithMaxRetryDelay(vendors.LongestWait)}
	if key != "" {
		opts = append(opts, option.WithAPIKey(key))
	}
	if base != "" {
		opts = append(opts, option.WithBaseURL(base))
	}
	return opts
}

// New returns the looprunner.ModelFactory for an environment.
func New(env Environment) looprunner.ModelFactory {
	return func(spec looprunner.Spec) (looprunner.Model, error) {
		s, err := parse(spec.Model)
		if err != nil {
			return nil, err
		}
		if strings.TrimSpace(spec.Goal) == "" {
			return nil, events.BadInput("goal: the model %q needs one", Name)
		}
		if env.APIKey == "" {
			return nil, vendors.NoCredentials(Name, Variable)
		}
		if env.Pauses == (vendors.Pauses{}) {
			env.Pauses = vendors.DefaultPauses
		}
		return &model{settings: s, limits: spec.Limits, env: env, service: responses.NewResponseService(Options(env.BaseURL, env.APIKey, env.HTTP, *s.Retries)...),
			gallery: screen.NewGallery(screen.Limits{Edge: s.ImageEdge, Bytes: maxImage}, vendors.MaxPictures+4)}, nil
	}
}
