package placement

import (
	"fmt"
	"slices"
	"strings"
)

// Fleet is the servers that decisions are made on, indexed by role. It is not
// safe for concurrent use.
type Fleet struct {
	servers map[string]*Server
	byRole  map[string][]*Server // sorted by id
}

// NewFleet returns an empty fleet.
func NewFleet() *Fleet {
	return &Fleet{servers: map[string]*Server{}, byRole: map[string][]*Server{}}
}

// Put adds a server or replaces what is known of it.
func (f *Fleet) Put(s Server) {
	old := f.servers[s.ID]
	if old != nil && slices.Equal(old.Roles, s.Roles) {
		*old = s
		return
	}
	if old != nil {
		f.Remove(s.ID)
	}
	p := &s
	f.servers[s.ID] = p
	for _, role := range s.Roles {
		list := f.byRole[role]
		i, _ := slices.BinarySearchFunc(list, s.ID, func(o *Server, id string) int { return strings.Compare(o.ID, id) })
		f.byRole[role] = slices.Insert(list, i, p)
	}
}

// Remove forgets a server.
func (f *Fleet) Remove(id string) {
	s := f.servers[id]
	if s == nil {
		return
	}
	delete(f.servers, id)
	for _, role := range s.Roles {
		f.byRole[role] = slices.DeleteFunc(f.byRole[role], func(o *Server) bool { return o == s })
		if len(f.byRole[role]) == 0 {
			delete(f.byRole, role)
		}
	}
}

// Get returns the snapshot of one server.
func (f *Fleet) Get(id string) (Server, bool) {
	s := f.servers[id]
	if s == nil {
		return Server{}, false
	}
	return *s, true
}

// Len is the number of servers.
func (f *Fleet) Len() int { return len(f.servers) }

// Decision is where a request goes and why.
type Decision struct {
	Server      string         // "" where nothing fits
	Explanation string         // for people
	Reasons     map[string]int // servers per filter; only where nothing fits
}

// Decide picks the best server for r. It looks only at servers that have the
// role; the counts of the rest are worked out only where nothing fits.
func (f *Fleet) Decide(r *Request) Decision {
	var best *Server
	var bestAffinity, fitting int
	for _, s := range f.byRole[r.Role] {
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
		d.Reasons[string(Fits(s, r))]++
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
