// What every page shares: asking the server, and showing its verdict. The
// title and the lamp change only to what the server has answered, or to a
// clearly named fault when it could not be reached.
"use strict";
const berth = (() => {
  const $ = (id) => document.getElementById(id);
  const name = document.body.dataset.page;
  const data = () => JSON.parse($("data").textContent);

  function lamp(status) {
    $("lamp").className = "lamp-" + status;
    $("lamp").setAttribute("aria-label", "status lamp: " + status);
  }

  function fail(err) {
    document.title = name + ": fault " + err.message;
    lamp("wrong");
    $("toast").textContent = err.message;
    $("toast").hidden = false;
  }

  function show(part) {
    document.title = part.title;
    lamp(part.status);
    const verdict = $("verdict");
    if (verdict) {
      verdict.textContent = part.detail;
      verdict.className = "v-" + part.status;
    }
    $("toast").hidden = true;
  }

  async function call(path, body) {
    const request = body === undefined ? {} : {
      method: "POST", keepalive: true,
      headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
    };
    const answer = await fetch(path, request);
    const json = await answer.json();
    if (!answer.ok) throw new Error(json.message || "HTTP " + answer.status);
    return json;
  }

  // Requests go out one after another, in the order in which things happened.
  let last = Promise.resolve();
  function post(path, body, then) {
    last = last.then(() => call(path, body)).then(then).catch(fail);
    return last;
  }

  const make = (tag, text, cls) => {
    const el = document.createElement(tag);
    if (text !== undefined) el.textContent = text;
    if (cls) el.className = cls;
    return el;
  };
  const place = (el, x, y) => { el.style.left = x + "px"; el.style.top = y + "px"; };
  return { $, data, lamp, fail, show, call, post, make, place };
})();
