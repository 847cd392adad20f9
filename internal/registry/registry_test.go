package registry

import (
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"berth/internal/kv"
	"berth/internal/providers"
)

const secret = "sk-hunter2"

func TestChoice(t *testing.T) {
	list := `[{"id":"ax102-01","url":"https://u:` + secret + `@a.example","apiKey":"` + secret + `","roles":["git"],"priority":10,"maxContainers":5,"isolation":"tenant","attributes":{"zone":"fsn1","cpu":16,"ssd":true}},
	          {"id":"playwright-01","provider":"playwright","priority":-3}]`
	for _, tt := range []struct {
		name string
		cfg  Config
		want string
	}{
		{"nothing set", Config{}, "playwright-01/playwright/0/10"},
		{"the list wins", Config{ServersJSON: list, ServerURL: "http://b", E2BKey: secret}, "ax102-01/selfhosted/10/5 playwright-01/playwright/-3/10"},
		{"then one server", Config{ServerURL: "http://b", ServerKey: secret, E2BKey: secret}, "selfhosted-01/selfhosted/0/10"},
		{"then e2b", Config{E2BKey: secret, E2BDomain: "e2b.example"}, "e2b-01/e2b/0/20"},
		{"all by fallback", Config{ServersJSON: list, ServerURL: "http://b", E2BKey: secret, Fallback: "on"},
			"ax102-01/selfhosted/10/5 playwright-01/playwright/-3/10 selfhosted-01/selfhosted/-4/10 e2b-01/e2b/-5/20 playwright-02/playwright/-6/10"},
		{"fallback to the browser", Config{E2BKey: secret, Fallback: "on"}, "e2b-01/e2b/0/20 playwright-01/playwright/-1/10"},
		{"filtered", Config{ServersJSON: list, Only: " playwright-01, "}, "playwright-01/playwright/-3/10"},
		{"from a file", Config{ServersFile: list + "\n", Only: "ax102-01"}, "ax102-01/selfhosted/10/5"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			servers, errs := tt.cfg.Load()
			if len(errs) > 0 {
				t.Fatal(errs)
			}
			var got []string
			for _, s := range servers {
				got = append(got, fmt.Sprintf("%s/%s/%d/%d", s.ID, s.Config.Provider, s.Config.Priority, s.Config.MaxContainers))
			}
			if g := strings.Join(got, " "); g != tt.want {
				t.Errorf("got  %s\nwant %s", g, tt.want)
			}
			if all := fmt.Sprintf("%v %+v %#v %s", servers, servers, servers, servers); strings.Contains(all, secret) {
				t.Errorf("a secret is printed: %s", all)
			}
			onBus, err := json.Marshal(servers[0].Config)
			if err != nil || strings.Contains(string(onBus), secret) {
				t.Errorf("a secret enters the bus: %s %v", onBus, err)
			}
		})
	}
}

func TestEntryDefaults(t *testing.T) {
	servers, errs := Config{ServersJSON: `[{"id":"ax102-01","url":"http://a","roles":[],"attributes":{"cpu":16,"big":1000000}}]`}.Load()
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	c := servers[0].Config
	if c.Provider != "selfhosted" || c.Isolation != kv.IsolationRole || len(c.Roles) != 1 || c.Roles[0] != "default" || c.Attributes["cpu"] != "16" || c.Attributes["big"] != "1000000" {
		t.Errorf("defaults: %+v", c)
	}
}

// Every fault of every entry, all at once, each with its position, no secret.
func TestEveryFaultIsListed(t *testing.T) {
	cfg := Config{
		ServersJSON: `[
			{"id":"AX102","url":"http://a","maxContainers":-1},
			{"url":"ftp://` + secret + `@x","apiKey":"` + secret + `\u0007","maxContainers":1001},
			{"id":"ax102-02","url":"http://a","provider":"docker","isolation":"vm","colour":"red","` + strings.Repeat("x", 100) + `":1},
			{"id":"ax102-03","url":"http://a"},
			{"id":"ax102-03","url":"http://a","priority":1.5,"roles":["a b",""],"attributes":{"a":[1]}},
			{"id":"ax102-04"},
			{"id":"e2b-01","provider":"e2b"},
			{"id":7,"url":8,"roles":"git","attributes":"x","id":"ax102-09"},
			"ax102-05",
			{"id":"ax102-06","url":"http://a","maxContainers":0,"domain":"a b","provider":"e2b","apiKey":"k"},
			{"id":"e2b-02","provider":"e2b","apiKey":"k","sandboxUrl":"x://` + secret + `","attributes":{"clipboard":"pbcopy"}},
			{"id":"ax102-07","url":"http://a","sandboxUrl":"http://b"},
			{"id":"ax102-08","url":"https://a","caFile":"/no/such/file"},
			{"id":"ax102-10","url":"https://a","caFile":"/dev/zero"},
			{"id":"playwright-07","provider":"playwright","caFile":"registry.go"}
		]`,
		ServersFile: "x", Fallback: "yes", ServerKey: secret, E2BURL: "gopher://" + secret, E2BDomain: "a/b", E2BSandboxURL: secret, ServerCA: secret, E2BCA: secret, ServerURL: "http://a", E2BKey: secret, Only: "Nope", PlaywrightSpare: 1000,
	}
	_, errs := cfg.Load()
	var all strings.Builder
	for _, err := range errs {
		fmt.Fprintln(&all, err)
	}
	for _, want := range []string{
		"[0].id:", "[0].maxContainers:", "[1].id: missing", "[1].url:", "[1].apiKey:", "[1].maxContainers:",
		"[2].provider:", "[2].isolation:", "[2].colour: unknown field", "[4].id: \"ax102-03\" is already the id of [3]", "[4].priority:",
		"[4].roles[0]:", "[4].roles[1]:", "[4].attributes.a:", "[5].url:", "[6].apiKey:", "[7].id: given twice", "[7].url:", "[7].roles:", "[7].attributes:",
		"[8]: not an object", "[9].maxContainers:", "[9].domain:", "[10].sandboxUrl:", "[10].attributes.clipboard:", "[11].sandboxUrl:",
		"[12].caFile:", "[13].caFile:", "[14].caFile: no PEM certificate", "SANDBOX_SERVER_CA_FILE:", "E2B_CA_FILE:",
		"SANDBOX_SERVERS_JSON and SANDBOX_SERVERS_JSON_FILE", "SANDBOX_FALLBACK:", "E2B_API_URL:", "E2B_DOMAIN:", "E2B_SANDBOX_URL:", "SANDBOX_SERVER_ID:", "BERTH_PLAYWRIGHT_SPARES:",
	} {
		if !strings.Contains(all.String(), want) {
			t.Errorf("no fault %q", want)
		}
	}
	if strings.Contains(all.String(), secret) {
		t.Error("a secret was printed")
	}
	if t.Failed() {
		t.Log(all.String())
	}
}

func TestWholeListFaults(t *testing.T) {
	many := "[" + strings.Repeat(`{"id":"a-01"},`, 1000) + `{"id":"a-01"}]`
	for text, want := range map[string]string{
		`{"id":"ax102-01"}`:                      "not a JSON array",
		`[{"id":"ax102-01","url":"http://a"}] x`: "text after the array",
		`[] []`:                                  "text after the array",
		`[{"apiKey":"` + secret + `"`:            "ends too early",
		`[{"apiKey": ` + secret + `}]`:           "malformed at byte",
		`null`:                                   "null",
		`[]`:                                     "empty",
		many:                                     "1001 servers, at most 1000",
	} {
		_, errs := Config{ServersJSON: text}.Load()
		if len(errs) != 1 || !strings.Contains(errs[0].Error(), want) || strings.Contains(errs[0].Error(), secret) {
			t.Errorf("%.60s: %v, want %q", text, errs, want)
		}
	}
	if _, errs := (Config{ServerKey: secret}).Load(); len(errs) != 1 || !strings.HasPrefix(errs[0].Error(), "SANDBOX_SERVER_API_KEY: set without") {
		t.Errorf("a key for no server: %v", errs)
	}
	_, errs := Config{Only: "playwright-02,playwright-03"}.Load()
	if len(errs) != 2 || !strings.Contains(errs[0].Error(), "it has playwright-01") {
		t.Errorf("unknown ids: %v", errs)
	}
}

// An entry of each kind is opened by its provider: what they say of servers that
// cannot be reached names the server, and no secret.
func TestOpenChoosesTheProvider(t *testing.T) {
	nowhere := "http://127.0.0.1:1"
	servers, errs := Config{ServersJSON: fmt.Sprintf(`[{"id":"ax102-01","url":%[1]q,"apiKey":%[2]q},
		{"id":"e2b-01","provider":"e2b","url":%[1]q,"apiKey":%[2]q,"domain":"e2b.example","sandboxUrl":%[1]q,"attributes":{"clipboard":"xclip"}}]`, nowhere, secret)}.Load()
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	for i, want := range []string{"GET /capacity", "GET /v2/sandboxes"} {
		p, err := servers[i].Open(t.Context(), Deps{})
		if err == nil {
			t.Errorf("%s opened %v", servers[i], p)
			continue
		}
		if !errors.Is(err, providers.ErrUnavailable) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), servers[i].ID) || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: %v; want %s", servers[i], err, want)
		}
	}
	if servers[1].SandboxURL != nowhere || servers[1].Domain != "e2b.example" {
		t.Errorf("the second entry: %+v", servers[1].Config)
	}
}

// A server's own CA is trusted where its entry names it, and only there.
func TestOwnCA(t *testing.T) {
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"maxContainers":2,"capabilities":["desktop"]}`)
	}))
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	server.StartTLS()
	t.Cleanup(server.Close)
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(file, ca, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, cfg := range map[string]Config{
		"in the list": {ServersJSON: fmt.Sprintf(`[{"id":"ax102-01","url":%q,"caFile":%q}]`, server.URL, file)},
		"of the one":  {ServerURL: server.URL, ServerCA: string(ca)},
	} {
		servers, errs := cfg.Load()
		if len(errs) > 0 {
			t.Fatal(errs)
		}
		p, err := servers[0].Open(t.Context(), Deps{})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
	servers, _ := Config{ServerURL: server.URL}.Load()
	if _, err := servers[0].Open(t.Context(), Deps{}); !errors.Is(err, providers.ErrUnavailable) {
		t.Errorf("without it: %v", err)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(`[{"id":"ax102-01","url":"http://a","attributes":{"cpu":16}}]`)
	f.Add(`[{"id":7,"roles":[null]},null,{}]`)
	f.Add(`[{"id":"a-01"`)
	f.Fuzz(func(t *testing.T, text string) {
		servers, errs := parse(text)
		if (len(servers) > 0) == (len(errs) > 0) {
			t.Fatalf("%d servers and %d faults", len(servers), len(errs))
		}
		for _, s := range servers {
			if s.ID == "" || s.Config.MaxContainers < 1 || s.Config.MaxContainers > MaxContainers || len(s.Config.Roles) == 0 {
				t.Fatalf("accepted %+v", s.Config)
			}
		}
	})
}
