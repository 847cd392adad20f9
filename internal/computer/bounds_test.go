package computer

import (
	"strings"
	"testing"
	"time"
)

func TestBounds(t *testing.T) {
	text, some := strings.Repeat("x", 1000), 7.0
	for _, c := range []struct {
		name        string
		actions     []Action
		act, finish time.Duration
	}{
		{"observe", nil, 60, 135},
		{"click", []Action{{Type: Click}}, 65, 140},
		{"type", []Action{{Type: TypeText, Text: &text}}, 85, 160},
		{"open", []Action{{Type: Open}}, 110, 185},
		{"run", []Action{{Type: Run}}, 125, 200},
		{"run, wait, hold", []Action{{Type: Run, Seconds: &some}, {Type: Wait, Seconds: &some}, {Type: Hold, Seconds: &some}}, 96, 171},
		{"pictures", []Action{{Type: Screenshot}, {Type: Zoom}}, 70, 175},
	} {
		if got := ActTime(c.actions); got != c.act*time.Second { //nolint:durationcheck // the table counts seconds
			t.Errorf("%s: act %s", c.name, got)
		}
		if got := FinishTime(c.actions); got != c.finish*time.Second { //nolint:durationcheck // likewise
			t.Errorf("%s: finish %s", c.name, got)
		}
	}
}
