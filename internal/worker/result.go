package worker

import (
	"encoding/json"

	"berth/internal/computer"
	"berth/internal/events"
)

// Caps of a result, so that it always fits a 1 MiB message.
const (
	maxValue    = 128<<10 + 4<<10 // JSON bytes of one value: a run's stdout and stderr
	maxResult   = 900 << 10       // JSON bytes of all actions' results
	maxListed   = 50              // dialogs, downloads and pages of an observation, each
	maxURL      = 4 << 10
	maxTitle    = 1 << 10
	maxClipText = computer.MaxTextBytes
)

// fit caps what is said. Outcomes stay; a value that is dropped or cut leaves
// an error beside it that says so.
func (v *verdict) fit() {
	total := 0
	for i := range v.actions {
		r := &v.actions[i]
		room := total < maxResult*3/4 || len(r.Value) <= maxValue
		if room {
			capValue(r)
		}
		n := len(r.Value) + 64
		if r.Error != nil {
			n += len(r.Error.Message)
		}
		if len(r.Value) > 0 && (!room || total+n > maxResult) {
			r.Value = nil
			r.Error = fault(events.CodeTooLarge, "the value is left out: the results of this command are over %d bytes", maxResult)
			n = 256
		}
		total += n
	}
}

// drop leaves out all values, for a result that did not fit all the same.
func (v *verdict) drop() {
	for i := range v.actions {
		v.actions[i].Value = nil
	}
	v.observation = nil
	if v.fault == nil {
		v.fault = fault(events.CodeTooLarge, "the values are left out: they do not fit a message")
	}
}

// capValue cuts a value that is over the cap of one value: the text of a
// clipboard or of a run's output. Another value of that size is left out.
func capValue(r *computer.ActionResult) {
	if len(r.Value) <= maxValue {
		return
	}
	var text string
	if json.Unmarshal(r.Value, &text) == nil {
		kept := 0
		r.Value = cut(maxClipText, func(n int) any { kept = min(n, len(text)); return clip(text, n) })
		if kept < len(text) {
			r.Error = fault(events.CodeTooLarge, "the first %d of %d bytes", kept, len(text))
		}
		return
	}
	var run computer.RunValue
	if json.Unmarshal(r.Value, &run) == nil && run.Stdout+run.Stderr != "" {
		r.Value = cut(computer.MaxRunOutput, func(n int) any {
			short := run
			short.Stdout, short.Stderr = clip(run.Stdout, n), clip(run.Stderr, n)
			short.Truncated = run.Truncated || short.Stdout != run.Stdout || short.Stderr != run.Stderr
			return short
		})
		return
	}
	if len(r.Value) > maxResult/2 {
		r.Error = fault(events.CodeTooLarge, "the value is left out: it is %d bytes", len(r.Value))
		r.Value = nil
	}
}

// cut encodes a value whose texts have n bytes each, with n halved until it is
// well below a message's size: in JSON a byte can take six.
func cut(n int, value func(n int) any) json.RawMessage {
	for ; ; n /= 2 {
		raw, err := json.Marshal(value(n))
		if err != nil {
			return nil // texts always encode
		}
		if len(raw) <= maxResult/4 || n == 0 {
			return raw
		}
	}
}

// trim caps what a sandbox tells about itself: a page may have a data: URL of
// megabytes.
func trim(o *computer.Observation) {
	o.URL, o.Title = clip(o.URL, maxURL), clip(o.Title, maxTitle)
	o.Dialogs = o.Dialogs[:min(len(o.Dialogs), maxListed)]
	o.Downloads = o.Downloads[:min(len(o.Downloads), maxListed)]
	o.Pages = o.Pages[:min(len(o.Pages), maxListed)]
	for i := range o.Dialogs {
		o.Dialogs[i].Message = clip(o.Dialogs[i].Message, maxTitle)
	}
	for i := range o.Downloads {
		d := &o.Downloads[i]
		d.Name, d.URL, d.Path, d.Error = clip(d.Name, maxTitle), clip(d.URL, maxTitle), clip(d.Path, maxTitle), clip(d.Error, maxTitle)
	}
	for i := range o.Pages {
		o.Pages[i].URL, o.Pages[i].Title = clip(o.Pages[i].URL, maxTitle), clip(o.Pages[i].Title, maxTitle)
	}
}
