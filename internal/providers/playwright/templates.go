package playwright

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"berth/internal/computer"
	"berth/internal/providers"
)

// Limits of what is kept.
const (
	maxTemplates    = 32      // snapshots of all tenants, as sandboxd
	maxTemplateSize = 1 << 30 // bytes of one's stores: the browser stands still while they are copied
)

var (
	templateName = regexp.MustCompile(`^snapshot-[0-9a-f]{16}$`)
	errTooMany   = fmt.Errorf("%d snapshots are kept, which is the most; whoever operates the server can remove one: %w", maxTemplates, providers.ErrConflict)
	errTooLarge  = fmt.Errorf("what the sandbox stores has more than %d bytes, the most that a template may have: %w", maxTemplateSize, providers.ErrInvalid)
)

// stores are the parts of a profile that a template has: what pages store, but
// for cookies, which are in saved. Caches, history and settings are not.
var stores = []string{"Local Storage", "IndexedDB", "WebStorage", "Service Worker", "File System", "databases"}

// template is the file template.json of a snapshot.
type template struct {
	Tenant    string           `json:"tenant"` // whose sandboxes may be made from it; "" is a tenant too
	Display   computer.Display `json:"display"`
	CreatedAt time.Time        `json:"createdAt"`
	Saved     saved            `json:"saved"`
}

const templateFile = "template.json"

// templates are snapshots that sandboxes are made from: a directory for each,
// which may be removed at any time. It is safe for concurrent use.
type templates struct {
	dir string
	mu  sync.Mutex // of additions
}

// unfinished begins the names of directories that are no templates yet.
const unfinished = "new-"

// openTemplates makes the directory, and removes what was never finished.
func openTemplates(dir string) (*templates, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of templates: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read the templates: %w", err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), unfinished) {
			if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
				return nil, fmt.Errorf("remove an unfinished template: %w", err)
			}
		}
	}
	return &templates{dir: dir}, nil
}

// keep adds a template and returns its name. fill copies the stores into a
// directory.
func (t *templates) keep(what template, fill func(dir string) error) (_ string, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	entries, err := os.ReadDir(t.dir)
	if err != nil {
		return "", fmt.Errorf("read the templates: %w", err)
	}
	if len(entries) >= maxTemplates {
		return "", errTooMany
	}
	var id [8]byte
	if _, err := rand.Read(id[:]); err != nil {
		return "", err
	}
	name := "snapshot-" + hex.EncodeToString(id[:])
	dir := filepath.Join(t.dir, unfinished+name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", fmt.Errorf("make a template's directory: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()
	if err := fill(filepath.Join(dir, "Default")); err != nil {
		return "", err
	}
	if err := writeSynced(filepath.Join(dir, templateFile), what); err != nil {
		return "", fmt.Errorf("keep a template: %w", err)
	}
	if err := os.Rename(dir, filepath.Join(t.dir, name)); err != nil {
		return "", fmt.Errorf("keep a template: %w", err)
	}
	return name, syncDir(t.dir)
}

// find returns a tenant's template and its directory.
func (t *templates) find(name, tenant string) (template, string, error) {
	var out template
	unknown := fmt.Errorf("unknown template %.64q; known is what a snapshot of the same tenant on this server was named: %w", name, providers.ErrInvalid)
	if !templateName.MatchString(name) {
		return out, "", unknown
	}
	dir := filepath.Join(t.dir, name)
	raw, err := readRegular(filepath.Join(dir, templateFile), maxSaved)
	if errors.Is(err, fs.ErrNotExist) {
		return out, "", unknown
	}
	if err == nil {
		err = json.Unmarshal(raw, &out)
	}
	if err == nil && out.Saved.Version != savedVersion {
		err = fmt.Errorf("it has version %d, and this program knows %d", out.Saved.Version, savedVersion)
	}
	if err != nil {
		return out, "", fmt.Errorf("template %s cannot be read: %w: %w", name, err, providers.ErrUnavailable)
	}
	if out.Tenant != tenant {
		return out, "", unknown
	}
	return out, dir, nil
}

// Snapshot keeps what a sandbox stores, and its open pages, as a template for
// sandboxes of the same tenant on this server; the name is a Spec.Template. It
// waits for the batch under way. The sandbox goes on; while its stores are
// copied it stands still, which takes milliseconds for megabytes. It may be
// paused. 32 are kept at most, and another is ErrConflict.
func (p *Provider) Snapshot(ctx context.Context, vm string) (string, error) {
	p.mu.Lock()
	b := p.boxes[vm]
	shelved := b != nil && b.paused != nil
	p.mu.Unlock()
	var name string
	var err error
	if shelved {
		err = p.still(ctx, vm, func(ctx context.Context, b *slot) error {
			name, err = p.keepPaused(ctx, b)
			return err
		})
	} else {
		name, err = p.keepRunning(ctx, vm)
	}
	if err != nil {
		return "", fmt.Errorf("snapshot of vm %s: %w", vm, err)
	}
	p.log.Info("kept as a template", "vm", vm, "template", name)
	return name, nil
}

func (p *Provider) keepPaused(ctx context.Context, b *slot) (string, error) {
	if b.paused == nil {
		return "", fmt.Errorf("it was resumed at this moment; ask again: %w", providers.ErrConflict)
	}
	state, err := readSaved(filepath.Join(b.paused.dir, pausedFile))
	if err != nil {
		return "", fmt.Errorf("%w: %w", err, providers.ErrUnavailable)
	}
	name, err := p.kept.keep(b.paused.rec.template(state), func(to string) error {
		return copyStores(ctx, filepath.Join(b.paused.dir, "profile", "Default"), to)
	})
	return name, blameDisk(ctx, err)
}

func (p *Provider) keepRunning(ctx context.Context, vm string) (string, error) {
	s, done, err := p.use(vm)
	if err != nil {
		return "", err
	}
	defer done()
	if err := s.take(ctx); err != nil {
		return "", err
	}
	defer s.pass()
	conn, err := s.link(ctx)
	if err != nil {
		return "", err
	}
	state, err := s.save(ctx, conn, true)
	if err != nil {
		return "", s.blame(ctx, conn, err)
	}
	s.mu.Lock()
	rec := s.rec
	s.mu.Unlock()
	name, err := p.kept.keep(rec.template(state), func(to string) error {
		thaw, err := s.proc.freeze(ctx)
		if err != nil {
			return err
		}
		defer thaw()
		p.opts.edge("frozen")
		return copyStores(ctx, filepath.Join(s.dir, "profile", "Default"), to)
	})
	if err != nil && s.isDead() {
		return "", s.lost()
	}
	return name, blameDisk(ctx, err)
}

// template describes a snapshot of a sandbox. What it has not reported yet is
// not its copies' to report.
func (r record) template(state saved) template {
	state.Dialogs, state.Downloads = nil, nil
	return template{Tenant: r.Tenant, Display: r.Display, CreatedAt: time.Now().UTC(), Saved: state}
}

// blameDisk gives a failed copy one of the package's errors.
func blameDisk(ctx context.Context, err error) error {
	switch {
	case err == nil, errors.Is(err, providers.ErrConflict), errors.Is(err, providers.ErrInvalid):
		return err
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return fmt.Errorf("%w: %w", err, providers.ErrUnavailable)
}

// startFrom starts a browser from a template.
func (p *Provider) startFrom(ctx context.Context, spec providers.Spec) (*sandbox, error) {
	what, from, err := p.kept.find(spec.Template, spec.Tenant)
	if err != nil {
		return nil, err
	}
	dir, err := p.state.newBrowserDir()
	if err != nil {
		return nil, fmt.Errorf("make the browser's directory: %w", err)
	}
	if err := copyStores(ctx, filepath.Join(from, "Default"), filepath.Join(dir, "profile", "Default")); err != nil {
		return nil, errors.Join(blameDisk(ctx, err), removeAll(dir))
	}
	return p.boot(ctx, dir, record{Version: recordVersion, Display: spec.Display, Env: spec.Env}, &what.Saved)
}

// copyStores copies the stores of a profile's directory that are there. Only
// regular files and directories are copied, and no link is followed, whatever a
// browser may have put into its profile.
func copyStores(ctx context.Context, from, to string) error {
	if err := os.MkdirAll(to, 0o700); err != nil {
		return err
	}
	source, err := os.OpenRoot(from)
	if err != nil {
		return err
	}
	defer func() { _ = source.Close() }() // only read
	left := int64(maxTemplateSize)
	for _, store := range stores {
		if info, err := source.Lstat(store); errors.Is(err, fs.ErrNotExist) || err == nil && !info.IsDir() {
			continue
		}
		err := fs.WalkDir(source.FS(), store, func(path string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case ctx.Err() != nil:
				return context.Cause(ctx)
			case d.IsDir():
				return os.MkdirAll(filepath.Join(to, path), 0o700)
			case !d.Type().IsRegular():
				return nil
			}
			n, err := copyFile(source, path, filepath.Join(to, path), left)
			left -= n
			return err
		})
		if err != nil {
			return fmt.Errorf("copy %s: %w", store, err)
		}
	}
	return nil
}

// copyFile copies a file of at most limit bytes.
func copyFile(from *os.Root, name, to string, limit int64) (n int64, err error) {
	in, err := from.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return 0, err
	}
	defer func() { _ = in.Close() }() // only read
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	n, err = io.Copy(out, io.LimitReader(in, limit+1))
	if err == nil && n > limit {
		err = errTooLarge
	}
	return n, err
}
