package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"berth/internal/computer"
	"berth/internal/dispatch"
	"berth/internal/events"
	"berth/internal/kv"
)

// sandboxOptions are those of the commands that speak to one sandbox.
type sandboxOptions struct {
	timeout time.Duration
	out     string // observe: where the picture goes
}

func sandboxCommands() []*command {
	return []*command{
		sandboxCommand(events.Act, "VM ACTIONS", "Run actions in a sandbox and show what became of each"),
		sandboxCommand(events.Observe, "VM", "Look at a sandbox; --out writes the picture"),
		sandboxCommand(events.Pause, "VM", "Pause a sandbox that can be paused"),
		sandboxCommand(events.Resume, "VM", "Let a paused sandbox go on"),
		sandboxCommand(events.Snapshot, "VM", "Keep a sandbox's state as a template, and print its name"),
	}
}

func sandboxCommand(verb events.Verb, args, summary string) *command {
	return &command{name: string(verb), args: args, summary: summary,
		flags: func(c *call) {
			o := &sandboxOptions{}
			c.opts = o
			c.flags.DurationVar(&o.timeout, "timeout", 2*time.Minute, "how long to wait")
			if verb == events.Observe {
				c.flags.StringVar(&o.out, "out", "", "write the picture, a PNG, to `FILE`")
			}
		},
		run: func(ctx context.Context, c *call) error {
			data, err := c.commandData(verb)
			if err != nil {
				return err
			}
			cl, err := c.connect(ctx)
			if err != nil {
				return err
			}
			defer cl.close()
			return c.askSandbox(ctx, cl, verb, data)
		}}
}

// commandData reads the positional arguments: a vm id, and for an act its
// actions, as a JSON array or one object; "-" is the standard input.
func (c *call) commandData(verb events.Verb) (events.Command, error) {
	want := 1
	if verb == events.Act {
		want = 2
	}
	var data events.Command
	if len(c.args) != want {
		return data, badUsage("give %s", c.cmd.args)
	}
	data.VMID = c.args[0]
	if err := events.CheckID("VM", data.VMID); err != nil {
		return data, badUsage("%v", err)
	}
	if verb != events.Act {
		return data, nil
	}
	raw := []byte(c.args[1])
	if c.args[1] == "-" {
		var err error
		if raw, err = io.ReadAll(io.LimitReader(c.stdin, 1<<20)); err != nil {
			return data, fmt.Errorf("read actions: %w", err)
		}
	}
	var one map[string]any
	if json.Unmarshal(raw, &one) == nil {
		raw = append(append([]byte{'['}, raw...), ']')
	}
	if _, err := computer.DecodeActions(raw); err != nil {
		return data, &inputError{"the actions are at fault:", []error{err}}
	}
	data.Actions = raw
	return data, nil
}

// askSandbox sends a command by way of the scheduler and shows its end. Who
// interrupts it cancels the command.
func (c *call) askSandbox(ctx context.Context, cl *client, verb events.Verb, data events.Command) error {
	o := c.opts.(*sandboxOptions)
	b, err := cl.js.KeyValue(ctx, kv.BucketPlacements)
	if err != nil {
		return explain(fmt.Errorf("open bucket %s: %w", kv.BucketPlacements, err))
	}
	rec, _, err := kv.Get[kv.Placement](ctx, b, kv.VMKey(data.VMID))
	switch {
	case errors.Is(err, kv.ErrNotFound):
		return fmt.Errorf("there is no sandbox %q; `berth ps` lists them", data.VMID)
	case err != nil:
		return err
	}
	e, err := request(events.CommandType(verb), data)
	if err != nil {
		return err
	}
	id := events.RequestOf(e)
	answer, err := cl.ask(ctx, o.timeout, events.RequestSubject(rec.Tenant, "sandbox", verb), e,
		[]string{events.EventSubject(rec.Tenant, data.VMID, events.EventFinished)}, func(_ string, got events.Event) bool {
			var f events.Finished
			return events.DecodeTolerant(got, &f) == nil && f.Source == id.Source && f.CommandID == id.ID
		})
	if err != nil {
		return errors.Join(err, cl.cancel(ctx, rec, id))
	}
	var f events.Finished
	if err := events.DecodeTolerant(answer, &f); err != nil {
		return fmt.Errorf("read the result: %w", err)
	}
	if o.out != "" && f.Observation != nil {
		png, err := dispatch.Frame(ctx, cl.js, f.Observation.Screenshot.Object)
		if err != nil {
			return explain(err)
		}
		if err := os.WriteFile(o.out, png, 0o600); err != nil {
			return fmt.Errorf("write the picture: %w", err)
		}
	}
	return c.showFinished(f)
}

// cancel ends a command that nobody waits for any more.
func (cl *client) cancel(ctx context.Context, rec kv.Placement, id events.Request) error {
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer stop()
	e, err := request(events.CommandType(events.Cancel), events.Command{VMID: rec.VMID, Command: &id})
	if err != nil {
		return err
	}
	if err := cl.publish(ctx, events.RequestSubject(rec.Tenant, "sandbox", events.Cancel), e); err != nil {
		return fmt.Errorf("the command may run all the same: %w", err)
	}
	return nil
}

// showFinished prints a command's end. It is an error unless it is ok.
func (c *call) showFinished(f events.Finished) error {
	if c.json {
		if err := c.printJSON(f); err != nil {
			return err
		}
	} else {
		for i, a := range f.Actions {
			fmt.Fprintf(c.stdout, "%d  %s", i, a.Outcome)
			if len(a.Value) > 0 {
				fmt.Fprintf(c.stdout, "  %s", a.Value)
			}
			if a.Error != nil {
				fmt.Fprintf(c.stdout, "  %s: %s", a.Error.Code, a.Error.Message)
			}
			fmt.Fprintln(c.stdout)
		}
		if ob := f.Observation; ob != nil {
			fmt.Fprintf(c.stdout, "%d×%d  %s  %s\n", ob.Screenshot.Width, ob.Screenshot.Height, ob.URL, ob.Title)
		}
		if f.Template != "" {
			fmt.Fprintln(c.stdout, f.Template)
		}
		if len(f.Actions) == 0 && f.Observation == nil && f.Template == "" && f.Outcome == computer.OK {
			fmt.Fprintln(c.stdout, "ok")
		}
	}
	if f.Outcome == computer.OK {
		return nil
	}
	if f.Error == nil {
		return fmt.Errorf("%s", f.Outcome)
	}
	return fmt.Errorf("%s, %s: %s", f.Outcome, f.Error.Code, f.Error.Message)
}
