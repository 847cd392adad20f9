package berth_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestCases: every case of docs/cases.md names tests, and they exist.
func TestCases(t *testing.T) {
	raw, err := os.ReadFile("docs/cases.md")
	if err != nil {
		t.Fatal(err)
	}
	cases := 0
	for line := range strings.Lines(string(raw)) {
		cells := strings.Split(line, "|")
		if len(cells) != 6 || !regexp.MustCompile(`^ [LQHS]\d+ $`).MatchString(cells[1]) {
			continue
		}
		cases++
		names := regexp.MustCompile("`([a-z0-9/]+)\\.(\\w+)`").FindAllStringSubmatch(cells[4], -1)
		if len(names) == 0 {
			t.Errorf("case%sis tested by nothing", cells[1])
		}
		for _, name := range names {
			if !declares(t, filepath.Join("internal", name[1]), name[2]) {
				t.Errorf("case%s: there is no %s in internal/%s", cells[1], name[2], name[1])
			}
		}
	}
	if cases < 50 {
		t.Errorf("the page has %d cases", cases)
	}
}

// declares reports whether a function is declared in a directory's files.
func declares(t *testing.T, dir, function string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	declared := regexp.MustCompile(`(?m)^func (\([^)]*\) )?` + function + `\(`)
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if declared.Match(raw) {
			return true
		}
	}
	return false
}
