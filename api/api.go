// Package api holds the descriptions of Berth's HTTP interfaces, which servers,
// clients and tests are held to, and what of them both ends must compute alike.
package api

import (
	"crypto/hmac"
	"crypto/sha256"
	_ "embed" // for the description
	"encoding/hex"
	"fmt"
)

// Sandboxd is the OpenAPI 3.1 description of the self-hosted sandbox server.
//
//go:embed sandboxd.yaml
var Sandboxd []byte

// StreamToken is the proof that lets a person's browser, which sends no header,
// watch one sandbox until expires (Unix seconds). Whoever has the server's key
// can make it; the key cannot be found from it.
func StreamToken(apiKey, sandboxID string, expires int64) string {
	mac := hmac.New(sha256.New, []byte(apiKey))
	fmt.Fprintf(mac, "berth stream\n%s\n%d", sandboxID, expires)
	return hex.EncodeToString(mac.Sum(nil))
}
