package playwright

import (
	"bytes"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"math/rand/v2"
	"testing"

	"berth/internal/computer"
)

// chromiumPNG encodes a picture as Chromium does: RGB or RGBA, filter Up.
func chromiumPNG(t testing.TB, img *image.RGBA, depth int) []byte {
	t.Helper()
	size := img.Bounds().Size()
	s := &screenshot{size: size, depth: depth, header: make([]byte, 13)}
	s.header[2], s.header[3], s.header[6], s.header[7] = byte(size.X>>8), byte(size.X), byte(size.Y>>8), byte(size.Y)
	s.header[8], s.header[9] = 8, map[int]byte{3: 2, 4: 6}[depth]
	for y := range size.Y {
		s.rows = append(s.rows, 2)
		for x := range size.X {
			for c := range depth {
				b := img.Pix[img.PixOffset(x, y)+c]
				if y > 0 {
					b -= img.Pix[img.PixOffset(x, y-1)+c]
				}
				s.rows = append(s.rows, b)
			}
		}
	}
	raw, err := s.encode()
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func noise(size image.Point) *image.RGBA {
	img := image.NewRGBA(image.Rectangle{Max: size})
	for i := range img.Pix {
		img.Pix[i] = byte(rand.Uint32())
		if i%4 == 3 {
			img.Pix[i] = 255
		}
	}
	return img
}

// The quick way draws exactly what the plain way draws, everywhere.
func TestPointerDrawnExactly(t *testing.T) {
	size := image.Pt(64, 48)
	for _, depth := range []int{3, 4} {
		img := noise(size)
		raw := chromiumPNG(t, img, depth)
		for _, at := range []computer.Point{{}, {X: 1, Y: 1}, {X: 30, Y: 20}, {X: 60, Y: 10}, {X: 63, Y: 47}, {X: 10, Y: 40}, {X: 0, Y: 47}} {
			got, err := withPointer(raw, at)
			if err != nil {
				t.Fatal(err)
			}
			drawn, err := png.Decode(bytes.NewReader(got))
			if err != nil {
				t.Fatal(err)
			}
			want := image.NewRGBA(img.Bounds())
			draw.Draw(want, want.Bounds(), img, image.Point{}, draw.Src)
			eachPointerPixel(at, size, func(x, y int, g byte) { want.SetRGBA(x, y, color.RGBA{g, g, g, 255}) })
			for y := range size.Y {
				for x := range size.X {
					if w, g := want.RGBAAt(x, y), color.RGBAModel.Convert(drawn.At(x, y)); color.Color(w) != g {
						t.Fatalf("depth %d, pointer at %v: pixel %d,%d is %v, want %v", depth, at, x, y, g, w)
					}
				}
			}
		}
	}
}

// A PNG of another kind goes the plain way.
func TestPointerInOtherPNG(t *testing.T) {
	raw, err := encodeImage(noise(image.Pt(40, 30))) // Go's encoder uses every filter
	if err != nil {
		t.Fatal(err)
	}
	got, err := withPointer(raw, computer.Point{X: 5, Y: 6})
	if err != nil {
		t.Fatal(err)
	}
	img, err := png.Decode(bytes.NewReader(got))
	if err != nil {
		t.Fatal(err)
	}
	if c := color.RGBAModel.Convert(img.At(5, 6)); c != color.Color(color.RGBA{A: 255}) {
		t.Errorf("the hot spot is %v", c)
	}
}

func FuzzReadPNG(f *testing.F) {
	f.Add(chromiumPNG(f, noise(image.Pt(8, 8)), 3))
	f.Add([]byte(signature))
	f.Fuzz(func(t *testing.T, raw []byte) {
		s, err := readPNG(raw)
		if err == nil {
			s.draw(computer.Point{X: 3, Y: 3})
		}
	})
}

func BenchmarkPointer(b *testing.B) {
	img := image.NewRGBA(image.Rect(0, 0, 1280, 800))
	for y := range 800 {
		for x := range 1280 {
			img.SetRGBA(x, y, color.RGBA{byte(x / 5), byte(y / 4), byte((x + y) / 9), 255})
		}
	}
	raw := chromiumPNG(b, img, 3)
	for b.Loop() {
		if _, err := withPointer(raw, computer.Point{X: 600, Y: 400}); err != nil {
			b.Fatal(err)
		}
	}
}
