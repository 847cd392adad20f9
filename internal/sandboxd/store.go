package sandboxd

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"berth/internal/computer"
	"berth/internal/sandboxd/jail"
)

// maxSocketPath is the longest path of a unix socket (unix(7)).
const maxSocketPath = 107

// record is what a later process needs to take a sandbox over.
type record struct {
	Version   int               `json:"version"`
	ID        string            `json:"id,omitempty"` // "": a spare
	Key       string            `json:"key,omitempty"`
	Template  string            `json:"template"`
	Slot      int               `json:"slot"`
	Guest     Identity          `json:"guest"`
	Display   computer.Display  `json:"display"`
	Metadata  map[string]string `json:"metadata,omitempty"`
	StartedAt time.Time         `json:"startedAt"`
	EndAt     time.Time         `json:"endAt,omitzero"`
}

const recordVersion = 1

// store is the state directory: a lock, the boot id, and a directory for each
// guest, named by chance and not by its sandbox, with its socket and record.
type store struct {
	dir  string
	lock *os.File
}

func openStore(dir string) (*store, error) {
	if err := os.MkdirAll(filepath.Join(dir, "guests"), 0o700); err != nil {
		return nil, fmt.Errorf("make the state directory: %w", err)
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("find the state directory: %w", err)
	}
	if path := jail.SocketPath(filepath.Join(dir, "guests", "0123456789abcdef")); len(path) > maxSocketPath {
		return nil, fmt.Errorf("the state directory's path is too long: sockets below it would have %d characters, at most %d", len(path), maxSocketPath)
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the state directory: %w", err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("another sandboxd has the state directory %s", dir), lock.Close())
	}
	return &store{dir: dir, lock: lock}, nil
}

// close gives the lock back by word: a process that this one is just starting may
// have the file too, for a moment.
func (s *store) close() error {
	return errors.Join(syscall.Flock(int(s.lock.Fd()), syscall.LOCK_UN), s.lock.Close())
}

// newDir makes the directory of a guest.
func (s *store) newDir() (string, error) {
	dir := filepath.Join(s.dir, "guests", randomHex(8))
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", fmt.Errorf("make a guest's directory: %w", err)
	}
	return dir, nil
}

func randomHex(n int) string {
	b := make([]byte, n)
	rand.Read(b) // never fails; see crypto/rand
	return hex.EncodeToString(b)
}

// dirs lists the guests' directories.
func (s *store) dirs() ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "guests"))
	if err != nil {
		return nil, fmt.Errorf("read the state directory: %w", err)
	}
	var out []string
	for _, e := range entries {
		out = append(out, filepath.Join(s.dir, "guests", e.Name()))
	}
	return out, nil
}

func recordPath(dir string) string { return filepath.Join(dir, "record.json") }

func readRecord(dir string) (record, error) {
	var r record
	raw, err := os.ReadFile(recordPath(dir))
	if err == nil {
		err = json.Unmarshal(raw, &r)
	}
	if err == nil && r.Version != recordVersion {
		err = fmt.Errorf("version %d, want %d", r.Version, recordVersion)
	}
	if err != nil {
		return record{}, fmt.Errorf("read a guest's record: %w", err)
	}
	return r, nil
}

// writeRecord replaces a record; readers see the old one or the new one.
func writeRecord(dir string, r record) error {
	r.Version = recordVersion
	raw, err := json.Marshal(r)
	if err == nil {
		err = writeFile(recordPath(dir), raw)
	}
	if err != nil {
		return fmt.Errorf("write a guest's record: %w", err)
	}
	return nil
}

func writeFile(path string, raw []byte) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, raw, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// bootID returns the boot id, a new one where there is none or renew is set.
func (s *store) bootID(renew bool) (string, error) {
	path := filepath.Join(s.dir, "boot-id")
	raw, err := os.ReadFile(path)
	if id := strings.TrimSpace(string(raw)); err == nil && id != "" && !renew {
		return id, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	id := randomHex(16)
	if err := writeFile(path, []byte(id+"\n")); err != nil {
		return "", fmt.Errorf("write the boot id: %w", err)
	}
	return id, nil
}
