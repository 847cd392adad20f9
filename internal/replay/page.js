'use strict';
const pages = Array.from(document.querySelectorAll('.page'));
let at = 0;
function show(i, push) {
  at = Math.min(Math.max(i, 0), pages.length - 1);
  pages.forEach((p, n) => p.classList.toggle('shown', n === at));
  document.getElementById('where').textContent = (at + 1) + ' of ' + pages.length;
  document.getElementById('previous').disabled = at === 0;
  document.getElementById('next').disabled = at === pages.length - 1;
  if (push) history.replaceState(null, '', '#' + pages[at].id);
}
function fromHash() {
  const i = pages.findIndex(p => '#' + p.id === location.hash);
  show(i < 0 ? 0 : i, false);
}
document.body.classList.add('one');
document.getElementById('previous').addEventListener('click', () => show(at - 1, true));
document.getElementById('next').addEventListener('click', () => show(at + 1, true));
addEventListener('hashchange', fromHash);
addEventListener('keydown', e => {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  switch (e.key) {
    case 'ArrowRight': case 'j': case 'n': show(at + 1, true); break;
    case 'ArrowLeft': case 'k': case 'p': show(at - 1, true); break;
    case 'Home': show(0, true); break;
    case 'End': show(pages.length - 1, true); break;
    case 'a': document.body.classList.toggle('one'); return;
    default: return;
  }
  e.preventDefault();
});
fromHash();
