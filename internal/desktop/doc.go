// Package desktop is one real X11 desktop: Xvfb, the window manager openbox,
// and in Go, over the X protocol, everything that a person's hands and eyes do.
// Input goes through XTEST, pictures come through MIT-SHM, the clipboard is a
// selection owner of its own: no action but `run` and `open` starts a process.
//
// It is what runs inside a sandbox, as the program that `sandboxd agent` starts
// (see Serve), in a container or in a microVM. It isolates nothing itself.
//
// # Guarantees
//
// A Session is ready when the keyboard layout has been checked, a window
// manager serves and a painted frame has been read back. Batches run one at a
// time; pictures are taken at any time. Every key and button is released when
// an action ends, fails or is cancelled, except buttons that a mouseDown holds
// while all goes well. Text arrives exactly as given: characters that the
// layout lacks, also those beyond the BMP, get keymap entries for a while.
//
// # Failure window
//
// An action is a stream of requests to the X server. When the server dies, or
// does not answer for a second and a half after a cancelled action, the session
// is down for good and the action's outcome is Unknown. When this process dies
// the X server dies with it, so nothing stays pressed.
//
// A keymap entry is changed when the program in front has said that it handled
// its keys, or, where it cannot say, no sooner than a second after the last
// use. A program that is further behind than that sees the newer character;
// this takes more new characters at a time than the keymap has unused keys,
// which are about twenty.
package desktop
