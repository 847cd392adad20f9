package events

import (
	"fmt"
	"net/netip"
	"net/url"
	"regexp"
	"strconv"
	"strings"
)

// HostPattern names hosts: `app.example.org` is that host, `*.example.org` all
// below example.org but not itself, and either may end in `:port`; without one
// every port is meant. Letter case does not count. A host that is not ASCII is
// written in its ASCII form (xn--…), an IPv6 address in brackets.
type HostPattern string

var (
	hostName = regexp.MustCompile(`^([a-z0-9_]([a-z0-9_-]*[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?$`)
	number   = regexp.MustCompile(`^(0x[0-9a-f]*|[0-9]+)$`)
)

// canonical checks the pattern and returns it as it is compared.
func (p HostPattern) canonical() (HostPattern, error) {
	host, port := splitPort(strings.ToLower(string(p)))
	below := strings.HasPrefix(host, "*.")
	clean, err := canonicalHost(strings.TrimPrefix(host, "*."))
	if err == nil && below && strings.ContainsAny(clean, ":") {
		err = fmt.Errorf("an address has nothing below it")
	}
	if n, e := strconv.Atoi(port); err == nil && port != "" && (e != nil || n < 1 || n > 65535) {
		err = fmt.Errorf("the port is not in 1 to 65535")
	}
	if err != nil {
		return p, fmt.Errorf("%q: %w; want a host such as app.example.org, *.example.org or localhost:8080, without scheme and path", clip(string(p)), err)
	}
	if strings.Contains(clean, ":") {
		clean = "[" + clean + "]"
	}
	if below {
		clean = "*." + clean
	}
	if port != "" {
		clean += ":" + port
	}
	return HostPattern(clean), nil
}

// matches reports whether a canonical pattern names the host.
func (p HostPattern) matches(host, port string) bool {
	name, only := splitPort(string(p))
	if only != "" && only != port {
		return false
	}
	if below, ok := strings.CutPrefix(name, "*"); ok {
		return strings.HasSuffix(host, below)
	}
	return strings.Trim(name, "[]") == host
}

// splitPort parts a port from a host, which may be an IPv6 address in brackets.
func splitPort(s string) (host, port string) {
	i := strings.LastIndexByte(s, ':')
	if i < 0 || strings.HasSuffix(s, "]") {
		return s, ""
	}
	return s[:i], s[i+1:]
}

// canonicalHost refuses what a browser might take for another host than Go
// does: numbers that stand for an address, and what is not ASCII.
func canonicalHost(host string) (string, error) {
	host = strings.TrimSuffix(strings.ToLower(host), ".")
	if bare, ok := strings.CutPrefix(host, "["); ok {
		host = strings.TrimSuffix(bare, "]")
	}
	if addr, err := netip.ParseAddr(host); err == nil && addr.Zone() == "" {
		return addr.String(), nil
	}
	if len(host) > 253 || !hostName.MatchString(host) {
		return "", fmt.Errorf("no host name in ASCII")
	}
	if number.MatchString(host[strings.LastIndexByte(host, '.')+1:]) {
		return "", fmt.Errorf("an address in an unusual form; write it as 192.0.2.1")
	}
	return host, nil
}

// hasHostRules reports whether the limits say anything about hosts.
func (l *LoopLimits) hasHostRules() bool { return len(l.AllowHosts)+len(l.DenyHosts) > 0 }

// CheckTarget says why an open action's target may not be opened, "" where it
// may. A file of the sandbox has no host and may. What cannot be told to be a
// host's address for certain may not, where there are rules about hosts.
func (l *LoopLimits) CheckTarget(target string) string {
	target = strings.TrimSpace(target)
	lower := strings.ToLower(target)
	switch {
	case !l.hasHostRules(), lower == "about:blank", isFile.MatchString(target):
		return ""
	case !strings.HasPrefix(lower, "http://") && !strings.HasPrefix(lower, "https://"):
		if otherScheme.MatchString(target) {
			return fmt.Sprintf("%q is no http or https address, and this loop has rules about hosts", clip(target))
		}
		target = "https://" + target // as browsers take it
	}
	return l.checkURL(target)
}

var (
	isFile = regexp.MustCompile(`^(/[^/\\]|/$|\./|\.\./|~|[A-Za-z]:\\|(?i:file):)`)
	// otherScheme is not host:port.
	otherScheme = regexp.MustCompile(`^([A-Za-z][A-Za-z0-9+.-]*:(//|[^0-9])|//|\\)`)
	// noHost are addresses that a browser shows where it shows nobody's page.
	noHost = regexp.MustCompile(`^(?i)(about:|chrome-error:|file:)`)
	// inner are schemes whose address has another in it.
	inner = regexp.MustCompile(`^(?i)(blob|filesystem|view-source):`)
)

// CheckShown says why a page with this address may not be shown, "" where it
// may. Without an address nobody can tell, so it may not where there are rules
// about hosts.
func (l *LoopLimits) CheckShown(address string) string {
	if !l.hasHostRules() {
		return ""
	}
	for n := 0; inner.MatchString(address) && n < 3; n++ {
		address = address[strings.IndexByte(address, ':')+1:]
	}
	lower := strings.ToLower(address)
	switch {
	case address == "":
		return "the sandbox does not say which address it shows, and this loop has rules about hosts; browser sandboxes say it, desktops do not"
	case noHost.MatchString(address):
		return ""
	case !strings.HasPrefix(lower, "http://") && !strings.HasPrefix(lower, "https://"):
		if len(l.AllowHosts) == 0 {
			return ""
		}
		return fmt.Sprintf("%q is no host's address, and limits.allowHosts lists what may be shown", clip(address))
	}
	return l.checkURL(address)
}

// checkURL judges an http or https URL.
func (l *LoopLimits) checkURL(raw string) string {
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" {
		return fmt.Sprintf("%q is no address whose host can be told", clip(raw))
	}
	host, err := canonicalHost(u.Hostname())
	if err != nil {
		return fmt.Sprintf("the host of %q: %v", clip(raw), err)
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[strings.ToLower(u.Scheme)]
	}
	for _, p := range l.DenyHosts {
		if p.matches(host, port) {
			return fmt.Sprintf("host %s is in limits.denyHosts (%s)", host, p)
		}
	}
	for _, p := range l.AllowHosts {
		if p.matches(host, port) {
			return ""
		}
	}
	if len(l.AllowHosts) > 0 {
		return fmt.Sprintf("host %s is not in limits.allowHosts", host)
	}
	return ""
}
