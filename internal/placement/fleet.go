package placement

import (
	"fmt"
	"slices"
	"strings"
)

// Fleet is the servers that decisions are made on. Those that could take
// another sandbox (up, open and not full) are indexed by role and in the order
// of preference, so that a decision looks at the best first and stops at the
// first that fits, however large the fleet. It is not safe for concurrent use.
type Fleet struct {
	servers map[string]*entry
	open    map[string]*index // by role
}

type entry struct {
	Server
	hash uint64  // of its id
	at   []place // in the index of each role; nil: not open
}

// NewFleet returns an empty fleet.
func NewFleet() *Fleet {
	return &Fleet{servers: map[string]*entry{}, open: map[string]*index{}}
}

// Put adds a server or replaces what is known of it. It costs as much as there
// are different shares of capacity in use among servers of its priority.
func (f *Fleet) Put(s Server) {
	e := f.servers[s.ID]
	if e == nil {
		e = &entry{hash: hashOf(s.ID)}
		f.servers[s.ID] = e
	}
	s.Roles = distinct(s.Roles)
	open := s.Health != Down && s.Closed == "" && s.Used < s.Max
	if e.at != nil && (!open || s.Health != e.Health || s.Priority != e.Priority || share(&s) != share(&e.Server) || !slices.Equal(e.Roles, s.Roles)) {
		f.close(e)
	}
	e.Server = s
	if open && e.at == nil {
		e.at = make([]place, len(s.Roles))
		for i, role := range s.Roles {
			x := f.open[role]
			if x == nil {
				x = &index{}
				f.open[role] = x
			}
			x.add(e, i)
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

// close takes a server out of the index.
func (f *Fleet) close(e *entry) {
	for i, role := range e.Roles {
		f.open[role].remove(e, i)
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
// the role, the best first; the counts of the rest are worked out only where
// nothing fits. With affinities it looks at all of one health and priority.
func (f *Fleet) Decide(r *Request) Decision {
	x := f.open[r.Role]
	if x == nil {
		return f.refuse(r)
	}
	search := search{request: r, vm: hashOf(r.VM)}
	for _, g := range x.groups {
		if search.group(g) {
			break
		}
	}
	best := search.best
	if best == nil {
		return f.refuse(r)
	}
	var why strings.Builder
	fmt.Fprintf(&why, "%s, best of %d open with role %q, of %d: priority %d, affinity %d, %d/%d used",
		best.ID, x.n, r.Role, len(f.servers), best.Priority, search.affinity, best.Used, best.Max)
	if best.Health == Degraded {
		why.WriteString(", degraded (no healthy server fits)")
	}
	if len(search.passed) > 0 {
		why.WriteString("; passed over " + describe(search.passed, r))
	}
	return Decision{Server: best.ID, Explanation: why.String()}
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
	d.Explanation = fmt.Sprintf("0/%d servers fit: %s", len(f.servers), describe(d.Reasons, r))
	return d
}

// describe words the counts per filter for people.
func describe(counts map[string]int, r *Request) string {
	var parts []string
	for _, filter := range []Filter{FilterDown, FilterClosed, FilterFull, FilterDegraded, FilterAvoided, FilterRole, FilterCapability, FilterConstraint, FilterIsolation} {
		if n := counts[string(filter)]; n > 0 {
			parts = append(parts, filter.describe(n, r))
		}
	}
	return strings.Join(parts, ", ")
}
