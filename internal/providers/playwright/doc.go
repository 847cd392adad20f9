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
// downloads, its log, paused.json while it is paused, and sandbox.json, which says which process it is and,
// from Create on, whose sandbox. That file is replaced atomically before
// Create returns. A later New takes over every browser recorded there whose
// process lives (same pid, same start time, same profile in its command line)
// and every paused sandbox, and removes all the rest: spares, browsers of a create that did not finish,
// profiles of the dead. The directory is locked, so two workers never drive
// one browser; New waits for the lock. Close leaves the sandboxes running.
// With Ephemeral the browsers die with the process instead, however it ends.
//
// # Pause and resume
//
// A pause ends the browser, so that a paused sandbox takes no memory, and keeps
// what a person expects to find again: cookies, those of the session too;
// localStorage, IndexedDB and whatever else sites store; the open pages with
// their addresses, order, sessionStorage, and which is active; the clipboard's
// text; where the pointer is; files that were downloaded; dialogs and downloads
// that no observation has told yet. A resume starts a browser on the same
// profile, in the place that the sandbox has kept on the server, and loads the
// pages anew. It takes no spare, and returns when the active page has painted.
//
// Not kept: the memory of pages (half-filled forms, scroll positions, timers,
// WebSockets, what was written into about:blank), a page's history and opener,
// sessionStorage of frames and of sites that a page has left, pictures in the
// clipboard, downloads under way, pressed keys and buttons. A page that was
// made by POST is asked for by GET; one with a blob's address becomes blank.
//
// What a browser forgets at its end is written to paused.json beside
// sandbox.json, mode 0600 and synced, before it is asked to exit; then the
// browser writes its profile, for which it has 10 s. From that file's rename on
// the sandbox is paused, until a resume has done all else and removes it: a
// worker that dies in between leaves a sandbox that is one or the other, with
// its state, and New ends the browser that is still there half way. When the
// state cannot be written the sandbox goes on. When a browser does not start, or
// paused.json cannot be read, it stays paused: a resume can be tried again, or
// the sandbox killed. Chromium's own session restore is not used: it loads pages
// before their guard is there, and does not say what it has lost.
//
// A pause waits up to 30 s for the calls under way; other calls meanwhile, and
// in a paused sandbox, are ErrPaused, and nothing ran. Kill works at every
// moment. A page that hangs is kept by its address only. One that does not
// answer when it is reopened (10 s), or gives no picture, holds up no resume; it
// loads on, and the next resume tries again. What a page stores between the
// reading of its state and the exit, some tenths of a second, is kept in
// localStorage and IndexedDB only. A browser that does not exit in 10 s is
// killed; what it held back of localStorage, for up to a minute, is lost then.
//
// # Snapshots
//
// A snapshot is the same state, kept in StateDir/templates as a template for
// sandboxes of the same tenant on this server: what paused.json has, what the
// open pages have in localStorage, and a copy of the parts of the profile in
// which sites store things. While that is copied every process of the browser is
// stopped, so that the files are of one moment; no page is loaded. What a page
// that is closed has stored in localStorage in the second before may be missing.
// Create from it starts a browser (it takes no spare), restores the state and
// opens the pages; the display, TZ and dialogs are the create's own. Downloaded
// files are not in it. The cookies of whoever used the sandbox are.
//
// At most 32 are kept, of at most 1 GiB each. The Provider interface has no way to
// remove one: whoever operates the server removes its directory, at any time;
// sandboxes that were made from it go on.
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
// only. A machine that loses power loses its browsers, and keeps its paused
// sandboxes; the boot id changes then, and also when New finds that every
// recorded sandbox is dead. A worker
// that is frozen keeps its lock, so no successor can act beside it on the same
// directory; lease epochs are compared within one process only.
//
// # What the vocabulary means here
//
// It is a browser, not a desktop: no shell, no windows, no files, no live
// view; each is refused with ErrUnsupported. SetTimeout is accepted and does
// nothing: Berth's clocks end sandboxes, paused ones too. open takes URLs only (see address). A wheel tick is
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
