package chat

import (
	"encoding/json"
	"net/http"
	"net/url"
	"slices"
	"strings"

	sdk "github.com/openai/openai-go/v3"

	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/thinkers/openai"
	"berth/internal/thinkers/screen"
	"berth/internal/thinkers/vendors"
)

// Name is the model's name in a start request.
const Name = "chat"

// The environment variables.
const (
	URLVariable   = "CHAT_BASE_URL"
	KeyVariable   = "CHAT_API_KEY"
	ModelVariable = "CHAT_MODEL"
)

// The ways of giving coordinates.
const (
	Pixels     = "pixels"
	Normalized = "normalized"
)

const (
	defaultMaxTokens = 2048
	defaultEdge      = 1280
	maxImage         = 4 << 20 // bytes
	// maxFaults is how many answers in a row may come to nothing.
	maxFaults = 3
)

// Environment is what a process has for this model. It holds a secret.
type Environment struct {
	BaseURLs []string // the servers that there are; the first is the default
	APIKey   string   // "": the servers want none
	Model    string   // where the loop names none
	HTTP     *http.Client
	Pauses   vendors.Pauses
}

// settings is the `model` object.
type settings struct {
	vendors.Settings
	BaseURL     string   `json:"baseURL"`
	Coordinates string   `json:"coordinates"`
	Temperature *float64 `json:"temperature"`
}

func parse(raw json.RawMessage, env Environment) (settings, error) {
	var s settings
	if err := vendors.Decode(raw, &s, KeyVariable); err != nil {
		return s, err
	}
	if s.Model == "" && env.Model == "" {
		return s, events.BadInput("model.model: needs the id of a model, here or in %s", ModelVariable)
	}
	if err := s.Check(env.Model, defaultMaxTokens, defaultEdge); err != nil {
		return s, err
	}
	switch s.Coordinates {
	case "":
		s.Coordinates = Pixels
	case Pixels, Normalized:
	default:
		return s, events.BadInput("model.coordinates: %s or %s", Pixels, Normalized)
	}
	if t := s.Temperature; t != nil && !(*t >= 0 && *t <= 2) {
		return s, events.BadInput("model.temperature: 0 to 2")
	}
	if len(env.BaseURLs) == 0 {
		return s, vendors.NoCredentials(Name, URLVariable)
	}
	for _, u := range env.BaseURLs {
		if parsed, err := url.Parse(u); err != nil || parsed.Host == "" || (parsed.Scheme != "http" && parsed.Scheme != "https") {
			return s, events.BadInput("%s, in the environment: one of its entries is no http or https URL", URLVariable)
		}
	}
	if s.BaseURL == "" {
		s.BaseURL = env.BaseURLs[0]
	}
	if !slices.Contains(env.BaseURLs, s.BaseURL) {
		return s, &events.DataError{Code: events.CodeForbidden, Message: "model.baseURL: not among the servers of " + URLVariable}
	}
	return s, nil
}

// New returns the looprunner.ModelFactory for an environment.
func New(env Environment) looprunner.ModelFactory {
	return func(spec looprunner.Spec) (looprunner.Model, error) {
		s, err := parse(spec.Model, env)
		if err != nil {
			return nil, err
		}
		if strings.TrimSpace(spec.Goal) == "" {
			return nil, events.BadInput("goal: the model %q needs one", Name)
		}
		if env.Pauses == (vendors.Pauses{}) {
			env.Pauses = vendors.DefaultPauses
		}
		return &model{settings: s, limits: spec.Limits, env: env, service: sdk.NewChatCompletionService(openai.Options(s.BaseURL, env.APIKey, env.HTTP, *s.Retries)...),
			gallery: screen.NewGallery(screen.Limits{Edge: s.ImageEdge, Bytes: maxImage}, vendors.MaxPictures+4)}, nil
	}
}
