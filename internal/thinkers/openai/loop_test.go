package openai

import (
	"testing"

	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/natsd"
	"berth/internal/thinkers/thinkertest"
)

// A whole loop on the real loop-runner, with a safety check that a person
// acknowledges by a message to the loop.
func TestWholeLoop(t *testing.T) {
	srv, err := natsd.Start(natsd.Options{StoreDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Shutdown)
	w := thinkertest.NewWorld(t, srv.InProcess())
	s := newStandin(t,
		reply{items: []object{calls("a", object{"type": "screenshot"})}},
		reply{items: []object{calls("b", object{"type": "click", "button": "left", "x": 3, "y": 4}, object{"type": "type", "text": "hello"})}},
		reply{items: []object{checked("c", object{"type": "keypress", "keys": []string{"ENTER"}})}},
		reply{items: []object{message("Sent.")}})
	w.Runner("r", map[string]looprunner.ModelFactory{Name: New(s.env())}, nil)
	w.Start("l1", "Send the order.", gpt)
	w.Until("l1", events.LoopPausedName)
	w.Say("l1", "yes, that is my own page")
	j, f := w.Finished("l1")
	s.clean()
	if f.Outcome != events.LoopSucceeded || w.Acts(j) != "click:3,4 type:hello key:Enter" || len(s.bodies) != 4 {
		t.Errorf("%s %s: %s; acts %s; %d answers; journal %s", f.Outcome, f.Code, f.Message, w.Acts(j), len(s.bodies), thinkertest.Names(j))
	}
}
