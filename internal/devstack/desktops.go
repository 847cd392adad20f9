package devstack

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"berth/internal/registry"
	"berth/internal/sandboxd"
)

// desktopID is the server of desktops.
const desktopID = "desktop-01"

// maxDesktops is how many desktops the stack's server holds. One with a browser
// takes about 200 MB.
const maxDesktops = 5

// serveDesktops runs a sandboxd inside this process, on a free port of loopback
// and with a key that nobody else knows, and returns its registry entry. The
// program's main must have called sandboxd.TakeOver.
func serveDesktops(ctx context.Context, group *errgroup.Group, o Options) (registry.Server, error) {
	log := o.Telemetry.Log.With("program", "sandboxd")
	key := rand.Text()
	s, err := sandboxd.New(ctx, sandboxd.Options{
		StateDir: filepath.Join(o.DataDir, "desktop"), APIKey: key, MaxContainers: maxDesktops, Warm: 1, Machine: "desktop",
		Limits: sandboxd.DefaultLimits(), AllowWeaker: o.Weaker, Ephemeral: true, FreeMemory: sandboxd.DefaultFreeMemory, FreeDisk: sandboxd.DefaultFreeDisk, Logger: log,
	})
	if err != nil {
		return registry.Server{}, fmt.Errorf("start the server of desktops: %w", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return registry.Server{}, errors.Join(fmt.Errorf("listen for %s: %w", desktopID, err), s.Shutdown())
	}
	server := &http.Server{Handler: s.Handler(), ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	group.Go(func() error {
		select {
		case err := <-served:
			return errors.Join(fmt.Errorf("%s: %w", desktopID, err), s.Shutdown())
		case <-ctx.Done():
		}
		// The worker stops at the same moment; what it still waits for ends here.
		return errors.Join(s.Shutdown(), server.Close())
	})
	entry := registry.Remote(desktopID, "http://"+l.Addr().String(), key)
	entry.Config.MaxContainers = maxDesktops
	entry.Config.Priority = -1 // what needs a browser only goes to one, where there is one
	return entry, nil
}
