package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/nats-io/nuid"

	"berth/internal/computer"
	"berth/internal/demoapp"
	"berth/internal/devstack"
	"berth/internal/dispatch"
	"berth/internal/events"
	"berth/internal/looprunner"
	"berth/internal/looprunner/script"
	"berth/internal/program"
	"berth/internal/replay"
	"berth/internal/telemetry"
	"berth/internal/thinkers"
	"berth/internal/thinkers/recorded"
)

type runOptions struct {
	script, goal, model string
	role, tenant        string
	out                 string
	limits              string
	keep                bool
	desktops
}

// stopPatience is how long an interrupted run waits for its loop to end.
const stopPatience = 15 * time.Second

func runCommand() *command {
	return &command{name: "run", args: "(--script FILE | --goal TEXT --model NAME)", summary: "Run one loop, with its progress, pictures and journal",
		detail: `Without --server and NATS_URL it starts the whole stack inside itself and ends it again.
A script is a JSON file of actions and checks, see examples/; where it says {{demo}},
the demo application is started and its URL put in. Pictures, loop.json (the whole
journal, with timings) and loop.html (to step through) go to out/LOOP/. With --json it prints the journal's entries instead
of the progress, one a line.

Exit codes: 0 the loop succeeded, 1 it failed (the output says which step and why),
2 bad usage or input, 130 it was stopped by Ctrl-C.`,
		flags: func(c *call) {
			o := &runOptions{}
			c.opts = o
			c.flags.StringVar(&o.script, "script", "", "the `file` to follow; - is standard input")
			c.flags.StringVar(&o.goal, "goal", "", "what the model is to reach, as `text`")
			c.flags.StringVar(&o.model, "model", "", "the model that thinks (`name`): "+strings.Join(thinkers.Names(), ", "))
			c.flags.StringVar(&o.limits, "limits", "", `with --goal: the loop's limits as `+"`JSON`"+`, such as {"steps":50,"spendUsd":1}; a script has its own`)
			c.flags.StringVar(&o.role, "role", "", "`role` of the sandbox")
			c.flags.StringVar(&o.tenant, "tenant", "default", "`tenant` to run for")
			c.flags.StringVar(&o.out, "out", "out", "`directory` for pictures and journals")
			c.flags.BoolVar(&o.keep, "keep", false, "keep the sandbox after the loop (with --server)")
			o.register(c, "without --server: on an X11 desktop, on a stack that has nothing else")
		},
		run: func(ctx context.Context, c *call) error {
			o := c.opts.(*runOptions)
			if err := c.checkRun(o); err != nil {
				return err
			}
			cfg, err := c.environment()
			if err != nil {
				return err
			}
			r := &runner{call: c, o: o, term: !c.json && terminal(c.stdout), stopDemo: func() {}}
			defer func() { r.stopDemo() }()
			// The script is checked before anything is started.
			if err := r.load(ctx); err != nil {
				return err
			}
			if cfg.Bus.URL != "" && o.desktop {
				return badUsage("--desktop starts a stack of its own; leave out --server and NATS_URL, or leave out --desktop and have the script require \"desktop\"")
			}
			if cfg.Bus.URL != "" {
				cl, err := c.connect(ctx)
				if err != nil {
					return err
				}
				defer cl.close()
				return r.run(ctx, cl)
			}
			r.local = true
			return c.runInside(ctx, r)
		}}
}

func (c *call) checkRun(o *runOptions) error {
	if err := c.noArgs(); err != nil {
		return err
	}
	switch {
	case o.script == "" && o.goal == "":
		return badUsage("needs --script FILE, or --goal TEXT and --model NAME")
	case o.script != "" && o.limits != "":
		return badUsage("--limits goes with --goal; a script's file has a field \"limits\"")
	case o.script != "" && (o.goal != "" || o.model != "" && o.model != script.Name):
		return badUsage("--script brings its own goal and is followed exactly; leave out --goal and --model")
	case o.goal != "" && o.model == "":
		return badUsage("--goal needs --model NAME; this build has %s", strings.Join(thinkers.Names(), ", "))
	case o.goal != "":
		if _, ok := thinkers.All()[o.model]; !ok {
			return badUsage("--model: this build has no model %q; it has %s", o.model, strings.Join(thinkers.Names(), ", "))
		}
		if o.model == recorded.Name {
			return badUsage("--model %s decides again what a loop decided; it is `berth replay LOOP --rerun`", o.model)
		}
		if o.model == script.Name {
			return badUsage("--model %s follows a script and needs --script FILE; it cannot reach a goal by thought", o.model)
		}
	}
	if err := o.check(); err != nil {
		return err
	}
	if o.role != "" {
		if err := events.CheckID("--role", o.role); err != nil {
			return badUsage("%v", err)
		}
	}
	if err := events.CheckID("--tenant", o.tenant); err != nil {
		return badUsage("%v", err)
	}
	return nil
}

// runInside runs the loop on a stack of its own.
func (c *call) runInside(ctx context.Context, r *runner) error {
	prices, err := modelPrices()
	if err != nil {
		return err
	}
	return c.withTelemetry(ctx, slog.LevelError, func(tel *telemetry.Telemetry) error {
		r.say("starting NATS, scheduler, worker and loop-runner in this process …")
		// A signal stops the loop first; the stack ends when the loop has.
		inside := context.WithoutCancel(ctx)
		var result error
		options := devstack.Options{Servers: 1, Prices: prices, Telemetry: tel}
		if r.o.desktop {
			options.Servers, options.Desktop, options.Weaker = 0, true, r.o.weaker
		}
		err := devstack.Run(inside, options, func(stack context.Context, s *devstack.Stack) error {
			cl := &client{nc: s.NC, js: s.JS, log: tel.Log, tracer: tel.Tracer.Tracer("berth/cli"), close: func() {}}
			both, cancel := context.WithCancelCause(stack)
			defer context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })()
			defer cancel(nil)
			result = r.run(both, cl)
			return nil
		})
		return errors.Join(result, err)
	})
}

// runner runs one loop and shows it.
type runner struct {
	*call
	o     *runOptions
	local bool // on a stack of its own
	term  bool // a terminal: a bar is drawn

	file     *scriptFile
	stopDemo func()

	loop  string
	dir   string
	total int
	done  int
	began time.Time

	teller  teller
	journal []journalEntry
	entries []looprunner.Entry
	frames  []savedFrame
	seen    map[string]bool
	lastBad line
}

// savedFrame is a picture in the output directory.
type savedFrame struct {
	File   string `json:"file"`
	Object string `json:"object"`
	Step   int    `json:"step"`
}

// load reads the script and starts the demo application if it needs it.
func (r *runner) load(ctx context.Context) error {
	if r.o.script == "" {
		r.file = &scriptFile{Goal: r.o.goal}
		return r.readLimits()
	}
	file, err := readScript(r.o.script, func() (string, error) {
		serving, stop := context.WithCancel(context.WithoutCancel(ctx))
		url, wait, err := demoapp.Serve(serving, "")
		if err != nil {
			stop()
			return "", err
		}
		r.stopDemo = func() {
			stop()
			if err := wait(); err != nil {
				fmt.Fprintf(r.stderr, "berth run: demo app: %v\n", err)
			}
		}
		r.say("demo app on %s", url)
		return url, nil
	})
	r.file = file
	return err
}

// readLimits checks --limits as the loop-runner would.
func (r *runner) readLimits() error {
	if r.o.limits == "" {
		return nil
	}
	dec := json.NewDecoder(strings.NewReader(r.o.limits))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&r.file.Limits); err != nil {
		return badUsage("--limits: %s", strings.TrimPrefix(err.Error(), "json: "))
	}
	start := events.LoopStart{Model: json.RawMessage(`{"name":"any"}`), Limits: r.file.Limits}
	if err := start.Validate(); err != nil {
		return badUsage("--limits: %v", err)
	}
	return nil
}

func (r *runner) say(format string, args ...any) {
	if r.json {
		return
	}
	r.clearBar()
	fmt.Fprintf(r.stdout, format+"\n", args...)
	r.drawBar()
}

// run starts the loop, follows it to its end and saves what it leaves.
func (r *runner) run(ctx context.Context, cl *client) error {
	r.loop = r.newLoopID()
	r.dir = filepath.Join(r.o.out, r.loop)
	if err := os.MkdirAll(r.dir, 0o755); err != nil {
		return &inputError{what: "--out: " + err.Error()}
	}
	r.seen = map[string]bool{}
	r.total = len(r.file.items)
	r.began = time.Now()
	model, err := json.Marshal(map[string]string{"name": cmp.Or(r.o.model, script.Name)})
	if err != nil {
		return err
	}
	start := events.LoopStart{LoopID: r.loop, Goal: r.file.Goal, Model: model,
		Script: r.file.Script, Sandbox: r.file.Sandbox, Limits: r.file.Limits, Keep: r.o.keep && !r.local}
	if start.Sandbox == nil {
		start.Sandbox = &events.SandboxCreate{}
	}
	if r.o.role != "" {
		start.Sandbox.Role = r.o.role
	}
	req, err := request(events.TypeLoopStart, start)
	if err != nil {
		return err
	}
	ctx, span := cl.tracer.Start(ctx, "run "+r.loop)
	defer span.End()
	if err := cl.publish(ctx, events.RequestSubject(r.o.tenant, "loop", events.Start), req); err != nil {
		return err
	}
	r.say("loop %s: %s", r.loop, clip(r.file.Goal, 120))
	finished, rejected, err := r.follow(ctx, cl, events.RequestOf(req))
	r.clearBar()
	interrupted := finished == nil && rejected == nil && ctx.Err() != nil
	if interrupted {
		r.say("stopping the loop; once more ends at once …")
		finished, err = r.stop(context.WithoutCancel(ctx), cl, req)
		r.clearBar()
	}
	if e := r.save(finished); e != nil {
		err = errors.Join(err, e)
	}
	if rejected == nil && len(r.entries) > 0 {
		if e := r.savePage(context.WithoutCancel(ctx), cl); e != nil {
			err = errors.Join(err, e)
		}
	}
	switch {
	case err != nil:
		return err
	case rejected != nil:
		fmt.Fprintf(r.stderr, "berth run: rejected: %s: %s\n", rejected.Code, clip(rejected.Message, 500))
		return exitError(program.ExitFailed)
	}
	r.summary(finished)
	switch {
	case interrupted:
		return exitError(exitInterrupted)
	case finished.Outcome != events.LoopSucceeded:
		return exitError(program.ExitFailed)
	}
	return nil
}

// newLoopID names the loop after its script, the time and chance.
func (r *runner) newLoopID() string {
	base := strings.TrimSuffix(filepath.Base(r.o.script), filepath.Ext(r.o.script))
	base = strings.Map(func(c rune) rune {
		if c == '-' || c == '_' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' {
			return c
		}
		return '-'
	}, base)
	if strings.Trim(base, "-") == "" {
		base = "run"
	}
	id := nuid.Next()
	return fmt.Sprintf("%.30s-%s-%s", base, time.Now().UTC().Format("20060102-150405"), strings.ToLower(id[len(id)-5:]))
}

// follow shows the journal until the loop is finished or its start refused.
func (r *runner) follow(ctx context.Context, cl *client, req events.Request) (*events.LoopFinished, *events.LoopRejected, error) {
	for e, err := range looprunner.Follow(ctx, cl.js, r.o.tenant, r.loop) {
		if err != nil {
			if ctx.Err() != nil {
				return nil, nil, err
			}
			return nil, nil, explain(err)
		}
		if e.Name == events.LoopRejectedName {
			if e.Head.Request != req {
				continue
			}
			var v events.LoopRejected
			return nil, &v, e.Decode(&v)
		}
		finished, err := r.entry(ctx, cl, e)
		if err != nil || finished != nil {
			return finished, nil, err
		}
	}
	return nil, nil, errors.New("the journal ended without `finished`")
}

// entry takes in one entry of the journal.
func (r *runner) entry(ctx context.Context, cl *client, e looprunner.Entry) (*events.LoopFinished, error) {
	kept := journalEntry{e.Sequence, e.Stored, events.LoopSubject(r.o.tenant, r.loop, e.Name), e.Name, e.Data}
	r.journal, r.entries = append(r.journal, kept), append(r.entries, e)
	if r.json {
		if err := r.printLine(kept); err != nil {
			return nil, err
		}
	}
	lines, err := r.teller.tell(e)
	if err != nil {
		return nil, err
	}
	for _, l := range lines {
		r.done += l.done
		if l.bad {
			r.lastBad = l
		}
		r.say("%s", l)
	}
	for _, p := range pictures(e) {
		if r.dir == "" {
			break // nobody asked for pictures
		}
		if err := r.saveFrame(ctx, cl, p, e.Head.Step, r.frameName(e, lines)); err != nil && ctx.Err() == nil {
			r.say("      (picture not saved: %v)", err)
		}
	}
	if e.Name != events.LoopFinishedName {
		return nil, nil
	}
	var v events.LoopFinished
	return &v, e.Decode(&v)
}

// pictures are the objects in FRAMES that an entry names.
func pictures(e looprunner.Entry) []string {
	var v struct {
		Observation *computer.Observation   `json:"observation"`
		Actions     []computer.ActionResult `json:"actions"`
	}
	if e.Name != events.LoopObservedName && e.Name != events.LoopActedName || json.Unmarshal(e.Data, &v) != nil {
		return nil
	}
	var out []string
	for _, a := range v.Actions {
		var p computer.Picture
		if json.Unmarshal(a.Value, &p) == nil && p.Object != "" {
			out = append(out, p.Object)
		}
	}
	if v.Observation != nil && v.Observation.Screenshot.Object != "" {
		out = append(out, v.Observation.Screenshot.Object)
	}
	return out
}

func (r *runner) frameName(e looprunner.Entry, lines []line) string {
	name := e.Name
	if len(lines) > 0 {
		name = lines[0].note
		if name == "" || lines[0].bad {
			name = lines[0].what
		}
	}
	name = strings.Map(func(c rune) rune {
		if '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' {
			return c
		}
		return '-'
	}, name)
	for strings.Contains(name, "--") {
		name = strings.ReplaceAll(name, "--", "-")
	}
	return fmt.Sprintf("%.40s", strings.ToLower(strings.Trim(name, "-")))
}

// saveFrame writes a picture once, however often the journal names it.
func (r *runner) saveFrame(ctx context.Context, cl *client, object string, step int, name string) error {
	if r.seen[object] {
		return nil
	}
	png, err := dispatch.Frame(ctx, cl.js, object)
	if err != nil {
		return err
	}
	r.seen[object] = true
	file := fmt.Sprintf("%03d-%s.png", len(r.frames)+1, name)
	if err := os.WriteFile(filepath.Join(r.dir, file), png, 0o644); err != nil {
		return err
	}
	r.frames = append(r.frames, savedFrame{file, object, step})
	return nil
}

// stop asks the loop to stop and waits until it has.
func (r *runner) stop(ctx context.Context, cl *client, start events.Event) (*events.LoopFinished, error) {
	ctx, cancel := context.WithTimeout(ctx, stopPatience)
	defer cancel()
	e, err := request(events.TypeLoopStop, events.LoopControlRequest{LoopID: r.loop, Reason: "interrupted at the terminal"})
	if err != nil {
		return nil, err
	}
	if err := cl.publish(ctx, events.RequestSubject(r.o.tenant, "loop", events.Stop), e); err != nil {
		return nil, err
	}
	skip := len(r.journal)
	for e, err := range looprunner.Follow(ctx, cl.js, r.o.tenant, r.loop) {
		if err != nil {
			return nil, fmt.Errorf("the loop has not stopped in %s: %w", stopPatience, err)
		}
		if skip > 0 && e.Name != events.LoopRejectedName {
			skip--
			continue
		}
		if e.Name == events.LoopRejectedName {
			continue
		}
		if finished, err := r.entry(ctx, cl, e); err != nil || finished != nil {
			return finished, err
		}
	}
	return nil, fmt.Errorf("loop %s of request %s has not said that it stopped", r.loop, start.ID())
}

// loopJSON is loop.json.
type loopJSON struct {
	Loop     string         `json:"loop"`
	Tenant   string         `json:"tenant"`
	Goal     string         `json:"goal"`
	Script   string         `json:"script,omitempty"`
	Outcome  string         `json:"outcome"`
	Code     string         `json:"code,omitempty"`
	Message  string         `json:"message,omitempty"`
	Steps    int            `json:"steps"`
	Seconds  float64        `json:"seconds"`
	VMID     string         `json:"vmId"`
	ServerID string         `json:"serverId"`
	Frames   []savedFrame   `json:"frames"`
	Journal  []journalEntry `json:"journal"`
}

func (r *runner) save(f *events.LoopFinished) error {
	out := loopJSON{Loop: r.loop, Tenant: r.o.tenant, Goal: r.file.Goal, Script: r.o.script, Outcome: "unfinished",
		VMID: r.teller.vm, ServerID: r.teller.server, Frames: nonNil(r.frames), Journal: nonNil(r.journal)}
	if f != nil {
		out.Outcome, out.Code, out.Message, out.Steps, out.Seconds = f.Outcome, f.Code, f.Message, f.Steps, f.Seconds
	}
	file, err := os.Create(filepath.Join(r.dir, "loop.json"))
	if err != nil {
		return fmt.Errorf("save the journal: %w", err)
	}
	enc := json.NewEncoder(file)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return errors.Join(enc.Encode(out), file.Close())
}

// savePage writes loop.html, the journal as a page.
func (r *runner) savePage(ctx context.Context, cl *client) error {
	pictures, err := cl.pictures(ctx)
	if err != nil {
		return err
	}
	story, err := replay.Tell(r.entries)
	if err != nil {
		return err
	}
	return writePage(ctx, pictures, story, filepath.Join(r.dir, "loop.html"))
}

// summary says how it ended and what to look at next.
func (r *runner) summary(f *events.LoopFinished) {
	if r.json {
		return
	}
	w := r.stdout
	fmt.Fprintf(w, "\n%s after %d steps and %.1f s", f.Outcome, f.Steps, f.Seconds)
	if f.Outcome != events.LoopSucceeded {
		fmt.Fprintf(w, ": %s: %s", f.Code, clip(f.Message, 500))
		if r.lastBad.what != "" {
			fmt.Fprintf(w, "\nfailed at step %d, %s: %s", r.lastBad.step, r.lastBad.what, clip(r.lastBad.note, 500))
		}
	}
	fmt.Fprintf(w, "\n\nlook at   %s  (%d pictures)\n          %s  (step through it in a browser)\n          %s  (the journal: what was seen, decided and done, and when)\n",
		r.dir+string(filepath.Separator), len(r.frames), filepath.Join(r.dir, "loop.html"), filepath.Join(r.dir, "loop.json"))
	if r.local {
		fmt.Fprintf(w, "next      `berth dev` serves the same stack for `berth run --server`, `berth events` and the nats CLI\n")
		return
	}
	fmt.Fprintf(w, "next      `berth replay %s` steps through it, `--rerun` does it again\n", r.loop)
}

// barWidth is the length of the bar in characters.
const barWidth = 30

func (r *runner) drawBar() {
	if !r.term || r.total == 0 || r.loop == "" {
		return
	}
	filled := min(barWidth, barWidth*r.done/r.total)
	fmt.Fprintf(r.stdout, "[%s%s] %d/%d  %.1f s", strings.Repeat("█", filled), strings.Repeat("·", barWidth-filled), min(r.done, r.total), r.total, time.Since(r.began).Seconds())
}

func (r *runner) clearBar() {
	if r.term {
		fmt.Fprint(r.stdout, "\r\033[K")
	}
}
