package events

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/url"
	"strings"
	"time"

	cloudevents "github.com/cloudevents/sdk-go/v2/event"
	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/propagation"
)

// Event is a CloudEvent 1.0.
type Event = cloudevents.Event

// structuredType is the media type of a CloudEvent in structured JSON mode.
const structuredType = "application/cloudevents+json"

// maxAttribute bounds the bytes of the attributes that Berth echoes.
const maxAttribute = 1024

// Request names the request that an event or result stems from: the
// CloudEvents pair that identifies it.
type Request struct {
	Source string `json:"source"`
	ID     string `json:"id"`
}

// RequestOf returns the identity of an event.
func RequestOf(e Event) Request { return Request{Source: e.Source(), ID: e.ID()} }

// Token is the subject token of the pair.
func (r Request) Token() string { return Token(r.Source, r.ID) }

// New makes an event with JSON data and the time of now.
func New(typ, source, id string, data any) (Event, error) {
	e := cloudevents.New()
	e.SetType(typ)
	e.SetSource(source)
	e.SetID(id)
	e.SetTime(time.Now().UTC())
	if err := e.SetData(cloudevents.ApplicationJSON, data); err != nil {
		return Event{}, fmt.Errorf("encode %s: %w", typ, err)
	}
	if err := e.Validate(); err != nil {
		return Event{}, fmt.Errorf("make %s: %w", typ, err)
	}
	return e, nil
}

// propagator carries W3C trace context whatever the process has configured.
var propagator = propagation.TraceContext{}

// NewMessage encodes e in structured mode for subject, with the trace context
// of ctx in lower-case NATS headers.
func NewMessage(ctx context.Context, subject string, e Event) (*nats.Msg, error) {
	body, err := e.MarshalJSON()
	if err != nil {
		return nil, fmt.Errorf("encode %s for %s: %w", e.Type(), subject, err)
	}
	msg := nats.NewMsg(subject)
	msg.Data = body
	msg.Header.Set("Content-Type", structuredType)
	propagator.Inject(ctx, headerCarrier(msg.Header))
	return msg, nil
}

// ExtractTrace returns ctx with the trace context that the headers carry.
func ExtractTrace(ctx context.Context, h nats.Header) context.Context {
	return propagator.Extract(ctx, headerCarrier(h))
}

// headerCarrier reads in any letter case and writes lower case, as NATS
// headers keep the case that their publisher chose.
type headerCarrier nats.Header

var _ propagation.TextMapCarrier = headerCarrier{}

func (c headerCarrier) Get(key string) string { return headerValue(nats.Header(c), key) }
func (c headerCarrier) Set(key, value string) { c[strings.ToLower(key)] = []string{value} }
func (c headerCarrier) Keys() []string {
	keys := make([]string, 0, len(c))
	for k := range c {
		keys = append(keys, k)
	}
	return keys
}

// Propagator is what the process should install with otel, so that HTTP calls
// of providers carry the same context.
func Propagator() propagation.TextMapPropagator {
	otel.SetTextMapPropagator(propagator)
	return propagator
}

func headerValue(h nats.Header, key string) string {
	if v, ok := h[key]; ok && len(v) > 0 {
		return v[0]
	}
	for k, v := range h {
		if len(v) > 0 && strings.EqualFold(k, key) {
			return v[0]
		}
	}
	return ""
}

// ErrEnvelope is wrapped by every error of Decode: nobody can be answered,
// because the message names no (source, id).
var ErrEnvelope = errors.New("not a CloudEvent")

// Decode reads a CloudEvent 1.0 in structured mode (Content-Type
// application/cloudevents+json, or no headers and a JSON object) or in binary
// mode (ce-* headers in any letter case, values percent-decoded as the
// CloudEvents NATS binding says). The data must be JSON.
func Decode(h nats.Header, body []byte) (Event, error) {
	fail := func(format string, args ...any) (Event, error) {
		return Event{}, fmt.Errorf("%w: %s", ErrEnvelope, fmt.Sprintf(format, args...))
	}
	media := headerValue(h, "Content-Type")
	if media != structuredType { // as Berth writes it
		parsed, _, err := mime.ParseMediaType(media)
		if media = parsed; err != nil {
			media = ""
		}
	}
	var e Event
	var err error
	switch {
	case media == "application/cloudevents-batch+json":
		return fail("batched mode is not accepted; publish one event per message")
	case media != structuredType && hasCEHeaders(h):
		if e, err = decodeBinary(h, body); err != nil {
			return fail("%v", err)
		}
	default:
		if err := json.Unmarshal(body, &e); err != nil {
			return fail("neither ce-* headers nor a structured JSON event: %s", clip(err.Error()))
		}
	}
	if err := e.Validate(); err != nil {
		return fail("%s", strings.Join(strings.Fields(err.Error()), " "))
	}
	if e.SpecVersion() != cloudevents.CloudEventsVersionV1 {
		return fail("specversion %q; want 1.0", e.SpecVersion())
	}
	for name, v := range map[string]string{"id": e.ID(), "source": e.Source(), "type": e.Type(), "subject": e.Subject()} {
		if len(v) > maxAttribute {
			return fail("attribute %s has %d bytes, at most %d", name, len(v), maxAttribute)
		}
		if strings.ContainsFunc(v, func(r rune) bool { return r < 0x20 || r == 0x7f }) {
			return fail("attribute %s has a control character", name)
		}
	}
	return e, nil
}

func hasCEHeaders(h nats.Header) bool {
	for k := range h {
		if len(k) > 3 && strings.EqualFold(k[:3], "ce-") {
			return true
		}
	}
	return false
}

func decodeBinary(h nats.Header, body []byte) (Event, error) {
	e := cloudevents.New()
	version := headerValue(h, "ce-specversion")
	if version != cloudevents.CloudEventsVersionV1 {
		return e, fmt.Errorf("header ce-specversion is %q; want 1.0", clip(version))
	}
	for k, vs := range h {
		if len(k) <= 3 || !strings.EqualFold(k[:3], "ce-") || len(vs) == 0 {
			continue
		}
		name, value := strings.ToLower(k[3:]), vs[0]
		if decoded, err := url.PathUnescape(value); err == nil {
			value = decoded
		}
		switch name {
		case "specversion":
		case "id":
			e.SetID(value)
		case "source":
			e.SetSource(value)
		case "type":
			e.SetType(value)
		case "subject":
			e.SetSubject(value)
		case "dataschema":
			e.SetDataSchema(value)
		case "time":
			t, err := time.Parse(time.RFC3339Nano, value)
			if err != nil {
				return e, fmt.Errorf("header ce-time %q is no RFC 3339 time", clip(value))
			}
			e.SetTime(t)
		case "datacontenttype":
			return e, errors.New("header ce-datacontenttype; binary mode uses Content-Type")
		default:
			if err := e.Context.SetExtension(name, value); err != nil {
				return e, fmt.Errorf("header %s: %w", clip(k), err)
			}
		}
	}
	contentType := headerValue(h, "Content-Type")
	if contentType == "" {
		contentType = cloudevents.ApplicationJSON
	}
	if len(body) > 0 {
		e.SetDataContentType(contentType)
		e.DataEncoded = body
	}
	return e, nil
}

// DataError says that an event's data does not fit its type; the requester
// can be told, so it becomes a typed `rejected`.
type DataError struct {
	Code    string
	Message string
}

func (e *DataError) Error() string { return e.Message }

// BadInput makes a DataError with CodeBadInput.
func BadInput(format string, args ...any) *DataError {
	return &DataError{Code: CodeBadInput, Message: fmt.Sprintf(format, args...)}
}

// DecodeStrict reads the data of an event from outside into v: unknown fields
// and trailing text are refused by name with a *DataError.
func DecodeStrict(e Event, v any) error { return decodeData(e, v, true) }

// DecodeTolerant reads the data of an event from one of Berth's own programs.
func DecodeTolerant(e Event, v any) error { return decodeData(e, v, false) }

func decodeData(e Event, v any, strict bool) error {
	if ct := e.DataContentType(); ct != "" && ct != cloudevents.ApplicationJSON {
		media, _, err := mime.ParseMediaType(ct)
		if err != nil || (media != cloudevents.ApplicationJSON && media != "text/json" && !strings.HasSuffix(media, "+json")) {
			return BadInput("datacontenttype %q; want application/json", clip(ct))
		}
	}
	data := e.Data()
	if len(bytes.TrimSpace(data)) == 0 {
		data = []byte("{}")
	}
	if !strict { // no reader, no second buffer: this is every result and entry
		if err := json.Unmarshal(data, v); err != nil {
			return BadInput("data of %s: %s", clip(e.Type()), clip(strings.TrimPrefix(err.Error(), "json: ")))
		}
		return nil
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return BadInput("data of %s: %s", clip(e.Type()), clip(strings.TrimPrefix(err.Error(), "json: ")))
	}
	if dec.More() {
		return BadInput("data of %s: text after the JSON value", clip(e.Type()))
	}
	return nil
}
