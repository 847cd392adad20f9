package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/looprunner"
	"berth/internal/replay"
)

type replayOptions struct {
	tenant   string
	original bool
	html     string
	out      string
	rerun    rerunOptions
}

func replayCommand() *command {
	return &command{name: "replay", args: "LOOP", summary: "Step through what a loop did, export it, or do it again",
		detail: `In a terminal it steps through the loop's turns: what the model saw and decided, what came
of it, how long each part took, where the picture is (` + "`nats object get FRAMES NAME`" + `), and a
small preview where the terminal has the colours. Elsewhere, and with --original, it prints
the journal line by line; with --json its entries, one a line.

--html FILE writes one page that needs nothing else: pictures, with the actions drawn on
them, times, tokens, what the model said. Step through it with the arrow keys.

--rerun does the same again in a fresh sandbox: the recorded decisions, and no model, so
nothing is paid. It ends at the first difference. Exit codes: 0 the same, 1 something
differs (or the rerun failed), 2 bad usage.

Journals are kept for 7 days, pictures for one.`,
		flags: func(c *call) {
			o := &replayOptions{}
			c.opts = o
			c.flags.StringVar(&o.tenant, "tenant", "*", "the `tenant` it belongs to; any where not given")
			c.flags.BoolVar(&o.original, "original", false, "in its original timing")
			c.flags.StringVar(&o.html, "html", "", "write a page to `file`; - is standard output")
			c.flags.StringVar(&o.out, "out", "", "write the pictures to this `directory`; default for w in a terminal: the working directory")
			o.rerun.register(c.flags)
		},
		run: func(ctx context.Context, c *call) error {
			loop, err := c.oneArg("the id of a loop; `berth run` prints it")
			if err != nil {
				return err
			}
			o := c.opts.(*replayOptions)
			if err := c.checkReplay(loop, o); err != nil {
				return err
			}
			cl, err := c.connect(ctx)
			if err != nil {
				return err
			}
			defer cl.close()
			return c.replay(ctx, cl, loop, o)
		}}
}

func (c *call) checkReplay(loop string, o *replayOptions) error {
	if err := events.CheckID("LOOP", loop); err != nil {
		return badUsage("%v", err)
	}
	if o.tenant != "*" {
		if err := events.CheckID("--tenant", o.tenant); err != nil {
			return badUsage("%v", err)
		}
	}
	for _, pair := range []struct {
		both bool
		what string
	}{
		{o.html != "" && c.json, "--html and --json"}, {o.html != "" && o.original, "--html and --original"}, {o.html != "" && o.rerun.on, "--html and --rerun"},
		{o.html != "" && o.out != "", "--html, which has the pictures in it, and --out"},
		{o.rerun.on && o.original, "--rerun and --original"}, {o.rerun.on && o.out != "", "--rerun and --out"},
	} {
		if pair.both {
			return badUsage("%s: give only one", pair.what)
		}
	}
	return o.rerun.check(c.flags)
}

// replay reads the journal and shows it as asked.
func (c *call) replay(ctx context.Context, cl *client, loop string, o *replayOptions) error {
	var entries []looprunner.Entry
	tenant := ""
	err := cl.readAll(ctx, bus.Loops, []string{events.LoopSubject(o.tenant, loop, ">")}, func(m stored) error {
		of := strings.Split(m.subject, ".")[1]
		if tenant != "" && of != tenant {
			return badUsage("the tenants %s and %s both have a loop %s; choose one by --tenant", tenant, of, loop)
		}
		tenant = of
		e, err := readEntry(m)
		if err != nil { // a stranger's, which no runner heeds
			fmt.Fprintf(c.stderr, "berth replay: passed over: %v\n", err)
			return nil
		}
		entries = append(entries, e)
		return nil
	})
	if err != nil {
		return err
	}
	if len(entries) == 0 {
		return fmt.Errorf("there is no journal of a loop %q; it is kept for 7 days, on the server where the loop ran", loop)
	}
	pictures, err := cl.pictures(ctx)
	if err != nil {
		return err
	}
	switch {
	case o.rerun.on:
		return c.rerun(ctx, cl, tenant, entries, &o.rerun)
	case o.html != "":
		return c.export(ctx, pictures, entries, o.html)
	case !c.json && !o.original && terminal(c.stdout) && terminal(c.stdin):
		return c.step(ctx, pictures, entries, o.out)
	}
	if err := c.print(ctx, tenant, entries, o.original); err != nil || o.out == "" {
		return err
	}
	return pictures.saveAll(ctx, c, entries, o.out)
}

// print tells the journal line by line.
func (c *call) print(ctx context.Context, tenant string, entries []looprunner.Entry, original bool) error {
	t := teller{tenant: tenant}
	start, last := entries[0].Stored, entries[0].Stored
	for _, e := range entries {
		if original {
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

// export writes the page.
func (c *call) export(ctx context.Context, p *pictureStore, entries []looprunner.Entry, path string) error {
	story, err := replay.Tell(entries)
	if err != nil {
		return err
	}
	if path == "-" {
		return replay.HTML(ctx, c.stdout, story, p.fetch, p.kept)
	}
	if err := writePage(ctx, p, story, path); err != nil {
		return err
	}
	fmt.Fprintf(c.stdout, "%s: %d turns; open it in a browser, it needs nothing else\n", path, len(story.Turns))
	return nil
}

// writePage writes the page to a file, which is there whole or as it was.
func writePage(ctx context.Context, p *pictureStore, story *replay.Story, path string) error {
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return badUsage("%s: %v", path, err)
	}
	err = replay.HTML(ctx, file, story, p.fetch, p.kept)
	err = errors.Join(err, file.Chmod(0o644), file.Close())
	if err == nil {
		err = os.Rename(file.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(file.Name()))
	}
	return nil
}

// pictureStore is FRAMES as it is read here.
type pictureStore struct {
	store jetstream.ObjectStore
	kept  time.Duration // how long pictures are kept
}

func (cl *client) pictures(ctx context.Context) (*pictureStore, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	store, err := cl.js.ObjectStore(ctx, kv.BucketFrames)
	if err != nil {
		return nil, explain(fmt.Errorf("open %s: %w", kv.BucketFrames, err))
	}
	status, err := store.Status(ctx)
	if err != nil {
		return nil, explain(fmt.Errorf("open %s: %w", kv.BucketFrames, err))
	}
	return &pictureStore{store, status.TTL()}, nil
}

// fetch is a replay.Frames.
func (p *pictureStore) fetch(ctx context.Context, object string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	raw, err := p.store.GetBytes(ctx, object)
	switch {
	case errors.Is(err, jetstream.ErrObjectNotFound):
		return nil, fmt.Errorf("%s: %w", object, replay.ErrExpired)
	case err != nil:
		return nil, fmt.Errorf("fetch picture %s: %w", object, err)
	}
	return raw, nil
}

// saveAll writes every picture that the journal names.
func (p *pictureStore) saveAll(ctx context.Context, c *call, entries []looprunner.Entry, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return badUsage("--out: %v", err)
	}
	saved, expired := 0, 0
	seen := map[string]bool{}
	for _, e := range entries {
		for _, object := range pictures(e) {
			if seen[object] {
				continue
			}
			seen[object] = true
			_, err := p.save(ctx, object, dir, fmt.Sprintf("%03d", len(seen)))
			switch {
			case errors.Is(err, replay.ErrExpired):
				expired++
			case err != nil:
				return err
			default:
				saved++
			}
		}
	}
	w := c.stdout
	if c.json { // whose lines are entries
		w = c.stderr
	}
	fmt.Fprintf(w, "%d pictures in %s", saved, dir)
	if expired > 0 {
		fmt.Fprintf(w, "; %d have expired", expired)
	}
	fmt.Fprintln(w)
	return nil
}

// save writes one picture to dir and returns its path.
func (p *pictureStore) save(ctx context.Context, object, dir, name string) (string, error) {
	raw, err := p.fetch(ctx, object)
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, name+extension(raw))
	return path, os.WriteFile(path, raw, 0o644)
}

// extension is that of a picture's file, by its first bytes.
func extension(raw []byte) string {
	switch {
	case len(raw) > 3 && raw[0] == 0xff && raw[1] == 0xd8:
		return ".jpg"
	case len(raw) > 12 && string(raw[8:12]) == "WEBP":
		return ".webp"
	default:
		return ".png"
	}
}

// journalEntry is an entry in JSON, here and in loop.json.
type journalEntry struct {
	Sequence uint64          `json:"sequence"`
	Time     time.Time       `json:"time"`
	Subject  string          `json:"subject"`
	Name     string          `json:"name"`
	Data     json.RawMessage `json:"data"`
}
