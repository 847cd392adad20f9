// Package toolcall stands between the tool calls of a language model and
// Berth's actions: what a call asks for becomes part of one command, and what
// became of the command becomes the answer to each call.
//
// # What holds
//
//   - The calls of one answer become one command, in their order. The first
//     that cannot be carried out as it stands (malformed, out of range,
//     unsupported, not allowed) ends it: those before it run, it is answered
//     with the reason, and those after it with "not executed".
//   - Every call has exactly one answer.
//   - Which actions belong to which call is journaled with the decision, so the
//     answers are the same whoever gives them, also after a crash.
//   - An unknown outcome is told as such, beside the fresh screenshot. It is
//     never tried again here.
//   - Nothing is clamped but scroll distances, and a clamped one is told.
//
// A model's wheel pixels become ticks here and nowhere else (Ticks).
package toolcall
