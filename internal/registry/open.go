package registry

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"

	"berth/internal/providers"
	"berth/internal/providers/e2b"
	"berth/internal/providers/playwright"
	"berth/internal/providers/selfhosted"
)

// Deps is what a provider needs beside its entry.
type Deps struct {
	StateDir  string // of all Playwright servers; each has a directory of its own below
	Spares    int    // browsers kept warm; negative: the provider's default
	Ephemeral bool   // browsers die with this process
	Log       *slog.Logger
}

// Open opens the server's provider. The caller closes it.
func (s Server) Open(ctx context.Context, deps Deps) (providers.Provider, error) {
	switch s.Kind {
	case SelfHosted:
		p, err := selfhosted.New(ctx, selfhosted.Options{ServerID: s.ID, URL: s.URL, APIKey: s.APIKey, Template: s.Template, CA: s.CA, Logger: deps.Log})
		if err != nil {
			return nil, err // it names the server
		}
		return p, nil
	case E2B:
		p, err := e2b.New(ctx, e2b.Options{
			ServerID: s.ID, APIURL: s.URL, APIKey: s.APIKey, Template: s.Template, Domain: s.Domain, SandboxURL: s.SandboxURL, CA: s.CA,
			Clipboard: s.Config.Attributes[clipboardAttribute], Logger: deps.Log,
		})
		if err != nil {
			return nil, err // it names the server
		}
		return p, nil
	}
	opts := playwright.Options{ServerID: s.ID, MaxContainers: s.Config.MaxContainers, Ephemeral: deps.Ephemeral, Logger: deps.Log}
	switch {
	case deps.Spares == 0:
		opts.Spares = -1 // none; its zero means the default
	case deps.Spares > 0:
		opts.Spares = deps.Spares
	}
	if !deps.Ephemeral || deps.StateDir != "" {
		opts.StateDir = filepath.Join(deps.StateDir, s.ID)
	}
	p, err := playwright.New(ctx, opts)
	if err != nil {
		return nil, fmt.Errorf("open server %s: %w", s.ID, err)
	}
	return p, nil
}

// EnvironmentHelp describes Config in a worker's usage.
const EnvironmentHelp = `  SANDBOX_SERVERS_JSON       the servers: [{"id","url","apiKey","roles":[],"priority","maxContainers",
                             "provider"?,"isolation"?,"attributes"?,"template"?,"domain"?,"sandboxUrl"?,"caFile"?}]
  SANDBOX_SERVER_URL         else one self-hosted server; SANDBOX_SERVER_API_KEY its key
  E2B_API_KEY                else E2B; E2B_DOMAIN, E2B_API_URL, E2B_SANDBOX_URL (where all sandboxes are reached,
                             told apart by headers) for a compatible installation
                             else one Playwright server on this machine, playwright-01
  …_FILE                     SANDBOX_SERVERS_JSON, SANDBOX_SERVER_API_KEY and E2B_API_KEY may each be given
                             as a file: SANDBOX_SERVERS_JSON_FILE, SANDBOX_SERVER_API_KEY_FILE, E2B_API_KEY_FILE
  SANDBOX_SERVER_CA_FILE     certificates, in PEM, to trust instead of the system's; likewise E2B_CA_FILE, and
                             caFile in SANDBOX_SERVERS_JSON
  SANDBOX_FALLBACK           on: the later choices join with lower priority, a Playwright server last
  SANDBOX_SERVER_ID          serve only these ids of the registry (comma list)
  BERTH_STATE_DIR            where Playwright servers keep what a restarted worker needs to adopt their
                             browsers (default XDG_STATE_HOME/berth, or .local/state/berth in HOME)
  BERTH_PLAYWRIGHT_SPARES    browsers kept warm, each about 200 MB (default 2)
  BERTH_CHROMIUM             the browser (default: the first of chromium, chromium-browser, google-chrome)
  PLAYWRIGHT_NODEJS_PATH     the Node.js that runs Playwright's driver (default: node in PATH)
`
