package looprunner

import (
	"context"
	"encoding/json"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/bus"
	"berth/internal/events"
	"berth/internal/kv"
)

const (
	// silence of a lease after which its holder is suspected. The lease itself
	// decides: it is only ever acquired after its whole TTL.
	silence = leaseTTL / 2
	// adoptPatience is how long a suspected loop's lease is tried for.
	adoptPatience = 10 * time.Second
	// checkEvery is how often the leases are looked over.
	checkEvery = 500 * time.Millisecond
	// scanEvery is how soon unfinished journals are listed again, for loops whose
	// lease is not even there any more. A list has a line for every loop of seven
	// days, and a lease hardly goes unseen while they are watched without a break;
	// so each pause is twice the last then, up to scanAtMost.
	scanEvery  = 30 * time.Second
	scanAtMost = 16 * time.Minute
	// leaseSubjects are the loops' leases in the bucket's stream.
	leaseSubjects = "$KV." + kv.BucketLeases + ".loop.>"
)

// orphanage knows the leases of all loops and which of them fell silent.
type orphanage struct {
	mu    sync.Mutex
	seen  map[string]*sighting // by lease key
	tries map[string]context.CancelFunc
}

type sighting struct {
	at   time.Time // when the lease last changed, by this process's clock
	free bool      // it was released or ran out
}

// findOrphans watches the leases of all loops and takes on those whose owner
// is gone: at once when a lease is released or runs out, after a silence
// otherwise.
func (r *Runner) findOrphans(ctx, hard context.Context) {
	o := &orphanage{seen: map[string]*sighting{}, tries: map[string]context.CancelFunc{}}
	var tasks sync.WaitGroup
	defer tasks.Wait()
	news, blind := make(chan struct{}, 1), make(chan struct{}, 1)
	tasks.Go(func() {
		t := bus.Tail{JS: r.JS, Stream: "KV_" + kv.BucketLeases, Log: r.Log, Config: jetstream.OrderedConsumerConfig{
			FilterSubjects: []string{leaseSubjects}, DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy}}
		t.Run(ctx, func(msg jetstream.Msg) bool {
			if o.heard(msg, r.Name) {
				select {
				case news <- struct{}{}:
				default:
				}
			}
			return true
		}, func() {
			o.restart()
			select {
			case blind <- struct{}{}:
			default:
			}
		})
	})
	check, scan, pause := time.NewTicker(checkEvery), time.NewTimer(0), scanEvery
	defer check.Stop()
	defer scan.Stop()
	// While this process was blind a lease may have come and gone.
	soon := func() {
		if pause > scanEvery { // else a scan is due soon, and is not put off
			pause = scanEvery
			scan.Reset(pause)
		}
	}
	reconnects := r.NC.Stats().Reconnects
	for {
		select {
		case <-ctx.Done():
			return
		case <-news:
		case <-check.C:
			if n := r.NC.Stats().Reconnects; n != reconnects {
				reconnects = n
				soon()
			}
		case <-blind:
			soon()
		case <-scan.C:
			if err := r.scan(ctx, o); err != nil {
				r.Log.Warn("journals not listed; trying again", "err", err)
				scan.Reset(time.Second)
				continue
			}
			scan.Reset(pause)
			pause = min(2*pause, scanAtMost)
		}
		for _, key := range o.suspects() {
			if r.owns(key) || r.full() {
				continue
			}
			tenant, id, ok := splitKey(key)
			if !ok {
				o.forget(key)
				continue
			}
			trying, cancel := context.WithCancel(ctx)
			if !o.try(key, cancel) {
				cancel()
				continue
			}
			tasks.Go(func() {
				defer o.tried(key)
				if r.adopt(trying, hard, tenant, id) && !r.owns(key) {
					o.forget(key)
				}
			})
		}
	}
}

// heard takes one change of a lease; true where it became free. An attempt to
// acquire a lease that somebody else has just renewed is given up.
func (o *orphanage) heard(msg jetstream.Msg, self string) (freed bool) {
	key := strings.TrimPrefix(msg.Subject(), "$KV."+kv.BucketLeases+".")
	h := msg.Headers()
	free := h.Get(jetstream.MarkerReasonHeader) != "" || h.Get("KV-Operation") != "" || len(msg.Data()) == 0
	var v struct {
		Holder string `json:"holder"`
	}
	if !free && json.Unmarshal(msg.Data(), &v) != nil {
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.seen[key] = &sighting{at: time.Now(), free: free}
	if cancel := o.tries[key]; !free && v.Holder != self && cancel != nil {
		cancel()
	}
	return free
}

// restart gives every lease full grace after this process has been blind.
func (o *orphanage) restart() {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, s := range o.seen {
		s.at = time.Now()
	}
}

func (o *orphanage) suspects() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	var out []string
	for key, s := range o.seen {
		if o.tries[key] == nil && (s.free || time.Since(s.at) > silence) {
			out = append(out, key)
		}
	}
	return out
}

func (o *orphanage) try(key string, cancel context.CancelFunc) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.tries[key] != nil {
		return false
	}
	o.tries[key] = cancel
	return true
}

// tried ends an attempt. One that came to nothing is repeated after another
// silence, or at once where the lease becomes free.
func (o *orphanage) tried(key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if cancel := o.tries[key]; cancel != nil {
		cancel()
	}
	delete(o.tries, key)
	if s := o.seen[key]; s != nil { // not before another silence
		s.at, s.free = time.Now(), false
	}
}

func (o *orphanage) forget(key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.seen, key)
}

// scan adds the loops that have started, not finished, and have no lease.
func (r *Runner) scan(ctx context.Context, o *orphanage) error {
	started, err := r.subjects(ctx, events.LoopSubject("*", "*", events.LoopStartedName))
	if err != nil {
		return err
	}
	finished, err := r.subjects(ctx, events.LoopSubject("*", "*", events.LoopFinishedName))
	if err != nil {
		return err
	}
	over := make(map[string]bool, len(finished))
	for subject := range finished {
		if tenant, id, _, ok := splitLoop(subject); ok {
			over[leaseKey(tenant, id)] = true
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for subject := range started {
		tenant, id, _, ok := splitLoop(subject)
		if key := leaseKey(tenant, id); ok && !over[key] && o.seen[key] == nil {
			o.seen[key] = &sighting{at: time.Now(), free: true}
		}
	}
	return nil
}

// subjects lists the subjects of LOOPS under a filter.
func (r *Runner) subjects(ctx context.Context, filter string) (map[string]uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*callTimeout)
	defer cancel()
	info, err := r.loopStream.Info(ctx, jetstream.WithSubjectFilter(filter))
	if err != nil {
		return nil, err
	}
	return info.State.Subjects, nil
}

// splitLoop splits loop.<tenant>.<loop>.<name>.
func splitLoop(subject string) (tenant, id, name string, ok bool) {
	t := strings.Split(subject, ".")
	if len(t) != 4 || t[0] != "loop" {
		return "", "", "", false
	}
	return t[1], t[2], t[3], true
}

func splitKey(key string) (tenant, id string, ok bool) {
	t := strings.Split(key, ".")
	if len(t) != 3 || t[0] != "loop" {
		return "", "", false
	}
	return t[1], t[2], true
}
