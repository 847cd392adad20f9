package demoapp

import (
	"fmt"
	"strings"
)

// FormEntry is what a submission of the form holds.
type FormEntry struct {
	Name  string `json:"name"`
	Email string `json:"email"`
	Note  string `json:"note"`
	Berth string `json:"berth"` // north, south, dry, or "" when none was chosen
	Terms bool   `json:"terms"`
}

// FormState records the submissions; Sent is the last one.
type FormState struct {
	Count int        `json:"count"`
	Sent  *FormEntry `json:"sent,omitempty"`
}

// formBrief is what the page asks for, to the character: letters with
// diacritics, three scripts, a dash, characters outside the basic plane and
// line breaks are where typing goes wrong.
var formBrief = FormEntry{
	Name:  "Zoë Ångström",
	Email: "zoe@example.org",
	Note:  "Καλημέρα, harbour master!\n12 crates of crème brûlée – handle gently.\nСпасибо 😀 ⚓",
	Berth: "south",
	Terms: true,
}

var berths = map[string]string{"north": "North quay", "south": "South quay", "dry": "Dry dock"}

func (e FormEntry) validate() error {
	switch {
	case len(e.Name) > 200:
		return fmt.Errorf("field %q: %d bytes, at most 200", "name", len(e.Name))
	case len(e.Email) > 200:
		return fmt.Errorf("field %q: %d bytes, at most 200", "email", len(e.Email))
	case len(e.Note) > 16<<10:
		return fmt.Errorf("field %q: %d bytes, at most %d", "note", len(e.Note), 16<<10)
	case e.Berth != "" && berths[e.Berth] == "":
		return fmt.Errorf("field %q: unknown; known are north, south, dry", "berth")
	}
	return nil
}

func (f *FormState) submit(e FormEntry) {
	f.Count++
	f.Sent = &e
}

// differences names the fields that are not as the page asks.
func (e FormEntry) differences() []string {
	var d []string
	for _, c := range []struct {
		name string
		same bool
	}{
		{"name", e.Name == formBrief.Name},
		{"email", e.Email == formBrief.Email},
		{"note", e.Note == formBrief.Note},
		{"berth", e.Berth == formBrief.Berth},
		{"terms", e.Terms == formBrief.Terms},
	} {
		if !c.same {
			d = append(d, c.name)
		}
	}
	return d
}

func countLines(s string) int {
	if s == "" {
		return 0
	}
	return strings.Count(s, "\n") + 1
}

func (f *FormState) judge() Part {
	if f.Sent == nil {
		return Part{None, "form: nothing yet", "Nothing was sent yet."}
	}
	title := fmt.Sprintf("form: sent name=%s note=%d lines", inTitle(f.Sent.Name), countLines(f.Sent.Note))
	if d := f.Sent.differences(); len(d) > 0 {
		return Part{Wrong, title + " wrong " + strings.Join(d, ","), "Not as asked: " + strings.Join(d, ", ") + "."}
	}
	return Part{OK, title + " ok", "Sent, and every character is as asked."}
}

func (f *FormState) clone() FormState {
	out := *f
	if f.Sent != nil {
		e := *f.Sent
		out.Sent = &e
	}
	return out
}
