package looprunner_test

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"berth/internal/events"
)

// Loops under runners that die, stop, are cut off and come back at random,
// with the bus restarting, pauses, resumes and messages in between: every act
// once and in order, the model asked at most once more per interruption, one
// end. The seed is in the test's name.
func TestChaos(t *testing.T) {
	const loops, acts = 4, 6
	for seed := range uint64(2) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			bubble(t, func(g *rig) {
				dice := rand.New(rand.NewPCG(seed, 7))
				g.fleet.set(func(f *fleet) { f.actTakes = 400 * time.Millisecond })
				var items, want []string
				for i := range acts {
					items = append(items, fmt.Sprintf(`{"type":"type","text":"%d"},{"check":"title","contains":"%d"}`, i, i))
					want = append(want, fmt.Sprintf("type:%d", i))
				}
				fresh := func(i int) *process { return g.runner(fmt.Sprintf("r%d", i), nil) }
				alive := []*process{fresh(0), fresh(1)}
				time.Sleep(time.Second)
				for i := range loops {
					g.start(fmt.Sprintf("l%d", i), "["+strings.Join(items, ",")+"]", nil)
				}
				interruptions := 0
				for round := range 14 {
					time.Sleep(time.Duration(200+dice.IntN(3000)) * time.Millisecond)
					i := dice.IntN(len(alive))
					p, loop := alive[i], fmt.Sprintf("l%d", dice.IntN(loops))
					interruptions++
					switch dice.IntN(6) {
					case 0, 1:
						p.kill()
						alive[i] = fresh(round + 2)
					case 2:
						p.close()
						alive[i] = fresh(round + 2)
					case 3:
						p.gate.set(true)
						time.AfterFunc(time.Duration(1+dice.IntN(15))*time.Second, func() { p.gate.set(false) })
					case 4:
						g.down()
						time.Sleep(time.Duration(dice.IntN(8)) * time.Second)
						g.boot()
						time.Sleep(3 * time.Second)
					default:
						g.request(events.Pause, fmt.Sprint("p", round), object{"loopId": loop})
						g.request(events.Message, fmt.Sprint("m", round), object{"loopId": loop, "text": "hello"})
						time.AfterFunc(3*time.Second, func() { g.request(events.Resume, fmt.Sprint("r", round), object{"loopId": loop}) })
					}
				}
				for i := range loops {
					loop := fmt.Sprintf("l%d", i)
					j, f := g.finished(loop, events.LoopSucceeded, "")
					if got := g.fleet.acts(vmOf(loop)); got != strings.Join(want, " ") {
						t.Errorf("%s: acts %s; journal %s", loop, got, names(j))
					}
					n := map[string]int{}
					for _, e := range j {
						n[e.Name]++
					}
					if n["started"] != 1 || n["acted"] != acts || n["ending"] != 1 || n["decided"] != acts+1 || n["thinking"] > acts+1+interruptions || f.Steps != acts {
						t.Errorf("%s: journal %s", loop, names(j))
					}
				}
				time.Sleep(20 * time.Second)
				for _, p := range alive {
					p.close()
				}
			})
		})
	}
}
