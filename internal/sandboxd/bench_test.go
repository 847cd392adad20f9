package sandboxd

import (
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

// percentiles runs f for b.N times and reports what its timed part took; before
// is not timed.
func percentiles(b *testing.B, before func(i int), f func(i int)) {
	b.Helper()
	var took []time.Duration
	for i := 0; b.Loop(); i++ {
		if before != nil {
			before(i)
		}
		began := time.Now()
		f(i)
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50us")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99us")
	b.ReportMetric(0, "ns/op") // of both parts: means nothing
}

func benchOptions(b *testing.B, warm int) Options {
	opts := options(b)
	opts.Logger, opts.Warm, opts.MaxContainers = nil, warm, 100
	return opts
}

// BenchmarkCreateCold: from the request to the answer that it is ready.
func BenchmarkCreateCold(b *testing.B) {
	w := serve(b, benchOptions(b, 0))
	percentiles(b, func(i int) {
		if i > 0 {
			w.want(b, 204, "DELETE", "/sandboxes/"+newID(i-1), nil)
		}
	}, func(i int) { w.create(b, newID(i)) })
}

// BenchmarkCreateWarm: the same, where a spare is there.
func BenchmarkCreateWarm(b *testing.B) {
	w := serve(b, benchOptions(b, 1))
	percentiles(b, func(i int) {
		if i > 0 {
			w.want(b, 204, "DELETE", "/sandboxes/"+newID(i-1), nil)
		}
		eventually(b, func() string {
			w.mu.Lock()
			defer w.mu.Unlock()
			if len(w.spares) == 1 {
				return ""
			}
			return "no spare"
		})
	}, func(i int) { w.create(b, newID(i)) })
}

// plain makes a call without holding it to the description, whose check would
// be timed too.
func (w *world) plain(b *testing.B, method, path, body string, key int) {
	b.Helper()
	req, err := http.NewRequest(method, w.http.URL+path, strings.NewReader(body))
	if err != nil {
		b.Fatal(err)
	}
	req.Header.Set("X-API-Key", testKey)
	req.Header.Set("Idempotency-Key", strconv.Itoa(key))
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		b.Fatal(err)
	}
	_, err = io.Copy(io.Discard, resp.Body)
	if err = errors.Join(err, resp.Body.Close()); err != nil || resp.StatusCode != http.StatusOK {
		b.Fatalf("%d, %v", resp.StatusCode, err)
	}
}

func BenchmarkScreenshot(b *testing.B) {
	w := serve(b, benchOptions(b, 0))
	path := w.create(b, "vm-a")
	w.act(b, path, "open", `{"type":"open","target":"data:text/html,<body style='column-count:4'><script>document.body.innerText=Array(900).fill('The quick brown fox jumps.').join(' ')</script>"}`)
	percentiles(b, nil, func(i int) { w.plain(b, "GET", path+"/computer/screenshot", "", i) })
}

func BenchmarkClick(b *testing.B) {
	w := serve(b, benchOptions(b, 0))
	path := w.create(b, "vm-a")
	percentiles(b, nil, func(i int) {
		w.plain(b, "POST", path+"/computer/actions", `{"actions":[{"type":"click","x":`+strconv.Itoa(100+400*(i%2))+`,"y":100}]}`, i) // not twice at one place: that takes its time
	})
}

// BenchmarkType25 types 25 characters.
func BenchmarkType25(b *testing.B) {
	w := serve(b, benchOptions(b, 0))
	path := w.create(b, "vm-a")
	percentiles(b, nil, func(i int) {
		w.plain(b, "POST", path+"/computer/actions", `{"actions":[{"type":"type","text":"The quick brown Fox jumps"}]}`, i)
	})
}

// BenchmarkMemory reports what desktops take, by their cgroups: idle, after a
// picture, and with Chromium on an empty page. What they share with the host,
// such as programs' code, is counted for whoever read it first.
func BenchmarkMemory(b *testing.B) {
	const n = 50
	opts := benchOptions(b, 0)
	w := serve(b, opts)
	used := func() (sum int64) {
		for i := range n {
			m, err := w.find(newID(i)).guest.(*jailed).p.MemoryUsed()
			if err != nil {
				b.Fatal(err)
			}
			sum += m
		}
		return sum
	}
	b.ReportMetric(0, "ns/op")
	for i := range n {
		w.create(b, newID(i))
	}
	b.ReportMetric(float64(used())/n/(1<<20), "MiB/idle")
	for i := range n {
		w.plain(b, "GET", "/sandboxes/"+newID(i)+"/computer/screenshot", "", 0)
	}
	b.ReportMetric(float64(used())/n/(1<<20), "MiB/pictured")
	w.act(b, "/sandboxes/"+newID(0), "open", `{"type":"open","target":"about:blank"}`)
	m, err := w.find(newID(0)).guest.(*jailed).p.MemoryUsed()
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(m)/(1<<20), "MiB/chromium")
}
