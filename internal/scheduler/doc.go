// Package scheduler takes in requests, decides where sandboxes live and sees
// every one of them to its end.
//
// # Shape
//
// Any number of schedulers may run. Each mirrors PLACEMENTS and HEARTBEATS in
// memory; the one that holds the lease `scheduler` leads, the others stand by
// with a mirror that is as fresh, so that a successor need not read anything.
// The leader drives each sandbox with one function, step: given the sandbox's record
// and what the streams say about it, do the next thing that is due. Watches,
// results and clocks only say which sandbox to look at again, so a lost or
// repeated wake-up changes nothing, and a new term simply looks at all.
//
// Changes of one server's record that come while a write of it is under way
// are written together (edit): under load a placement costs less than a write.
//
// # Guarantees
//
// Nothing is decided by the mirror alone: every change is a compare-and-set of
// `server.<id>` or `vm.<vm>`, so two schedulers that both believe they are
// active overbook nothing and end nothing twice. A request is acknowledged
// once its record is stored. Whoever moves a phase announces it, and an
// announcement is stored once (bus.Announce).
//
// # Failure window
//
// A crash between moving a phase and announcing it is made good by the next
// term: it announces the last move of every record that is newer than the
// watermark the term before left in PLACEMENTS `scheduler`.
package scheduler
