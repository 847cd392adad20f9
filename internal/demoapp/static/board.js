// Dragging with pointer events, not with HTML5 drag and drop: any source of
// pointer input works, a person's mouse, a touch, or a synthetic press, a
// single move and a release. The card follows the pointer; where the pointer
// is let go decides the column and the place in it. A release outside the
// columns puts the card back.
"use strict";
{
  const { $, make, place } = berth;
  const columns = { todo: 48, doing: 452, done: 856 };
  const width = 376, top = 168, bottom = 752, inset = 16, first = 224, pitch = 78, height = 68, threshold = 4;
  let { columns: order, cards } = berth.data();
  let pending = 0, held = null; // moves not answered yet; the card being dragged
  const elements = new Map();
  const slot = make("div", undefined, "slot");
  slot.hidden = true;
  $("cards").append(slot);

  for (const card of cards) {
    const el = make("div", undefined, "card");
    el.id = "card-" + card.id;
    el.append(make("i", card.id), make("b", card.text), make("small", card.crew));
    elements.set(card.id, el);
    $("cards").append(el);
    el.addEventListener("pointerdown", (e) => grab(e, card, el));
  }

  const spot = (column, index) => [columns[column] + inset, first + pitch * index];

  // lay puts every card of an order in its place, apart from the held one.
  function lay(shown) {
    for (const [column, ids] of Object.entries(shown)) {
      $("col-" + column).querySelector(".count").textContent = ids.length;
      ids.forEach((id, i) => { if (id !== held) place(elements.get(id), ...spot(column, i)); });
    }
    for (const card of cards) {
      const home = shown[card.goal].includes(card.id);
      elements.get(card.id).classList.toggle("wanted", card.start !== card.goal && !home);
      elements.get(card.id).classList.toggle("home", card.start !== card.goal && home);
    }
  }

  function target(x, y, id) {
    if (y < top || y >= bottom) return null;
    for (const [column, left] of Object.entries(columns)) {
      if (x < left || x >= left + width) continue;
      const others = order[column].filter((other) => other !== id);
      const index = others.filter((_, i) => first + pitch * i + height / 2 < y).length;
      return { column, index };
    }
    return null;
  }

  function without(id) {
    return Object.fromEntries(Object.entries(order).map(([c, ids]) => [c, ids.filter((other) => other !== id)]));
  }

  function grab(down, card, el) {
    if (down.button !== 0 || held !== null) return;
    down.preventDefault();
    try {
      el.setPointerCapture(down.pointerId);
    } catch {
      // A pointer that a script made up can not be captured; its events are
      // dispatched to the card anyway.
    }
    const box = el.getBoundingClientRect();
    const dx = down.clientX - box.left, dy = down.clientY - box.top;
    let moved = false;
    held = card.id;

    function follow(e) {
      if (e.pointerId !== down.pointerId) return;
      if (!moved && Math.hypot(e.clientX - down.clientX, e.clientY - down.clientY) < threshold) return;
      moved = true;
      el.classList.add("held");
      place(el, e.clientX - dx, e.clientY - dy);
      const to = target(e.clientX, e.clientY, card.id);
      for (const name of Object.keys(columns)) $("col-" + name).classList.toggle("over", Boolean(to) && to.column === name);
      slot.hidden = !to;
      const shown = without(card.id);
      if (to) {
        shown[to.column].splice(to.index, 0, card.id);
        place(slot, ...spot(to.column, to.index));
      }
      lay(shown);
    }

    function end(e) {
      if (e.pointerId !== down.pointerId) return;
      if (e.type === "pointerup") follow(e);
      for (const [name, f] of handlers) el.removeEventListener(name, f);
      held = null;
      el.classList.remove("held");
      slot.hidden = true;
      for (const name of Object.keys(columns)) $("col-" + name).classList.remove("over");
      const to = e.type === "pointerup" && moved ? target(e.clientX, e.clientY, card.id) : null;
      if (to) {
        order = without(card.id);
        order[to.column].splice(to.index, 0, card.id);
        pending++;
        berth.post("/api/board", { card: card.id, to: to.column, index: to.index }, adopt);
      }
      lay(order);
    }
    const handlers = [["pointermove", follow], ["pointerup", end], ["pointercancel", end], ["lostpointercapture", end]];
    for (const [name, f] of handlers) el.addEventListener(name, f);
  }

  // An answer is shown once no later move is on its way.
  function adopt({ part, view }) {
    if (--pending > 0) return;
    order = view.columns;
    lay(order);
    berth.show(part);
  }

  $("reset").addEventListener("click", () => berth.post("/api/reset", { part: "board" }, () => location.reload()));
  lay(order);
  berth.call("/api/state").then((s) => berth.show(s.parts.board)).catch(berth.fail);
}
