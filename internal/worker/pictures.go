package worker

import (
	"context"
	"fmt"
	"sync"

	"golang.org/x/sync/semaphore"

	"berth/internal/computer"
	"berth/internal/events"
)

// DefaultPictureBytes bounds the pictures that a worker has in hand at once.
// What it keeps of each is a small multiple: what was read, and what is on its
// way to the store.
const DefaultPictureBytes = 256 << 20

// pictureRoom is the memory for pictures between a server's answer and the
// object store, shared by all of a worker's servers. Room is taken before a
// picture is asked for, by what it can be at most, in order of asking; so a
// thousand sandboxes that are looked at in one moment wait, and take no memory.
type pictureRoom struct {
	all  int64
	free *semaphore.Weighted
}

func newPictureRoom(bytes int64) *pictureRoom {
	return &pictureRoom{bytes, semaphore.NewWeighted(bytes)}
}

// take waits for room for n pictures of a display, but never for more than there
// is in all: a command that needs more has it for itself.
func (r *pictureRoom) take(ctx context.Context, n int, d computer.Display) (give func(), err error) {
	bytes := min(int64(n)*maxPictureBytes(d), r.all)
	if err := r.free.Acquire(ctx, bytes); err != nil {
		return nil, context.Cause(ctx)
	}
	return sync.OnceFunc(func() { r.free.Release(bytes) }), nil
}

// maxPictureBytes is the most that a PNG of a display takes: four bytes a pixel
// that do not compress, a byte a row, and what encoding adds.
func maxPictureBytes(d computer.Display) int64 {
	raw := int64(d.Width)*int64(d.Height)*4 + int64(d.Height)
	return raw + raw/100 + 64<<10
}

// display is that of a sandbox, or the largest that there is.
func (t *tenure) display(vm string) computer.Display {
	t.mu.Lock()
	defer t.mu.Unlock()
	if b, ok := t.boxes[vm]; ok && b.display != (computer.Display{}) {
		return b.display
	}
	return computer.Display{Width: 3840, Height: 2160}
}

// roomFor takes the room for the pictures among an act's actions. It waits as
// long as the act may start.
func (t *tenure) roomFor(ctx context.Context, c *command) (give func(), refused *computer.Fault) {
	n := 0
	for _, a := range c.actions {
		if a.Type == computer.Screenshot || a.Type == computer.Zoom {
			n++
		}
	}
	if n == 0 {
		return func() {}, nil
	}
	starting, cancel := context.WithDeadlineCause(ctx, c.deadline, errTimedOut)
	defer cancel()
	give, err := t.w.pictures.take(starting, n, t.display(c.VM))
	switch {
	case err == nil:
		return give, nil
	case ctx.Err() != nil:
		return nil, faultOf(fmt.Errorf("nothing ran: %w", err))
	}
	return nil, fault(events.CodeDeadline, "not started by %s: too many pictures at once", c.deadline.UTC().Format("15:04:05.000"))
}
