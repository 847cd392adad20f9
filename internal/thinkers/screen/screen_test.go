package screen

import (
	"bytes"
	"context"
	"errors"
	"image"
	"image/color"
	"image/png"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"berth/internal/computer"
)

// The documented sizes: 1512×982 becomes about 1330×864 for the standard tier.
func TestFit(t *testing.T) {
	standard := Limits{Edge: 1568, Pixels: 1_150_000, Tokens: 1568}
	large := Limits{Edge: 2576, Tokens: 4784}
	for _, c := range []struct {
		l          Limits
		have, want Size
	}{
		{standard, Size{1280, 800}, Size{1280, 800}},
		{standard, Size{1512, 982}, Size{1331, 864}},
		{standard, Size{3840, 2160}, Size{1430, 804}},
		{large, Size{3840, 2160}, Size{2576, 1449}},
		{large, Size{1920, 1200}, Size{1920, 1200}},
		{Limits{}, Size{9000, 9000}, Size{9000, 9000}},
		{Limits{Edge: 10}, Size{1000, 1}, Size{10, 1}},
	} {
		if got := c.l.Fit(c.have); got != c.want {
			t.Errorf("%+v of %v: %v, want %v", c.l, c.have, got, c.want)
		}
	}
}

// Whatever the sizes: what fits holds the limits, and a place in the picture
// comes back to itself from the display's pixel, or to the pixel beside it
// where the picture is the larger.
func TestViewProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		side := rapid.IntRange(1, 4000)
		l := Limits{Edge: rapid.IntRange(1, 3000).Draw(t, "edge"), Pixels: rapid.IntRange(1, 4_000_000).Draw(t, "pixels"), Tokens: rapid.IntRange(1, 5000).Draw(t, "tokens")}
		have := Size{side.Draw(t, "w"), side.Draw(t, "h")}
		sent := l.Fit(have)
		if !l.holds(sent) && sent != (Size{1, 1}) && min(sent.Width, sent.Height) > 1 {
			t.Fatalf("%+v of %v: %v", l, have, sent)
		}
		v := View{Sent: sent, Display: computer.Display{Width: side.Draw(t, "dw"), Height: side.Draw(t, "dh")}}
		x, y := rapid.IntRange(0, sent.Width-1).Draw(t, "x"), rapid.IntRange(0, sent.Height-1).Draw(t, "y")
		p, err := v.Point(float64(x), float64(y))
		if err != nil || p.X < 0 || p.Y < 0 || p.X >= v.Display.Width || p.Y >= v.Display.Height {
			t.Fatalf("%v: %v %v", v, p, err)
		}
		bx, by := v.Shown(p)
		slack := 1 + max(sent.Width/v.Display.Width, sent.Height/v.Display.Height)
		if abs(bx-x) > slack || abs(by-y) > slack {
			t.Fatalf("%v: %d,%d → %v → %d,%d", v, x, y, p, bx, by)
		}
	})
}

func abs(n int) int { return max(n, -n) }

func TestPointRefuses(t *testing.T) {
	v := View{Sent: Size{100, 50}, Display: computer.Display{Width: 1000, Height: 500}}
	for _, p := range [][2]float64{{-1, 0}, {0, -0.5}, {100, 0}, {0, 50}, {1e9, 1}} {
		_, err := v.Point(p[0], p[1])
		var invalid *computer.InvalidError
		if !errors.As(err, &invalid) || invalid.Code != computer.CodeOutOfRange {
			t.Errorf("%v: %v", p, err)
		}
	}
	v.Inclusive = true
	if p, err := v.Point(100, 50); err != nil || p != (computer.Point{X: 999, Y: 499}) {
		t.Errorf("%v %v", p, err)
	}
	if _, err := v.Rect(0, 0, 101, 10); err == nil {
		t.Error("a region beyond the edge")
	}
	if r, err := v.Rect(0, 0, 100, 50); err != nil || r != (computer.Rect{Width: 1000, Height: 500}) {
		t.Errorf("%v %v", r, err)
	}
}

func noise(w, h int) []byte {
	img := image.NewRGBA(image.Rect(0, 0, w, h))
	r := rand.New(rand.NewPCG(1, 2))
	for i := range img.Pix {
		img.Pix[i] = uint8(r.Uint32())
	}
	var buf bytes.Buffer
	if err := png.Encode(&buf, img); err != nil {
		panic(err)
	}
	return buf.Bytes()
}

func TestPrepare(t *testing.T) {
	raw := noise(200, 150)
	same, err := Prepare(raw, Limits{Edge: 200}, Size{})
	if err != nil || !bytes.Equal(same.Data, raw) || same.MediaType != "image/png" {
		t.Errorf("a picture within the limits is not sent as it is: %v", err)
	}
	for _, c := range []struct {
		l      Limits
		grow   Size
		want   Size
		format string
	}{
		{Limits{Edge: 100}, Size{}, Size{100, 75}, "png"},
		{Limits{Bytes: 24_000}, Size{}, Size{200, 150}, "jpeg"},
		{Limits{Edge: 640}, Size{640, 400}, Size{533, 400}, "png"},
		{Limits{Edge: 1280}, Size{100, 50}, Size{200, 150}, "png"},
	} {
		one, err := Prepare(raw, c.l, c.grow)
		two, err2 := Prepare(raw, c.l, c.grow)
		if err != nil || err2 != nil {
			t.Fatal(err, err2)
		}
		cfg, format, err := image.DecodeConfig(bytes.NewReader(one.Data))
		if err != nil || (Size{cfg.Width, cfg.Height}) != one.Size || one.Size != c.want || format != c.format || one.MediaType != "image/"+format {
			t.Errorf("%+v: %v %s, %d bytes, %v", c.l, one.Size, format, len(one.Data), err)
		}
		if c.l.Bytes > 0 && len(one.Data) > c.l.Bytes {
			t.Errorf("%d bytes, at most %d", len(one.Data), c.l.Bytes)
		}
		if !bytes.Equal(one.Data, two.Data) {
			t.Error("the same picture is prepared in two ways")
		}
	}
	for _, bad := range [][]byte{nil, []byte("text"), raw[:len(raw)/2]} {
		if _, err := Prepare(bad, Limits{Edge: 10}, Size{}); err == nil {
			t.Errorf("%d bytes taken for a picture", len(bad))
		}
	}
}

func TestGallery(t *testing.T) {
	g := NewGallery(Limits{}, 2)
	fetched := 0
	fetch := func(context.Context, string) ([]byte, error) { fetched++; return noise(10, 10), nil }
	for _, name := range []string{"a", "b", "a", "b", "c", "b", "a"} {
		if _, err := g.Picture(t.Context(), fetch, computer.Picture{Object: name}, Size{}); err != nil {
			t.Fatal(err)
		}
	}
	if fetched != 4 {
		t.Errorf("fetched %d times, want 4", fetched)
	}
	gone := errors.New("gone")
	if _, err := g.Picture(t.Context(), func(context.Context, string) ([]byte, error) { return nil, gone }, computer.Picture{Object: "x"}, Size{}); !errors.Is(err, gone) {
		t.Error(err)
	}
}

func BenchmarkPrepare(b *testing.B) {
	img := image.NewRGBA(image.Rect(0, 0, 3840, 2160))
	for y := range 2160 {
		for x := range 3840 {
			img.Set(x, y, color.RGBA{uint8(x / 16), uint8(y / 16), 90, 255})
		}
	}
	var buf bytes.Buffer
	if err := png.Encode(&buf, img); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := Prepare(buf.Bytes(), Limits{Edge: 1568}, Size{}); err != nil {
			b.Fatal(err)
		}
	}
}
