package demoapp

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

func TestServeUntilTheContextEnds(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	url, wait, err := Serve(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(url, "http://127.0.0.1:") || strings.HasSuffix(url, "/") {
		t.Errorf("url %q", url)
	}
	resp, err := http.Get(url + "/")
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("status %d", resp.StatusCode)
	}
	cancel()
	done := make(chan error, 1)
	go func() { done <- wait() }()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("wait: %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("it still serves")
	}
	if err := wait(); err != nil {
		t.Errorf("a second wait: %v", err)
	}
	if resp, err := http.Get(url + "/"); err == nil {
		_ = resp.Body.Close()
		t.Error("it still answers")
	}
}

func TestServeIsForLoopbackOnly(t *testing.T) {
	t.Parallel()
	for _, addr := range []string{":0", "0.0.0.0:0", "[::]:0", "192.0.2.1:0", "example.org:80", "nonsense"} {
		if _, _, err := Serve(t.Context(), addr); err == nil {
			t.Errorf("%q was accepted", addr)
		}
	}
}
