package desktop

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/adler32"
	"hash/crc32"
	"hash/maphash"
	"runtime"
	"sync"

	"github.com/klauspost/compress/flate"

	"berth/internal/computer"
)

// PNG encoding for speed: the picture is cut into horizontal strips that are
// filtered ("up") and deflated at the same time, each into its own IDAT chunk.
// The strips' deflate streams end at byte boundaries, so that their
// concatenation is one zlib stream (RFC 1950, 1951; PNG specification 10.1).

// stripRows is the least height worth a strip of its own.
const stripRows = 64

// strip is the work space of one strip.
type strip struct {
	row, before, filtered []byte
	out                   bytes.Buffer
	deflate               *flate.Writer
	sum                   uint32 // Adler-32 of what went in
	length                int
}

var strips = sync.Pool{New: func() any { return &strip{} }}

var seed = maphash.MakeSeed()

func hash(b []byte) uint64 { return maphash.Bytes(seed, b) }

// encodePNG encodes region of BGRX pixels whose rows are width pixels long.
func encodePNG(pixels []byte, width int, region computer.Rect) ([]byte, error) {
	n := max(1, min(runtime.GOMAXPROCS(0), region.Height/stripRows))
	parts := make([]*strip, n)
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range parts {
		parts[i] = strips.Get().(*strip)
		from, to := region.Height*i/n, region.Height*(i+1)/n
		work := func() { errs[i] = parts[i].encode(pixels, width, region, from, to, i == n-1) }
		if i == n-1 {
			work()
		} else {
			wg.Go(work)
		}
	}
	wg.Wait()
	defer func() {
		for _, p := range parts {
			strips.Put(p)
		}
	}()
	total, sum := 0, uint32(1)
	for i, p := range parts {
		if errs[i] != nil {
			return nil, fmt.Errorf("encode the picture: %w", errs[i])
		}
		total += p.out.Len() + 12
		sum = combineAdler(sum, p.sum, p.length)
	}
	out := make([]byte, 0, total+80)
	out = append(out, "\x89PNG\r\n\x1a\n"...)
	header := binary.BigEndian.AppendUint32(nil, uint32(region.Width))
	header = binary.BigEndian.AppendUint32(header, uint32(region.Height))
	out = chunk(out, "IHDR", append(header, 8, 2, 0, 0, 0)) // 8 bits, RGB
	for i, p := range parts {
		data := p.out.Bytes()
		if i == n-1 {
			data = binary.BigEndian.AppendUint32(data, sum)
		}
		if i == 0 {
			data = append([]byte{0x78, 0x01}, data...)
		}
		out = chunk(out, "IDAT", data)
	}
	return chunk(out, "IEND", nil), nil
}

func chunk(out []byte, name string, data []byte) []byte {
	out = binary.BigEndian.AppendUint32(out, uint32(len(data)))
	start := len(out)
	out = append(append(out, name...), data...)
	return binary.BigEndian.AppendUint32(out, crc32.ChecksumIEEE(out[start:]))
}

// encode filters and deflates rows from up to to of region.
func (s *strip) encode(pixels []byte, width int, region computer.Rect, from, to int, last bool) error {
	line := 3 * region.Width
	if cap(s.row) < line {
		s.row, s.before, s.filtered = make([]byte, line), make([]byte, line), make([]byte, line+1)
	}
	s.row, s.before, s.filtered = s.row[:line], s.before[:line], s.filtered[:line+1]
	s.out.Reset()
	if s.deflate == nil {
		var err error
		if s.deflate, err = flate.NewWriter(&s.out, flate.BestSpeed); err != nil {
			return err
		}
	} else {
		s.deflate.Reset(&s.out)
	}
	at := func(y int) []byte { return pixels[4*((region.Y+y)*width+region.X):][:4*region.Width] }
	clear(s.before)
	if from > 0 {
		toRGB(s.before, at(from-1))
	}
	s.filtered[0] = 2 // up
	adler := adler32.New()
	for y := from; y < to; y++ {
		toRGB(s.row, at(y))
		subtract(s.filtered[1:], s.row, s.before)
		if _, err := adler.Write(s.filtered); err != nil {
			return err
		}
		if _, err := s.deflate.Write(s.filtered); err != nil {
			return err
		}
		s.row, s.before = s.before, s.row
	}
	s.sum, s.length = adler.Sum32(), (to-from)*(line+1)
	if last {
		return s.deflate.Close()
	}
	return s.deflate.Flush()
}

func toRGB(dst, bgrx []byte) {
	for len(dst) >= 3 && len(bgrx) >= 4 {
		dst[0], dst[1], dst[2] = bgrx[2], bgrx[1], bgrx[0]
		dst, bgrx = dst[3:], bgrx[4:]
	}
}

// subtract sets dst to a-b, bytewise; eight bytes at a time.
func subtract(dst, a, b []byte) {
	const high = 0x8080808080808080
	for len(a) >= 8 && len(b) >= 8 && len(dst) >= 8 {
		x, y := binary.LittleEndian.Uint64(a), binary.LittleEndian.Uint64(b)
		binary.LittleEndian.PutUint64(dst, ((x|high)-(y&^high))^((x^^y)&high))
		dst, a, b = dst[8:], a[8:], b[8:]
	}
	for i := range a {
		dst[i] = a[i] - b[i]
	}
}

// combineAdler returns the Adler-32 of two texts one after the other, from
// theirs and the second's length (zlib's adler32_combine).
func combineAdler(first, second uint32, length int) uint32 {
	const base = 65521
	rem := uint32(length % base)
	a1, b1, a2, b2 := first&0xffff, first>>16, second&0xffff, second>>16
	a := (a1 + a2 + base - 1) % base
	b := (rem*a1%base + b1 + b2 + base - rem) % base
	return a | b<<16
}
