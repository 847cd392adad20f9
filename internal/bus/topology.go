package bus

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/events"
	"berth/internal/kv"
)

// Names of the streams.
const (
	Requests   = "REQUESTS"
	Commands   = "COMMANDS"
	Results    = "RESULTS"
	Events     = "EVENTS"
	Loops      = "LOOPS"
	DeadLetter = "DEADLETTER"
)

// Names of the shared durable consumers.
const (
	SchedulerConsumer  = "scheduler"   // on REQUESTS, RESULTS and COMMANDS
	LoopRunnerConsumer = "loop-runner" // on REQUESTS
)

const mib = 1 << 20

// maxConsumers of a stream. A server has two on COMMANDS and every loop one on
// RESULTS; a NATS server allows 1,000 where the stream does not say.
const maxConsumers = 20_000

// StreamSpec is one stream with the reason for its limits.
type StreamSpec struct {
	jetstream.StreamConfig
	Why string
}

// Streams returns every stream, those behind the KV buckets and the object
// store included, for the given number of replicas. It is the one place where
// they are defined; docs and deploy files are generated from it.
func Streams(replicas int) []StreamSpec {
	verbs := []events.Verb{events.Create, events.Act, events.Observe, events.Kill, events.Pause, events.Resume, events.Snapshot, events.Cancel}
	commands := make([]string, len(verbs))
	for i, v := range verbs {
		commands[i] = events.CommandSubject("*", "*", v)
	}
	day := 24 * time.Hour
	specs := []StreamSpec{
		{jetstream.StreamConfig{Name: Requests, Description: "requests from any service, until a scheduler or loop-runner has taken them in",
			Subjects:  []string{"request.*.sandbox.*", "request.*.loop.*", "request.*.server.*", "request.*.quota.*"},
			Retention: jetstream.WorkQueuePolicy, Discard: jetstream.DiscardNew, MaxAge: 7 * day, MaxBytes: 256 * mib},
			"a full stream refuses the publisher instead of losing a request; what nobody took in for a week nobody waits for"},
		{jetstream.StreamConfig{Name: Commands, Description: "commands to sandboxes, kept for replay",
			Subjects: commands, Discard: jetstream.DiscardOld, MaxAge: day, MaxBytes: 256 * mib},
			"every command is past its deadline (at most 12 h) long before it is dropped; shorter than RESULTS, so that a command still there always finds its claim"},
		{jetstream.StreamConfig{Name: Results, Description: "claims and results of commands",
			Subjects: []string{events.ResultSubject("*", "*", "*")}, Discard: jetstream.DiscardNew, MaxAge: 2 * day, MaxBytes: 512 * mib},
			"a claim must not vanish while its command can be delivered again: a full stream stops execution, it never forgets; about 200 B of server memory per command, hence the age"},
		{jetstream.StreamConfig{Name: Events, Description: "what happened, for any service",
			Subjects: []string{"event.>"}, Discard: jetstream.DiscardOld, MaxAge: 7 * day, MaxBytes: 256 * mib},
			"history for people and services; the newest matters most"},
		{jetstream.StreamConfig{Name: Loops, Description: "journals of loops",
			Subjects: []string{"loop.>"}, Discard: jetstream.DiscardNew, MaxAge: 7 * day, MaxBytes: 512 * mib},
			"a journal with a hole cannot be resumed: a full stream stops new steps"},
		{jetstream.StreamConfig{Name: DeadLetter, Description: "messages that were given up, with the reason",
			Subjects: []string{"deadletter.>"}, Discard: jetstream.DiscardOld, MaxAge: 30 * day, MaxBytes: 64 * mib},
			"for operators to look at within a month"},
		bucket(kv.BucketServers, 16*mib, 0, "the merged view that people read; rewritten from its parts"),
		bucket(kv.BucketPlacements, 256*mib, 0, "decides: capacity, isolation, phases; ended sandboxes leave after 24 h"),
		bucket(kv.BucketHeartbeats, 16*mib, 30*time.Second, "a heartbeat is worthless after seconds; expiry is heard by watchers"),
		bucket(kv.BucketLeases, 16*mib, kv.LeaseBucketTTL, "a dead holder is in nobody's way for longer than this"),
		{jetstream.StreamConfig{Name: "OBJ_" + kv.BucketFrames, Description: "screenshots, named <vm>/<sha256>",
			Subjects: []string{"$O." + kv.BucketFrames + ".C.>", "$O." + kv.BucketFrames + ".M.>"}, Discard: jetstream.DiscardNew,
			AllowRollup: true, AllowDirect: true, MaxAge: day, MaxBytes: 1024 * mib},
			"pictures are large and soon stale; a full store fails the observation, not the act"},
	}
	for i := range specs {
		c := &specs[i].StreamConfig
		c.Storage = jetstream.FileStorage
		c.Replicas = replicas
		c.MaxConsumers = maxConsumers
		if c.MaxMsgSize == 0 && !strings.HasPrefix(c.Name, "OBJ_") {
			c.MaxMsgSize = mib
		}
		c.Duplicates = 2 * time.Minute
		if c.MaxAge > 0 && c.MaxAge < c.Duplicates {
			c.Duplicates = c.MaxAge
		}
	}
	return specs
}

// bucket is the stream of a KV bucket. AllowDirect stays off: replicas answer
// stale, and these records decide things.
func bucket(name string, maxBytes int64, ttl time.Duration, why string) StreamSpec {
	c := jetstream.StreamConfig{Name: "KV_" + name, Description: "KV bucket " + name,
		Subjects: []string{"$KV." + name + ".>"}, Discard: jetstream.DiscardNew,
		MaxMsgsPerSubject: 1, MaxBytes: maxBytes, MaxAge: ttl,
		AllowRollup: true, DenyDelete: true}
	c.AllowMsgTTL = true // markers of what was purged go by themselves
	if ttl > 0 {
		c.SubjectDeleteMarkerTTL = ttl
	}
	return StreamSpec{c, why}
}

// ConsumerSpec is one durable consumer.
type ConsumerSpec struct {
	Stream string
	jetstream.ConsumerConfig
}

// SharedConsumers are the durables that all processes of one kind share.
func SharedConsumers() []ConsumerSpec {
	base := func(name, description string, filters ...string) jetstream.ConsumerConfig {
		return jetstream.ConsumerConfig{Durable: name, Description: description, FilterSubjects: filters,
			AckPolicy: jetstream.AckExplicitPolicy, DeliverPolicy: jetstream.DeliverAllPolicy,
			AckWait: 10 * time.Second, MaxDeliver: -1, MaxAckPending: 1024}
	}
	return []ConsumerSpec{
		{Requests, base(SchedulerConsumer, "create, kill, act … and operators' requests", "request.*.sandbox.*", "request.*.server.*", "request.*.quota.*")},
		{Requests, base(LoopRunnerConsumer, "loop requests", "request.*.loop.*")},
		{Results, base(SchedulerConsumer, "confirmations and forwarded results", events.ResultSubject("*", "*", "*"))},
		strays(base(SchedulerConsumer, "commands for servers that nobody serves; headers only")),
	}
}

// strays is acknowledged from time to time for all before: nearly every command
// has a worker, and is none of the scheduler's business.
func strays(c jetstream.ConsumerConfig) ConsumerSpec {
	c.HeadersOnly = true
	c.AckPolicy = jetstream.AckAllPolicy
	c.AckWait = 30 * time.Second
	c.MaxAckPending = 100_000
	return ConsumerSpec{Commands, c}
}

// BacklogPerSandbox bounds the commands that wait for one sandbox; the excess
// is rejected as busy.
const BacklogPerSandbox = 64

// KillConsumer is the name of a server's second consumer, on which kills and
// cancels overtake whatever waits on the first.
func KillConsumer(server string) string { return server + "-kill" }

// ServerConsumers are the durables of one server's worker on COMMANDS.
func ServerConsumers(server string, maxContainers int) []ConsumerSpec {
	base := func(name, description string, pending int, verbs ...events.Verb) ConsumerSpec {
		filters := make([]string, len(verbs))
		for i, v := range verbs {
			filters[i] = events.CommandSubject(server, "*", v)
		}
		return ConsumerSpec{Commands, jetstream.ConsumerConfig{Durable: name, Description: description, FilterSubjects: filters,
			AckPolicy: jetstream.AckExplicitPolicy, DeliverPolicy: jetstream.DeliverAllPolicy,
			AckWait: 30 * time.Second, MaxDeliver: -1, MaxAckPending: pending}}
	}
	// Room for every sandbox's backlog twice, of commands and of cancels, so that
	// one stuck sandbox never holds up another's delivery, nor cancels a kill's.
	pending := max(1024, 2*maxContainers*BacklogPerSandbox)
	return []ConsumerSpec{
		base(server, "commands of "+server, pending, events.Create, events.Act, events.Observe, events.Pause, events.Resume, events.Snapshot),
		base(KillConsumer(server), "kills and cancels of "+server, pending, events.Kill, events.Cancel),
	}
}

// Drift is a difference between what is defined here and what the server has.
type Drift struct{ Object, Field, Want, Have string }

func (d Drift) String() string {
	return fmt.Sprintf("%s: %s is %s, want %s", d.Object, d.Field, d.Have, d.Want)
}

// Ensure makes the streams, buckets and shared consumers that are missing. It
// never changes one that exists; Check tells how they differ.
func Ensure(ctx context.Context, js jetstream.JetStream, replicas int) error {
	streams := Streams(replicas)
	last := len(streams) - 1 // whoever finds it (Await) finds everything
	for _, s := range streams[:last] {
		if err := ensureStream(ctx, js, s); err != nil {
			return err
		}
	}
	if err := EnsureConsumers(ctx, js, SharedConsumers()); err != nil {
		return err
	}
	return ensureStream(ctx, js, streams[last])
}

func ensureStream(ctx context.Context, js jetstream.JetStream, s StreamSpec) error {
	_, err := js.CreateStream(ctx, s.StreamConfig)
	if err != nil && !errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
		return fmt.Errorf("make stream %s: %w", s.Name, err)
	}
	return nil
}

// EnsureConsumers makes the consumers that are missing.
func EnsureConsumers(ctx context.Context, js jetstream.JetStream, specs []ConsumerSpec) error {
	for _, c := range specs {
		_, err := js.CreateConsumer(ctx, c.Stream, c.ConsumerConfig)
		if err != nil && !errors.Is(err, jetstream.ErrConsumerExists) {
			return fmt.Errorf("make consumer %s of %s: %w", c.Durable, c.Stream, err)
		}
	}
	return nil
}

// Check compares what the server has with what is defined here.
func Check(ctx context.Context, js jetstream.JetStream, replicas int) ([]Drift, error) {
	var drifts []Drift
	for _, want := range Streams(replicas) {
		s, err := js.Stream(ctx, want.Name)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			drifts = append(drifts, Drift{"stream " + want.Name, "it", "there", "missing"})
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("look at stream %s: %w", want.Name, err)
		}
		drifts = append(drifts, compareStream(want.StreamConfig, s.CachedInfo().Config)...)
	}
	for _, want := range SharedConsumers() {
		c, err := js.Consumer(ctx, want.Stream, want.Durable)
		object := "consumer " + want.Durable + " of " + want.Stream
		if errors.Is(err, jetstream.ErrConsumerNotFound) || errors.Is(err, jetstream.ErrStreamNotFound) {
			drifts = append(drifts, Drift{object, "it", "there", "missing"})
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("look at %s: %w", object, err)
		}
		have := c.CachedInfo().Config
		filters := have.FilterSubjects
		if len(filters) == 0 && have.FilterSubject != "" {
			filters = []string{have.FilterSubject}
		}
		drifts = appendDrift(drifts, object, "filter", sorted(want.FilterSubjects), sorted(filters))
		drifts = appendDrift(drifts, object, "ackPolicy", want.AckPolicy, have.AckPolicy)
		drifts = appendDrift(drifts, object, "ackWait", want.AckWait, have.AckWait)
		drifts = appendDrift(drifts, object, "maxAckPending", want.MaxAckPending, have.MaxAckPending)
		drifts = appendDrift(drifts, object, "maxDeliver", want.MaxDeliver, have.MaxDeliver)
	}
	return drifts, nil
}

func compareStream(want, have jetstream.StreamConfig) []Drift {
	o := "stream " + want.Name
	var d []Drift
	d = appendDrift(d, o, "subjects", sorted(want.Subjects), sorted(have.Subjects))
	d = appendDrift(d, o, "retention", want.Retention, have.Retention)
	d = appendDrift(d, o, "discard", want.Discard, have.Discard)
	d = appendDrift(d, o, "maxAge", want.MaxAge, have.MaxAge)
	d = appendDrift(d, o, "maxBytes", want.MaxBytes, have.MaxBytes)
	d = appendDrift(d, o, "maxConsumers", want.MaxConsumers, have.MaxConsumers)
	d = appendDrift(d, o, "storage", want.Storage, have.Storage)
	d = appendDrift(d, o, "replicas", want.Replicas, have.Replicas)
	d = appendDrift(d, o, "allowDirect", want.AllowDirect, have.AllowDirect)
	d = appendDrift(d, o, "allowMsgTTL", want.AllowMsgTTL, have.AllowMsgTTL)
	d = appendDrift(d, o, "subjectDeleteMarkerTTL", want.SubjectDeleteMarkerTTL, have.SubjectDeleteMarkerTTL)
	return d
}

func appendDrift[T any](drifts []Drift, object, field string, want, have T) []Drift {
	w, h := fmt.Sprint(want), fmt.Sprint(have)
	if w != h {
		drifts = append(drifts, Drift{object, field, w, h})
	}
	return drifts
}

func sorted(s []string) []string {
	s = slices.Clone(s)
	slices.Sort(s)
	return s
}

// Repair changes what exists to what is defined here, as far as NATS allows,
// and makes what is missing.
func Repair(ctx context.Context, js jetstream.JetStream, replicas int) error {
	for _, s := range Streams(replicas) {
		if _, err := js.CreateOrUpdateStream(ctx, s.StreamConfig); err != nil {
			return fmt.Errorf("repair stream %s: %w", s.Name, err)
		}
	}
	for _, c := range SharedConsumers() {
		if _, err := js.CreateOrUpdateConsumer(ctx, c.Stream, c.ConsumerConfig); err != nil {
			return fmt.Errorf("repair consumer %s of %s: %w", c.Durable, c.Stream, err)
		}
	}
	return nil
}
