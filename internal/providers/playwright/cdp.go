package playwright

import (
	"encoding/json"
	"fmt"

	pw "github.com/mxschmitt/playwright-go"
)

// send runs one CDP command and decodes its answer into T.
func send[T any](session pw.CDPSession, method string, params map[string]any) (T, error) {
	var out T
	if params == nil {
		params = map[string]any{}
	}
	raw, err := session.Send(method, params)
	if err != nil {
		return out, fmt.Errorf("%s: %w", method, err)
	}
	buf, err := json.Marshal(raw)
	if err != nil {
		return out, fmt.Errorf("%s: %w", method, err)
	}
	if err := json.Unmarshal(buf, &out); err != nil {
		return out, fmt.Errorf("%s: %w", method, err)
	}
	return out, nil
}

// none is the answer of commands that have none.
type none struct{}
