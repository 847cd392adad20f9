package bus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Config is how a program reaches NATS; embed it in the program's own config.
type Config struct {
	URL      string `env:"NATS_URL"`                 // nats://[user:password@]host:port, comma list
	Creds    string `env:"NATS_CREDS"`               // path of a .creds file
	NKey     string `env:"NATS_NKEY"`                // path of an nkey seed file
	CA       string `env:"NATS_CA"`                  // path of a PEM bundle
	Cert     string `env:"NATS_CERT"`                // path of a client certificate
	Key      string `env:"NATS_KEY"`                 // path of its key
	User     string `env:"NATS_USER"`                // where the URL names none
	Password string `env:"NATS_PASSWORD,unset"`      // likewise; removed from the environment
	Inbox    string `env:"NATS_INBOX_PREFIX"`        // default _INBOX.<program>
	Wait     bool   `env:"NATS_WAIT" envDefault:"1"` // keep trying where the server is not there yet
}

// Validate lists every fault of the configuration.
func (c Config) Validate() []error {
	var errs []error
	for _, u := range strings.Split(c.URL, ",") {
		if u == "" {
			continue
		}
		p, err := url.Parse(strings.TrimSpace(u))
		switch {
		case err != nil:
			errs = append(errs, errors.New("NATS_URL: not a URL such as nats://127.0.0.1:4222"))
		case p.Scheme != "nats" && p.Scheme != "tls" && p.Scheme != "ws" && p.Scheme != "wss":
			errs = append(errs, fmt.Errorf("NATS_URL: scheme %q; want nats, tls, ws or wss", p.Scheme))
		case p.Host == "":
			errs = append(errs, errors.New("NATS_URL: no host"))
		}
	}
	if c.Creds != "" && c.NKey != "" {
		errs = append(errs, errors.New("NATS_CREDS and NATS_NKEY: set only one"))
	}
	if (c.Cert == "") != (c.Key == "") {
		errs = append(errs, errors.New("NATS_CERT and NATS_KEY: set both or none"))
	}
	return errs
}

// RedactURL removes passwords from a NATS URL list for logs and errors.
func RedactURL(list string) string {
	parts := strings.Split(list, ",")
	for i, u := range parts {
		if p, err := url.Parse(strings.TrimSpace(u)); err == nil {
			parts[i] = p.Redacted()
		} else {
			parts[i] = "(not a URL)"
		}
	}
	return strings.Join(parts, ",")
}

// Connect opens the connection of program. Where the server is not there it
// says so once a few seconds, naming the URL, and tries again until ctx ends,
// unless cfg.Wait is off. extra options come last.
//
// Nothing is buffered while the connection is down: a click that was published
// into a dead connection must fail, not arrive later.
func Connect(ctx context.Context, cfg Config, program string, log *slog.Logger, extra ...nats.Option) (*nats.Conn, error) {
	target := cfg.URL
	if target == "" {
		target = nats.DefaultURL
	}
	inbox := cfg.Inbox
	if inbox == "" {
		inbox = "_INBOX." + program
	}
	opts := []nats.Option{
		nats.Name("berth " + program),
		nats.CustomInboxPrefix(inbox),
		nats.MaxReconnects(-1),
		nats.ReconnectBufSize(-1),
		nats.ReconnectWait(250 * time.Millisecond),
		nats.ReconnectJitter(250*time.Millisecond, time.Second),
		nats.Timeout(3 * time.Second),
		nats.PingInterval(10 * time.Second),
		nats.MaxPingsOutstanding(2),
		nats.DrainTimeout(10 * time.Second),
		nats.DisconnectErrHandler(func(nc *nats.Conn, err error) {
			if err != nil && !nc.IsClosed() {
				log.Warn("NATS disconnected; reconnecting", "url", RedactURL(target), "err", err)
			}
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) { log.Info("NATS reconnected", "url", nc.ConnectedUrlRedacted()) }),
		nats.ErrorHandler(func(_ *nats.Conn, sub *nats.Subscription, err error) {
			subject := ""
			if sub != nil {
				subject = sub.Subject
			}
			log.Error("NATS error", "subject", subject, "err", err)
		}),
	}
	auth, err := cfg.options()
	if err != nil {
		return nil, err
	}
	opts = append(append(opts, auth...), extra...)
	for lastSaid := (time.Time{}); ; {
		nc, err := nats.Connect(target, opts...)
		if err == nil {
			return nc, nil
		}
		if errors.Is(err, nats.ErrAuthorization) || errors.Is(err, nats.ErrAuthExpired) {
			return nil, fmt.Errorf("NATS at %s refused the credentials: %w", RedactURL(target), err)
		}
		if !cfg.Wait {
			return nil, fmt.Errorf("no NATS at %s: %w; start one (`berth dev`, or nats-server -js) or set NATS_URL", RedactURL(target), err)
		}
		if time.Since(lastSaid) > 5*time.Second {
			log.Error("no NATS; trying again. Start one (`berth dev`, or nats-server -js) or set NATS_URL", "url", RedactURL(target), "err", err)
			lastSaid = time.Now()
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("no NATS at %s: %w", RedactURL(target), err)
		case <-time.After(500 * time.Millisecond):
		}
	}
}

func (c Config) options() ([]nats.Option, error) {
	var opts []nats.Option
	if c.Creds != "" {
		opts = append(opts, nats.UserCredentials(c.Creds))
	}
	if c.NKey != "" {
		o, err := nats.NkeyOptionFromSeed(c.NKey)
		if err != nil {
			return nil, fmt.Errorf("NATS_NKEY: %w", err)
		}
		opts = append(opts, o)
	}
	if c.User != "" {
		opts = append(opts, nats.UserInfo(c.User, c.Password))
	}
	if c.CA != "" {
		opts = append(opts, nats.RootCAs(c.CA))
	}
	if c.Cert != "" {
		opts = append(opts, nats.ClientCert(c.Cert, c.Key))
	}
	return opts, nil
}

// JetStream returns the JetStream context of a connection.
func JetStream(nc *nats.Conn) (jetstream.JetStream, error) {
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(5*time.Second))
	if err != nil {
		return nil, fmt.Errorf("JetStream: %w", err)
	}
	return js, nil
}
