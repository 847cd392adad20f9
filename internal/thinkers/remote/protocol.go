package remote

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"strings"

	"github.com/nats-io/nats.go"

	"berth/internal/computer"
	"berth/internal/events"
)

// Types of the CloudEvents.
const (
	TypeRequest = "berth.think.request.v1"
	TypeReply   = "berth.think.reply.v1"
)

// Subject is where a thinker is asked.
func Subject(thinker string) string { return "think." + thinker }

// Request is what a thinker is told.
type Request struct {
	Tenant       string               `json:"tenant"`
	Loop         string               `json:"loop"`
	Goal         string               `json:"goal"`
	Step         int                  `json:"step"` // from 1
	Display      computer.Display     `json:"display"`
	Capabilities []string             `json:"capabilities"`
	Observation  computer.Observation `json:"observation"` // screenshot.object is the picture's name in FRAMES
	Dialogs      []computer.Dialog    `json:"dialogs,omitempty"`
	Downloads    []computer.Download  `json:"downloads,omitempty"`
	Picture      *Picture             `json:"picture,omitempty"` // with model.picture
	Last         *Last                `json:"last,omitempty"`    // the turn before, from the second on
	Messages     []string             `json:"messages,omitempty"`
	State        json.RawMessage      `json:"state,omitempty"` // the reply's of the turn before
	Options      json.RawMessage      `json:"options,omitempty"`
}

// Picture is the screenshot itself, made small enough for a message.
type Picture struct {
	MediaType string `json:"mediaType"`
	Width     int    `json:"width"`
	Height    int    `json:"height"`
	Data      []byte `json:"data"` // base64
}

// Last is what was decided in the turn before, and what became of it.
type Last struct {
	Label      string                  `json:"label,omitempty"`
	Actions    []computer.Action       `json:"actions,omitempty"`
	Observe    bool                    `json:"observe,omitempty"`
	NeedsInput string                  `json:"needsInput,omitempty"`
	Outcome    computer.Outcome        `json:"outcome,omitempty"` // of the actions: ok, rejected, failed, unknown
	Error      *computer.Fault         `json:"error,omitempty"`
	Results    []computer.ActionResult `json:"results,omitempty"`
}

// Reply is a thinker's answer: exactly one of actions, observe, needsInput,
// done and failed.
type Reply struct {
	Actions     json.RawMessage   `json:"actions,omitempty"` // of Berth's vocabulary, run in order as one command
	Observe     bool              `json:"observe,omitempty"` // look again, after waitSeconds
	WaitSeconds float64           `json:"waitSeconds,omitempty"`
	NeedsInput  string            `json:"needsInput,omitempty"` // a question to a person; the loop pauses
	Done        bool              `json:"done,omitempty"`
	Failed      *computer.Fault   `json:"failed,omitempty"`
	Label       string            `json:"label,omitempty"`
	State       json.RawMessage   `json:"state,omitempty"`
	Usage       *events.LoopUsage `json:"usage,omitempty"` // nil: not told, which is not nothing
}

// Bounds of a reply.
const (
	maxState = 256 << 10
	maxLabel = 16 << 10
	maxWait  = 300.0
)

// decode reads a reply's message. The error is a sentence that names the field.
func decode(msg *nats.Msg) (Reply, error) {
	var r Reply
	data := msg.Data
	if envelope(msg) {
		e, err := events.Decode(msg.Header, msg.Data)
		if err != nil {
			return r, err
		}
		if e.Type() != TypeReply {
			return r, events.BadInput("type: %q, want %s", e.Type(), TypeReply)
		}
		data = e.Data()
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	err := dec.Decode(&r)
	var te *json.UnmarshalTypeError
	switch {
	case errors.As(err, &te):
		return r, events.BadInput("%s: a JSON %s does not fit here", te.Field, te.Value)
	case err != nil:
		return r, events.BadInput("%s", strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return r, events.BadInput("text after the JSON object")
	}
	return r, r.check()
}

// envelope reports whether a message is a CloudEvent rather than its bare data.
func envelope(msg *nats.Msg) bool {
	for k := range msg.Header {
		if len(k) > 3 && strings.EqualFold(k[:3], "ce-") {
			return true
		}
	}
	var head struct {
		SpecVersion *string `json:"specversion"`
	}
	return json.Unmarshal(msg.Data, &head) == nil && head.SpecVersion != nil
}

func (r *Reply) check() error {
	given := []string{}
	for _, f := range []struct {
		name string
		has  bool
	}{{"actions", len(r.Actions) > 0 && string(r.Actions) != "null"}, {"observe", r.Observe}, {"needsInput", r.NeedsInput != ""}, {"done", r.Done}, {"failed", r.Failed != nil}} {
		if f.has {
			given = append(given, f.name)
		}
	}
	switch {
	case len(given) == 0:
		return events.BadInput("needs one of actions, observe, needsInput, done, failed")
	case len(given) > 1:
		return events.BadInput("%s: only one of them can be decided", strings.Join(given, ", "))
	case !(r.WaitSeconds >= 0 && r.WaitSeconds <= maxWait):
		return events.BadInput("waitSeconds: %v is not in 0 to %v", r.WaitSeconds, maxWait)
	case r.WaitSeconds > 0 && !r.Observe:
		return events.BadInput("waitSeconds: only with observe")
	case r.Failed != nil && (r.Failed.Code == "" || r.Failed.Message == ""):
		return events.BadInput("failed: needs a code and a message")
	case len(r.Label) > maxLabel || len(r.NeedsInput) > maxLabel:
		return events.BadInput("label, needsInput: at most %d bytes", maxLabel)
	case len(r.State) > maxState:
		return events.BadInput("state: %d bytes, at most %d", len(r.State), maxState)
	case r.Usage != nil && (r.Usage.InputTokens < 0 || r.Usage.OutputTokens < 0):
		return events.BadInput("usage: negative")
	}
	return nil
}
