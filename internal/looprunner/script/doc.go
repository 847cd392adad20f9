// Package script is the model that follows a script: exact, free of cost, for
// demonstrations, tests and chores that need no thought.
//
// A script is a JSON array of items. An item is either an action of Berth's
// vocabulary, with two more fields,
//
//	{"type":"click","x":10,"y":20,"name":"save","unknown":"continue"}
//
// or a check of what the last action led to:
//
//	{"check":"title"|"url", "equals"|"contains"|"matches":TEXT, "within":SECONDS}
//	{"check":"pixel", "x":X, "y":Y, "color":"#rrggbb", "tolerance":N, "within":SECONDS}
//	{"check":"value", "equals"|"contains"|"matches":TEXT}
//	{"check":"dialog"|"download", "equals"|"contains"|"matches":TEXT, "within":SECONDS}
//	{"check":"pages", "count":N, "within":SECONDS}
//
// Each check may have a "name" too. `matches` is an RE2 regular expression
// that may match anywhere. `within` (default 5, at most 300) is how long the
// sandbox is looked at again, every 150 ms, until the check holds. `tolerance`
// (default 8) is the most that each of red, green and blue may be off. `value`
// is the answer of the last action, a JSON string as its text and any other
// JSON in compact form; it cannot change, so it is not waited for. `dialog`
// and `download` look at all messages and file names since the last action.
// Checks that follow each other are evaluated on the same observation as long
// as they hold.
//
// One action is one turn of the loop. An action that fails, is rejected or
// whose outcome is unknown ends the loop with that code, except that
// "unknown":"continue" accepts an unknown outcome; a check that does not hold
// ends it with the code checkFailed.
package script
