// Package httpapi is what the providers that speak HTTP share: reading an answer
// within bounds, and turning what goes wrong on the way into the errors of package
// providers.
package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"berth/internal/providers"
)

// MaxRetryAfter bounds what a 429 may ask for.
const MaxRetryAfter = 5 * time.Minute

// ErrTooLong says that an answer has more bytes than its reader takes.
var ErrTooLong = errors.New("the answer is too long")

// ReadAll reads a body of at most limit bytes and closes it. Of a longer one it
// returns the beginning, and ErrTooLong.
func ReadAll(resp *http.Response, limit int64) ([]byte, error) {
	raw, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if closeErr := resp.Body.Close(); err == nil && closeErr != nil {
		err = closeErr
	}
	if err == nil && int64(len(raw)) > limit {
		return raw[:limit], ErrTooLong
	}
	return raw, err
}

// Fault explains an error of the network. What the caller ended is the caller's.
func Fault(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		return fmt.Errorf("%w: %w", err, providers.ErrTimeout)
	}
	return fmt.Errorf("%w: %w", err, providers.ErrUnavailable)
}

// RetryAfter reads seconds or a date (RFC 9110, 10.2.3).
func RetryAfter(text string) time.Duration {
	d := time.Second
	if n, err := strconv.Atoi(text); err == nil {
		d = time.Duration(min(max(n, 0), int(MaxRetryAfter/time.Second))) * time.Second
	} else if at, err := http.ParseTime(text); err == nil {
		d = time.Until(at)
	}
	return min(max(d, 0), MaxRetryAfter)
}

// Decode reads an answer of JSON. Fields that it does not know are a newer
// version's.
func Decode(raw []byte, into any) error {
	if err := json.Unmarshal(raw, into); err != nil {
		return fmt.Errorf("the answer is not what the API describes: %w: %w", err, providers.ErrUnavailable)
	}
	return nil
}
