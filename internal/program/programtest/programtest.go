// Package programtest runs testscript files against a program, with a NATS
// server at hand: $NATS_URL is in each script's environment.
package programtest

import (
	"context"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rogpeppe/go-internal/testscript"

	"berth/internal/natsd"
)

// Run runs every script of dir. Beside testscript's own commands they have
//
//	await stream NAME       until the stream exists
//	await key BUCKET KEY    until the key has a value
//	terminate               sends SIGTERM to every program in the background
//
// The first two wait for at most 20 s.
func Run(t *testing.T, dir string) {
	testscript.Run(t, testscript.Params{
		Dir: dir,
		Setup: func(env *testscript.Env) error {
			srv, err := natsd.Start(natsd.Options{StoreDir: env.WorkDir + "/nats", Addr: "127.0.0.1:0"})
			if err != nil {
				return err
			}
			env.Defer(srv.Shutdown)
			env.Setenv("NATS_URL", srv.URL())
			env.Setenv("HOME", env.WorkDir)
			nc, err := nats.Connect("", srv.InProcess())
			if err != nil {
				return err
			}
			env.Defer(nc.Close)
			env.Values["nats"] = nc
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"await": await, "terminate": terminate},
	})
}

func terminate(ts *testscript.TestScript, _ bool, _ []string) {
	for _, cmd := range ts.BackgroundCmds() {
		ts.Check(cmd.Process.Signal(syscall.SIGTERM))
	}
}

func await(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: await stream NAME | await key BUCKET KEY")
	}
	js, err := jetstream.New(ts.Value("nats").(*nats.Conn))
	ts.Check(err)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for {
		var err error
		switch args[0] {
		case "stream":
			_, err = js.Stream(ctx, args[1])
		case "key":
			var bucket jetstream.KeyValue
			if bucket, err = js.KeyValue(ctx, args[1]); err == nil {
				_, err = bucket.Get(ctx, args[2])
			}
		default:
			ts.Fatalf("await %s?", args[0])
		}
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			ts.Fatalf("await %v: %v", args, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}
