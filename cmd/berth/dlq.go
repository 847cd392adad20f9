package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"berth/internal/bus"
)

func dlqCommand() *command {
	return &command{name: "dlq", args: "[list | show N | retry N | drop N]", summary: "Look at messages that were given up, and do something about them",
		detail: `list     the dead letters of the last 30 days (what it does without an argument)
show N   the headers and the body of number N
retry N  publish the original message once more where it was published, and drop the dead letter
drop N   delete the dead letter`,
		run: func(ctx context.Context, c *call) error {
			verb := "list"
			if len(c.args) > 0 {
				verb = c.args[0]
			}
			var seq uint64
			switch verb {
			case "list":
				if len(c.args) > 1 {
					return badUsage("list takes no argument, got %q", c.args[1])
				}
			case "show", "retry", "drop":
				if len(c.args) != 2 {
					return badUsage("%s needs the number of one dead letter; `berth dlq list` shows them", verb)
				}
				n, err := strconv.ParseUint(c.args[1], 10, 64)
				if err != nil || n == 0 {
					return badUsage("%q is no number of a dead letter", c.args[1])
				}
				seq = n
			default:
				return badUsage("%q; want list, show N, retry N or drop N", verb)
			}
			cl, err := c.connect(ctx)
			if err != nil {
				return err
			}
			defer cl.close()
			if verb == "list" {
				return c.listDeadLetters(ctx, cl)
			}
			return c.deadLetter(ctx, cl, verb, seq)
		}}
}

// deadLetter is one in JSON output.
type deadLetter struct {
	Number  uint64      `json:"number"`
	Time    time.Time   `json:"time"`
	From    string      `json:"from"` // <stream>.<consumer>
	Subject string      `json:"subject"`
	Reason  string      `json:"reason"`
	Bytes   int         `json:"bytes"`
	Headers nats.Header `json:"headers,omitempty"`
	Body    string      `json:"body,omitempty"`
}

func asDeadLetter(m stored) deadLetter {
	return deadLetter{Number: m.sequence, Time: m.time, From: strings.TrimPrefix(m.subject, "deadletter."),
		Subject: m.header.Get(bus.HeaderSubject), Reason: m.header.Get(bus.HeaderReason), Bytes: len(m.data)}
}

func (c *call) listDeadLetters(ctx context.Context, cl *client) error {
	list := []deadLetter{}
	if err := cl.readAll(ctx, bus.DeadLetter, nil, func(m stored) error {
		list = append(list, asDeadLetter(m))
		return nil
	}); err != nil {
		return err
	}
	if c.json {
		return c.printJSON(list)
	}
	if len(list) == 0 {
		fmt.Fprintln(c.stderr, "no dead letter in the last 30 days")
		return nil
	}
	rows := [][]string{{"N", "AGE", "FROM", "SUBJECT", "BYTES", "REASON"}}
	for _, d := range list {
		rows = append(rows, []string{strconv.FormatUint(d.Number, 10), ago(d.Time), d.From, clip(d.Subject, 60), strconv.Itoa(d.Bytes), clip(d.Reason, 120)})
	}
	return table(c.stdout, rows...)
}

func (c *call) deadLetter(ctx context.Context, cl *client, verb string, seq uint64) error {
	s, err := cl.js.Stream(ctx, bus.DeadLetter)
	if err != nil {
		return explain(fmt.Errorf("read %s: %w", bus.DeadLetter, err))
	}
	raw, err := s.GetMsg(ctx, seq)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return fmt.Errorf("there is no dead letter %d; `berth dlq list` shows them", seq)
	}
	if err != nil {
		return fmt.Errorf("read dead letter %d: %w", seq, err)
	}
	d := asDeadLetter(stored{subject: raw.Subject, sequence: raw.Sequence, time: raw.Time, header: raw.Header, data: raw.Data})
	switch verb {
	case "show":
		return c.showDeadLetter(d, raw)
	case "retry":
		if raw.Header.Get(bus.HeaderTruncated) == "true" {
			return fmt.Errorf("dead letter %d holds only the beginning of its message; publish the original again instead", seq)
		}
		msg := nats.NewMsg(d.Subject)
		for k, v := range raw.Header {
			if !strings.HasPrefix(k, "Berth-") && !strings.HasPrefix(strings.ToLower(k), "nats-") {
				msg.Header[k] = v
			}
		}
		msg.Data = raw.Data
		// A fresh message id: the stream may still know the original's.
		if _, err := cl.js.PublishMsg(ctx, msg, jetstream.WithMsgID("retry-"+nuid.Next())); err != nil {
			return explain(fmt.Errorf("publish %s again: %w", d.Subject, err))
		}
		fmt.Fprintf(c.stderr, "published %s again\n", d.Subject)
	}
	if err := s.DeleteMsg(ctx, seq); err != nil {
		return fmt.Errorf("drop dead letter %d: %w", seq, err)
	}
	if c.json {
		return c.printJSON(d)
	}
	fmt.Fprintf(c.stdout, "dropped dead letter %d\n", seq)
	return nil
}

func (c *call) showDeadLetter(d deadLetter, raw *jetstream.RawStreamMsg) error {
	d.Headers, d.Body = raw.Header, string(raw.Data)
	if c.json {
		return c.printJSON(d)
	}
	fmt.Fprintf(c.stdout, "%d  %s  from %s\nsubject: %s\nreason: %s\n", d.Number, d.Time.Format(time.RFC3339Nano), d.From, d.Subject, d.Reason)
	for k, vs := range raw.Header {
		for _, v := range vs {
			fmt.Fprintln(c.stdout, clip(k+": "+v, 500))
		}
	}
	body := raw.Data
	var pretty map[string]any
	if json.Unmarshal(body, &pretty) == nil {
		return c.printJSON(pretty)
	}
	fmt.Fprintf(c.stdout, "%q\n", body)
	return nil
}
