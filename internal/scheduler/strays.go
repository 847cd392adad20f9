package scheduler

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
)

// strayAcks is how many commands are passed over before they are acknowledged.
const strayAcks = 256

// strays looks at the subject of every command and ends those that no worker
// will: for a server that is down, was removed or was never known. So every
// command ends, and a caller hears at once (H1, H10).
func (t *term) strays(ctx context.Context) error {
	for attempt := 0; ; attempt++ {
		err := t.straysOnce(ctx)
		if ctx.Err() != nil {
			return nil
		}
		t.log.Warn("watch over stray commands starts again", "err", err)
		if bus.Pause(ctx, attempt) != nil {
			return nil
		}
	}
}

func (t *term) straysOnce(ctx context.Context) error {
	consumer, err := t.js.Consumer(ctx, bus.Commands, bus.SchedulerConsumer)
	if err != nil {
		return fmt.Errorf("consumer %s of %s: %w", bus.SchedulerConsumer, bus.Commands, err)
	}
	commands, err := t.js.Stream(ctx, bus.Commands)
	if err != nil {
		return fmt.Errorf("stream %s: %w", bus.Commands, err)
	}
	for ctx.Err() == nil {
		fetching, cancel := context.WithTimeout(ctx, 5*time.Second)
		batch, err := consumer.Fetch(strayAcks, jetstream.FetchContext(fetching))
		if err != nil {
			cancel()
			return fmt.Errorf("fetch stray commands: %w", err)
		}
		err = t.passOver(ctx, commands, batch)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// passOver ends the strays of one batch and acknowledges all of it.
func (t *term) passOver(ctx context.Context, commands jetstream.Stream, batch jetstream.MessageBatch) error {
	var last jetstream.Msg
	for msg := range batch.Messages() {
		path, err := events.ParseCommand(msg.Subject())
		if why := t.unserved(path.Server); err == nil && why != "" {
			meta, err := msg.Metadata()
			if err != nil {
				return err
			}
			raw, err := commands.GetMsg(ctx, meta.Sequence.Stream)
			if err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) {
				return fmt.Errorf("read command %d: %w", meta.Sequence.Stream, err)
			}
			if err == nil {
				if err := t.endStray(ctx, path, raw, why); err != nil {
					return err
				}
			}
		}
		last = msg
	}
	if err := batch.Error(); err != nil && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, context.Canceled) {
		return fmt.Errorf("fetch stray commands: %w", err)
	}
	if last == nil {
		return nil
	}
	return last.Ack()
}

// unserved says why nobody serves a server, or "" where somebody does or soon will.
func (t *term) unserved(server string) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.servers[server]
	switch {
	case s == nil:
		return fmt.Sprintf("there is no server %q", server)
	case s.health.state == kv.Down && time.Since(s.health.heard) >= silentDown:
		return fmt.Sprintf("server %q is down: %s", server, s.health.reason)
	}
	return ""
}

// endStray claims one command as rejected. Who has claimed it already keeps it.
func (t *term) endStray(ctx context.Context, path events.CommandPath, raw *jetstream.RawStreamMsg, why string) error {
	e, err := events.Decode(raw.Header, raw.Data)
	if err != nil {
		return nil // nobody can be answered; its worker, should it come, puts it aside
	}
	return t.publishEnd(events.ExtractTrace(ctx, raw.Header), path.Server, path.VM, e, events.Finished{
		CommandID: e.ID(), Source: e.Source(), Command: path.Verb, Outcome: computer.Rejected,
		Error: &computer.Fault{Code: events.CodeServerDown, Message: why}, Request: events.RequestOf(e),
	}, 0)
}

// publishEnd publishes `finished` for a command expecting last as the last
// message of its result subject; that somebody else was faster is no error. e
// is the command or its claim; a forwarded one is marked as such.
func (t *term) publishEnd(ctx context.Context, server, vm string, e events.Event, f events.Finished, last uint64) error {
	f.Actions, f.Timing = []computer.ActionResult{}, events.Timing{FinishedAt: time.Now().UTC()}
	token := events.Token(f.Source, f.CommandID)
	out, err := events.New(events.TypeFinished, events.SourceScheduler, token+"-ended", f)
	if err != nil {
		return err
	}
	if e.Context == nil {
		e = out
	}
	if forwarded, ok := e.Extensions()[events.ExtForwarded]; ok {
		out.SetExtension(events.ExtForwarded, forwarded)
	}
	msg, err := events.NewMessage(ctx, events.ResultSubject(server, vm, token), out)
	if err != nil {
		return err
	}
	if _, err := bus.PublishExpecting(ctx, t.js, msg, last); err != nil && !errors.Is(err, bus.ErrTaken) {
		return err
	}
	return nil
}

// endQueued ends what waited for a server when it went down.
func (t *term) endQueued(ctx context.Context, server string) error {
	for _, c := range bus.ServerConsumers(server, 0) {
		consumer, err := t.js.Consumer(ctx, c.Stream, c.Durable)
		if errors.Is(err, jetstream.ErrConsumerNotFound) {
			continue
		}
		if err != nil {
			return fmt.Errorf("consumer %s: %w", c.Durable, err)
		}
		for {
			batch, err := consumer.FetchNoWait(strayAcks)
			if err != nil {
				return fmt.Errorf("fetch from %s: %w", c.Durable, err)
			}
			n := 0
			for msg := range batch.Messages() {
				n++
				if err := t.endWaiting(ctx, server, msg); err != nil {
					return err
				}
			}
			if n == 0 {
				break
			}
		}
	}
	return nil
}

// endWaiting ends one command that waited for a server that is down; the
// scheduler's own too, whose sandbox's record then follows the result.
func (t *term) endWaiting(ctx context.Context, server string, msg jetstream.Msg) error {
	why := t.unserved(server)
	if why == "" {
		return msg.NakWithDelay(time.Second) // its worker is back
	}
	path, err := events.ParseCommand(msg.Subject())
	if err != nil {
		return msg.NakWithDelay(time.Second)
	}
	raw := &jetstream.RawStreamMsg{Subject: msg.Subject(), Header: msg.Headers(), Data: msg.Data()}
	if err := t.endStray(ctx, path, raw, why); err != nil {
		return err
	}
	return msg.Ack()
}

// endClaimed ends, as unknown, what a worker had claimed for a sandbox that is
// lost with its server.
func (t *term) endClaimed(ctx context.Context, rec kv.Placement) error {
	filter := events.ResultSubject(rec.ServerID, rec.VMID, "*")
	reading, cancel := context.WithTimeout(ctx, 5*time.Second)
	info, err := t.results.Info(reading, jetstream.WithSubjectFilter(filter))
	cancel()
	if err != nil {
		return fmt.Errorf("list %s: %w", filter, err)
	}
	for subject := range info.State.Subjects {
		e, raw, err := bus.Last(ctx, t.results, subject)
		if err != nil && raw == nil {
			return err
		}
		if err != nil || raw == nil || e.Type() != events.TypeStarted {
			continue
		}
		var claim events.Started
		if err := events.DecodeTolerant(e, &claim); err != nil {
			continue
		}
		err = t.publishEnd(ctx, rec.ServerID, rec.VMID, e, events.Finished{
			CommandID: claim.CommandID, Source: claim.Source, Command: claim.Command, Outcome: computer.Unknown, Fence: claim.Fence,
			Error: &computer.Fault{Code: events.CodeServerDown, Message: "its server went down while it ran"}, Request: claim.Request,
		}, raw.Sequence)
		if err != nil {
			return err
		}
	}
	return nil
}
