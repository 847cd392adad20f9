package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"berth/internal/devstack"
)

// In a real browser: a link, a redirect, a script and a second page that lead to
// a host which the loop may not show end it before its next act; what failed to
// load, and the empty page at the beginning, do not.
func TestHostsInARealBrowser(t *testing.T) {
	t.Parallel()
	var acted atomic.Int64 // requests of the act that must not happen
	app := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, port, _ := strings.Cut(r.Host, ":")
		elsewhere := "http://localhost:" + port + "/elsewhere" // the same server by another name
		w.Header().Set("Content-Type", "text/html")
		const whole = "style='position:fixed;inset:0'"
		switch r.URL.Path {
		case "/link":
			fmt.Fprintf(w, "<title>link</title><a href=%q %s>go</a>", elsewhere, whole)
		case "/popup":
			fmt.Fprintf(w, "<title>popup</title><a href=%q target=_blank %s>go</a>", elsewhere, whole)
		case "/redirect":
			http.Redirect(w, r, elsewhere, http.StatusFound)
		case "/script":
			fmt.Fprintf(w, "<title>script</title><script>setTimeout(() => location = %q, 300)</script>", elsewhere)
		case "/here":
			fmt.Fprint(w, "<title>here</title>")
		case "/elsewhere":
			fmt.Fprintf(w, "<title>elsewhere</title><a href='/acted' %s>go</a>", whole)
		case "/acted":
			acted.Add(1)
		}
	}))
	defer app.Close()
	withStack(t, func(ctx context.Context, s *devstack.Stack) {
		for _, c := range []struct{ name, script, code string }{
			{"link", `[{"type":"cursor"},{"type":"open","target":"URL/link"},{"type":"click","x":500,"y":300},{"type":"wait","seconds":1},{"type":"click","x":500,"y":300}]`, "hostDenied"},
			{"popup", `[{"type":"open","target":"URL/popup"},{"type":"click","x":500,"y":300},{"type":"wait","seconds":1},{"type":"click","x":500,"y":300}]`, "hostDenied"},
			{"redirect", `[{"type":"open","target":"URL/redirect"},{"type":"click","x":500,"y":300}]`, "hostDenied"},
			{"script", `[{"type":"open","target":"URL/script"},{"check":"title","equals":"elsewhere","within":60},{"type":"click","x":500,"y":300}]`, "hostDenied"},
			{"nobody", `[{"type":"cursor"},{"type":"open","target":"http://127.0.0.1:1/"}]`, "navigationFailed"},
			{"here", `[{"type":"cursor"},{"type":"open","target":"URL/here"},{"check":"title","equals":"here","within":60},{"type":"cursor"}]`, ""},
		} {
			// A browser on a machine that is very busy now and then aborts a first
			// load (net::ERR_ABORTED), whatever the limits are: then it is done again.
			var loop runResult
			for attempt := 0; attempt == 0 || attempt < 4 && strings.Contains(loop.Message, "net::ERR_ABORTED"); attempt++ {
				loop = runWithin(ctx, t, s, c.name, strings.ReplaceAll(c.script, "URL", app.URL))
			}
			if loop.Code != c.code || (loop.exit == 0) != (c.code == "") {
				t.Errorf("%s: exit %d, %s: %s, want %s\n%s", c.name, loop.exit, loop.Code, loop.Message, c.code, loop.out)
			}
		}
	})
	if n := acted.Load(); n > 0 {
		t.Errorf("%d acts reached the host that may not be shown", n)
	}
}

type runResult struct {
	Code, Message string
	exit          int
	out           string
}

// runWithin runs a script that may show 127.0.0.1 only.
func runWithin(ctx context.Context, t *testing.T, s *devstack.Stack, name, script string) runResult {
	t.Helper()
	dir := t.TempDir()
	file := filepath.Join(dir, name+".json")
	if err := os.WriteFile(file, fmt.Appendf(nil, `{"goal":"stay","limits":{"allowHosts":["127.0.0.1"]},"script":%s}`, script), 0o600); err != nil {
		t.Fatal(err)
	}
	out, errs, exit := berth(ctx, "run", "--server", s.NATSURL, "--script", file, "--out", dir)
	files, err := filepath.Glob(dir + "/*/loop.json")
	if err != nil || len(files) != 1 {
		t.Fatalf("%s: %v %v:\n%s%s", name, files, err, out, errs)
	}
	raw, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	r := runResult{exit: exit, out: out + errs}
	if err := json.Unmarshal(raw, &r); err != nil {
		t.Fatal(err)
	}
	return r
}
