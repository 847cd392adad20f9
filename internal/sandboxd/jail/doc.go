// Package jail runs a program in a sandbox of its own on Linux: user, mount,
// pid, ipc, uts and network namespaces, a root file system made of the host's
// read-only /usr and fresh tmpfs, and a cgroup with limits (v2 or v1).
//
// The host's program re-executes itself: whoever uses the package calls Main
// first thing, which takes over in the children.
//
//	sandboxd ── Start ──► init (pid 1, root of its user namespace; reaps)
//	                        └─ agent (the same program, root of its user namespace)
//	                             └─ what the sandbox runs, as users without rights
//
// # Guarantees
//
// Every sandbox has 65,536 user ids of its own on the host; none of them owns a
// file there. Its processes see no process, file (but for /usr and a few
// directories of /etc, read-only), socket, shared memory or loopback service of
// the host or of another sandbox. All that it writes is in memory, bounded by
// the sizes of its tmpfs and by its cgroup, and is gone with it. Its memory,
// processes and processor time are bounded, so one that eats without end harms
// itself. No program in it can gain rights (no_new_privs, nosuid).
//
// The way out is slirp4netns, a user-mode network stack: the sandbox reaches
// public addresses; loopback, private, link-local and metadata addresses and
// the host's own are unreachable unless Network.Open has them. The host's own
// addresses are those at the sandbox's start.
//
// A sandbox ends when its first process does, and takes all others with it; it
// does not end with the process that started it. Find takes over one that runs.
//
// # What is not enforced
//
// Probe tries all this out and says what the host denies, in words; nothing is
// left out silently. The kernel is shared: a flaw in it is a way out. Programs
// may make nested user namespaces, which Chromium's own sandbox needs.
package jail
