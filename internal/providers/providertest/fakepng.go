package providertest

import (
	"bytes"
	"compress/zlib"
	"encoding/binary"
	"hash/crc32"
	"sync"
)

// pixelData caches the compressed pixels by size: all pictures of one size
// differ in their palette only, which makes a picture cost microseconds.
var pixelData sync.Map // [2]int → []byte

// solidPNG returns a PNG of one colour, the n-th of 2²⁴.
func solidPNG(width, height, n int) []byte {
	size := [2]int{width, height}
	idat, ok := pixelData.Load(size)
	if !ok {
		idat, _ = pixelData.LoadOrStore(size, blankPixels(width, height))
	}
	var header [13]byte
	binary.BigEndian.PutUint32(header[0:], uint32(width))
	binary.BigEndian.PutUint32(header[4:], uint32(height))
	header[8], header[9] = 1, 3 // one bit a pixel, palette
	colour := uint32(n+1) * 2654435761
	var out bytes.Buffer
	out.WriteString("\x89PNG\r\n\x1a\n")
	chunk(&out, "IHDR", header[:])
	chunk(&out, "PLTE", []byte{byte(colour >> 24), byte(colour >> 16), byte(colour >> 8)})
	chunk(&out, "IDAT", idat.([]byte))
	chunk(&out, "IEND", nil)
	return out.Bytes()
}

func blankPixels(width, height int) []byte {
	var buf bytes.Buffer
	w := zlib.NewWriter(&buf)
	line := make([]byte, 1+(width+7)/8) // filter byte, then one bit a pixel
	for range height {
		if _, err := w.Write(line); err != nil {
			panic(err) // a bytes.Buffer takes everything
		}
	}
	if err := w.Close(); err != nil {
		panic(err)
	}
	return buf.Bytes()
}

func chunk(out *bytes.Buffer, kind string, data []byte) {
	var word [4]byte
	binary.BigEndian.PutUint32(word[:], uint32(len(data)))
	out.Write(word[:])
	sum := crc32.NewIEEE()
	for _, part := range [][]byte{[]byte(kind), data} {
		out.Write(part)
		sum.Write(part)
	}
	binary.BigEndian.PutUint32(word[:], sum.Sum32())
	out.Write(word[:])
}
