// Package openai lets OpenAI's models think, through the Responses API and its
// computer tool.
//
// # The tool
//
// Models are given the tool `computer`, whose calls hold several actions that
// run in order; models named computer-use-preview the older
// computer_use_preview, with one. Beside it stand functions for what the tool
// lacks: open, the clipboard, run where it is allowed, askUser and giveUp. An
// answer without a call ends the loop as succeeded.
//
// # Safety checks
//
// A call with pending_safety_checks is not carried out before somebody has
// acknowledged them: the loop asks (needsInput) and pauses. Resuming it without
// a word, or a message that begins with yes, ok, acknowledge, approve, allow,
// continue, proceed or go, acknowledges; then the call runs without the model
// being asked again, and the API is told of the acknowledgement. Any other
// message is a refusal: the step is taken out of the conversation and the model
// hears what the person said. Codes in acknowledgeSafetyChecks are acknowledged
// by policy, without a pause.
//
// # The conversation
//
// Nothing is stored at the vendor (store is false): each turn's input is made
// anew from the loop's history, with the reasoning that the API returns in
// encrypted form. So a process that takes over sends what the dead one would
// have sent. The API wants a screenshot in every computer_call_output, so old
// screenshots cannot be left out alone: whole steps are, in batches, and a list
// stands for them.
//
// Errors, retries and settings are those of package vendors.
package openai
