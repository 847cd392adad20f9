// Package bus is Berth's use of NATS: how a program connects, which streams,
// buckets and consumers there are and how they are made, and the few ways in
// which messages are published so that each is announced once.
//
// JetStream itself is not wrapped; callers use nats.go's jetstream package.
package bus
