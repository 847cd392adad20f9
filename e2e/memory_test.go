package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"image"
	"image/png"
	"math/rand/v2"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/events"
	"berth/internal/kv"
)

// workerMemory is what docs/operations.md states for a worker of 1,000 sandboxes
// whose pictures have 10 MB.
const workerMemory = 900 << 20

// A worker whose sandboxes are looked at in one moment, and whose pictures have
// 10 MB each, stays within its memory. As many are asked for as the store takes
// (1 GiB), of 200 sandboxes; with BERTH_PICTURES=1000 a thousand of a thousand,
// and the store is full.
func TestMemoryOfAWorker(t *testing.T) {
	t.Parallel()
	const id = "ax102-01"
	sandboxes, looks := 200, 95
	if text := os.Getenv("BERTH_PICTURES"); text != "" {
		var err error
		if looks, err = strconv.Atoi(text); err != nil || looks < 1 || looks > 1000 {
			t.Fatalf("BERTH_PICTURES=%s: 1 to 1000", text)
		}
		sandboxes = max(sandboxes, looks)
	}
	server, f := startStandIn(t, id), provisioned(t, id, "ax102-02")
	server.picture = noise(t, 2000, 1300)
	f.start(t, "scheduler", "LOG_LEVEL=warn")
	w := f.start(t, "worker", "LOG_LEVEL=warn",
		fmt.Sprintf(`SANDBOX_SERVERS_JSON=[{"id":%q,"provider":"selfhosted","url":%q,"apiKey":%q,"maxContainers":%d}]`, id, server.url, standInKey, sandboxes))
	_, js := f.connect(t, "operator")
	asked := 0
	create := func() {
		if asked == sandboxes {
			return
		}
		body := fmt.Sprintf(`{"specversion":"1.0","id":"c%d","source":"/e2e","type":"berth.sandbox.create.v1","data":{"vmId":"vm-%d","display":{"width":2000,"height":1300},"queueTimeoutSeconds":240}}`, asked, asked)
		if _, err := js.Publish(t.Context(), "request.default.sandbox.create", []byte(body)); err != nil {
			t.Fatal(err)
		}
		asked++
	}
	for range 32 { // at a time, so that none waits too long on a busy machine
		create()
	}
	all := map[string]bool{}
	awaitAll(t, js, "KV_"+kv.BucketPlacements, "$KV."+kv.BucketPlacements+".vm.*", 3*time.Minute, func(subject string, data []byte) bool {
		var p kv.Placement
		if json.Unmarshal(data, &p) == nil && p.Phase == kv.Ready && !all[subject] {
			all[subject] = true
			create()
		}
		return len(all) == sandboxes
	})
	before := peak(t, w)
	_, runner := f.connect(t, "loop-runner")
	for i := range looks {
		vm := fmt.Sprint("vm-", i*sandboxes/looks)
		look := fmt.Sprintf(`{"specversion":"1.0","id":"o%d","source":"/e2e","type":"berth.command.observe.v1","data":{"deadline":%q}}`, i, time.Now().Add(10*time.Minute).UTC().Format(time.RFC3339))
		if _, err := runner.Publish(t.Context(), "sandbox."+id+"."+vm+".observe", []byte(look)); err != nil {
			t.Fatal(err)
		}
	}
	done, seen := 0, 0
	awaitAll(t, js, "RESULTS", "sandbox."+id+".*.result.*", 3*time.Minute, func(_ string, data []byte) bool {
		var r struct {
			Type string
			Data events.Finished
		}
		if json.Unmarshal(data, &r) == nil && r.Type == events.TypeFinished && r.Data.Command == events.Observe {
			if done++; r.Data.Observation != nil {
				seen++
			}
		}
		return done == looks
	})
	after := peak(t, w)
	t.Logf("%d sandboxes: peak of %d MiB; %d pictures of %.1f MB, %d of them stored: %d MiB", sandboxes, before>>20, looks, float64(len(server.picture))/1e6, seen, after>>20)
	if want := min(looks, 90); seen < want {
		t.Errorf("%d of %d pictures were stored, want %d", seen, looks, want)
	}
	if after > workerMemory {
		t.Errorf("%d MiB, more than %d", after>>20, workerMemory>>20)
	}
}

// noise is a picture that does not compress.
func noise(t *testing.T, width, height int) []byte {
	t.Helper()
	img := image.NewNRGBA(image.Rect(0, 0, width, height))
	random := rand.NewChaCha8([32]byte{1})
	if _, err := random.Read(img.Pix); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.NoCompression}).Encode(&out, img); err != nil {
		t.Fatal(err)
	}
	if out.Len() < 10e6 {
		t.Fatalf("%d bytes", out.Len())
	}
	return out.Bytes()
}

var peakLine = regexp.MustCompile(`(?m)^VmHWM:\s+(\d+) kB$`)

// peak is the most memory that a process has had resident, in bytes.
func peak(t *testing.T, p *process) int {
	t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	m := peakLine.FindSubmatch(raw)
	if m == nil {
		t.Fatalf("no VmHWM in %s", raw)
	}
	kb, err := strconv.Atoi(string(m[1]))
	if err != nil {
		t.Fatal(err)
	}
	return kb << 10
}

// awaitAll reads a filter along from the last message of each subject until
// enough says so.
func awaitAll(t *testing.T, js jetstream.JetStream, stream, filter string, atMost time.Duration, enough func(subject string, data []byte) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), atMost)
	defer cancel()
	cons, err := js.OrderedConsumer(ctx, stream, jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{filter}, DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy})
	if err != nil {
		t.Fatal(err)
	}
	msgs, err := cons.Messages()
	if err != nil {
		t.Fatal(err)
	}
	defer msgs.Stop()
	for n := 0; ; {
		msg, err := msgs.Next(jetstream.NextContext(ctx))
		switch {
		case ctx.Err() != nil:
			t.Fatalf("waited %s on %s: %d messages", atMost, filter, n)
		case errors.Is(err, jetstream.ErrNoHeartbeat) || err != nil && strings.Contains(err.Error(), "ordered"):
			continue
		case err != nil:
			t.Fatal(err)
		}
		if n++; enough(msg.Subject(), msg.Data()) {
			return
		}
	}
}
