// Package sandboxd is the reference self-hosted sandbox server: the HTTP API of
// api/sandboxd.yaml over machines that hold one desktop each.
//
//	request → api (key, limits, shape) → box (one sandbox's life) → Machine
//	                                        └─ actions, pictures → agent inside
//
// A Machine makes jails (package jail) or microVMs (package firecracker, with
// package guest inside). The agent (package desktop) runs inside the sandbox,
// keeps the record of its commands, and survives this process. This process keeps
// who a sandbox is, in its state directory, and when it ends.
//
// # Guarantees
//
//   - A sandbox is announced (201) when it is ready to use; a create that fails,
//     is killed, or that everybody who asked for it has gone away from, leaves
//     nothing.
//   - A full or draining server refuses at once; nothing queues. Sandboxes that
//     start count; warm spares do not.
//   - The same Idempotency-Key never makes a second sandbox, also after the first
//     has ended (the last 10,000 endings, until a restart), and never runs a
//     command again (the last 1,000 commands of a sandbox, for its life).
//   - A command with an older fence or lease epoch than the sandbox has seen is
//     refused and nothing of it runs.
//   - A sandbox whose machine dies is off the inventory before its calls return,
//     and they say that it is lost.
//   - A restart, also by SIGKILL, takes over the sandboxes that run, with their
//     ends of life, fences and remembered commands. The boot id changes when
//     there were sandboxes and none is left.
//   - Where the machine can, a sandbox is paused, resumed and kept as a template
//     while no call to its agent is under way; a pause waits for those and refuses
//     new ones. A template is its tenant's: for others there is none of that name.
//
// # Failure window
//
// A command that runs while this process or its caller dies goes on inside, for
// computer.ActTime at most, and can be recalled with what became of it. A sandbox
// that was starting at that moment is removed at the next start, and so is a
// microVM that still writes a snapshot then and does not answer in 5 s. Spares end with
// a process that is asked to stop, and are taken over after one that died. End-of-life
// times pass unnoticed while no process runs; the next one ends those first.
package sandboxd
