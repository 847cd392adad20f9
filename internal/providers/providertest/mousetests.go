package providertest

import (
	"math"
	"slices"
	"testing"
	"time"

	"berth/internal/computer"
)

// buttonNumbers are MouseEvent.button's.
var buttonNumbers = map[computer.Button]int{computer.Left: 0, computer.Middle: 1, computer.Right: 2, computer.Back: 3, computer.Forward: 4}

func (s *suite) mouse(t *testing.T, b *box) {
	page := b.opened(t)
	t.Run("every button", func(t *testing.T) {
		for button, number := range buttonNumbers {
			a := at(computer.Click, 100, 300)
			a.Button = button
			b.do(t, a)
			events := b.settle(t, page)
			down, up := only(events, "mousedown"), only(events, "mouseup")
			if len(down) != 1 || len(up) != 1 || down[0].Button != number || up[0].Button != number || !down[0].at(100, 300) || down[0].Target != "pad" || !down[0].Trusted {
				t.Errorf("%s: the page saw\n%s", button, list(events))
			}
		}
	})
	t.Run("count", func(t *testing.T) {
		for count, last := range map[int]string{1: "click", 2: "dblclick", 3: "click"} {
			a := at(computer.Click, 50, 200)
			a.Count = count
			b.do(t, a)
			events := b.settle(t, page)
			clicks := only(events, "click")
			if len(clicks) != count || clicks[count-1].Detail != count || len(only(events, last)) == 0 || (count == 1) != (len(only(events, "dblclick")) == 0) {
				t.Errorf("count %d: the page saw\n%s", count, list(events))
			}
			b.do(t, at(computer.Click, 200, 400)) // elsewhere, so that the next count starts anew
			b.settle(t, page)
		}
	})
	t.Run("modifiers are held and released", func(t *testing.T) {
		a := at(computer.Click, 60, 210)
		a.Modifiers = []string{"Control", "Shift"}
		b.do(t, a, at(computer.Click, 60, 210))
		events := b.settle(t, page)
		clicks, keys := only(events, "click"), only(events, "keydown", "keyup")
		if len(clicks) != 2 || clicks[0].Mods != "Control+Shift" || clicks[1].Mods != "" || !released(keys) {
			t.Errorf("the page saw\n%s", list(events))
		}
	})
	// A coordinate of 0 is a coordinate: S10 of cases.md.
	t.Run("S10 zero", func(t *testing.T) {
		b.do(t, at(computer.Click, 0, 0))
		if c := only(b.settle(t, page), "click"); len(c) != 1 || !c[0].at(0, 0) || c[0].Target != "origin" {
			t.Errorf("click at 0,0: %s", list(c))
		}
		b.do(t, at(computer.Click, 100, 0))
		if c := only(b.settle(t, page), "click"); len(c) != 1 || !c[0].at(100, 0) {
			t.Errorf("click at 100,0: %s", list(c))
		}
		b.do(t, at(computer.Click, b.display.Width-1, b.display.Height-1))
		if c := only(b.settle(t, page), "click"); len(c) != 1 || !c[0].at(b.display.Width-1, b.display.Height-1) {
			t.Errorf("click at the last pixel: %s", list(c))
		}
	})
}

// movement is what the pointer does between and beside clicks.
func (s *suite) movement(t *testing.T, b *box) {
	page := b.opened(t)
	// https://github.com/Mudlet/Mudlet/issues/9870
	t.Run("S9 moving to where the pointer is", func(t *testing.T) {
		started := time.Now()
		b.do(t, at(computer.Move, 70, 220), at(computer.Move, 70, 220), at(computer.Move, 70, 220))
		if d := time.Since(started); d > 2*time.Second {
			t.Errorf("three moves took %v", d)
		}
		if m := only(b.settle(t, page), "mousemove"); len(m) == 0 || !m[len(m)-1].at(70, 220) {
			t.Errorf("the page saw %v", m)
		}
	})
	t.Run("a click stays where it was made", func(t *testing.T) {
		var actions []computer.Action
		for i := range 20 {
			actions = append(actions, at(computer.Click, 30+10*i, 200), at(computer.Move, 900, 30+10*i))
		}
		b.do(t, actions...)
		all := b.settle(t, page)
		clicks := only(all, "click")
		if len(clicks) != 20 {
			t.Fatalf("20 clicks: the page saw\n%s", list(all))
		}
		for i, c := range clicks {
			if !c.at(30+10*i, 200) || c.Target != "pad" {
				t.Errorf("click %d at %d,200: %s on %s", i, 30+10*i, c, c.Target)
			}
		}
		if t.Failed() {
			t.Logf("the page saw\n%s", list(all))
		}
	})
	t.Run("down and up", func(t *testing.T) {
		b.do(t, at(computer.Move, 100, 200), act(computer.MouseDown))
		b.do(t, at(computer.Move, 150, 250)) // the button stays down between commands
		b.do(t, act(computer.MouseUp))
		events := b.settle(t, page)
		down, up, moves := only(events, "mousedown"), only(events, "mouseup"), only(events, "mousemove")
		if len(down) != 1 || !down[0].at(100, 200) || len(up) != 1 || !up[0].at(150, 250) || len(moves) == 0 || moves[len(moves)-1].Buttons != 1 {
			t.Errorf("the page saw\n%s", list(events))
		}
	})
}

// released reports whether every key that went down came up, in reverse order.
// A key whose press went to an input method came down as Process.
func released(keys []event) bool {
	var down []event
	for _, e := range keys {
		switch {
		case e.Type == "keydown" && !e.Repeat:
			down = append(down, e)
		case e.Type == "keyup":
			if len(down) == 0 {
				return false
			}
			if d := down[len(down)-1]; d.Code != e.Code || d.Key != e.Key && d.Key != "Process" {
				return false
			}
			down = down[:len(down)-1]
		}
	}
	return len(down) == 0
}

// https://github.com/anthropics/claude-quickstarts/issues/263
func (s *suite) drags(t *testing.T, b *box) {
	t.Run("S1 a page that follows the pointer", func(t *testing.T) {
		page := b.opened(t)
		a := drag(computer.Point{X: 370, Y: 310}, computer.Point{X: 500, Y: 400}, computer.Point{X: 470, Y: 560})
		a.Modifiers = []string{"Shift"}
		b.do(t, at(computer.Move, 900, 700), a) // from elsewhere
		moved := page.awaitType(t, "moved")
		if !moved.at(460, 550) {
			t.Errorf("the knob went to %g,%g; want 460,550", moved.X, moved.Y)
		}
		if moved.Detail < 4 {
			t.Errorf("%d moves between press and release; a page may take that for no drag", moved.Detail)
		}
		events := b.settle(t, page)
		down, up := only(events, "pointerdown"), only(events, "pointerup")
		if len(down) != 1 || !down[0].at(370, 310) || down[0].Target != "knob" || down[0].Mods != "Shift" || len(up) != 1 || !up[0].at(470, 560) || up[0].Mods != "Shift" {
			t.Errorf("the page saw\n%s", list(events))
		}
		if !released(only(events, "keydown", "keyup")) {
			t.Errorf("the modifier was not released:\n%s", list(events))
		}
	})
	t.Run("S1 drag and drop", func(t *testing.T) {
		page := b.opened(t)
		b.do(t, drag(computer.Point{X: 390, Y: 190}, computer.Point{X: 570, Y: 210}))
		if got := page.awaitType(t, "delivered"); got.Data != "cargo" || !got.at(570, 210) {
			t.Errorf("delivered %v", got)
		}
		events := b.settle(t, page)
		if len(only(events, "dragstart")) != 1 || len(only(events, "dragover")) == 0 || len(only(events, "drop")) != 1 || only(events, "mousedown")[0].Target != "src" {
			t.Errorf("the page saw\n%s", list(events))
		}
		b.do(t, at(computer.Click, 100, 300)) // no drag is going on any more
		if c := only(b.settle(t, page), "click"); len(c) != 1 {
			t.Errorf("click after the drop: %s", list(c))
		}
	})
	t.Run("a drag that nothing takes", func(t *testing.T) {
		page := b.opened(t)
		b.do(t, drag(computer.Point{X: 390, Y: 190}, computer.Point{X: 800, Y: 600}), at(computer.Click, 100, 300))
		if events := b.settle(t, page); len(only(events, "delivered")) != 0 || len(only(events, "click")) != 1 {
			t.Errorf("the page saw\n%s", list(events))
		}
	})
}

// One tick is about 100 px, whatever the system calls it: S6,
// https://github.com/trycua/cua/issues/147.
func (s *suite) scroll(t *testing.T, b *box) {
	page := b.opened(t)
	for _, c := range []struct {
		name   string
		dx, dy float64
	}{{"down", 0, 3}, {"up", 0, -1}, {"right", 2, 0}, {"left", -1, 0}, {"both", 1, 2}, {"far", 0, 20}} {
		t.Run("S6 "+c.name, func(t *testing.T) {
			page.forget()
			a := at(computer.Scroll, 100, 600)
			a.DX, a.DY = c.dx, c.dy
			b.do(t, a)
			var wheels []event
			near := func(px, ticks float64) bool {
				return math.Abs(px) >= 60*math.Abs(ticks) && math.Abs(px) <= 130*math.Abs(ticks) && px*ticks >= 0
			}
			page.await(t, "the wheel", func(es []event) bool {
				wheels = only(es, "wheel")
				dx, dy := 0.0, 0.0
				for _, w := range wheels {
					dx, dy = dx+w.DeltaX, dy+w.DeltaY
				}
				return near(dx, c.dx) && near(dy, c.dy)
			})
			if n := max(math.Abs(c.dx), math.Abs(c.dy)); float64(len(wheels)) > n || wheels[0].Target != "sheet" || !wheels[0].at(100, 600) || wheels[0].DeltaMode != 0 {
				t.Errorf("%g ticks became %d wheel events; the first %+v", n, len(wheels), wheels[0])
			}
			page.await(t, "the scrolling", func(es []event) bool { return len(only(es, "scrolled")) > 0 })
			b.settle(t, page) // what came late counts for nobody else
		})
	}
	t.Run("modifiers", func(t *testing.T) {
		a := at(computer.Scroll, 100, 600)
		a.DY, a.Modifiers = 1, []string{"Shift"}
		page.forget()
		b.do(t, a)
		page.await(t, "a wheel with Shift", func(es []event) bool {
			return slices.ContainsFunc(only(es, "wheel"), func(w event) bool { return w.Mods == "Shift" })
		})
		if !released(only(b.settle(t, page), "keydown", "keyup")) {
			t.Error("Shift was not released")
		}
	})
}
