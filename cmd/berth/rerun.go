package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nuid"

	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/program"
	"berth/internal/replay"
	"berth/internal/thinkers/recorded"
)

type rerunOptions struct {
	on        bool
	compare   string
	tolerance float64
	settle    float64
	env       envFlag

	settings recorded.Settings
}

// envFlag collects NAME=VALUE.
type envFlag map[string]string

func (e envFlag) String() string { return strings.Join(slices.Sorted(maps.Keys(e)), ",") }

// Set takes one variable.
func (e *envFlag) Set(s string) error {
	name, value, ok := strings.Cut(s, "=")
	if !ok || name == "" {
		return errNoVariable
	}
	if *e == nil {
		*e = envFlag{}
	}
	(*e)[name] = value
	return nil
}

var errNoVariable = errors.New("no NAME=VALUE")

func (o *rerunOptions) register(f *flag.FlagSet) {
	f.BoolVar(&o.on, "rerun", false, "decide the same again in a fresh sandbox, and report the first difference")
	f.StringVar(&o.compare, "compare", "outcome,value,url,title", "with --rerun: what counts, as a `list`; picture may be in it too")
	f.Float64Var(&o.tolerance, "tolerance", recorded.DefaultTolerance, "with --rerun: `share` of a picture's pixels that may differ; 0: none")
	f.Float64Var(&o.settle, "settle", recorded.DefaultSettle, "with --rerun: `seconds` that the sandbox may take to look as recorded")
	f.Func("env", "with --rerun: `NAME=VALUE` for the sandbox, whose values no journal has; repeat it", func(s string) error {
		if err := o.env.Set(s); err != nil {
			return fmt.Errorf("--env: %q is %w", s, err)
		}
		return nil
	})
}

// check also refuses what belongs to --rerun where that is not given.
func (o *rerunOptions) check(f *flag.FlagSet) error {
	var err error
	f.Visit(func(f *flag.Flag) {
		if !o.on && err == nil && slices.Contains([]string{"compare", "tolerance", "settle", "env"}, f.Name) {
			err = badUsage("--%s belongs to --rerun", f.Name)
		}
	})
	if err != nil || !o.on {
		return err
	}
	o.settings = recorded.Settings{Name: recorded.Name, Loop: "any", Tolerance: &o.tolerance, Settle: &o.settle}
	for _, name := range strings.Split(o.compare, ",") {
		o.settings.Compare = append(o.settings.Compare, recorded.Field(strings.TrimSpace(name)))
	}
	var data *events.DataError
	if err := o.settings.Check(); errors.As(err, &data) {
		return badUsage("--%s", strings.Replace(strings.TrimPrefix(data.Message, "model."), "settleSeconds", "settle", 1))
	}
	return nil
}

// rerunResult is what --json prints.
type rerunResult struct {
	Loop       string               `json:"loop"`  // whose decisions
	Rerun      string               `json:"rerun"` // the loop that made them again
	Same       bool                 `json:"same"`
	Steps      int                  `json:"steps"`
	Difference *recorded.Difference `json:"difference,omitempty"`
	Outcome    string               `json:"outcome"` // of the rerun
	Code       string               `json:"code,omitempty"`
	Message    string               `json:"message,omitempty"`
}

// rerun runs a loop that decides what the recorded one decided.
func (c *call) rerun(ctx context.Context, cl *client, tenant string, entries []looprunner.Entry, o *rerunOptions) error {
	story, err := replay.Tell(entries)
	if err != nil {
		return err
	}
	start, err := o.start(story)
	if err != nil {
		return err
	}
	req, err := request(events.TypeLoopStart, start)
	if err != nil {
		return err
	}
	r := &runner{call: c, o: &runOptions{tenant: tenant}, loop: start.LoopID, term: false, began: time.Now(), seen: map[string]bool{}}
	r.file = &scriptFile{Goal: start.Goal}
	if c.json { // one result, not the journal
		quiet := *c
		quiet.json, quiet.stdout = false, c.stderr
		r.call = &quiet
	}
	r.say("loop %s decides again what %s decided, %d turns", r.loop, story.Started.LoopID, len(story.Turns))
	if err := cl.publish(ctx, events.RequestSubject(tenant, "loop", events.Start), req); err != nil {
		return err
	}
	finished, rejected, err := r.follow(ctx, cl, events.RequestOf(req))
	if finished == nil && rejected == nil && ctx.Err() != nil {
		if _, e := r.stop(context.WithoutCancel(ctx), cl, req); e != nil {
			return errors.Join(err, e)
		}
		return exitError(exitInterrupted)
	}
	switch {
	case err != nil:
		return err
	case rejected != nil:
		return fmt.Errorf("the rerun was rejected: %s: %s", rejected.Code, rejected.Message)
	}
	return c.judge(story, r, finished)
}

// start is a start request like the recorded one's, with a sandbox of its own.
func (o *rerunOptions) start(story *replay.Story) (events.LoopStart, error) {
	was := story.Started.Start
	id := nuid.Next()
	o.settings.Loop = story.Started.LoopID
	model, err := json.Marshal(o.settings)
	start := events.LoopStart{LoopID: fmt.Sprintf("rerun-%.40s-%s", story.Started.LoopID, strings.ToLower(id[len(id)-8:])),
		Goal: was.Goal, Model: model, Limits: was.Limits}
	none := 0 // a page that settles at another pace is seen more or less often
	start.Limits.RepeatedScreens = &none
	box := events.SandboxCreate{}
	if was.Sandbox != nil {
		box = *was.Sandbox
	}
	box.VMID = ""
	if box.Display == nil && story.Sandbox != nil {
		d := story.Sandbox.Display
		box.Display = &d
	}
	env := map[string]string{}
	var missing []string
	for name := range box.Env {
		if _, ok := o.env[name]; !ok {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		slices.Sort(missing)
		return start, badUsage("the sandbox had an environment whose values no journal has; give --env NAME=VALUE for %s", strings.Join(missing, ", "))
	}
	maps.Copy(env, o.env)
	box.Env = nil
	if len(env) > 0 {
		box.Env = env
	}
	start.Sandbox = &box
	return start, err
}

// judge says whether the rerun came to the same.
func (c *call) judge(story *replay.Story, r *runner, f *events.LoopFinished) error {
	res := rerunResult{Loop: story.Started.LoopID, Rerun: r.loop, Steps: f.Steps, Outcome: f.Outcome, Code: f.Code, Message: f.Message}
	was := story.Finished
	if f.Code == recorded.CodeDiffers {
		d := &recorded.Difference{}
		if err := json.Unmarshal(r.lastReply(), d); err != nil {
			return fmt.Errorf("the rerun differs, %s; its journal does not say how: %w", f.Message, err)
		}
		res.Difference = d
	}
	res.Same = f.Outcome == events.LoopSucceeded || was != nil && was.Outcome == f.Outcome && was.Code == f.Code && was.Steps == f.Steps
	if c.json {
		if err := c.printLine(res); err != nil {
			return err
		}
	} else {
		switch {
		case res.Difference != nil:
			fmt.Fprintf(c.stdout, "\ndiffers at %s\n", res.Difference)
		case res.Same:
			fmt.Fprintf(c.stdout, "\nthe same: %d steps\n", f.Steps)
		default:
			fmt.Fprintf(c.stdout, "\nthe rerun itself %s: %s: %s\n", f.Outcome, cmp.Or(f.Code, "no code"), clip(f.Message, 500))
		}
		fmt.Fprintf(c.stdout, "next      `berth replay %s` shows the rerun\n", r.loop)
	}
	if !res.Same {
		return exitError(program.ExitFailed)
	}
	return nil
}

// lastReply is the reply of the last decision.
func (r *runner) lastReply() json.RawMessage {
	for _, e := range slices.Backward(r.journal) {
		if e.Name == events.LoopDecidedName {
			var d events.LoopDecided
			if json.Unmarshal(e.Data, &d) != nil {
				return nil
			}
			return d.Reply
		}
	}
	return nil
}
