// Package kv holds the durable records of the control plane in JetStream KV
// buckets, and the two ways to change them: Update, a compare-and-set loop,
// and Lease, an exclusive hold with a fencing epoch.
//
// Records decide things, so their buckets answer reads through the stream's
// leader (AllowDirect is off) and every write names the revision it replaces.
// A write whose acknowledgement is lost is read back; the functions handed to
// Update are therefore idempotent (they recognise their own earlier success).
//
// All types are safe for concurrent use.
package kv
