package scheduler

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"berth/internal/events"
	"berth/internal/kv"
)

// noQuota is the quota of a tenant that has none.
const noQuota = -1

// quotas counts the sandboxes of each tenant that have not ended, those still
// waiting included. The term's mu guards it.
type quotas struct {
	limit map[string]int // tenants with a quota
	live  map[string]int
	comes map[string]int // being taken in
}

func newQuotas() *quotas {
	return &quotas{limit: map[string]int{}, live: map[string]int{}, comes: map[string]int{}}
}

func (q *quotas) set(tenant string, limit int) {
	if limit == noQuota {
		delete(q.limit, tenant)
		return
	}
	q.limit[tenant] = limit
}

func (q *quotas) count(rec kv.Placement, n int) {
	if rec.Phase == "" || rec.Phase == kv.Ended {
		return
	}
	if q.live[rec.Tenant] += n; q.live[rec.Tenant] == 0 {
		delete(q.live, rec.Tenant)
	}
}

// admit refuses a new sandbox that its tenant's quota does not allow. settle
// must be called once the record is written, or not.
func (t *term) admit(ctx context.Context, rec kv.Placement) (settle func(), err error) {
	t.mu.Lock()
	limit, limited := t.quotas.limit[rec.Tenant]
	_, known := t.vms[rec.VMID] // the same request again
	have := t.quotas.live[rec.Tenant] + t.quotas.comes[rec.Tenant]
	if !limited || known || have < limit {
		t.quotas.comes[rec.Tenant]++
		t.mu.Unlock()
		return func() {
			t.mu.Lock()
			defer t.mu.Unlock()
			if t.quotas.comes[rec.Tenant]--; t.quotas.comes[rec.Tenant] == 0 {
				delete(t.quotas.comes, rec.Tenant)
			}
		}, nil
	}
	t.mu.Unlock()
	// The mirror may not have heard of this very request's record yet.
	there, _, err := kv.Get[kv.Placement](ctx, t.placements, kv.VMKey(rec.VMID))
	if err == nil && there.Request == rec.Request {
		return func() {}, nil
	}
	if err != nil && !errors.Is(err, kv.ErrNotFound) {
		return nil, err
	}
	return nil, &refusal{subject: rec.VMID, code: events.CodeQuota,
		message: fmt.Sprintf("tenant %q has %d sandboxes, waiting ones included, and may have %d; kill one or ask an operator", rec.Tenant, have, limit)}
}

// quotaEvent is the data of berth.quota.set.v1 as an event.
type quotaEvent struct {
	Tenant       string         `json:"tenant"`
	MaxSandboxes *int           `json:"maxSandboxes"`
	Request      events.Request `json:"request"`
}

// takeQuota sets or lifts a tenant's quota. Sandboxes over it stay.
func (t *term) takeQuota(ctx context.Context, r request) error {
	var data events.QuotaSet
	if err := r.decode(&data); err != nil {
		return asRefusal(err, data.Tenant)
	}
	if err := events.CheckID("tenant", data.Tenant); err != nil {
		return &refusal{code: events.CodeBadInput, message: err.Error()}
	}
	if data.Tenant == events.FleetTenant || data.MaxSandboxes != nil && *data.MaxSandboxes < 0 {
		return &refusal{subject: data.Tenant, code: events.CodeBadInput, message: "maxSandboxes: not negative, or null for none; the fleet itself has no quota"}
	}
	limit := noQuota
	if data.MaxSandboxes != nil {
		limit = *data.MaxSandboxes
	}
	if limit == noQuota {
		if err := t.placements.Purge(ctx, kv.QuotaKey(data.Tenant), jetstream.PurgeTTL(markerTTL)); err != nil {
			return fmt.Errorf("lift quota of %s: %w", data.Tenant, err)
		}
	} else {
		_, _, err := kv.Update(ctx, t.placements, kv.QuotaKey(data.Tenant), func(q *kv.Quota, _ uint64) error {
			*q = kv.Quota{Tenant: data.Tenant, MaxSandboxes: limit, Request: r.ref}
			return nil
		})
		if err != nil {
			return err
		}
	}
	t.mu.Lock()
	t.quotas.set(data.Tenant, limit)
	t.mu.Unlock()
	return t.say(ctx, events.FleetTenant, data.Tenant, events.TypeQuotaSet, "quota", r.ref.Token()+"-quota",
		quotaEvent{Tenant: data.Tenant, MaxSandboxes: data.MaxSandboxes, Request: r.ref}, "")
}
