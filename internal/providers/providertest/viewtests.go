package providertest

import (
	"context"
	"errors"
	"image"
	"image/color"
	"slices"
	"strings"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
)

func contextWithCancel(t *testing.T) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	return ctx, cancel
}

var padColour = color.RGBA{R: 0x33, G: 0x66, B: 0x99, A: 0xff}

func isColour(img image.Image, x, y int, want color.RGBA) bool {
	return color.RGBAModel.Convert(img.At(x, y)) == color.Color(want)
}

// find returns the bounds of a colour in a picture.
func find(img image.Image, want color.RGBA) image.Rectangle {
	var found image.Rectangle
	for y := img.Bounds().Min.Y; y < img.Bounds().Max.Y; y++ {
		for x := img.Bounds().Min.X; x < img.Bounds().Max.X; x++ {
			if isColour(img, x, y, want) {
				found = found.Union(image.Rect(x, y, x+1, y+1))
			}
		}
	}
	return found
}

// A created sandbox has painted, and pictures are what the display shows (H15:
// nex#134; S7: opengeni#245).
func (s *suite) pictures(t *testing.T) {
	display := computer.Display{Width: 1000, Height: 720}
	if !s.info.Displays {
		display = computer.DefaultDisplay
	}
	b := s.sandboxOf(t, display)
	// https://github.com/opengeni/opengeni/issues/245: ready means painted.
	t.Run("S7 the first picture", func(t *testing.T) {
		img := decode(t, b.observe(t).PNG)
		if size := img.Bounds().Size(); size.X != display.Width || size.Y != display.Height {
			t.Fatalf("size %v", size)
		}
		if _, _, _, a := img.At(display.Width-1, display.Height-1).RGBA(); a != 0xffff {
			t.Error("the first picture is transparent: nothing was painted")
		}
	})
	page := b.oracle.page()
	b.do(t, opening(page.url))
	t.Run("S7 after open", func(t *testing.T) {
		if s.opts.Window { // open waits until the screen is at rest, which it also is while a slow page comes
			eventually(t, "the page is in the picture", func() bool { return isColour(decode(t, b.observe(t).PNG), 300, 440, padColour) })
			return
		}
		if img := decode(t, b.observe(t).PNG); !isColour(img, 300, 440, padColour) {
			t.Errorf("the page is not in the picture: %v", img.At(300, 440))
		}
	})
	size := page.awaitType(t, "load")
	if !s.opts.Window && (size.Width != display.Width || size.Height != display.Height || size.Ratio != 1) {
		t.Errorf("the page sees %d×%d at %g", size.Width, size.Height, size.Ratio)
	}
	// https://github.com/browserbase/stagehand/issues/1567, https://github.com/trycua/cua/issues/936
	t.Run("S5 a pixel of the picture is a pixel of the page", func(t *testing.T) {
		b.do(t, at(computer.Move, display.Width-1, display.Height-1))
		pad := find(decode(t, b.observe(t).PNG), padColour)
		if pad != image.Rect(20, 160, 320, 460) {
			t.Errorf("the pad is at %v in the picture", pad)
		}
		b.settle(t, page)
		b.do(t, at(computer.Click, pad.Max.X-1, pad.Max.Y-1))
		if c := only(b.settle(t, page), "click"); len(c) != 1 || c[0].Target != "pad" || !c[0].at(319, 459) {
			t.Errorf("a click at the pad's last pixel: %s", list(c))
		}
	})
	t.Run("the pointer is drawn", func(t *testing.T) {
		b.do(t, at(computer.Move, 100, 300))
		with := decode(t, b.do(t, act(computer.Screenshot))[0].Image)
		b.do(t, at(computer.Move, 200, 400))
		without := decode(t, b.observe(t).PNG)
		changed := 0
		for y := 295; y < 325; y++ {
			for x := 95; x < 120; x++ {
				if !isColour(without, x, y, padColour) {
					t.Fatalf("something is drawn at %d,%d", x, y)
				}
				if !isColour(with, x, y, padColour) {
					changed++
				}
			}
		}
		if changed < 20 || isColour(with, 100, 300, padColour) {
			t.Errorf("%d pixels are the pointer's", changed)
		}
	})
	t.Run("a list is chosen from by what the picture shows", func(t *testing.T) {
		b.do(t, at(computer.Click, 850, 35))
		var option image.Rectangle
		eventually(t, "the list is in the picture", func() bool {
			option = find(decode(t, b.observe(t).PNG), color.RGBA{R: 0xaa, G: 0x00, B: 0xbb, A: 0xff})
			return option.Dy() > 5
		})
		b.do(t, at(computer.Click, (option.Min.X+option.Max.X)/2, (option.Min.Y+option.Max.Y)/2))
		if got := page.awaitType(t, "chosen"); got.Data != "second" {
			t.Errorf("chosen %q", got.Data)
		}
		b.do(t, at(computer.Click, 200, 400)) // away from it
		b.settle(t, page)
	})
	t.Run("zoom", func(t *testing.T) {
		zoom := computer.Action{Type: computer.Zoom, Region: &computer.Rect{X: 0, Y: 140, Width: 40, Height: 40}}
		img := decode(t, b.do(t, zoom)[0].Image)
		size := img.Bounds().Size()
		if size.X < 40 || size.X != size.Y {
			t.Fatalf("the zoom is %v", size)
		}
		min := img.Bounds().Min
		corner := func(x, y int) bool { return isColour(img, min.X+x*size.X/40, min.Y+y*size.Y/40, padColour) }
		if !corner(30, 30) || corner(10, 30) || corner(30, 10) {
			t.Error("the zoom shows another region")
		}
	})
}

// batch: it stops at the first failure, and the rest is skipped.
func (s *suite) batch(t *testing.T, b *box) {
	page := b.opened(t)
	results, err := b.try(t.Context(), at(computer.Click, 50, 200), lasting(computer.Wait, 0.5), opening("http://127.0.0.1:1/"), at(computer.Click, 60, 200))
	if err != nil {
		t.Fatal(err)
	}
	if len(results) != 4 || results[0].Outcome != computer.OK || results[2].Outcome != computer.Failed || results[3].Outcome != computer.Skipped {
		t.Fatalf("results %+v", results)
	}
	if f := results[2].Error; f == nil || f.Code != "navigationFailed" || !strings.Contains(f.Message, "ERR_") {
		t.Errorf("the fault is %v; want navigationFailed and the browser's reason", f)
	}
	if c := only(page.seen(), "click"); len(c) != 1 || !c[0].at(50, 200) {
		t.Errorf("the page saw %s", list(c))
	}
	page = b.opened(t) // and it goes on
	b.do(t, at(computer.Click, 50, 200))
	if c := only(b.settle(t, page), "click"); len(c) != 1 {
		t.Errorf("the next page saw %s", list(c))
	}
}

func (s *suite) observation(t *testing.T) {
	b := s.sandbox(t)
	page := b.opened(t)
	t.Run("address and title", func(t *testing.T) {
		o := b.observe(t).Observation
		if o.URL != page.url || o.Title != "oracle" || len(o.Pages) != 1 || !o.Pages[0].Active {
			t.Errorf("observed %+v", o)
		}
	})
	t.Run("dialogs do not block, and are reported once", func(t *testing.T) {
		b.do(t, at(computer.Click, 670, 70), at(computer.Click, 670, 110), at(computer.Click, 670, 150))
		events := page.await(t, "three answers", func(es []event) bool { return len(only(es, "answered")) == 3 })
		got := only(events, "answered")
		if got[1].Data != "confirm:false" || got[2].Data != "prompt:null" {
			t.Errorf("the page was answered %v", got)
		}
		d := b.observe(t).Observation.Dialogs
		if len(d) != 3 || d[0] != (computer.Dialog{Kind: "alert", Message: "attention", Answer: "accepted"}) ||
			d[1] != (computer.Dialog{Kind: "confirm", Message: "sure?", Answer: "dismissed"}) || d[2].Kind != "prompt" || d[2].Answer != "dismissed" {
			t.Errorf("dialogs %+v", d)
		}
		if again := b.observe(t).Observation.Dialogs; len(again) != 0 {
			t.Errorf("reported twice: %+v", again)
		}
	})
	t.Run("a new page becomes the active one, and its close goes back", func(t *testing.T) {
		b.do(t, at(computer.Click, 670, 30))
		page.await(t, "the popup", func(es []event) bool { p := only(es, "painted"); return len(p) > 0 && p[len(p)-1].Doc == "?popup" })
		var o computer.Observation
		eventually(t, "the popup is active", func() bool {
			o = b.observe(t).Observation
			return o.Title == "popup"
		})
		if len(o.Pages) != 2 || o.URL != page.url+"?popup" {
			t.Errorf("pages %+v", o.Pages)
		}
		page.forget()
		b.do(t, at(computer.Click, 100, 300))
		page.await(t, "a click in the popup", func(es []event) bool { c := only(es, "click"); return len(c) == 1 && c[0].Doc == "?popup" })
		b.do(t, at(computer.Click, 670, 310)) // it closes itself
		eventually(t, "the first page is active again", func() bool {
			o = b.observe(t).Observation
			return o.Title == "oracle" && len(o.Pages) == 1
		})
		page.forget()
		b.do(t, at(computer.Click, 100, 300))
		page.await(t, "a click in the first page", func(es []event) bool { c := only(es, "click"); return len(c) == 1 && c[0].Doc == "" })
	})
	t.Run("downloads are reported", func(t *testing.T) {
		b.do(t, at(computer.Click, 670, 190))
		var got []computer.Download
		eventually(t, "the download is reported", func() bool {
			got = append(got, b.observe(t).Observation.Downloads...)
			return len(got) > 0
		})
		if len(got) != 1 || got[0].Name != "cargo ñ.txt" || got[0].URL != page.url+"download" || got[0].Error != "" {
			t.Errorf("downloads %+v", got)
		}
	})
	t.Run("a guarded page can be left", func(t *testing.T) {
		b.do(t, at(computer.Click, 670, 270))
		next := b.oracle.page()
		b.do(t, opening(next.url))
		next.awaitType(t, "painted")
		if d := b.observe(t).Observation.Dialogs; len(d) != 1 || d[0].Kind != "beforeunload" || d[0].Answer != "accepted" {
			t.Errorf("dialogs %+v", d)
		}
	})
}

// isolation: what one sandbox knows, another does not.
func (s *suite) isolation(t *testing.T) {
	a, b := s.sandbox(t), s.sandbox(t)
	page := a.oracle.page()
	a.do(t, opening(page.url+"?cookie"))
	a.do(t, opening(page.url+"?again"))
	load := func(doc string) event {
		events := page.await(t, "the load of "+doc, func(es []event) bool {
			return slices.ContainsFunc(only(es, "load"), func(e event) bool { return e.Doc == doc })
		})
		loads := only(events, "load")
		return loads[slices.IndexFunc(loads, func(e event) bool { return e.Doc == doc })]
	}
	if l := load("?again"); !strings.HasPrefix(l.Data, "who=") {
		t.Errorf("a sandbox lost its cookie: %q", l.Data)
	}
	b.do(t, opening(page.url+"?other"))
	if l := load("?other"); l.Data != "" {
		t.Errorf("a sandbox has another's cookie: %s", l.Data)
	}
	if s.has(providers.Clipboard) {
		a.do(t, text(computer.ClipboardWrite, "secret"))
		if got := string(b.do(t, act(computer.ClipboardRead))[0].Value); got != `""` {
			t.Errorf("a sandbox reads another's clipboard: %s", got)
		}
	}
	fresh := s.sandbox(t)
	if got := fresh.observe(t).Observation; strings.Contains(got.URL, "127.0.0.1") {
		t.Errorf("a fresh sandbox shows %s", got.URL)
	}
}

// hung: a page that answers no more holds up nobody but itself.
func (s *suite) hung(t *testing.T) {
	hang := func(t *testing.T) *box {
		b := s.sandbox(t)
		page := b.opened(t)
		b.do(t, at(computer.Click, 670, 230))
		page.awaitType(t, "hangs")
		return b
	}
	t.Run("a cancelled picture", func(t *testing.T) {
		b := hang(t)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		started := time.Now()
		for ctx.Err() == nil { // until it hangs in earnest
			if _, err := s.p.Observe(ctx, b.vm); err != nil {
				wantErr(t, "the picture", err, context.DeadlineExceeded)
			}
		}
		if d := time.Since(started); d > time.Second+prompt {
			t.Errorf("it returned after %v", d)
		}
	})
	t.Run("a cancelled action", func(t *testing.T) {
		b := hang(t)
		ctx, cancel := context.WithTimeout(t.Context(), 600*time.Millisecond)
		defer cancel()
		started := time.Now()
		_, err := b.try(ctx, lasting(computer.Wait, 0.3), at(computer.Click, 50, 200))
		if err == nil || providers.NothingRan(err) {
			t.Errorf("a click on a hung page: %v", err)
		}
		if d := time.Since(started); d > 600*time.Millisecond+prompt {
			t.Errorf("it returned after %v", d)
		}
		if _, err := s.p.Get(t.Context(), b.vm); err == nil {
			b.do(t, opening("about:blank")) // it was saved, then
		} else {
			wantErr(t, "Get", err, providers.ErrNotFound)
		}
	})
	t.Run("a kill", func(t *testing.T) {
		b := hang(t)
		done := make(chan error, 1)
		go func() {
			_, err := b.try(t.Context(), lasting(computer.Wait, 0.3), at(computer.Click, 50, 200))
			done <- err
		}()
		select {
		case err := <-done:
			t.Fatalf("a click on a hung page returned: %v", err)
		case <-time.After(700 * time.Millisecond): // the time in which a wrong answer would come
		}
		started := time.Now()
		if err := s.p.Kill(t.Context(), b.vm); err != nil {
			t.Fatal(err)
		}
		wantErr(t, "the click", <-done, providers.ErrLost)
		if d := time.Since(started); d > prompt {
			t.Errorf("the kill took %v", d)
		}
	})
}

// loads: a site that does not answer is left as soon as ctx ends, and the
// sandbox lives on.
func (s *suite) loads(t *testing.T) {
	b := s.sandbox(t)
	ctx, cancel := context.WithTimeout(t.Context(), 400*time.Millisecond)
	defer cancel()
	started := time.Now()
	_, err := b.try(ctx, opening(b.oracle.base+"/slow/"))
	if err == nil || errors.Is(err, providers.ErrLost) {
		t.Errorf("open of a silent site: %v", err)
	}
	if d := time.Since(started); d > 400*time.Millisecond+prompt {
		t.Errorf("it returned after %v", d)
	}
	page := b.opened(t)
	page.forget()
	b.do(t, at(computer.Click, 670, 350)) // a plain link
	page.await(t, "the next page", func(es []event) bool { p := only(es, "painted"); return len(p) > 0 && p[0].Doc == "?next" })
	if o := b.observe(t).Observation; o.Title != "next" || len(o.Pages) != 1 {
		t.Errorf("observed %+v", o)
	}
	page.forget()
	back := at(computer.Click, 800, 600)
	back.Button = computer.Back
	b.do(t, back)
	page.await(t, "the page before", func(es []event) bool { p := only(es, "painted"); return len(p) > 0 && p[0].Doc == "" })
	for what, want := range map[string]error{"/etc/passwd": providers.ErrUnsupported, "file:///etc/passwd": providers.ErrUnsupported} {
		if s.has(providers.Files) {
			break
		}
		_, err := b.try(t.Context(), opening(what))
		wantErr(t, "open "+what, err, want)
	}
	if _, err := b.try(t.Context(), opening("javascript:alert(1)")); !providers.NothingRan(err) {
		t.Errorf("open javascript: %v", err)
	}
}
