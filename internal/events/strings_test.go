package events

import (
	"encoding/json"
	"slices"
	"testing"
)

// A constraint's value is compared as it was written, whatever its JSON type.
func TestStringsKeepTheirText(t *testing.T) {
	for raw, want := range map[string][]string{
		`"a"`: {"a"}, `1000000`: {"1000000"}, `1.50`: {"1.50"}, `true`: {"true"}, `["a",2,false]`: {"a", "2", "false"}, `[]`: {},
	} {
		var s Strings
		if err := json.Unmarshal([]byte(raw), &s); err != nil || !slices.Equal(s, want) {
			t.Errorf("%s: %q %v, want %q", raw, s, err, want)
		}
	}
	for _, raw := range []string{`{}`, `[[]]`, `null`, `[null]`} {
		var s Strings
		if err := json.Unmarshal([]byte(raw), &s); err == nil {
			t.Errorf("%s was taken as %q", raw, s)
		}
	}
}
