package sandboxd

import (
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"maps"
	"os"
	"runtime"
	"slices"
	"sync"
	"time"

	"berth/internal/computer"
	"berth/internal/sandboxd/jail"
)

// Limits of time.
const (
	startWithin = 30 * time.Second // a guest, from nothing to ready
	adoptWithin = 5 * time.Second  // for an agent to answer after a restart
	lossWithin  = 2 * time.Second  // for a guest to be gone after its agent broke off
)

// maxEndings is how many ended creates are remembered.
const maxEndings = 10_000

// Server holds sandboxes. Its API is Handler's.
type Server struct {
	opts    Options
	log     *slog.Logger
	machine Machine
	store   *store
	boot    string
	key     [sha256.Size]byte

	ctx    context.Context // ends with Close; not a caller's
	cancel context.CancelCauseFunc
	tasks  sync.WaitGroup
	starts chan struct{} // bounds guests that start at the same time

	room       room          // what is promised of the host's
	readWithin time.Duration // for a request's body
	takeWithin time.Duration // for a viewer to take what it is sent
	viewers    chan struct{} // bounds the live view's, of all sandboxes

	mu       sync.Mutex
	draining bool
	boxes    map[string]*box // by sandbox id; those that start too
	spares   []*spare        // ready, oldest first
	slots    map[int]bool    // taken
	endings  map[string]bool // create keys whose sandbox has ended
	ended    []string        // the same, oldest first
	refill   chan struct{}
}

// capabilities of every sandbox, sorted.
func (s *Server) capabilities() []string {
	if _, ok := s.machine.(templater); ok {
		return []string{"browser", "clipboard", "desktop", "files", "pause", "shell", "snapshot", "stream", "windows"}
	}
	return []string{"browser", "clipboard", "desktop", "files", "shell", "stream", "windows"}
}

var errClosed = errors.New("the server is shutting down")

// New opens the state directory, finds out what the host can enforce, takes
// over the sandboxes that run there, and begins to warm spares. What the host
// lacks is said in the error, with how to get it.
func New(ctx context.Context, opts Options) (*Server, error) {
	if errs := opts.Validate(); len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	st, err := openStore(opts.StateDir)
	if err != nil {
		return nil, err
	}
	opts.StateDir = st.dir
	machine, err := newMachine(ctx, opts)
	if err != nil {
		return nil, errors.Join(err, st.close())
	}
	return newServer(ctx, opts, st, machine)
}

func newMachine(ctx context.Context, opts Options) (Machine, error) {
	if opts.Machine == MachineFirecracker {
		return newMicroVMs(ctx, opts)
	}
	return newDesktops(opts)
}

func newServer(ctx context.Context, opts Options, st *store, machine Machine) (*Server, error) {
	s := &Server{
		opts: opts, log: opts.Logger, machine: machine, store: st, key: sha256.Sum256([]byte(opts.APIKey)), readWithin: readWithin, takeWithin: takeWithin, viewers: make(chan struct{}, maxViewers),
		starts: make(chan struct{}, max(2, runtime.NumCPU())), boxes: map[string]*box{}, slots: map[int]bool{}, endings: map[string]bool{}, refill: make(chan struct{}, 1),
	}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	if err := s.adoptAll(ctx); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	s.tasks.Go(s.fill)
	return s, nil
}

// adoptAll takes over what an earlier process left, and removes what is dead.
func (s *Server) adoptAll(ctx context.Context) error {
	dirs, err := s.store.dirs()
	if err != nil {
		return err
	}
	recorded, adopted := 0, 0
	for _, dir := range dirs {
		rec, err := readRecord(dir)
		var g Guest
		if err == nil {
			if rec.ID != "" {
				recorded++
			}
			within, cancel := context.WithTimeout(ctx, adoptWithin)
			g, err = s.machine.Find(within, dir, rec.Guest)
			cancel()
		}
		if err != nil {
			s.log.Warn("a sandbox of an earlier process is lost", "sandbox", rec.ID, "err", err)
			if err := s.removeLeftover(dir, rec); err != nil {
				return err
			}
			continue
		}
		s.slots[rec.Slot] = true
		if rec.ID == "" {
			s.adoptSpare(dir, rec, g)
			continue
		}
		adopted++
		s.log.Info("taking over a sandbox", "sandbox", rec.ID, "pid", rec.Guest.PID)
		b := &box{s: s, rec: rec, dir: dir, guest: g, started: make(chan struct{}), gone: make(chan struct{}), cancel: func(error) {}}
		close(b.started)
		s.boxes[rec.ID] = b
		s.watch(b)
	}
	s.boot, err = s.store.bootID(recorded > 0 && adopted == 0)
	return err
}

// removeLeftover removes a guest's directory, and what may still run of it.
func (s *Server) removeLeftover(dir string, rec record) error {
	return errors.Join(s.machine.Discard(dir, rec.Guest), os.RemoveAll(dir))
}

// Drain makes the server refuse new sandboxes and say so in its health. The
// sandboxes stay and go on being served.
func (s *Server) Drain() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.draining = true
}

// Close stops serving and ends the spares. Sandboxes stay and are taken over by
// the next Server of the state directory; those that start are given up.
func (s *Server) Close() error {
	s.Drain()
	s.cancel(errClosed)
	s.tasks.Wait()
	s.mu.Lock()
	spares := s.spares
	s.spares = nil
	s.mu.Unlock()
	var errs []error
	for _, sp := range spares {
		errs = append(errs, sp.discard(s))
	}
	return errors.Join(append(errs, s.store.close())...)
}

// Shutdown kills all sandboxes and closes.
func (s *Server) Shutdown() error {
	s.Drain()
	s.mu.Lock()
	boxes := slices.Collect(maps.Values(s.boxes))
	s.mu.Unlock()
	var errs []error
	for _, b := range boxes {
		errs = append(errs, b.kill("the server shut down"))
	}
	return errors.Join(append(errs, s.Close())...)
}

// takeSlot returns a number that no other guest has.
func (s *Server) takeSlot() (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n := range jail.MaxSlots - 1 { // the last is the probe's
		if !s.slots[n] {
			s.slots[n] = true
			return n, nil
		}
	}
	return 0, errors.New("no user ids are left for another sandbox")
}

func (s *Server) freeSlot(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.slots, n)
}

// launch starts a guest in a new directory, with a record of it; a host that
// cannot hold another one refuses at once.
func (s *Server) launch(ctx context.Context, rec record) (dir string, _ Guest, _ record, err error) {
	release, err := s.promise(s.starting())
	if err != nil {
		return "", nil, rec, err
	}
	defer release()
	select {
	case s.starts <- struct{}{}:
		defer func() { <-s.starts }()
	case <-ctx.Done():
		return "", nil, rec, context.Cause(ctx)
	}
	if rec.Slot, err = s.takeSlot(); err != nil {
		return "", nil, rec, err
	}
	if dir, err = s.store.newDir(); err != nil {
		s.freeSlot(rec.Slot)
		return "", nil, rec, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, startWithin, errors.New("the sandbox was not ready in "+startWithin.String()))
	defer cancel()
	g, err := s.machine.Start(ctx, dir, rec.Slot, rec.Template, rec.Display)
	if err == nil {
		rec.Guest = g.Identity()
		if err = writeRecord(dir, rec); err != nil {
			err = errors.Join(err, g.Kill())
		}
	}
	if err != nil {
		err = errors.Join(err, os.RemoveAll(dir))
		s.freeSlot(rec.Slot)
		return "", nil, rec, err
	}
	return dir, g, rec, nil
}

// spare is a guest that is ready and nobody's yet.
type spare struct {
	dir   string
	guest Guest
	rec   record
}

// fill keeps spares ready until Close.
func (s *Server) fill() {
	pause := time.Second
	for {
		s.mu.Lock()
		short := !s.draining && len(s.spares) < s.opts.Warm
		s.mu.Unlock()
		var retry <-chan time.Time
		if short {
			dir, g, rec, err := s.launch(s.ctx, record{Template: DefaultTemplate, Display: computer.DefaultDisplay})
			if err == nil {
				pause = time.Second
				s.addSpare(&spare{dir, g, rec})
				continue
			}
			if s.ctx.Err() == nil {
				s.log.Error("a spare did not start; trying again", "in", pause, "err", err)
			}
			retry, pause = time.After(pause), min(2*pause, time.Minute)
		}
		select {
		case <-s.ctx.Done():
			return
		case <-s.refill:
		case <-retry:
		}
	}
}

func (s *Server) adoptSpare(dir string, rec record, g Guest) {
	s.addSpare(&spare{dir, g, rec})
}

func (s *Server) addSpare(sp *spare) {
	s.mu.Lock()
	s.spares = append(s.spares, sp)
	s.mu.Unlock()
	s.tasks.Go(func() {
		select {
		case <-sp.guest.Gone():
			s.dropSpare(sp)
		case <-s.ctx.Done():
		}
	})
}

// dropSpare takes a spare that died off the list.
func (s *Server) dropSpare(sp *spare) {
	s.mu.Lock()
	mine := false
	for i, o := range s.spares {
		if o == sp {
			s.spares = append(s.spares[:i:i], s.spares[i+1:]...)
			mine = true
			break
		}
	}
	s.mu.Unlock()
	if mine {
		s.log.Warn("a spare died")
		if err := sp.discard(s); err != nil {
			s.log.Error("a dead spare stays", "err", err)
		}
		s.wakeFiller()
	}
}

func (sp *spare) discard(s *Server) error {
	err := errors.Join(sp.guest.Kill(), os.RemoveAll(sp.dir))
	s.freeSlot(sp.rec.Slot)
	return err
}

func (s *Server) wakeFiller() {
	select {
	case s.refill <- struct{}{}:
	default:
	}
}

// takeSpare returns a spare that fits, or nil.
func (s *Server) takeSpare(template string, d computer.Display) *spare {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, sp := range s.spares {
		if sp.rec.Template == template && sp.rec.Display == d {
			s.spares = append(s.spares[:i:i], s.spares[i+1:]...)
			s.wakeFiller()
			return sp
		}
	}
	return nil
}

// remember notes that the sandbox of a create has ended.
func (s *Server) remember(key string) {
	s.endings[key] = true
	s.ended = append(s.ended, key)
	if len(s.ended) > maxEndings {
		delete(s.endings, s.ended[0])
		s.ended = s.ended[1:]
	}
}
