// Package computer is the vocabulary of computer use: what an agent may do to
// a sandbox (Action), what it gets back (ActionResult, Observation), and how
// keys are named. It is the single normaliser of keys, modifiers, coordinates
// and scroll units: commands from the bus, scripts, models and every provider
// go through it, so that one action means one thing everywhere.
//
// Coordinates are display pixels of the sandbox, origin top left, 0 is a
// coordinate. Scroll distances are wheel ticks, positive = right and down.
// Keys are W3C UI Events KeyboardEvent.key values.
//
// The package knows no bus and no provider; it only imports the standard
// library. All its values are immutable after DecodeActions and safe to share.
package computer
