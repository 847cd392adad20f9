// Package playwright is the provider whose sandboxes are browsers on this
// machine: headless Chromium, driven by Playwright and CDP. It is what Berth
// falls back to when there is neither a self-hosted server nor an E2B account.
//
// # One process per sandbox
//
// A sandbox is one browser process with its own profile, clipboard, downloads
// and debugging port on loopback: Playwright's contexts within one browser
// share a clipboard, so they do not keep tenants apart. The process is started
// by this package, in a session of its own, so it outlives the worker. One
// driver (Node.js) serves all browsers of a provider; each browser has two
// connections: Playwright's, for pages, pointer, keyboard, dialogs and
// downloads, and one of our own (devtools) for pictures, navigation, the
// clipboard, and keys and buttons that Playwright's API lacks.
//
// Spares are browsers that were started, connected and painted beforehand.
// Create hands one out in milliseconds and sets another display on the fly;
// without a spare it takes a second or two. A spare was never anybody's
// sandbox, and a sandbox never becomes a spare.
//
// # State directory
//
// StateDir/browsers/<random>/ has all that is of one browser: its profile, its
// downloads, its log, and sandbox.json, which says which process it is and,
// from Create on, whose sandbox. That file is replaced atomically before
// Create returns. A later New takes over every browser recorded there whose
// process lives (same pid, same start time, same profile in its command line)
// and removes all the rest: spares, browsers of a create that did not finish,
// profiles of the dead. The directory is locked, so two workers never drive
// one browser; New waits for the lock. Close leaves the sandboxes running.
// With Ephemeral the browsers die with the process instead, however it ends.
//
// # What happens when
//
//   - the worker dies: its browsers live, and the next New takes them over.
//     What a key, hold, mouseDown or drag held down is released then (it is
//     noted in held.json before it is pressed). A character of a type action
//     may be left without its keyup.
//   - a browser or its active page crashes or is killed: the sandbox leaves the
//     inventory at once, calls in it end with ErrLost, and the profile is
//     removed. Other sandboxes are not touched. A crashed page in the
//     background is only closed.
//   - the driver dies or hangs: it is restarted (about two seconds) and
//     connects to every browser again. A call at work ends with
//     ErrUnavailable; later ones wait up to 20 s for the new connection. While
//     there is none, dialogs are not answered, and the display's size is the
//     window's.
//   - a page hangs: an observation is cancelled without consequence. An input
//     that the page has not taken in cannot be called back, so half a second
//     after its ctx has ended, or after 30 s, the browser is closed and the
//     sandbox is lost: nothing arrives late. A load is stopped instead, and
//     the sandbox lives on.
//   - Kill: the whole process group gets SIGKILL, and Kill returns when none of
//     it runs and the profile is gone. A create at work ends with ErrLost.
//
// Failure windows that remain: a browser that was forked when the worker died
// before it wrote sandbox.json is found by its command line, by the next New
// only. A machine that loses power loses its browsers; the boot id changes
// then, and also when New finds that every recorded sandbox is dead. A worker
// that is frozen keeps its lock, so no successor can act beside it on the same
// directory; lease epochs are compared within one process only.
//
// # What the vocabulary means here
//
// It is a browser, not a desktop: no shell, no windows, no files, no live
// view, no pause; each is refused with ErrUnsupported. SetTimeout is accepted
// and does nothing. open takes URLs only (see address). A wheel tick is
// PixelsPerTick, one wheel event per tick. type presses the keys of a US
// keyboard and inserts every other character, tabs among them. zoom returns
// the region in its own size. The newest page is the active one; when it
// closes, the youngest that is left is. Dialogs are answered at once (see
// onDialog) and reported by the next observation, like downloads.
//
// A select element is given a list that takes clicks (see prepareSelect).
//
// Known gaps: a select element in a frame of another process shows a list that
// takes no clicks (arrow keys and Enter choose in it); the browser's own shortcuts
// (F5, Control+T, Alt+Left) reach the page and do nothing else (the mouse's
// back and forward buttons do); a file chooser and a permission request are
// refused by the browser.
//
// # Isolation
//
// Browsers of one provider run as one user of one machine, with a clean
// environment (no variable of the worker's reaches them), and as root without
// Chromium's own sandbox. Pages cannot reach the debugging ports of the
// provider's browsers (see guard), nor local files, but they reach the
// machine's network, loopback included. Whoever can log in to the machine can
// reach the debugging ports.
package playwright
