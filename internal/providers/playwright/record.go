package playwright

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"berth/internal/computer"
)

// recordVersion changes when older records can no longer be read.
const recordVersion = 1

// record is what StateDir keeps of one browser, enough to take it over. A
// record without VM is a spare's.
type record struct {
	Version   int               `json:"version"`
	VM        string            `json:"vm,omitempty"`
	Fence     uint64            `json:"fence,omitempty"`
	Tenant    string            `json:"tenant,omitempty"`
	Role      string            `json:"role,omitempty"`
	Owner     string            `json:"owner,omitempty"`
	Session   string            `json:"session,omitempty"`
	Display   computer.Display  `json:"display"`
	PID       int               `json:"pid"`
	Started   string            `json:"started"` // of the process, in clock ticks since boot
	Endpoint  string            `json:"endpoint"`
	CreatedAt time.Time         `json:"createdAt"`
	Metadata  map[string]string `json:"metadata,omitempty"`
	Env       map[string]string `json:"env,omitempty"`
}

// held is what an action is about to press, written before the press and
// cleared after the release, so that a successor releases what a crash left
// down; and where the pointer is, which pages are open and which is active, as
// of the last batch.
type held struct {
	Keys    []string          `json:"keys,omitempty"`
	Buttons []computer.Button `json:"buttons,omitempty"`
	Cursor  computer.Point    `json:"cursor"`
	Active  string            `json:"active,omitempty"` // CDP target of the active page
	Pages   []string          `json:"pages,omitempty"`  // CDP targets, in the order opened
}

const (
	recordFile = "sandbox.json"
	pausedFile = "paused.json" // there while the sandbox is paused, or on its way; see saved
	heldFile   = "held.json"
	bootFile   = "boot.json"
)

// writeJSON replaces a file atomically. It does not sync: what it describes
// does not survive the machine either, and a process's crash loses no write.
func writeJSON(path string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode %s: %w", filepath.Base(path), err)
	}
	if err := os.WriteFile(path+".new", raw, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

func readJSON(path string, v any) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return fmt.Errorf("decode %s: %w", path, err)
	}
	return nil
}

// state is the directory that a provider owns:
//
//	lock                    held with flock while a provider lives
//	boot.json               the boot id
//	browsers/<random>/      one browser: sandbox.json, held.json, paused.json, browser.log, profile/, downloads/
//	templates/<name>/       one snapshot: template.json, Default/ (parts of a profile)
type state struct {
	dir       string
	lock      *os.File
	temporary bool
}

// openState makes the directory and takes its lock, for which it waits until
// ctx ends: the process that has it may be about to hand over.
func openState(ctx context.Context, dir string) (*state, error) {
	s := &state{dir: dir}
	if dir == "" {
		made, err := os.MkdirTemp("", "berth-playwright-")
		if err != nil {
			return nil, fmt.Errorf("make state directory: %w", err)
		}
		s.dir, s.temporary = made, true
	}
	abs, err := filepath.Abs(s.dir)
	if err != nil {
		return nil, err
	}
	s.dir = abs
	if err := os.MkdirAll(filepath.Join(s.dir, "browsers"), 0o700); err != nil {
		return nil, fmt.Errorf("make state directory: %w", err)
	}
	s.lock, err = os.OpenFile(filepath.Join(s.dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := syscall.Flock(int(s.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return s, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", s.dir, err), s.lock.Close())
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("state directory %s is another process's: %w", s.dir, context.Cause(ctx)), s.lock.Close())
		}
	}
}

// close releases the lock, by word: a process that this one is just starting
// may have the file too, for a moment.
func (s *state) close() error {
	err := errors.Join(syscall.Flock(int(s.lock.Fd()), syscall.LOCK_UN), s.lock.Close())
	if s.temporary {
		err = errors.Join(err, os.RemoveAll(s.dir))
	}
	return err
}

// newBrowserDir makes an empty directory for one browser.
func (s *state) newBrowserDir() (string, error) {
	var id [6]byte
	if _, err := rand.Read(id[:]); err != nil {
		return "", err
	}
	dir := filepath.Join(s.dir, "browsers", hex.EncodeToString(id[:]))
	return dir, os.MkdirAll(filepath.Join(dir, "downloads"), 0o700)
}

// browsers lists the browsers' directories.
func (s *state) browsers() ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "browsers"))
	if err != nil {
		return nil, err
	}
	var dirs []string
	for _, e := range entries {
		dirs = append(dirs, filepath.Join(s.dir, "browsers", e.Name()))
	}
	return dirs, nil
}

// bootID returns the id of the server's present life. It is renewed when the
// machine was booted since, and when lost is set: when there were sandboxes
// and none of them lives.
func (s *state) bootID(lost bool) (string, error) {
	kernel, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read boot id: %w", err)
	}
	var boot struct{ ID, Kernel string }
	path := filepath.Join(s.dir, bootFile)
	err = readJSON(path, &boot)
	if err == nil && boot.Kernel == strings.TrimSpace(string(kernel)) && boot.ID != "" && !lost {
		return boot.ID, nil
	}
	boot.ID, boot.Kernel = rand.Text(), strings.TrimSpace(string(kernel))
	return boot.ID, writeJSON(path, boot)
}

// removeAll removes a browser's directory. A process that is just ending may
// write while we remove, so it tries again for a while.
func removeAll(dir string) error {
	var err error
	for range 20 {
		if err = os.RemoveAll(dir); err == nil {
			return nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return fmt.Errorf("remove %s: %w", dir, err)
}
