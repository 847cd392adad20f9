package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/caarlos0/env/v11"

	"berth/internal/sandboxd"
	"berth/internal/sandboxd/firecracker"
	"berth/internal/sandboxd/jail"
)

// config is the environment; what has a flag can also be given by it, and the
// flag wins.
type config struct {
	Addr         string        `env:"SANDBOXD_ADDR" flag:"addr" envDefault:"127.0.0.1:8090" help:"address to listen on"`
	APIKey       string        `env:"SANDBOXD_API_KEY" help:"the key that callers send as X-API-Key; at least 16 characters"`
	APIKeyFile   string        `env:"SANDBOXD_API_KEY_FILE,file" help:"the same, as a file"`
	StateDir     string        `env:"SANDBOXD_STATE_DIR" flag:"state-dir" envDefault:"/var/lib/sandboxd" help:"what a restart needs to take the sandboxes over"`
	Max          int           `env:"SANDBOXD_MAX" flag:"max" envDefault:"10" help:"sandboxes at a time, 1 to 1000"`
	Warm         int           `env:"SANDBOXD_WARM" flag:"warm" envDefault:"1" help:"desktops kept ready, 0 to 100"`
	Roles        []string      `env:"SANDBOXD_ROLES" flag:"roles" help:"roles to announce (comma list)"`
	Machine      string        `env:"SANDBOXD_MACHINE" flag:"machine" envDefault:"desktop" help:"what holds a sandbox: desktop (namespaces of this host) or firecracker (a microVM each)"`
	Firecracker  string        `env:"SANDBOXD_FIRECRACKER" flag:"firecracker" envDefault:"firecracker" help:"the firecracker program, 1.8 or a later 1"`
	Kernel       string        `env:"SANDBOXD_KERNEL" flag:"kernel" help:"path of the microVMs' kernel, see deploy/images"`
	Initrd       string        `env:"SANDBOXD_INITRD" flag:"initrd" help:"path of its initial RAM disk, where it needs one"`
	RootFS       string        `env:"SANDBOXD_ROOTFS" flag:"rootfs" help:"path of the microVMs' root file system, see deploy/images"`
	Console      bool          `env:"SANDBOXD_CONSOLE" flag:"console" help:"keep what a microVM's kernel says in its log, to find out why it does not boot; has no limit"`
	MemoryMiB    int64         `env:"SANDBOXD_MEMORY_MIB" flag:"memory-mib" envDefault:"2048" help:"memory of a sandbox, its files included; 0: no limit"`
	CPUs         float64       `env:"SANDBOXD_CPUS" flag:"cpus" envDefault:"2" help:"processors' worth of time of a sandbox; 0: no limit"`
	Processes    int           `env:"SANDBOXD_PROCESSES" flag:"processes" envDefault:"512" help:"processes and threads of a sandbox; 0: no limit"`
	FilesMiB     int64         `env:"SANDBOXD_FILES_MIB" flag:"files-mib" envDefault:"512" help:"size of the home directory, and of /tmp"`
	FreeMemory   int64         `env:"SANDBOXD_FREE_MEMORY_MIB" flag:"free-memory-mib" envDefault:"256" help:"memory that the host must have free for another sandbox; a microVM needs its size at least"`
	FreeDisk     int64         `env:"SANDBOXD_FREE_DISK_MIB" flag:"free-disk-mib" envDefault:"64" help:"disk of the state directory that must stay free"`
	OpenNetworks []string      `env:"SANDBOXD_OPEN_NETWORKS" flag:"open-networks" help:"IPv4 ranges that sandboxes reach beside public addresses (comma list)"`
	NoVNC        string        `env:"SANDBOXD_NOVNC" flag:"novnc" envDefault:"/usr/share/novnc" help:"directory of noVNC, for the live view"`
	AllowWeaker  bool          `env:"SANDBOXD_ALLOW_WEAKER_ISOLATION" flag:"allow-weaker-isolation" help:"start also where the host cannot isolate or limit sandboxes"`
	TLSCert      string        `env:"SANDBOXD_TLS_CERT" flag:"tls-cert" help:"path of a certificate chain (PEM): serve HTTPS"`
	TLSKey       string        `env:"SANDBOXD_TLS_KEY" flag:"tls-key" help:"path of its key"`
	Grace        time.Duration `env:"SANDBOXD_GRACE" flag:"grace" envDefault:"20s" help:"for calls under way to end after SIGTERM"`
	LogLevel     string        `env:"LOG_LEVEL" envDefault:"info" help:"debug, info, warn, error"`
	LogFormat    string        `env:"LOG_FORMAT" envDefault:"text" help:"text, json"`

	level slog.Level
}

// parse reads flags and environment. done: the usage was asked for and printed.
func parse(args, environ []string, out io.Writer) (cfg config, faults []error, done bool) {
	vars := map[string]string{}
	for _, v := range environ {
		name, value, _ := strings.Cut(v, "=")
		vars[name] = value
	}
	flags := flag.NewFlagSet("sandboxd", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	for f := range reflect.TypeFor[config]().Fields() {
		name, variable := f.Tag.Get("flag"), variableOf(f)
		if name == "" {
			continue
		}
		set := func(value string) error {
			vars[variable] = value
			return nil
		}
		if f.Type.Kind() == reflect.Bool {
			flags.BoolFunc(name, "", set)
		} else {
			flags.Func(name, "", set)
		}
	}
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		usage(out)
		return cfg, nil, true
	case err != nil:
		return cfg, []error{err}, false
	case flags.NArg() > 0:
		return cfg, []error{fmt.Errorf("takes no argument, got %q", flags.Arg(0))}, false
	}
	faults = decode(&cfg, vars)
	return cfg, append(faults, cfg.validate(len(faults) > 0)...), false
}

func decode(cfg *config, vars map[string]string) []error {
	err := env.ParseWithOptions(cfg, env.Options{Environment: maps.Clone(vars)})
	if err == nil {
		return nil
	}
	var all env.AggregateError
	if !errors.As(err, &all) {
		return []error{err}
	}
	var faults []error
	for _, e := range all.Errors {
		var bad env.ParseError
		var file env.LoadFileContentError
		switch {
		case errors.As(e, &bad):
			field, _ := reflect.TypeFor[config]().FieldByName(bad.Name)
			faults = append(faults, fmt.Errorf("%s: not a %s", variableOf(field), bad.Type))
		case errors.As(e, &file):
			faults = append(faults, fmt.Errorf("%s: cannot read the file %q", file.Key, file.Filename))
		default:
			faults = append(faults, e)
		}
	}
	return faults
}

func variableOf(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("env"), ",")
	return name
}

// validate lists every fault. partly: some variables could not be read, so what
// they should say is not checked.
func (c *config) validate(partly bool) []error {
	var faults []error
	if c.APIKey != "" && c.APIKeyFile != "" {
		faults = append(faults, errors.New("SANDBOXD_API_KEY and SANDBOXD_API_KEY_FILE: set only one"))
	}
	if c.APIKey == "" {
		c.APIKey = strings.TrimSpace(c.APIKeyFile)
	}
	c.APIKeyFile = ""
	if err := c.level.UnmarshalText([]byte(c.LogLevel)); err != nil {
		faults = append(faults, fmt.Errorf("LOG_LEVEL: %q; want debug, info, warn or error", c.LogLevel))
	}
	if !slices.Contains([]string{"text", "json"}, c.LogFormat) {
		faults = append(faults, fmt.Errorf("LOG_FORMAT: %q; want text or json", c.LogFormat))
	}
	if (c.TLSCert == "") != (c.TLSKey == "") {
		faults = append(faults, errors.New("SANDBOXD_TLS_CERT and SANDBOXD_TLS_KEY: set both or none"))
	}
	if _, _, err := net.SplitHostPort(c.Addr); err != nil {
		faults = append(faults, fmt.Errorf("SANDBOXD_ADDR: %q is no host:port", c.Addr))
	}
	if partly {
		return faults
	}
	return append(faults, c.options(nil).Validate()...)
}

func (c config) options(log *slog.Logger) sandboxd.Options {
	return sandboxd.Options{
		StateDir: c.StateDir, APIKey: c.APIKey, MaxContainers: c.Max, Warm: c.Warm, Roles: c.Roles, Machine: c.Machine,
		Firecracker:  firecracker.Config{Binary: c.Firecracker, Kernel: c.Kernel, Initrd: c.Initrd, RootFS: c.RootFS, Console: c.Console},
		Limits:       jail.Limits{Memory: c.MemoryMiB << 20, Processes: c.Processes, CPUs: c.CPUs, Files: c.FilesMiB << 20},
		OpenNetworks: c.OpenNetworks, AllowWeaker: c.AllowWeaker, NoVNC: c.NoVNC, FreeMemory: c.FreeMemory << 20, FreeDisk: c.FreeDisk << 20, Logger: log,
	}
}

func usage(w io.Writer) {
	fmt.Fprint(w, "sandboxd holds sandboxes: isolated desktops on this host, behind the HTTP API of api/sandboxd.yaml (see /docs).\n\nUsage: sandboxd [flags]\n\n")
	for f := range reflect.TypeFor[config]().Fields() {
		help := f.Tag.Get("help")
		if help == "" {
			continue
		}
		name := ""
		if n := f.Tag.Get("flag"); n != "" {
			name = "--" + n
		}
		if def := f.Tag.Get("envDefault"); def != "" {
			help += " (default " + def + ")"
		}
		fmt.Fprintf(w, "  %-26s %-32s %s\n", name, variableOf(f), help)
	}
}
