// Package worker executes the commands of servers, each at most once.
//
// A Worker runs one tenure for every server whose lease it holds, and stands
// by for the others. A tenure registers its lease epoch, reads the provider's
// inventory, and then executes what the server's two consumers deliver: one
// mailbox per sandbox runs its commands one at a time in stream order; kills
// come by a consumer of their own and overtake.
//
// # What holds
//
// A command is executed only by whoever published its claim (`started`, on a
// result subject that was empty) and knows that it did. Everything that ends a
// command is published expecting the claim, or the empty subject, as the last
// message; so a command ends in exactly one `finished`, however often it is
// delivered and however many workers believe that they hold the lease. Only
// then is it acknowledged. What is unfinished when a worker dies is delivered
// to its successor from the consumer's start in order, because a tenure resets
// both consumers before it consumes; claims drop what was done.
//
// A successor that finds another's claim asks the provider (Recall), repeats
// what has no effect (observe) or is idempotent (kill), looks (create, pause,
// resume), or says `unknown` with a fresh picture. It never runs an act again.
//
// While NATS is away results wait in memory, and nothing new starts, because
// nothing can be claimed. They are published when it returns, also by a later
// tenure of the same process.
//
// # Failure windows
//
//   - Between the claim and the first effect a dead worker costs an `unknown`
//     of a command that never ran. The model decides; nothing is re-run.
//   - A worker that was frozen past its lease checks the lease (Lease.Trusted)
//     just before each batch, and its context ends when its timers run. What it
//     sent before it froze can take effect late at a server that does not check
//     epochs (Playwright, E2B); at one that does it is refused.
//   - A provider call that ignores the end of its context is left behind after
//     two seconds; its late results are dropped, its late effects cannot be.
//   - A create that fails is killed at the provider before `failed` is said. If
//     the provider does not confirm the kill within 30 s the outcome is
//     `unknown`, so that nobody frees the slot on it; the inventory kills what
//     is left once its allocation has gone.
//   - A worker that loses its lease in a create says nothing and touches
//     nothing: its successor looks and says.
//
// # When full
//
// A sandbox's mailbox holds bus.BacklogPerSandbox commands; the excess is
// `rejected`, code `busy`. Commands that were in the stream before this tenure
// are not counted, they were admitted before. A full RESULTS stream stops
// execution; a full FRAMES store costs the picture (`ok` with error
// `noPicture`), not the act. Values that do not fit the result message are
// dropped, each with an error that says so.
//
// Pictures between a server's answer and the store take at most
// Options.PictureBytes (256 MiB) for all servers together: room is taken before
// one is asked for, by the most that a PNG of its display can have, and what has
// more is refused. An observation waits for room within its time, an act with
// screenshots as long as it may start; all else waits for none of it.
//
// # Heartbeats, health and inventory
//
// A heartbeat goes out every 2 s ± 10 %, and at once when the probe, the breaker
// or the list of lost sandboxes changes. While the probes have failed for 15 s or
// more nothing but a kill begins: a command is rejected, code serverDown, at its
// turn. The breaker holds up creates only; see breaker for the answers it counts.
//
// Every 5 s the provider's inventory is compared with the server's record both
// ways: a sandbox without its allocation in two looks at least 5 s apart is
// killed (an answer that lacks something once is no order to delete), and an
// allocation whose create was `ok` but whose sandbox neither List nor Get finds
// is reported as gone until the allocation has been freed. The worker never edits
// allocations.
//
// # Balance
//
// Workers tell each other on LEASES `worker.<name>` which servers they could
// serve and which they hold: every 2 s, when that changes, and to newcomers at
// once. A peer that is silent for 7 s is gone. A free server is taken at once by
// a worker that has no more than any peer that could serve it, after 1.25 s and
// more by one that has more: so shares stay even, and a dead worker's servers
// are served within 15 s by whoever is left.
//
// A worker that has at least two servers fewer than a peer asks that peer for
// one. The peer hands over the least busy one that both can serve: it stops
// reading commands, lets what runs finish, serves kills to the end, and releases
// the lease; the asker hears that and takes it. What has not ended in 10 s is
// not cut short: the server stays, and rests for 30 s, each time twice as long.
// So does a server that the asker did not take within 5 s. One server moves at a
// time, to one who asked for it, and every move evens out; where the numbers
// differ by one nothing moves. Nothing of this is relied on for safety: who
// executes is decided by lease and claim alone.
//
// # Clocks and registries
//
// Deadlines are compared with this machine's clock; the default one counts from
// the stream's time of publication, so the two clocks should agree to a second.
// Where two workers' registries disagree on a server, the entry of the one that
// takes the lease holds, and event._.<server>.alert says so.
//
// A Worker's methods are safe for concurrent use.
package worker
