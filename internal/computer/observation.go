package computer

import (
	"encoding/json"
	"time"
)

// Outcome of a command or of one of its actions.
type Outcome string

// The outcomes. A command ends in exactly one; see the contract.
const (
	OK       Outcome = "ok"       // it ran
	Rejected Outcome = "rejected" // nothing ran
	Failed   Outcome = "failed"   // it ran up to the action that failed
	Unknown  Outcome = "unknown"  // it started; nobody can say how far it went
	Skipped  Outcome = "skipped"  // of an action only: an earlier one stopped the batch
)

// Fault is an error as it travels: a stable code for programs and a sentence
// for people.
type Fault struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

func (f *Fault) Error() string { return f.Code + ": " + f.Message }

// ActionResult is what became of one action. Value is the action's answer
// where it has one: cursor {x,y}; run {exitCode, stdout, stderr, truncated?};
// clipboardRead a string; screenshot and zoom a Screenshot.
type ActionResult struct {
	Outcome Outcome         `json:"outcome"`
	Value   json.RawMessage `json:"value,omitempty"`
	Error   *Fault          `json:"error,omitempty"`
}

// RunValue is the answer of a run action. Stdout and Stderr hold at most
// MaxRunOutput bytes each; Truncated says that there was more.
type RunValue struct {
	ExitCode  int    `json:"exitCode"`
	Stdout    string `json:"stdout"`
	Stderr    string `json:"stderr"`
	Truncated bool   `json:"truncated,omitempty"`
}

// Picture names a picture in the FRAMES object store. Bytes is its size,
// Width and Height are pixels, SHA256 is lower-case hex of the bytes.
type Picture struct {
	Object    string `json:"object"`
	MediaType string `json:"mediaType"`
	Width     int    `json:"width"`
	Height    int    `json:"height"`
	Bytes     int    `json:"bytes"`
	SHA256    string `json:"sha256"`
}

// Observation is what the sandbox looks like. Dialogs, Downloads and Pages
// report what a picture alone would hide.
type Observation struct {
	Screenshot Picture    `json:"screenshot"`
	Cursor     *Point     `json:"cursor,omitempty"`
	URL        string     `json:"url,omitempty"`
	Title      string     `json:"title,omitempty"`
	Dialogs    []Dialog   `json:"dialogs,omitempty"`
	Downloads  []Download `json:"downloads,omitempty"`
	Pages      []Page     `json:"pages,omitempty"`
	TakenAt    time.Time  `json:"takenAt"`
}

// Dialog is a JavaScript dialog since the last observation. Answer says how
// the sandbox answered it, since a page stands still until somebody does.
type Dialog struct {
	Kind    string `json:"kind"` // alert, confirm, prompt, beforeunload
	Message string `json:"message"`
	Answer  string `json:"answer"` // accepted, dismissed
}

// Download is a file that the browser fetched since the last observation.
type Download struct {
	Name  string `json:"name"`
	URL   string `json:"url"`
	Path  string `json:"path,omitempty"`
	Error string `json:"error,omitempty"`
}

// Page is an open page (tab or window) of a browser sandbox; the active one
// is what the picture shows and the actions go to.
type Page struct {
	URL    string `json:"url"`
	Title  string `json:"title"`
	Active bool   `json:"active,omitempty"`
}
