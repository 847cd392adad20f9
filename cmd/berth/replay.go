package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"berth/internal/bus"
	"berth/internal/events"
	"berth/internal/looprunner"
)

type replayOptions struct {
	tenant   string
	original bool
}

func replayCommand() *command {
	return &command{name: "replay", args: "LOOP", summary: "Step through what a loop did",
		detail: "Shows the loop's journal: step, decision, outcome, timing, and the picture's name in\nFRAMES (`nats object get FRAMES NAME`). Journals are kept for 7 days, pictures for one.",
		flags: func(c *call) {
			o := &replayOptions{}
			c.opts = o
			c.flags.StringVar(&o.tenant, "tenant", "*", "the `tenant` it belongs to; any where not given")
			c.flags.BoolVar(&o.original, "original", false, "in its original timing")
		},
		run: func(ctx context.Context, c *call) error {
			loop, err := c.oneArg("the id of a loop; `berth run` prints it")
			if err != nil {
				return err
			}
			if err := events.CheckID("LOOP", loop); err != nil {
				return badUsage("%v", err)
			}
			o := c.opts.(*replayOptions)
			if o.tenant != "*" {
				if err := events.CheckID("--tenant", o.tenant); err != nil {
					return badUsage("%v", err)
				}
			}
			cl, err := c.connect(ctx)
			if err != nil {
				return err
			}
			defer cl.close()
			return c.replay(ctx, cl, loop, o)
		}}
}

func (c *call) replay(ctx context.Context, cl *client, loop string, o *replayOptions) error {
	var entries []looprunner.Entry
	var t teller
	err := cl.readAll(ctx, bus.Loops, []string{events.LoopSubject(o.tenant, loop, ">")}, func(m stored) error {
		t.tenant = strings.Split(m.subject, ".")[1]
		e, err := readEntry(m)
		if err == nil {
			entries = append(entries, e)
		}
		return err
	})
	if err != nil {
		return err
	}
	if len(entries) == 0 {
		return fmt.Errorf("there is no journal of a loop %q; it is kept for 7 days, on the server where the loop ran", loop)
	}
	start, last := entries[0].Stored, entries[0].Stored
	for _, e := range entries {
		if o.original {
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(e.Stored.Sub(last)):
			}
		}
		last = e.Stored
		if err := c.replayEntry(&t, start, e); err != nil {
			return err
		}
	}
	if last := entries[len(entries)-1]; last.Name != events.LoopFinishedName && last.Name != events.LoopRejectedName && !c.json {
		fmt.Fprintln(c.stdout, "          (it has not finished)")
	}
	return nil
}

func (c *call) replayEntry(t *teller, start time.Time, e looprunner.Entry) error {
	if c.json {
		return c.printLine(journalEntry{e.Sequence, e.Stored, events.LoopSubject(t.tenant, e.Head.LoopID, e.Name), e.Name, e.Data})
	}
	at := since(start, e.Stored)
	switch e.Name {
	case events.LoopStartedName:
		v, err := read[events.LoopStarted](e)
		if err != nil {
			return err
		}
		fmt.Fprintf(c.stdout, "%s  loop %s of %s, vm %s: %s\n", at, v.LoopID, v.Tenant, v.VMID, clip(v.Start.Goal, 90))
	case events.LoopObservedName:
		v, err := read[events.LoopObserved](e)
		if err != nil {
			return err
		}
		fmt.Fprintf(c.stdout, "%s  %s\n", at, line{step: v.Step, what: "observed", outcome: "ok", ms: v.Timing.RanMs, note: v.Observation.Screenshot.Object})
	case events.LoopFinishedName:
		v, err := read[events.LoopFinished](e)
		if err != nil {
			return err
		}
		fmt.Fprintf(c.stdout, "%s  %s after %d steps and %.1f s", at, v.Outcome, v.Steps, v.Seconds)
		if v.Code != "" {
			fmt.Fprintf(c.stdout, ": %s: %s", v.Code, clip(v.Message, 200))
		}
		fmt.Fprintln(c.stdout)
	case events.LoopRejectedName:
		v, err := read[events.LoopRejected](e)
		if err != nil {
			return err
		}
		fmt.Fprintf(c.stdout, "%s  rejected: %s: %s\n", at, v.Code, clip(v.Message, 200))
	}
	lines, err := t.tell(e)
	if err != nil {
		return err
	}
	for _, l := range lines {
		fmt.Fprintf(c.stdout, "%s  %s\n", at, l)
		if l.object != "" {
			fmt.Fprintf(c.stdout, "%s        %s\n", at, l.object)
		}
	}
	return nil
}

// journalEntry is an entry in JSON, here and in loop.json.
type journalEntry struct {
	Sequence uint64          `json:"sequence"`
	Time     time.Time       `json:"time"`
	Subject  string          `json:"subject"`
	Name     string          `json:"name"`
	Data     json.RawMessage `json:"data"`
}
