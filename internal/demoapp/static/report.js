// A page that was just left may still be sending: look again for a while.
"use strict";
const shown = JSON.stringify(berth.data());
setInterval(async () => {
  const state = await berth.call("/api/state").catch(() => null);
  if (state && JSON.stringify(state.parts) !== shown) location.reload();
}, 1000);
