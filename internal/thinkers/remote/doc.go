// Package remote lets any service on the bus think for a loop, in any
// language: the model "bus".
//
// Each turn is one request to think.<thinker>, answered by whichever member of
// the thinkers' queue group has it. Request and reply are CloudEvents (types
// TypeRequest and TypeReply, data Request and Reply); a reply may also be the
// bare JSON of its data. Nothing is stored: the reply is journaled as the
// loop's decision, like any model's answer.
//
// # What holds
//
//   - The request's id is made of loop, step and the length of the history, so
//     a thinker that is asked twice, because the loop's runner died before it
//     could journal the reply, can tell.
//   - A reply is read strictly. An unknown field, an action that the vocabulary
//     does not have, or two decisions in one ends the loop with a message that
//     names the field.
//   - A request that nobody subscribes to is sent again for up to ten seconds,
//     since a service restarts; then the loop ends with the code noThinker. One
//     that is not answered in time is not sent again: the thinker may be at it.
//     That ends the loop with the code timeout.
//   - Actions have coordinates of the display, whatever the size of the picture
//     that is sent along.
package remote
