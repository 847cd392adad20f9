package e2b

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestOfficialClients runs the official npm clients, unchanged and at the
// versions of the lockfile, against the stand-in: what the provider's tests
// stand on is checked by those who know the real one.
func TestOfficialClients(t *testing.T) {
	t.Parallel()
	need(t, map[string]string{"node": "nodejs", "npm": "npm"})
	dir := t.TempDir()
	for _, name := range []string{"package.json", "package-lock.json", "e2b.mjs", "desktop.mjs"} {
		raw, err := os.ReadFile(filepath.Join("npmtest", name))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), raw, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	install := exec.CommandContext(t.Context(), "npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefer-offline")
	install.Dir = dir
	if out, err := install.CombinedOutput(); err != nil {
		t.Fatalf("npm ci: %v\n%s", err, out)
	}
	for script, flags := range map[string][]string{"e2b.mjs": {"--max", "3"}, "desktop.mjs": nil} {
		t.Run(script, func(t *testing.T) {
			t.Parallel()
			s := startStandin(t, flags...)
			cmd := exec.CommandContext(t.Context(), "node", script)
			cmd.Dir = dir
			cmd.Env = append(os.Environ(), "E2B_API_KEY="+testKey, "E2B_API_URL="+s.url, "E2B_SANDBOX_URL="+s.url)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
