package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// Both configurations are accepted by the server; production's with the users
// block of dev.conf beside it, as its comment says.
func TestConfigurationsAreValid(t *testing.T) {
	dev, err := os.ReadFile("dev.conf")
	if err != nil {
		t.Fatal(err)
	}
	opts, err := server.ProcessConfigFile("dev.conf")
	if err != nil {
		t.Fatal(err)
	}
	if len(opts.Users) != 5 || !strings.HasPrefix(opts.Host, "127.") {
		t.Errorf("dev.conf: %d users on %s", len(opts.Users), opts.Host)
	}
	for _, u := range opts.Users {
		if u.Permissions == nil || len(u.Permissions.Publish.Allow) == 0 || len(u.Permissions.Subscribe.Allow) == 0 {
			t.Errorf("dev.conf: user %s may do everything", u.Username)
		}
	}
	dir := t.TempDir()
	_, users, found := strings.Cut(string(dev), "authorization {")
	if !found {
		t.Fatal("dev.conf has no authorization block")
	}
	production, err := os.ReadFile("production.conf")
	if err != nil {
		t.Fatal(err)
	}
	cert, key := certificate(t)
	conf := strings.NewReplacer(`"server.pem"`, `"`+dir+`/server.pem"`, `"server.key"`, `"`+dir+`/server.key"`).Replace(string(production))
	for name, text := range map[string]string{"production.conf": conf, "users.conf": "authorization {" + users, "server.pem": cert, "server.key": key} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	opts, err = server.ProcessConfigFile(filepath.Join(dir, "production.conf"))
	if err != nil {
		t.Fatal(err)
	}
	if !opts.SyncAlways || opts.TLSConfig == nil || len(opts.Users) != 5 || opts.Cluster.Name != "berth" {
		t.Errorf("production.conf: sync always %v, TLS %v, %d users, cluster %q", opts.SyncAlways, opts.TLSConfig != nil, len(opts.Users), opts.Cluster.Name)
	}
}

func certificate(t *testing.T) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"nats-1"}}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})), string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}))
}
