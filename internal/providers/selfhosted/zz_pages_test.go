package selfhosted

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http/httptest"
	"net/url"
	"os"
	"testing"

	"berth/internal/providers"
	"berth/internal/providers/providertest"
	"berth/internal/sandboxd"
)

func TestPages(t *testing.T) {
	own := "192.0.2.2"
	providertest.Exercise(t, func(t *testing.T) providers.Provider {
		state, err := os.MkdirTemp("", "sh")
		if err != nil {
			t.Fatal(err)
		}
		s, err := sandboxd.New(t.Context(), sandboxd.Options{
			StateDir: state, APIKey: testKey, MaxContainers: 40, Warm: 1, Machine: "desktop", Limits: sandboxd.DefaultLimits(),
			OpenNetworks: []string{own + "/32"}, BrowserFlags: []string{"--kiosk"},
			Logger: slog.New(slog.NewTextHandler(testWriter{t}, &slog.HandlerOptions{Level: slog.LevelWarn})),
		})
		if err != nil {
			t.Fatal(errors.Join(err, os.RemoveAll(state)))
		}
		h := httptest.NewServer(s.Handler())
		t.Cleanup(func() {
			h.CloseClientConnections()
			h.Close()
			s.Shutdown()
			os.RemoveAll(state)
		})
		return open(t, h.URL)
	}, providertest.Options{
		ChecksFences: true, Recalls: true,
		Reach: func(local string) string {
			u, _ := url.Parse(local)
			l, err := net.Listen("tcp", own+":0")
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					go func() {
						d, err := net.Dial("tcp", u.Host)
						if err != nil {
							return
						}
						go func() { io.Copy(d, c); d.Close() }()
						io.Copy(c, d)
						c.Close()
					}()
				}
			}()
			return "http://" + l.Addr().String()
		},
	})
}
