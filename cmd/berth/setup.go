package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"

	"berth/internal/providers/playwright"
)

type setupOptions struct{ quiet bool }

func setupCommand() *command {
	return &command{name: "setup", local: true, summary: "Install Playwright's driver; check Chromium and Node.js",
		detail: "A worker with a Playwright server needs a Chromium (`apt-get install chromium`, or name one\nin BERTH_CHROMIUM), Node.js 20 or newer (`apt-get install nodejs`, or PLAYWRIGHT_NODEJS_PATH)\nand Playwright's driver, which this installs from the npm registry.",
		flags: func(c *call) {
			o := &setupOptions{}
			c.opts = o
			c.flags.BoolVar(&o.quiet, "quiet", false, "say nothing where nothing is missing")
		},
		run: func(ctx context.Context, c *call) error {
			if err := c.noArgs(); err != nil {
				return err
			}
			browser, err := playwright.FindBrowser()
			// Both are looked at, so that one run tells all that is missing.
			if err := errors.Join(err, playwright.EnsureDriver(ctx, c.stderr)); err != nil {
				return err
			}
			if !c.opts.(*setupOptions).quiet {
				fmt.Fprintf(c.stdout, "everything that a Playwright server needs is there; the browser is %s\n", browser)
			}
			return nil
		}}
}

func versionCommand() *command {
	return &command{name: "version", local: true, summary: "Print which build this is", run: func(_ context.Context, c *call) error {
		if err := c.noArgs(); err != nil {
			return err
		}
		version, commit := "devel", ""
		if info, ok := debug.ReadBuildInfo(); ok {
			if v := info.Main.Version; v != "" && v != "(devel)" {
				version = v
			}
			for _, s := range info.Settings {
				if s.Key == "vcs.revision" {
					commit = " " + s.Value
				}
			}
		}
		fmt.Fprintf(c.stdout, "berth %s%s %s %s/%s\n", version, commit, runtime.Version(), runtime.GOOS, runtime.GOARCH)
		return nil
	}}
}

// terminal reports whether f is one, so that a bar can be drawn on it.
func terminal(f any) bool {
	file, ok := f.(*os.File)
	if !ok {
		return false
	}
	return isTerminal(file.Fd())
}
