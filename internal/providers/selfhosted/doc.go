// Package selfhosted is the provider of servers that speak api/sandboxd.yaml:
// a typed client.
//
// # Guarantees
//
// A call is made once. (The transport sends a request again when a connection
// that it had kept turns out to be dead; creates and batches then carry the same
// Idempotency-Key, under which a server runs nothing twice.) A server's answer is bounded in size and must have the
// shape that the description gives it; anything else, such as another program
// that answers at the address, is ErrUnavailable and never "not found". A
// redirect is not followed. The key goes to the configured address only and
// into no log, error or URL: the live view's URL holds a token for one sandbox
// that expires.
//
// Errors: 400 and 413 are ErrInvalid, 404 ErrNotFound, 409 ErrFenceStale or
// ErrConflict (the vm is another placement's) or ErrPaused, 410 ErrLost, 429 a RateLimitError, 501 ErrUnsupported, 503 with
// sandbox_capacity_unavailable ErrFull, other faults of the server and of the
// network ErrUnavailable, no answer in time ErrTimeout.
//
// # Failure window
//
// When a connection breaks after a batch was sent, or ctx ends, nobody can say
// how far the batch went; the server cancels it, releases what it held, and
// Recall tells what it recorded. A create that breaks off is given up by the
// server when it notices, unless the sandbox had been announced: then it runs
// until its time is up or a reaper compares inventories.
package selfhosted
