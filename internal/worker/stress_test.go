package worker

import (
	"os"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"

	"pgregory.net/rapid"

	"berth/internal/providers/providertest"
)

func TestStress(t *testing.T) {
	n, _ := strconv.Atoi(os.Getenv("WORKER_STRESS"))
	from, _ := strconv.Atoi(os.Getenv("WORKER_FROM"))
	gen := rapid.Custom(drawSteps)
	for i := from; i < from+n; i++ {
		steps := gen.Example(i)
		opts := providertest.FakeOptions{Recall: i&1 > 0, CheckFences: i&2 > 0, Detached: i&4 > 0}
		c := &collector{}
		os.WriteFile("/tmp/stress.now", []byte(strconv.Itoa(i)), 0o644)
		synctest.Test(t, func(t *testing.T) {
			c.TB = t
			w := newWorld(c, t.TempDir())
			defer w.close()
			defer func() {
				if p := recover(); p != nil && p != any(stopTest{}) {
					panic(p)
				}
			}()
			w.fakeWith(server1, opts)
			newHistory(w).play(steps)
		})
		if len(c.errs) > 0 {
			t.Errorf("%d %+v\n%v\n%s", i, opts, steps, strings.Join(c.errs, "\n"))
		}
	}
}
