package placement

import (
	"fmt"
	"slices"
	"strings"
)

// Fleet is the servers that decisions are made on. Those that could take
// another sandbox (up, open and not full) are indexed by role, so that a
// decision costs as much as there are of these, however large the fleet. It is
// not safe for concurrent use.
type Fleet struct {
	servers map[string]*entry
	open    map[string][]*entry // by role, in no order
}

type entry struct {
	Server
	at []int // position in open[Roles[i]]; nil: not open
}

// NewFleet returns an empty fleet.
func NewFleet() *Fleet {
	return &Fleet{servers: map[string]*entry{}, open: map[string][]*entry{}}
}

// Put adds a server or replaces what is known of it.
func (f *Fleet) Put(s Server) {
	e := f.servers[s.ID]
	if e == nil {
		e = &entry{}
		f.servers[s.ID] = e
	}
	s.Roles = distinct(s.Roles)
	open := s.Health != Down && s.Closed == "" && s.Used < s.Max
	if e.at != nil && (!open || !slices.Equal(e.Roles, s.Roles)) {
		f.close(e)
	}
	e.Server = s
	if open && e.at == nil {
		e.at = make([]int, len(s.Roles))
		for i, role := range s.Roles {
			e.at[i] = len(f.open[role])
			f.open[role] = append(f.open[role], e)
		}
	}
}

// distinct returns roles without repetitions, which the index could not bear.
func distinct(roles []string) []string {
	for i, role := range roles {
		if slices.Contains(roles[:i], role) {
			roles = slices.Clone(roles)
			slices.Sort(roles)
			return slices.Compact(roles)
		}
	}
	return roles
}

// close takes a server out of the index; the last of each list fills its place.
func (f *Fleet) close(e *entry) {
	for i, role := range e.Roles {
		list := f.open[role]
		last := list[len(list)-1]
		list[e.at[i]] = last
		last.at[slices.Index(last.Roles, role)] = e.at[i]
		list[len(list)-1] = nil
		f.open[role] = list[:len(list)-1]
	}
	e.at = nil
}

// Remove forgets a server.
func (f *Fleet) Remove(id string) {
	e := f.servers[id]
	if e == nil {
		return
	}
	if e.at != nil {
		f.close(e)
	}
	delete(f.servers, id)
}

// Get returns the snapshot of one server.
func (f *Fleet) Get(id string) (Server, bool) {
	s := f.servers[id]
	if s == nil {
		return Server{}, false
	}
	return s.Server, true
}

// Len is the number of servers.
func (f *Fleet) Len() int { return len(f.servers) }

// Decision is where a request goes and why.
type Decision struct {
	Server      string         // "" where nothing fits
	Explanation string         // for people
	Reasons     map[string]int // servers per filter; only where nothing fits
}

// Decide picks the best server for r. It looks only at open servers that have
// the role; the counts of the rest are worked out only where nothing fits.
func (f *Fleet) Decide(r *Request) Decision {
	var best *Server
	var bestAffinity, fitting int
	for _, e := range f.open[r.Role] {
		s := &e.Server
		if Fits(s, r) != Fit {
			continue
		}
		fitting++
		affinity := 0
		for i := range r.Affinities {
			if r.Affinities[i].holds(s) {
				affinity += r.Affinities[i].Weight
			}
		}
		if best == nil || better(s, affinity, best, bestAffinity, r.VM) {
			best, bestAffinity = s, affinity
		}
	}
	if best == nil {
		return f.refuse(r)
	}
	why := fmt.Sprintf("%s, best of %d that fit of %d: priority %d, affinity %d, %d/%d used",
		best.ID, fitting, len(f.servers), best.Priority, bestAffinity, best.Used, best.Max)
	if best.Health == Degraded {
		why += ", degraded (no healthy server fits)"
	}
	return Decision{Server: best.ID, Explanation: why}
}

// better reports whether a is to be preferred to b.
func better(a *Server, affinityA int, b *Server, affinityB int, vm string) bool {
	if a.Health != b.Health {
		return a.Health < b.Health
	}
	if a.Priority != b.Priority {
		return a.Priority > b.Priority
	}
	if affinityA != affinityB {
		return affinityA > affinityB
	}
	// Shares of capacity, compared without division; Max is at most 1,000.
	if shareA, shareB := a.Used*b.Max, b.Used*a.Max; shareA != shareB {
		return shareA < shareB
	}
	return tieBreak(vm, a.ID) < tieBreak(vm, b.ID)
}

// tieBreak is the 64-bit FNV-1a hash of (vm, server).
func tieBreak(vm, server string) uint64 {
	const offset, prime = 14695981039346656037, 1099511628211
	h := uint64(offset)
	for i := range len(vm) {
		h = (h ^ uint64(vm[i])) * prime
	}
	h *= prime // a NUL between the two
	for i := range len(server) {
		h = (h ^ uint64(server[i])) * prime
	}
	return h
}

// refuse counts the servers per filter.
func (f *Fleet) refuse(r *Request) Decision {
	d := Decision{Reasons: map[string]int{}}
	for _, s := range f.servers {
		d.Reasons[string(Fits(&s.Server, r))]++
	}
	if len(f.servers) == 0 {
		d.Explanation = "0/0 servers fit: no server is registered"
		return d
	}
	var parts []string
	for _, filter := range []Filter{FilterDown, FilterClosed, FilterFull, FilterDegraded, FilterAvoided, FilterRole, FilterCapability, FilterConstraint, FilterIsolation} {
		if n := d.Reasons[string(filter)]; n > 0 {
			parts = append(parts, filter.describe(n, r))
		}
	}
	d.Explanation = fmt.Sprintf("0/%d servers fit: %s", len(f.servers), strings.Join(parts, ", "))
	return d
}
