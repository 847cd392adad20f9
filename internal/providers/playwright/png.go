package playwright

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"io"
	"sync"

	"github.com/klauspost/compress/zlib"

	"berth/internal/computer"
)

// arrow is the pointer: '#' is its outline, '.' its body. Its hot spot is the
// top left corner.
var arrow = []string{
	"#",
	"##",
	"#.#",
	"#..#",
	"#...#",
	"#....#",
	"#.....#",
	"#......#",
	"#.......#",
	"#........#",
	"#.........#",
	"#......#####",
	"#...#..#",
	"#..##..#",
	"#.#  #..#",
	"##   #..#",
	"#     #..#",
	"      #..#",
	"       ##",
}

// eachPointerPixel calls set for the pixels of a pointer at a place, as far as
// they lie within the size: with 0 for its outline and 255 for its body.
func eachPointerPixel(at computer.Point, size image.Point, set func(x, y int, grey byte)) {
	for dy, row := range arrow {
		for dx, c := range row {
			if x, y := at.X+dx, at.Y+dy; c != ' ' && x < size.X && y < size.Y {
				set(x, y, map[rune]byte{'#': 0, '.': 255}[c])
			}
		}
	}
}

// screenshot is a PNG from the browser, read as far as drawing a pointer into
// it needs: a decoder and encoder of whole pictures take three times as long.
// Rows hold filtered bytes, as in the file.
type screenshot struct {
	size   image.Point
	depth  int    // bytes a pixel: 3 or 4
	header []byte // IHDR's data
	rows   []byte // size.Y times a filter byte and size.X*depth bytes
}

// errOtherPNG: a kind of PNG that Chromium does not write today.
var errOtherPNG = errors.New("unexpected kind of PNG")

const signature = "\x89PNG\r\n\x1a\n"

// readPNG reads what Chromium writes: eight bits a channel, no palette, not
// interlaced, and rows filtered with None or Up only.
func readPNG(raw []byte) (*screenshot, error) {
	if !bytes.HasPrefix(raw, []byte(signature)) {
		return nil, errors.New("not a PNG")
	}
	s := &screenshot{}
	var data []io.Reader
	for rest := raw[len(signature):]; len(rest) >= 12; {
		n := int(binary.BigEndian.Uint32(rest))
		if n > len(rest)-12 {
			return nil, io.ErrUnexpectedEOF
		}
		switch body := rest[8 : 8+n]; string(rest[4:8]) {
		case "IHDR":
			s.header = body
		case "IDAT":
			data = append(data, bytes.NewReader(body))
		}
		rest = rest[12+n:]
	}
	if len(s.header) != 13 {
		return nil, errors.New("a PNG without header")
	}
	s.size = image.Pt(int(binary.BigEndian.Uint32(s.header)), int(binary.BigEndian.Uint32(s.header[4:])))
	s.depth = map[byte]int{2: 3, 6: 4}[s.header[9]]
	if s.header[8] != 8 || s.depth == 0 || s.header[12] != 0 || uint64(s.size.X)*uint64(s.size.Y) > 1<<24 {
		return nil, errOtherPNG
	}
	z, err := zlib.NewReader(io.MultiReader(data...))
	if err != nil {
		return nil, fmt.Errorf("a PNG's pixels: %w", err)
	}
	s.rows = make([]byte, s.size.Y*s.stride())
	if _, err := io.ReadFull(z, s.rows); err != nil {
		return nil, fmt.Errorf("a PNG's pixels: %w", err)
	}
	for y := range s.size.Y {
		if f := s.rows[y*s.stride()]; f != 0 && f != 2 {
			return nil, errOtherPNG
		}
	}
	return s, nil
}

func (s *screenshot) stride() int { return 1 + s.size.X*s.depth }

// draw draws the pointer. A row filtered with Up holds differences to the row
// above, so what a pixel gains, the one below it loses.
func (s *screenshot) draw(at computer.Point) {
	stride := s.stride()
	eachPointerPixel(at, s.size, func(x, y int, grey byte) {
		for c := range s.depth {
			column := 1 + x*s.depth + c
			want := grey
			if c == 3 {
				want = 255
			}
			var is byte
			for r := y; r >= 0; r-- {
				is += s.rows[r*stride+column]
				if s.rows[r*stride] == 0 { // absolute
					break
				}
			}
			s.rows[y*stride+column] += want - is
			if y+1 < s.size.Y && s.rows[(y+1)*stride] == 2 {
				s.rows[(y+1)*stride+column] -= want - is
			}
		}
	})
}

// deflaters are reused: each has a megabyte of tables.
var deflaters = sync.Pool{New: func() any {
	w, err := zlib.NewWriterLevel(nil, zlib.BestSpeed)
	if err != nil {
		panic(err) // the level is valid
	}
	return w
}}

// encode writes the PNG. It trades bytes for time: a picture is sent once, and
// kept for an hour.
func (s *screenshot) encode() ([]byte, error) {
	var data bytes.Buffer
	data.Grow(len(s.rows) / 4)
	w := deflaters.Get().(*zlib.Writer)
	defer deflaters.Put(w)
	w.Reset(&data)
	if _, err := w.Write(s.rows); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	out := make([]byte, 0, data.Len()+100)
	out = append(out, signature...)
	out = appendChunk(out, "IHDR", s.header)
	out = appendChunk(out, "IDAT", data.Bytes())
	return appendChunk(out, "IEND", nil), nil
}

func appendChunk(out []byte, kind string, body []byte) []byte {
	out = binary.BigEndian.AppendUint32(out, uint32(len(body)))
	start := len(out)
	out = append(append(out, kind...), body...)
	return binary.BigEndian.AppendUint32(out, crc32.ChecksumIEEE(out[start:]))
}

// withPointer returns the PNG with the pointer drawn into it.
func withPointer(raw []byte, at computer.Point) ([]byte, error) {
	s, err := readPNG(raw)
	if err == nil {
		s.draw(at)
		return s.encode()
	}
	if !errors.Is(err, errOtherPNG) {
		return nil, err
	}
	img, err := decodeWithPointer(raw, at)
	if err != nil {
		return nil, err
	}
	return encodeImage(img)
}

// decodeWithPointer returns the picture with the pointer drawn into it.
func decodeWithPointer(raw []byte, at computer.Point) (*image.RGBA, error) {
	img, err := png.Decode(bytes.NewReader(raw))
	if err != nil {
		return nil, fmt.Errorf("decode the browser's picture: %w", err)
	}
	canvas, ok := img.(*image.RGBA)
	if !ok {
		canvas = image.NewRGBA(img.Bounds())
		draw.Draw(canvas, canvas.Bounds(), img, img.Bounds().Min, draw.Src)
	}
	eachPointerPixel(at, canvas.Bounds().Max, func(x, y int, grey byte) {
		canvas.SetRGBA(x, y, color.RGBA{R: grey, G: grey, B: grey, A: 255})
	})
	return canvas, nil
}

func encodeImage(img image.Image) ([]byte, error) {
	var out bytes.Buffer
	e := png.Encoder{CompressionLevel: png.BestSpeed}
	if err := e.Encode(&out, img); err != nil {
		return nil, fmt.Errorf("encode the picture: %w", err)
	}
	return out.Bytes(), nil
}

// sizeOf reads a PNG's size from its header.
func sizeOf(raw []byte) (image.Point, error) {
	c, err := png.DecodeConfig(bytes.NewReader(raw))
	if err != nil {
		return image.Point{}, fmt.Errorf("decode the browser's picture: %w", err)
	}
	return image.Pt(c.Width, c.Height), nil
}
