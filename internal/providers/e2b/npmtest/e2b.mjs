// The npm package e2b, unchanged, does what its users do; every answer of the
// stand-in is checked by what the client makes of it.
import assert from "node:assert/strict";
import { AuthenticationError, NotFoundError, RateLimitError, Sandbox } from "e2b";

const sandbox = await Sandbox.create("base", { metadata: { purpose: "a b&c", vmId: "vm-1" }, envs: { BERTH: "yes" }, timeoutMs: 60_000 });
const ended = [];
try {
  // Commands.
  const said = await sandbox.commands.run('echo "$BERTH"; id -un; pwd; echo wrong >&2');
  assert.deepEqual([said.exitCode, said.stdout, said.stderr], [0, "yes\nuser\n/home/user\n", "wrong\n"]);
  await assert.rejects(sandbox.commands.run("exit 3"), { exitCode: 3 });
  await assert.rejects(sandbox.commands.run("no-such-program"), { exitCode: 127 });
  await assert.rejects(sandbox.commands.run("sleep 60", { timeoutMs: 300 }), /deadline_exceeded/);
  await assert.rejects(sandbox.commands.run("true", { cwd: "/no/such" }), /does not exist/);
  assert.equal((await sandbox.commands.run("id -un", { user: "root" })).stdout, "root\n");
  const big = await sandbox.commands.run("head -c 3000000 /dev/zero | tr '\\0' x");
  assert.equal(big.stdout.length, 3_000_000);

  // One that goes on, its input, and the list.
  const reader = await sandbox.commands.run("cat; exec sleep 100", { background: true, stdin: true });
  await sandbox.commands.sendStdin(reader.pid, "abc ñ");
  await sandbox.commands.closeStdin(reader.pid);
  assert.ok((await sandbox.commands.list()).some((p) => p.pid === reader.pid && p.cmd === "/bin/bash"));
  let heard = "";
  const again = await sandbox.commands.connect(reader.pid, { onStdout: (text) => (heard += text) });
  assert.equal(again.pid, reader.pid);
  assert.equal(await sandbox.commands.kill(reader.pid), true);
  assert.equal(await sandbox.commands.kill(999_999), false);
  await assert.rejects(reader.wait());

  // Files.
  assert.equal((await sandbox.files.write("a/b.txt", "hello ñ")).path, "/home/user/a/b.txt");
  assert.equal(await sandbox.files.read("a/b.txt"), "hello ñ");
  assert.deepEqual((await sandbox.files.list("a")).map((e) => [e.name, e.type, e.size]), [["b.txt", "file", 8]]);
  await sandbox.files.rename("a/b.txt", "a/c.txt");
  assert.equal(await sandbox.files.exists("a/b.txt"), false);
  assert.equal((await sandbox.files.getInfo("a/c.txt")).type, "file");
  await sandbox.files.write([{ path: "x/1", data: "1" }, { path: "x/2", data: new Blob(["22"]) }]);
  assert.equal(await sandbox.files.read("x/2"), "22");
  assert.equal(await sandbox.files.makeDir("d"), true);
  assert.equal(await sandbox.files.makeDir("d"), false);
  await sandbox.files.remove("x");
  await assert.rejects(sandbox.files.read("x/1"), NotFoundError);

  // Its end, and pages of the list.
  await sandbox.setTimeout(100_000);
  const info = await sandbox.getInfo();
  assert.deepEqual([info.state, info.templateId, info.metadata.purpose], ["running", "base", "a b&c"]);
  assert.ok(info.endAt - Date.now() > 90_000);
  for (let i = 0; i < 2; i++) ended.push(await Sandbox.create("base", { metadata: { purpose: "page" }, timeoutMs: 60_000 }));
  const pages = Sandbox.list({ query: { metadata: { purpose: "page" } }, limit: 1 });
  const seen = [];
  while (pages.hasNext) {
    const items = await pages.nextItems();
    assert.ok(items.length <= 1);
    seen.push(...items.map((s) => s.sandboxId));
  }
  assert.deepEqual(new Set(seen), new Set(ended.map((s) => s.sandboxId)));

  // Pause and connect: the processes' state is kept.
  const count = await sandbox.commands.run("i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done", { background: true, timeoutMs: 0 });
  await count.disconnect();
  assert.equal(await Sandbox.pause(sandbox.sandboxId), true);
  assert.equal(await Sandbox.pause(sandbox.sandboxId), false);
  assert.equal(await sandbox.isRunning(), false);
  assert.deepEqual((await Sandbox.list({ query: { state: ["paused"] } }).nextItems()).map((s) => s.sandboxId), [sandbox.sandboxId]);
  const back = await Sandbox.connect(sandbox.sandboxId);
  assert.equal(await back.isRunning(), true);
  assert.ok(Number((await back.commands.run("cat /tmp/count")).stdout) > 0);

  // What is refused.
  await assert.rejects(Sandbox.create("no-such-template"), /not found/);
  await assert.rejects(Sandbox.create("base", { apiKey: "e2b_" + "f".repeat(40) }), AuthenticationError);
  await assert.rejects(Sandbox.connect("no-such-sandbox"), /not found/);
  await assert.rejects(Sandbox.create("base"), RateLimitError); // the stand-in was started for three

  assert.equal(await sandbox.kill(), true);
  assert.equal(await Sandbox.kill(sandbox.sandboxId), false);
  assert.equal(await sandbox.isRunning(), false);
  await assert.rejects(sandbox.commands.run("true"), /not running|not found/i);

  // The time-out ends it.
  const short = await Sandbox.create("base", { timeoutMs: 1_000 });
  const until = Date.now() + 20_000;
  while (await short.isRunning()) {
    assert.ok(Date.now() < until, "a sandbox outlives its time-out");
    await new Promise((done) => setTimeout(done, 50));
  }
  await assert.rejects(short.getInfo(), /not found/);
} finally {
  await Promise.all([sandbox, ...ended].map((s) => s.kill()));
}
console.log("e2b: ok");
