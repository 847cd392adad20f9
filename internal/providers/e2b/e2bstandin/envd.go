package main

import (
	"context"
	"crypto/subtle"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/sandboxd/jail"
)

// portHeader carries the sandbox's port from the proxy.
const portHeader = "Standin-Port"

// lifeline, in place of a port, is a call that the stand-in makes once and that
// lasts as long as it does.
const lifeline = "lifeline"

// envdConfig is what a sandbox's envd is told.
type envdConfig struct {
	SandboxID string
	Token     string // "" : none is asked for
	Env       map[string]string
}

// person is who a process runs as.
type person struct {
	name string
	uid  int
	home string
}

var people = map[string]person{"user": {"user", jail.PersonUID, jail.Home}, "root": {"root", 0, "/root"}}

// envd starts processes and gives out files inside the sandbox.
type envd struct {
	config    envdConfig
	processes *processes
}

// serveEnvd serves envd and, for other ports, whatever listens on them.
func serveEnvd(l net.Listener, config envdConfig) error {
	if err := liveView(); err != nil {
		return err
	}
	e := &envd{config: config, processes: newProcesses()}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	guarded := http.NewServeMux()
	mux.Handle("/", e.guard(guarded))
	guarded.HandleFunc("GET /files", e.download)
	guarded.HandleFunc("POST /files", e.upload)
	e.routes(guarded)
	server := &http.Server{ReadHeaderTimeout: 10 * time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		port := r.Header.Get(portHeader)
		r.Header.Del(portHeader)
		if port == lifeline {
			<-r.Context().Done()
			os.Exit(0) // the stand-in has been killed: its sandboxes end with it
		}
		if port == "" || port == strconv.Itoa(envdPort) {
			mux.ServeHTTP(w, r)
			return
		}
		e.forward(w, r, port)
	})}
	return server.Serve(l)
}

// liveView puts noVNC where E2B's desktop template has it.
func liveView() error {
	if err := unix.Mount("tmpfs", "/opt", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755,size=1m"); err != nil {
		return fmt.Errorf("mount /opt: %w", err)
	}
	if err := os.Symlink("/usr/share/novnc", "/opt/noVNC"); err != nil {
		return fmt.Errorf("link noVNC: %w", err)
	}
	return nil
}

// forward hands a request to a port of the sandbox.
func (e *envd) forward(w http.ResponseWriter, r *http.Request, port string) {
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: "127.0.0.1:" + port})
	proxy.FlushInterval = -1
	proxy.ErrorHandler = func(w http.ResponseWriter, _ *http.Request, err error) {
		body := map[string]any{"sandboxId": e.config.SandboxID, "message": "The sandbox is running but port is not open", "code": http.StatusBadGateway}
		if n, nerr := strconv.Atoi(port); nerr == nil && errors.Is(err, unix.ECONNREFUSED) {
			body["port"] = n
		}
		answer(w, http.StatusBadGateway, body)
	}
	proxy.ServeHTTP(w, r)
}

// guard asks for the access token.
func (e *envd) guard(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if e.config.Token != "" && subtle.ConstantTimeCompare([]byte(r.Header.Get("X-Access-Token")), []byte(e.config.Token)) != 1 {
			answer(w, http.StatusUnauthorized, map[string]any{"code": http.StatusUnauthorized, "message": "unauthorized access, please provide a valid access token"})
			return
		}
		h.ServeHTTP(w, r)
	})
}

// who reads the user from the Authorization header: its password is empty.
func who(r *http.Request) (person, error) {
	text := r.Header.Get("Authorization")
	if text == "" {
		return people["user"], nil
	}
	raw, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(text, "Basic "))
	name, password, ok := strings.Cut(string(raw), ":")
	p, known := people[name]
	if err != nil || !ok || password != "" || !known {
		return person{}, &rpcError{"unauthenticated", fmt.Sprintf("invalid username: %q", name)}
	}
	return p, nil
}

// environment of a process: the person's, the sandbox's, its own.
func (e *envd) environment(p person, own map[string]string) []string {
	env := []string{"HOME=" + p.home, "USER=" + p.name, "LOGNAME=" + p.name, "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	for _, m := range []map[string]string{e.config.Env, own} {
		for name, value := range m {
			env = append(env, name+"="+value)
		}
	}
	return env
}

// path makes a path absolute, from the person's home.
func (p person) path(name string) string {
	switch {
	case name == "~" || name == "":
		return p.home
	case strings.HasPrefix(name, "~/"):
		return p.home + name[1:]
	case strings.HasPrefix(name, "/"):
		return name
	}
	return p.home + "/" + name
}

// command prepares a process as envd does: through a shell that replaces itself, so
// that a program that is missing starts and ends with 127.
func command(ctx context.Context, p person, argv []string, dir string, env []string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "/bin/sh", append([]string{"-c", `exec /usr/bin/nice -n 0 "$@"`, "sh"}, argv...)...)
	cmd.Dir, cmd.Env = dir, env
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(p.uid), Gid: uint32(p.uid)}}
	return cmd
}
