// Package looprunner is the durable observe→think→act loop.
//
// # The journal
//
// A loop is its journal: loop.<tenant>.<loop>.<name> in LOOPS, in the order
//
//	started → sandbox → observed → (thinking → decided → acted)… → ending → finished
//
// with, where they are needed, observed (after a decision to look again, or
// within a turn), retried (an attempt that certainly did not run), paused and
// resumed. Any runner may put in between the control entries stopRequested,
// pauseRequested, resumeRequested and message, which requests become. Every
// append expects the last sequence of the whole journal. Whoever loses an
// append reads what came first: a control entry is obeyed; an entry of a later
// lease epoch means that the loop is another's; one of an earlier epoch is a
// late write of a runner that has lost its lease, and is taken as it is.
//
// # What holds
//
//   - An act runs at most once. Its command's id is made of loop, step and
//     attempt, so every runner names it alike and the worker's claim drops the
//     second. A next attempt is journaled, with its deadline, before it is sent,
//     and only after the earlier one was rejected or was unclaimed 15 s after
//     its deadline, when no worker starts it any more (clocks may differ by
//     less than that).
//   - A model's answer is journaled before anything is done. The model is asked
//     at most once more per crash than there are turns, and told the same.
//   - A question to a person is answered by a message stored after it, whoever
//     runs the loop by then. After a pause, and after a takeover that took more
//     than a minute, the model is shown a new picture.
//   - A sandbox that was paused, by its idle clock or by somebody, is resumed when
//     the loop needs it.
//   - An unknown outcome goes to the model. It is never tried again blindly.
//   - What ends a loop by its limits follows from the journal alone: usage, the
//     price that started has, repeated screens and actions, the hosts shown. So
//     a successor comes to the same end. A sandbox that shows a host that it may
//     not is seen no more by the model; an action that is not allowed is never
//     sent, and its acted says rejected.
//   - A loop whose owner dies is taken over within 15 s (its lease is 6 s), and
//     within 1 s of a clean stop, as long as a runner has a slot free.
//   - A start request ends in started or in one rejected, and makes one loop
//     however often it is delivered. It is acknowledged once started is stored.
//   - A loop that runs owns its sandbox, and its outcome is settled (ending)
//     before the sandbox is killed, so a successor ends it the same way. The
//     kill is requested before finished is written; finished waits up to 10 s
//     to hear of it.
//   - No credential is in a journal: environment values of the sandbox are
//     replaced by ***. What a script types is in it, as people may replay it.
//
// # Where rejected lies
//
// The rejection of a start is loop.<tenant>.<loop>.rejected, where its
// requester listens; it is no part of a journal, and the same loop id may be
// started afterwards. Where a journal exists already (loopIdInUse), and for
// control requests (notFound, ended, badInput), it is
// event.<tenant>.<loop>.rejected, so that nobody writes into another's
// journal. Where the data names no valid loop id, the id derived from the
// request stands for it. A message that is no CloudEvent is a dead letter.
//
// # Failure windows
//
//   - A runner that is frozen just before it publishes a command and wakes when
//     another has the loop publishes the same attempt with the same deadline:
//     the claim makes it run once, and past the deadline no worker starts it.
//     That rests on the workers' and runners' clocks being within 15 s.
//   - An observation may be taken twice. It changes nothing.
//   - A command that no worker takes ends, after its deadline and 15 s, in the
//     next attempt; four such in a row (five minutes) end the loop as failed,
//     deadlineExceeded. One that was started and has not finished a minute after
//     the time in which a worker would (computer.FinishTime) is unknown.
//   - A crash between the create request and started leaves the request of the
//     sandbox out until the start is delivered again (10 s), which names the
//     same sandbox.
//   - A bus that is away for longer than 4.5 s costs every loop its lease; the
//     loops are taken on again when it is back, by whoever is first.
//
// # Concurrency
//
// A Runner is one blocking Run. Each loop has one goroutine that owns its
// journal and state, and a follower of its sandbox's events; the results of
// one server's sandboxes have one follower for all loops of the process, the
// control entries of all loops another. All runners of a fleet must have the
// same models: any of them may take in, or take over, any loop.
//
// What strangers publish into a journal, be it no event, or an entry of an
// unknown name, is passed over.
package looprunner
