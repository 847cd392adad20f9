// Package placement decides where a sandbox goes: filter, then score, then
// place, as kube-scheduler does, simplified to what a fleet of servers needs.
//
// It is pure: it knows only the standard library, reads no clock and keeps no
// secret state, so a decision can be reproduced from its inputs. It never acts;
// the scheduler commits what it decides by compare-and-set, with the same Fits.
//
// Filters are hard: health, admin state, role, capabilities, constraints,
// isolation, capacity. Scores are soft and compared in order: health (a
// degraded server only when no healthy one fits), priority, affinity weight,
// spread (the emptier server, by share of its capacity), and last a hash of
// (vm, server), so that equal servers are split by neither chance nor order.
package placement
