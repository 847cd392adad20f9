package anthropic

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"

	sdk "github.com/anthropics/anthropic-sdk-go"
	"github.com/anthropics/anthropic-sdk-go/option"

	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/thinkers/screen"
	"berth/internal/thinkers/vendors"
)

// Name is the model's name in a start request.
const Name = "anthropic"

// Variable is the environment variable of the key.
const Variable = "ANTHROPIC_API_KEY"

const (
	defaultModel     = sdk.ModelClaudeSonnet5_5
	defaultMaxTokens = 8192
	minBudget        = 1024
	// maxFaults is how many answers in a row may come to nothing.
	maxFaults = 3
)

// Environment is what a process has for this model. It holds a secret.
type Environment struct {
	APIKey  string
	BaseURL string         // "": Anthropic's
	HTTP    *http.Client   // nil: the SDK's
	Pauses  vendors.Pauses // zero: the usual ones
}

// settings is the `model` object.
type settings struct {
	vendors.Settings
	Tool           string `json:"tool"`           // overrides the version that the model's name says
	ThinkingBudget int64  `json:"thinkingBudget"` // tokens, for models that take a budget
	Thinking       *bool  `json:"thinking"`       // false: not, where the model allows it
	Effort         string `json:"effort"`
}

var efforts = []string{"low", "medium", "high", "xhigh", "max"}

func parse(raw json.RawMessage) (settings, profile, error) {
	var s settings
	if err := vendors.Decode(raw, &s, Variable); err != nil {
		return s, profile{}, err
	}
	if err := s.Check(defaultModel, defaultMaxTokens, vendors.MaxEdge); err != nil {
		return s, profile{}, err
	}
	p := profileOf(s.Model)
	if s.Tool != "" {
		if _, ok := header[s.Tool]; !ok {
			return s, p, events.BadInput("model.tool: known are %s, %s, %s, %s", Toolset20260801, Computer20251124, Computer20250124, Computer20241022)
		}
		p.tool = s.Tool
	}
	if s.Effort != "" && !slices.Contains(efforts, s.Effort) {
		return s, p, events.BadInput("model.effort: one of %s", strings.Join(efforts, ", "))
	}
	switch {
	case s.ThinkingBudget == 0:
	case !p.budgeted:
		return s, p, events.BadInput("model.thinkingBudget: %s takes none; it thinks as model.effort says", s.Model)
	case s.ThinkingBudget < minBudget || s.ThinkingBudget >= s.MaxTokens:
		return s, p, events.BadInput("model.thinkingBudget: %d is not in %d to below maxTokens (%d)", s.ThinkingBudget, minBudget, s.MaxTokens)
	}
	if s.Thinking != nil && !*s.Thinking && (p.binds || s.ThinkingBudget > 0) {
		return s, p, events.BadInput("model.thinking: %s cannot do without, or thinkingBudget says otherwise", s.Model)
	}
	p.limits.Edge = min(p.limits.Edge, s.ImageEdge)
	return s, p, nil
}

// New returns the looprunner.ModelFactory for an environment.
func New(env Environment) looprunner.ModelFactory {
	return func(spec looprunner.Spec) (looprunner.Model, error) {
		s, p, err := parse(spec.Model)
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
		// Nothing of the environment but what is meant for it: the SDK would look
		// for profiles and other credentials too.
		opts := []option.RequestOption{option.WithoutEnvironmentDefaults(), option.WithAPIKey(env.APIKey), option.WithMaxRetries(*s.Retries)}
		if env.BaseURL != "" {
			opts = append(opts, option.WithBaseURL(env.BaseURL))
		}
		if env.HTTP != nil {
			opts = append(opts, option.WithHTTPClient(env.HTTP))
		}
		return &model{settings: s, limits: spec.Limits, profile: p, env: env, client: sdk.NewClient(opts...),
			gallery: screen.NewGallery(p.limits, vendors.MaxPictures+4)}, nil
	}
}

// thinking is the request's thinking configuration and the beta header that it
// needs.
func (m *model) thinking() (sdk.BetaThinkingConfigParamUnion, sdk.AnthropicBeta) {
	switch {
	case m.settings.ThinkingBudget > 0:
		return sdk.BetaThinkingConfigParamUnion{OfEnabled: &sdk.BetaThinkingConfigEnabledParam{BudgetTokens: m.settings.ThinkingBudget}}, ""
	case m.settings.Thinking != nil && !*m.settings.Thinking && m.profile.thinks:
		off := sdk.NewBetaThinkingConfigDisabledParam()
		return sdk.BetaThinkingConfigParamUnion{OfDisabled: &off}, ""
	case m.profile.binds:
		return sdk.BetaThinkingConfigParamUnion{OfAdaptive: &sdk.BetaThinkingConfigAdaptiveParam{Display: sdk.BetaThinkingConfigAdaptiveDisplaySummarized,
				BlockBinding: sdk.BetaThinkingBlockBindingParam{PrefixMismatchBehavior: sdk.BetaThinkingPrefixMismatchBehaviorDropBlock}}},
			sdk.AnthropicBetaThinkingBindingControls2026_08_01
	case m.profile.thinks:
		return sdk.BetaThinkingConfigParamUnion{OfAdaptive: &sdk.BetaThinkingConfigAdaptiveParam{Display: sdk.BetaThinkingConfigAdaptiveDisplaySummarized}}, ""
	}
	return sdk.BetaThinkingConfigParamUnion{}, ""
}
