package desktop

import (
	"errors"
	"fmt"
	"io"
	"log"
	"strings"
	"sync"

	"github.com/jezek/xgb"
	"github.com/jezek/xgb/shm"
	"github.com/jezek/xgb/xfixes"
	"github.com/jezek/xgb/xproto"
	"golang.org/x/sys/unix"

	"berth/internal/computer"
)

func init() { xgb.Logger = log.New(io.Discard, "", 0) } // it would write to stderr about missing authority files

// errServer is the cause of everything that fails because the X server went.
var errServer = errors.New("the X server is gone")

// Screen is a connection to one X server: its pixels, its pointer and its
// keyboard. Captures may run at the same time as input; input is the business
// of one caller at a time.
type Screen struct {
	conn  *xgb.Conn
	root  xproto.Window
	size  computer.Display
	keys  *keyboard
	atoms atoms
	gone  chan struct{} // closed when the connection has ended

	pongs  chan uint32 // serials of pings that were answered
	asking sync.Mutex
	serial uint32 // of the last ping

	mu      sync.Mutex // the capture buffer
	segment shm.Seg
	pixels  []byte // BGRX, the whole screen; shared with the server when segment is not 0
}

// Connect opens a Screen on display number n of this machine (or namespace).
func Connect(n int) (*Screen, error) {
	conn, err := xgb.NewConnDisplay(fmt.Sprintf(":%d", n))
	if err != nil {
		return nil, fmt.Errorf("connect to X display :%d: %w", n, err)
	}
	s, err := newScreen(conn)
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("X display :%d: %w", n, err)
	}
	return s, nil
}

func newScreen(conn *xgb.Conn) (*Screen, error) {
	setup := xproto.Setup(conn)
	def := setup.DefaultScreen(conn)
	if def.RootDepth != 24 || setup.ImageByteOrder != 0 {
		return nil, fmt.Errorf("depth %d, byte order %d; want 24 bits, little endian", def.RootDepth, setup.ImageByteOrder)
	}
	for _, name := range []string{"XTEST", "XFIXES"} {
		if err := extend(conn, name); err != nil {
			return nil, err
		}
	}
	if _, err := xfixes.QueryVersion(conn, 5, 0).Reply(); err != nil {
		return nil, fmt.Errorf("extension XFIXES: %w", err)
	}
	s := &Screen{
		conn: conn, root: def.Root, gone: make(chan struct{}), pongs: make(chan uint32, 4),
		size: computer.Display{Width: int(def.WidthInPixels), Height: int(def.HeightInPixels)},
	}
	s.pixels = make([]byte, 4*s.size.Width*s.size.Height)
	s.share()
	var err error
	if s.atoms, err = intern(conn); err != nil {
		return nil, err
	}
	if s.keys, err = newKeyboard(s); err != nil {
		return nil, err
	}
	xproto.ChangeWindowAttributes(conn, s.root, xproto.CwEventMask, []uint32{xproto.EventMaskSubstructureNotify}) // where pings are answered
	go s.drain()
	return s, nil
}

// registered says which extensions' events and errors xgb knows how to read.
var registered = map[string]bool{}
var registering sync.Mutex

// extend makes an extension known to a connection, as the extension packages'
// own Init does, which however writes to tables that the readers of all other
// connections use. Here only the first connection of the process does.
func extend(conn *xgb.Conn, name string) error {
	reply, err := xproto.QueryExtension(conn, uint16(len(name)), name).Reply()
	if err != nil {
		return fmt.Errorf("extension %s: %w", name, err)
	}
	if !reply.Present {
		return fmt.Errorf("the X server lacks the extension %s", name)
	}
	conn.ExtLock.Lock()
	conn.Extensions[name] = reply.MajorOpcode
	conn.ExtLock.Unlock()
	registering.Lock()
	defer registering.Unlock()
	if registered[name] {
		return nil
	}
	registered[name] = true
	for n, event := range xgb.NewExtEventFuncs[name] {
		xgb.NewEventFuncs[int(reply.FirstEvent)+n] = event
	}
	for n, fault := range xgb.NewExtErrorFuncs[name] {
		xgb.NewErrorFuncs[int(reply.FirstError)+n] = fault
	}
	return nil
}

// share makes the capture buffer one that the server writes to. Where that is
// not possible pixels travel through the connection, which takes longer.
func (s *Screen) share() {
	if extend(s.conn, "MIT-SHM") != nil {
		return
	}
	id, err := unix.SysvShmGet(unix.IPC_PRIVATE, len(s.pixels), unix.IPC_CREAT|0o666)
	if err != nil {
		return
	}
	// The segment goes as soon as the last process has detached from it.
	defer func() {
		if _, err := unix.SysvShmCtl(id, unix.IPC_RMID, nil); err != nil {
			xgb.Logger.Printf("remove the shared segment: %v", err)
		}
	}()
	mapped, err := unix.SysvShmAttach(id, 0, 0)
	if err != nil {
		return
	}
	segment, err := shm.NewSegId(s.conn)
	if err == nil {
		err = shm.AttachChecked(s.conn, segment, uint32(id), false).Check()
	}
	if err != nil {
		if unix.SysvShmDetach(mapped) != nil {
			xgb.Logger.Print("the shared segment stays attached until the process ends")
		}
		return
	}
	s.segment, s.pixels = segment, mapped
}

// drain takes events and errors off the connection until it ends.
func (s *Screen) drain() {
	defer close(s.gone)
	for {
		ev, err := s.conn.WaitForEvent()
		if ev == nil && err == nil {
			return
		}
		switch ev := ev.(type) {
		case xproto.MappingNotifyEvent:
			s.keys.stale.Store(true)
		case xproto.ClientMessageEvent:
			s.pong(ev)
		}
	}
}

// Close ends the connection. What is held must have been released.
func (s *Screen) Close() {
	s.conn.Close()
	<-s.gone
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.segment != 0 && unix.SysvShmDetach(s.pixels) == nil {
		s.segment = 0
	}
	s.pixels = nil
}

// Gone is closed when the X server or the connection has ended.
func (s *Screen) Gone() <-chan struct{} { return s.gone }

// Size is the display's size in pixels.
func (s *Screen) Size() computer.Display { return s.size }

// failed explains an error of a request.
func (s *Screen) failed(what string, err error) error {
	select {
	case <-s.gone:
		return fmt.Errorf("%s: %w", what, errServer)
	default:
		if strings.Contains(err.Error(), "closed") || errors.Is(err, io.EOF) {
			return fmt.Errorf("%s: %w", what, errServer)
		}
		return fmt.Errorf("%s: %w", what, err)
	}
}

// sync returns when the server has processed every request before it.
func (s *Screen) sync() error {
	if _, err := xproto.GetInputFocus(s.conn).Reply(); err != nil {
		return s.failed("synchronise", err)
	}
	return nil
}

// Cursor asks where the pointer is.
func (s *Screen) Cursor() (computer.Point, error) {
	p, err := xproto.QueryPointer(s.conn, s.root).Reply()
	if err != nil {
		return computer.Point{}, s.failed("query the pointer", err)
	}
	return computer.Point{X: int(p.RootX), Y: int(p.RootY)}, nil
}

// grab fills s.pixels; s.mu is held.
func (s *Screen) grab() error {
	if s.pixels == nil {
		return errServer
	}
	w, h := uint16(s.size.Width), uint16(s.size.Height)
	if s.segment != 0 {
		if _, err := shm.GetImage(s.conn, xproto.Drawable(s.root), 0, 0, w, h, 0xffffffff, xproto.ImageFormatZPixmap, s.segment, 0).Reply(); err != nil {
			return s.failed("take a picture", err)
		}
		return nil
	}
	img, err := xproto.GetImage(s.conn, xproto.ImageFormatZPixmap, xproto.Drawable(s.root), 0, 0, w, h, 0xffffffff).Reply()
	if err != nil {
		return s.failed("take a picture", err)
	}
	if copy(s.pixels, img.Data) < len(s.pixels) {
		return fmt.Errorf("take a picture: %d bytes of pixels, want %d", len(img.Data), len(s.pixels))
	}
	return nil
}

// Picture returns region of the screen as a PNG with the pointer drawn, and
// where the pointer is. A zero region is the whole screen.
func (s *Screen) Picture(region computer.Rect) ([]byte, computer.Point, error) {
	if region == (computer.Rect{}) {
		region = computer.Rect{Width: s.size.Width, Height: s.size.Height}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	pending := xfixes.GetCursorImage(s.conn)
	if err := s.grab(); err != nil {
		return nil, computer.Point{}, err
	}
	cursor, err := pending.Reply()
	if err != nil {
		return nil, computer.Point{}, s.failed("read the pointer's image", err)
	}
	s.drawPointer(cursor)
	png, err := encodePNG(s.pixels, s.size.Width, region)
	return png, computer.Point{X: int(cursor.X), Y: int(cursor.Y)}, err
}

// drawPointer blends the pointer's premultiplied ARGB into the pixels.
func (s *Screen) drawPointer(c *xfixes.GetCursorImageReply) {
	left, top := int(c.X)-int(c.Xhot), int(c.Y)-int(c.Yhot)
	for row := range int(c.Height) {
		y := top + row
		if y < 0 || y >= s.size.Height {
			continue
		}
		for col := range int(c.Width) {
			x := left + col
			if x < 0 || x >= s.size.Width {
				continue
			}
			argb := c.CursorImage[row*int(c.Width)+col]
			through := 255 - argb>>24
			if through == 255 {
				continue
			}
			px := s.pixels[4*(y*s.size.Width+x):][:3]
			px[0] = byte(argb) + byte(uint32(px[0])*through/255)
			px[1] = byte(argb>>8) + byte(uint32(px[1])*through/255)
			px[2] = byte(argb>>16) + byte(uint32(px[2])*through/255)
		}
	}
}

// fingerprint is a cheap hash of what the screen shows, without the pointer.
func (s *Screen) fingerprint() (uint64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.grab(); err != nil {
		return 0, err
	}
	return hash(s.pixels), nil
}
