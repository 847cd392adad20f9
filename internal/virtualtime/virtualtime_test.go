package virtualtime

import (
	"runtime"
	"sync"
	"testing"
	"time"
)

// TestTimersPolledAtOnce: with [testing/synctest] alone this ends the process
// within a second, in the race detector's own code.
func TestTimersPolledAtOnce(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	for range 20 {
		Test(t, func(t *testing.T) {
			var pollers sync.WaitGroup
			for range 50 {
				pollers.Go(func() {
					for range 200 {
						timer := time.NewTimer(time.Millisecond)
						time.Sleep(time.Millisecond)
						select {
						case <-timer.C:
						default:
							t.Error("a timer that was due had not fired")
						}
					}
				})
			}
			pollers.Wait()
		})
	}
	if after := runtime.GOMAXPROCS(0); after != before {
		t.Errorf("GOMAXPROCS is %d after the bubbles, was %d", after, before)
	}
}
