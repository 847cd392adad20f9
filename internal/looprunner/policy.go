package looprunner

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"berth/internal/computer"
	"berth/internal/events"
)

// Priced is a Model that says what its answers are priced by: {name}/{id},
// such as "chat/qwen3-vl", or "" for a model that costs nothing. The price of
// one that does not say is not known.
type Priced interface{ PricedAs() string }

// Prices are what models' tokens cost, by what Priced says.
type Prices map[string]events.LoopPrice

// UnmarshalText reads {"name/id": {"inputPerMillionUsd": 3, "outputPerMillionUsd": 15}, …}.
func (p *Prices) UnmarshalText(text []byte) error {
	type price struct {
		Input  *float64 `json:"inputPerMillionUsd"`
		Output *float64 `json:"outputPerMillionUsd"`
	}
	var read map[string]price
	dec := json.NewDecoder(strings.NewReader(string(text)))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&read); err != nil {
		return fmt.Errorf(`want {"name/id": {"inputPerMillionUsd": …, "outputPerMillionUsd": …}}: %s`, strings.TrimPrefix(err.Error(), "json: "))
	}
	*p = Prices{}
	for _, key := range slices.Sorted(maps.Keys(read)) {
		one := read[key]
		if name, id, ok := strings.Cut(key, "/"); !ok || name == "" || id == "" {
			return fmt.Errorf("%q: want the model's name and its id, such as anthropic/claude-sonnet-5-5", key)
		}
		if one.Input == nil || one.Output == nil || !(*one.Input >= 0) || !(*one.Output >= 0) {
			return fmt.Errorf("%q: needs inputPerMillionUsd and outputPerMillionUsd, neither negative", key)
		}
		(*p)[key] = events.LoopPrice{Model: key, InputPerMillion: *one.Input, OutputPerMillion: *one.Output}
	}
	return nil
}

// of is the price of a loop's model. A loop with a spend limit whose model has
// none is refused.
func (p Prices) of(m Model, limits events.LoopLimits) (*events.LoopPrice, error) {
	priced, ok := m.(Priced)
	if ok && priced.PricedAs() == "" {
		return &events.LoopPrice{}, nil
	}
	key := "this model"
	if ok {
		key = priced.PricedAs()
		if price, known := p[key]; known {
			return &price, nil
		}
	}
	if limits.SpendUSD > 0 {
		return nil, &events.DataError{Code: events.CodeNoPrice,
			Message: fmt.Sprintf("limits.spendUsd: no price is known for %s; name it in MODEL_PRICES_JSON of the loop-runners, or leave the limit out", brief(key))}
	}
	return nil, nil
}

// spend is what the loop's answers have cost so far, by estimate.
func (s *state) spend() float64 { return s.started.Price.Of(s.usage) }

// exhausted is the limit that keeps the model from being asked again, or nil.
// Like strayed and permits it goes by the journal alone, so that every runner
// comes to the same end.
func (s *state) exhausted() *verdict {
	limits := s.started.Start.Limits
	switch {
	case limits.Tokens > 0 && s.usage.InputTokens+s.usage.OutputTokens >= limits.Tokens:
		return &verdict{events.LoopFailed, events.CodeLimit, fmt.Sprintf("limits.tokens: %d are used", limits.Tokens)}
	case limits.SpendUSD > 0 && s.spend() >= limits.SpendUSD:
		return &verdict{events.LoopFailed, events.CodeLimit, fmt.Sprintf("limits.spendUsd: about $%.4f of %v are spent", s.spend(), limits.SpendUSD)}
	case bounded(limits.RepeatedScreens) && s.sameScreens >= *limits.RepeatedScreens && s.screen != "" && s.screen == screenOf(s.obs) && len(s.inbox) == 0:
		return &verdict{events.LoopFailed, events.CodeRepeatedScreen, fmt.Sprintf("limits.repeatedScreens: %d turns in a row saw the same picture", s.sameScreens)}
	}
	return nil
}

// repeats is the limit that keeps the pending actions from being done again.
func (s *state) repeats() *verdict {
	if n := s.started.Start.Limits.RepeatedActions; bounded(n) && s.sameActions > *n {
		return &verdict{events.LoopFailed, events.CodeRepeatedAction, fmt.Sprintf("limits.repeatedActions: the same actions were decided %d times in a row", s.sameActions)}
	}
	return nil
}

func bounded(n *int) bool { return n != nil && *n > 0 }

// countRepeats takes in a decision, before its turn becomes history. A person
// who speaks, or is asked, begins the count anew.
func (s *state) countRepeats(d *events.LoopDecided) {
	if s.shown > 0 || d.NeedsInput != "" {
		s.screen, s.sameScreens, s.sameActions, s.actions = "", 0, 0, nil
	}
	if d.NeedsInput != "" {
		return
	}
	if screen := screenOf(s.obs); screen != "" && screen == s.screen {
		s.sameScreens++
	} else {
		s.screen, s.sameScreens = screen, 1
	}
	switch {
	case len(d.Actions) == 0:
	case reflect.DeepEqual(d.Actions, s.actions):
		s.sameActions++
	default:
		s.actions, s.sameActions = d.Actions, 1
	}
}

// screenOf identifies what an observation shows; "" where it cannot be told.
func screenOf(o *computer.Observation) string {
	if o == nil || o.Screenshot.SHA256 == "" {
		return ""
	}
	return o.Screenshot.SHA256 + " " + o.URL
}

// strayed is the verdict where the sandbox shows a host that it may not show,
// in any of its pages. The model is not told more of it.
func strayed(o *computer.Observation, limits *events.LoopLimits) *verdict {
	if o == nil || len(limits.AllowHosts)+len(limits.DenyHosts) == 0 {
		return nil
	}
	shown := []string{o.URL}
	for _, p := range o.Pages {
		shown = append(shown, p.URL)
	}
	for _, address := range shown {
		if why := limits.CheckShown(address); why != "" {
			return &verdict{events.LoopFailed, events.CodeHostDenied, "the sandbox came to show what it may not: " + why}
		}
	}
	return nil
}

// permits is nil where the limits allow every action of a command, else why
// none of them is sent.
func permits(actions []computer.Action, limits *events.LoopLimits) *computer.Fault {
	for i, a := range actions {
		switch {
		case slices.Contains(limits.DenyActions, a.Type):
			return &computer.Fault{Code: events.CodeActionDenied, Message: fmt.Sprintf("action %d: %s is in limits.denyActions", i, a.Type)}
		case len(limits.AllowActions) > 0 && !slices.Contains(limits.AllowActions, a.Type):
			return &computer.Fault{Code: events.CodeActionDenied, Message: fmt.Sprintf("action %d: %s is not in limits.allowActions", i, a.Type)}
		case a.Type == computer.Open:
			if why := limits.CheckTarget(a.Target); why != "" {
				return &computer.Fault{Code: events.CodeHostDenied, Message: fmt.Sprintf("action %d: %s", i, why)}
			}
		}
	}
	return nil
}
