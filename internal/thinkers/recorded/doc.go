// Package recorded is the model `replay`: it decides again what another loop's
// model decided, and ends the loop at the first difference in what comes of it.
// No model is asked, and nothing is paid.
//
// # What holds
//
//   - The decisions are those of the named loop's journal, of the same tenant,
//     in their order: the n-th turn gets the n-th. What was asked of a person,
//     who is not asked again, becomes another look.
//   - Before each decision the sandbox is looked at again, for up to
//     settleSeconds, until it looks as it did when the decision was made; so a
//     page that is slower today is no difference.
//   - What is compared is what `compare` lists: outcome (of the act and of each
//     action, with the codes of their errors), value, url and title, where it
//     says nothing; picture when asked for, since clocks run and carets blink.
//     An outcome that was unknown when it was recorded is not compared, nor a
//     value too large to have been kept.
//   - A loop in which something differs fails with the code differs. The message
//     says which step and what; the decision's reply has it as JSON (Difference).
//   - Where the record ends without a decision to end, having been stopped, or
//     having run out of time, the loop succeeds there.
//   - It remembers nothing that is not in the journal of its own loop, so after
//     a crash another process goes on comparing.
package recorded
