// Package providertest holds what tests of providers share: Fake, a Provider
// that does no I/O, for tests of everything above providers; and Exercise, the
// contract suite that every Provider passes.
//
// Fake uses channels, mutexes and timers only, so it lives inside a
// testing/synctest bubble and its times are the bubble's. One Fake stands for
// one server: it outlives the clients that Provider hands out, as a server
// outlives its workers, and its logs (Effects, Lives) are the oracle of fault
// tests: what really happened at the sandbox, not what anyone believes.
//
// Exercise holds a provider to what the package providers and the contract
// promise, and uses as its oracle a web page that records the DOM events that
// reached it and posts them to a server inside the test.
package providertest
