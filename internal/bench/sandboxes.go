package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
	"berth/internal/providers/playwright"
	"berth/internal/providers/selfhosted"
	"berth/internal/sandboxd"
)

// backend opens a provider with so many sandboxes kept warm; close ends all.
type backend struct {
	name   string
	settle time.Duration // for a spare to be made, after one was taken
	page   computer.Action
	open   func(ctx context.Context, dir string, warm int) (p providers.Provider, closeAll func() error, err error)
}

const (
	words    = `<body style="column-count:4;margin:0"><script>document.body.innerText=Array(900).fill("The quick brown fox jumps.").join(" ")</script>`
	wordsURL = "data:text/html," + words
)

var backends = []backend{
	{"playwright", 1500 * time.Millisecond, computer.Action{Type: computer.Open, Target: wordsURL}, openPlaywright},
	{"desktop", 600 * time.Millisecond, computer.Action{Type: computer.Open, Target: wordsURL}, openDesktops},
}

func openPlaywright(ctx context.Context, dir string, warm int) (providers.Provider, func() error, error) {
	if warm == 0 {
		warm = -1 // its zero means the default
	}
	p, err := playwright.New(ctx, playwright.Options{ServerID: "playwright-01", StateDir: dir, MaxContainers: 4, Spares: warm, Ephemeral: true})
	if err != nil {
		return nil, nil, err
	}
	return p, p.Close, nil
}

// openDesktops serves a sandboxd on loopback and drives it as a worker does.
func openDesktops(ctx context.Context, dir string, warm int) (providers.Provider, func() error, error) {
	key := rand.Text()
	s, err := sandboxd.New(ctx, sandboxd.Options{StateDir: dir, APIKey: key, MaxContainers: 4, Warm: warm, Machine: "desktop", Limits: sandboxd.DefaultLimits(), Ephemeral: true})
	if err != nil {
		return nil, nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, errors.Join(err, s.Shutdown())
	}
	server := &http.Server{Handler: s.Handler(), ReadHeaderTimeout: 10 * time.Second}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	end := func() error {
		err := errors.Join(s.Shutdown(), server.Close())
		if e := <-served; !errors.Is(e, http.ErrServerClosed) {
			err = errors.Join(err, e)
		}
		return err
	}
	p, err := selfhosted.New(ctx, selfhosted.Options{ServerID: "desktop-01", URL: "http://" + l.Addr().String(), APIKey: key, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, nil, errors.Join(err, end())
	}
	return p, func() error { return errors.Join(p.Close(), end()) }, nil
}

// sandboxReady times a create until the sandbox can be used, where a spare is
// kept warm and where none is, without the bus.
func sandboxReady(ctx context.Context, opts options, print func(figure)) error {
	for _, b := range backends {
		for warm, how := range []string{"cold", "warm"} {
			name, wanted := opts.figureName("sandbox_ready", "backend="+b.name+"/"+how)
			if !wanted {
				continue
			}
			var s sample
			err := b.use(ctx, warm, func(p providers.Provider) error {
				for i := range max(5, int(10*opts.seconds)) {
					if warm > 0 {
						time.Sleep(b.settle)
					}
					vm := fmt.Sprint("vm-", i)
					begin := time.Now()
					if _, err := p.Create(ctx, providers.Spec{VM: vm, Fence: 1}); err != nil {
						return err
					}
					s.each = append(s.each, time.Since(begin))
					s.all += s.each[i]
					if err := p.Kill(ctx, vm); err != nil {
						return err
					}
				}
				return nil
			})
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			print(figure{Name: name, N: len(s.each), PerSecond: s.rate(), P50us: s.percentile(0.5), P99us: s.percentile(0.99)})
		}
	}
	return nil
}

// sandboxActions times a picture of a page of text, to PNG bytes at the caller,
// and a click, without the bus.
func sandboxActions(ctx context.Context, opts options, print func(figure)) error {
	for _, b := range backends {
		err := b.use(ctx, 0, func(p providers.Provider) error {
			if _, err := p.Create(ctx, providers.Spec{VM: "vm", Fence: 1}); err != nil {
				return err
			}
			if err := execute(ctx, p, b.page); err != nil {
				return err
			}
			for _, what := range []struct {
				name string
				do   func(i int) error
			}{
				{"screenshot", func(int) error {
					_, err := p.Observe(ctx, "vm")
					return err
				}},
				{"click", func(i int) error {
					x, y := 100+400*(i%2), 100 // not twice at one place: that takes its time
					return execute(ctx, p, computer.Action{Type: computer.Click, X: &x, Y: &y, Button: computer.Left, Count: 1})
				}},
			} {
				name, wanted := opts.figureName("sandbox_actions", "backend="+b.name+"/"+what.name)
				if !wanted {
					continue
				}
				var s sample
				for i := 0; s.all.Seconds() < opts.seconds; i++ {
					begin := time.Now()
					if err := what.do(i); err != nil {
						return fmt.Errorf("%s: %w", what.name, err)
					}
					s.each = append(s.each, time.Since(begin))
					s.all += s.each[i]
				}
				print(figure{Name: name, N: len(s.each), PerSecond: s.rate(), P50us: s.percentile(0.5), P99us: s.percentile(0.99)})
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("backend %s: %w", b.name, err)
		}
	}
	return nil
}

func execute(ctx context.Context, p providers.Provider, a computer.Action) error {
	results, err := p.Execute(ctx, providers.Batch{VM: "vm", Actions: []computer.Action{a}})
	if err == nil && results[0].Outcome != computer.OK {
		err = fmt.Errorf("%s: %s: %w", a.Type, results[0].Outcome, results[0].Error)
	}
	return err
}

// use opens the backend, warms it up and closes it.
func (b backend) use(ctx context.Context, warm int, f func(providers.Provider) error) (err error) {
	dir, err := os.MkdirTemp("", "bench") // a short path: sockets are below it
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	p, end, err := b.open(ctx, filepath.Join(dir, "state"), warm)
	if err != nil {
		return err
	}
	return errors.Join(f(p), end())
}
