package playwright

import (
	"net"
	"net/url"
	"strings"
)

// guardPatterns are the requests that the guard looks at: DevTools' own paths,
// on whatever host. All other requests pass without a detour.
var guardPatterns = []map[string]any{
	{"urlPattern": "http://*/json*"},
	{"urlPattern": "http://*/devtools*"},
}

// guard keeps this browser's pages, frames and workers from the debugging
// ports of the provider's browsers. Chromium checks the Origin of a WebSocket
// there, but it shows to anyone on the machine which pages are open, and
// closes them on request: without a guard one sandbox could look into another.
func (c *connection) guard() error {
	c.root.On("Fetch.requestPaused", func(v any) {
		event, ok := v.(map[string]any)
		if !ok {
			return
		}
		request, _ := event["request"].(map[string]any)
		to, _ := request["url"].(string) // "": let through what has no address
		method, params := "Fetch.continueRequest", map[string]any{"requestId": event["requestId"]}
		if c.s.p.isDebugPort(to) {
			method, params["errorReason"] = "Fetch.failRequest", "BlockedByClient"
			c.s.p.log.Warn("a sandbox reached for a debugging port", "vm", c.s.vm(), "url", to)
		}
		c.s.work.Go(func() {
			_, _ = send[none](c.root, method, params) // fails when the request is over, or the connection
		})
	})
	_, err := send[none](c.root, "Fetch.enable", map[string]any{"patterns": guardPatterns})
	return err
}

// isDebugPort reports whether an address is on this machine, at the debugging
// port of one of the provider's browsers.
func (p *Provider) isDebugPort(address string) bool {
	u, err := url.Parse(address)
	if err != nil || u.Port() == "" {
		return false
	}
	ip := net.ParseIP(u.Hostname())
	if !isLoopback(u.Hostname()) && (ip == nil || !ip.IsUnspecified()) {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ports[u.Port()] > 0
}

// port returns the debugging port of a browser.
func (p *process) port() string {
	port, _, _ := strings.Cut(strings.TrimPrefix(p.endpoint, "ws://127.0.0.1:"), "/")
	return port
}
