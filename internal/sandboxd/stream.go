package sandboxd

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	_ "embed" // for the pages
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"berth/api"
)

// framePause is how often a change is looked for.
const framePause = 150 * time.Millisecond

// frameWithin bounds the wait for a change; the page asks again.
const frameWithin = 20 * time.Second

//go:embed view.html
var viewHTML string

//go:embed pictures.html
var picturesHTML string

// The pages of the live view: noVNC, and pictures where that cannot be.
var (
	viewPage     = template.Must(template.New("view").Parse(viewHTML))
	picturesPage = template.Must(template.New("pictures").Parse(picturesHTML))
)

// getStream is the live view: a page that shows the screen as it changes, and
// with a link that grants control takes keyboard and pointer. Where it cannot be
// that, it is a page of pictures to look at, which says why.
func (s *Server) getStream(w http.ResponseWriter, r *http.Request, access api.Access) error {
	b, err := s.running(r.PathValue("id"))
	if err != nil {
		return err
	}
	rec, nonce, kind, why := b.record(), randomHex(16), viewPage, ""
	images := "data: blob:"
	if err := s.viewable(r.Context(), b); err != nil {
		kind, why, images = picturesPage, err.Error(), "blob:"
	}
	var page bytes.Buffer
	err = kind.Execute(&page, map[string]any{
		"ID": rec.ID, "Width": rec.Display.Width, "Height": rec.Display.Height, "Nonce": nonce, "Why": why, "Control": access == api.Control,
		"RFB": "/sandboxes/" + rec.ID + "/stream/rfb?" + r.URL.RawQuery, "Frame": "/sandboxes/" + rec.ID + "/stream/frame?" + r.URL.RawQuery,
	})
	if err != nil {
		return fmt.Errorf("make the page: %w", err)
	}
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", "default-src 'none'; img-src "+images+"; connect-src 'self'; style-src 'nonce-"+nonce+"'; script-src 'nonce-"+nonce+
		"'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-store")
	s.write(w, http.StatusOK, page.Bytes())
	return nil
}

// Links to the live view.
const (
	linkFor    = time.Hour // unless the caller says otherwise
	maxLinkFor = 24 * time.Hour
)

// postLink makes a link for a person's browser, which has no key.
func (s *Server) postLink(w http.ResponseWriter, r *http.Request) error {
	body := struct {
		Access  api.Access `json:"access"`
		Seconds *int64     `json:"seconds"`
	}{Access: api.Look}
	if err := s.read(w, r, &body); err != nil {
		return err
	}
	if body.Access != api.Look && body.Access != api.Control {
		return badInput("access: %s or %s", api.Look, api.Control)
	}
	valid := linkFor
	if body.Seconds != nil {
		if *body.Seconds < 1 || *body.Seconds > int64(maxLinkFor/time.Second) {
			return badInput("seconds: 1 to %d", int64(maxLinkFor/time.Second))
		}
		valid = time.Duration(*body.Seconds) * time.Second
	}
	b, err := s.running(r.PathValue("id"))
	if err != nil {
		return err
	}
	id, expires := b.record().ID, time.Now().Add(valid).Truncate(time.Second).UTC()
	q := url.Values{
		"access": {string(body.Access)}, "expires": {strconv.FormatInt(expires.Unix(), 10)},
		"token": {api.StreamToken(s.opts.APIKey, id, body.Access, expires.Unix())},
	}
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false) // people copy the path as it stands
	err = encoder.Encode(map[string]any{"path": "/sandboxes/" + id + "/stream?" + q.Encode(), "access": body.Access, "expiresAt": expires})
	if err != nil {
		return fmt.Errorf("encode a link: %w", err)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	s.write(w, http.StatusCreated, out.Bytes())
	return nil
}

// DefaultNoVNC is where Debian's package novnc has its files.
const DefaultNoVNC = "/usr/share/novnc"

// scriptsPath is where noVNC's modules are served; they are the same for all.
const scriptsPath = "/novnc/"

// scriptsMissing says why noVNC cannot be served; nil: it can.
func (s *Server) scriptsMissing() error {
	dir := cmp.Or(s.opts.NoVNC, DefaultNoVNC)
	if _, err := os.Stat(filepath.Join(dir, "core", "rfb.js")); err != nil {
		return fmt.Errorf("noVNC is not in %s of the server; on Debian: apt-get install --no-install-recommends novnc", dir)
	}
	return nil
}

// getScript serves a module of noVNC's, and nothing else of its directory.
func (s *Server) getScript(w http.ResponseWriter, r *http.Request) error {
	none := &problem{http.StatusNotFound, "notFound", "there is no such script"}
	name := r.PathValue("path")
	if path.Ext(name) != ".js" || !fs.ValidPath(name) || !strings.HasPrefix(name, "core/") && !strings.HasPrefix(name, "vendor/") {
		return none
	}
	raw, err := readBelow(cmp.Or(s.opts.NoVNC, DefaultNoVNC), name)
	if errors.Is(err, fs.ErrNotExist) {
		return none
	}
	if err != nil {
		return fmt.Errorf("read noVNC: %w", err)
	}
	w.Header().Set("Content-Type", "text/javascript; charset=utf-8")
	w.Header().Set("Cache-Control", "max-age=300")
	s.write(w, http.StatusOK, raw)
	return nil
}

// maxScript bounds one module, in bytes.
const maxScript = 4 << 20

// readBelow reads a file of a directory; a link out of it is not followed.
func readBelow(dir, name string) (raw []byte, err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, root.Close()) }()
	f, err := root.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return io.ReadAll(io.LimitReader(f, maxScript))
}

// getFrame answers with a picture as soon as the screen is another than the one
// named by after, or with 204 when that takes long. Berth-Frame names it. While
// it waits the sandbox counts as watched.
func (s *Server) getFrame(w http.ResponseWriter, r *http.Request, _ api.Access) error {
	b, err := s.running(r.PathValue("id"))
	if err != nil {
		return err
	}
	after := r.URL.Query().Get("after")
	ticker := time.NewTicker(framePause)
	defer ticker.Stop()
	for end := time.Now().Add(frameWithin); time.Now().Before(end); {
		now := time.Now().UTC()
		b.watched.Store(&now)
		done, err := b.use() // for each picture: a pause need not wait for a change
		if err != nil {
			return err
		}
		png, _, err := b.guest.Agent().screenshot(r.Context())
		done()
		if err != nil {
			return b.explain(r.Context(), err)
		}
		sum := sha256.Sum256(png)
		if name := hex.EncodeToString(sum[:8]); name != after {
			w.Header().Set("Content-Type", "image/png")
			w.Header().Set("Cache-Control", "no-store")
			w.Header().Set("Berth-Frame", name)
			s.write(w, http.StatusOK, png)
			return nil
		}
		select {
		case <-ticker.C:
		case <-b.gone:
			return errLost
		case <-r.Context().Done():
			return context.Cause(r.Context())
		case <-s.ctx.Done():
			return errClosed
		}
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
