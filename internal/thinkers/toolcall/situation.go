package toolcall

import (
	"fmt"
	"strings"

	"berth/internal/computer"
	"berth/internal/looprunner"
)

// Situation is what a screenshot does not show, in words: the page, dialogs
// and downloads of an observation, and what people said. It is empty where
// there is nothing to say.
func Situation(o computer.Observation, dialogs []computer.Dialog, downloads []computer.Download, messages []string) string {
	var b strings.Builder
	if o.URL != "" || o.Title != "" {
		fmt.Fprintf(&b, "Page: %s %q\n", short(o.URL, 500), short(o.Title, 200))
	}
	if len(o.Pages) > 1 {
		fmt.Fprintf(&b, "%d pages are open; the screenshot shows the active one.\n", len(o.Pages))
	}
	for i, d := range dialogs {
		if i == 10 {
			fmt.Fprintf(&b, "… and %d more dialogs.\n", len(dialogs)-i)
			break
		}
		fmt.Fprintf(&b, "A dialog (%s) said %q and was %s.\n", d.Kind, short(d.Message, 500), d.Answer)
	}
	for i, d := range downloads {
		if i == 10 {
			fmt.Fprintf(&b, "… and %d more downloads.\n", len(downloads)-i)
			break
		}
		what := "downloaded"
		if d.Error != "" {
			what = "failed: " + short(d.Error, 200)
		}
		fmt.Fprintf(&b, "File %q: %s.\n", short(d.Name, 200), what)
	}
	for _, m := range messages {
		fmt.Fprintf(&b, "Message from the person you work for: %s\n", m)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// Digest tells exchanges that are no longer told in full, one line each.
func Digest(history []looprunner.Exchange) string {
	const most = 60
	var b strings.Builder
	for i, x := range history {
		if len(history)-i > most {
			continue
		}
		if b.Len() == 0 && i > 0 {
			fmt.Fprintf(&b, "(%d earlier steps are left out)\n", i)
		}
		fmt.Fprintf(&b, "%d. %s%s\n", x.Step, what(x.Decision), outcome(x.Acted))
		for _, m := range x.Messages {
			fmt.Fprintf(&b, "   (a person had said: %s)\n", short(m, 300))
		}
	}
	return strings.TrimSuffix(b.String(), "\n")
}

func what(d looprunner.Decision) string {
	var parts []string
	if d.Label != "" {
		parts = append(parts, short(oneLine(d.Label), 160))
	}
	if len(d.Actions) > 0 {
		parts = append(parts, "["+Brief(d.Actions)+"]")
	}
	if d.NeedsInput != "" {
		parts = append(parts, "asked a person: "+short(oneLine(d.NeedsInput), 160))
	}
	if len(parts) == 0 {
		return "looked at the screen"
	}
	return strings.Join(parts, " ")
}

func outcome(a *looprunner.Acted) string {
	if a == nil {
		return ""
	}
	if a.Error != nil {
		return fmt.Sprintf(" → %s (%s)", a.Outcome, short(a.Error.Message, 120))
	}
	return " → " + string(a.Outcome)
}

// Brief names actions for people, short.
func Brief(actions []computer.Action) string {
	parts := make([]string, 0, len(actions))
	for i, a := range actions {
		if i == 8 {
			parts = append(parts, fmt.Sprintf("and %d more", len(actions)-i))
			break
		}
		s := string(a.Type)
		switch {
		case a.X != nil && a.Y != nil:
			s = fmt.Sprintf("%s %d,%d", a.Type, *a.X, *a.Y)
		case len(a.Path) > 0:
			end := a.Path[len(a.Path)-1]
			s = fmt.Sprintf("%s %d,%d to %d,%d", a.Type, a.Path[0].X, a.Path[0].Y, end.X, end.Y)
		case len(a.Keys) > 0:
			s = fmt.Sprintf("%s %s", a.Type, strings.Join(a.Keys, "+"))
		case a.Text != nil:
			s = fmt.Sprintf("%s %q", a.Type, short(oneLine(*a.Text), 40))
		case a.Target != "":
			s = fmt.Sprintf("%s %s", a.Type, short(a.Target, 80))
		case len(a.Argv) > 0:
			s = fmt.Sprintf("%s %s", a.Type, short(strings.Join(a.Argv, " "), 60))
		case a.Seconds != nil:
			s = fmt.Sprintf("%s %vs", a.Type, *a.Seconds)
		}
		parts = append(parts, s)
	}
	return strings.Join(parts, ", ")
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

func short(s string, limit int) string {
	if len(s) > limit {
		return strings.ToValidUTF8(s[:limit], "") + "…"
	}
	return s
}
