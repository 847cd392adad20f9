// Command scheduler decides where sandboxes live: it takes in requests, places
// them, sees them through to their end, and watches the health of servers. Any
// number may run; one is active, the others stand by.
package main

import (
	"context"
	"os"

	"berth/internal/program"
	"berth/internal/scheduler"
)

// config is the scheduler's environment.
type config struct {
	program.Config
}

func main() { os.Exit(run()) }

func run() int {
	var cfg config
	return program.Main(program.Service{
		Name:   "scheduler",
		About:  "scheduler places sandboxes on servers. Any number may run: one is active, the others stand by.",
		Config: &cfg,
		Shared: &cfg.Config,
		Run: func(ctx context.Context, p *program.Process) error {
			s, err := scheduler.New(scheduler.Options{JS: p.JS, Name: p.Name, Log: p.Log, Tracer: p.Tracer, Meter: p.Meter})
			if err != nil {
				return err
			}
			return s.Run(ctx)
		},
	})
}
