// Package firecracker runs microVMs: one Firecracker process each, driven over
// its REST API on a unix socket, with the agent inside reached over vsock.
//
// # Guarantees
//
// Every call of the API is bounded in time and its answer in size; a refusal is
// an *APIError with Firecracker's own fault_message. A VM whose process ends is
// gone, unless it was paused: then nothing runs and its state lies in files. A
// VM is found again by a later process of the same host, whatever this one was
// doing when it ended: a pause or resume that had not taken effect is undone or
// finished. The VMM's process is this process's user's; it has no chroot of its
// own (see docs/sandboxd.md for why there is no jailer).
//
// # Files
//
// In a VM's directory, which is also the VMM's working directory, so that the
// paths in a snapshot fit any directory that it is loaded in: api.sock, v.sock,
// log (the serial console where that is on), vm.json (which process, which
// snapshot), state.N and memory.N (the N-th snapshot). The memory file of the
// snapshot that a VM was resumed from backs its memory and stays until the next
// pause. There is no disk to keep: the root drive is read-only and shared, what
// a guest writes is in its memory.
//
// # Failure window
//
// A snapshot has the guest's memory in it, secrets too; its files can be read by
// this process's user only. A VM that is made from a template shares with its
// siblings what the template's memory held; see Wake for what is made anew.
package firecracker
