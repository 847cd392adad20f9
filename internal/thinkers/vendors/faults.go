package vendors

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"berth/internal/computer"
	"berth/internal/events"
)

// Codes that a loop ends with for its model's sake, beside
// events.CodeModelFailed.
const (
	CodeNoCredentials  = "noCredentials"  // the environment has no key; also the code of a rejected start
	CodeBadCredentials = "badCredentials" // the vendor refused the key, or what it may do
	CodeRateLimited    = "rateLimited"    // 429 to the last try
	CodeUnavailable    = "modelUnavailable"
	CodeRefused        = "modelRefused"   // the model or its vendor's policy declines
	CodeRejected       = "modelRejected"  // the vendor calls the request invalid
	CodeNoUsage        = "noUsage"        // a limit counts tokens, and the answer does not say them
	CodeMalformed      = "modelMalformed" // no usable answer several times in a row
	CodeContextTooLong = "contextTooLong"
)

// NoCredentials is the fault of a missing variable.
func NoCredentials(model, variable string) error {
	return &events.DataError{Code: CodeNoCredentials,
		Message: fmt.Sprintf("model %q needs %s in the environment of every process that runs loops", model, variable)}
}

// APIError is a vendor's answer that is no answer.
type APIError struct {
	Vendor  string
	Status  int    // of HTTP; 200: reported within a stream; 0: no answer at all
	Kind    string // the vendor's own word: overloaded_error, context_length_exceeded …
	Message string
	Cut     bool // the stream ended before the answer did
}

func (e *APIError) Error() string {
	if e.Cut || e.Status == 0 {
		return e.Vendor + ": " + e.Message
	}
	return fmt.Sprintf("%s: %d %s: %s", e.Vendor, e.Status, e.Kind, e.Message)
}

// TooLong reports that the conversation does not fit the model's context or
// the vendor's request.
func (e *APIError) TooLong() bool {
	if e.Status == http.StatusRequestEntityTooLarge {
		return true
	}
	text := strings.ToLower(e.Kind + " " + e.Message)
	for _, s := range []string{"prompt is too long", "context_length_exceeded", "context length", "context window", "request_too_large", "exceeds the maximum size", "context size", "exceed_context_size"} {
		if strings.Contains(text, s) {
			return true
		}
	}
	return false
}

// passes: the same may succeed in a while.
func (e *APIError) passes() bool {
	switch {
	case e.Cut:
		return true
	case e.Status == http.StatusOK:
		kind := strings.ToLower(e.Kind)
		return strings.Contains(kind, "overloaded") || strings.Contains(kind, "rate_limit") || strings.Contains(kind, "server_error") ||
			strings.Contains(kind, "api_error") || strings.Contains(kind, "timeout")
	}
	return false // the SDK has tried again already
}

// Fault is what the loop ends with.
func (e *APIError) Fault() *computer.Fault {
	code := CodeRejected
	kind := strings.ToLower(e.Kind)
	switch {
	case e.TooLong():
		code = CodeContextTooLong
	case e.Status == http.StatusUnauthorized || e.Status == http.StatusForbidden:
		code = CodeBadCredentials
	case e.Status == http.StatusTooManyRequests || strings.Contains(kind, "rate_limit"):
		code = CodeRateLimited
	case e.Cut || e.Status == 0 || e.Status >= 500 || e.Status == http.StatusRequestTimeout || e.passes():
		code = CodeUnavailable
	case strings.Contains(kind, "policy") || strings.Contains(kind, "content_filter"):
		code = CodeRefused
	}
	return &computer.Fault{Code: code, Message: clip(e.Error(), 1000)}
}

// Pauses between the tries of Again: a growing pause from First to Most.
type Pauses struct{ First, Most time.Duration }

// DefaultPauses are those of the vendors' SDKs.
var DefaultPauses = Pauses{500 * time.Millisecond, 8 * time.Second}

// AnswerTimeout is how long one answer may take, to its end.
const AnswerTimeout = 20 * time.Minute

// LongestWait is the longest Retry-After that is waited for.
const LongestWait = 2 * time.Minute

// Again calls ask until it succeeds, fails for good, or has failed in passing
// retries times. Each call has AnswerTimeout. The error is ask's last, or ctx's
// cause.
func Again(ctx context.Context, retries int, p Pauses, ask func(context.Context) error) error {
	pause := p.First
	for attempt := 0; ; attempt++ {
		call, cancel := context.WithTimeout(ctx, AnswerTimeout)
		err := ask(call)
		cancel()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		var api *APIError
		if err == nil || !errors.As(err, &api) || !api.passes() || attempt >= retries {
			return err
		}
		t := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			t.Stop()
			return context.Cause(ctx)
		case <-t.C:
		}
		pause = min(2*pause, p.Most)
	}
}

// Final makes the error of a call one that the loop ends with.
func Final(err error) error {
	var api *APIError
	if errors.As(err, &api) {
		return api.Fault()
	}
	return err
}

// clip keeps a vendor's sentence short enough for a journal.
func clip(s string, limit int) string {
	if len(s) > limit {
		return strings.ToValidUTF8(s[:limit], "") + "…"
	}
	return s
}

// Counted returns a *computer.Fault where an answer says nothing of its tokens
// and a limit of the loop counts them: such a limit would hold nothing.
func Counted(limits events.LoopLimits, u events.LoopUsage) error {
	if u != (events.LoopUsage{}) || limits.Tokens == 0 && limits.SpendUSD == 0 {
		return nil
	}
	return &computer.Fault{Code: CodeNoUsage, Message: "limits.tokens or limits.spendUsd is set, and the answer says nothing of its tokens; have the service report its usage, or leave the limit out"}
}
