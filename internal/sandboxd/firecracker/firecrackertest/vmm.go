package firecrackertest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"berth/internal/sandboxd/firecracker"
)

// vmm is one process of the stand-in.
type vmm struct {
	id string

	mu         sync.Mutex // of the API: one call at a time
	configured bool       // something was, so that nothing can be loaded any more
	state      string
	made       saved
	keeper     *attachment
	ending     bool // the answer that is on its way is the last

	conns sync.Mutex
	open  map[net.Conn]bool // over vsock
}

// saved is what a snapshot's state file has.
type saved struct {
	Boot    *firecracker.BootSource
	Machine *firecracker.MachineConfig
	Drives  map[string]firecracker.Drive
	Vsock   *firecracker.Vsock
	Keeper  string // socket of what keeps the stopped guest
}

// refusal is a 400 with its fault_message.
type refusal string

func (r refusal) Error() string { return string(r) }

const (
	afterStart  = refusal("The requested operation is not supported after starting the microVM.")
	beforeStart = refusal("The requested operation is not supported before starting the microVM.")
)

func runVMM() error {
	flags := flag.NewFlagSet(vmmName, flag.ContinueOnError)
	version := flags.Bool("version", false, "")
	socket := flags.String("api-sock", "/run/firecracker.socket", "")
	id := flags.String("id", "anonymous-instance", "")
	if err := flags.Parse(os.Args[1:]); err != nil {
		return err
	}
	if *version {
		fmt.Printf("Firecracker v%s\n\nA stand-in.\n", Version)
		return nil
	}
	l, err := net.Listen("unix", *socket)
	if err != nil {
		return err
	}
	v := &vmm{id: *id, state: firecracker.StateNotStarted, made: saved{Drives: map[string]firecracker.Drive{}}, open: map[net.Conn]bool{}}
	return (&http.Server{Handler: v, ReadHeaderTimeout: time.Minute}).Serve(l)
}

func (v *vmm) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	v.mu.Lock()
	defer v.mu.Unlock()
	raw, err := io.ReadAll(io.LimitReader(r.Body, 51200))
	if err != nil {
		return // the caller has gone away
	}
	var body any
	if err = v.fault(r); err == nil {
		body, err = v.call(r.Method, r.URL.Path, raw)
	}
	w.Header().Set("Server", "Firecracker API")
	w.Header().Set("Content-Type", "application/json")
	switch {
	case err != nil:
		w.WriteHeader(http.StatusBadRequest)
		body = map[string]string{"fault_message": err.Error()}
	case body == nil:
		w.WriteHeader(http.StatusNoContent)
		return
	}
	if err := json.NewEncoder(w).Encode(body); err != nil {
		return
	}
	if v.ending {
		time.AfterFunc(pollEvery, func() { os.Exit(1) })
	}
}

// fault does what the file named fault wants.
func (v *vmm) fault(r *http.Request) error {
	raw, err := os.ReadFile(faultPath(os.Args[0]))
	if err != nil {
		return nil
	}
	what, call, _ := strings.Cut(strings.TrimSpace(string(raw)), " ")
	if call != r.Method+" "+r.URL.Path {
		return nil
	}
	switch what {
	case "hang":
		<-r.Context().Done()
	case "die":
		os.Exit(1)
	}
	return refusal("a fault that the test asked for")
}

// decode refuses fields that the description does not have.
func decode(raw []byte, into any) error {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return refusal("An error occurred when deserializing the json body of a request: " + err.Error())
	}
	return nil
}

func (v *vmm) call(method, path string, raw []byte) (any, error) {
	started := v.state != firecracker.StateNotStarted
	switch call := method + " " + path; {
	case call == "GET /":
		return map[string]string{"id": v.id, "state": v.state, "vmm_version": Version, "app_name": "Firecracker"}, nil
	case call == "PATCH /vm":
		return nil, v.patch(raw)
	case call == "PUT /snapshot/create":
		return nil, v.save(raw)
	case call == "PUT /snapshot/load":
		return nil, v.load(raw)
	case call == "PUT /actions":
		return nil, v.act(raw)
	case call == "PUT /machine-config", call == "PUT /boot-source", call == "PUT /vsock", call == "PUT /entropy", strings.HasPrefix(call, "PUT /drives/"):
		if started {
			return nil, afterStart
		}
		v.configured = true
		return nil, v.configure(path, raw)
	}
	return nil, refusal(fmt.Sprintf("Invalid request method and/or path: %s %s.", method, path))
}

func (v *vmm) configure(path string, raw []byte) error {
	switch path {
	case "/machine-config":
		m := &firecracker.MachineConfig{}
		if err := decode(raw, m); err != nil {
			return err
		}
		if m.VCPUs < 1 || m.VCPUs > 32 {
			return refusal("The vCPU number is invalid! The vCPU number can only be 1 or an even number when SMT is enabled.")
		}
		if m.MemoryMiB < 1 {
			return refusal("The memory size (MiB) is invalid.")
		}
		v.made.Machine = m
	case "/boot-source":
		b := &firecracker.BootSource{}
		if err := decode(raw, b); err != nil {
			return err
		}
		for _, file := range []string{b.Kernel, b.Initrd} {
			if _, err := os.Stat(file); file != "" && err != nil {
				return refusal("The kernel file cannot be opened: " + err.Error())
			}
		}
		v.made.Boot = b
	case "/vsock":
		s := &firecracker.Vsock{}
		if err := decode(raw, s); err != nil {
			return err
		}
		if s.CID < 3 {
			return refusal("The guest CID is invalid.")
		}
		v.made.Vsock = s
	case "/entropy":
		return decode(raw, &struct{}{})
	default:
		var d firecracker.Drive
		if err := decode(raw, &d); err != nil {
			return err
		}
		if d.ID != filepath.Base(path) {
			return refusal("The id from the path does not match the id from the body!")
		}
		if _, err := os.Stat(d.Path); err != nil {
			return refusal("Unable to create the virtio block device: " + err.Error())
		}
		v.made.Drives[d.ID] = d
	}
	return nil
}

func (v *vmm) act(raw []byte) error {
	var in struct {
		Type string `json:"action_type"`
	}
	if err := decode(raw, &in); err != nil {
		return err
	}
	if in.Type != "InstanceStart" {
		return refusal("unknown variant " + in.Type)
	}
	if v.state != firecracker.StateNotStarted {
		return afterStart
	}
	if v.made.Boot == nil {
		return refusal("Cannot start microvm without kernel configuration.")
	}
	root := false
	for _, d := range v.made.Drives {
		root = root || d.Root
	}
	if !root {
		return refusal("There is no root device.")
	}
	if err := v.boot(); err != nil {
		return refusal(err.Error())
	}
	v.state = firecracker.StateRunning
	return nil
}

func (v *vmm) boot() error {
	keeper, err := startKeeper(v.made.Boot.Args)
	if err != nil {
		return err
	}
	return v.attach(keeper)
}

// attach makes a guest this microVM's: its end is the end of this process.
func (v *vmm) attach(a *attachment) error {
	v.keeper, v.made.Keeper = a, a.socket
	go func() {
		<-a.gone
		os.Exit(0) // the guest has rebooted
	}()
	if v.made.Vsock == nil {
		return nil
	}
	l, err := net.Listen("unix", v.made.Vsock.Path)
	if err != nil {
		return err
	}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go v.forward(conn)
		}
	}()
	return nil
}

// forward connects the host to a port of the guest.
func (v *vmm) forward(host net.Conn) {
	v.track(host, true)
	defer v.track(host, false)
	in := bufio.NewReader(io.LimitReader(host, 32))
	line, err := in.ReadString('\n')
	var port int
	if n, scanErr := fmt.Sscanf(line, "CONNECT %d\n", &port); err != nil || scanErr != nil || n != 1 {
		return
	}
	inside, err := net.Dial("unix", portPath(v.keeper.socket, port))
	if err != nil {
		return // nobody listens
	}
	v.track(inside, true)
	defer v.track(inside, false)
	if _, err := fmt.Fprintf(host, "OK %d\n", 1<<30+port); err != nil {
		return
	}
	done := make(chan struct{}, 2)
	pipe := func(to, from net.Conn) {
		_, _ = io.Copy(to, from) // it ends with either side
		done <- struct{}{}
	}
	go pipe(inside, host)
	go pipe(host, inside)
	<-done
}

// track closes a connection with the microVM's, or at once.
func (v *vmm) track(c net.Conn, open bool) {
	v.conns.Lock()
	defer v.conns.Unlock()
	if open {
		v.open[c] = true
		return
	}
	delete(v.open, c)
	_ = c.Close() // it may have been closed with a snapshot
}

func (v *vmm) patch(raw []byte) error {
	var in struct {
		State string `json:"state"`
	}
	if err := decode(raw, &in); err != nil {
		return err
	}
	if v.state == firecracker.StateNotStarted {
		return beforeStart
	}
	command, state := "stop", firecracker.StatePaused
	switch in.State {
	case "Paused":
	case "Resumed":
		command, state = "cont", firecracker.StateRunning
	default:
		return refusal("unknown variant " + in.State)
	}
	if state == v.state {
		return nil
	}
	if err := v.keeper.tell(command); err != nil {
		return refusal(err.Error())
	}
	v.state = state
	return nil
}

func (v *vmm) save(raw []byte) error {
	var in struct {
		Type   string `json:"snapshot_type"`
		State  string `json:"snapshot_path"`
		Memory string `json:"mem_file_path"`
	}
	if err := decode(raw, &in); err != nil {
		return err
	}
	switch {
	case v.state == firecracker.StateNotStarted:
		return beforeStart
	case v.state != firecracker.StatePaused:
		return refusal("Cannot save/restore Vm state: the microVM is not paused.")
	case in.Type != "Full" && in.Type != "":
		return refusal("snapshot type " + in.Type)
	}
	text, err := json.Marshal(v.made)
	if err == nil {
		err = errors.Join(os.WriteFile(in.State, text, 0o600), os.WriteFile(in.Memory, []byte("stands in for a memory"), 0o600))
	}
	if err == nil {
		path, absErr := filepath.Abs(in.State)
		err = errors.Join(absErr, v.keeper.tell("kept "+path))
	}
	if err != nil {
		return refusal(err.Error())
	}
	v.conns.Lock()
	defer v.conns.Unlock()
	for c := range v.open { // the device is reset
		_ = c.Close() // whoever reads it closes it too
	}
	return nil
}

func (v *vmm) load(raw []byte) error {
	var in struct {
		State  string `json:"snapshot_path"`
		Memory struct {
			Type string `json:"backend_type"`
			Path string `json:"backend_path"`
		} `json:"mem_backend"`
		Resume bool `json:"resume_vm"`
	}
	if err := decode(raw, &in); err != nil {
		return err
	}
	if v.state != firecracker.StateNotStarted {
		return afterStart
	}
	if v.configured {
		return refusal("Loading a microVM snapshot not allowed after configuring boot-specific resources.")
	}
	v.ending = true // unless it is loaded
	text, err := os.ReadFile(in.State)
	if err == nil {
		_, err = os.Stat(in.Memory.Path)
	}
	if err == nil {
		err = json.Unmarshal(text, &v.made)
	}
	if err != nil || in.Memory.Type != "File" {
		return refusal(fmt.Sprintf("Failed to restore from snapshot: %v", err))
	}
	a, err := reattach(v.made.Keeper)
	if err == nil {
		err = v.attach(a)
	} else if err = v.boot(); err == nil { // the tree is another microVM's by now
		err = v.keeper.tell("stop")
	}
	if err != nil {
		return refusal("Failed to restore from snapshot: " + err.Error())
	}
	v.ending, v.state = false, firecracker.StatePaused
	if in.Resume {
		return v.patch([]byte(`{"state":"Resumed"}`))
	}
	return nil
}
