"use strict";
// n and p, and the two buttons, go from change to change.
(() => {
  const changes = [...document.querySelectorAll(".change")];
  const place = document.getElementById("place");
  let at = -1;

  function show(index) {
    at = Math.max(0, Math.min(changes.length - 1, index));
    changes[at].scrollIntoView({ block: "start" });
    changes[at].focus({ preventScroll: true });
    place.textContent = `${at + 1} of ${changes.length}`;
  }

  document.getElementById("next").addEventListener("click", () => show(at + 1));
  document.getElementById("previous").addEventListener("click", () => show(at - 1));
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target.matches("input:not([type=checkbox]), select, textarea")) return;
    if (event.key === "n") show(at + 1);
    if (event.key === "p") show(at - 1);
  });
  const given = changes.findIndex((change) => `#${change.id}` === location.hash);
  if (given >= 0) show(given);
})();
