// Package anthropic lets Claude think, through Anthropic's Messages API and
// its computer tools.
//
// # The tool
//
// Models since Opus 4.8 and Claude 5 are given the toolset
// computer_toolset_20260801, whose calls come several in a turn; older ones the
// single tool computer_20251124, computer_20250124 or computer_20241022 with
// its beta header (profile.go; `tool` in the settings overrides it). Beside it
// stand functions for what those tools lack: open, the clipboard, run where it
// is allowed, askUser and giveUp. An answer without a call ends the loop as
// succeeded.
//
// # The conversation
//
// It is made anew for each turn from the loop's history alone: the decision's
// Reply holds the model's blocks as they came, thinking included, and which
// actions belong to which call; pictures are fetched from FRAMES by name. So a
// process that takes over sends what the dead one would have sent, and an answer
// that was journaled is never asked for twice. Every answer of the API is one
// decision: a call that cannot be carried out is answered in the next turn,
// after a look at the screen, at most maxFaults times in a row.
//
// The newest pictures stay (keepScreenshots); older ones are dropped in batches,
// so that the prefix that the prompt cache knows stays the same between. Models
// that bind their thinking to what came before it are told to drop the thinking
// that such a cut makes invalid (drop_block) instead of refusing the request.
//
// A request that is too long is shortened and sent once more; see
// vendors.State. All other errors are in package vendors.
//
// # What it costs
//
// Input tokens that the cache served or stored count as input tokens.
package anthropic
