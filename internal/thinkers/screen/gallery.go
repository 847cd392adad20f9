package screen

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"image"
	"image/jpeg"
	"image/png"

	"golang.org/x/image/draw"

	"berth/internal/computer"
)

// maxSource bounds what is decoded: a display is at most 3840×2160, and some
// are captured at twice their size.
const maxSource = 64 << 20 // pixels

// jpegQuality is used where a PNG would be over the limit of bytes.
const jpegQuality = 85

// Image is a picture as a model is sent it.
type Image struct {
	MediaType string
	Data      []byte
	Size      Size
}

// Base64 is the data in standard base64.
func (i Image) Base64() string { return base64.StdEncoding.EncodeToString(i.Data) }

// DataURL is the picture as a data: URL.
func (i Image) DataURL() string { return "data:" + i.MediaType + ";base64," + i.Base64() }

// Prepare makes a PNG or JPEG fit the limits. A picture within them is
// returned as it is, byte for byte. enlarge, where not zero, is a size that a
// smaller picture is enlarged into, up to four times, as for a zoomed region.
func Prepare(raw []byte, limits Limits, enlarge Size) (Image, error) {
	cfg, format, err := image.DecodeConfig(bytes.NewReader(raw))
	if err != nil {
		return Image{}, fmt.Errorf("read picture: %w", err)
	}
	if cfg.Width < 1 || cfg.Height < 1 || cfg.Width*cfg.Height > maxSource {
		return Image{}, fmt.Errorf("a picture of %d×%d is not used", cfg.Width, cfg.Height)
	}
	have := Size{cfg.Width, cfg.Height}
	want := limits.Fit(grown(have, enlarge))
	if want == have && (limits.Bytes == 0 || len(raw) <= limits.Bytes) {
		return Image{MediaType: "image/" + format, Data: raw, Size: have}, nil
	}
	src, _, err := image.Decode(bytes.NewReader(raw))
	if err != nil {
		return Image{}, fmt.Errorf("read picture: %w", err)
	}
	for {
		out, err := encode(scaled(src, want), limits.Bytes)
		if err != nil {
			return Image{}, err
		}
		if limits.Bytes == 0 || len(out.Data) <= limits.Bytes || want.Width*want.Height < patch*patch {
			out.Size = want
			return out, nil
		}
		want = Size{max(1, want.Width*3/4), max(1, want.Height*3/4)}
	}
}

// grown is s in the shape of itself, enlarged into box by at most four times.
func grown(s, box Size) Size {
	if box.Width <= s.Width || box.Height <= s.Height {
		return s
	}
	num, den := box.Width, s.Width
	if box.Height*s.Width < box.Width*s.Height {
		num, den = box.Height, s.Height
	}
	if num > 4*den {
		num, den = 4, 1
	}
	return Size{s.Width * num / den, s.Height * num / den}
}

func scaled(src image.Image, to Size) image.Image {
	if b := src.Bounds(); b.Dx() == to.Width && b.Dy() == to.Height {
		return src
	}
	flat, ok := src.(*image.RGBA)
	if !ok { // the scaler is ten times slower on other kinds
		flat = image.NewRGBA(image.Rect(0, 0, src.Bounds().Dx(), src.Bounds().Dy()))
		draw.Draw(flat, flat.Bounds(), src, src.Bounds().Min, draw.Src)
	}
	dst := image.NewRGBA(image.Rect(0, 0, to.Width, to.Height))
	draw.BiLinear.Scale(dst, dst.Bounds(), flat, flat.Bounds(), draw.Src, nil)
	return dst
}

func encode(img image.Image, limit int) (Image, error) {
	var buf bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestSpeed}).Encode(&buf, img); err != nil {
		return Image{}, fmt.Errorf("encode picture: %w", err)
	}
	if limit == 0 || buf.Len() <= limit {
		return Image{MediaType: "image/png", Data: buf.Bytes()}, nil
	}
	var small bytes.Buffer
	if err := jpeg.Encode(&small, img, &jpeg.Options{Quality: jpegQuality}); err != nil {
		return Image{}, fmt.Errorf("encode picture: %w", err)
	}
	return Image{MediaType: "image/jpeg", Data: small.Bytes()}, nil
}

// Fetch gets a picture's bytes by its object name.
type Fetch func(ctx context.Context, object string) ([]byte, error)

// Gallery prepares the pictures of one loop and keeps the latest, because a
// model is sent each of them many times. It holds nothing that it could not
// prepare again.
type Gallery struct {
	limits Limits
	keep   int
	images map[string]Image
	order  []string
}

// NewGallery makes a gallery that keeps the latest keep pictures.
func NewGallery(limits Limits, keep int) *Gallery {
	return &Gallery{limits: limits, keep: max(1, keep), images: map[string]Image{}}
}

// Picture returns a picture within the limits; see Prepare for enlarge. The
// error is one of fetching or reading it.
func (g *Gallery) Picture(ctx context.Context, fetch Fetch, p computer.Picture, enlarge Size) (Image, error) {
	key := fmt.Sprintf("%s %dx%d", p.Object, enlarge.Width, enlarge.Height)
	if img, ok := g.images[key]; ok {
		return img, nil
	}
	raw, err := fetch(ctx, p.Object)
	if err != nil {
		return Image{}, fmt.Errorf("picture %s: %w", p.Object, err)
	}
	img, err := Prepare(raw, g.limits, enlarge)
	if err != nil {
		return Image{}, fmt.Errorf("picture %s: %w", p.Object, err)
	}
	if len(g.order) == g.keep {
		delete(g.images, g.order[0])
		g.order = g.order[1:]
	}
	g.images[key] = img
	g.order = append(g.order, key)
	return img, nil
}
