package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"

	"berth/internal/devstack"
	"berth/internal/looprunner"
	"berth/internal/program"
	"berth/internal/telemetry"
	"berth/internal/thinkers"
)

type devOptions struct {
	nats, http, data string
	servers          int
	desktops
}

// desktops are the flags of a stack with a server of desktops.
type desktops struct{ desktop, weaker bool }

func (d *desktops) register(c *call, purpose string) {
	c.flags.BoolVar(&d.desktop, "desktop", false, purpose)
	c.flags.BoolVar(&d.weaker, "allow-weaker-isolation", false, "with --desktop: start also where this machine cannot isolate or limit desktops")
}

func (d *desktops) check() error {
	if d.weaker && !d.desktop {
		return badUsage("--allow-weaker-isolation is about desktops: it goes with --desktop")
	}
	return nil
}

func devCommand() *command {
	return &command{name: "dev", local: true, summary: "Run everything in one process on an embedded NATS server",
		detail: `An embedded NATS server with JetStream, a scheduler, a worker with Playwright servers,
a loop-runner and the demo application, until Ctrl-C or SIGTERM. It prints "ready" on a
line of its own when it serves. There are no accounts: bind it to loopback only.

With --desktop the worker has a server of X11 desktops too, desktop-01: what sandboxd
serves, in this process. It needs root. Desktops reach public addresses only, and so not
the demo application.`,
		flags: func(c *call) {
			o := &devOptions{}
			c.opts = o
			c.flags.StringVar(&o.nats, "nats-addr", "127.0.0.1:4222", "where NATS listens (`host:port`); port 0 takes a free one")
			c.flags.StringVar(&o.http, "http-addr", "127.0.0.1:8088", "where the demo application listens (`host:port`)")
			c.flags.StringVar(&o.data, "data", "", "keep the data in this `directory`; without it they are temporary")
			c.flags.IntVar(&o.servers, "servers", 1, "so many Playwright servers (`n`); 0 with --desktop")
			o.register(c, "a server of X11 desktops too")
		},
		run: func(ctx context.Context, c *call) error {
			if err := c.noArgs(); err != nil {
				return err
			}
			o := c.opts.(*devOptions)
			if err := checkAddr("--nats-addr", o.nats); err != nil {
				return err
			}
			if err := checkAddr("--http-addr", o.http); err != nil {
				return err
			}
			if err := o.check(); err != nil {
				return err
			}
			if o.servers < 0 || o.servers == 0 && !o.desktop || o.servers > 10 {
				return badUsage("--servers: %d is not in 1 to 10 (or 0 with --desktop)", o.servers)
			}
			if o.data != "" {
				abs, err := filepath.Abs(o.data)
				if err != nil {
					return badUsage("--data: %v", err)
				}
				o.data = abs
			}
			prices, err := modelPrices()
			if err != nil {
				return err
			}
			return c.withTelemetry(ctx, slog.LevelInfo, func(tel *telemetry.Telemetry) error {
				return devstack.Run(ctx, devstack.Options{NATSAddr: o.nats, HTTPAddr: o.http, DataDir: o.data, Servers: o.servers, Desktop: o.desktop, Weaker: o.weaker, Prices: prices, Telemetry: tel},
					func(ctx context.Context, s *devstack.Stack) error {
						fmt.Fprintf(c.stdout, "NATS      %s\ndemo app  %s\nservers   %s\n", s.NATSURL, s.DemoURL, strings.Join(s.Servers, ", "))
						fmt.Fprintf(c.stdout, "try       berth run --server %s --script examples/main.json\n          berth servers --server %s\nready\n", s.NATSURL, s.NATSURL)
						<-ctx.Done()
						return stopped(ctx)
					})
			})
		}}
}

// modelPrices reads what the models of a stack inside this process cost.
func modelPrices() (looprunner.Prices, error) {
	var cfg thinkers.Config
	if faults := program.Parse(&cfg); len(faults) > 0 {
		return nil, &inputError{"the environment is at fault:", faults}
	}
	prices, err := cfg.Prices()
	if err != nil {
		return nil, &inputError{"the environment is at fault:", []error{err}}
	}
	return prices, nil
}

// checkAddr refuses what is no host:port before anything is started.
func checkAddr(flag, addr string) error {
	if _, _, err := net.SplitHostPort(addr); err != nil {
		return badUsage("%s: %q is no host:port", flag, addr)
	}
	return nil
}

// stopped is nil where a signal has ended ctx.
func stopped(ctx context.Context) error {
	cause := context.Cause(ctx)
	var asked program.Stopped
	if errors.As(cause, &asked) {
		return nil
	}
	return cause
}

// withTelemetry reads the environment and runs fn with what it asks for.
func (c *call) withTelemetry(ctx context.Context, level slog.Level, fn func(*telemetry.Telemetry) error) error {
	var cfg program.Config
	if faults := append(program.Parse(&cfg), cfg.Validate()...); len(faults) > 0 {
		return &inputError{"the environment is at fault:", faults}
	}
	tel, err := telemetry.Setup(ctx, cfg.Telemetry, telemetry.Options{Service: "berth", Instance: program.UniqueName(), Level: level, Out: c.stderr})
	if err != nil {
		return err
	}
	program.Forget()
	defer flush(ctx, tel)
	return fn(tel)
}
