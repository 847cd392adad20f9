package placement

import (
	"flag"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func server(id string, edit func(*Server)) Server {
	s := Server{ID: id, Roles: []string{"default"}, Max: 10, Isolation: IsolateNone, Capabilities: []string{"browser"}}
	if edit != nil {
		edit(&s)
	}
	return s
}

func TestFits(t *testing.T) {
	full := func(s *Server) { s.Used, s.Role, s.Tenant = 10, "default", "red" }
	for name, c := range map[string]struct {
		edit func(*Server)
		req  Request
		want Filter
	}{
		"empty":                 {nil, Request{}, Fit},
		"down":                  {func(s *Server) { s.Health = Down; s.Closed = "cordoned" }, Request{}, FilterDown},
		"cordoned":              {func(s *Server) { s.Closed = "cordoned" }, Request{}, FilterClosed},
		"other role":            {nil, Request{Role: "git"}, FilterRole},
		"lacks":                 {nil, Request{Requires: []string{"browser", "gpu"}}, FilterCapability},
		"full":                  {full, Request{}, FilterFull},
		"over full":             {func(s *Server) { full(s); s.Max = 3 }, Request{}, FilterFull},
		"degraded":              {func(s *Server) { s.Health = Degraded }, Request{}, Fit},
		"degraded and creating": {func(s *Server) { s.Health = Degraded; s.Creating = 1 }, Request{}, FilterDegraded},
		"avoided":               {nil, Request{Avoid: "ax102-01"}, FilterAvoided},
		"role isolation, same":  {func(s *Server) { s.Isolation = IsolateRole; s.Occupy("default", "red") }, Request{Tenant: "blue"}, Fit},
		"role isolation, other": {func(s *Server) {
			s.Isolation, s.Roles = IsolateRole, []string{"default", "git"}
			s.Occupy("git", "red")
		}, Request{Tenant: "red"}, FilterIsolation},
		"role isolation, mixed": {func(s *Server) {
			s.Isolation, s.Roles = IsolateRole, []string{"default", "git"}
			s.Occupy("default", "red")
			s.Occupy("git", "red")
		}, Request{Tenant: "red"}, FilterIsolation},
		"tenant isolation, same":  {func(s *Server) { s.Isolation = IsolateTenant; s.Occupy("default", "red") }, Request{Tenant: "red"}, Fit},
		"tenant isolation, other": {func(s *Server) { s.Isolation = IsolateTenant; s.Occupy("default", "red") }, Request{Tenant: "blue"}, FilterIsolation},
	} {
		s := server("ax102-01", c.edit)
		if c.req.Role == "" {
			c.req.Role = "default"
		}
		if got := Fits(&s, &c.req); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestConditions(t *testing.T) {
	s := server("ax102-01", func(s *Server) { s.Attributes = map[string]string{"zone": "fsn1", "cores": "32", "empty": ""} })
	for _, c := range []struct {
		attribute, operator string
		values              []string
		want                bool
	}{
		{"zone", "=", []string{"fsn1"}, true}, {"zone", "=", []string{"hel1"}, false}, {"none", "=", []string{""}, false},
		{"zone", "!=", []string{"hel1"}, true}, {"none", "!=", []string{"x"}, true}, {"zone", "!=", []string{"fsn1"}, false},
		{"zone", "in", []string{"hel1", "fsn1"}, true}, {"none", "in", []string{"hel1"}, false},
		{"zone", "notin", []string{"hel1"}, true}, {"none", "notin", []string{"hel1"}, true}, {"zone", "notin", []string{"fsn1"}, false},
		{"cores", ">", []string{"31.5"}, true}, {"cores", ">", []string{"32"}, false}, {"zone", ">", []string{"1"}, false}, {"none", ">", []string{"1"}, false},
		{"cores", "<", []string{"100"}, true}, {"cores", "<", []string{"9"}, false},
		{"empty", "exists", nil, true}, {"none", "exists", nil, false},
		{"id", "=", []string{"ax102-01"}, true}, {"cores", "~", []string{"32"}, false},
	} {
		k := Condition{Attribute: c.attribute, Operator: Operator(c.operator), Values: c.values}
		if got := k.holds(&s); got != c.want {
			t.Errorf("%s %s %v: %v", c.attribute, c.operator, c.values, got)
		}
	}
}

// The order of preference, each line beaten only by the ones before it.
func TestPreferences(t *testing.T) {
	f := NewFleet()
	order := []string{"prio-01", "liked-01", "empty-01", "busy-01", "sick-01"}
	f.Put(server("prio-01", func(s *Server) { s.Priority, s.Used, s.Max = 5, 9, 10 }))
	f.Put(server("liked-01", func(s *Server) { s.Attributes = map[string]string{"zone": "a"}; s.Used = 8 }))
	f.Put(server("empty-01", func(s *Server) { s.Used, s.Max = 1, 1000 }))
	f.Put(server("busy-01", func(s *Server) { s.Used, s.Max = 1, 10 }))
	f.Put(server("sick-01", func(s *Server) { s.Priority, s.Health = 9, Degraded }))
	r := Request{VM: "v", Role: "default", Affinities: []Affinity{{Condition{"zone", Equal, []string{"a"}}, 10}}}
	for _, want := range order {
		d := f.Decide(&r)
		if d.Server != want {
			t.Fatalf("%q before %q: %s", d.Server, want, d.Explanation)
		}
		f.Remove(want)
	}
	if d := f.Decide(&r); d.Explanation != "0/0 servers fit: no server is registered" {
		t.Errorf("empty fleet: %q", d.Explanation)
	}
}

func TestExplanations(t *testing.T) {
	f := NewFleet()
	f.Put(server("a-01", func(s *Server) { s.Health = Down }))
	f.Put(server("a-02", func(s *Server) { s.Used = 10 }))
	f.Put(server("a-03", func(s *Server) { s.Closed = "draining" }))
	f.Put(server("a-04", func(s *Server) { s.Roles = []string{"git"} }))
	d := f.Decide(&Request{VM: "v", Role: "default"})
	const want = `0/4 servers fit: 1 down, 1 cordoned, 1 full, 1 lacks role "default"`
	if d.Explanation != want || d.Reasons["full"] != 1 || d.Reasons["role"] != 1 {
		t.Errorf("%q %v, want %q", d.Explanation, d.Reasons, want)
	}
	d = f.Decide(&Request{VM: "v", Role: "git"})
	if d.Server != "a-04" || !strings.HasPrefix(d.Explanation, "a-04, best of 1 open with role \"git\", of 4: priority 0, affinity 0, 0/10 used") {
		t.Errorf("%+v", d)
	}
}

// Equal servers are split evenly, and the same question has the same answer.
func TestTieBreak(t *testing.T) {
	f := NewFleet()
	for i := range 4 {
		f.Put(server(fmt.Sprintf("a-0%d", i), nil))
	}
	count := map[string]int{}
	for i := range 4000 {
		r := Request{VM: fmt.Sprint("vm-", i), Role: "default"}
		d := f.Decide(&r)
		if again := f.Decide(&r); again.Server != d.Server {
			t.Fatalf("%s then %s", d.Server, again.Server)
		}
		count[d.Server]++
	}
	for id, n := range count {
		if n < 800 || n > 1200 {
			t.Errorf("%s got %d of 4000", id, n)
		}
	}
}

// oracle decides by looking at everything and comparing the stated order of
// preference key by key.
func oracle(servers []Server, r Request) string {
	type ranked struct {
		id  string
		key []float64
		tie uint64
	}
	var fit []ranked
	for _, s := range servers {
		ok := s.Health != Down && s.Closed == "" && slices.Contains(s.Roles, r.Role) && s.Used < s.Max && r.Avoid != s.ID
		for _, c := range r.Requires {
			ok = ok && slices.Contains(s.Capabilities, c)
		}
		if s.Used > 0 && s.Isolation != IsolateNone && (s.Mixed || s.Role != r.Role) {
			ok = false
		}
		if s.Used > 0 && s.Isolation == IsolateTenant && (s.Mingled || s.Tenant != r.Tenant) {
			ok = false
		}
		if s.Health == Degraded && s.Creating > 0 {
			ok = false
		}
		for _, c := range r.Constraints {
			ok = ok && c.holds(&s)
		}
		if !ok {
			continue
		}
		affinity := 0
		for _, a := range r.Affinities {
			if a.holds(&s) {
				affinity += a.Weight
			}
		}
		fit = append(fit, ranked{s.ID, []float64{float64(s.Health), -float64(s.Priority), -float64(affinity), float64(s.Used) / float64(s.Max)}, tieOf(r.VM, s.ID)})
	}
	if len(fit) == 0 {
		return ""
	}
	return slices.MinFunc(fit, func(a, b ranked) int {
		if c := slices.Compare(a.key, b.key); c != 0 {
			return c
		}
		if a.tie < b.tie {
			return -1
		}
		return 1
	}).id
}

func genServer(t *rapid.T, i int) Server {
	s := Server{
		ID:           fmt.Sprintf("s-%02d", i),
		Roles:        rapid.SampledFrom([][]string{{"default"}, {"git"}, {"default", "git"}}).Draw(t, "roles"),
		Priority:     rapid.IntRange(0, 2).Draw(t, "priority"),
		Max:          rapid.IntRange(1, 4).Draw(t, "max"),
		Isolation:    rapid.SampledFrom([]Isolation{IsolateNone, IsolateRole, IsolateTenant}).Draw(t, "isolation"),
		Capabilities: rapid.SampledFrom([][]string{nil, {"browser"}, {"browser", "gpu"}}).Draw(t, "capabilities"),
		Health:       Health(rapid.IntRange(0, 2).Draw(t, "health")),
		Closed:       rapid.SampledFrom([]string{"", "", "", "cordoned"}).Draw(t, "closed"),
		Creating:     rapid.IntRange(0, 1).Draw(t, "creating"),
		Attributes:   map[string]string{"n": fmt.Sprint(rapid.IntRange(0, 3).Draw(t, "n"))},
	}
	for range rapid.IntRange(0, s.Max).Draw(t, "used") {
		s.Occupy(rapid.SampledFrom(s.Roles).Draw(t, "role"), rapid.SampledFrom([]string{"red", "blue"}).Draw(t, "tenant"))
	}
	return s
}

func genRequest(t *rapid.T, i int) Request {
	r := Request{
		VM:       fmt.Sprintf("vm-%d", i),
		Tenant:   rapid.SampledFrom([]string{"red", "blue"}).Draw(t, "tenant"),
		Role:     rapid.SampledFrom([]string{"default", "git"}).Draw(t, "role"),
		Requires: rapid.SampledFrom([][]string{nil, nil, {"browser"}, {"gpu"}}).Draw(t, "requires"),
		Avoid:    rapid.SampledFrom([]string{"", "", "s-00"}).Draw(t, "avoid"),
	}
	if rapid.Bool().Draw(t, "constrained") {
		r.Constraints = []Condition{{"n", Operator(rapid.SampledFrom([]string{"=", "!=", "in", "notin", ">", "<"}).Draw(t, "operator")), []string{"1"}}}
	}
	if rapid.Bool().Draw(t, "affine") {
		r.Affinities = []Affinity{{Condition{"n", Greater, []string{"1"}}, rapid.IntRange(-2, 2).Draw(t, "weight")}}
	}
	return r
}

// Every decision is the oracle's, and a fleet that is filled by its own
// decisions never breaks capacity or isolation, not for a moment (I1, I5).
func TestAgainstOracle(t *testing.T) {
	if f := flag.Lookup("rapid.checks"); f.Value.String() == f.DefValue {
		if err := flag.Set("rapid.checks", "1000"); err != nil { // about 10⁴ placements; `make nightly` has 10⁶
			t.Fatal(err)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		f := NewFleet()
		var servers []Server
		for i := range rapid.IntRange(0, 6).Draw(t, "servers") {
			s := genServer(t, i)
			servers = append(servers, s)
			f.Put(s)
		}
		for i := range rapid.IntRange(1, 20).Draw(t, "requests") {
			r := genRequest(t, i)
			d := f.Decide(&r)
			if want := oracle(servers, r); d.Server != want {
				t.Fatalf("placed on %q, the oracle says %q: %s", d.Server, want, d.Explanation)
			}
			if d.Server == "" {
				sum := 0
				for _, n := range d.Reasons {
					sum += n
				}
				if sum != len(servers) || d.Reasons[""] != 0 {
					t.Fatalf("reasons %v do not add up to %d", d.Reasons, len(servers))
				}
				continue
			}
			at := slices.IndexFunc(servers, func(s Server) bool { return s.ID == d.Server })
			s := &servers[at]
			before := *s
			s.Occupy(r.Role, r.Tenant)
			f.Put(*s)
			switch {
			case s.Used > s.Max:
				t.Fatalf("%s holds %d of %d", s.ID, s.Used, s.Max)
			case s.Isolation != IsolateNone && s.Mixed && !before.Mixed:
				t.Fatalf("%s holds two roles", s.ID)
			case s.Isolation == IsolateTenant && s.Mingled && !before.Mingled:
				t.Fatalf("%s holds two tenants", s.ID)
			}
		}
	})
}

// The index by role follows every change: a fleet that was changed at random
// decides like one that was made new.
func TestIndexFollows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := NewFleet()
		now := map[string]Server{}
		for i := range rapid.IntRange(1, 40).Draw(t, "changes") {
			s := genServer(t, rapid.IntRange(0, 5).Draw(t, "which"))
			if rapid.IntRange(0, 4).Draw(t, "remove") == 0 {
				f.Remove(s.ID)
				delete(now, s.ID)
			} else {
				f.Put(s)
				now[s.ID] = s
			}
			fresh := NewFleet()
			for _, s := range now {
				fresh.Put(s)
			}
			r := genRequest(t, i)
			if a, b := f.Decide(&r), fresh.Decide(&r); a.Server != b.Server || a.Explanation != b.Explanation {
				t.Fatalf("changed: %+v; new: %+v", a, b)
			}
		}
	})
}

// fill makes a fleet of n servers in 10 roles, half of them full.
func fill(n int) *Fleet {
	f := NewFleet()
	for i := range n {
		f.Put(server(fmt.Sprintf("ax-%05d", i), func(s *Server) {
			s.Roles = []string{fmt.Sprintf("role%d", i%10)}
			s.Priority = i % 3
			s.Max = 100
			s.Attributes = map[string]string{"zone": fmt.Sprint(i % 4)}
			for range (i * 7) % 100 {
				s.Occupy(s.Roles[0], "red")
			}
			if i%2 == 0 {
				s.Used = 100
			}
		}))
	}
	return f
}

func BenchmarkDecide(b *testing.B) {
	for _, n := range []int{100, 1000, 10000} {
		b.Run(fmt.Sprintf("servers=%d", n), func(b *testing.B) {
			f := fill(n)
			r := Request{VM: "vm-1", Tenant: "red", Role: "role1", Affinities: []Affinity{{Condition{"zone", Equal, []string{"1"}}, 10}}}
			b.ReportAllocs()
			for b.Loop() {
				if f.Decide(&r).Server == "" {
					b.Fatal("nothing fits")
				}
			}
		})
	}
}

// A server that is rejected costs no allocation.
func TestRejectionDoesNotAllocate(t *testing.T) {
	s := server("a-01", func(s *Server) { s.Used = 10 })
	r := Request{Role: "default", Requires: []string{"browser"}, Constraints: []Condition{{"n", Greater, []string{"1"}}}}
	if n := testing.AllocsPerRun(1000, func() { Fits(&s, &r) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// tieOf is what splits equal scores, written once more: FNV-1a of both ids by
// the standard library, mixed as SplitMix64 does.
func tieOf(vm, server string) uint64 {
	mixed := uint64(0)
	for _, id := range []string{vm, server} {
		h := fnv.New64a()
		h.Write([]byte(id)) // never fails, as hash.Hash says
		mixed ^= h.Sum64()
	}
	mixed ^= mixed >> 30
	mixed *= 0xbf58476d1ce4e5b9
	mixed ^= mixed >> 27
	mixed *= 0x94d049bb133111eb
	return mixed ^ mixed>>31
}
