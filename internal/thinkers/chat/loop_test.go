package chat

import (
	"testing"

	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/natsd"
	"berth/internal/thinkers/thinkertest"
)

// A whole loop on the real loop-runner.
func TestWholeLoop(t *testing.T) {
	srv, err := natsd.Start(natsd.Options{StoreDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Shutdown)
	w := thinkertest.NewWorld(t, srv.InProcess())
	s := newStandin(t,
		reply{calls: [][3]string{{"a", "open", `{"target":"https://shop.example/"}`}}},
		reply{text: "I forgot to call."},
		reply{calls: [][3]string{{"b", "click", `{"x":3,"y":4}`}, {"c", "type", `{"text":"hello"}`}}},
		reply{calls: [][3]string{{"d", "giveUp", `{"reason":"sold out"}`}}})
	w.Runner("r", map[string]looprunner.ModelFactory{Name: New(s.env())}, nil)
	w.Start("l1", "Send the order.", local)
	j, f := w.Finished("l1")
	s.clean()
	if f.Outcome != events.LoopFailed || f.Code != "gaveUp" || f.Message != "sold out" || w.Acts(j) != "open:https://shop.example/ click:3,4 type:hello" {
		t.Errorf("%s %s: %s; acts %s; journal %s", f.Outcome, f.Code, f.Message, w.Acts(j), thinkertest.Names(j))
	}
}
