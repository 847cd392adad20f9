// Command worker executes commands on the servers of its registry. For each
// server one worker is active at a time; others with the same entry stand by.
package main

import (
	"context"
	"os"

	"berth/internal/program"
	"berth/internal/providers"
	"berth/internal/registry"
	"berth/internal/worker"
)

// config is the worker's environment.
type config struct {
	program.Config
	Registry registry.Config

	servers []registry.Server
	state   string
}

// Validate lists every fault and keeps the servers that the registry names.
func (c *config) Validate() []error {
	faults := c.Config.Validate()
	servers, more := c.Registry.Load()
	faults = append(faults, more...)
	state, err := c.Registry.State()
	if err != nil {
		faults = append(faults, err)
	}
	c.servers, c.state = servers, state
	return faults
}

func main() { os.Exit(run()) }

func run() int {
	var cfg config
	return program.Main(program.Service{
		Name:   "worker",
		About:  "worker executes commands on the servers of its registry; a server has one active worker at a time.",
		Env:    registry.EnvironmentHelp,
		Config: &cfg,
		Shared: &cfg.Config,
		Run: func(ctx context.Context, p *program.Process) error {
			deps := registry.Deps{StateDir: cfg.state, Spares: cfg.Registry.PlaywrightSpare, Log: p.Log}
			servers := make([]worker.Server, len(cfg.servers))
			for i, s := range cfg.servers {
				servers[i] = worker.Server{ID: s.ID, Config: s.Config, Open: func(ctx context.Context) (providers.Provider, error) {
					return s.Open(ctx, deps)
				}}
			}
			w, err := worker.New(worker.Options{JS: p.JS, Name: p.Name, Servers: servers, Log: p.Log, Tracer: p.Tracer, Meter: p.Meter})
			if err != nil {
				return err
			}
			return w.Run(ctx)
		},
	})
}
