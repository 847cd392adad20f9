package vendors

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode"

	"berth/internal/computer"
	"berth/internal/events"
)

// Bounds of the settings.
const (
	MinTokens       = 256
	MaxTokens       = 128_000
	MaxPictures     = 20 // in one request: above it vendors hold pictures to smaller sizes
	MinEdge         = 320
	MaxEdge         = 4096
	MaxInstructions = 16 << 10 // bytes
	MaxRetries      = 20
	maxModelID      = 200
)

// Settings are the fields that every vendor's `model` object has.
type Settings struct {
	Name            string          `json:"name"`
	Model           string          `json:"model"`           // the vendor's id of the model
	MaxTokens       int64           `json:"maxTokens"`       // of one answer
	KeepScreenshots int             `json:"keepScreenshots"` // the newest, that older ones are dropped down to
	ImageEdge       int             `json:"imageEdge"`       // longer side of a picture that is sent
	Instructions    string          `json:"instructions"`    // added to the system prompt
	Retries         *int            `json:"retries"`         // of one call, after errors that pass
	Allow           []computer.Type `json:"allow"`           // actions beside the usual ones
	Deny            []computer.Type `json:"deny"`            // actions that the model may not use
}

// Check fills the defaults and returns an *events.DataError that names the
// first field at fault.
func (s *Settings) Check(model string, maxTokens int64, edge int) error {
	if s.Model == "" {
		s.Model = model
	}
	if s.Model == "" {
		return events.BadInput("model.model: needs the id of a model")
	}
	if len(s.Model) > maxModelID || strings.ContainsFunc(s.Model, unicode.IsControl) {
		return events.BadInput("model.model: at most %d bytes without control characters", maxModelID)
	}
	if s.MaxTokens == 0 {
		s.MaxTokens = maxTokens
	}
	if s.KeepScreenshots == 0 {
		s.KeepScreenshots = 5
	}
	if s.ImageEdge == 0 {
		s.ImageEdge = edge
	}
	if s.Retries == nil {
		n := 5
		s.Retries = &n
	}
	for _, f := range []struct {
		name        string
		v, low, top int64
	}{
		{"maxTokens", s.MaxTokens, MinTokens, MaxTokens},
		{"keepScreenshots", int64(s.KeepScreenshots), 1, MaxPictures},
		{"imageEdge", int64(s.ImageEdge), MinEdge, MaxEdge},
		{"retries", int64(*s.Retries), 0, MaxRetries},
	} {
		if f.v < f.low || f.v > f.top {
			return events.BadInput("model.%s: %d is not in %d to %d", f.name, f.v, f.low, f.top)
		}
	}
	if len(s.Instructions) > MaxInstructions {
		return &events.DataError{Code: events.CodeTooLarge, Message: fmt.Sprintf("model.instructions: %d bytes, at most %d", len(s.Instructions), MaxInstructions)}
	}
	for _, list := range []struct {
		name  string
		types []computer.Type
	}{{"allow", s.Allow}, {"deny", s.Deny}} {
		for _, t := range list.types {
			if !slices.Contains(computer.Types(), t) {
				return events.BadInput("model.%s: unknown action %q", list.name, brief(string(t)))
			}
		}
	}
	return nil
}

// Decode reads a `model` object into v, whose fields are all that it may have.
// variable is where the credential belongs, named where one is found. The
// error is an *events.DataError.
func Decode(raw json.RawMessage, v any, variable string) error {
	var fields map[string]any
	if err := json.Unmarshal(raw, &fields); err != nil {
		return events.BadInput("model: not a JSON object")
	}
	if path := credential("model", fields); path != "" {
		return events.BadInput("%s: looks like a credential, which has no place in a request; %s", path, where(variable))
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	err := dec.Decode(v)
	var te *json.UnmarshalTypeError
	switch {
	case errors.As(err, &te):
		return events.BadInput("model.%s: a JSON %s does not fit here", te.Field, te.Value)
	case err != nil:
		return events.BadInput("model: %s", strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return events.BadInput("model: text after the object")
	}
	return nil
}

func where(variable string) string {
	if variable == "" {
		return "this model needs none"
	}
	return "set " + variable + " for the process that runs loops"
}

// credential returns the path of the first field that looks like one.
func credential(path string, v any) string {
	switch v := v.(type) {
	case map[string]any:
		keys := make([]string, 0, len(v))
		for k := range v {
			keys = append(keys, k)
		}
		slices.Sort(keys)
		for _, k := range keys {
			at := path + "." + brief(k)
			if secretName(k) {
				return at
			}
			if found := credential(at, v[k]); found != "" {
				return found
			}
		}
	case []any:
		for i, item := range v {
			if found := credential(fmt.Sprintf("%s[%d]", path, i), item); found != "" {
				return found
			}
		}
	case string:
		if secretText(v) {
			return path
		}
	}
	return ""
}

func secretName(key string) bool {
	name := strings.Map(func(r rune) rune {
		if r == '-' || r == '_' || r == ' ' || r == '.' {
			return -1
		}
		return unicode.ToLower(r)
	}, key)
	for _, word := range []string{"apikey", "accesskey", "privatekey", "secret", "passw", "authorization", "bearer", "credential", "cookie"} {
		if strings.Contains(name, word) {
			return true
		}
	}
	return name == "key" || name == "auth" || name == "headers" || strings.HasSuffix(name, "token")
}

func secretText(s string) bool {
	s = strings.TrimSpace(s)
	for _, prefix := range []string{"sk-", "sk_", "Bearer ", "AIza", "xoxb-", "ghp_", "-----BEGIN"} {
		if strings.HasPrefix(s, prefix) && len(s) > len(prefix)+8 {
			return true
		}
	}
	return false
}

// brief keeps echoed input short.
func brief(s string) string {
	if len(s) > 80 {
		return strings.ToValidUTF8(s[:80], "") + "…"
	}
	return s
}
