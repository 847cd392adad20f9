package playwright

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	pw "github.com/mxschmitt/playwright-go"
)

// clipboard reaches the browser's real clipboard, the one that Control+C and
// Control+V in its pages use. CDP has no command for it, and
// navigator.clipboard exists on secure pages only, so it runs the editing
// commands copy and paste in a hidden page of its own: one that is no tab,
// that no page can see, and that goes with the connection. Copy and paste
// events carry text exactly, line ends included.
type clipboard struct {
	root pw.CDPSession

	mu      sync.Mutex // one command at a time
	session string     // of the hidden page; "": not made yet
	last    int        // id of the last message
	answers chan string
}

// clipboardScript lets the page put text on copy, and keep what paste brings.
const clipboardScript = `
	globalThis.copied = false; globalThis.pasted = null;
	document.addEventListener("copy", e => { e.clipboardData.setData("text/plain", globalThis.text); e.preventDefault(); globalThis.copied = true; });
	document.addEventListener("paste", e => { globalThis.pasted = e.clipboardData.getData("text/plain"); e.preventDefault(); });
	true`

// clipboardLimit bounds one message to the hidden page, which nothing can keep
// busy.
const clipboardLimit = 10 * time.Second

func newClipboard(root pw.CDPSession) *clipboard {
	c := &clipboard{root: root, answers: make(chan string, 16)}
	root.On("Target.receivedMessageFromTarget", func(v any) {
		event, _ := v.(map[string]any)
		message, _ := event["message"].(string) // an event of another shape is none of ours, and fails to decode
		select {
		case c.answers <- message:
		default: // nobody waits for so many
		}
	})
	return c
}

// open makes the hidden page. The caller holds c.mu.
func (c *clipboard) open() error {
	if c.session != "" {
		return nil
	}
	target, err := send[struct{ TargetID string }](c.root, "Target.createTarget", map[string]any{"url": "about:blank", "hidden": true})
	if err != nil {
		return err
	}
	attached, err := send[struct{ SessionID string }](c.root, "Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": false})
	if err != nil {
		return err
	}
	c.session = attached.SessionID
	if _, err = c.command("Emulation.setFocusEmulationEnabled", map[string]any{"enabled": true}); err == nil {
		_, err = c.evaluate(clipboardScript)
	}
	if err != nil {
		c.session = ""
	}
	return err
}

// command sends one CDP command to the hidden page.
func (c *clipboard) command(method string, params map[string]any) (json.RawMessage, error) {
	c.last++
	raw, err := json.Marshal(map[string]any{"id": c.last, "method": method, "params": params})
	if err != nil {
		return nil, err
	}
	if _, err := send[none](c.root, "Target.sendMessageToTarget", map[string]any{"sessionId": c.session, "message": string(raw)}); err != nil {
		return nil, err
	}
	limit := time.NewTimer(clipboardLimit)
	defer limit.Stop()
	for {
		select {
		case message := <-c.answers:
			var answer struct {
				ID     int
				Result json.RawMessage
				Error  *struct{ Message string }
			}
			if err := json.Unmarshal([]byte(message), &answer); err != nil || answer.ID != c.last {
				continue // an event, or the answer to a command that was given up
			}
			if answer.Error != nil {
				return nil, fmt.Errorf("%s: %s", method, answer.Error.Message)
			}
			return answer.Result, nil
		case <-limit.C:
			return nil, fmt.Errorf("%s: no answer in %s", method, clipboardLimit)
		}
	}
}

func (c *clipboard) evaluate(expression string) (json.RawMessage, error) {
	raw, err := c.command("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true})
	if err != nil {
		return nil, err
	}
	var out struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails *struct{ Text string }
	}
	if err := json.Unmarshal(raw, &out); err != nil {
		return nil, err
	}
	if out.ExceptionDetails != nil {
		return nil, errors.New(out.ExceptionDetails.Text)
	}
	return out.Result.Value, nil
}

// edit runs an editing command, as a menu entry would.
func (c *clipboard) edit(command string) error {
	_, err := c.command("Input.dispatchKeyEvent", map[string]any{"type": "rawKeyDown", "key": command, "commands": []string{command}})
	return err
}

func (c *clipboard) read() (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.open(); err != nil {
		return "", err
	}
	if _, err := c.evaluate("globalThis.pasted = null; true"); err != nil {
		return "", err
	}
	if err := c.edit("paste"); err != nil {
		return "", err
	}
	raw, err := c.evaluate("globalThis.pasted")
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

func (c *clipboard) write(text string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.open(); err != nil {
		return err
	}
	literal, err := json.Marshal(text) // JSON is JavaScript
	if err != nil {
		return err
	}
	if _, err := c.evaluate("globalThis.copied = false; globalThis.text = " + string(literal) + "; true"); err != nil {
		return err
	}
	if err := c.edit("copy"); err != nil {
		return err
	}
	raw, err := c.evaluate("globalThis.copied")
	if err != nil {
		return err
	}
	if string(raw) != "true" {
		return errors.New("the browser did not copy")
	}
	return nil
}

// clipboardRead returns the clipboard's text, "" when it holds none.
func (r *run) clipboardRead(ctx context.Context) (string, error) {
	var text string
	err := r.call(ctx, func() (err error) {
		text, err = r.conn.clipboard.read()
		return err
	})
	return text, err
}

func (r *run) clipboardWrite(ctx context.Context, text string) error {
	return r.call(ctx, func() error { return r.conn.clipboard.write(text) })
}
