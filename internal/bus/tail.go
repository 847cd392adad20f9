package bus

import (
	"context"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Tail follows subjects of a stream, in order, without a gap. The ordered
// consumer behind it is made anew at a reconnect, at a gap and after 10 s of
// silence; where even that fails, Tail starts another after the last message
// that it delivered.
type Tail struct {
	JS     jetstream.JetStream
	Stream string
	Config jetstream.OrderedConsumerConfig
	Log    *slog.Logger
}

// TailInactive is how long a Tail's consumer, which takes memory of the NATS
// server, outlives a dead process.
const TailInactive = 20 * time.Second

// NewestOf is the configuration that begins after the stream's last message
// as it is now, so that a restart misses nothing that came in between.
func NewestOf(ctx context.Context, js jetstream.JetStream, stream string, filters ...string) (jetstream.OrderedConsumerConfig, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	s, err := js.Stream(ctx, stream)
	if err != nil {
		return jetstream.OrderedConsumerConfig{}, err
	}
	return jetstream.OrderedConsumerConfig{FilterSubjects: filters, DeliverPolicy: jetstream.DeliverByStartSequencePolicy,
		OptStartSeq: s.CachedInfo().State.LastSeq + 1}, nil
}

// Run calls handle for every message until ctx ends or handle returns false.
// restarted, where not nil, is called before each new consumer's messages but
// the first's.
func (t Tail) Run(ctx context.Context, handle func(jetstream.Msg) bool, restarted func()) {
	config := t.Config
	config.InactiveThreshold = TailInactive
	config.MaxResetAttempts = 1 // the library's own retries cannot be stopped at once; ours can
	for attempt := 0; ; attempt++ {
		last, more := t.consume(ctx, config, handle)
		if !more || ctx.Err() != nil {
			return
		}
		if last != 0 {
			attempt = 0
			config.DeliverPolicy, config.OptStartSeq, config.OptStartTime = jetstream.DeliverByStartSequencePolicy, last+1, nil
		}
		if Pause(ctx, attempt) != nil {
			return
		}
		if restarted != nil {
			restarted()
		}
	}
}

// consume runs one ordered consumer; it returns the last stream sequence that
// it handed over and whether the caller wants more.
func (t Tail) consume(ctx context.Context, config jetstream.OrderedConsumerConfig, handle func(jetstream.Msg) bool) (last uint64, more bool) {
	making, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	c, err := t.JS.OrderedConsumer(making, t.Stream, config)
	if err != nil {
		t.fault(ctx, err)
		return 0, true
	}
	it, err := c.Messages(jetstream.PullMaxMessages(256), jetstream.PullExpiry(30*time.Second), jetstream.PullHeartbeat(5*time.Second))
	if err != nil {
		t.fault(ctx, err)
		return 0, true
	}
	defer context.AfterFunc(ctx, it.Stop)()
	defer it.Stop()
	for {
		msg, err := it.Next()
		if err != nil {
			t.fault(ctx, err)
			return last, true
		}
		if meta, err := msg.Metadata(); err == nil {
			last = meta.Sequence.Stream
		}
		if !handle(msg) {
			return last, false
		}
	}
}

func (t Tail) fault(ctx context.Context, err error) {
	if ctx.Err() == nil {
		t.Log.Debug("following again", "stream", t.Stream, "filters", t.Config.FilterSubjects, "err", err)
	}
}
