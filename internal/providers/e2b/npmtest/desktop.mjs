// The npm package @e2b/desktop, unchanged: real X11 programs see what it does.
import assert from "node:assert/strict";
import { Sandbox } from "@e2b/desktop";

const desktop = await Sandbox.create({ resolution: [1280, 800], timeoutMs: 120_000 });
try {
  assert.deepEqual(await desktop.getScreenSize(), { width: 1280, height: 800 });
  const png = Buffer.from(await desktop.screenshot());
  assert.deepEqual([png.toString("latin1", 1, 4), png.readUInt32BE(16), png.readUInt32BE(20)], ["PNG", 1280, 800]);
  await desktop.moveMouse(300, 200);
  assert.deepEqual(await desktop.getCursorPosition(), { x: 300, y: 200 });

  // A terminal takes what is typed, and xev what is clicked.
  const terminal = await desktop.commands.run('xterm -geometry 80x24+100+100 -e sh -c "cat > /tmp/typed"', { background: true, timeoutMs: 0 });
  await desktop.waitAndVerify("xdotool search --onlyvisible --class xterm", (r) => r.exitCode === 0, 20);
  await desktop.leftClick(200, 200);
  await desktop.write("Hello, World");
  await desktop.press("enter");
  assert.ok(await desktop.waitAndVerify("cat /tmp/typed", (r) => r.stdout === "Hello, World\n", 20));
  await terminal.kill();
  const xev = await desktop.commands.run("stdbuf -oL xev -geometry 1000x600+50+50 -event button > /tmp/xev", { background: true, timeoutMs: 0 });
  assert.ok(await desktop.waitAndVerify("xdotool search --onlyvisible --name 'Event Tester'", (r) => r.exitCode === 0, 20));
  await desktop.rightClick(400, 300);
  assert.ok(await desktop.waitAndVerify("grep -A4 ButtonRelease /tmp/xev", (r) => /root:\(400,300\)/.test(r.stdout) && /button 3/.test(r.stdout), 20));
  await xev.kill();

  // The live view serves noVNC's page.
  await desktop.stream.start({ requireAuth: true });
  assert.match(desktop.stream.getUrl({ authKey: desktop.stream.getAuthKey() }), /^https:\/\/6080-/);
  const page = await fetch(process.env.E2B_SANDBOX_URL + "/vnc.html", { headers: { "E2b-Sandbox-Id": desktop.sandboxId, "E2b-Sandbox-Port": "6080" } });
  assert.match(await page.text(), /noVNC/);
  await desktop.stream.stop();
} finally {
  await desktop.kill();
}
console.log("desktop: ok");
