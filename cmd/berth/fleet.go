package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os/user"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"berth/internal/bus"
	"berth/internal/events"
	"berth/internal/kv"
)

func serversCommand() *command {
	return &command{name: "servers", summary: "List the servers: health, admin state, what they hold", run: func(ctx context.Context, c *call) error {
		if err := c.noArgs(); err != nil {
			return err
		}
		cl, err := c.connect(ctx)
		if err != nil {
			return err
		}
		defer cl.close()
		list, err := records(ctx, cl, kv.BucketServers, ">", func(string, kv.ServerView) bool { return true })
		if err != nil {
			return err
		}
		slices.SortFunc(list, func(a, b kv.ServerView) int { return cmp.Compare(a.ID, b.ID) })
		if c.json {
			return c.printJSON(nonNil(list))
		}
		if len(list) == 0 {
			fmt.Fprintln(c.stderr, "no server has registered; start a worker (`berth dev` has one)")
			return nil
		}
		rows := [][]string{{"SERVER", "PROVIDER", "HEALTH", "ADMIN", "USED", "ROLES", "PRIORITY", "ISOLATION", "BREAKER", "REASON"}}
		for _, s := range list {
			rows = append(rows, []string{s.ID, s.Provider, string(s.Health), string(s.Admin), fmt.Sprintf("%d/%d", s.Used, s.MaxContainers),
				strings.Join(s.Roles, ","), fmt.Sprint(s.Priority), string(s.Isolation), s.Breaker, s.Reason})
		}
		return table(c.stdout, rows...)
	}}
}

type psOptions struct {
	all    bool
	tenant string
}

func psCommand() *command {
	return &command{name: "ps", summary: "List the sandboxes",
		detail: "Ended sandboxes are kept for 24 hours; --all shows them too.",
		flags: func(c *call) {
			o := &psOptions{}
			c.opts = o
			c.flags.BoolVar(&o.all, "all", false, "ended ones too")
			c.flags.StringVar(&o.tenant, "tenant", "", "only this `tenant`'s")
		},
		run: func(ctx context.Context, c *call) error {
			if err := c.noArgs(); err != nil {
				return err
			}
			o := c.opts.(*psOptions)
			cl, err := c.connect(ctx)
			if err != nil {
				return err
			}
			defer cl.close()
			hidden := 0
			list, err := records(ctx, cl, kv.BucketPlacements, "vm.*", func(_ string, p kv.Placement) bool {
				if o.tenant != "" && p.Tenant != o.tenant {
					return false
				}
				if p.Phase == kv.Ended && !o.all {
					hidden++
					return false
				}
				return true
			})
			if err != nil {
				return err
			}
			slices.SortFunc(list, func(a, b kv.Placement) int {
				return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.VMID, b.VMID))
			})
			if c.json {
				return c.printJSON(nonNil(list))
			}
			if len(list) == 0 {
				fmt.Fprintf(c.stderr, "no sandbox (%d ended; --all shows them)\n", hidden)
				return nil
			}
			why := cl.whyQueued(ctx, list)
			rows := [][]string{{"VM", "TENANT", "ROLE", "PHASE", "SERVER", "AGE", "EXPIRES", "NOTE"}}
			for _, p := range list {
				expires, note := "–", p.Message
				if p.ExpiresAt != nil && p.Phase != kv.Ended {
					expires = short(time.Until(*p.ExpiresAt))
				}
				phase := string(p.Phase)
				switch {
				case p.Phase == kv.Ended:
					phase, note = p.Outcome, strings.Trim(p.Code+": "+p.Message, ": ")
				case p.Ending != nil:
					note = "ending: " + p.Ending.Code
				case p.Phase == kv.Queued:
					note = why[p.VMID]
				}
				rows = append(rows, []string{p.VMID, p.Tenant, p.Role, phase, cmp.Or(p.ServerID, "–"), ago(p.CreatedAt), expires, note})
			}
			return table(c.stdout, rows...)
		}}
}

// maxWhy bounds how many queued events one `berth ps` reads.
const maxWhy = 50

// whyQueued reads why sandboxes wait, from what was last announced about them.
// What cannot be read is left out: the list itself is what was asked for.
func (cl *client) whyQueued(ctx context.Context, list []kv.Placement) map[string]string {
	why := map[string]string{}
	s, err := cl.js.Stream(ctx, bus.Events)
	if err != nil {
		return why
	}
	for _, p := range list {
		if p.Phase != kv.Queued || len(why) >= maxWhy {
			continue
		}
		e, raw, err := bus.Last(ctx, s, events.EventSubject(p.Tenant, p.VMID, events.EventQueued))
		var q events.Queued
		if err == nil && raw != nil && events.DecodeTolerant(e, &q) == nil {
			why[p.VMID] = q.Explanation
		}
	}
	return why
}

func nonNil[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s
}

// request makes an event in the name of the person who runs berth.
func request(typ string, data any) (events.Event, error) {
	who := "unknown"
	if u, err := user.Current(); err == nil && u.Username != "" {
		who = u.Username
	}
	return events.New(typ, "/berth/cli/"+who, nuid.Next(), data)
}

// ask publishes a request and waits for the event that answers it, as match
// recognises it among all events that pass filters from then on.
func (cl *client) ask(ctx context.Context, timeout time.Duration, subject string, e events.Event, filters []string, match func(name string, e events.Event) bool) (events.Event, error) {
	s, err := cl.js.Stream(ctx, bus.Events)
	if err != nil {
		return events.Event{}, explain(fmt.Errorf("read events: %w", err))
	}
	from := s.CachedInfo().State.LastSeq + 1
	if err := cl.publish(ctx, subject, e); err != nil {
		return events.Event{}, err
	}
	waiting, cancel := context.WithTimeoutCause(ctx, timeout, errNoAnswer)
	defer cancel()
	var answer events.Event
	err = cl.follow(waiting, bus.Events, jetstream.OrderedConsumerConfig{FilterSubjects: filters, DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: from},
		func(m stored) (bool, error) {
			got, err := events.Decode(m.header, m.data)
			if err != nil || !match(m.subject[strings.LastIndexByte(m.subject, '.')+1:], got) {
				return true, nil
			}
			answer = got
			return false, nil
		})
	if errors.Is(err, errNoAnswer) || errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return events.Event{}, fmt.Errorf("no answer to %s (id %s) in %s; the request is stored and will be taken in once a scheduler runs; `berth servers` and `berth events` show what is going on", e.Type(), e.ID(), timeout)
	}
	return answer, err
}

var errNoAnswer = errors.New("no answer in time")

// answerData is what the answers to requests share.
type answerData struct {
	VMID     string         `json:"vmId"`
	ServerID string         `json:"serverId"`
	From     string         `json:"from"`
	Reason   string         `json:"reason"`
	Code     string         `json:"code"`
	Message  string         `json:"message"`
	Request  events.Request `json:"request"`
}

func answerOf(e events.Event) answerData {
	var d answerData
	if err := events.DecodeTolerant(e, &d); err != nil {
		return answerData{}
	}
	return d
}

type askOptions struct {
	timeout  time.Duration
	deadline time.Duration
}

func killCommand() *command {
	return &command{name: "kill", args: "VM", summary: "End a sandbox and wait until it is gone",
		flags: func(c *call) {
			o := &askOptions{}
			c.opts = o
			c.flags.DurationVar(&o.timeout, "timeout", time.Minute, "how long to wait")
		},
		run: func(ctx context.Context, c *call) error {
			vm, err := c.oneArg("the id of a sandbox; `berth ps` lists them")
			if err != nil {
				return err
			}
			if err := events.CheckID("VM", vm); err != nil {
				return badUsage("%v", err)
			}
			cl, err := c.connect(ctx)
			if err != nil {
				return err
			}
			defer cl.close()
			b, err := cl.js.KeyValue(ctx, kv.BucketPlacements)
			if err != nil {
				return explain(fmt.Errorf("open bucket %s: %w", kv.BucketPlacements, err))
			}
			rec, _, err := kv.Get[kv.Placement](ctx, b, kv.VMKey(vm))
			switch {
			case errors.Is(err, kv.ErrNotFound):
				return fmt.Errorf("there is no sandbox %q; `berth ps` lists them", vm)
			case err != nil:
				return err
			case rec.Phase == kv.Ended:
				return fmt.Errorf("sandbox %q has ended already: %s, %s", vm, rec.Outcome, rec.Code)
			}
			e, err := request(events.TypeSandboxKill, events.SandboxKill{VMID: vm})
			if err != nil {
				return err
			}
			answer, err := cl.ask(ctx, c.opts.(*askOptions).timeout, events.RequestSubject(rec.Tenant, "sandbox", events.Kill), e,
				[]string{events.EventSubject(rec.Tenant, vm, ">")}, func(name string, got events.Event) bool {
					switch name {
					case events.EventKilled, events.EventFailed, events.EventExpired, events.EventLost:
						return true
					case events.EventRejected:
						return answerOf(got).Request == events.RequestOf(e)
					}
					return false
				})
			if err != nil {
				return err
			}
			return c.report(answer)
		}}
}

// report prints an answer; a rejection is a failure.
func (c *call) report(e events.Event) error {
	d := answerOf(e)
	if c.json {
		if err := c.printJSON(e); err != nil {
			return err
		}
	}
	name := strings.TrimSuffix(e.Type()[strings.LastIndexByte(strings.TrimSuffix(e.Type(), ".v1"), '.')+1:], ".v1")
	if name == events.EventRejected {
		return fmt.Errorf("rejected: %s: %s", d.Code, d.Message)
	}
	if c.json {
		return nil
	}
	about := cmp.Or(d.VMID, d.ServerID)
	line := name + " " + about
	if d.Message != "" {
		line += " (" + d.Message + ")"
	}
	fmt.Fprintln(c.stdout, line)
	return nil
}

// serverVerb is one of the commands about a server.
func serverVerb(verb events.Verb, typ, summary, answer, detail string, deadline bool) *command {
	return &command{name: string(verb), args: "SERVER", summary: summary, detail: detail,
		flags: func(c *call) {
			o := &askOptions{}
			c.opts = o
			c.flags.DurationVar(&o.timeout, "timeout", 15*time.Second, "how long to wait for the scheduler's answer")
			if deadline {
				c.flags.DurationVar(&o.deadline, "deadline", -1, "kill what is left after this `time`; without it nothing is killed")
				c.flags.Lookup("deadline").DefValue = ""
			}
		},
		run: func(ctx context.Context, c *call) error {
			id, err := c.oneArg("the id of a server; `berth servers` lists them")
			if err != nil {
				return err
			}
			if err := events.CheckServerID(id); err != nil {
				return badUsage("%v", err)
			}
			o := c.opts.(*askOptions)
			data := events.ServerRequest{ServerID: id}
			if deadline && o.deadline >= 0 {
				s := o.deadline.Seconds()
				data.DeadlineSeconds = &s
			}
			cl, err := c.connect(ctx)
			if err != nil {
				return err
			}
			defer cl.close()
			e, err := request(typ, data)
			if err != nil {
				return err
			}
			got, err := cl.ask(ctx, o.timeout, events.RequestSubject(events.FleetTenant, "server", verb), e,
				[]string{events.EventSubject(events.FleetTenant, id, ">")}, func(name string, got events.Event) bool {
					return (name == answer || name == events.EventRejected) && answerOf(got).Request == events.RequestOf(e)
				})
			if err != nil {
				return err
			}
			return c.report(got)
		}}
}

func cordonCommand() *command {
	return serverVerb(events.Cordon, events.TypeServerCordon, "Place nothing new on a server", "cordoned", "What is there stays. `berth uncordon` takes it back.", false)
}

func uncordonCommand() *command {
	return serverVerb(events.Uncordon, events.TypeServerUncord, "Take back a cordon or a drain", "uncordoned", "", false)
}

func drainCommand() *command {
	return serverVerb(events.Drain, events.TypeServerDrain, "Empty a server", "draining",
		"Nothing new is placed, and what is there lives on until the deadline. It returns\nonce the drain has begun; `berth events --follow` shows `drained` when the worker\nreports that nothing is left. `berth uncordon` takes it back.", true)
}
