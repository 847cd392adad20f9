package events

import (
	"strings"
	"testing"

	"berth/internal/computer"
)

func limitsOf(t *testing.T, allow, deny string) LoopLimits {
	t.Helper()
	var l LoopLimits
	for _, h := range strings.Fields(allow) {
		l.AllowHosts = append(l.AllowHosts, HostPattern(h))
	}
	for _, h := range strings.Fields(deny) {
		l.DenyHosts = append(l.DenyHosts, HostPattern(h))
	}
	if err := l.validate(true); err != nil {
		t.Fatal(err)
	}
	return l
}

func TestHostRules(t *testing.T) {
	for _, c := range []struct {
		allow, deny string
		address     string
		open, shown bool // may be
	}{
		{"", "", "https://anything.example/", true, true},
		{"", "", "javascript:x", true, true},
		{"app.example.org", "", "https://APP.example.org./x", true, true},
		{"app.example.org", "", "https://app.example.org.evil.example/", false, false},
		{"app.example.org", "", "https://evil.example/app.example.org", false, false},
		{"app.example.org", "", "https://app.example.org@evil.example/", false, false},
		{"app.example.org", "", "https://sub.app.example.org/", false, false},
		{"*.example.org", "", "https://a.b.example.org/", true, true},
		{"*.example.org", "", "https://example.org/", false, false},
		{"*.example.org", "", "https://badexample.org/", false, false},
		{"localhost:8080", "", "http://localhost:8080/x", true, true},
		{"localhost:8080", "", "http://localhost:8081/x", false, false},
		{"a.example:443", "", "https://a.example/", true, true},
		{"a.example:443", "", "http://a.example/", false, false},
		{"[::1]:80", "", "http://[0:0:0:0:0:0:0:1]/", true, true},
		{"127.0.0.1", "", "http://127.0.0.1:9/", true, true},
		{"", "bad.example *.bad.example", "https://bad.example/", false, false},
		{"", "bad.example *.bad.example", "https://x.bad.example/", false, false},
		{"", "bad.example", "https://good.example/", true, true},
		{"*.example", "bad.example", "https://bad.example/", false, false},
		// What browsers read in another way than Go is refused, not guessed.
		{"good.example", "", `https://good.example\@evil.example/`, false, false},
		{"good.example", "", `https:\\evil.example`, false, false},
		{"good.example", "", "http:evil.example", false, false},
		{"good.example", "", "http:///evil.example", false, false},
		{"good.example", "", "//evil.example", false, false},
		{"good.example", "", `\\evil.example`, false, false},
		{"", "127.0.0.1", "http://2130706433/", false, false},
		{"", "127.0.0.1", "http://0x7f.1/", false, false},
		{"", "evil.example", "http://ｅvil.example/", false, false},
		{"", "evil.example", "http://%65vil.example/", false, false},
		// Without a scheme a browser takes it for a host.
		{"good.example", "", "good.example/x", true, false},
		{"good.example", "", "evil.example/x", false, false},
		{"good.example", "", "evil.example:8080/x", false, false},
		// Nobody's page.
		{"good.example", "", "about:blank", true, true},
		{"good.example", "", "/home/me/letter.txt", true, false},
		{"good.example", "", "file:///home/me/letter.txt", true, true},
		{"good.example", "", "chrome-error://chromewebdata/", false, true},
		{"good.example", "", "data:text/html,x", false, false},
		{"good.example", "", "javascript:location='//evil.example'", false, false},
		{"good.example", "", "blob:https://good.example/1", false, true},
		{"good.example", "", "blob:https://evil.example/1", false, false},
		{"", "evil.example", "view-source:https://evil.example/", false, false},
		{"good.example", "", "", false, false},
	} {
		l := limitsOf(t, c.allow, c.deny)
		if why := l.CheckTarget(c.address); (why == "") != c.open {
			t.Errorf("allow %q deny %q: open %q: %q, may be: %v", c.allow, c.deny, c.address, why, c.open)
		}
		if why := l.CheckShown(c.address); (why == "") != c.shown {
			t.Errorf("allow %q deny %q: shown %q: %q, may be: %v", c.allow, c.deny, c.address, why, c.shown)
		}
	}
}

func TestLimitsAreChecked(t *testing.T) {
	number := func(n int) *int { return &n }
	for want, l := range map[string]LoopLimits{
		`limits.allowHosts: "https://x.example"`:     {AllowHosts: []HostPattern{"https://x.example"}},
		`limits.denyHosts: "x.example:0"`:            {DenyHosts: []HostPattern{"x.example:0"}},
		`limits.denyHosts: "*"`:                      {DenyHosts: []HostPattern{"*"}},
		`limits.denyHosts: ""`:                       {DenyHosts: []HostPattern{""}},
		`limits.allowHosts: "zoë.example"`:           {AllowHosts: []HostPattern{"zoë.example"}},
		`limits.denyActions: unknown action "dance"`: {DenyActions: []computer.Type{"dance"}},
		"limits.repeatedScreens: -1":                 {RepeatedScreens: number(-1)},
		"limits.repeatedActions: 10001":              {RepeatedActions: number(10001)},
		"limits.spendUsd: -1":                        {SpendUSD: -1},
	} {
		if err := l.validate(false); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("error %v, want %s", err, want)
		}
	}
	var plain, scripted LoopLimits
	if err := plain.validate(false); err != nil || *plain.RepeatedScreens != DefaultRepScreens || *plain.RepeatedActions != DefaultRepActions {
		t.Errorf("defaults %+v, %v", plain, err)
	}
	if err := scripted.validate(true); err != nil || scripted.RepeatedScreens != nil || scripted.RepeatedActions != nil {
		t.Errorf("of a script %+v, %v: it may do the same as often as it likes", scripted, err)
	}
}

func FuzzHostRules(f *testing.F) {
	f.Add("app.example.org", "https://app.example.org/")
	f.Add("*.example.org:80", `http:\\x.example.org`)
	f.Add("[::1]", "http://[::1]:80/")
	f.Fuzz(func(t *testing.T, pattern, address string) {
		l := LoopLimits{AllowHosts: []HostPattern{HostPattern(pattern)}}
		if l.validate(true) != nil {
			return
		}
		again := LoopLimits{AllowHosts: []HostPattern{l.AllowHosts[0]}}
		if err := again.validate(true); err != nil || again.AllowHosts[0] != l.AllowHosts[0] {
			t.Fatalf("%q becomes %q, and that %q, %v", pattern, l.AllowHosts[0], again.AllowHosts[0], err)
		}
		deny := LoopLimits{DenyHosts: l.AllowHosts}
		if lower := strings.ToLower(address); (strings.HasPrefix(lower, "http://") || strings.HasPrefix(lower, "https://")) && l.CheckShown(address) == "" && deny.CheckShown(address) == "" {
			t.Fatalf("%q is both in %q and not", address, l.AllowHosts[0])
		}
	})
}
