// Package api holds the descriptions of Berth's HTTP interfaces. They are the
// truth that servers, clients and tests are held to.
package api

import _ "embed" // for the description

// Sandboxd is the OpenAPI 3.1 description of the self-hosted sandbox server.
//
//go:embed sandboxd.yaml
var Sandboxd []byte
