// Package virtualtime runs tests in virtual time.
package virtualtime

import (
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
)

// Test is [synctest.Test] on a runtime that keeps its word. Under the race
// detector it holds GOMAXPROCS at 1 while any bubble runs, for with more a
// bubble can crash the process: every goroutine that polls the channel of a
// timer that is due runs that timer itself, on the bubble's one race context,
// which two threads then use at once (go.dev/issue/78156; TestTimersPolledAtOnce
// shows it). Races are found all the same: the detector goes by
// what happens before what, not by what happened at once.
func Test(t *testing.T, f func(*testing.T)) {
	t.Helper()
	if raceEnabled {
		narrow()
		defer widen()
	}
	synctest.Test(t, f)
}

// open is how many bubbles run, and wide the GOMAXPROCS of before the first.
var (
	mu         sync.Mutex
	open, wide int
)

func narrow() {
	mu.Lock()
	defer mu.Unlock()
	if open++; open == 1 {
		wide = runtime.GOMAXPROCS(1)
	}
}

func widen() {
	mu.Lock()
	defer mu.Unlock()
	if open--; open == 0 {
		runtime.GOMAXPROCS(wide)
	}
}
