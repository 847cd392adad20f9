package playwright

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
)

// actionLimit bounds what an action may take beside the time that it asks for.
const actionLimit = 30 * time.Second

// typeBudget is added to actionLimit for every character to type.
const typeBudget = 20 * time.Millisecond

// Codes of a failed action.
const (
	codeNavigation = "navigationFailed" // open: the browser's reason is in the message
	codeTimeout    = "timeout"          // open: nothing came in time; the load was stopped
	codePageClosed = "pageClosed"       // the page closed while the action ran
	codeFailed     = "failed"           // the browser refused
)

var errActionLimit = errors.New("the action took too long")

// run is one batch at work in a sandbox.
type run struct {
	*sandbox
	conn *connection
	page *page // the active page at the start of the present action
}

// Execute runs a batch; see providers.Provider. A page that closes while an
// action runs fails that action with the code pageClosed, except a click's
// release: a click that closes its own window has done its work. An input that
// the page has not taken in after 30 s, or half a second after ctx has ended,
// closes the browser (ErrLost), because it could otherwise arrive later.
func (p *Provider) Execute(ctx context.Context, batch providers.Batch) ([]providers.Result, error) {
	s, done, err := p.use(batch.VM)
	if err != nil {
		return nil, err
	}
	defer done()
	actions, err := p.check(s, batch)
	if err != nil {
		return nil, err
	}
	if err := s.take(ctx); err != nil {
		return nil, err
	}
	defer s.pass()
	results := make([]providers.Result, len(actions))
	for i := range results {
		results[i].Outcome = computer.Skipped
	}
	r := &run{sandbox: s}
	for i, a := range actions {
		results[i], err = r.do(ctx, a)
		if err == nil && results[i].Outcome == computer.OK {
			continue
		}
		if releaseErr := r.releaseAll(ctx); releaseErr != nil && !r.breaks() {
			s.bury(fmt.Errorf("keys could not be released: %w", releaseErr))
		}
		if err != nil {
			return results, fmt.Errorf("action %d (%s): %w", i, a.Type, err)
		}
		return results, nil
	}
	return results, s.noteMove()
}

// take waits for a batch's turn in the sandbox, which pass gives on.
func (s *sandbox) take(ctx context.Context) error {
	select {
	case <-s.turn:
		return nil
	case <-s.dead:
		return s.lost()
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-s.p.ctx.Done():
		return errClosed
	}
}

func (s *sandbox) pass() { s.turn <- struct{}{} }

// check refuses a batch of which nothing may run.
func (p *Provider) check(s *sandbox, batch providers.Batch) ([]computer.Action, error) {
	for i, a := range batch.Actions {
		if need := a.Type.Requires(); need != "" && !slices.Contains(capabilities, need) {
			return nil, fmt.Errorf("action %d: %w", i, unsupported(string(a.Type)))
		}
	}
	s.mu.Lock()
	display, fence := s.rec.Display, s.rec.Fence
	s.mu.Unlock()
	actions, err := computer.Normalize(batch.Actions)
	if err == nil {
		err = computer.CheckBounds(actions, display)
	}
	if err == nil {
		err = checkKeys(actions)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", providers.ErrInvalid, err)
	}
	for i, a := range actions {
		if a.Type == computer.Open {
			if _, err := address(a.Target); err != nil {
				return nil, fmt.Errorf("action %d: %w", i, err)
			}
		}
	}
	switch {
	case batch.Fence == 0 || batch.Fence == fence:
	case batch.Fence < fence:
		return nil, fmt.Errorf("vm %s has fence %d, the batch %d: %w", batch.VM, fence, batch.Fence, providers.ErrFenceStale)
	default:
		return nil, fmt.Errorf("vm %s has fence %d, the batch %d: %w", batch.VM, fence, batch.Fence, providers.ErrConflict)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return actions, p.checkEpoch(batch.Epoch)
}

// limit is how long an action may take.
func limit(a computer.Action) time.Duration {
	d := actionLimit
	switch a.Type {
	case computer.Wait, computer.Hold:
		d += time.Duration(a.Duration(0) * float64(time.Second))
	case computer.TypeText:
		d += typeBudget * time.Duration(len(*a.Text))
	case computer.Drag:
		d += typeBudget * time.Duration(maxDragSteps+len(a.Path))
	}
	return d
}

// do runs one action and tells what became of it. An error is the batch's: the
// action's outcome is unknown.
func (r *run) do(ctx context.Context, a computer.Action) (providers.Result, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit(a), errActionLimit)
	defer cancel()
	result := providers.Result{ActionResult: computer.ActionResult{Outcome: computer.OK}}
	err := r.locate(ctx)
	if err == nil {
		err = r.act(ctx, a, &result)
	}
	if err == nil {
		return result, nil
	}
	fault, err := r.explain(ctx, err)
	if err != nil {
		return providers.Result{ActionResult: computer.ActionResult{Outcome: computer.Unknown}}, err
	}
	return providers.Result{ActionResult: computer.ActionResult{Outcome: computer.Failed, Error: fault}}, nil
}

// locate finds the active page.
func (r *run) locate(ctx context.Context) (err error) {
	if r.conn, err = r.link(ctx); err != nil {
		return err
	}
	r.page, err = r.conn.current(ctx)
	return err
}

// explain tells a failed action (a fault) from an interrupted one (an error).
// What broke a call often shows a moment after the call has failed.
func (r *run) explain(ctx context.Context, err error) (*computer.Fault, error) {
	var fault *computer.Fault
	if errors.As(err, &fault) {
		return fault, nil
	}
	if errors.Is(err, providers.ErrLost) || errors.Is(err, providers.ErrUnavailable) {
		return nil, err
	}
	if ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) {
		if errors.Is(err, errActionLimit) {
			return nil, fmt.Errorf("%w: %w", err, providers.ErrTimeout)
		}
		return nil, err
	}
	var pageClosed <-chan struct{}
	if r.page != nil {
		pageClosed = r.page.closed
	}
	broken := time.After(settle)
	for {
		select {
		case <-r.dead:
			return nil, r.lost()
		case <-r.p.ctx.Done():
			return nil, errClosed
		case <-pageClosed:
			// Pages also close because the browser or driver goes; look again.
			pageClosed = nil
			select {
			case <-r.dead:
				return nil, r.lost()
			case <-r.conn.gone:
			case <-time.After(settle / 5):
				return &computer.Fault{Code: codePageClosed, Message: "the page closed while the action ran"}, nil
			}
		case <-broken:
			if r.conn != nil && r.conn.isGone() {
				return nil, fmt.Errorf("the connection to the browser broke: %w: %w", err, providers.ErrUnavailable)
			}
			return &computer.Fault{Code: codeFailed, Message: firstLine(err)}, nil
		}
	}
}

// breaks reports whether the connection, the sandbox or the provider has ended
// or does so in a moment, which then is why a call has failed. The next
// connection releases what is held (see releaseLeftovers).
func (r *run) breaks() bool {
	if r.conn == nil {
		return true
	}
	timer := time.NewTimer(settle)
	defer timer.Stop()
	select {
	case <-r.conn.gone:
	case <-r.conn.driver.gone:
	case <-r.dead:
	case <-r.p.ctx.Done():
	case <-timer.C:
		return false
	}
	return true
}

// act runs one action on the active page.
func (r *run) act(ctx context.Context, a computer.Action, out *providers.Result) error {
	switch a.Type {
	case computer.Screenshot, computer.Zoom:
		return r.picture(ctx, a, out)
	case computer.Click:
		return r.click(ctx, a)
	case computer.Move:
		return r.moveTo(ctx, a.Point())
	case computer.Drag:
		return r.drag(ctx, a)
	case computer.Scroll:
		return r.scroll(ctx, a)
	case computer.MouseDown:
		return r.mouseDown(ctx, a.Button)
	case computer.MouseUp:
		return r.mouseUp(ctx, a.Button)
	case computer.TypeText:
		return r.typeText(ctx, *a.Text)
	case computer.Key:
		return r.chord(ctx, a.Keys, a.Repeat)
	case computer.Hold:
		return r.hold(ctx, a.Keys, a.Duration(0))
	case computer.Wait:
		return r.pause(ctx, a.Duration(0))
	case computer.Cursor:
		r.mu.Lock()
		cursor := r.cursor
		r.mu.Unlock()
		return answer(out, cursor)
	case computer.Open:
		return r.open(ctx, a.Target)
	case computer.ClipboardRead:
		text, err := r.conn.clipboard.read(ctx)
		if err != nil {
			return err
		}
		return answer(out, text)
	case computer.ClipboardWrite:
		return r.conn.clipboard.write(ctx, *a.Text)
	default: // check has refused it
		return fmt.Errorf("action %q: %w", a.Type, providers.ErrUnsupported)
	}
}

func answer(out *providers.Result, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode the answer: %w", err)
	}
	out.Value = raw
	return nil
}

// pause waits, in the sandbox's time.
func (r *run) pause(ctx context.Context, seconds float64) error {
	timer := time.NewTimer(time.Duration(seconds * float64(time.Second)))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-r.dead:
		return r.lost()
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-r.p.ctx.Done():
		return errClosed
	}
}

// note writes down what is held and where the pointer is, before it changes,
// for a successor of this process.
func (s *sandbox) note() error {
	s.mu.Lock()
	conn := s.conn
	s.mu.Unlock()
	return s.noteWith(conn)
}

// noteWith is note with a connection that is not yet the sandbox's.
func (s *sandbox) noteWith(conn *connection) error {
	s.mu.Lock()
	h := held{Keys: slices.Clone(s.keys), Buttons: slices.Clone(s.buttons), Cursor: s.cursor}
	s.mu.Unlock()
	if conn != nil {
		h.Active, h.Pages = conn.shown()
	}
	if err := writeJSON(filepath.Join(s.dir, heldFile), h); err != nil {
		if s.isDead() {
			return s.lost()
		}
		return fmt.Errorf("note what is held: %w: %w", err, providers.ErrUnavailable)
	}
	s.mu.Lock()
	s.noted = h
	s.mu.Unlock()
	return nil
}

// noteMove notes where the pointer is and which pages are open, if that has
// changed.
func (s *sandbox) noteMove() error {
	s.mu.Lock()
	conn, moved := s.conn, s.cursor != s.noted.Cursor
	noted := s.noted
	s.mu.Unlock()
	if conn != nil {
		conn.takeOver(nil)
		active, pages := conn.shown()
		moved = moved || active != noted.Active || !slices.Equal(pages, noted.Pages)
	}
	if !moved || s.isDead() {
		return nil // a sandbox that died after its last action: the next call says so
	}
	return s.note()
}
