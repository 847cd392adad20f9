package scheduler

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/trace"

	"berth/internal/computer"
	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/placement"
)

// request is one message of REQUESTS, read as far as any kind of request is.
type request struct {
	events.RequestPath
	event    events.Event
	ref      events.Request
	sequence uint64    // in REQUESTS: the order of arrival
	at       time.Time // when the stream took it
}

// onRequest takes in one request. It returns nil once its effect, or the
// refusal, is durable.
func (t *term) onRequest(ctx context.Context, d delivery) error {
	path, err := events.ParseRequest(d.Subject())
	if err == nil {
		err = d.err // no (source, id): nobody can be answered
	}
	if err != nil {
		return &drop{err.Error()}
	}
	e := d.event
	r := request{path, e, events.RequestOf(e), d.meta.Sequence.Stream, d.meta.Timestamp}
	ctx, span := t.tracer.Start(events.ExtractTrace(ctx, d.Headers()), path.Noun+"."+string(path.Verb)+" request",
		trace.WithSpanKind(trace.SpanKindConsumer),
		trace.WithAttributes(attribute.String("messaging.system", "nats"), attribute.String("cloudevents.event_id", e.ID()), attribute.String("berth.tenant", path.Tenant)))
	defer span.End()
	err = t.take(ctx, r)
	var refused *refusal
	outcome := "taken"
	if errors.As(err, &refused) {
		outcome = refused.code
		err = t.refuse(ctx, r, refused)
	}
	t.meters.requests.Add(ctx, 1, metric.WithAttributes(attribute.String("verb", string(path.Verb)), attribute.String("outcome", outcome)))
	if err != nil {
		span.RecordError(err)
	}
	return err
}

// decode reads the request's data: strictly, but for Berth's own programs,
// which may be of another version.
func (r request) decode(v any) error {
	if strings.HasPrefix(r.event.Source(), events.OwnSource) {
		return events.DecodeTolerant(r.event, v)
	}
	return events.DecodeStrict(r.event, v)
}

// vmOf reads the sandbox that a request names, however faulty it is otherwise;
// "" where it names none.
func vmOf(e events.Event) string {
	var data struct {
		VMID string `json:"vmId"`
	}
	if err := events.DecodeTolerant(e, &data); err != nil || data.VMID == "" {
		return e.Subject()
	}
	return data.VMID
}

// requestLane is what a request is about: requests about one sandbox or server
// are taken in one after the other, in order.
func requestLane(d delivery) string {
	path, err := events.ParseRequest(d.Subject())
	if err != nil {
		return ""
	}
	if path.Noun != "sandbox" {
		return "_ " + path.Noun
	}
	if d.err != nil {
		return path.Tenant
	}
	if vm := vmOf(d.event); vm != "" {
		return vm
	}
	return events.DerivedVMID(path.Tenant, d.event.Source(), d.event.ID())
}

// refusal is a request that is answered with `rejected`.
type refusal struct {
	subject string // vm or server id that it is about; "" derives one
	code    string
	message string
	forward bool // of a command: answered with `finished rejected`
}

func (r *refusal) Error() string { return r.code + ": " + r.message }

// take dispatches one request.
func (t *term) take(ctx context.Context, r request) error {
	types := requestTypes(r.Noun, r.Verb)
	if types == nil {
		return &refusal{code: events.CodeUnsupported, message: fmt.Sprintf("there is no request %s.%s", r.Noun, r.Verb)}
	}
	known := false
	for _, typ := range types {
		known = known || typ == r.event.Type()
	}
	if !known {
		return &refusal{code: events.CodeUnknownType, message: fmt.Sprintf("type %q on %s; want %s", r.event.Type(), events.RequestSubject(r.Tenant, r.Noun, r.Verb), types[0])}
	}
	if fleet := r.Tenant == events.FleetTenant; (r.Noun != "sandbox") != fleet && !(fleet && r.Verb != events.Create) {
		return &refusal{code: events.CodeForbidden, message: fmt.Sprintf("tenant %q may not ask for %s.%s", r.Tenant, r.Noun, r.Verb)}
	}
	switch r.Noun + "." + string(r.Verb) {
	case "sandbox.create":
		return t.takeCreate(ctx, r)
	case "sandbox.kill":
		return t.takeKill(ctx, r)
	case "sandbox.extend":
		return t.takeExtend(ctx, r)
	case "quota.set":
		return t.takeQuota(ctx, r)
	}
	if r.Noun == "server" {
		return t.takeServer(ctx, r)
	}
	return t.takeCommand(ctx, r)
}

// requestTypes are the event types that a request subject takes.
func requestTypes(noun string, verb events.Verb) []string {
	switch noun + "." + string(verb) {
	case "sandbox.create", "sandbox.kill", "sandbox.extend":
		return []string{events.SandboxType(string(verb))}
	case "sandbox.act", "sandbox.observe", "sandbox.pause", "sandbox.resume", "sandbox.snapshot", "sandbox.cancel":
		return []string{events.CommandType(verb), events.SandboxType(string(verb))}
	case "server.cordon", "server.uncordon", "server.drain", "server.remove":
		return []string{events.ServerType(string(verb))}
	case "quota.set":
		return []string{events.TypeQuotaSet}
	}
	return nil
}

// asRefusal turns a fault of the data into a refusal about subject.
func asRefusal(err error, subject string) error {
	var data *events.DataError
	if errors.As(err, &data) {
		return &refusal{subject: subject, code: data.Code, message: data.Message}
	}
	return err
}

// refuse answers a request with `rejected`.
func (t *term) refuse(ctx context.Context, r request, why *refusal) error {
	subject := why.subject
	if events.CheckID("", subject) != nil {
		subject = events.DerivedVMID(r.Tenant, r.ref.Source, r.ref.ID)
	}
	t.log.Info("refused", "request", r.Noun+"."+string(r.Verb), "tenant", r.Tenant, "subject", subject, "code", why.code, "message", why.message)
	id := r.ref.Token() + "-rejected"
	if why.forward {
		return t.sayFinished(ctx, r.Tenant, subject, r.ref.Token(), events.Finished{
			CommandID: r.ref.ID, Source: r.ref.Source, Command: r.Verb, Outcome: computer.Rejected,
			Error: &computer.Fault{Code: why.code, Message: why.message}, Actions: []computer.ActionResult{},
			Timing: events.Timing{FinishedAt: time.Now().UTC()}, Request: r.ref,
		})
	}
	typ := events.SandboxType(events.EventRejected)
	var data any = events.Ended{VMID: subject, Code: why.code, Message: why.message, Request: r.ref}
	if r.Noun == "quota" {
		typ = "berth.quota.rejected.v1"
	}
	if r.Noun == "server" {
		typ = events.ServerType(events.EventRejected)
		data = serverRejected{ServerID: subject, Code: why.code, Message: why.message, Request: r.ref}
	}
	return t.say(ctx, r.Tenant, subject, typ, events.EventRejected, id, data, "")
}

// serverRejected is the data of berth.server.rejected.v1.
type serverRejected struct {
	ServerID string         `json:"serverId"`
	Code     string         `json:"code"`
	Message  string         `json:"message"`
	Request  events.Request `json:"request"`
}

// takeCreate makes the record of a new sandbox; its existence is the taking.
func (t *term) takeCreate(ctx context.Context, r request) error {
	var spec events.SandboxCreate
	derived := events.DerivedVMID(r.Tenant, r.ref.Source, r.ref.ID)
	if err := r.decode(&spec); err != nil {
		return asRefusal(err, vmOf(r.event)) // where the requester listens, if it chose an id
	}
	if spec.VMID == "" {
		spec.VMID = derived
	}
	if err := spec.Validate(); err != nil {
		return asRefusal(err, spec.VMID)
	}
	if _, server := events.SplitTemplate(spec.Template); server != "" {
		spec.Constraints = append(spec.Constraints, events.Constraint{Attribute: placement.AttributeID, Operator: string(placement.Equal), Value: events.Strings{server}})
	}
	rec := kv.Placement{
		VMID: spec.VMID, Tenant: r.Tenant, Role: spec.Role, Owner: spec.Owner, Session: spec.Session, Phase: kv.Queued,
		Request: r.ref, CreatedAt: r.at.UTC(), Order: r.sequence,
		Deadline: r.at.UTC().Add(events.Seconds(*spec.QueueTimeoutSeconds)), Spec: &spec, Traceparent: traceparentOf(ctx),
	}
	settle, err := t.admit(ctx, rec)
	if err != nil {
		return err
	}
	defer settle()
	defer t.writing(kv.VMKey(rec.VMID))()
	rev, err := kv.Put(ctx, t.placements, kv.VMKey(rec.VMID), rec, 0)
	if err == nil {
		t.applyVM(rec, rev)
		return nil
	}
	if !errors.Is(err, kv.ErrConflict) {
		return err
	}
	there, rev, err := kv.Get[kv.Placement](ctx, t.placements, kv.VMKey(rec.VMID))
	if err != nil {
		return err
	}
	if there.Request == r.ref && there.Tenant == r.Tenant {
		t.applyVM(there, rev)
		return nil // the same request again
	}
	return &refusal{subject: rec.VMID, code: events.CodeVMIDInUse,
		message: fmt.Sprintf("vm id %q names another sandbox, or one that ended within %s; choose another, or none", rec.VMID, tombstone)}
}

// find reads the record of a sandbox that tenant may speak for.
func (t *term) find(ctx context.Context, tenant, vm string) (kv.Placement, error) {
	rec, _, err := kv.Get[kv.Placement](ctx, t.placements, kv.VMKey(vm))
	if errors.Is(err, kv.ErrNotFound) || err == nil && rec.Tenant != tenant && tenant != events.FleetTenant {
		return kv.Placement{}, &refusal{subject: vm, code: events.CodeNotFound, message: fmt.Sprintf("there is no sandbox %q", vm)}
	}
	return rec, err
}

func checkVM(vm string) error {
	if err := events.CheckID("vmId", vm); err != nil {
		return &refusal{code: events.CodeBadInput, message: err.Error()}
	}
	return nil
}

func ended(rec kv.Placement) *refusal {
	return &refusal{subject: rec.VMID, code: events.CodeEnded, message: fmt.Sprintf("sandbox %q has ended: %s, %s", rec.VMID, rec.Outcome, rec.Code)}
}

// takeKill ends a sandbox in whatever phase it is.
func (t *term) takeKill(ctx context.Context, r request) error {
	var data events.SandboxKill
	if err := r.decode(&data); err != nil {
		return asRefusal(err, vmOf(r.event))
	}
	if err := checkVM(data.VMID); err != nil {
		return err
	}
	rec, err := t.find(ctx, r.Tenant, data.VMID)
	if err != nil {
		return err
	}
	if data.Request != nil && rec.Request != *data.Request {
		return &refusal{subject: rec.VMID, code: events.CodeNotFound, message: fmt.Sprintf("sandbox %q is not the one that request %s of %s made", rec.VMID, data.Request.ID, data.Request.Source)}
	}
	if rec.Phase == kv.Ended {
		return ended(rec)
	}
	return t.kill(ctx, rec.VMID, events.CodeKilled, "killed by request "+r.ref.ID)
}

// kill has a sandbox end as killed; one that never reached a server ends at once.
func (t *term) kill(ctx context.Context, vm, code, message string) error {
	unlock, err := t.moving.lock(ctx, vm)
	if err != nil {
		return err
	}
	defer unlock()
	_, err = t.transition(ctx, vm, func(p *kv.Placement, _ uint64) error {
		now := time.Now().UTC()
		switch {
		case p.Phase == kv.Ended || p.Ending != nil && p.Ending.Outcome == events.EventKilled:
			return kv.ErrUnchanged
		case p.Phase == kv.Queued:
			p.Phase, p.EndedAt, p.Outcome, p.Code, p.Message, p.Spec = kv.Ended, &now, events.EventFailed, code, message, nil
		default:
			attempt := 1
			if p.Ending != nil {
				attempt = p.Ending.Attempt
			}
			p.Ending = &kv.Ending{Outcome: events.EventKilled, Code: code, Message: message, Since: now, Attempt: attempt}
		}
		return nil
	})
	t.queue.add(vm)
	return err
}

// takeExtend moves the end of a sandbox's life.
func (t *term) takeExtend(ctx context.Context, r request) error {
	var data events.SandboxExtend
	if err := r.decode(&data); err != nil {
		return asRefusal(err, vmOf(r.event))
	}
	if err := checkVM(data.VMID); err != nil {
		return err
	}
	if data.TTLSeconds <= 0 || data.TTLSeconds > events.MaxTTL.Seconds() {
		return &refusal{subject: data.VMID, code: events.CodeBadInput, message: fmt.Sprintf("ttlSeconds: %v is not in 0 (exclusive) to %v seconds", data.TTLSeconds, events.MaxTTL.Seconds())}
	}
	if _, err := t.find(ctx, r.Tenant, data.VMID); err != nil {
		return err
	}
	unlock, err := t.moving.lock(ctx, data.VMID)
	if err != nil {
		return err
	}
	defer unlock()
	var expires time.Time
	var refused *refusal
	rec, err := t.transition(ctx, data.VMID, func(p *kv.Placement, _ uint64) error {
		refused = nil
		switch {
		case p.Phase == kv.Ended:
			refused = ended(*p)
			return kv.ErrUnchanged
		case p.Phase != kv.Ready || p.Ending != nil:
			refused = &refusal{subject: p.VMID, code: events.CodeNotReady, message: fmt.Sprintf("sandbox %q is %s; its life begins when it is ready", p.VMID, p.Phase)}
			return kv.ErrUnchanged
		}
		expires = r.at.UTC().Add(events.Seconds(data.TTLSeconds))
		p.ExpiresAt = &expires
		return nil
	})
	if err != nil {
		return err
	}
	if refused != nil {
		return refused
	}
	return t.say(ctx, rec.Tenant, rec.VMID, events.SandboxType(events.EventExtended), events.EventExtended, r.ref.Token()+"-extended",
		extended{VMID: rec.VMID, ExpiresAt: expires, Request: r.ref}, rec.Traceparent)
}

// extended is the data of berth.sandbox.extended.v1.
type extended struct {
	VMID      string         `json:"vmId"`
	ExpiresAt time.Time      `json:"expiresAt"`
	Request   events.Request `json:"request"`
}

// takeCommand forwards act, observe and the like to the sandbox's server,
// under the requester's own (source, id), so that the command stays the same
// one however it came.
func (t *term) takeCommand(ctx context.Context, r request) error {
	var data events.Command
	if err := r.decode(&data); err != nil {
		return forwarded(asRefusal(err, vmOf(r.event)))
	}
	if data.VMID == "" {
		data.VMID = r.event.Subject()
	}
	if err := checkVM(data.VMID); err != nil {
		return forwarded(&refusal{code: events.CodeBadInput, message: "name the sandbox in data.vmId or in the event's subject: " + err.Error()})
	}
	rec, err := t.find(ctx, r.Tenant, data.VMID)
	if err != nil {
		return forwarded(err)
	}
	switch {
	case rec.Phase == kv.Ended:
		return forwarded(ended(rec))
	case rec.Phase != kv.Ready:
		return forwarded(&refusal{subject: rec.VMID, code: events.CodeNotReady, message: fmt.Sprintf("sandbox %q is %s; wait for its ready event", rec.VMID, rec.Phase)})
	}
	data.VMID = ""
	if data.Fence == nil {
		data.Fence = &rec.Fence
	}
	if data.Deadline == nil {
		deadline := r.at.UTC().Add(events.DefaultDeadline)
		data.Deadline = &deadline
	}
	e, err := events.New(events.CommandType(r.Verb), r.ref.Source, r.ref.ID, data)
	if err != nil {
		return err
	}
	e.SetExtension(events.ExtForwarded, r.Tenant)
	msg, err := events.NewMessage(ctx, events.CommandSubject(rec.ServerID, rec.VMID, r.Verb), e)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if _, err := t.js.PublishMsg(ctx, msg, jetstream.WithMsgID(rec.ServerID+"."+rec.VMID+"."+r.ref.Token())); err != nil {
		return fmt.Errorf("forward %s to %s: %w", r.Verb, rec.ServerID, err)
	}
	return nil
}

// forwarded marks a refusal to be answered with `finished rejected`.
func forwarded(err error) error {
	var why *refusal
	if errors.As(err, &why) {
		why.forward = true
	}
	return err
}
