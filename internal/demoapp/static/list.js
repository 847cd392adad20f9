"use strict";
{
  const { $, make, place } = berth;
  const list = $("list"), height = 48, total = 60;
  let loaded = 0, busy = false, selected = berth.data().selected;

  function mark() {
    for (const el of list.children) el.classList.toggle("selected", Number(el.dataset.number) === selected);
    $("selected").textContent = selected ? "crate " + selected : "nothing";
  }

  const atEnd = () => list.scrollTop + list.clientHeight >= list.scrollHeight - 2;

  // Until something is selected the title tells how far the list is.
  let part = null;
  function tell() {
    berth.show(part);
    if (part.status === "none" || part.status === "begun") {
      document.title = `list: ${loaded} of ${total} loaded` + (loaded === total && atEnd() ? ", at the end" : "");
    }
  }

  async function more() {
    if (busy || loaded >= total) return;
    busy = true;
    $("loading").hidden = loaded === 0;
    try {
      const answer = await berth.call("/api/items?after=" + loaded);
      for (const item of answer.items) {
        const el = make("div", undefined, "item");
        el.dataset.number = item.number;
        el.setAttribute("role", "option");
        el.append(make("span", String(item.number).padStart(2, "0")), make("span", item.goods), make("span", item.port), make("span", item.kilos + " kg"));
        place(el, 0, (item.number - 1) * height);
        list.append(el);
      }
      loaded += answer.items.length;
      part = answer.part;
      $("loaded").textContent = loaded;
      $("meter").style.width = (loaded / total) * 352 + "px";
      mark();
      tell();
    } catch (err) {
      berth.fail(err);
    }
    $("loading").hidden = true;
    busy = false;
  }

  list.addEventListener("scroll", () => {
    if (atEnd() && loaded < total) more();
    else if (part) tell();
  });
  list.addEventListener("click", (e) => {
    const row = e.target.closest(".item");
    if (!row) return;
    for (const el of list.querySelectorAll(".touched")) el.classList.remove("touched");
    row.classList.add("touched");
  });
  list.addEventListener("dblclick", (e) => {
    const row = e.target.closest(".item");
    if (!row) return;
    const number = Number(row.dataset.number);
    berth.post("/api/list", { item: number }, (answer) => {
      part = answer.part;
      selected = number;
      mark();
      tell();
    });
  });
  more();
}
