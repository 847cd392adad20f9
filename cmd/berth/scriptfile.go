package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/looprunner/script"
)

// demoPlaceholder stands for the demo application's URL in a script file.
const demoPlaceholder = "{{demo}}"

// maxScriptFile is what a loop.start request can carry.
const maxScriptFile = events.MaxLoopStart

// scriptFile is a script as `berth run --script` reads it.
type scriptFile struct {
	Goal    string                `json:"goal,omitempty"`
	Sandbox *events.SandboxCreate `json:"sandbox,omitempty"`
	Limits  events.LoopLimits     `json:"limits,omitzero"`
	Script  json.RawMessage       `json:"script"`

	items script.Script
}

// readScript reads a file and checks all of it; "-" is standard input. demo,
// where the file needs it, gives the URL that its placeholder stands for.
func readScript(path string, demo func() (string, error)) (*scriptFile, error) {
	var raw []byte
	var err error
	if path == "-" {
		raw, err = io.ReadAll(io.LimitReader(os.Stdin, maxScriptFile+1))
	} else {
		raw, err = os.ReadFile(path)
	}
	if err != nil {
		return nil, &inputError{what: err.Error()}
	}
	if len(raw) > maxScriptFile {
		return nil, &inputError{what: fmt.Sprintf("%s: %d bytes, at most %d", path, len(raw), maxScriptFile)}
	}
	if bytes.Contains(raw, []byte(demoPlaceholder)) {
		url, err := demo()
		if err != nil {
			return nil, err
		}
		raw = bytes.ReplaceAll(raw, []byte(demoPlaceholder), []byte(url))
	}
	f, faults := parseScript(raw)
	if len(faults) > 0 {
		return nil, &inputError{path + ":", faults}
	}
	return f, nil
}

// parseScript returns every fault of a script file.
func parseScript(raw []byte) (*scriptFile, []error) {
	f := &scriptFile{}
	if trimmed := bytes.TrimSpace(raw); len(trimmed) > 0 && trimmed[0] == '[' {
		f.Script = trimmed
	} else {
		dec := json.NewDecoder(bytes.NewReader(raw))
		dec.DisallowUnknownFields()
		if err := dec.Decode(f); err != nil {
			return nil, []error{fmt.Errorf("not a script file: %s", strings.TrimPrefix(explainJSON(raw, err), "json: "))}
		}
		if _, err := dec.Token(); !errors.Is(err, io.EOF) {
			return nil, []error{fmt.Errorf("text after the script, at byte %d", dec.InputOffset())}
		}
	}
	var faults []error
	display := computer.DefaultDisplay
	if f.Sandbox != nil {
		box := *f.Sandbox
		if err := box.Validate(); err != nil {
			faults = append(faults, fmt.Errorf("sandbox: %w", err))
		} else if f.Sandbox.Display != nil {
			display = *f.Sandbox.Display
		}
	}
	limits := events.LoopStart{Model: json.RawMessage(`{"name":"script"}`), Limits: f.Limits}
	if err := limits.Validate(); err != nil {
		faults = append(faults, err)
	}
	var items []json.RawMessage
	if len(f.Script) == 0 || json.Unmarshal(f.Script, &items) != nil {
		return nil, append(faults, errors.New(`script: want an array of actions and checks`))
	}
	if len(items) == 0 {
		return nil, append(faults, errors.New("script: needs at least one item"))
	}
	// One by one, so that every item's fault is told.
	for i, item := range items {
		one, err := script.Parse(append(append([]byte("["), item...), ']'))
		if err == nil {
			err = one.CheckBounds(display)
		}
		if err != nil {
			faults = append(faults, errors.New(strings.Replace(err.Error(), "script item 0:", fmt.Sprintf("script item %d:", i), 1)))
			continue
		}
		f.items = append(f.items, one...)
	}
	if len(faults) == 0 {
		if _, err := script.Parse(f.Script); err != nil {
			faults = append(faults, err)
		}
	}
	return f, faults
}

// explainJSON adds the line of a syntax error.
func explainJSON(raw []byte, err error) string {
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		line := 1 + bytes.Count(raw[:min(int(syntax.Offset), len(raw))], []byte("\n"))
		return fmt.Sprintf("line %d: %v", line, err)
	}
	return err.Error()
}
