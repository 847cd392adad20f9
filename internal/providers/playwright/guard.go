package playwright

import (
	"context"
	"encoding/json"
	"net"
	"net/url"
	"strings"
)

// guardPatterns are the requests that the guard looks at: DevTools' own paths,
// on whatever host. All other requests pass without a detour.
var guardPatterns = []params{
	{"urlPattern": "http://*/json*"},
	{"urlPattern": "http://*/devtools*"},
}

// guard keeps this browser's pages, frames and workers from the debugging
// ports of the provider's browsers. Chromium checks the Origin of a WebSocket
// there, but it shows to anyone on the machine which pages are open, and
// closes them on request: without a guard one sandbox could look into another.
func (c *connection) guard(ctx context.Context) error {
	c.cdp.on("Fetch.requestPaused", func(_ string, raw json.RawMessage) {
		var event struct {
			RequestID string `json:"requestId"`
			Request   struct{ URL string }
		}
		if err := json.Unmarshal(raw, &event); err != nil {
			return // no event that we know: nothing to let through
		}
		method, p := "Fetch.continueRequest", params{"requestId": event.RequestID}
		if c.s.p.isDebugPort(event.Request.URL) {
			method, p["errorReason"] = "Fetch.failRequest", "BlockedByClient"
			c.s.p.log.Warn("a sandbox reached for a debugging port", "vm", c.s.vm(), "url", event.Request.URL)
		}
		c.s.work.Go(func() {
			_ = c.cdp.call(context.Background(), "", method, p, nil) // fails when the request is over, or the connection
		})
	})
	return c.cdp.call(ctx, "", "Fetch.enable", params{"patterns": guardPatterns}, nil)
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
