package replay

import (
	"fmt"
	"strings"

	"berth/internal/computer"
)

// DescribeAll is a command's actions in a few words.
func DescribeAll(actions []computer.Action) string {
	switch len(actions) {
	case 0:
		return ""
	case 1:
		return Describe(actions[0])
	default:
		return fmt.Sprintf("%s and %d more", Describe(actions[0]), len(actions)-1)
	}
}

// Describe is an action in a few words. What it types, opens or runs is in
// them as it stands.
func Describe(a computer.Action) string {
	at := ""
	if a.X != nil && a.Y != nil {
		at = fmt.Sprintf(" %d,%d", *a.X, *a.Y)
	}
	mods := strings.Join(a.Modifiers, "+")
	if mods != "" {
		mods += "+"
	}
	switch a.Type {
	case computer.Click:
		count := map[int]string{2: "double ", 3: "triple "}[a.Count]
		button := ""
		if a.Button != computer.Left && a.Button != "" {
			button = string(a.Button) + " "
		}
		return mods + count + button + "click" + at
	case computer.Drag:
		if len(a.Path) > 0 {
			from, to := a.Path[0], a.Path[len(a.Path)-1]
			return fmt.Sprintf("%sdrag %d,%d → %d,%d", mods, from.X, from.Y, to.X, to.Y)
		}
	case computer.Scroll:
		return fmt.Sprintf("%sscroll%s by %g,%g", mods, at, a.DX, a.DY)
	case computer.TypeText, computer.ClipboardWrite:
		if a.Text != nil {
			return fmt.Sprintf("%s %q", a.Type, *a.Text)
		}
	case computer.Key:
		s := "key " + strings.Join(a.Keys, "+")
		if a.Repeat > 1 {
			s += fmt.Sprintf(" ×%d", a.Repeat)
		}
		return s
	case computer.Hold:
		return fmt.Sprintf("hold %s %g s", strings.Join(a.Keys, "+"), a.Duration(0))
	case computer.Wait:
		return fmt.Sprintf("wait %g s", a.Duration(0))
	case computer.Zoom:
		if r := a.Region; r != nil {
			return fmt.Sprintf("zoom %d,%d %d×%d", r.X, r.Y, r.Width, r.Height)
		}
	case computer.Open:
		return "open " + a.Target
	case computer.Run:
		return "run " + strings.Join(a.Argv, " ")
	}
	return string(a.Type) + at
}
