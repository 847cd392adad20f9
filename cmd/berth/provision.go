package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/events"
	"berth/internal/program"
	"berth/internal/registry"
)

type provisionOptions struct {
	servers  string
	replicas int
	repair   bool
}

func provisionCommand() *command {
	return &command{name: "provision", summary: "Make the streams, buckets and consumers on a NATS server with accounts",
		detail: `Makes what is missing and changes nothing that is there; it can be run again at any
time. What differs from the definition it lists, and exits 1; --repair changes it,
as far as NATS allows. With --servers it makes the two consumers of each server's
worker as well, which no worker may do itself.`,
		flags: func(c *call) {
			o := &provisionOptions{}
			c.opts = o
			c.flags.StringVar(&o.servers, "servers", "", "comma list of server `ids` whose consumers to make")
			c.flags.IntVar(&o.replicas, "replicas", 1, "copies of every stream: 1, 3 or 5 (`n`)")
			c.flags.BoolVar(&o.repair, "repair", false, "change what differs")
		},
		run: func(ctx context.Context, c *call) error {
			if err := c.noArgs(); err != nil {
				return err
			}
			o := c.opts.(*provisionOptions)
			if o.replicas < 1 || o.replicas > 5 {
				return badUsage("--replicas: %d is not in 1 to 5", o.replicas)
			}
			var servers []string
			for id := range strings.SplitSeq(o.servers, ",") {
				if id = strings.TrimSpace(id); id == "" {
					continue
				}
				if err := events.CheckServerID(id); err != nil {
					return badUsage("--servers: %v", err)
				}
				servers = append(servers, id)
			}
			cl, err := c.connect(ctx)
			if err != nil {
				return err
			}
			defer cl.close()
			return c.provision(ctx, cl.js, o, servers)
		}}
}

// provisioned is what provision did and found.
type provisioned struct {
	Made     []string `json:"made"`
	Repaired []drift  `json:"repaired"`
	Drifted  []drift  `json:"drifted"`
}

// drift is a bus.Drift in JSON.
type drift struct {
	Object string `json:"object"`
	Field  string `json:"field"`
	Want   string `json:"want"`
	Have   string `json:"have"`
}

// check finds what differs on the server.
func check(ctx context.Context, js jetstream.JetStream, replicas int) ([]drift, error) {
	found, err := bus.Check(ctx, js, replicas)
	if err != nil {
		return nil, explain(err)
	}
	out := make([]drift, len(found))
	for i, d := range found {
		out[i] = drift(d)
	}
	return out, nil
}

func (c *call) provision(ctx context.Context, js jetstream.JetStream, o *provisionOptions, servers []string) error {
	before, err := check(ctx, js, o.replicas)
	if err != nil {
		return err
	}
	var specs []bus.ConsumerSpec
	for _, id := range servers {
		specs = append(specs, bus.ServerConsumers(id, registry.MaxContainers)...)
	}
	missing, err := missingConsumers(ctx, js, specs)
	if err != nil {
		return explain(err)
	}
	if err := bus.Ensure(ctx, js, o.replicas); err != nil {
		return explain(err)
	}
	if err := bus.EnsureConsumers(ctx, js, missing); err != nil {
		return explain(err)
	}
	var out provisioned
	for _, d := range before {
		if d.Have == "missing" {
			out.Made = append(out.Made, d.Object)
		}
	}
	for _, s := range missing {
		out.Made = append(out.Made, "consumer "+s.Durable+" of "+s.Stream)
	}
	if out.Drifted, err = check(ctx, js, o.replicas); err != nil {
		return err
	}
	if len(out.Drifted) > 0 && o.repair {
		was := out.Drifted
		repairErr := bus.Repair(ctx, js, o.replicas)
		if out.Drifted, err = check(ctx, js, o.replicas); err != nil {
			return err
		}
		for _, d := range was {
			if !slices.Contains(out.Drifted, d) {
				out.Repaired = append(out.Repaired, d)
			}
		}
		if repairErr != nil {
			fmt.Fprintf(c.stderr, "berth provision: %v\n", repairErr)
		}
	}
	out.Made, out.Repaired, out.Drifted = nonNil(out.Made), nonNil(out.Repaired), nonNil(out.Drifted)
	if err := c.reportProvision(out); err != nil {
		return err
	}
	if len(out.Drifted) > 0 {
		return exitError(program.ExitFailed)
	}
	return nil
}

func (c *call) reportProvision(out provisioned) error {
	if c.json {
		return c.printJSON(out)
	}
	for _, m := range out.Made {
		fmt.Fprintln(c.stdout, "made", m)
	}
	for _, d := range out.Repaired {
		fmt.Fprintf(c.stdout, "repaired %s: %s was %s, is %s\n", d.Object, d.Field, d.Have, d.Want)
	}
	for _, d := range out.Drifted {
		fmt.Fprintln(c.stdout, "drifted", bus.Drift(d))
	}
	switch {
	case len(out.Drifted) > 0 && c.opts.(*provisionOptions).repair:
		fmt.Fprintln(c.stderr, "what still differs NATS does not let change: back the stream up, delete it, and provision again")
	case len(out.Drifted) > 0:
		fmt.Fprintln(c.stderr, "`berth provision --repair` changes what differs")
	case len(out.Made)+len(out.Repaired) == 0:
		fmt.Fprintln(c.stdout, "everything is as it should be")
	}
	return nil
}

func missingConsumers(ctx context.Context, js jetstream.JetStream, specs []bus.ConsumerSpec) ([]bus.ConsumerSpec, error) {
	var missing []bus.ConsumerSpec
	for _, s := range specs {
		_, err := js.Consumer(ctx, s.Stream, s.Durable)
		switch {
		case errors.Is(err, jetstream.ErrConsumerNotFound), errors.Is(err, jetstream.ErrStreamNotFound):
			missing = append(missing, s)
		case err != nil:
			return nil, fmt.Errorf("look at consumer %s of %s: %w", s.Durable, s.Stream, err)
		}
	}
	return missing, nil
}
