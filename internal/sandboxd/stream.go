package sandboxd

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"html/template"
	"net/http"
	"time"
)

// framePause is how often a change is looked for.
const framePause = 150 * time.Millisecond

// frameWithin bounds the wait for a change; the page asks again.
const frameWithin = 20 * time.Second

var streamPage = template.Must(template.New("stream").Parse(`<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{.ID}} – live view</title>
<style>
  html, body { margin: 0; height: 100%; background: #15181d; color: #cdd3dc; font: 14px/1.4 system-ui, sans-serif; }
  body { display: flex; flex-direction: column; }
  header { padding: 6px 12px; }
  img { flex: 1; min-height: 0; object-fit: contain; }
</style>
<header>{{.ID}} · {{.Width}}×{{.Height}} · <span id="state" role="status">live, to look at</span></header>
<img id="view" alt="The screen of sandbox {{.ID}}">
<script nonce="{{.Nonce}}">
const view = document.getElementById("view"), state = document.getElementById("state");
async function watch() {
  for (let seen = "";;) {
    try {
      const answer = await fetch({{.Frame}} + "&after=" + seen);
      if (answer.status === 200) {
        seen = answer.headers.get("Berth-Frame");
        const old = view.src;
        view.src = URL.createObjectURL(await answer.blob());
        if (old) URL.revokeObjectURL(old);
      }
      if (answer.status === 404 || answer.status === 410) { state.textContent = "the sandbox has ended"; return; }
      if (answer.status === 401) { state.textContent = "this address is no longer valid"; return; }
      if (answer.ok) { state.textContent = "live, to look at"; continue; }
    } catch { }
    state.textContent = "no picture; trying again";
    await new Promise(r => setTimeout(r, 2000));
  }
}
watch();
</script>
</html>
`))

// getStream is the live view: a page that shows one frame after the other. One
// can look at it; it takes no input.
func (s *Server) getStream(w http.ResponseWriter, r *http.Request) error {
	b, err := s.running(r.PathValue("id"))
	if err != nil {
		return err
	}
	rec, nonce := b.record(), randomHex(16)
	var page bytes.Buffer
	err = streamPage.Execute(&page, map[string]any{
		"ID": rec.ID, "Width": rec.Display.Width, "Height": rec.Display.Height, "Nonce": nonce,
		"Frame": "/sandboxes/" + rec.ID + "/stream/frame?" + r.URL.RawQuery,
	})
	if err != nil {
		return fmt.Errorf("make the page: %w", err)
	}
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", "default-src 'none'; img-src blob:; connect-src 'self'; style-src 'unsafe-inline'; script-src 'nonce-"+nonce+"'; frame-ancestors 'none'")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-store")
	s.write(w, http.StatusOK, page.Bytes())
	return nil
}

// getFrame answers with a picture as soon as the screen is another than the one
// named by after, or with 204 when that takes long. Berth-Frame names it. While
// it waits the sandbox counts as watched.
func (s *Server) getFrame(w http.ResponseWriter, r *http.Request) error {
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
