// Package replay retells a loop from its journal: as a story of turns, and as
// one HTML page that needs nothing else.
//
// # What holds
//
//   - The page is self-contained: its pictures are inlined, and its own
//     Content-Security-Policy forbids every request, every script but its own
//     and every style but its own. Titles, addresses, what a model or a person
//     wrote: all of it is text on the page and never markup.
//   - A picture is shown only if its bytes are a PNG, JPEG or WebP picture,
//     whatever the journal calls them; one that has expired is said to be.
//   - What a turn's actions do is drawn over the picture that the model decided
//     on, in the display's own coordinates, whatever size the page shows it at.
//   - A journal of a loop that has not finished is told as far as it goes.
//     Entries of unknown names are passed over.
package replay
