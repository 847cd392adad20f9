package desktop

import (
	"slices"
	"testing"
	"time"

	"berth/internal/computer"
)

// percentiles runs f b.N times and reports p50 and p99.
func percentiles(b *testing.B, f func()) {
	b.Helper()
	var took []time.Duration
	for b.Loop() {
		began := time.Now()
		f()
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50us")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99us")
}

func BenchmarkScreenshotEmpty(b *testing.B) {
	s := start(b)
	percentiles(b, func() {
		if _, err := s.Picture(b.Context()); err != nil {
			b.Fatal(err)
		}
	})
}

// BenchmarkScreenshotBrowser takes pictures of a page of text.
func BenchmarkScreenshotBrowser(b *testing.B) {
	s := start(b)
	do(b, s, computer.Action{Type: computer.Open, Target: "file:///usr/share/common-licenses/GPL-3"})
	do(b, s, computer.Action{Type: computer.Open, Target: "data:text/html,<body style='column-count:4'><script>document.body.innerText=Array(900).fill('The quick brown fox jumps.').join(' ')</script>"})
	var size int
	percentiles(b, func() {
		shot, err := s.Picture(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		size = len(shot.PNG)
	})
	b.ReportMetric(float64(size), "bytes")
}

func BenchmarkClick(b *testing.B) {
	s := start(b)
	record(b, s)
	n := 0
	percentiles(b, func() { // not twice at one place: that takes its time
		n++
		do(b, s, at(computer.Click, 100+400*(n%2), 100))
	})
}

// BenchmarkType25 types 25 characters.
func BenchmarkType25(b *testing.B) {
	s := start(b)
	record(b, s)
	a := text(computer.TypeText, "The quick brown Fox jumps")
	percentiles(b, func() { do(b, s, a) })
}

func BenchmarkStart(b *testing.B) {
	percentiles(b, func() {
		s := start(b)
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
	})
}
