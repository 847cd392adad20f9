// Package registry turns a worker's environment into the servers it serves:
// the factory of the strategy pattern. The first of SANDBOX_SERVERS_JSON,
// SANDBOX_SERVER_URL and E2B_API_KEY that is set decides, else there is one
// local Playwright server; with SANDBOX_FALLBACK=on the later choices join with
// a lower priority.
//
// Nothing here touches the network. Every fault is found and returned at once,
// with its position; no fault ever contains a key or a URL.
package registry

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"berth/internal/events"
	"berth/internal/kv"
)

// Kind names a provider.
type Kind string

// The kinds, as they stand in the registry and in SERVERS.
const (
	SelfHosted Kind = "selfhosted"
	E2B        Kind = "e2b"
	Playwright Kind = "playwright"
)

// Limits of a registry.
const (
	MaxServers    = 1000 // entries of SANDBOX_SERVERS_JSON
	MaxContainers = 1000 // sandboxes of one server: what its record can hold
)

// Sandboxes of a server whose entry does not say how many it holds. A
// Chromium with its spares takes about 300 MB.
const (
	DefaultMaxPlaywright = 10
	DefaultMaxE2B        = 20 // concurrent sandboxes of E2B's free plan
	DefaultMaxSelfHosted = 10
)

// Config is the part of a worker's environment that this package reads; embed
// it. What may hold a key is removed from the environment, so that a browser
// started later cannot read it; each has a _FILE variant that names a file.
type Config struct {
	ServersJSON     string `env:"SANDBOX_SERVERS_JSON,unset"`
	ServersFile     string `env:"SANDBOX_SERVERS_JSON_FILE,file"`
	Fallback        string `env:"SANDBOX_FALLBACK"` // on, off
	ServerURL       string `env:"SANDBOX_SERVER_URL,unset"`
	ServerKey       string `env:"SANDBOX_SERVER_API_KEY,unset"`
	ServerKeyFile   string `env:"SANDBOX_SERVER_API_KEY_FILE,file"`
	E2BKey          string `env:"E2B_API_KEY,unset"`
	E2BKeyFile      string `env:"E2B_API_KEY_FILE,file"`
	ServerCA        string `env:"SANDBOX_SERVER_CA_FILE,file"`
	E2BCA           string `env:"E2B_CA_FILE,file"`
	E2BDomain       string `env:"E2B_DOMAIN"`
	E2BURL          string `env:"E2B_API_URL,unset"`
	E2BSandboxURL   string `env:"E2B_SANDBOX_URL,unset"`
	Only            string `env:"SANDBOX_SERVER_ID"` // comma list
	StateDir        string `env:"BERTH_STATE_DIR"`   // where a Playwright server keeps what it needs to adopt its browsers again
	XDGStateHome    string `env:"XDG_STATE_HOME"`
	Home            string `env:"HOME"`
	PlaywrightSpare int    `env:"BERTH_PLAYWRIGHT_SPARES" envDefault:"-1"` // browsers kept warm; -1: the provider's default
}

// Server is one entry: what the fleet may know of it, and what only its worker
// may.
type Server struct {
	ID       string
	Kind     Kind
	Config   kv.ServerConfig // for the bus; Capabilities come from the opened provider
	URL      string          // may hold credentials
	APIKey   string
	Template string
	Domain   string
	// SandboxURL is where all sandboxes of an E2B installation are reached; it may
	// hold credentials.
	SandboxURL string
	CA         []byte // PEM certificates to trust instead of the system's; nil: the system's
}

// String keeps keys and URLs out of logs, whichever verb prints a Server.
func (s Server) String() string { return s.ID + " (" + string(s.Kind) + ")" }

// GoString is String, for %#v.
func (s Server) GoString() string { return s.String() }

// Load returns the servers that the configuration names, in its order, or
// every fault in it.
func (c Config) Load() ([]Server, []error) {
	var errs []error
	json := pick(&errs, "SANDBOX_SERVERS_JSON", c.ServersJSON, c.ServersFile)
	serverKey := pick(&errs, "SANDBOX_SERVER_API_KEY", c.ServerKey, c.ServerKeyFile)
	e2bKey := pick(&errs, "E2B_API_KEY", c.E2BKey, c.E2BKeyFile)
	fallback := false
	switch strings.ToLower(c.Fallback) {
	case "", "off":
	case "on":
		fallback = true
	default:
		errs = append(errs, fmt.Errorf("SANDBOX_FALLBACK: %q; want on or off", c.Fallback))
	}
	if c.PlaywrightSpare < -1 || c.PlaywrightSpare > 100 {
		errs = append(errs, errors.New("BERTH_PLAYWRIGHT_SPARES: want 0 to 100"))
	}

	// Everything that is set is checked, chosen or not.
	var choices [][]Server
	if json != "" {
		list, faults := parse(json)
		for _, f := range faults {
			errs = append(errs, fmt.Errorf("SANDBOX_SERVERS_JSON: %w", f))
		}
		choices = append(choices, list)
	}
	if c.ServerURL != "" {
		if err := checkURL(c.ServerURL); err != nil {
			errs = append(errs, fmt.Errorf("SANDBOX_SERVER_URL: %w", err))
		}
		s := Remote("selfhosted-01", c.ServerURL, serverKey)
		s.CA = certificates(&errs, "SANDBOX_SERVER_CA_FILE", c.ServerCA)
		choices = append(choices, []Server{s})
	} else if serverKey != "" {
		errs = append(errs, errors.New("SANDBOX_SERVER_API_KEY: set without SANDBOX_SERVER_URL"))
	}
	if c.E2BURL != "" {
		if err := checkURL(c.E2BURL); err != nil {
			errs = append(errs, fmt.Errorf("E2B_API_URL: %w", err))
		}
	}
	if c.E2BSandboxURL != "" {
		if err := checkURL(c.E2BSandboxURL); err != nil {
			errs = append(errs, fmt.Errorf("E2B_SANDBOX_URL: %w", err))
		}
	}
	if c.E2BDomain != "" {
		if err := checkDomain(c.E2BDomain); err != nil {
			errs = append(errs, fmt.Errorf("E2B_DOMAIN: %w", err))
		}
	}
	if e2bKey != "" {
		s := newServer("e2b-01", E2B)
		s.APIKey, s.URL, s.Domain, s.SandboxURL = e2bKey, c.E2BURL, c.E2BDomain, c.E2BSandboxURL
		s.CA = certificates(&errs, "E2B_CA_FILE", c.E2BCA)
		choices = append(choices, []Server{s})
	}
	choices = append(choices, []Server{newServer("playwright-01", Playwright)})

	if len(errs) > 0 {
		// What is wrong with the filter cannot be told without the list.
		for _, id := range c.only() {
			if err := events.CheckServerID(id); err != nil {
				errs = append(errs, fmt.Errorf("SANDBOX_SERVER_ID: %w", err))
			}
		}
		return nil, errs
	}
	servers := choices[0]
	if fallback {
		servers = join(choices)
	}
	return c.filter(servers)
}

// pick returns the value of a variable or of its _FILE variant.
func pick(errs *[]error, name, value, file string) string {
	if value != "" && file != "" {
		*errs = append(*errs, fmt.Errorf("%s and %s_FILE: set only one", name, name))
	}
	if value != "" {
		return value
	}
	return strings.TrimSpace(file)
}

// certificates checks the content of a variable's file; "" is none.
func certificates(errs *[]error, name, content string) []byte {
	if content == "" {
		return nil
	}
	if err := checkCA([]byte(content)); err != nil {
		*errs = append(*errs, fmt.Errorf("%s: %w", name, err))
	}
	return []byte(content)
}

// join adds the later choices to the first, each with a lower priority than
// all before it and under the next free id of its class.
func join(choices [][]Server) []Server {
	servers := slices.Clone(choices[0])
	taken := map[string]bool{}
	lowest := 0
	for i, s := range servers {
		taken[s.ID] = true
		if i == 0 || s.Config.Priority < lowest {
			lowest = s.Config.Priority
		}
	}
	for _, choice := range choices[1:] {
		for _, s := range choice {
			lowest--
			s.Config.Priority = lowest
			class, _, _ := strings.Cut(s.ID, "-")
			for n := 1; taken[s.ID]; n++ {
				s.ID = fmt.Sprintf("%s-%02d", class, n)
			}
			taken[s.ID] = true
			servers = append(servers, s)
		}
	}
	return servers
}

func (c Config) only() []string {
	var ids []string
	for id := range strings.SplitSeq(c.Only, ",") {
		if id = strings.TrimSpace(id); id != "" && !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids
}

// filter keeps the servers that SANDBOX_SERVER_ID names.
func (c Config) filter(servers []Server) ([]Server, []error) {
	only := c.only()
	if c.Only == "" {
		return servers, nil
	}
	if len(only) == 0 {
		return nil, []error{errors.New("SANDBOX_SERVER_ID: names no server; unset it to serve the whole registry")}
	}
	var errs []error
	var kept []Server
	for _, id := range only {
		i := slices.IndexFunc(servers, func(s Server) bool { return s.ID == id })
		if i >= 0 {
			kept = append(kept, servers[i])
			continue
		}
		if err := events.CheckServerID(id); err != nil {
			errs = append(errs, fmt.Errorf("SANDBOX_SERVER_ID: %w", err))
			continue
		}
		errs = append(errs, fmt.Errorf("SANDBOX_SERVER_ID: no server %q in the registry; it has %s", id, names(servers)))
	}
	if len(errs) > 0 {
		return nil, errs
	}
	return kept, nil
}

func names(servers []Server) string {
	const most = 10
	ids := make([]string, 0, most+1)
	for i, s := range servers {
		if i == most {
			ids = append(ids, fmt.Sprintf("and %d more", len(servers)-most))
			break
		}
		ids = append(ids, s.ID)
	}
	return strings.Join(ids, ", ")
}

// Local is an entry with the defaults for a Playwright server on this machine.
func Local(id string) Server { return newServer(id, Playwright) }

// Remote is an entry with the defaults for a self-hosted server.
func Remote(id, url, apiKey string) Server {
	s := newServer(id, SelfHosted)
	s.URL, s.APIKey = url, apiKey
	return s
}

// newServer has the defaults of an entry.
func newServer(id string, kind Kind) Server {
	size := map[Kind]int{Playwright: DefaultMaxPlaywright, E2B: DefaultMaxE2B, SelfHosted: DefaultMaxSelfHosted}[kind]
	return Server{ID: id, Kind: kind, Config: kv.ServerConfig{
		Provider: string(kind), Roles: []string{events.DefaultRole}, Isolation: kv.IsolationRole, MaxContainers: size,
	}}
}

// checkURL never echoes the URL, which may hold credentials.
func checkURL(s string) error {
	u, err := url.Parse(s)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Hostname() == "" {
		return errors.New("not an http(s) URL with a host, such as https://sandboxes.example:8443")
	}
	if u.RawQuery != "" || u.Fragment != "" {
		return errors.New("a base URL has no query and no fragment")
	}
	return nil
}

func checkDomain(s string) error {
	if len(s) > 253 || strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '-' && r != '.' && r != ':'
	}) {
		return errors.New("not a host name such as e2b.app")
	}
	return nil
}

// State returns the directory in which Playwright servers keep their state.
func (c Config) State() (string, error) {
	switch {
	case c.StateDir != "":
		if !filepath.IsAbs(c.StateDir) {
			return "", errors.New("BERTH_STATE_DIR: want an absolute path")
		}
		return c.StateDir, nil
	case filepath.IsAbs(c.XDGStateHome):
		return filepath.Join(c.XDGStateHome, "berth"), nil
	case filepath.IsAbs(c.Home):
		return filepath.Join(c.Home, ".local", "state", "berth"), nil
	default:
		return filepath.Join(os.TempDir(), fmt.Sprintf("berth-%d", os.Getuid())), nil
	}
}
