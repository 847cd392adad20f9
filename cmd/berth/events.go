package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/events"
)

type eventsOptions struct {
	follow bool
	tenant string
	about  string
	last   int
}

func eventsCommand() *command {
	return &command{name: "events", summary: "Show what happened, or what happens",
		detail: "Events are kept for 7 days. Without --follow it shows those of the past and ends.",
		flags: func(c *call) {
			o := &eventsOptions{}
			c.opts = o
			c.flags.BoolVar(&o.follow, "follow", false, "go on with what happens from now, until Ctrl-C")
			c.flags.StringVar(&o.tenant, "tenant", "*", "only this `tenant`'s; _ is the fleet's own")
			c.flags.StringVar(&o.about, "about", "*", "only of this sandbox or server (`id`)")
			c.flags.IntVar(&o.last, "last", 50, "show at most so many of the past")
		},
		run: func(ctx context.Context, c *call) error {
			o := c.opts.(*eventsOptions)
			if err := c.noArgs(); err != nil {
				return err
			}
			for _, f := range []struct{ name, v string }{{"--tenant", o.tenant}, {"--about", o.about}} {
				if f.v != "*" {
					if err := events.CheckID(f.name, f.v); err != nil {
						return badUsage("%v", err)
					}
				}
			}
			if o.last < 0 {
				return badUsage("--last: %d is negative", o.last)
			}
			cl, err := c.connect(ctx)
			if err != nil {
				return err
			}
			defer cl.close()
			filter := events.EventSubject(o.tenant, o.about, ">")
			var past []stored
			if err := cl.readAll(ctx, bus.Events, []string{filter}, func(m stored) error {
				past = append(past, m)
				if len(past) > 2*o.last+16 {
					past = append(past[:0], past[len(past)-o.last:]...)
				}
				return nil
			}); err != nil {
				return err
			}
			next := uint64(1)
			if n := len(past); n > 0 {
				next = past[n-1].sequence + 1
			}
			for _, m := range past[max(0, len(past)-o.last):] {
				if err := c.showEvent(m); err != nil {
					return err
				}
			}
			if !o.follow {
				if len(past) == 0 {
					fmt.Fprintln(c.stderr, "no event of that kind in the last 7 days; --follow waits for one")
				}
				return nil
			}
			err = cl.follow(ctx, bus.Events, jetstream.OrderedConsumerConfig{FilterSubjects: []string{filter}, DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: next},
				func(m stored) (bool, error) { return true, c.showEvent(m) })
			if ctx.Err() != nil {
				return stopped(ctx) // Ctrl-C is how it ends
			}
			return err
		}}
}

// jsonMessage is a stored event in JSON output.
type jsonMessage struct {
	Subject  string          `json:"subject"`
	Sequence uint64          `json:"sequence"`
	Time     time.Time       `json:"time"`
	Event    json.RawMessage `json:"event"`
}

func (c *call) showEvent(m stored) error {
	e, err := events.Decode(m.header, m.data)
	if c.json {
		var raw json.RawMessage
		if err == nil {
			raw, err = e.MarshalJSON()
		} else {
			raw, err = json.Marshal(string(m.data))
		}
		if err != nil {
			return err
		}
		return c.printLine(jsonMessage{m.subject, m.sequence, m.time, raw})
	}
	line := fmt.Sprintf("%s  %s", m.time.Local().Format("15:04:05.000"), m.subject)
	if err != nil {
		line += "  (" + err.Error() + ")"
	} else {
		var d struct {
			answerData
			Explanation string `json:"explanation"`
			Outcome     string `json:"outcome"`
		}
		if events.DecodeTolerant(e, &d) == nil {
			if d.From != "" {
				line += "  from " + d.From
			}
			if d.ServerID != "" && d.VMID != "" {
				line += "  on " + d.ServerID
			}
			for _, s := range []string{d.Outcome, d.Code, d.Reason, d.Explanation, d.Message} {
				if s != "" {
					line += "  " + s
				}
			}
		}
	}
	fmt.Fprintln(c.stdout, strings.Map(printable, line))
	return nil
}
