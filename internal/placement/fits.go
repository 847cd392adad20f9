package placement

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Health of a server, as far as placement cares.
type Health int

// The health states, best first.
const (
	Healthy Health = iota
	Degraded
	Down
)

// Isolation of a server: what may share it.
type Isolation string

// The isolations.
const (
	IsolateNone   Isolation = "none"
	IsolateRole   Isolation = "role"
	IsolateTenant Isolation = "tenant"
)

// Server is a snapshot of one server.
type Server struct {
	ID           string
	Roles        []string
	Priority     int
	Max          int // sandboxes it may hold
	Isolation    Isolation
	Attributes   map[string]string
	Capabilities []string
	Health       Health
	Closed       string // why people closed it ("cordoned", "draining"), or ""

	Used     int    // sandboxes it holds or has reserved
	Role     string // the role of all it holds; meaningless when Used is 0
	Tenant   string // likewise
	Mixed    bool   // it holds more than one role
	Mingled  bool   // it holds more than one tenant
	Creating int    // creates in flight
}

// Occupy adds one sandbox to the snapshot.
func (s *Server) Occupy(role, tenant string) {
	if s.Used == 0 {
		s.Role, s.Tenant = role, tenant
	}
	s.Mixed = s.Mixed || s.Role != role
	s.Mingled = s.Mingled || s.Tenant != tenant
	s.Used++
}

// Operator of a Condition.
type Operator string

// The operators. An absent attribute satisfies only != and notin.
const (
	Equal    Operator = "="
	NotEqual Operator = "!="
	In       Operator = "in"
	NotIn    Operator = "notin"
	Greater  Operator = ">" // both sides as numbers; a non-number never satisfies it
	Less     Operator = "<"
	Exists   Operator = "exists"
)

// AttributeID is an attribute that every server has beside its own: its id.
const AttributeID = "id"

// Condition on a server attribute.
type Condition struct {
	Attribute string
	Operator  Operator
	Values    []string
}

// Affinity is a wish: Weight counts where the condition holds.
type Affinity struct {
	Condition
	Weight int
}

// Request is what is to be placed.
type Request struct {
	VM          string
	Tenant      string
	Role        string
	Requires    []string
	Constraints []Condition
	Affinities  []Affinity
	Avoid       string // a server that refused it a moment ago, or ""
}

// Filter names the first reason for which a server does not fit.
type Filter string

// The filters, in the order in which they are tried.
const (
	Fit              Filter = "" // it fits
	FilterDown       Filter = "down"
	FilterClosed     Filter = "cordoned"
	FilterRole       Filter = "role"
	FilterCapability Filter = "capability"
	FilterConstraint Filter = "constraint"
	FilterIsolation  Filter = "isolation"
	FilterFull       Filter = "full"
	FilterDegraded   Filter = "degraded"
	FilterAvoided    Filter = "avoided"
)

// Fits returns Fit, or the first filter that r fails on s. It is used to plan,
// to commit and by whoever accepts, so that they cannot disagree. It does not
// allocate.
func Fits(s *Server, r *Request) Filter {
	switch {
	case s.Health == Down:
		return FilterDown
	case s.Closed != "":
		return FilterClosed
	case !slices.Contains(s.Roles, r.Role):
		return FilterRole
	}
	for _, c := range r.Requires {
		if !slices.Contains(s.Capabilities, c) {
			return FilterCapability
		}
	}
	for i := range r.Constraints {
		if !r.Constraints[i].holds(s) {
			return FilterConstraint
		}
	}
	if s.Used > 0 {
		if s.Isolation != IsolateNone && (s.Mixed || s.Role != r.Role) {
			return FilterIsolation
		}
		if s.Isolation == IsolateTenant && (s.Mingled || s.Tenant != r.Tenant) {
			return FilterIsolation
		}
	}
	switch {
	case s.Used >= s.Max:
		return FilterFull
	case s.Health == Degraded && s.Creating > 0:
		return FilterDegraded
	case r.Avoid == s.ID:
		return FilterAvoided
	}
	return Fit
}

func (c *Condition) holds(s *Server) bool {
	value, ok := s.Attributes[c.Attribute]
	if !ok && c.Attribute == AttributeID {
		value, ok = s.ID, true
	}
	switch c.Operator {
	case Exists:
		return ok
	case Equal:
		return ok && len(c.Values) == 1 && value == c.Values[0]
	case NotEqual:
		return !ok || len(c.Values) != 1 || value != c.Values[0]
	case In:
		return ok && slices.Contains(c.Values, value)
	case NotIn:
		return !ok || !slices.Contains(c.Values, value)
	case Greater, Less:
		if !ok || len(c.Values) != 1 {
			return false
		}
		have, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return false
		}
		want, err := strconv.ParseFloat(c.Values[0], 64)
		if err != nil {
			return false
		}
		if c.Operator == Greater {
			return have > want
		}
		return have < want
	}
	return false
}

// describe words a filter's count for people.
func (f Filter) describe(n int, r *Request) string {
	switch f {
	case FilterRole:
		return fmt.Sprintf("%d lacks role %q", n, r.Role)
	case FilterCapability:
		return fmt.Sprintf("%d lacks %s", n, strings.Join(r.Requires, " or "))
	case FilterConstraint:
		return fmt.Sprintf("%d outside the constraints", n)
	case FilterIsolation:
		return fmt.Sprintf("%d isolated for others", n)
	case FilterDegraded:
		return fmt.Sprintf("%d degraded and busy with a create", n)
	case FilterAvoided:
		return fmt.Sprintf("%d refused it a moment ago", n)
	default:
		return fmt.Sprintf("%d %s", n, f)
	}
}
