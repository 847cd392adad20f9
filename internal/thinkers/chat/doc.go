// Package chat lets a model think that a server offers by the chat completions
// API that OpenAI made common: vLLM, llama.cpp, Ollama, LM Studio and gateways.
//
// Such models have no computer tool, so each action of Berth's vocabulary is a
// function, beside askUser, giveUp and done. Coordinates are pixels of the
// screenshot as sent, or 0 to 1000 on each axis (`coordinates` "normalized"),
// as Qwen-VL and UI-TARS kinds want it. An answer without a call is told to
// call one, and counts as one that came to nothing, since small models forget;
// maxFaults such answers in a row are borne.
//
// Which servers there are is the operator's to say (CHAT_BASE_URL, a list): a
// loop may choose one of them by `baseURL` and no other, so that nobody makes
// the loop-runner, or its key, talk to a host of his own.
//
// The conversation, errors and settings are as in the other vendors' packages;
// pictures stand in messages of the user, since a tool's message has text only.
package chat
