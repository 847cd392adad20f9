package anthropic

import (
	"strings"
	"testing"

	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/natsd"
	"berth/internal/thinkers/thinkertest"
)

func world(t *testing.T) *thinkertest.World {
	t.Helper()
	srv, err := natsd.Start(natsd.Options{StoreDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Shutdown)
	return thinkertest.NewWorld(t, srv.InProcess())
}

// A whole loop on the real loop-runner, which dies right after an answer was
// journaled: another goes on, nothing is done twice, and no answer that was
// journaled is paid for again.
func TestWholeLoopWithACrash(t *testing.T) {
	w := world(t)
	s := newStandin(t,
		reply{blocks: []object{function("a", "open", object{"target": "https://shop.example/"})}},
		reply{blocks: []object{call("b", "left_click", object{"coordinate": []int{3, 4}}), call("c", "type", object{"text": "hello"}), call("d", "screenshot", object{})}},
		reply{blocks: []object{function("e", "askUser", object{"question": "Send it?"})}},
		reply{blocks: []object{call("f", "key", object{"text": "Return"})}},
		reply{blocks: []object{text("Sent.")}})
	models := map[string]looprunner.ModelFactory{Name: New(s.env())}
	decided := 0
	w.Runner("first", models, func(point string, die func()) {
		if point == "appended:decided" {
			if decided++; decided == 2 {
				die()
			}
		}
	})
	w.Start("l1", "Send the order.", opus55)
	w.Until("l1", events.LoopDecidedName)
	w.Runner("second", models, nil)
	w.Until("l1", events.LoopPausedName)
	w.Say("l1", "yes")
	j, f := w.Finished("l1")
	s.clean()
	if f.Outcome != events.LoopSucceeded || w.Acts(j) != "open:https://shop.example/ click:3,4 type:hello key:Enter" {
		t.Errorf("%s %s: %s; acts %s; journal %s", f.Outcome, f.Code, f.Message, w.Acts(j), thinkertest.Names(j))
	}
	if len(s.bodies) != 5 || f.Usage.OutputTokens != 200 {
		t.Errorf("%d answers were paid for, usage %+v; journal %s", len(s.bodies), f.Usage, thinkertest.Names(j))
	}
	for _, e := range j {
		if strings.Contains(string(e.Data), "sk-ant") {
			t.Errorf("a secret in entry %s", e.Name)
		}
	}
}

// What is wrong with a start is said at once.
func TestStartRefused(t *testing.T) {
	w := world(t)
	w.Runner("r", map[string]looprunner.ModelFactory{Name: New(Environment{})}, nil)
	w.Start("l1", "x", opus55)
	j := w.Until("l1", events.LoopRejectedName)
	var r events.LoopRejected
	if err := j[0].Decode(&r); err != nil {
		t.Fatal(err)
	}
	if r.Code != "noCredentials" || !strings.Contains(r.Message, Variable) {
		t.Errorf("%+v", r)
	}
}
