// Package demoapp is the small web application that the repository's own
// examples drive: a harbour office of four tasks (a form, a list, a board, a
// signal desk), a page of pop-ups, and a report.
//
// The server is the judge. A page sends what happened in it, the server
// records it and answers with the part's status and title, and only then do
// the page's document.title and its status lamp change. So a title, a pixel
// of the lamp and GET /api/state can not disagree about what was done.
//
// State is kept per session, named by a cookie or by ?run=ID, in memory and
// bounded: maxSessions sessions, the least recently used leaves first, and of
// each the latest maxEvents events. A restart forgets everything. All methods
// are safe for concurrent use.
//
// Every page is laid out at fixed pixel positions for a viewport of 1280×800,
// so that a script with coordinates means the same whatever the fonts are.
// Nothing is loaded from another host.
package demoapp
