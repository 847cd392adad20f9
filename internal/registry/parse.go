package registry

import (
	"bytes"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"berth/internal/events"
	"berth/internal/kv"
	"berth/internal/providers/e2b"
)

// entryFields are the fields of one entry, in the contract's order.
var entryFields = []string{
	"id", "url", "apiKey", "roles", "priority", "maxContainers",
	"provider", "isolation", "attributes", "template", "domain", "sandboxUrl", "caFile",
}

// clipboardAttribute names the program with which an E2B template reads and
// writes the clipboard; without it the server does not declare the capability.
const clipboardAttribute = "clipboard"

// Limits of one entry.
const (
	maxRoles      = 64
	maxAttributes = 64
	maxText       = 256
	maxCA         = 1 << 20 // bytes of a file of certificates
	maxPriority   = 1_000_000
)

// parse reads SANDBOX_SERVERS_JSON. Faults name their position, such as
// [3].id, and never a value that could be secret.
func parse(text string) ([]Server, []error) {
	dec := json.NewDecoder(strings.NewReader(text))
	var items []json.RawMessage
	if err := dec.Decode(&items); err != nil {
		return nil, []error{fmt.Errorf("not a JSON array of servers%s", where(err))}
	}
	if items == nil {
		return nil, []error{errors.New("null is no array of servers")}
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, []error{fmt.Errorf("text after the array, at byte %d", dec.InputOffset())}
	}
	if len(items) == 0 {
		return nil, []error{errors.New("the array is empty; unset the variable to use the next choice")}
	}
	if len(items) > MaxServers {
		return nil, []error{fmt.Errorf("%d servers, at most %d", len(items), MaxServers)}
	}
	var errs []error
	servers := make([]Server, len(items))
	first := map[string]int{}
	for i, item := range items {
		e := entry{prefix: fmt.Sprintf("[%d]", i)}
		servers[i] = e.parse(item)
		if id := servers[i].ID; id != "" {
			if j, dup := first[id]; dup {
				e.fail("id", "%q is already the id of [%d]", id, j)
			} else {
				first[id] = i
			}
		}
		errs = append(errs, e.errs...)
	}
	if len(errs) > 0 {
		return nil, errs
	}
	return servers, nil
}

// where tells the byte at which JSON breaks; the decoder's own text is not
// used, since it may quote what stands there.
func where(err error) string {
	var syntax *json.SyntaxError
	if errors.As(err, &syntax) {
		return fmt.Sprintf(": malformed at byte %d", syntax.Offset)
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return ": it ends too early"
	}
	return ""
}

// entry collects the faults of one entry.
type entry struct {
	prefix string
	fields map[string]json.RawMessage
	errs   []error
}

func (e *entry) fail(field, format string, args ...any) {
	at := e.prefix
	if field != "" {
		at += "." + field
	}
	e.errs = append(e.errs, fmt.Errorf("%s: %s", at, fmt.Sprintf(format, args...)))
}

func (e *entry) parse(raw json.RawMessage) Server {
	if !e.object(raw) {
		return Server{}
	}
	kind := SelfHosted
	if p := e.text("provider"); p != "" {
		kind = Kind(p)
	}
	switch kind {
	case SelfHosted, E2B, Playwright:
	default:
		e.fail("provider", "unknown provider %q; known are selfhosted, e2b, playwright", clip(string(kind)))
	}
	s := newServer("", kind)
	s.ID = e.id()
	s.URL, s.APIKey, s.Template, s.Domain = e.text("url"), e.text("apiKey"), e.text("template"), e.text("domain")
	if s.URL != "" {
		if err := checkURL(s.URL); err != nil {
			e.fail("url", "%v", err)
		}
	} else if kind == SelfHosted && e.fields["url"] == nil {
		e.fail("url", "a selfhosted server needs one")
	} else if kind == SelfHosted && !e.failed("url") {
		e.fail("url", "empty; a selfhosted server needs one")
	}
	if kind == E2B && s.APIKey == "" && !e.failed("apiKey") {
		e.fail("apiKey", "an e2b server needs one")
	}
	if s.Domain != "" {
		if err := checkDomain(s.Domain); err != nil {
			e.fail("domain", "%v", err)
		}
	}
	if s.SandboxURL = e.text("sandboxUrl"); s.SandboxURL != "" {
		if err := checkURL(s.SandboxURL); err != nil {
			e.fail("sandboxUrl", "%v", err)
		} else if kind != E2B {
			e.fail("sandboxUrl", "only an e2b server has one")
		}
	}
	if s.CA = e.ca(); s.CA != nil && kind == Playwright {
		e.fail("caFile", "a playwright server is on this machine and has none")
	}
	if roles := e.roles(); len(roles) > 0 {
		s.Config.Roles = roles
	}
	if n, ok := e.integer("priority", -maxPriority, maxPriority); ok {
		s.Config.Priority = n
	}
	if n, ok := e.integer("maxContainers", 1, MaxContainers); ok {
		s.Config.MaxContainers = n
	}
	switch iso := kv.Isolation(e.text("isolation")); iso {
	case "":
	case kv.IsolationNone, kv.IsolationRole, kv.IsolationTenant:
		s.Config.Isolation = iso
	default:
		e.fail("isolation", "unknown isolation %q; known are none, role, tenant", clip(string(iso)))
	}
	s.Config.Attributes = e.attributes()
	if c, ok := s.Config.Attributes[clipboardAttribute]; ok && kind == E2B && c != e2b.XClip && c != e2b.XSel {
		e.fail("attributes."+clipboardAttribute, "of an e2b server it names the template's program: %s or %s", e2b.XClip, e2b.XSel)
	}
	return s
}

// object reads the entry's fields; one that is unknown or given twice is a
// fault by name.
func (e *entry) object(raw json.RawMessage) bool {
	dec := json.NewDecoder(bytes.NewReader(raw))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		e.fail("", "not an object")
		return false
	}
	e.fields = map[string]json.RawMessage{}
	for dec.More() {
		t, err := dec.Token()
		name, ok := t.(string)
		if err != nil || !ok {
			e.fail("", "malformed")
			return false
		}
		var value json.RawMessage
		if err := dec.Decode(&value); err != nil {
			e.fail("", "malformed")
			return false
		}
		if !slices.Contains(entryFields, name) {
			e.fail(clip(name), "unknown field; known are %s", strings.Join(entryFields, ", "))
			continue
		}
		if _, twice := e.fields[name]; twice {
			e.fail(name, "given twice")
		}
		e.fields[name] = value
	}
	return true
}

// has returns a field's value unless it is absent or null.
func (e *entry) has(field string) (json.RawMessage, bool) {
	v, ok := e.fields[field]
	return v, ok && string(v) != "null"
}

func (e *entry) failed(field string) bool {
	return slices.ContainsFunc(e.errs, func(err error) bool { return strings.HasPrefix(err.Error(), e.prefix+"."+field+":") })
}

func (e *entry) text(field string) string {
	v, ok := e.has(field)
	if !ok {
		return ""
	}
	var s string
	if json.Unmarshal(v, &s) != nil {
		e.fail(field, "not a string")
		return ""
	}
	limit := maxText
	if field == "apiKey" || field == "url" || field == "caFile" {
		limit = 4096
	}
	if len(s) > limit || strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r == 0x7f }) {
		e.fail(field, "more than %d bytes, or a control character", limit)
		return ""
	}
	return s
}

// ca reads the file of certificates that caFile names.
func (e *entry) ca() []byte {
	path := e.text("caFile")
	if path == "" {
		return nil
	}
	info, err := os.Stat(path)
	if err == nil && (!info.Mode().IsRegular() || info.Size() > maxCA) {
		err = fmt.Errorf("%s is no file of at most %d bytes", path, maxCA)
	}
	var raw []byte
	if err == nil {
		raw, err = os.ReadFile(path)
	}
	if err == nil {
		err = checkCA(raw)
	}
	if err != nil {
		e.fail("caFile", "%v", err)
		return nil
	}
	return raw
}

// checkCA returns an error unless raw holds certificates.
func checkCA(raw []byte) error {
	if !x509.NewCertPool().AppendCertsFromPEM(raw) {
		return errors.New("no PEM certificate in it")
	}
	return nil
}

func (e *entry) id() string {
	if _, ok := e.has("id"); !ok {
		e.fail("id", "missing")
		return ""
	}
	id := e.text("id")
	if e.failed("id") {
		return ""
	}
	if err := events.CheckServerID(id); err != nil {
		e.fail("id", "%v", err)
	}
	return id
}

func (e *entry) integer(field string, lo, hi int) (int, bool) {
	v, ok := e.has(field)
	if !ok {
		return 0, false
	}
	n, err := strconv.Atoi(string(v))
	if err != nil || n < lo || n > hi {
		e.fail(field, "want a whole number from %d to %d", lo, hi)
		return 0, false
	}
	return n, true
}

func (e *entry) roles() []string {
	v, ok := e.has("roles")
	if !ok {
		return nil
	}
	var list []string
	if json.Unmarshal(v, &list) != nil {
		e.fail("roles", "not an array of strings")
		return nil
	}
	if len(list) > maxRoles {
		e.fail("roles", "%d roles, at most %d", len(list), maxRoles)
		return nil
	}
	var roles []string
	for i, r := range list {
		if err := events.CheckID("role", r); err != nil {
			e.fail(fmt.Sprintf("roles[%d]", i), "%v", err)
		}
		if !slices.Contains(roles, r) {
			roles = append(roles, r)
		}
	}
	return roles
}

// attributes are strings; a number or a boolean counts as its JSON text.
func (e *entry) attributes() map[string]string {
	v, ok := e.has("attributes")
	if !ok {
		return nil
	}
	var m map[string]json.RawMessage
	if json.Unmarshal(v, &m) != nil {
		e.fail("attributes", "not an object")
		return nil
	}
	if len(m) > maxAttributes {
		e.fail("attributes", "%d attributes, at most %d", len(m), maxAttributes)
		return nil
	}
	out := make(map[string]string, len(m))
	names := make([]string, 0, len(m))
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if name == "" || len(name) > 64 || strings.ContainsFunc(name, func(r rune) bool { return r < 0x20 || r == 0x7f }) {
			e.fail("attributes", "a name has 1 to 64 bytes and no control character")
			continue
		}
		raw := m[name]
		var s string
		switch {
		case raw[0] == '"' && json.Unmarshal(raw, &s) == nil:
		case raw[0] == '{' || raw[0] == '[' || string(raw) == "null":
			e.fail("attributes."+name, "want a string, number or boolean")
			continue
		default:
			s = string(raw)
		}
		if len(s) > maxText {
			e.fail("attributes."+name, "%d bytes, at most %d", len(s), maxText)
			continue
		}
		out[name] = s
	}
	return out
}

// clip keeps echoed input short.
func clip(s string) string {
	if len(s) > 40 {
		return strings.ToValidUTF8(s[:40], "") + "…"
	}
	return s
}
