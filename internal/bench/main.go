// Command bench measures what Berth costs beside the least that any program
// could pay for the same durable work. Each line it prints is one JSON object:
// a figure, and the floor that was measured in the same run on the same
// server. Compare ratios; machines are shared and noisy.
//
//	go run ./internal/bench [-run REGEXP[/REGEXP]] [-seconds N]
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"runtime/debug"
	"runtime/pprof"
	"slices"
	"strings"
	"time"

	"berth/internal/sandboxd"
)

// figure is one line of output. Times are microseconds. Ratio is this figure's
// rate over the floor's where both have one, else the floor's p50 over this
// one's: 1 is as good as the floor, and more is better.
type figure struct {
	Name           string  `json:"name"`
	N              int     `json:"n"`
	PerSecond      float64 `json:"perSecond"`
	P50us          float64 `json:"p50us"`
	P99us          float64 `json:"p99us"`
	FloorName      string  `json:"floorName,omitempty"`
	FloorP50us     float64 `json:"floorP50us,omitempty"`
	FloorP99us     float64 `json:"floorP99us,omitempty"`
	FloorPerSecond float64 `json:"floorPerSecond,omitempty"`
	Ratio          float64 `json:"ratio,omitempty"`
}

// sample is a set of measured durations and the time that they took together.
type sample struct {
	each []time.Duration
	all  time.Duration
}

func (s sample) percentile(p float64) float64 {
	if len(s.each) == 0 {
		return 0
	}
	sorted := slices.Clone(s.each)
	slices.Sort(sorted)
	i := min(int(p*float64(len(sorted))), len(sorted)-1)
	return float64(sorted[i].Nanoseconds()) / 1000
}

func (s sample) rate() float64 { return float64(len(s.each)) / s.all.Seconds() }

// compare makes a figure of what was measured and its floor.
func compare(name string, got sample, floorName string, floor sample) figure {
	return figure{
		Name: name, N: len(got.each), PerSecond: got.rate(), P50us: got.percentile(0.5), P99us: got.percentile(0.99),
		FloorName: floorName, FloorP50us: floor.percentile(0.5), FloorP99us: floor.percentile(0.99), FloorPerSecond: floor.rate(),
		Ratio: got.rate() / floor.rate(),
	}
}

// benchmark prints its figures as it has them.
type benchmark struct {
	name string
	run  func(ctx context.Context, opts options, print func(figure)) error
}

type options struct {
	seconds float64
	only    *regexp.Regexp // of a figure's parameters
}

// figureName joins a benchmark and the parameters of one of its figures, and
// reports whether that figure is wanted.
func (o options) figureName(benchmark, parameters string) (name string, wanted bool) {
	return benchmark + "/" + parameters, o.only.MatchString(parameters)
}

var benchmarks = []benchmark{
	{"placement_decision", placementDecision},
	{"placement_durable", placementDurable},
	{"act_roundtrip", actRoundtrip},
	{"act_browser", actBrowser},
	{"sandbox_ready", sandboxReady},
	{"sandbox_actions", sandboxActions},
	{"scheduler_fleet", schedulerFleet},
	{"loop_step", loopStep},
	{"loop_resume", loopResume},
}

func main() {
	sandboxd.TakeOver() // in a desktop's own processes it does not return
	run := flag.String("run", "", "only the benchmarks whose name matches this `regexp`; one behind a slash is for the figures' parameters")
	var opts options
	flag.Float64Var(&opts.seconds, "seconds", 2, "how long to measure each figure, about")
	profile := flag.String("cpuprofile", "", "write a CPU profile to `file`")
	flag.Parse()
	if *profile != "" {
		f, err := os.Create(*profile)
		if err == nil {
			err = pprof.StartCPUProfile(f)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			os.Exit(2)
		}
		defer pprof.StopCPUProfile()
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if is, err := child(ctx, flag.Args()); is {
		if err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			os.Exit(1)
		}
		return
	}
	// One process plays the NATS server, the requesters and who is measured, all
	// with small heaps: without this a tenth of a figure and of its floor would
	// be garbage collection that no deployment has.
	debug.SetGCPercent(400)
	if err := measure(ctx, *run, opts); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		pprof.StopCPUProfile()
		os.Exit(1)
	}
}

func measure(ctx context.Context, pattern string, opts options) error {
	benchmark, parameters, _ := strings.Cut(pattern, "/")
	want, err := regexp.Compile(benchmark)
	if err == nil {
		opts.only, err = regexp.Compile(parameters)
	}
	if err != nil {
		return fmt.Errorf("-run: %w", err)
	}
	out := json.NewEncoder(os.Stdout)
	for _, b := range benchmarks {
		if !want.MatchString(b.name) {
			continue
		}
		var printed error
		if err := b.run(ctx, opts, func(f figure) { printed = out.Encode(f) }); err != nil {
			return fmt.Errorf("%s: %w", b.name, err)
		}
		if printed != nil {
			return printed
		}
	}
	return nil
}
