package sandboxd

import (
	"bytes"
	"fmt"
	"html/template"
	"net/http"
	"time"
)

// framePause is the least time between two frames of a live view.
const framePause = 150 * time.Millisecond

// framesWithin bounds one connection of a live view; the page connects again.
const framesWithin = 10 * time.Minute

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
<img id="view" alt="The screen of sandbox {{.ID}}" src="{{.Frames}}">
<script nonce="{{.Nonce}}">
const view = document.getElementById("view"), state = document.getElementById("state");
view.onerror = () => {
  state.textContent = "no picture; trying again";
  setTimeout(() => { view.src = {{.Frames}} + "&again=" + Date.now(); state.textContent = "live, to look at"; }, 2000);
};
</script>
</html>
`))

// getStream is the live view: a page that shows the frames below. One can look
// at it; it takes no input.
func (s *Server) getStream(w http.ResponseWriter, r *http.Request) error {
	b, err := s.running(r.PathValue("id"))
	if err != nil {
		return err
	}
	rec, nonce := b.record(), randomHex(16)
	var page bytes.Buffer
	err = streamPage.Execute(&page, map[string]any{
		"ID": rec.ID, "Width": rec.Display.Width, "Height": rec.Display.Height, "Nonce": nonce,
		"Frames": "/sandboxes/" + rec.ID + "/stream/frames?" + r.URL.RawQuery,
	})
	if err != nil {
		return fmt.Errorf("make the page: %w", err)
	}
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Content-Security-Policy", "default-src 'none'; img-src 'self'; style-src 'unsafe-inline'; script-src 'nonce-"+nonce+"'; frame-ancestors 'none'")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-store")
	s.write(w, http.StatusOK, page.Bytes())
	return nil
}

// getFrames sends PNG pictures as multipart/x-mixed-replace, one whenever the
// screen has changed.
func (s *Server) getFrames(w http.ResponseWriter, r *http.Request) error {
	b, err := s.running(r.PathValue("id"))
	if err != nil {
		return err
	}
	control := http.NewResponseController(w)
	deadline(control.SetReadDeadline, 0)
	w.Header().Set("Content-Type", "multipart/x-mixed-replace; boundary=frame")
	w.Header().Set("Cache-Control", "no-store")
	if _, err := fmt.Fprint(w, "--frame\r\n"); err != nil {
		return nil
	}
	var last []byte
	ticker := time.NewTicker(framePause)
	defer ticker.Stop()
	for end := time.Now().Add(framesWithin); time.Now().Before(end); {
		png, _, err := b.guest.Agent().screenshot(r.Context())
		if err != nil {
			return nil // the sandbox has ended or the person left: so does the answer
		}
		if !bytes.Equal(png, last) {
			last = png
			deadline(control.SetWriteDeadline, writeWithin)
			// Browsers show a frame when the next boundary comes: it goes along at once.
			_, err := fmt.Fprintf(w, "Content-Type: image/png\r\nContent-Length: %d\r\n\r\n%s\r\n--frame\r\n", len(png), png)
			if err == nil {
				err = control.Flush()
			}
			if err != nil {
				return nil
			}
		}
		select {
		case <-ticker.C:
		case <-b.gone:
			return nil
		case <-r.Context().Done():
			return nil
		case <-s.ctx.Done():
			return nil
		}
	}
	return nil
}
