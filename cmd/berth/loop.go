package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"berth/internal/events"
	"berth/internal/looprunner"
)

// loopVerbs are what can be asked of a running loop.
var loopVerbs = map[string]struct {
	verb     events.Verb
	typ      string
	recorded string // the journal's entry
}{
	"stop":    {events.Stop, events.TypeLoopStop, events.LoopStopName},
	"pause":   {events.Pause, events.TypeLoopPause, events.LoopPauseName},
	"resume":  {events.Resume, events.TypeLoopResume, events.LoopResumeName},
	"message": {events.Message, events.TypeLoopMessage, events.LoopMessageName},
}

type loopOptions struct {
	tenant  string
	timeout time.Duration
}

func loopCommand() *command {
	return &command{name: "loop", args: "(stop|pause|resume|message) LOOP [TEXT]", summary: "Stop, pause or resume a loop, or tell its model something",
		detail: `It waits until the request is in the loop's journal, from where the loop takes it. TEXT is the
message, or the reason of another request. A message also answers what a loop has asked a person
(its needsInput event), and lets a loop go on that is paused for an answer.`,
		flags: func(c *call) {
			o := &loopOptions{}
			c.opts = o
			c.flags.StringVar(&o.tenant, "tenant", "default", "the loop's `tenant`")
			c.flags.DurationVar(&o.timeout, "timeout", 15*time.Second, "how long to wait for the journal")
		},
		run: func(ctx context.Context, c *call) error {
			if len(c.args) < 2 {
				return badUsage("needs what to ask (stop, pause, resume or message) and the id of a loop")
			}
			what, ok := loopVerbs[c.args[0]]
			if !ok {
				return badUsage("%q cannot be asked of a loop; it is stop, pause, resume or message", c.args[0])
			}
			o, data := c.opts.(*loopOptions), events.LoopControlRequest{LoopID: c.args[1]}
			if err := events.CheckID("--tenant", o.tenant); err != nil {
				return badUsage("%v", err)
			}
			text := strings.Join(c.args[2:], " ")
			if what.verb == events.Message {
				data.Text = text
			} else {
				data.Reason = text
			}
			if err := data.Validate(what.verb); err != nil {
				return badUsage("%v", err)
			}
			return c.askLoop(ctx, o, what.verb, what.typ, what.recorded, data)
		}}
}

// askLoop publishes a request about a loop and waits for its entry in the
// journal, or its rejection.
func (c *call) askLoop(ctx context.Context, o *loopOptions, verb events.Verb, typ, recorded string, data events.LoopControlRequest) error {
	cl, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer cl.close()
	req, err := request(typ, data)
	if err != nil {
		return err
	}
	mine := events.RequestOf(req)
	both, cancel := context.WithCancel(ctx)
	defer cancel()
	rejected := make(chan error, 1)
	go func() {
		got, err := cl.ask(both, o.timeout, events.RequestSubject(o.tenant, "loop", verb), req,
			[]string{events.EventSubject(o.tenant, data.LoopID, events.EventRejected)}, func(_ string, e events.Event) bool { return answerOf(e).Request == mine })
		if err == nil {
			err = fmt.Errorf("rejected: %s: %s", answerOf(got).Code, answerOf(got).Message)
		}
		rejected <- err
		cancel()
	}()
	for e, err := range looprunner.Follow(both, cl.js, o.tenant, data.LoopID) {
		if err != nil {
			break // why is told below
		}
		if e.Head.Request != mine || e.Name != recorded {
			continue
		}
		if c.json {
			return c.printJSON(journalEntry{e.Sequence, e.Stored, events.LoopSubject(o.tenant, data.LoopID, e.Name), e.Name, e.Data})
		}
		fmt.Fprintf(c.stdout, "%s is in the journal of loop %s\n", verb, data.LoopID)
		return nil
	}
	return <-rejected // also where the journal has ended
}
