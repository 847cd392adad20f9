package demoapp

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"berth/internal/computer"
)

const examplesDir = "../../examples"

// item is what a script's items may hold beside an action's own fields.
type scriptItem map[string]json.RawMessage

type scriptFile struct {
	Goal    string `json:"goal"`
	Sandbox struct {
		Requires []string `json:"requires"`
	} `json:"sandbox"`
	Limits struct {
		Steps   int     `json:"steps"`
		Seconds float64 `json:"seconds"`
	} `json:"limits"`
	Script []scriptItem `json:"script"`
}

func examples(t *testing.T) map[string]scriptFile {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(examplesDir, "*.json"))
	if err != nil || len(paths) < 3 {
		t.Fatalf("found %d example scripts (%v), want at least 3", len(paths), err)
	}
	out := map[string]scriptFile{}
	for _, p := range paths {
		raw, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		var f scriptFile
		dec := json.NewDecoder(bytes.NewReader(raw))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&f); err != nil {
			t.Fatalf("%s: %v", p, err)
		}
		out[filepath.Base(p)] = f
	}
	return out
}

func TestExamplesUseTheVocabulary(t *testing.T) {
	t.Parallel()
	for file, f := range examples(t) {
		if f.Goal == "" || f.Limits.Steps < len(f.Script) || f.Limits.Seconds <= 0 {
			t.Errorf("%s: goal %q, %d steps for %d items, %v seconds", file, f.Goal, f.Limits.Steps, len(f.Script), f.Limits.Seconds)
		}
		acted := false
		for i, it := range f.Script {
			if name, ok := it["name"]; ok {
				var s string
				if json.Unmarshal(name, &s) != nil || s == "" {
					t.Errorf("%s item %d: name %s is not a label", file, i, name)
				}
				delete(it, "name")
			}
			if _, isCheck := it["check"]; isCheck {
				checkCheck(t, file, i, it)
				continue
			}
			acted = true
			raw, err := json.Marshal([]scriptItem{it})
			if err != nil {
				t.Fatal(err)
			}
			actions, err := computer.DecodeActions(raw)
			if err != nil {
				t.Errorf("%s item %d: %v", file, i, err)
				continue
			}
			if err := computer.CheckBounds(actions, computer.DefaultDisplay); err != nil {
				t.Errorf("%s item %d: %v", file, i, err)
			}
			if need := actions[0].Type.Requires(); need != "" && !slices.Contains(f.Sandbox.Requires, need) {
				t.Errorf("%s item %d: %s needs capability %q, which the sandbox does not require", file, i, actions[0].Type, need)
			}
		}
		if _, last := f.Script[len(f.Script)-1]["check"]; !acted || !last {
			t.Errorf("%s: a script acts, and ends with a check of what it did", file)
		}
	}
}

// checkCheck holds a check to the form that examples/README.md describes.
func checkCheck(t *testing.T, file string, i int, it scriptItem) {
	t.Helper()
	var c struct {
		Check     string   `json:"check"`
		Equals    *string  `json:"equals"`
		Contains  *string  `json:"contains"`
		Matches   *string  `json:"matches"`
		Within    *float64 `json:"within"`
		X         *int     `json:"x"`
		Y         *int     `json:"y"`
		Color     string   `json:"color"`
		Tolerance *int     `json:"tolerance"`
		Count     *int     `json:"count"`
	}
	raw, err := json.Marshal(it)
	if err != nil {
		t.Fatal(err)
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&c); err != nil {
		t.Errorf("%s item %d: %v", file, i, err)
		return
	}
	texts := 0
	for _, s := range []*string{c.Equals, c.Contains, c.Matches} {
		if s != nil {
			texts++
		}
	}
	if c.Matches != nil {
		if _, err := regexp.Compile(*c.Matches); err != nil {
			t.Errorf("%s item %d: %v", file, i, err)
		}
	}
	ok := false
	switch c.Check {
	case "title", "url", "value":
		ok = texts == 1
	case "dialog", "download":
		ok = c.Contains != nil && texts == 1
	case "pages":
		ok = c.Count != nil && texts == 0
	case "pixel":
		ok = texts == 0 && c.X != nil && c.Y != nil && *c.X >= 0 && *c.X < 1280 && *c.Y >= 0 && *c.Y < 800 &&
			regexp.MustCompile(`^#[0-9a-f]{6}$`).MatchString(c.Color)
	}
	if !ok {
		t.Errorf("%s item %d: not a check: %s", file, i, raw)
	}
}

// The scripts type what the pages ask for, and expect the titles and colours
// that the application has.
func TestExamplesAgreeWithTheApp(t *testing.T) {
	t.Parallel()
	css, err := files.ReadFile("static/style.css")
	if err != nil {
		t.Fatal(err)
	}
	typed, expected := map[string]bool{}, map[string]bool{}
	for file, f := range examples(t) {
		for i, it := range f.Script {
			var v struct{ Type, Check, Text, Color, Equals string }
			raw, _ := json.Marshal(it)
			if err := json.Unmarshal(raw, &v); err != nil {
				t.Fatalf("%s item %d: %v", file, i, err)
			}
			if v.Type == "type" {
				typed[v.Text] = true
			}
			if v.Check == "title" {
				expected[v.Equals] = true
			}
			if v.Check == "pixel" && !strings.Contains(string(css), v.Color+";") {
				t.Errorf("%s item %d: colour %s is not in style.css", file, i, v.Color)
			}
		}
	}
	for _, text := range []string{formBrief.Name, formBrief.Email, formBrief.Note, wantText} {
		if !typed[text] {
			t.Errorf("no script types %q", text)
		}
	}
	f := FormState{}
	f.submit(formBrief)
	l := ListState{Loaded: listTotal, Selected: listWanted}
	all := map[string]Part{}
	for _, n := range partNames {
		all[n] = Part{Status: OK}
	}
	for _, p := range []Part{f.judge(), l.judge(), report(all)} {
		if p.Status != OK || !expected[p.Title] {
			t.Errorf("no script expects %q (%s)", p.Title, p.Status)
		}
	}
}
