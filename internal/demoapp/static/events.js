// Every event that reaches the page is sent on as it is, in order; the server
// counts and judges. Default actions that would leave the page (a context
// menu, scrolling, a browser's shortcut for the chord) are prevented.
"use strict";
{
  const { $, make } = berth;
  const targets = ["click", "double", "right", "shift"];
  const down = new Set(); // keys held, by code
  let queue = [], sending = false, resetting = false;

  const mods = (e) => [["ctrlKey", "Control"], ["altKey", "Alt"], ["shiftKey", "Shift"], ["metaKey", "Meta"]].filter(([k]) => e[k]).map(([, n]) => n);
  const target = (e) => {
    const el = e.target instanceof Element ? e.target.closest("[data-target]") : null;
    return el ? el.dataset.target : "page";
  };

  function note(event) {
    queue.push(event);
    flush();
  }

  // One request at a time; what comes meanwhile goes with the next.
  function flush() {
    if (sending || queue.length === 0) return;
    sending = true;
    berth.post("/api/events", { events: queue.splice(0, 100) }, show).then(() => { sending = false; flush(); });
  }

  // The page is being left: what is still here goes along without an answer.
  function leave() {
    while (queue.length) {
      navigator.sendBeacon("/api/events", new Blob([JSON.stringify({ events: queue.splice(0, 100) })], { type: "application/json" }));
    }
  }

  function own(e) { return e.target instanceof Element && e.target.closest("#reset, #bar"); }

  for (const kind of ["mousedown", "mouseup", "click", "auxclick", "contextmenu", "dblclick"]) {
    document.addEventListener(kind, (e) => {
      if (own(e)) return;
      if (kind === "contextmenu" || e.button > 2) e.preventDefault();
      note({ kind, target: target(e), button: Math.max(0, e.button), detail: e.detail, mods: mods(e), x: Math.round(e.clientX), y: Math.round(e.clientY), trusted: e.isTrusted });
    }, true);
  }
  for (const kind of ["keydown", "keyup"]) {
    document.addEventListener(kind, (e) => {
      if (e.ctrlKey && e.shiftKey && e.key.toUpperCase() === "K") e.preventDefault();
      if (kind === "keydown") down.add(e.code); else down.delete(e.code);
      note({ kind, target: target(e), key: e.key.slice(0, 20), code: e.code, repeat: e.repeat, mods: mods(e), trusted: e.isTrusted });
    }, true);
  }
  let turn = 0;
  document.addEventListener("wheel", (e) => {
    e.preventDefault();
    const unit = [1, 33, 500][e.deltaMode]; // pixels, lines, pages
    turn += e.deltaY * unit;
    note({ kind: "wheel", target: target(e), dx: e.deltaX * unit, dy: e.deltaY * unit, mods: mods(e), x: Math.round(e.clientX), y: Math.round(e.clientY), trusted: e.isTrusted });
  }, { capture: true, passive: false });
  $("t-text").addEventListener("input", (e) => note({ kind: "input", target: "text", text: e.target.value.slice(0, 300), trusted: e.isTrusted }));
  window.addEventListener("blur", (e) => {
    if (down.size === 0) return; // it only matters for keys whose release the page will not see
    down.clear();
    note({ kind: "blur", target: "page", trusted: e.isTrusted });
  });
  window.addEventListener("pagehide", leave);

  function line(e) {
    const where = e.target === "page" ? "" : " @" + e.target;
    const held = (e.mods || []).map((m) => ({ Control: "Ctrl" })[m] || m).join("+");
    switch (e.kind) {
      case "keydown": case "keyup": return `${e.kind.padEnd(11)} ${e.key === " " ? "Space" : e.key}${e.repeat ? " (repeat)" : ""}${held ? "  [" + held + "]" : ""}`;
      case "wheel": return `wheel       ${e.dy >= 0 ? "+" : ""}${e.dy || 0}${where}`;
      case "input": return `input       ${e.text}`;
      case "blur": return "blur";
      default: return `${e.kind.padEnd(11)} ${["left", "middle", "right", "back", "forward"][e.button || 0]} ×${e.detail || 0}${held ? "  [" + held + "]" : ""}${where}`;
    }
  }

  function draw(view) {
    $("tasks").replaceChildren(...view.tasks.map((t) => {
      const li = make("li", t.name, "t-" + t.status);
      li.append(make("i"), make("span", t.status === "none" ? "" : t.got));
      return li;
    }));
    targets.forEach((name, i) => { $("t-" + name).className = "target v-" + view.tasks[i].status; });
    $("wheel-got").textContent = view.tasks[4].got;
    $("keys-got").textContent = view.held.length ? view.held.join(" + ") : "no key is held";
    $("count").textContent = view.count === 1 ? "1 event" : view.count + " events";
    $("log").replaceChildren(...view.log.slice(-10).map((e) => make("li", line(e))));
    $("winch").setAttribute("transform", `rotate(${turn / 4} 30 30)`);
    $("facts").querySelector("small")?.remove();
  }

  function show({ part, view }) {
    if (resetting) return;
    berth.show(part);
    draw(view);
    $("facts").append(make("small", part.title.replace(/^events: /, "")));
  }

  $("reset").addEventListener("click", () => {
    resetting = true;
    queue = [];
    berth.post("/api/reset", { part: "events" }, () => location.reload());
  });

  const start = berth.data();
  $("t-text").value = start.text;
  berth.call("/api/state").then((s) => show({ part: s.parts.events, view: start })).catch(berth.fail);
}
