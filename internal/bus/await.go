package bus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// Await returns once the streams and shared consumers exist. What is missing
// it makes, so that programs can start in any order on a server without
// accounts; where this program may not, it waits for whoever may (`berth
// provision`) and says so every few seconds.
func Await(ctx context.Context, js jetstream.JetStream, replicas int, log *slog.Logger) error {
	said := time.Time{}
	for attempt := 0; ; attempt++ {
		err := awaitOnce(ctx, js, replicas)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("JetStream is not ready: %w", err)
		}
		if time.Since(said) > 10*time.Second {
			log.Warn("waiting for streams and buckets; `berth provision` makes them where this program may not", "err", err)
			said = time.Now()
		}
		if err := Pause(ctx, attempt); err != nil {
			return fmt.Errorf("JetStream is not ready: %w", err)
		}
	}
}

// awaitOnce looks first and makes second: looking needs no more rights than
// every program has, and making would hang until its time-out without them.
func awaitOnce(ctx context.Context, js jetstream.JetStream, replicas int) error {
	err := look(ctx, js)
	if !errors.Is(err, jetstream.ErrStreamNotFound) {
		return err
	}
	making, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if made := Ensure(making, js, replicas); made != nil {
		return fmt.Errorf("%w; and making it: %w", err, made)
	}
	return look(ctx, js)
}

// look finds the last thing that Ensure makes.
func look(ctx context.Context, js jetstream.JetStream) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	specs := Streams(1)
	for _, s := range []string{specs[0].Name, specs[len(specs)-1].Name} {
		if _, err := js.Stream(ctx, s); err != nil {
			return fmt.Errorf("stream %s: %w", s, err)
		}
	}
	return nil
}
