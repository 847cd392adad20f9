package fleet

import (
	"context"
	"errors"
	"fmt"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/providers"
)

// errorOf gives a fault the error of the package providers that its code
// stands for; nil for none.
func errorOf(f *computer.Fault) error {
	if f == nil {
		return nil
	}
	var err error
	switch f.Code {
	case events.CodeBusy, events.CodeDeadline:
		return fmt.Errorf("%w: %s", &providers.RateLimitError{RetryAfter: busyAfter}, f.Message)
	case events.CodeNotFound, events.CodeEnded, events.CodeNotReady, events.CodeWrongServer:
		err = providers.ErrNotFound
	case events.CodeVMIDInUse:
		err = providers.ErrConflict
	case events.CodePaused:
		err = providers.ErrPaused
	case events.CodeFenceStale:
		err = providers.ErrFenceStale
	case events.CodeUnsupported:
		err = providers.ErrUnsupported
	case events.CodeBadInput, events.CodeUnknownKey, events.CodeOutOfRange, events.CodeTooLarge, events.CodeUnknownType, events.CodeForbidden:
		err = providers.ErrInvalid
	case events.CodeFull, events.CodeQuota, events.CodeQueueTimeout:
		err = providers.ErrFull
	case events.CodeKilled, events.CodeLost, events.CodeTTL, events.CodeIdle:
		err = providers.ErrLost
	case events.CodeTimeout:
		err = providers.ErrTimeout
	case events.CodeCancelled:
		err = context.Canceled
	default:
		err = providers.ErrUnavailable
	}
	return fmt.Errorf("%w: %s: %s", err, f.Code, f.Message)
}

// errorOfResult is errorOf for a command's result: only of what was rejected it
// is certain that nothing ran, whatever the code.
func errorOfResult(f *events.Finished) error {
	err := errorOf(f.Error)
	switch {
	case err == nil && f.Outcome != computer.OK:
		return fmt.Errorf("%w: %s, without a reason", providers.ErrUnavailable, f.Outcome)
	case f.Outcome != computer.Rejected && providers.NothingRan(err):
		return fmt.Errorf("%w: %s: %s: %s", providers.ErrUnavailable, f.Outcome, f.Error.Code, f.Error.Message)
	}
	return err
}

// faultOf is the fault of data that this process refuses itself.
func faultOf(err error) *computer.Fault {
	var data *events.DataError
	if errors.As(err, &data) {
		return &computer.Fault{Code: data.Code, Message: data.Message}
	}
	return &computer.Fault{Code: events.CodeBadInput, Message: err.Error()}
}
