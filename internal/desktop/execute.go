package desktop

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jezek/xgb/xproto"

	"berth/internal/computer"
)

// Codes of a failed action, beside those of package computer.
const (
	codeTimeout    = "timeout"    // run, open, clipboardRead: not within its time
	codeNotFound   = "notFound"   // run: program or directory; open: file
	codeNotStarted = "notStarted" // run, open: the program did not start
	codeFailed     = "failed"     // anything else that the action itself met
)

// stuckAfter is how long an action may go on after its ctx has ended. An X
// server that answers nothing for so long is given up: input could arrive late.
const stuckAfter = 1500 * time.Millisecond

// ErrDown says that the desktop has ended, or was given up. What its last action did is
// unknown.
var ErrDown = errors.New("the desktop is gone")

// MaxPictures bounds the pictures of one batch, in bytes.
const MaxPictures = 32 << 20

// Result is what became of one action. Image is the PNG of a screenshot or
// zoom; Value is then empty.
type Result struct {
	computer.ActionResult
	Image []byte
}

// Capabilities are what a desktop can do, sorted; see the contract.
var Capabilities = []string{"browser", "clipboard", "desktop", "files", "shell", "windows"}

// Check refuses a batch of which nothing may run: coordinates outside the
// display and targets that cannot be opened. The actions come from
// computer.DecodeActions.
func Check(actions []computer.Action, d computer.Display) error {
	if err := computer.CheckBounds(actions, d); err != nil {
		return err
	}
	for i, a := range actions {
		if a.Type == computer.Open {
			if err := CheckTarget(a.Target); err != nil {
				return &computer.InvalidError{Code: computer.CodeBadInput, Index: i, Field: "target", Message: err.Error()}
			}
		}
	}
	return nil
}

// Execute runs checked actions in order and stops at the first that fails. The
// results have one entry per action; those after a failure are Skipped. Batches
// run one at a time, in no particular order.
//
// Keys and buttons are released on every way out, except buttons that a
// mouseDown of a batch without failure holds. The error is for the batch: the
// cause of ctx, or ErrDown; the action it met has then the outcome Unknown.
func (s *Session) Execute(ctx context.Context, actions []computer.Action) ([]Result, error) {
	results := make([]Result, len(actions))
	for i := range results {
		results[i].Outcome = computer.Skipped
	}
	select {
	case <-s.turn:
	case <-ctx.Done():
		return results, context.Cause(ctx)
	case <-s.down:
		return results, s.lost()
	}
	free := true
	defer func() {
		if free {
			s.turn <- struct{}{}
		}
	}()
	pictures := 0
	for i, a := range actions {
		result, err := s.do(ctx, a)
		if pictures += len(result.Image); pictures > MaxPictures {
			result.Outcome, result.Image = computer.Failed, nil
			result.Error = &computer.Fault{Code: computer.CodeTooLarge, Message: fmt.Sprintf("the pictures of one command have at most %d bytes", MaxPictures)}
		}
		results[i] = result
		if errors.Is(err, ErrDown) {
			free = false // whatever hangs in it keeps the turn
			return results, err
		}
		if err == nil && result.Outcome == computer.OK {
			continue
		}
		if releaseErr := s.releaseAll(); releaseErr != nil {
			s.fail(fmt.Errorf("what was held could not be released: %w", releaseErr))
			return results, s.lost()
		}
		return results, err
	}
	return results, nil
}

func (s *Session) lost() error { return fmt.Errorf("%w: %w", ErrDown, s.Err()) }

// do runs one action, and gives up on the desktop when it does not return.
func (s *Session) do(ctx context.Context, a computer.Action) (Result, error) {
	result := Result{ActionResult: computer.ActionResult{Outcome: computer.OK}}
	unknown := Result{ActionResult: computer.ActionResult{Outcome: computer.Unknown}}
	if err := s.Err(); err != nil {
		return unknown, s.lost()
	}
	if ctx.Err() != nil {
		return Result{ActionResult: computer.ActionResult{Outcome: computer.Skipped}}, context.Cause(ctx)
	}
	done := make(chan error, 1)
	go func() { done <- s.act(ctx, a, &result) }()
	var err error
	select {
	case err = <-done:
	case <-s.down:
		return unknown, s.lost()
	case <-ctx.Done():
		select {
		case err = <-done:
		case <-s.down:
			return unknown, s.lost()
		case <-time.After(stuckAfter):
			s.fail(fmt.Errorf("action %q did not stop in %s", a.Type, stuckAfter))
			return unknown, s.lost()
		}
	}
	return s.judge(ctx, result, err)
}

// judge tells a failed action from an interrupted one.
func (s *Session) judge(ctx context.Context, result Result, err error) (Result, error) {
	var fault *computer.Fault
	unknown := Result{ActionResult: computer.ActionResult{Outcome: computer.Unknown}}
	switch {
	case err == nil:
		return result, nil
	case errors.Is(err, errServer):
		s.fail(err)
		return unknown, s.lost()
	case ctx.Err() != nil:
		return unknown, context.Cause(ctx)
	case !errors.As(err, &fault):
		fault = &computer.Fault{Code: codeFailed, Message: err.Error()}
	}
	result.Outcome, result.Error, result.Image = computer.Failed, fault, nil
	return result, nil
}

func (s *Session) releaseAll() error {
	return errors.Join(s.mouse.releaseAll(), s.screen.keys.releaseAll())
}

// isInput reports whether an action gives the programs something to handle.
func isInput(t computer.Type) bool {
	switch t {
	case computer.Click, computer.Move, computer.Drag, computer.Scroll, computer.MouseDown, computer.MouseUp,
		computer.TypeText, computer.Key, computer.Hold:
		return true
	}
	return false
}

// lookWithin bounds the wait for a program to handle its input before somebody
// looks at what came of it.
const lookWithin = 500 * time.Millisecond

// look waits, before anybody looks at what the input so far has done, until the
// program in front has handled it, where that program can say so. Input itself
// does not wait.
func (s *Session) look(ctx context.Context) error {
	s.looking.Lock() // whoever looks meanwhile waits for the same
	defer s.looking.Unlock()
	if !s.behind.Swap(false) {
		return nil
	}
	if _, err := s.screen.caughtUp(ctx, lookWithin); err != nil {
		s.behind.Store(true)
		return err
	}
	return nil
}

// act runs one action.
func (s *Session) act(ctx context.Context, a computer.Action, out *Result) error {
	if isInput(a.Type) {
		defer s.behind.Store(true)
	} else if a.Type != computer.Wait && a.Type != computer.Cursor {
		if err := s.look(ctx); err != nil {
			return err
		}
	}
	switch a.Type {
	case computer.Screenshot, computer.Zoom:
		var region computer.Rect
		if a.Region != nil {
			region = *a.Region
		}
		var err error
		out.Image, _, err = s.screen.Picture(region)
		return err
	case computer.Click:
		return s.with(ctx, a.Modifiers, func() error { return s.mouse.click(ctx, a) })
	case computer.Move:
		return s.mouse.moveTo(ctx, a.Point())
	case computer.Drag:
		return s.with(ctx, a.Modifiers, func() error { return s.mouse.drag(ctx, a) })
	case computer.Scroll:
		return s.with(ctx, a.Modifiers, func() error { return s.mouse.scroll(a) })
	case computer.MouseDown, computer.MouseUp:
		b := buttonCodes[a.Button]
		s.mouse.button(b, a.Type == computer.MouseDown)
		if a.Type == computer.MouseUp {
			return s.mouse.awaitUp(ctx, b)
		}
		return s.screen.sync()
	case computer.TypeText:
		if err := s.mouse.yield(ctx); err != nil {
			return err
		}
		return s.screen.keys.typeText(ctx, *a.Text)
	case computer.Key:
		for range a.Repeat {
			if err := s.with(ctx, a.Keys, func() error { return nil }); err != nil {
				return err
			}
		}
		return nil
	case computer.Hold:
		return s.with(ctx, a.Keys, func() error { return sleep(ctx, seconds(a)) })
	case computer.Wait:
		return sleep(ctx, seconds(a))
	case computer.Cursor:
		at, err := s.screen.Cursor()
		if err != nil {
			return err
		}
		return answer(out, at)
	case computer.Open:
		return s.open(ctx, a.Target)
	case computer.Run:
		return s.run(ctx, a, out)
	case computer.ClipboardRead:
		text, err := s.clipboard.read(ctx)
		if err != nil {
			return err
		}
		return answer(out, text)
	case computer.ClipboardWrite:
		return s.clipboard.write(*a.Text)
	default:
		return &computer.Fault{Code: computer.CodeBadInput, Message: fmt.Sprintf("unknown action %q", a.Type)}
	}
}

func seconds(a computer.Action) time.Duration {
	return time.Duration(a.Duration(0) * float64(time.Second))
}

func answer(out *Result, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode the answer: %w", err)
	}
	out.Value = raw
	return nil
}

// with holds keys while it runs do.
func (s *Session) with(ctx context.Context, keys []string, do func() error) (err error) {
	if len(keys) == 0 {
		return do()
	}
	if err := s.mouse.yield(ctx); err != nil {
		return err
	}
	var codes []xproto.Keycode
	if codes, err = s.screen.keys.press(ctx, keys); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.screen.keys.release(codes)) }()
	return do()
}

// Shot is a picture of the screen, and what was in front.
type Shot struct {
	PNG    []byte // the pointer is drawn
	Cursor computer.Point
	Title  string // of the active window; "" where there is none
}

// Picture takes a picture, of what the input so far has done (see look). It does
// not wait for batches.
func (s *Session) Picture(ctx context.Context) (Shot, error) {
	type answer struct {
		shot Shot
		err  error
	}
	done := make(chan answer, 1)
	go func() {
		var png []byte
		var at computer.Point
		err := s.look(ctx)
		if err == nil {
			png, at, err = s.screen.Picture(computer.Rect{})
		}
		var front shown
		if err == nil {
			front, err = s.screen.shown()
		}
		done <- answer{Shot{PNG: png, Cursor: at, Title: front.title}, err}
	}()
	select {
	case a := <-done:
		return a.shot, a.err
	case <-s.down:
		return Shot{}, s.lost()
	case <-ctx.Done():
		return Shot{}, context.Cause(ctx)
	}
}
