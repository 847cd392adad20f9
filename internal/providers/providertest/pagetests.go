package providertest

import (
	"slices"
	"testing"

	"berth/internal/computer"
)

// pageTests are the tests whose oracle is the page.
func (s *suite) pageTests() map[string]func(*testing.T) {
	if s.opts.Window {
		return map[string]func(*testing.T){
			"pointer":   s.together(map[string]func(*testing.T, *box){"mouse": s.mouse, "movement": s.movement, "drags": s.drags, "scroll": s.scroll}),
			"keys":      s.together(map[string]func(*testing.T, *box){"keyboard": s.keyboard, "typing": s.typing, "editing and clipboard": s.editing, "release": s.release}),
			"pictures":  s.pictures,
			"isolation": s.isolation,
		}
	}
	return map[string]func(*testing.T){
		"pointer": s.together(map[string]func(*testing.T, *box){"mouse": s.mouse, "movement": s.movement, "drags": s.drags, "scroll": s.scroll}),
		"keys": s.together(map[string]func(*testing.T, *box){
			"keyboard": s.keyboard, "typing": s.typing, "editing and clipboard": s.editing, "release": s.release, "batch": s.batch,
		}),
		"observation": s.observation, "pictures": s.pictures, "isolation": s.isolation, "hung page": s.hung, "loads": s.loads,
	}
}

// opened shows a fresh page and returns its record, or nil without pages.
func (b *box) opened(t *testing.T) *record {
	t.Helper()
	if b.opts.NoPages {
		return nil
	}
	page := b.oracle.page()
	b.do(t, opening(page.url))
	page.awaitType(t, "painted")
	if b.opts.Window { // painted, it may still be without the browser's clicks, which its keys then overtake
		b.do(t, at(computer.Click, 900, 700))
		page.awaitType(t, "click")
	}
	page.forget()
	return page
}

// settle makes the page see one more key, waits for it, and returns (and
// forgets) what the page saw before: all that the actions so far have caused.
// In a window what the pointer does arrives by a way of its own, which keys may
// overtake where the machine is busy: there the page is to be quiet first.
func (b *box) settle(t *testing.T, page *record) []event {
	t.Helper()
	if b.opts.Window {
		page.quiet(t)
	}
	b.do(t, press("F9"))
	is := func(e event, typ string) bool { return e.Type == typ && e.Key == "F9" }
	events := page.await(t, "F9", func(es []event) bool {
		return slices.ContainsFunc(es, func(e event) bool { return is(e, "keyup") })
	})
	page.forget()
	events = events[:slices.IndexFunc(events, func(e event) bool { return is(e, "keydown") })]
	return events
}
