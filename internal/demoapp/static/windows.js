"use strict";
{
  const { $ } = berth;
  const name = document.body.dataset.page;
  document.title = name + ": nothing yet";
  $("ask")?.addEventListener("click", () => {
    const yes = confirm("Cast off now?");
    $("answer").textContent = yes ? "the answer was yes" : "the answer was no";
    document.title = "windows: asked, answer " + (yes ? "yes" : "no");
  });
  $("download")?.addEventListener("click", () => { document.title = "windows: downloading"; });
  $("open")?.addEventListener("click", () => { document.title = "windows: opened"; });
  $("close")?.addEventListener("click", () => window.close());
}
