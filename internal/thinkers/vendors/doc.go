// Package vendors is what the models behind a vendor's HTTP API have in
// common: how the loop's `model` object is read, what a vendor's errors mean,
// when an answer is asked for again, and how a conversation is kept short.
//
// # Settings
//
// The `model` object is read strictly: an unknown field, a value out of range
// or anything that looks like a credential is refused before anything runs.
// Credentials come from the environment of the process that thinks and from
// nowhere else, so none is ever in a request, a journal or a log. A message
// about one names the variable and never its value.
//
// # Errors
//
// Each ends the loop with a code of its own (see the constants), except those
// that pass: the SDK tries 408, 409, 429 and 5xx again with growing pauses and
// as Retry-After says, and Again does the same for an answer whose stream broke
// off or reported such an error, which no SDK does. An answer that broke off
// was never journaled, so asking again repeats nothing but its cost.
package vendors
