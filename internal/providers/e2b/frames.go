package e2b

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"berth/internal/computer"
	"berth/internal/providers"
)

// record is what the script has said of a batch, as frames, each a line and the
// bytes that it announces:
//
//	B <actions>                                  it has begun
//	S <action>                                   a step begins
//	E <action> <kind> <code> <ms> <out> <err>    a step has ended; then out and err
//	P <action> <code> <ms> <size> 0              a picture; then it
//	Q <action> <code> <ms> 0 0                   a picture that the record does not keep
//	I <action>                                   the step was interrupted
//	F                                            no more steps
//	X, D                                         refused: an older epoch, the key was there
//
// A code is a program's exit code or a word: nodir, noprogram, nofile, nokeys,
// nowindow, noend.
type record struct {
	buf      []byte
	begun    bool
	stale    bool
	again    bool
	finished bool
	cut      bool // the last action's step was interrupted
	current  int  // the action of the step begun last
	results  []answered
}

// answered is what became of an action so far.
type answered struct {
	steps  int // that have ended
	kind   string
	code   string
	out    []byte
	err    []byte
	image  []byte
	failed bool
}

// maxFrame bounds a frame's bytes: a picture of the largest display.
const maxFrame = 40 << 20

func malformed(what string) error {
	return fmt.Errorf("the sandbox's record is malformed (%s): %w", what, providers.ErrUnavailable)
}

// write takes what the script says.
func (r *record) write(p []byte) error {
	r.buf = append(r.buf, p...)
	for {
		line, rest, ok := bytes.Cut(r.buf, []byte("\n"))
		if !ok {
			if len(r.buf) > 200 {
				return malformed("a long line")
			}
			return nil
		}
		used, err := r.frame(string(line), rest)
		if err != nil || used < 0 {
			return err
		}
		r.buf = rest[used:]
	}
}

// frame reads one frame and returns how many bytes behind its line it has;
// negative: they have not all come.
func (r *record) frame(line string, rest []byte) (int, error) {
	f := strings.Fields(line)
	if len(f) == 0 {
		return 0, malformed("an empty line")
	}
	switch f[0] {
	case "X":
		r.stale = true
		return 0, nil
	case "D":
		r.again = true
		return 0, nil
	case "F":
		r.finished = true
		return 0, nil
	}
	if len(f) < 2 {
		return 0, malformed("a frame without a number")
	}
	n, err := strconv.Atoi(f[1])
	if err != nil || n < 0 {
		return 0, malformed("a number")
	}
	if f[0] == "B" {
		if n > computer.MaxActions {
			return 0, malformed("too many actions")
		}
		r.begun, r.results = true, make([]answered, n)
		return 0, nil
	}
	if n >= len(r.results) {
		return 0, malformed("an action that is not there")
	}
	a := &r.results[n]
	switch f[0] {
	case "S":
		r.current = n
		return 0, nil
	case "I":
		r.current, r.cut = n, true
		return 0, nil
	case "P", "Q":
		f = append([]string{f[0], f[1], shootIt}, f[2:]...)
	case "E":
	default:
		return 0, malformed("an unknown frame")
	}
	if len(f) != 7 {
		return 0, malformed("a step's frame")
	}
	out, outErr := strconv.Atoi(f[5])
	fail, failErr := strconv.Atoi(f[6])
	if outErr != nil || failErr != nil || out < 0 || fail < 0 || out > maxFrame || fail > maxFrame {
		return 0, malformed("a step's sizes")
	}
	if len(rest) < out+fail {
		return -1, nil
	}
	a.steps++
	a.kind, a.code = f[2], f[3]
	a.out, a.err = bytes.Clone(rest[:out]), bytes.Clone(rest[out:out+fail])
	a.failed = a.code != "0" && (a.kind != runIt || strings.HasPrefix(a.code, "no"))
	if f[0] == "P" {
		a.image, a.out = a.out, nil
	}
	return out + fail, nil
}

// conclude returns the results of a batch that has ended. The action whose step
// was interrupted is unknown, also where it may have been the last thing that
// was recorded.
func (r *record) conclude() []providers.Result {
	out := make([]providers.Result, len(r.results))
	over := false
	for i, a := range r.results {
		switch {
		case over:
			out[i].Outcome = computer.Skipped
		case a.failed:
			over = true
			out[i].Outcome, out[i].Error = computer.Failed, a.fault()
			if a.code == "noend" {
				out[i].Value = a.value()
			}
		case i < r.current || r.finished && !r.cut:
			out[i].Outcome, out[i].Image, out[i].Value = computer.OK, a.image, a.value()
			if a.kind == cursorIt && out[i].Value == nil {
				over = true
				out[i].Outcome, out[i].Error = computer.Failed, &computer.Fault{Code: codeFailed, Message: "the pointer's place is not known"}
			}
		default:
			over = true
			out[i].Outcome = computer.Unknown
		}
	}
	return out
}

// Codes of a failed action, beside those of package computer.
const (
	codeTimeout  = "timeout"
	codeNotFound = "notFound"
	codeFailed   = "failed"
)

// fault says why an action failed.
func (a answered) fault() *computer.Fault {
	said := strings.TrimSpace(strings.ToValidUTF8(string(a.err[:min(len(a.err), 300)]), "�"))
	switch a.code {
	case "nodir":
		return &computer.Fault{Code: codeNotFound, Message: "the working directory is not there"}
	case "noprogram":
		return &computer.Fault{Code: codeNotFound, Message: "there is no such program in the sandbox"}
	case "nofile":
		return &computer.Fault{Code: codeNotFound, Message: "there is no such file in the sandbox"}
	case "nowindow":
		return &computer.Fault{Code: codeTimeout, Message: "nothing was shown in time"}
	case "noend":
		return &computer.Fault{Code: codeTimeout, Message: "still running at the end of its time; it and its process group were killed"}
	case "nokeys":
		return &computer.Fault{Code: codeFailed, Message: strings.TrimSpace("no keys for these characters: " + said)}
	case "124", "137":
		return &computer.Fault{Code: codeTimeout, Message: "the sandbox's desktop did not take it in time"}
	}
	return &computer.Fault{Code: codeFailed, Message: fmt.Sprintf("exit code %.20s: %s", a.code, said)}
}

// value is an action's answer, or nil.
func (a answered) value() json.RawMessage {
	switch a.kind {
	case cursorIt:
		var at computer.Point
		if n, err := fmt.Sscanf(string(a.out), "x:%d y:%d", &at.X, &at.Y); err != nil || n != 2 {
			return nil
		}
		return encode(at)
	case readClip:
		text, _ := readable(a.out)
		return encode(text)
	case runIt:
		var v computer.RunValue
		var moreOut, moreErr bool
		v.Stdout, moreOut = readable(a.out)
		v.Stderr, moreErr = readable(a.err)
		v.Truncated = moreOut || moreErr
		v.ExitCode = 137
		if n, err := strconv.Atoi(a.code); err == nil {
			v.ExitCode = n
		}
		return encode(v)
	}
	return nil
}

// readable keeps the contract's bytes of an output.
func readable(raw []byte) (string, bool) {
	more := len(raw) > computer.MaxRunOutput
	return strings.ToValidUTF8(string(raw[:min(len(raw), computer.MaxRunOutput)]), "�"), more
}

// encode is for values that cannot fail to encode.
func encode(v any) json.RawMessage {
	raw, err := json.Marshal(v)
	if err != nil {
		return nil
	}
	return raw
}
