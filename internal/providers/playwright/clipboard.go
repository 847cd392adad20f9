package playwright

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"
)

// clipboard reaches the browser's real clipboard, the one that Control+C and
// Control+V in its pages use. CDP has no command for it, and
// navigator.clipboard exists on secure pages only, so it runs the editing
// commands copy and paste in a hidden page of its own: one that is no tab,
// that no page can see, and that goes with the connection. Copy and paste
// events carry text exactly, line ends included.
type clipboard struct {
	cdp *devtools

	mu      sync.Mutex // one use at a time
	session string     // of the hidden page; "": not made yet
}

// clipboardScript lets the page put text on copy, and keep what paste brings.
const clipboardScript = `
	globalThis.copied = false; globalThis.pasted = null;
	document.addEventListener("copy", e => { e.clipboardData.setData("text/plain", globalThis.text); e.preventDefault(); globalThis.copied = true; });
	document.addEventListener("paste", e => { globalThis.pasted = e.clipboardData.getData("text/plain"); e.preventDefault(); });
	true`

// clipboardLimit bounds one use of the hidden page, which nothing can keep
// busy.
const clipboardLimit = 10 * time.Second

// open makes the hidden page. The caller holds c.mu.
func (c *clipboard) open(ctx context.Context) error {
	if c.session != "" {
		return nil
	}
	var target struct {
		TargetID string `json:"targetId"`
	}
	if err := c.cdp.call(ctx, "", "Target.createTarget", params{"url": "about:blank", "hidden": true}, &target); err != nil {
		return err
	}
	session, err := c.cdp.attach(ctx, target.TargetID)
	if err == nil {
		err = c.cdp.call(ctx, session, "Emulation.setFocusEmulationEnabled", params{"enabled": true}, nil)
	}
	if err == nil {
		_, err = c.evaluate(ctx, session, clipboardScript)
	}
	if err == nil {
		c.session = session
	}
	return err
}

func (c *clipboard) evaluate(ctx context.Context, session, expression string) (json.RawMessage, error) {
	var out struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails *struct{ Text string }
	}
	if err := c.cdp.call(ctx, session, "Runtime.evaluate", params{"expression": expression, "returnByValue": true}, &out); err != nil {
		return nil, err
	}
	if out.ExceptionDetails != nil {
		return nil, errors.New(out.ExceptionDetails.Text)
	}
	return out.Result.Value, nil
}

// edit runs an editing command, as a menu entry would.
func (c *clipboard) edit(ctx context.Context, command string) error {
	return c.cdp.call(ctx, c.session, "Input.dispatchKeyEvent", params{"type": "rawKeyDown", "key": command, "commands": []string{command}}, nil)
}

// read returns the clipboard's text, "" when it holds none.
func (c *clipboard) read(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, clipboardLimit)
	defer cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.open(ctx); err != nil {
		return "", err
	}
	if _, err := c.evaluate(ctx, c.session, "globalThis.pasted = null; true"); err != nil {
		return "", err
	}
	if err := c.edit(ctx, "paste"); err != nil {
		return "", err
	}
	raw, err := c.evaluate(ctx, c.session, "globalThis.pasted")
	if err != nil {
		return "", err
	}
	var text *string // null: there is nothing to paste
	if err := json.Unmarshal(raw, &text); err != nil {
		return "", fmt.Errorf("the clipboard's text: %w", err)
	}
	if text == nil {
		return "", nil
	}
	return *text, nil
}

func (c *clipboard) write(ctx context.Context, text string) error {
	ctx, cancel := context.WithTimeout(ctx, clipboardLimit)
	defer cancel()
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.open(ctx); err != nil {
		return err
	}
	literal, err := json.Marshal(text) // JSON is JavaScript
	if err != nil {
		return err
	}
	if _, err := c.evaluate(ctx, c.session, "globalThis.copied = false; globalThis.text = "+string(literal)+"; true"); err != nil {
		return err
	}
	if err := c.edit(ctx, "copy"); err != nil {
		return err
	}
	raw, err := c.evaluate(ctx, c.session, "globalThis.copied")
	if err != nil {
		return err
	}
	if string(raw) != "true" {
		return errors.New("the browser did not copy")
	}
	return nil
}
