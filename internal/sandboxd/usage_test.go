package sandboxd

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// usageOf is what the API says that a sandbox takes.
func (w *world) usageOf(t testing.TB, path string) (u struct {
	MemoryBytes, FilesBytes, DiskBytes, Processes int64
	CPUSeconds                                    float64
}) {
	t.Helper()
	var d struct{ Usage any }
	d.Usage = &u
	w.want(t, 200, "GET", path, nil).into(t, &d)
	return u
}

// capacity is what the API says of the server.
func (w *world) capacity(t testing.TB) (c struct {
	Usage struct{ MemoryBytes, FilesBytes, DiskBytes, Processes int64 }
	Host  struct{ MemoryFreeBytes, DiskFreeBytes int64 }
}) {
	t.Helper()
	w.want(t, 200, "GET", "/capacity", nil).into(t, &c)
	return c
}

// TestUsage: what programs take shows, stays within the limits, and is gone when
// they give it back; a sandbox beside does not take it.
func TestUsage(t *testing.T) {
	t.Parallel()
	opts := options(t)
	opts.Limits.Memory, opts.Limits.Files, opts.Limits.Processes = 512<<20, 64<<20, 200
	w := serve(t, opts)
	path, other := w.create(t, "vm-a"), w.create(t, "vm-b")
	idle, beside := w.usageOf(t, path), w.usageOf(t, other)
	if idle.MemoryBytes < 5<<20 || idle.MemoryBytes > 200<<20 || idle.FilesBytes > 1<<20 || idle.Processes < 5 || idle.CPUSeconds <= 0 {
		t.Errorf("an idle desktop takes %+v", idle)
	}

	// 100 MiB do not go into 64.
	w.run(t, path, "fill", "head -c 104857600 /dev/zero > big; head -c 10485760 /dev/zero > /tmp/more; true")
	full := w.usageOf(t, path)
	if full.FilesBytes < 73<<20 || full.FilesBytes > 75<<20 || full.MemoryBytes < idle.MemoryBytes+70<<20 {
		t.Errorf("with 64 MiB in the home directory, which is full, and 10 in /tmp: %+v, idle %+v", full, idle)
	}
	if sum := w.capacity(t).Usage; sum.FilesBytes < full.FilesBytes || sum.MemoryBytes < full.MemoryBytes {
		t.Errorf("all together take %+v, and one of them %+v", sum, full)
	}
	w.run(t, path, "empty", "rm big /tmp/more")
	if u := w.usageOf(t, path); u.FilesBytes > idle.FilesBytes+1<<20 || u.MemoryBytes > full.MemoryBytes-70<<20 {
		t.Errorf("after the files are gone: %+v", u)
	}

	// tail holds what it has read; nobody reads what it writes.
	w.run(t, path, "eat", "setsid sh -c 'head -c 157286400 /dev/zero | tail -c 157286400 | sleep 1000' >/dev/null 2>&1 &")
	w.run(t, path, "many", "for i in $(seq 30); do setsid sleep 1001 >/dev/null 2>&1 & done")
	w.run(t, path, "work", "timeout 1 sh -c 'while :; do :; done'; true")
	eventually(t, func() string {
		u := w.usageOf(t, path)
		if u.MemoryBytes < idle.MemoryBytes+150<<20 || u.Processes < idle.Processes+30 || u.CPUSeconds < idle.CPUSeconds+0.2 {
			return fmt.Sprintf("with 150 MiB held, 30 more processes and a second of work: %+v, idle %+v", u, idle)
		}
		return ""
	})
	w.run(t, path, "end", "pkill sleep; true")
	eventually(t, func() string {
		if u := w.usageOf(t, path); u.MemoryBytes > idle.MemoryBytes+50<<20 || u.Processes > idle.Processes+10 {
			return fmt.Sprintf("after their end: %+v, idle %+v", u, idle)
		}
		return ""
	})

	// What eats without end is stopped at the limit.
	w.run(t, path, "glutton", "tail /dev/zero; true")
	if u := w.usageOf(t, path); u.MemoryBytes > opts.Limits.Memory {
		t.Errorf("over its limit: %+v", u)
	}
	if u := w.usageOf(t, other); u.MemoryBytes > beside.MemoryBytes+50<<20 || u.FilesBytes > 1<<20 {
		t.Errorf("the sandbox beside takes %+v, before %+v", u, beside)
	}
	var list []struct{ Usage *struct{ MemoryBytes int64 } }
	w.want(t, 200, "GET", "/sandboxes", nil).into(t, &list)
	if len(list) != 2 || list[0].Usage == nil || list[0].Usage.MemoryBytes == 0 {
		t.Errorf("the list: %+v", list)
	}
	w.want(t, 204, "DELETE", path, nil)
	w.want(t, 204, "DELETE", other, nil)
	if sum := w.capacity(t).Usage; sum.MemoryBytes != 0 || sum.FilesBytes != 0 {
		t.Errorf("nobody is there and takes %+v", sum)
	}
}

// TestHostIsFull: a create that the host's memory or disk cannot hold is refused
// at once, with numbers, and nothing of it is left. Several calls are not promised
// the same.
func TestHostIsFull(t *testing.T) {
	t.Parallel()
	for name, set := range map[string]func(*Options){
		"free memory":                     func(o *Options) { o.FreeMemory = 1 << 50 },
		"the disk of the state directory": func(o *Options) { o.FreeDisk = 1 << 50 },
	} {
		opts := options(t)
		set(&opts)
		w := serve(t, opts)
		a := w.want(t, 503, "POST", "/sandboxes", map[string]any{"sandboxID": "vm-a"}, "Idempotency-Key", "k")
		if text := string(a.body); a.code() != capacityUnavailable || !strings.Contains(text, name) || !strings.Contains(text, "1073741824 MiB are needed") {
			t.Errorf("%s", text)
		}
		w.want(t, 404, "GET", "/sandboxes/vm-a", nil)
		if left, err := w.store.dirs(); err != nil || len(left) != 0 {
			t.Errorf("left: %v, %v", left, err)
		}
	}
	w := serve(t, options(t))
	free := w.capacity(t).Host
	if free.MemoryFreeBytes <= 0 || free.DiskFreeBytes <= 0 {
		t.Fatalf("%+v", free)
	}
	half := need{disk: free.DiskFreeBytes/4*3 + 1}
	release, err := w.promise(half)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.promise(half); !errors.Is(err, errNoDisk) {
		t.Errorf("three quarters of the disk are promised twice: %v", err)
	}
	release()
	release, err = w.promise(half)
	if err != nil {
		t.Fatalf("what was given back is not free: %v", err)
	}
	release()
}

// TestSnapshotsNeedDisk: on a disk that is smaller than the sandbox's memory it is
// neither paused nor kept, and goes on; on one that is large enough the files
// show, and not its memory.
func TestSnapshotsNeedDisk(t *testing.T) {
	t.Parallel()
	opts := microOptions(t)
	opts.StateDir = state(t)
	if err := unix.Mount("tmpfs", opts.StateDir, "tmpfs", 0, "size=200m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(opts.StateDir, unix.MNT_DETACH); err != nil { // the stand-in's guest may still be ending
			t.Error(err)
		}
	})
	opts.Limits.Memory = 256 << 20
	w := serve(t, opts)
	path := w.create(t, "vm-a")
	for _, call := range []string{"/pause", "/snapshots"} {
		a := w.want(t, 507, "POST", path+call, nil)
		if a.code() != "insufficient_storage" || !strings.Contains(string(a.body), "256 MiB are needed") {
			t.Errorf("%s: %s", call, a.body)
		}
	}
	if got := w.state(t, path); got != "running" {
		t.Errorf("it is %s", got)
	}
	w.run(t, path, "alive", "true")
	if u := w.usageOf(t, path); u.MemoryBytes <= 0 || u.FilesBytes != 0 {
		t.Errorf("a microVM takes %+v", u)
	}
	if err := unix.Mount("", opts.StateDir, "", unix.MS_REMOUNT, "size=400m"); err != nil {
		t.Fatal(err)
	}
	w.want(t, 204, "POST", path+"/pause", nil)
	w.want(t, 204, "POST", path+"/pause", nil)
	u := w.usageOf(t, path)
	if u.MemoryBytes != 0 || u.DiskBytes <= 0 {
		t.Errorf("a paused microVM takes %+v", u)
	}
	if sum := w.capacity(t).Usage; sum.DiskBytes <= u.DiskBytes {
		t.Errorf("all takes %+v; the base template is missing beside the sandbox's %+v", sum, u)
	}
	w.want(t, 204, "POST", path+"/resume", nil)
	w.run(t, path, "resumed", "true")
}

// BenchmarkUsage is the cost of one sandbox in the list.
func BenchmarkUsage(b *testing.B) {
	w := serve(b, benchOptions(b, 0))
	w.create(b, newID(0))
	box := w.find(newID(0))
	for b.Loop() {
		if box.usage().MemoryBytes == nil {
			b.Fatal("nothing")
		}
	}
}
