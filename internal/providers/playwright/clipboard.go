package playwright

import (
	"context"
	"fmt"

	"berth/internal/providers"
)

func (r *run) clipboardRead(context.Context) (string, error) {
	return "", fmt.Errorf("clipboard: not yet: %w", providers.ErrUnsupported)
}

func (r *run) clipboardWrite(context.Context, string) error {
	return fmt.Errorf("clipboard: not yet: %w", providers.ErrUnsupported)
}
