package e2b

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"berth/internal/providers"
)

// streamPort is where noVNC listens inside a sandbox.
const streamPort = 6080

// StreamURL starts the live view, to look on only, and returns noVNC's page
// with the password of this sandbox. Whoever has the URL can look on until the
// sandbox ends.
func (p *Provider) StreamURL(ctx context.Context, vm string) (string, error) {
	b, err := p.box(ctx, vm)
	if err != nil {
		return "", err
	}
	password := p.password(b.id)
	said, err := p.ask(ctx, b, 30*time.Second, "stream", password, strconv.Itoa(streamPort))
	if err != nil {
		return "", fmt.Errorf("stream of vm %s: %w", vm, err)
	}
	if said != "Z" {
		return "", fmt.Errorf("stream of vm %s: %.500s: %w", vm, strings.TrimPrefix(said, "M "), providers.ErrUnavailable)
	}
	u := url.URL{Scheme: "https", Host: fmt.Sprintf("%d-%s.%s", streamPort, b.id, b.domain), Path: "/vnc.html"}
	u.RawQuery = url.Values{"autoconnect": {"true"}, "view_only": {"true"}, "resize": {"scale"}, "password": {password}}.Encode()
	return u.String(), nil
}

// password is the same for every worker with the key. VNC takes eight
// characters.
func (p *Provider) password(id string) string {
	mac := hmac.New(sha256.New, []byte(p.opts.APIKey))
	mac.Write([]byte("live view of " + id))
	return strings.ToLower(base32.StdEncoding.EncodeToString(mac.Sum(nil)))[:8]
}
