"use strict";
{
  const { $, make } = berth;
  const form = $("request");
  const names = { north: "North quay", south: "South quay", dry: "Dry dock" };
  const read = () => ({
    name: form.name.value, email: form.email.value, note: form.note.value,
    berth: form.berth.value, terms: form.terms.checked,
  });
  const lines = (s) => (s === "" ? 0 : s.split("\n").length);

  // While it is filled in the title tells how far; the lamp stays grey, since
  // nothing was sent.
  function filling() {
    const v = read();
    document.title = `form: filling name=${v.name || "none"} email=${v.email || "none"} note=${lines(v.note)} lines berth=${v.berth || "none"} terms=${v.terms ? "yes" : "no"}`;
    berth.lamp("none");
  }
  form.addEventListener("input", filling);

  function confirmation(part, sent) {
    berth.show(part);
    const ok = part.status === "ok";
    $("seal").className = ok ? "seal" : "seal wrong";
    $("sent-title").textContent = ok ? "Request sent" : "Sent, but not as the slip has it";
    $("sent-detail").textContent = part.detail;
    const dl = $("sent-values");
    dl.replaceChildren();
    const add = (k, v, cls) => dl.append(make("dt", k), make("dd", v === "" ? "—" : v, cls));
    add("Name", sent.name);
    add("E-mail", sent.email);
    add("Note", sent.note, "pre");
    add("Berth", names[sent.berth] || "");
    add("Harbour rules", sent.terms ? "accepted" : "not accepted");
    form.hidden = true;
    $("sent").hidden = false;
  }

  form.addEventListener("submit", (e) => {
    e.preventDefault();
    berth.post("/api/form", read(), ({ part, view }) => confirmation(part, view.sent));
  });
  $("clear").addEventListener("click", () => { form.reset(); filling(); });
  $("again").addEventListener("click", () => { $("sent").hidden = true; form.hidden = false; filling(); });

  const { sent } = berth.data();
  if (sent) {
    Object.assign(form.name, { value: sent.name });
    form.email.value = sent.email;
    form.note.value = sent.note;
    form.berth.value = sent.berth;
    form.terms.checked = sent.terms;
    berth.call("/api/state").then((s) => confirmation(s.parts.form, sent)).catch(berth.fail);
  }
}
