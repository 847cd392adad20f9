package placement

import (
	"cmp"
	"slices"
)

// index is the open servers of one role in the order of preference: by health
// and priority in groups, by the share of capacity in use in buckets. Servers of
// one bucket are told apart by affinity and by tie only, both of which depend
// on the request.
type index struct {
	n      int
	groups []*group
}

type group struct {
	health   Health
	priority int
	buckets  []*bucket // never empty ones
}

type bucket struct {
	share float64
	tied  []tied // in no order
}

// tied is an entry beside its hash, so that a tie is split without a look at
// the entries.
type tied struct {
	hash  uint64
	entry *entry
}

// place is where an entry stands in an index.
type place struct {
	bucket *bucket
	i      int
}

// share is how much of its capacity a server uses. Equal fractions of integers
// below 2⁵³ are equal numbers.
func share(s *Server) float64 { return float64(s.Used) / float64(s.Max) }

func (x *index) group(s *Server) (i int, there bool) {
	return slices.BinarySearchFunc(x.groups, s, func(g *group, s *Server) int {
		return cmp.Or(cmp.Compare(g.health, s.Health), cmp.Compare(s.Priority, g.priority))
	})
}

func (g *group) bucket(share float64) (i int, there bool) {
	return slices.BinarySearchFunc(g.buckets, share, func(b *bucket, share float64) int { return cmp.Compare(b.share, share) })
}

// add puts an entry into the index of its role number r.
func (x *index) add(e *entry, r int) {
	i, there := x.group(&e.Server)
	if !there {
		x.groups = slices.Insert(x.groups, i, &group{health: e.Health, priority: e.Priority})
	}
	g := x.groups[i]
	j, there := g.bucket(share(&e.Server))
	if !there {
		g.buckets = slices.Insert(g.buckets, j, &bucket{share: share(&e.Server)})
	}
	b := g.buckets[j]
	e.at[r] = place{b, len(b.tied)}
	b.tied = append(b.tied, tied{e.hash, e})
	x.n++
}

// remove takes an entry out of the index of its role number r; the last of its
// bucket fills its place.
func (x *index) remove(e *entry, r int) {
	at := e.at[r]
	last := at.bucket.tied[len(at.bucket.tied)-1]
	at.bucket.tied[at.i] = last
	last.entry.at[slices.Index(last.entry.Roles, e.Roles[r])].i = at.i
	at.bucket.tied[len(at.bucket.tied)-1] = tied{}
	at.bucket.tied = at.bucket.tied[:len(at.bucket.tied)-1]
	x.n--
	if len(at.bucket.tied) > 0 {
		return
	}
	i, _ := x.group(&e.Server)
	g := x.groups[i]
	j, _ := g.bucket(at.bucket.share)
	if g.buckets = slices.Delete(g.buckets, j, j+1); len(g.buckets) == 0 {
		x.groups = slices.Delete(x.groups, i, i+1)
	}
}

// search looks for the best server for one request.
type search struct {
	request  *Request
	vm       uint64 // hash of its id
	best     *Server
	affinity int
	passed   map[string]int // of the servers looked at those that did not fit, by filter
}

// group searches one group and reports whether it has a server that fits.
func (s *search) group(g *group) bool {
	if len(s.request.Affinities) > 0 {
		s.byAffinity(g)
		return s.best != nil
	}
	for _, b := range g.buckets {
		if s.first(b) {
			return true
		}
	}
	return false
}

// first finds the entry of a bucket whose tie is the lowest, and if it does not
// fit the lowest of those that do.
func (s *search) first(b *bucket) bool {
	best, lowest := b.tied[0].entry, tie(s.vm, b.tied[0].hash)
	for _, t := range b.tied[1:] {
		if h := tie(s.vm, t.hash); h < lowest {
			best, lowest = t.entry, h
		}
	}
	if Fits(&best.Server, s.request) == Fit {
		s.best = &best.Server
		return true
	}
	for _, t := range b.tied {
		if !s.fits(&t.entry.Server) {
			continue
		}
		if h := tie(s.vm, t.hash); s.best == nil || h < lowest {
			s.best, lowest = &t.entry.Server, h
		}
	}
	return s.best != nil
}

// byAffinity finds the best of a group: the most liked, of these the one with
// the most room, of these the one whose tie is the lowest.
func (s *search) byAffinity(g *group) {
	most := 0
	for i := range s.request.Affinities {
		most += max(s.request.Affinities[i].Weight, 0)
	}
	for _, b := range g.buckets {
		var lowest uint64
		before := s.best // of buckets with more room, which only a liking beats
		for _, t := range b.tied {
			server := &t.entry.Server
			if !s.fits(server) {
				continue
			}
			liked, h := s.request.affinity(server), tie(s.vm, t.hash)
			if s.best == nil || liked > s.affinity || liked == s.affinity && s.best != before && h < lowest {
				s.best, s.affinity, lowest = server, liked, h
			}
		}
		if s.best != nil && s.affinity == most {
			return // nothing further down can be liked more
		}
	}
}

// fits reports whether a server fits, and counts those that do not.
func (s *search) fits(server *Server) bool {
	filter := Fits(server, s.request)
	if filter == Fit {
		return true
	}
	if s.passed == nil {
		s.passed = map[string]int{}
	}
	s.passed[string(filter)]++
	return false
}

// affinity is the weight of the wishes that a server meets.
func (r *Request) affinity(s *Server) int {
	sum := 0
	for i := range r.Affinities {
		if r.Affinities[i].holds(s) {
			sum += r.Affinities[i].Weight
		}
	}
	return sum
}

// hashOf is the 64-bit FNV-1a hash of an id.
func hashOf(id string) uint64 {
	const offset, prime = 14695981039346656037, 1099511628211
	h := uint64(offset)
	for i := range len(id) {
		h = (h ^ uint64(id[i])) * prime
	}
	return h
}

// tie splits equal scores: of two servers the one with the lower tie is taken.
// It is the finalizer of SplitMix64 over the two hashes, which makes a number
// like a random one of every pair, the same each time.
func tie(vm, server uint64) uint64 {
	h := vm ^ server
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}
