package sandboxd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"berth/internal/computer"
	"berth/internal/sandboxd/firecracker"
)

// maxTemplates is how many snapshots are kept: each is as large as a sandbox's
// memory.
const maxTemplates = 32

var (
	errNoTemplate   = errors.New("there is no such template")
	errManyTemplate = fmt.Errorf("%d snapshots are kept, which is the most; delete one", maxTemplates)
)

// templateInfo is what is known about a template beside its snapshot.
type templateInfo struct {
	Display computer.Display `json:"display"`
	Tenant  string           `json:"tenant"`       // whose sandboxes may be made from it; "" is a tenant too
	Of      string           `json:"of,omitempty"` // what it depends on
	NoView  string           `json:"noView,omitempty"`
}

// templates are snapshots that sandboxes are made from: a directory for each. A
// running sandbox keeps the memory file that it came from also when that has been
// removed. It is safe for concurrent use.
type templates struct {
	dir string
	mu  sync.Mutex // of changes
}

// openTemplates makes the directory, and removes what was never finished.
func openTemplates(dir string) (*templates, error) {
	t := &templates{dir: dir}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of templates: %w", err)
	}
	names, err := t.names()
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if strings.HasPrefix(name, unfinished) {
			path := filepath.Join(dir, name)
			if err := errors.Join(firecracker.Discard(path), os.RemoveAll(path)); err != nil {
				return nil, fmt.Errorf("remove an unfinished template: %w", err)
			}
		}
	}
	return t, nil
}

// unfinished begins the names of directories that are no templates yet.
const unfinished = "new-"

func (t *templates) names() ([]string, error) {
	entries, err := os.ReadDir(t.dir)
	if err != nil {
		return nil, fmt.Errorf("read the templates: %w", err)
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, nil
}

// scratch makes a directory that is gone with the next start at the latest.
func (t *templates) scratch() (string, error) {
	dir := filepath.Join(t.dir, unfinished+randomHex(8))
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", fmt.Errorf("make a template's directory: %w", err)
	}
	return dir, nil
}

func (t *templates) files(name string) firecracker.Snapshot {
	dir := filepath.Join(t.dir, name)
	return firecracker.Snapshot{State: filepath.Join(dir, "state"), Memory: filepath.Join(dir, "memory")}
}

// find returns what is known about a template, or errNoTemplate.
func (t *templates) find(name string) (templateInfo, error) {
	var info templateInfo
	if !identifier.MatchString(name) || strings.HasPrefix(name, unfinished) {
		return info, errNoTemplate
	}
	raw, err := os.ReadFile(filepath.Join(t.dir, name, "template.json"))
	if errors.Is(err, os.ErrNotExist) {
		return info, errNoTemplate
	}
	if err == nil {
		err = json.Unmarshal(raw, &info)
	}
	if err != nil {
		return info, fmt.Errorf("read a template: %w", err)
	}
	return info, nil
}

// keep has write make the files of a new template.
func (t *templates) keep(ctx context.Context, name string, info templateInfo, write func(context.Context, firecracker.Snapshot) error) (err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	names, err := t.names()
	if err != nil {
		return err
	}
	if len(names) >= maxTemplates+2 { // the base, and what makes it
		return errManyTemplate
	}
	dir, err := t.scratch()
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	if err := write(ctx, firecracker.Snapshot{State: filepath.Join(dir, "state"), Memory: filepath.Join(dir, "memory")}); err != nil {
		return err
	}
	raw, err := json.Marshal(info)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "template.json"), raw, 0o600)
	}
	if err == nil {
		err = os.Rename(dir, filepath.Join(t.dir, name))
	}
	if err != nil {
		return fmt.Errorf("keep a template: %w", err)
	}
	return nil
}

// remove removes a template; sandboxes that were made from it go on.
func (t *templates) remove(name string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, err := t.find(name); err != nil {
		return err
	}
	// By another name first: nobody finds one whose files are partly gone.
	dir := filepath.Join(t.dir, unfinished+randomHex(8))
	err := os.Rename(filepath.Join(t.dir, name), dir)
	if err == nil {
		err = os.RemoveAll(dir)
	}
	if err != nil {
		return fmt.Errorf("remove a template: %w", err)
	}
	return nil
}
