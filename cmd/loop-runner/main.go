// Command loop-runner runs observe-think-act loops, journalled in LOOPS. Any
// number may run; a loop whose runner died is taken up by another.
package main

import (
	"context"
	"os"

	"berth/internal/looprunner"
	"berth/internal/program"
	"berth/internal/thinkers"
)

// config is the loop-runner's environment.
type config struct {
	program.Config
	Models thinkers.Config

	prices looprunner.Prices
}

// Validate lists every fault and keeps the prices.
func (c *config) Validate() []error {
	faults := c.Config.Validate()
	prices, err := c.Models.Prices()
	if err != nil {
		faults = append(faults, err)
	}
	c.prices = prices
	return faults
}

func main() { os.Exit(run()) }

func run() int {
	var cfg config
	return program.Main(program.Service{
		Name:   "loop-runner",
		About:  "loop-runner runs observe-think-act loops. Any number may run; a dead one's loops are taken up by another.",
		Env:    thinkers.EnvironmentHelp,
		Config: &cfg,
		Shared: &cfg.Config,
		Run: func(ctx context.Context, p *program.Process) error {
			r, err := looprunner.New(looprunner.Options{NC: p.NC, JS: p.JS, Name: p.Name, Models: thinkers.All(), Prices: cfg.prices, Log: p.Log, Tracer: p.Tracer, Meter: p.Meter})
			if err != nil {
				return err
			}
			return r.Run(ctx)
		},
	})
}
