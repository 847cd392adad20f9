// Package e2b is the provider of E2B's cloud and of installations that are
// compatible with it: sandboxes over the REST API, and all that happens inside
// one over its envd (Connect RPC, in JSON, over plain HTTP).
//
//	Create ─ POST /sandboxes ─► sandbox ─ Start bash ─► Xvfb, desktop environment
//	Execute ─ Start bash ─► script.sh: lock, epoch, key, steps … frames ─► results
//	Recall ─ Start bash ─► script.sh: the record of a key
//
// # Guarantees
//
// A batch is one process in the sandbox: one round trip, whatever the number of
// its actions. What a caller gives (argv, texts, targets) travels as arguments and is never
// parsed as a command. The process takes the sandbox's lock, refuses an
// older lease epoch than the sandbox has seen, and claims the batch's key: the same key never runs
// twice, whoever sends it. It records every step before and after, so that a
// successor can ask (Recall), and goes on to the batch's end when the connection
// breaks; the provider then asks what became of it before it says that nobody knows.
//
// A call that is given up revokes its key: a batch that has not begun never will,
// one that runs is ended and what it held is released. A batch that is killed
// outright leaves what it held to the next one, which releases it first.
//
// Sandboxes carry {server, vmId, fence, tenant, role, owner, session, display}
// as metadata. List returns those of this server's id and nothing else of the
// account: who compares inventories ends what it does not know.
//
// The API key goes to the API's address only, the sandbox's token to the sandbox
// only, neither into a log, an error or a URL. Answers are bounded in size, and
// must have the shape that the API's description gives them; a redirect is not
// followed.
//
// Errors: of the API 400 is ErrInvalid, 404 ErrNotFound, 409 ErrConflict, 429 a
// RateLimitError, or ErrFull where it is about sandboxes at a time, 503 for
// want of capacity ErrFull, 504 ErrTimeout, all else ErrUnavailable. Of a
// sandbox's proxy 502 is looked into: gone is ErrLost, or ErrNotFound where
// nothing had begun, paused ErrPaused, a closed port ErrUnavailable; 409, a sandbox in
// transition, is ErrConflict.
//
// # Failure window
//
// The records lie in the sandbox, where its own programs could change them: they guard
// against accidents of Berth's, not against what runs in the sandbox.
//
// An epoch is known to the sandbox from the first batch under it on. Until then
// a worker that was frozen and wakes can still begin a batch; with a key that
// its successor has recalled as unknown that batch runs late, once.
//
// E2B has no idempotency key: a create whose answer is lost is looked for by its
// metadata and ended; where that fails too the sandbox stays until its time-out,
// or until whoever compares inventories ends it.
package e2b
