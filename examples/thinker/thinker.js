// A service that thinks for Berth's loops: it subscribes to think.<name> as a
// member of a queue group, so that any number of it may run, and answers each
// turn of a loop with what to do next. A real one would look at the picture
// and ask a model of its own; this one follows the goal's words:
//
//   open https://example.org/ then type hello then press Enter
//
//   node thinker.js [name]        NATS_URL (default nats://127.0.0.1:4222)
//
// The request and the reply are described in docs/models.md.
import { connect, headers } from "nats";

const name = process.argv[2] ?? "default";
const nc = await connect({ servers: process.env.NATS_URL ?? "nats://127.0.0.1:4222", name: `thinker ${name}` });
const subject = `think.${name}`;
nc.subscribe(subject, {
  queue: "thinkers",
  callback: (err, msg) => {
    if (err) {
      console.error(err.message);
      return;
    }
    try {
      const { data } = msg.json(); // a CloudEvent in structured mode
      msg.respond(JSON.stringify(think(data)));
    } catch (e) {
      // What a client of the micro protocol would send: the loop ends with it.
      const h = headers();
      h.set("Nats-Service-Error-Code", "500");
      h.set("Nats-Service-Error", String(e.message));
      msg.respond("", { headers: h });
    }
  },
});
await nc.flush(); // the server has the subscription from here on
console.log(`thinking at ${subject}`);

for (const signal of ["SIGINT", "SIGTERM"]) process.on(signal, () => nc.drain());
const reason = await nc.closed();
if (reason) {
  console.error(reason.message);
  process.exit(1);
}

// think decides one turn. What it must remember goes into state, since the next
// turn may be another process's.
function think({ goal, step, last, state, messages = [], observation }) {
  const steps = goal.split(/\s+then\s+/).filter(Boolean);
  const next = state?.next ?? 0;
  if (last?.outcome === "unknown") {
    return { needsInput: `Nobody knows whether "${steps[next - 1]}" was done. Was it?`, state: { next } };
  }
  if (last?.outcome && last.outcome !== "ok") {
    return { failed: { code: "stepFailed", message: `${steps[next - 1]}: ${last.error?.message ?? last.outcome}` } };
  }
  if (messages.some((m) => /^stop/i.test(m))) {
    return { failed: { code: "toldToStop", message: "a person said so" } };
  }
  if (next >= steps.length) {
    return { done: true, label: `done after ${step - 1} steps, at ${observation.url || "no page"}` };
  }
  return { label: steps[next], actions: [action(steps[next])], state: { next: next + 1 } };
}

// action reads one step of the goal.
function action(text) {
  const [, verb, rest] = text.match(/^(\w+)\s*(.*)$/s) ?? [];
  const numbers = rest?.match(/-?\d+(\.\d+)?/g)?.map(Number) ?? [];
  switch (verb) {
    case "open":
      return { type: "open", target: rest };
    case "type":
      return { type: "type", text: rest };
    case "press":
      return { type: "key", keys: rest.split("+") };
    case "click":
      return { type: "click", x: numbers[0], y: numbers[1] };
    case "scroll":
      return { type: "scroll", x: numbers[0], y: numbers[1], dy: numbers[2] };
    case "wait":
      return { type: "wait", seconds: numbers[0] };
    default:
      throw new Error(`cannot understand the step "${text}"`);
  }
}
