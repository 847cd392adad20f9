package demoapp

import (
	"fmt"
	"strings"
)

// reportWord is how the report's title calls a status.
var reportWord = map[Status]string{None: "missing", Begun: "begun", OK: "ok", Wrong: "wrong"}

// report is green only when every part is, red when any part is red, and
// grey otherwise.
func report(parts map[string]Part) Part {
	words := make([]string, len(partNames))
	p := Part{Status: None}
	done := 0
	for i, name := range partNames {
		st := parts[name].Status
		words[i] = name + " " + reportWord[st]
		switch st {
		case OK:
			done++
		case Wrong:
			p.Status = Wrong
		}
		if st != None && p.Status == None {
			p.Status = Begun
		}
	}
	if done == len(partNames) {
		p.Status = OK
	}
	p.Title = "report: " + strings.Join(words, ", ")
	switch p.Status {
	case OK:
		p.Detail = "Every part was done exactly as its page asks."
	case Wrong:
		p.Detail = "Something arrived that a page does not ask for."
	default:
		p.Detail = fmt.Sprintf("%d of %d parts are done.", done, len(partNames))
	}
	return p
}

func overview(parts map[string]Part) Part {
	done := 0
	for _, name := range partNames {
		if parts[name].Status == OK {
			done++
		}
	}
	return Part{Status: parts["report"].Status, Title: fmt.Sprintf("overview: %d of %d done", done, len(partNames)), Detail: fmt.Sprintf("%d of %d errands are done", done, len(partNames))}
}

// inTitle makes text fit a title: one line, at most 40 characters.
func inTitle(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if r := []rune(s); len(r) > 40 {
		s = string(r[:39]) + "…"
	}
	return s
}
