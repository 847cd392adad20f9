package events

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"regexp"
	"strings"
	"time"
)

// FleetTenant is the tenant of the fleet itself; only operators may speak for it.
const FleetTenant = "_"

var (
	idPattern     = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)
	serverPattern = regexp.MustCompile(`^[a-z][a-z0-9]*(-[a-z0-9]+)*-[0-9]{2,}$`)
	lowerBase32   = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)
)

// CheckID returns an error unless s is a valid vm id, tenant, role or loop id.
// what names the field for the message.
func CheckID(what, s string) error {
	if !idPattern.MatchString(s) {
		return fmt.Errorf("%s %q: want 1 to 64 of A-Z a-z 0-9 _ -", what, clip(s))
	}
	return nil
}

// CheckServerID returns an error unless s has the form
// {hardware-class}-{sequence}, for example ax102-01.
func CheckServerID(s string) error {
	if len(s) > 64 || !serverPattern.MatchString(s) {
		return fmt.Errorf("server id %q: want {hardware-class}-{sequence} such as ax102-01, lower case, at most 64", clip(s))
	}
	return nil
}

// hash26 is the first 26 characters of the lower-case base32 (RFC 4648, no
// padding) of the SHA-256 of the parts joined by NUL, which no CloudEvents
// attribute can contain, so that different parts never join to one string.
func hash26(parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	return lowerBase32.EncodeToString(sum[:])[:26]
}

// Token is the subject token of a command: the hash of its CloudEvents
// (source, id), so that any id works in a subject.
func Token(source, id string) string { return hash26(source, id) }

// DerivedVMID is the vm id of a create request that chooses none; a
// redelivered request names the same vm.
func DerivedVMID(tenant, source, id string) string { return hash26(tenant, source, id) }

// clip keeps echoed input short.
func clip(s string) string {
	if len(s) > 80 {
		return s[:80] + "…"
	}
	return s
}

// CreateCommandID and KillCommandID name the scheduler's own commands: one
// create per placement of a vm, and numbered kills, so that a successor that
// publishes them again publishes the same command.
func CreateCommandID(vm string, fence uint64) string { return fmt.Sprintf("create-%s-%d", vm, fence) }

// IdlePauseID names the attempt-th pause of one placement of a vm that was last
// used at a moment.
func IdlePauseID(vm string, fence uint64, used time.Time, attempt int) string {
	return fmt.Sprintf("pause-%s-%d-%d-%d", vm, fence, used.UnixMilli(), attempt)
}

// KillCommandID names the attempt-th kill of one placement of a vm.
func KillCommandID(vm string, fence uint64, attempt int) string {
	return fmt.Sprintf("kill-%s-%d-%d", vm, fence, attempt)
}

// TemplateAt names a template that exists at one server only, as a snapshot
// does: a create from it is placed there.
func TemplateAt(name, server string) string { return name + "@" + server }

// SplitTemplate takes a template's name apart. server is "" where the name does
// not end in @ and a server id.
func SplitTemplate(template string) (name, server string) {
	i := strings.LastIndexByte(template, '@')
	if i <= 0 || CheckServerID(template[i+1:]) != nil {
		return template, ""
	}
	return template[:i], template[i+1:]
}
