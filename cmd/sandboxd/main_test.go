package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"berth/internal/sandboxd"
)

func TestMain(m *testing.M) {
	sandboxd.TakeOver() // sandboxes run this very program
	testscript.Main(m, map[string]func(){"sandboxd": func() { os.Exit(run()) }})
}

func TestScripts(t *testing.T) { testscript.Run(t, testscript.Params{Dir: "testdata"}) }

const key = "process-test-key-0123"

// daemon is a sandboxd in a process of its own.
type daemon struct {
	cmd *exec.Cmd
	url string
	log *bytes.Buffer
	end chan error
}

var serving = regexp.MustCompile(`msg=serving url=(\S+)`)

func start(t *testing.T, state string) *daemon {
	t.Helper()
	d := &daemon{cmd: exec.Command(os.Args[0], "--addr", "127.0.0.1:0", "--state-dir", state, "--warm", "1", "--max", "2"), log: &bytes.Buffer{}, end: make(chan error, 1)}
	d.cmd.Args[0] = "sandboxd"
	d.cmd.Env = append(os.Environ(), "SANDBOXD_API_KEY="+key)
	pipe, err := d.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	url := make(chan string, 1)
	go func() {
		lines := bufio.NewScanner(pipe)
		for lines.Scan() {
			fmt.Fprintln(d.log, lines.Text())
			if m := serving.FindStringSubmatch(lines.Text()); m != nil {
				url <- m[1]
			}
		}
		close(url)
		d.end <- d.cmd.Wait()
	}()
	d.url = <-url
	if d.url == "" {
		t.Fatalf("%v\n%s", <-d.end, d.log)
	}
	return d
}

// stop sends a signal and returns how the process ended.
func (d *daemon) stop(t *testing.T, sig os.Signal) error {
	t.Helper()
	if err := d.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
	return <-d.end
}

func (d *daemon) call(t *testing.T, method, path, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, d.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-API-Key", key)
	req.Header.Set("Idempotency-Key", "k")
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := io.ReadAll(resp.Body)
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(raw)
}

// TestProcess: a sandbox outlives SIGKILL and SIGTERM of its server, and the
// next server takes it over; SIGTERM exits 0.
func TestProcess(t *testing.T) {
	if err := sandboxd.Missing(); err != nil {
		t.Fatal(err)
	}
	state, err := os.MkdirTemp("", "sbd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(state); err != nil {
			t.Error(err)
		}
	})
	d := start(t, state)
	_, boot := d.call(t, "GET", "/health", "")
	if status, body := d.call(t, "POST", "/sandboxes", `{"sandboxID":"vm-a"}`); status != 201 {
		t.Fatalf("%d %s", status, body)
	}
	if err := d.stop(t, syscall.SIGKILL); err == nil {
		t.Error("a killed server exited 0")
	}
	d = start(t, state)
	if _, again := d.call(t, "GET", "/health", ""); again != boot {
		t.Errorf("after SIGKILL the server says %s, before %s", again, boot)
	}
	if err := d.stop(t, syscall.SIGTERM); err != nil {
		t.Errorf("SIGTERM: %v\n%s", err, d.log)
	}
	d = start(t, state)
	if status, body := d.call(t, "POST", "/sandboxes/vm-a/computer/actions", `{"actions":[{"type":"cursor"}]}`); status != 200 {
		t.Errorf("the sandbox after two restarts: %d %s", status, body)
	}
	if status, _ := d.call(t, "DELETE", "/sandboxes/vm-a", ""); status != 204 {
		t.Errorf("delete: %d", status)
	}
	if err := d.stop(t, os.Interrupt); err != nil {
		t.Errorf("SIGINT: %v\n%s", err, d.log)
	}
	left, err := os.ReadDir(state + "/guests")
	if err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
