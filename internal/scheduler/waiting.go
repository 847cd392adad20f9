package scheduler

import (
	"cmp"
	"slices"
	"sort"
	"strings"

	"berth/internal/kv"
)

// waitingList holds the requests that are to be placed: in order of arrival
// within a tenant, in turn between tenants. The term's mu guards it.
type waitingList struct {
	tenants map[string][]waiter // each sorted by order
	tenant  map[string]string   // vm → tenant
	last    string              // tenant that was served last
}

type waiter struct {
	vm    string
	order uint64
}

func newWaitingList() *waitingList {
	return &waitingList{tenants: map[string][]waiter{}, tenant: map[string]string{}}
}

func (w *waitingList) add(rec kv.Placement) {
	if _, there := w.tenant[rec.VMID]; there {
		return
	}
	list := w.tenants[rec.Tenant]
	i := sort.Search(len(list), func(i int) bool { return list[i].order > rec.Order })
	w.tenants[rec.Tenant] = slices.Insert(list, i, waiter{rec.VMID, rec.Order})
	w.tenant[rec.VMID] = rec.Tenant
}

func (w *waitingList) remove(vm string) {
	tenant, there := w.tenant[vm]
	if !there {
		return
	}
	delete(w.tenant, vm)
	list := slices.DeleteFunc(w.tenants[tenant], func(x waiter) bool { return x.vm == vm })
	if len(list) == 0 {
		delete(w.tenants, tenant)
		return
	}
	w.tenants[tenant] = list
}

func (w *waitingList) len() int { return len(w.tenant) }

// turns returns everything that waits: the first of each tenant in turn,
// beginning after the tenant that was served last, then the second of each.
func (w *waitingList) turns() []string {
	names := make([]string, 0, len(w.tenants))
	for name := range w.tenants {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(boolInt(a <= w.last), boolInt(b <= w.last)), strings.Compare(a, b))
	})
	out := make([]string, 0, len(w.tenant))
	for i := 0; len(out) < len(w.tenant); i++ {
		for _, name := range names {
			if list := w.tenants[name]; i < len(list) {
				out = append(out, list[i].vm)
			}
		}
	}
	return out
}

func boolInt(b bool) int {
	if b {
		return 1
	}
	return 0
}
