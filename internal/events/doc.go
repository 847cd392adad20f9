// Package events is the wire: identifiers, subjects, the CloudEvents envelope
// and the data of every message type. The constants here are what the docs
// and deploy files are generated from and what programs in other languages
// rely on.
//
// Decoding is strict for what comes from outside (an unknown field is refused
// by name, because a misspelt "ttlSecond" would otherwise be obeyed as
// "forever") and tolerant between Berth's own programs, so that two versions
// can run side by side.
package events
