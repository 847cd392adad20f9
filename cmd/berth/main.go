// Command berth is the person's tool: it runs the whole stack on one machine,
// runs one loop, and looks at and operates a running fleet.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"

	"berth/internal/program"
	"berth/internal/sandboxd"
)

// command is one of berth's commands.
type command struct {
	name    string
	args    string // synopsis of its arguments
	summary string // one line
	detail  string // the rest of its -h
	local   bool   // it speaks to no server: no --server, no --json
	run     func(ctx context.Context, c *call) error
	flags   func(c *call) // registers its own flags
}

// call is one invocation of a command.
type call struct {
	cmd    *command
	flags  *flag.FlagSet
	args   []string // positional
	stdin  io.Reader
	stdout io.Writer
	stderr io.Writer

	server string // --server
	json   bool   // --json
	opts   any    // what the command's own flags fill
}

// usageError is bad usage: exit 2 with a hint at -h.
type usageError struct{ msg string }

func (e *usageError) Error() string { return e.msg }

func badUsage(format string, args ...any) error { return &usageError{fmt.Sprintf(format, args...)} }

// inputError is bad input, such as a script: exit 2, every fault on its line.
type inputError struct {
	what   string
	faults []error
}

func (e *inputError) Error() string {
	var b strings.Builder
	b.WriteString(e.what)
	for _, f := range e.faults {
		b.WriteString("\n  " + f.Error())
	}
	return b.String()
}

// exitError carries another exit code; its message, if any, has been printed.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit %d", int(e)) }

// Exit codes of `berth run` beside program's: it was interrupted.
const exitInterrupted = 128 + int(syscall.SIGINT)

func commands() []*command {
	return slices.Concat([]*command{
		devCommand(), runCommand(), provisionCommand(), serversCommand(), psCommand(), killCommand(),
	}, sandboxCommands(), []*command{
		cordonCommand(), uncordonCommand(), drainCommand(), eventsCommand(), loopCommand(), replayCommand(), dlqCommand(),
		setupCommand(), versionCommand(),
	})
}

func main() {
	sandboxd.TakeOver() // in a desktop's own processes it does not return
	os.Exit(run())
}

func run() int {
	ctx, stop := program.Signals(context.Background())
	defer stop()
	return perform(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
}

// perform runs one command line and returns the exit code.
func perform(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	all := commands()
	if len(args) == 0 {
		usage(stderr, all)
		return program.ExitUsage
	}
	name := args[0]
	switch name {
	case "-h", "--help", "-help", "help":
		if len(args) == 1 {
			usage(stdout, all)
			return program.ExitOK
		}
		return perform(ctx, []string{args[1], "-h"}, stdin, stdout, stderr)
	}
	i := slices.IndexFunc(all, func(c *command) bool { return c.name == name })
	if i < 0 {
		fmt.Fprintf(stderr, "berth: there is no command %q", name)
		if near := nearest(name, all); near != "" {
			fmt.Fprintf(stderr, "; did you mean `berth %s`?", near)
		}
		fmt.Fprintf(stderr, "\n`berth -h` lists them.\n")
		return program.ExitUsage
	}
	return all[i].invoke(ctx, args[1:], stdin, stdout, stderr)
}

func (cmd *command) invoke(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	c := &call{cmd: cmd, stdin: stdin, stdout: stdout, stderr: stderr}
	c.flags = flag.NewFlagSet(cmd.name, flag.ContinueOnError)
	c.flags.SetOutput(io.Discard)
	if !cmd.local {
		c.flags.StringVar(&c.server, "server", "", "NATS `URL` (default NATS_URL, else nats://127.0.0.1:4222, where `berth dev` serves)")
		c.flags.BoolVar(&c.json, "json", false, "print JSON")
	}
	if cmd.flags != nil {
		cmd.flags(c)
	}
	err := c.parse(args)
	if errors.Is(err, flag.ErrHelp) {
		c.help(stdout)
		return program.ExitOK
	}
	if err == nil {
		err = cmd.run(ctx, c)
	}
	var usage *usageError
	var input *inputError
	var exit exitError
	var asked program.Stopped
	switch {
	case err == nil:
		return program.ExitOK
	case errors.As(err, &exit):
		return int(exit)
	case errors.As(err, &usage):
		fmt.Fprintf(stderr, "berth %s: %v\n`berth %s -h` says how.\n", cmd.name, err, cmd.name)
		return program.ExitUsage
	case errors.As(err, &input):
		fmt.Fprintf(stderr, "berth %s: %v\n", cmd.name, err)
		return program.ExitUsage
	case ctx.Err() != nil && (errors.As(err, &asked) || errors.Is(err, context.Canceled)):
		return exitInterrupted
	default:
		fmt.Fprintf(stderr, "berth %s: %v\n", cmd.name, err)
		return program.ExitFailed
	}
}

// parse takes flags before, between and after the arguments.
func (c *call) parse(args []string) error {
	for {
		if err := c.flags.Parse(args); err != nil {
			if errors.Is(err, flag.ErrHelp) {
				return err
			}
			return badUsage("%v", err)
		}
		rest := c.flags.Args()
		if len(rest) == 0 {
			return nil
		}
		if len(args) > len(rest) && args[len(args)-len(rest)-1] == "--" {
			c.args = append(c.args, rest...)
			return nil
		}
		c.args = append(c.args, rest[0])
		args = rest[1:]
	}
}

// noArgs refuses arguments.
func (c *call) noArgs() error {
	if len(c.args) > 0 {
		return badUsage("takes no argument, got %q", c.args[0])
	}
	return nil
}

// oneArg returns the only argument.
func (c *call) oneArg(what string) (string, error) {
	switch len(c.args) {
	case 0:
		return "", badUsage("needs %s", what)
	case 1:
		return c.args[0], nil
	default:
		return "", badUsage("takes one argument, got %q too", c.args[1])
	}
}

func (c *call) help(w io.Writer) {
	line := "berth " + c.cmd.name
	if c.cmd.args != "" {
		line += " " + c.cmd.args
	}
	fmt.Fprintf(w, "%s\n\nUsage: %s\n", c.cmd.summary, line)
	if c.cmd.detail != "" {
		fmt.Fprintf(w, "\n%s\n", strings.TrimSpace(c.cmd.detail))
	}
	any := false
	c.flags.VisitAll(func(f *flag.Flag) {
		if !any {
			fmt.Fprint(w, "\nFlags:\n")
			any = true
		}
		arg, text := flag.UnquoteUsage(f)
		left := "--" + f.Name
		if arg != "" {
			left += " " + arg
		}
		if f.DefValue != "" && f.DefValue != "false" && f.DefValue != "0" && f.DefValue != "0s" {
			text += fmt.Sprintf(" (default %s)", f.DefValue)
		}
		fmt.Fprintf(w, "  %-22s %s\n", left, text)
	})
	if !c.cmd.local {
		fmt.Fprintf(w, "\nEnvironment:\n%s", program.EnvironmentHelp)
	}
}

func usage(w io.Writer, all []*command) {
	fmt.Fprint(w, "Berth decides where sandboxes for computer use live, and gets every action to the right one.\n\nUsage: berth COMMAND [flags] [arguments]\n\n")
	for _, c := range all {
		fmt.Fprintf(w, "  %-10s %s\n", c.name, c.summary)
	}
	fmt.Fprint(w, "\n`berth COMMAND -h` describes one. Exit codes: 0 done, 1 it failed, 2 bad usage or input.\n")
}

// nearest is the command whose name is at most two edits away, or "".
func nearest(name string, all []*command) string {
	best, at := 3, ""
	for _, c := range all {
		if d := edits(name, c.name); d < best {
			best, at = d, c.name
		}
	}
	return at
}

// edits is the number of insertions, deletions, changes and swaps of
// neighbours that turn a into b.
func edits(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			d := min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				d = min(d, rows[i-2][j-2]+1)
			}
			rows[i][j] = d
		}
	}
	return rows[len(a)][len(b)]
}
