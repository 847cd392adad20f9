package looprunner_test

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
)

// Journals are listed at the start, and ever more seldom while leases are
// watched without a break; soon again after one.
func TestJournalsAreListedSeldom(t *testing.T) {
	bubble(t, func(g *rig) {
		var lists atomic.Int64
		if _, err := g.nc.Subscribe("$JS.API.STREAM.INFO.LOOPS", func(m *nats.Msg) {
			if strings.Contains(string(m.Data), "finished") {
				lists.Add(1)
			}
		}); err != nil {
			t.Fatal(err)
		}
		a := g.runner("a", nil)
		time.Sleep(time.Minute)
		if n := lists.Swap(0); n != 2 {
			t.Errorf("%d lists in the first minute", n)
		}
		time.Sleep(2 * time.Hour)
		if n := lists.Swap(0); n < 7 || n > 12 {
			t.Errorf("%d lists in two quiet hours", n)
		}
		a.gate.set(true)
		time.Sleep(time.Second)
		a.gate.set(false)
		time.Sleep(time.Minute)
		if n := lists.Load(); n < 1 || n > 3 {
			t.Errorf("%d lists in the minute after a break", n)
		}
		a.close()
	})
}
