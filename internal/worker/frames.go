package worker

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"image/png"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers"
)

// frameFresh: an older upload is made again, for a new result that names it,
// since FRAMES drops pictures after a day.
const frameFresh = 12 * time.Hour

// chunkSize of an object, as nats.go has it.
const chunkSize = 128 << 10

// frameStore keeps pictures in the object store, each once.
//
// It writes objects itself, in the format of ADR-20, for two reasons:
// ObjectStore.Put purges the chunks of an earlier upload of the same name under
// whoever reads them (here they expire with their bucket's age), and leaks a
// goroutine when the connection breaks at the wrong moment (nats.go 1.55.0:
// resetPendingAcksOnReconnect that starts after cleanupReplySub waits for ever).
type frameStore struct {
	js    jetstream.JetStream
	store jetstream.ObjectStore

	mu   sync.Mutex
	last map[string]frame // by vm: the picture stored last
}

type frame struct {
	name     string
	uploaded time.Time
}

func (s *frameStore) forget(vm string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.last, vm)
}

// put stores a PNG under <vm>/<sha256> unless it is there.
func (s *frameStore) put(ctx context.Context, vm string, image []byte) (computer.Picture, error) {
	config, err := png.DecodeConfig(bytes.NewReader(image))
	if err != nil {
		return computer.Picture{}, fmt.Errorf("not a PNG: %w", err)
	}
	sum := sha256.Sum256(image)
	p := computer.Picture{MediaType: "image/png", Width: config.Width, Height: config.Height, Bytes: len(image), SHA256: hex.EncodeToString(sum[:])}
	p.Object = vm + "/" + p.SHA256
	s.mu.Lock()
	last := s.last[vm]
	s.mu.Unlock()
	if last.name == p.Object && time.Since(last.uploaded) < frameFresh {
		return p, nil
	}
	ctx, cancel := context.WithTimeout(ctx, computer.PictureTime)
	defer cancel()
	uploaded, err := s.upload(ctx, p.Object, image)
	if err != nil {
		return computer.Picture{}, fmt.Errorf("store picture: %w", err)
	}
	s.mu.Lock()
	s.last[vm] = frame{p.Object, uploaded}
	s.mu.Unlock()
	return p, nil
}

func (s *frameStore) upload(ctx context.Context, name string, image []byte) (time.Time, error) {
	info, err := s.store.GetInfo(ctx, name)
	switch {
	case err == nil && time.Since(info.ModTime) < frameFresh:
		return info.ModTime, nil
	case err != nil && !errors.Is(err, jetstream.ErrObjectNotFound):
		return time.Time{}, err
	}
	return time.Now(), s.write(ctx, name, image)
}

// write publishes the chunks of an object and then its description, which
// replaces an earlier one of the same name.
func (s *frameStore) write(ctx context.Context, name string, image []byte) error {
	id, sum := nuid.Next(), sha256.New()
	chunks := uint32(0)
	for part := range slices.Chunk(image, chunkSize) {
		sum.Write(part)
		if _, err := s.js.Publish(ctx, "$O."+kv.BucketFrames+".C."+id, part); err != nil {
			return err
		}
		chunks++
	}
	raw, err := json.Marshal(jetstream.ObjectInfo{
		ObjectMeta: jetstream.ObjectMeta{Name: name, Opts: &jetstream.ObjectMetaOptions{ChunkSize: chunkSize}},
		Bucket:     kv.BucketFrames, NUID: id, Size: uint64(len(image)), Chunks: chunks, Digest: jetstream.GetObjectDigestValue(sum),
	})
	if err != nil {
		return fmt.Errorf("describe object: %w", err)
	}
	msg := nats.NewMsg("$O." + kv.BucketFrames + ".M." + base64.URLEncoding.EncodeToString([]byte(name)))
	msg.Header.Set(jetstream.MsgRollup, jetstream.MsgRollupSubject)
	msg.Data = raw
	_, err = s.js.PublishMsg(ctx, msg)
	return err
}

// keep stores a picture of a vm.
func (t *tenure) keep(ctx context.Context, vm string, image []byte) (computer.Picture, error) {
	if d := t.display(vm); int64(len(image)) > maxPictureBytes(d) {
		return computer.Picture{}, fmt.Errorf("the picture has %d bytes, more than one of %d×%d can have", len(image), d.Width, d.Height)
	}
	// A picture that was taken is kept although the sandbox is killed or the
	// lease is lost meanwhile.
	ctx, done := linger(ctx)
	defer done()
	p, err := t.frames.put(ctx, vm, image)
	t.at(AfterUpload, vm)
	return p, err
}

// picture looks at a sandbox and stores what it sees.
func (t *tenure) picture(ctx context.Context, vm string) (*computer.Observation, error) {
	bound, cancel := context.WithTimeoutCause(ctx, computer.ObserveTime, errTimedOut)
	defer cancel()
	give, err := t.w.pictures.take(bound, 1, t.display(vm))
	if err != nil {
		return nil, fmt.Errorf("vm %s: no room for a picture: %w", vm, err)
	}
	defer give()
	view, err := watched(bound, t, vm, func(ctx context.Context) (providers.View, error) { return t.provider.Observe(ctx, vm) })
	if err != nil {
		if errors.Is(err, providers.ErrLost) || errors.Is(err, providers.ErrNotFound) {
			ask(t.look)
		}
		return nil, fmt.Errorf("look at vm %s: %w", vm, err)
	}
	o := view.Observation
	trim(&o)
	if o.Screenshot, err = t.keep(ctx, vm, view.PNG); err != nil {
		return nil, fault(events.CodeNoPicture, "vm %s: %v", vm, err)
	}
	return &o, nil
}
