// Package browsertest starts a real Chromium for tests of pages that Berth
// itself serves or writes.
package browsertest

import (
	"context"
	"os"
	"testing"
	"time"

	pw "github.com/mxschmitt/playwright-go"

	"berth/internal/providers/playwright"
)

// Start starts a Chromium that ends with the test.
func Start(t testing.TB) pw.Browser {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	if err := playwright.EnsureDriver(ctx, nil); err != nil {
		t.Fatal(err)
	}
	chromium, err := playwright.FindBrowser()
	if err != nil {
		t.Fatal(err)
	}
	driver, err := pw.Run(&pw.RunOptions{SkipInstallBrowsers: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := driver.Stop(); err != nil {
			t.Error(err)
		}
	})
	sandbox := os.Geteuid() != 0
	browser, err := driver.Chromium.Launch(pw.BrowserTypeLaunchOptions{ExecutablePath: &chromium, ChromiumSandbox: &sandbox, Args: []string{"--disable-gpu", "--disable-background-networking"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := browser.Close(); err != nil {
			t.Error(err)
		}
	})
	return browser
}
