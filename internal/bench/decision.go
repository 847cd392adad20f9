package main

import (
	"context"
	"fmt"
	"time"

	"berth/internal/placement"
)

// placementDecision times one decision with role, priority and one affinity,
// where a tenth of the servers has the role and half of all are full.
func placementDecision(ctx context.Context, opts options, print func(figure)) error {
	for _, n := range []int{100, 1000, 10000} {
		f := placement.NewFleet()
		for i := range n {
			s := placement.Server{
				ID: fmt.Sprintf("ax-%05d", i), Roles: []string{fmt.Sprintf("role%d", i%10)}, Priority: i % 3, Max: 100,
				Isolation: placement.IsolateRole, Attributes: map[string]string{"zone": fmt.Sprint(i % 4)}, Capabilities: []string{"browser"},
			}
			for range (i * 7) % 100 {
				s.Occupy(s.Roles[0], "red")
			}
			if i/10%2 == 0 {
				s.Used = s.Max
			}
			f.Put(s)
		}
		var s sample
		begin := time.Now()
		for i := 0; time.Since(begin).Seconds() < opts.seconds/2 && ctx.Err() == nil; i++ {
			r := placement.Request{VM: fmt.Sprint("vm-", i), Tenant: "red", Role: fmt.Sprintf("role%d", i%10), Requires: []string{"browser"},
				Affinities: []placement.Affinity{{Condition: placement.Condition{Attribute: "zone", Operator: placement.Equal, Values: []string{"1"}}, Weight: 10}}}
			at := time.Now()
			d := f.Decide(&r)
			s.each = append(s.each, time.Since(at))
			if d.Server == "" {
				return fmt.Errorf("nothing fits: %s", d.Explanation)
			}
		}
		s.all = time.Since(begin)
		print(figure{Name: fmt.Sprintf("placement_decision/servers=%d", n), N: len(s.each), PerSecond: s.rate(), P50us: s.percentile(0.5), P99us: s.percentile(0.99)})
	}
	return nil
}
