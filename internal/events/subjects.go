package events

import (
	"fmt"
	"strings"
)

// Verb is what a request or a command asks for; it is the last token of its
// subject, the name of its span and the log key's value.
type Verb string

// The verbs of sandbox requests and commands.
const (
	Create   Verb = "create"
	Act      Verb = "act"
	Observe  Verb = "observe"
	Kill     Verb = "kill"
	Pause    Verb = "pause"
	Resume   Verb = "resume"
	Snapshot Verb = "snapshot"
	Extend   Verb = "extend"
	Cancel   Verb = "cancel" // of another command of the same sandbox
)

// The verbs of server, quota and loop requests.
const (
	Cordon   Verb = "cordon"
	Uncordon Verb = "uncordon"
	Drain    Verb = "drain"
	Remove   Verb = "remove"
	Set      Verb = "set"
	Start    Verb = "start"
	Stop     Verb = "stop"
	Message  Verb = "message"
)

// RequestSubject is `request.<tenant>.<noun>.<verb>`; noun is sandbox, loop,
// server or quota.
func RequestSubject(tenant, noun string, verb Verb) string {
	return "request." + tenant + "." + noun + "." + string(verb)
}

// RequestPath is a parsed request subject.
type RequestPath struct {
	Tenant, Noun string
	Verb         Verb
}

// ParseRequest splits a request subject.
func ParseRequest(subject string) (RequestPath, error) {
	t := strings.Split(subject, ".")
	if len(t) != 4 || t[0] != "request" {
		return RequestPath{}, fmt.Errorf("subject %q is not request.<tenant>.<noun>.<verb>", clip(subject))
	}
	if err := CheckID("tenant", t[1]); err != nil {
		return RequestPath{}, err
	}
	return RequestPath{Tenant: t[1], Noun: t[2], Verb: Verb(t[3])}, nil
}

// CommandSubject is `sandbox.<server>.<vm>.<verb>`.
func CommandSubject(server, vm string, verb Verb) string {
	return "sandbox." + server + "." + vm + "." + string(verb)
}

// ResultSubject is `sandbox.<server>.<vm>.result.<token>`.
func ResultSubject(server, vm, token string) string {
	return "sandbox." + server + "." + vm + ".result." + token
}

// CommandPath is a parsed command subject.
type CommandPath struct {
	Server, VM string
	Verb       Verb
}

// ParseCommand splits a command subject.
func ParseCommand(subject string) (CommandPath, error) {
	t := strings.Split(subject, ".")
	if len(t) != 4 || t[0] != "sandbox" {
		return CommandPath{}, fmt.Errorf("subject %q is not sandbox.<server>.<vm>.<verb>", clip(subject))
	}
	if err := CheckID("vm id", t[2]); err != nil {
		return CommandPath{}, err
	}
	return CommandPath{Server: t[1], VM: t[2], Verb: Verb(t[3])}, nil
}

// ResultPath is a parsed result subject.
type ResultPath struct{ Server, VM, Token string }

// ParseResult splits a result subject.
func ParseResult(subject string) (ResultPath, error) {
	t := strings.Split(subject, ".")
	if len(t) != 5 || t[0] != "sandbox" || t[3] != "result" {
		return ResultPath{}, fmt.Errorf("subject %q is not sandbox.<server>.<vm>.result.<token>", clip(subject))
	}
	return ResultPath{Server: t[1], VM: t[2], Token: t[4]}, nil
}

// EventSubject is `event.<tenant>.<subject>.<name>`: subject is a vm id, or a
// server id under the tenant `_`.
func EventSubject(tenant, subject, name string) string {
	return "event." + tenant + "." + subject + "." + name
}

// LoopSubject is `loop.<tenant>.<loop>.<name>`; with the name ">" it is the
// filter of a whole journal.
func LoopSubject(tenant, loop, name string) string {
	return "loop." + tenant + "." + loop + "." + name
}

// ThinkSubject is `think.<name>`: request/reply with a service that thinks.
func ThinkSubject(name string) string { return "think." + name }

// DeadLetterSubject is `deadletter.<stream>.<consumer>`.
func DeadLetterSubject(stream, consumer string) string {
	return "deadletter." + stream + "." + consumer
}
