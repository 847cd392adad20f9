package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"regexp"
	"strconv"
	"strings"
)

// envdPort is where a sandbox's envd is.
const envdPort = 49983

var hostName = regexp.MustCompile(`^(\d+)-([0-9a-z]+)\.`)

// addressed returns the sandbox and its port that a request is for: the
// headers, or a host of the form 49983-<id>.<domain>.
func addressed(r *http.Request) (id string, port int, ok bool) {
	if id := r.Header.Get("E2b-Sandbox-Id"); id != "" {
		port, err := strconv.Atoi(r.Header.Get("E2b-Sandbox-Port"))
		if err != nil {
			port = 0
		}
		return id, port, true
	}
	host := r.Host
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	m := hostName.FindStringSubmatch(strings.ToLower(host))
	if m == nil {
		return "", 0, false
	}
	if port, err := strconv.Atoi(m[1]); err == nil {
		return m[2], port, true
	}
	return "", 0, false
}

// proxy hands a request to the sandbox. One that is gone or paused is 502, one
// in transition 409; a port that nothing listens on is 502 with the port.
func (s *server) proxy(w http.ResponseWriter, r *http.Request, id string, port int) {
	s.mu.Lock()
	b := s.boxes[id]
	s.mu.Unlock()
	state := "gone"
	var cut chan struct{}
	if b != nil {
		b.mu.Lock()
		state, cut = b.state, b.cut
		b.mu.Unlock()
	}
	switch state {
	case running:
	case pausing, resuming:
		answer(w, http.StatusConflict, map[string]any{"sandboxId": id, "message": "The sandbox is changing its state", "code": http.StatusConflict})
		return
	default:
		answer(w, http.StatusBadGateway, map[string]any{"sandboxId": id, "message": "The sandbox was not found", "code": http.StatusBadGateway})
		return
	}
	// A sandbox answers so soon that the transport would still be at the end of
	// the request's body, which an answer closes: small ones are read beforehand.
	if r.ContentLength > 0 && r.ContentLength <= maxMessage {
		raw, err := io.ReadAll(r.Body)
		if err != nil {
			return // the client went away
		}
		r.Body = io.NopCloser(bytes.NewReader(raw))
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	go func() {
		select {
		case <-cut:
			cancel()
		case <-ctx.Done():
		}
	}()
	proxy := &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL.Scheme, p.Out.URL.Host = "http", "envd"
			p.Out.Header.Set(portHeader, strconv.Itoa(port))
		},
		Transport: b.transport, FlushInterval: -1, ErrorLog: nil,
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			answer(w, http.StatusBadGateway, map[string]any{"sandboxId": id, "message": fmt.Sprintf("The sandbox was not found: %v", err), "code": http.StatusBadGateway})
		},
	}
	proxy.ServeHTTP(w, r.WithContext(ctx))
}
