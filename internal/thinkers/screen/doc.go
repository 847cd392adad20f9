// Package screen prepares screenshots for models and leads the coordinates
// that a model gives back to the display.
//
// A model gives coordinates in pixels of the picture that it was sent. A
// picture over the model's limit is made smaller before it is sent, since a
// vendor either refuses it or makes it smaller unseen, and then every click is
// off. So there is one View per picture: the size that was sent beside the
// display it shows. Coordinates are led back with the View of the very picture
// that the model saw; nothing is clamped.
//
// What is prepared depends on the picture's bytes and the limits alone, so a
// process that takes over a loop sends the same bytes again. A Gallery is for
// one goroutine; all else is safe to share.
package screen
