package jail

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	Main(agent)
	os.Exit(m.Run())
}

// agent runs one shell command per connection, as the person, and answers with
// what it said.
func agent(l net.Listener, _ json.RawMessage) error {
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer func() {
				if err := conn.Close(); err != nil {
					fmt.Fprintln(os.Stderr, err)
				}
			}()
			command, err := bufio.NewReader(conn).ReadString('\x00')
			if err != nil {
				return
			}
			cmd := exec.Command("/bin/sh", "-c", strings.TrimSuffix(command, "\x00"))
			cmd.Env = append(os.Environ(), "HOME="+Home)
			if os.Getpid() < 10 { // not where namespaces are left out
				cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: PersonUID, Gid: PersonUID}}
			}
			out, err := cmd.CombinedOutput()
			if err != nil {
				out = append(out, fmt.Sprintf(" [%v]", err)...)
			}
			if _, err := conn.Write(out); err != nil {
				fmt.Fprintln(os.Stderr, err)
			}
		}()
	}
}

// box is a sandbox of a test.
type box struct {
	*Process
	dir string
}

var slots atomic.Int64

func start(t *testing.T, spec Spec) *box {
	t.Helper()
	dir, err := os.MkdirTemp("", "jail")
	if err != nil {
		t.Fatal(err)
	}
	spec.Dir, spec.Slot, spec.Agent = dir, int(slots.Add(1))+100, json.RawMessage(`{}`)
	spec.ID = filepath.Base(dir)
	p, err := Start(spec)
	if err != nil {
		said, _ := os.ReadFile(filepath.Join(dir, "log")) // more for the message
		t.Fatalf("%v; log: %s", err, said)
	}
	t.Cleanup(func() {
		if err := errors.Join(p.Kill(), os.RemoveAll(dir)); err != nil {
			t.Error(err)
		}
	})
	return &box{p, dir}
}

func (b *box) sh(t *testing.T, command string) string {
	t.Helper()
	conn, err := net.Dial("unix", SocketPath(b.dir))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}()
	if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Write([]byte(command + "\x00")); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if _, err := bufio.NewReader(conn).WriteTo(&out); err != nil {
		t.Fatalf("%s: %v", command, err)
	}
	return strings.TrimSpace(out.String())
}

func has(t *testing.T, got, want string) {
	t.Helper()
	if !strings.Contains(got, want) {
		t.Errorf("%q has no %q", got, want)
	}
}

// TestProbe: this machine enforces all of it; a machine that does not says so.
func TestProbe(t *testing.T) {
	p, err := ProbeHost(t.TempDir(), nil)
	if err != nil || len(p.Denied) > 0 || !p.Network {
		t.Fatalf("%+v, %v; the tests need root, user namespaces, cgroups, /dev/net/tun and slirp4netns (apt-get install slirp4netns)", p, err)
	}
}

func TestIsolation(t *testing.T) {
	t.Parallel()
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("s"), 0o666); err != nil {
		t.Fatal(err)
	}
	a, b := start(t, Spec{}), start(t, Spec{})
	if got := a.sh(t, "id -u; hostname; ls /root /opt /mnt /sys /.host 2>&1 | wc -l; cat "+secret); !strings.HasPrefix(got, "1000\nsandbox\n") {
		t.Errorf("inside: %q", got)
	} else {
		has(t, got, "No such file")
	}
	if n, err := strconv.Atoi(a.sh(t, "ls /proc | grep -c '^[0-9]*$'")); err != nil || n > 8 {
		t.Errorf("%d processes are seen: %v", n, err)
	}
	for _, command := range []string{"touch /usr/x", "touch /etc/x", "touch /x", "echo 1 > /proc/sys/kernel/core_pattern", "kill -9 1", "cat /proc/1/environ", "mount -t tmpfs x /mnt", "cat /etc/shadow", "ls -la /proc/1/root/", "chroot / true", "keyctl show"} {
		if got := a.sh(t, command+" && echo POSSIBLE"); strings.Contains(got, "POSSIBLE") {
			t.Errorf("%s: %q", command, got)
		}
	}
	a.sh(t, "echo mine > $HOME/f; echo mine > /tmp/f; echo mine > /dev/shm/f; ipcmk -M 100")
	if got := b.sh(t, "cat /home/user/f /tmp/f /dev/shm/f; ipcs -m | grep -c 0x"); strings.Contains(got, "mine") || !strings.Contains(got, "0") {
		t.Errorf("a sandbox sees another: %q", got)
	}
	has(t, a.sh(t, "grep NoNewPrivs /proc/self/status; grep CapEff /proc/self/status; grep Seccomp: /proc/self/status"), "NoNewPrivs:\t1\nCapEff:\t0000000000000000\nSeccomp:\t2")
	if got := a.sh(t, "ls /proc/self/fd | tr '\\n' ' '"); got != "0 1 2 3" { // 3 is ls' own
		t.Errorf("a program inherits descriptors: %q", got)
	}
	has(t, a.sh(t, "unshare -Ur id -u"), "0") // namespaces nest: Chromium's sandbox needs that
}

// TestLimits: what eats without end harms itself only.
func TestLimits(t *testing.T) {
	t.Parallel()
	b := start(t, Spec{Limits: Limits{Memory: 128 << 20, Processes: 40, CPUs: 0.5, Files: 8 << 20}})
	has(t, b.sh(t, "head -c 20000000 /dev/zero > $HOME/big"), "No space left")
	b.sh(t, "rm $HOME/big")
	forks := start(t, Spec{Limits: Limits{Processes: 40}})
	has(t, forks.sh(t, "for i in $(seq 100); do sleep 60 >/dev/null 2>&1 & done"), "ork")
	has(t, b.sh(t, "head -c 400000000 /dev/zero | tail -c 300000000 | wc -c"), "Killed")
	has(t, b.sh(t, "echo alive"), "alive")
	if used, err := b.MemoryUsed(); err != nil || used <= 0 || used > 128<<20 {
		t.Errorf("memory %d, %v", used, err)
	}
	used := b.sh(t, `bash -c 'TIMEFORMAT=%U; time timeout 1 sh -c "while :; do :; done"' 2>&1 | tail -1`)
	if seconds, err := strconv.ParseFloat(used, 64); err != nil || seconds > 0.8 {
		t.Errorf("half a processor for a second was %q: %v", used, err)
	}
}

// TestNetwork: closed ranges and the host are unreachable, unless opened.
func TestNetwork(t *testing.T) {
	t.Parallel()
	own := ""
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addresses {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && !n.IP.IsLoopback() {
			own = n.IP.String()
		}
	}
	if own == "" {
		t.Fatal("this test needs an IPv4 address beside loopback")
	}
	l, err := net.Listen("tcp4", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "HOST REACHED") }))
	if err := server.Listener.Close(); err != nil {
		t.Fatal(err)
	}
	server.Listener = l
	server.Start()
	t.Cleanup(server.Close)
	port := l.Addr().(*net.TCPAddr).Port
	get := func(address string) string {
		return fmt.Sprintf("timeout 5 bash -c 'exec 3<>/dev/tcp/%s/%d; printf \"GET / HTTP/1.0\\r\\n\\r\\n\" >&3; cat <&3' 2>&1", address, port)
	}
	none, shut, open := start(t, Spec{}), start(t, Spec{Network: Network{Out: true}}), start(t, Spec{Network: Network{Out: true, Open: []string{own + "/32"}}})
	for _, address := range []string{"127.0.0.1", "10.0.2.2", own, "169.254.169.254", "192.168.1.1", "100.64.0.1"} {
		for name, b := range map[string]*box{"no network": none, "closed": shut} {
			if got := b.sh(t, get(address)); strings.Contains(got, "REACHED") || !strings.Contains(got, "unreachable") && !strings.Contains(got, "No route") && !strings.Contains(got, "refused") {
				t.Errorf("%s, %s: %q", name, address, got)
			}
		}
	}
	has(t, open.sh(t, get(own)), "HOST REACHED")
	if got := open.sh(t, get("127.0.0.1")); strings.Contains(got, "REACHED") {
		t.Errorf("the host's loopback: %q", got)
	}
	has(t, shut.sh(t, "ip route del unreachable 169.254.0.0/16 2>&1 || cat /proc/net/route >/dev/null && echo denied"), "denied")
}

// TestEnds: a sandbox ends with its first process, whoever started it, and
// nothing stays.
func TestEnds(t *testing.T) {
	t.Parallel()
	b := start(t, Spec{Network: Network{Out: true}})
	found, err := Find(b.id, b.PID, b.Started, Weakness{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Find(b.id, b.PID, b.Started+1, Weakness{}); err == nil {
		t.Error("found another process of the same number")
	}
	if err := syscall.Kill(b.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-found.Gone()
	<-b.Gone()
	for range 2 {
		if err := found.Kill(); err != nil {
			t.Error(err)
		}
	}
	h, err := cgroups()
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range h.groups(b.id) {
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", dir, err)
		}
	}
}

// TestUnified writes the files of a v2 hierarchy into a directory that stands
// in for one.
func TestUnified(t *testing.T) {
	mount := t.TempDir()
	self := filepath.Join(mount, "self")
	for name, content := range map[string]string{"self": "0::/unit\n", "cgroup.controllers": "memory pids cpu\n"} {
		if err := os.WriteFile(filepath.Join(mount, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(mount, "unit"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"unit", "unit/berth-sandboxes"} {
		if err := os.MkdirAll(filepath.Join(mount, dir), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(mount, dir, "cgroup.subtree_control"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	h, err := findCgroups(self, mount)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.make("box", Limits{Memory: 1 << 30, Processes: 99, CPUs: 1.5}, 4711); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"memory.max": "1073741824", "pids.max": "99", "cpu.max": "150000 100000", "cgroup.procs": "4711"} {
		raw, err := os.ReadFile(filepath.Join(mount, "unit", cgroupName, "box", name))
		if err != nil || string(raw) != want {
			t.Errorf("%s: %q, %v", name, raw, err)
		}
	}
}

// TestFreeMemory: what the host has, or what the tightest limit above this process
// leaves; v1 and v2, in directories that stand in for them.
func TestFreeMemory(t *testing.T) {
	write := func(files map[string]string) (at func(string) string) {
		dir := t.TempDir()
		for name, content := range files {
			path := filepath.Join(dir, name)
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return func(name string) string { return filepath.Join(dir, name) }
	}
	const meminfo = "MemTotal: 100 kB\nMemAvailable:    4096 kB\n"
	for name, c := range map[string]struct {
		files map[string]string
		want  int64
	}{
		"no limit":  {map[string]string{"self": "0::/unit\n", "cg/unit/memory.max": "max\n"}, 4096 << 10},
		"v2":        {map[string]string{"self": "0::/pod/unit\n", "cg/pod/unit/memory.max": "max\n", "cg/pod/memory.max": "1000000\n", "cg/pod/memory.current": "700000\n", "cg/pod/memory.stat": "anon 1\ninactive_file 200000\n"}, 500000},
		"v2 over":   {map[string]string{"self": "0::/unit\n", "cg/unit/memory.max": "1000\n", "cg/unit/memory.current": "5000\n", "cg/unit/memory.stat": "inactive_file 0\n"}, 0},
		"v1":        {map[string]string{"self": "4:memory:/unit\n0::/\n", "cg/memory/unit/memory.limit_in_bytes": "1000000\n", "cg/memory/unit/memory.usage_in_bytes": "400000\n", "cg/memory/unit/memory.stat": "inactive_file 5\ntotal_inactive_file 100000\n"}, 700000},
		"v1 no end": {map[string]string{"self": "4:memory:/\n", "cg/memory/memory.limit_in_bytes": "9223372036854771712\n", "cg/memory/memory.usage_in_bytes": "400000\n", "cg/memory/memory.stat": "total_inactive_file 0\n"}, 4096 << 10},
	} {
		c.files["meminfo"] = meminfo
		at := write(c.files)
		if got, err := freeMemory(at("meminfo"), at("self"), at("cg")); err != nil || got != c.want {
			t.Errorf("%s: %d, %v; want %d", name, got, err, c.want)
		}
	}
	at := write(map[string]string{"meminfo": "MemTotal: 100 kB\n", "self": "0::/\n"})
	if _, err := freeMemory(at("meminfo"), at("self"), at("cg")); err == nil {
		t.Error("a file without the number is taken")
	}
	if got, err := FreeMemory(); err != nil || got <= 0 {
		t.Errorf("here: %d, %v", got, err)
	}
	h := hierarchy{unified: true, dirs: map[string]string{}}
	at = write(map[string]string{"box/memory.current": "900\n", "box/memory.stat": "inactive_file 300\n", "box/pids.current": "7\n", "box/cpu.stat": "usage_usec 1500000\n"})
	for _, controller := range needed {
		h.dirs[controller] = at("")
	}
	var u Usage
	if err := h.usage("box", &u); err != nil || u.Memory != 600 || u.Processes != 7 || u.CPU != 1500*time.Millisecond {
		t.Errorf("v2: %+v, %v", u, err)
	}
}
