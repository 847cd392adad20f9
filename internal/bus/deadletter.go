package bus

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/events"
)

// The headers of a dead letter; its other headers and its body are those of
// the message that was given up.
const (
	HeaderReason    = "Berth-Reason"     // why, for people
	HeaderSubject   = "Berth-Subject"    // where it was published
	HeaderStreamSeq = "Berth-Stream-Seq" // its sequence in its stream
	HeaderTruncated = "Berth-Truncated"  // "true": the body did not fit whole
)

// deadLetterRoom is what a dead letter leaves of a 1 MiB message for the
// headers that it adds and for the protocol.
const deadLetterRoom = 8 << 10

// PublishDeadLetter stores a copy of msg on deadletter.<stream>.<consumer>. It does
// not acknowledge msg. Doing it again within two minutes stores nothing more.
func PublishDeadLetter(ctx context.Context, js jetstream.JetStream, stream, consumer string, msg jetstream.Msg, reason string) error {
	out := nats.NewMsg(events.DeadLetterSubject(stream, consumer))
	size := 0
	for k, v := range msg.Headers() {
		if strings.HasPrefix(strings.ToLower(k), "nats-") || size > 64<<10 {
			continue
		}
		out.Header[k] = v
		for _, s := range v {
			size += len(k) + len(s)
		}
	}
	seq := ""
	if meta, err := msg.Metadata(); err == nil {
		seq = strconv.FormatUint(meta.Sequence.Stream, 10)
		out.Header.Set(jetstream.MsgIDHeader, "deadletter."+stream+"."+consumer+"."+seq)
	}
	if len(reason) > 1024 {
		reason = strings.ToValidUTF8(reason[:1024], "") + "…"
	}
	out.Header.Set(HeaderReason, strings.Join(strings.Fields(reason), " "))
	out.Header.Set(HeaderSubject, msg.Subject())
	out.Header.Set(HeaderStreamSeq, seq)
	out.Data = msg.Data()
	if limit := mib - deadLetterRoom - size; len(out.Data) > limit {
		out.Data = out.Data[:max(limit, 0)]
		out.Header.Set(HeaderTruncated, "true")
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if _, err := js.PublishMsg(ctx, out); err != nil {
		return fmt.Errorf("dead letter of %s: %w", msg.Subject(), err)
	}
	return nil
}
