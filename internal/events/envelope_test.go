package events

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
)

const structured = `{"specversion":"1.0","id":"1","source":"/me","type":"t","data":{"a":1}}`

func TestDecodeEnvelope(t *testing.T) {
	for name, c := range map[string]struct {
		header nats.Header
		body   string
		id     string
		data   string
	}{
		"structured":                         {nats.Header{"Content-Type": {"application/cloudevents+json"}}, structured, "1", `{"a":1}`},
		"structured, charset and lower case": {nats.Header{"content-type": {"application/cloudevents+json; charset=utf-8"}}, structured, "1", `{"a":1}`},
		"structured without headers":         {nil, structured, "1", `{"a":1}`},
		"binary":                             {nats.Header{"ce-specversion": {"1.0"}, "ce-id": {"2"}, "ce-source": {"/me"}, "ce-type": {"t"}}, `{"a":2}`, "2", `{"a":2}`},
		"binary, any letter case":            {nats.Header{"Ce-Specversion": {"1.0"}, "CE-ID": {"2"}, "cE-source": {"/me"}, "CE-Type": {"t"}, "CONTENT-TYPE": {"application/json"}}, `{"a":2}`, "2", `{"a":2}`},
		"binary, percent-encoded":            {nats.Header{"ce-specversion": {"1.0"}, "ce-id": {"Z%C3%BCrich%25"}, "ce-source": {"/me"}, "ce-type": {"t"}}, `{}`, "Zürich%", `{}`},
		"binary without data":                {nats.Header{"ce-specversion": {"1.0"}, "ce-id": {"2"}, "ce-source": {"/me"}, "ce-type": {"t"}}, ``, "2", ``},
		"structured, base64":                 {nil, `{"specversion":"1.0","id":"1","source":"/me","type":"t","data_base64":"e30="}`, "1", `{}`},
	} {
		e, err := Decode(c.header, []byte(c.body))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if e.ID() != c.id || e.Source() != "/me" || e.Type() != "t" || string(e.Data()) != c.data {
			t.Errorf("%s: id %q, source %q, type %q, data %s", name, e.ID(), e.Source(), e.Type(), e.Data())
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	ok := nats.Header{"ce-specversion": {"1.0"}, "ce-id": {"2"}, "ce-source": {"/me"}, "ce-type": {"t"}}
	with := func(k, v string) nats.Header {
		h := nats.Header{}
		for name, values := range ok {
			h[name] = values
		}
		h[k] = []string{v}
		return h
	}
	for name, c := range map[string]struct {
		header nats.Header
		body   string
		says   string
	}{
		"empty":             {nil, "", "neither"},
		"no JSON":           {nil, "click", "neither"},
		"an array":          {nil, "[]", "neither"},
		"no id":             {nil, `{"specversion":"1.0","source":"/me","type":"t"}`, "id"},
		"no source":         {nil, `{"specversion":"1.0","id":"1","type":"t"}`, "source"},
		"old version":       {nil, `{"specversion":"0.3","id":"1","source":"/me","type":"t"}`, "0.3"},
		"batch":             {nats.Header{"Content-Type": {"application/cloudevents-batch+json"}}, "[]", "batched"},
		"binary version":    {with("ce-specversion", "2.0"), "{}", "2.0"},
		"binary time":       {with("ce-time", "yesterday"), "{}", "yesterday"},
		"binary no type":    {nats.Header{"ce-specversion": {"1.0"}, "ce-id": {"2"}, "ce-source": {"/me"}}, "{}", "type"},
		"control character": {with("ce-id", "a%0Ab"), "{}", "control"},
		"long id":           {with("ce-id", strings.Repeat("x", 2000)), "{}", "2000"},
	} {
		_, err := Decode(c.header, []byte(c.body))
		if !errors.Is(err, ErrEnvelope) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v; want it to say %q", name, err, c.says)
		}
	}
}

func TestDecodeStrict(t *testing.T) {
	for body, says := range map[string]string{
		`{"vmId":"a","ttlSecond":1}`: "ttlSecond",
		`{"vmId":1}`:                 "vmId",
		`[1]`:                        "array",
	} {
		e, err := New(TypeSandboxCreate, "/me", "1", nil)
		if err != nil {
			t.Fatal(err)
		}
		e.DataEncoded = []byte(body)
		var data *DataError
		if err := DecodeStrict(e, &SandboxCreate{}); !errors.As(err, &data) || data.Code != CodeBadInput || !strings.Contains(data.Message, says) {
			t.Errorf("%s: %v; want %q", body, err, says)
		}
	}
	e, err := New(TypeSandboxCreate, "/me", "1", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.SetData("text/plain", "hello"); err != nil {
		t.Fatal(err)
	}
	if err := DecodeStrict(e, &SandboxCreate{}); err == nil || !strings.Contains(err.Error(), "text/plain") {
		t.Errorf("plain text: %v", err)
	}
}

// What New and NewMessage write, Decode reads back, with the trace context.
func TestRoundTrip(t *testing.T) {
	e, err := New(TypeSandboxCreate, "/me", "1", SandboxCreate{VMID: "a"})
	if err != nil {
		t.Fatal(err)
	}
	const parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	ctx := ExtractTrace(context.Background(), nats.Header{"TraceParent": {parent}})
	msg, err := NewMessage(ctx, "x", e)
	if err != nil {
		t.Fatal(err)
	}
	if got := msg.Header["traceparent"]; len(got) != 1 || got[0] != parent {
		t.Errorf("traceparent %v", got)
	}
	back, err := Decode(msg.Header, msg.Data)
	if err != nil || back.ID() != "1" {
		t.Errorf("%v %v", back, err)
	}
}

// The hash is part of the contract: other programs compute it too.
func TestTokenIsStable(t *testing.T) {
	if got := Token("/me", "1"); len(got) != 26 || got != Token("/me", "1") || got == Token("/me1", "") || got == Token("/m", "e1") {
		t.Errorf("token %q", got)
	}
	const want = "aas6r5y5mapb6bv4nbhueitrwi" // SHA-256 of "/me\x001", RFC 4648 base32, lower case, 26 characters
	if got := Token("/me", "1"); got != want {
		t.Errorf("token of (/me, 1) is %q, want %q", got, want)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add("application/cloudevents+json", "1", []byte(structured))
	f.Add("", "%zz", []byte(`{}`))
	f.Fuzz(func(t *testing.T, contentType, id string, body []byte) {
		for _, h := range []nats.Header{{"Content-Type": {contentType}}, {"ce-specversion": {"1.0"}, "ce-id": {id}, "ce-source": {"/me"}, "ce-type": {"t"}, "Content-Type": {contentType}}} {
			e, err := Decode(h, body)
			if err != nil {
				continue
			}
			if e.ID() == "" || e.Source() == "" || e.Type() == "" {
				t.Fatalf("accepted without identity: %v", e)
			}
			var c SandboxCreate
			if DecodeStrict(e, &c) == nil {
				if err := c.Validate(); err == nil && (c.Role == "" || c.TTLSeconds == nil) {
					t.Fatalf("valid without defaults: %+v", c)
				}
			}
		}
	})
}

func FuzzSubjects(f *testing.F) {
	f.Add("request.default.sandbox.create")
	f.Add("sandbox.ax102-01.vm.result.token")
	f.Fuzz(func(t *testing.T, s string) {
		if r, err := ParseRequest(s); err == nil && RequestSubject(r.Tenant, r.Noun, r.Verb) != s {
			t.Fatalf("%q is read as %+v", s, r)
		}
		if c, err := ParseCommand(s); err == nil && CommandSubject(c.Server, c.VM, c.Verb) != s {
			t.Fatalf("%q is read as %+v", s, c)
		}
		if r, err := ParseResult(s); err == nil && ResultSubject(r.Server, r.VM, r.Token) != s {
			t.Fatalf("%q is read as %+v", s, r)
		}
	})
}
