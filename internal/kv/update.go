package kv

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Errors that callers branch on.
var (
	// ErrNotFound: the key has no value.
	ErrNotFound = errors.New("no such record")
	// ErrUnchanged is returned by a function handed to Update to stop without
	// a write; Update then returns the present value and no error.
	ErrUnchanged = errors.New("unchanged")
)

// callTimeout bounds one round trip, so that a lost answer is read back soon.
const callTimeout = 5 * time.Second

// Get reads one record through the stream's leader.
func Get[T any](ctx context.Context, b jetstream.KeyValue, key string) (T, uint64, error) {
	var v T
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	entry, err := b.Get(ctx, key)
	if errors.Is(err, jetstream.ErrKeyNotFound) || errors.Is(err, jetstream.ErrKeyDeleted) {
		return v, 0, fmt.Errorf("%s: %w", key, ErrNotFound)
	}
	if err != nil {
		return v, 0, fmt.Errorf("read %s: %w", key, err)
	}
	if v, err = Decode[T](entry); err != nil {
		return v, 0, err
	}
	return v, entry.Revision(), nil
}

// Update changes a record by compare-and-set until it succeeds: fn gets the
// present value (the zero value and revision 0 where there is none) and edits
// it in place. fn may be called several times and must recognise its own
// earlier success, for an acknowledgement can be lost. Its error ends Update
// and is returned, ErrUnchanged as nil.
func Update[T any](ctx context.Context, b jetstream.KeyValue, key string, fn func(v *T, revision uint64) error) (T, uint64, error) {
	for attempt := 0; ; attempt++ {
		v, rev, err := Get[T](ctx, b, key)
		if err != nil && !errors.Is(err, ErrNotFound) {
			if !retryable(ctx, err) {
				return v, 0, err
			}
			if err := backoff(ctx, attempt); err != nil {
				return v, 0, err
			}
			continue
		}
		if err := fn(&v, rev); errors.Is(err, ErrUnchanged) {
			return v, rev, nil
		} else if err != nil {
			return v, rev, err
		}
		next, err := Put(ctx, b, key, v, rev)
		if err == nil {
			return v, next, nil
		}
		if !errors.Is(err, ErrConflict) && !retryable(ctx, err) {
			return v, rev, err
		}
		if err := backoff(ctx, attempt); err != nil {
			return v, rev, err
		}
	}
}

// ErrConflict says that the record is at another revision than expected.
var ErrConflict = errors.New("record has changed")

// Put writes v over exactly the given revision (0: the key has no value). On
// ErrConflict somebody else wrote, or this very write succeeded before and its
// acknowledgement was lost: read again to know. Any other error leaves open
// whether the write happened.
func Put[T any](ctx context.Context, b jetstream.KeyValue, key string, v T, revision uint64) (uint64, error) {
	raw, err := json.Marshal(v)
	if err != nil {
		return 0, fmt.Errorf("encode %s: %w", key, err)
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var next uint64
	if revision == 0 {
		next, err = b.Create(ctx, key, raw)
	} else {
		next, err = b.Update(ctx, key, raw, revision)
	}
	switch {
	case err == nil:
		return next, nil
	case errors.Is(err, jetstream.ErrKeyExists), isWrongSequence(err):
		return 0, fmt.Errorf("write %s over revision %d: %w", key, revision, ErrConflict)
	default:
		return 0, fmt.Errorf("write %s: %w", key, err)
	}
}

// isWrongSequence recognises a failed expectation; single and replicated
// streams word it differently.
func isWrongSequence(err error) bool {
	if errors.Is(err, jetstream.ErrKeyRevisionMismatch) {
		return true
	}
	var api *jetstream.APIError
	if !errors.As(err, &api) {
		return false
	}
	return api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence || api.ErrorCode == jsErrCodeWrongLastSequenceConstant
}

// jsErrCodeWrongLastSequenceConstant is JSStreamWrongLastSequenceConstantErr,
// which replicated streams answer.
const jsErrCodeWrongLastSequenceConstant jetstream.ErrorCode = 10164

// retryable: the caller still wants it, and the bus may answer next time.
func retryable(ctx context.Context, err error) bool {
	if ctx.Err() != nil {
		return false
	}
	var syntax *json.SyntaxError
	var typ *json.UnmarshalTypeError
	return !errors.As(err, &syntax) && !errors.As(err, &typ)
}

// backoff waits 1 ms doubling to 250 ms, with jitter.
func backoff(ctx context.Context, attempt int) error {
	d := min(time.Millisecond<<min(attempt, 8), 250*time.Millisecond)
	d = d/2 + rand.N(d/2+1)
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// Decode reads a record from an entry.
func Decode[T any](entry jetstream.KeyValueEntry) (T, error) {
	var v T
	if err := json.Unmarshal(entry.Value(), &v); err != nil {
		return v, fmt.Errorf("read %s of %s: %w", entry.Key(), entry.Bucket(), err)
	}
	return v, nil
}

// Each hands over the records whose keys match a filter, as they are now, in
// the order in which they were last written.
func Each[T any](ctx context.Context, b jetstream.KeyValue, filter string, take func(key string, v T)) error {
	w, err := b.Watch(ctx, filter, jetstream.IgnoreDeletes())
	if err != nil {
		return fmt.Errorf("read %s: %w", b.Bucket(), err)
	}
	defer func() { _ = w.Stop() }() // what it gave is complete
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case entry, ok := <-w.Updates():
			if !ok {
				return fmt.Errorf("read %s: the connection was closed", b.Bucket())
			}
			if entry == nil {
				return nil
			}
			v, err := Decode[T](entry)
			if err != nil {
				return err
			}
			take(entry.Key(), v)
		}
	}
}
