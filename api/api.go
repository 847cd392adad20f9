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

// Access is what a link to the live view grants.
type Access string

// What can be granted.
const (
	Look    Access = "look"    // the screen, and nothing else
	Control Access = "control" // keyboard and pointer too
)

// StreamToken is the proof that lets a person's browser, which sends no header,
// see one sandbox until expires (Unix seconds), with the access that it names.
// Whoever has the server's key can make it; the key cannot be found from it, nor
// a token of other access.
func StreamToken(apiKey, sandboxID string, access Access, expires int64) string {
	mac := hmac.New(sha256.New, []byte(apiKey))
	fmt.Fprintf(mac, "berth stream\n%s\n%d", sandboxID, expires)
	if access != Look { // which is older than the word
		fmt.Fprintf(mac, "\n%s", access)
	}
	return hex.EncodeToString(mac.Sum(nil))
}
