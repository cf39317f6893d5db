"use strict";
// A click on a line's number puts it into the address, so that the line can be linked to.
document.addEventListener("click", (event) => {
  const line = event.target.closest(".l[id]");
  if (line && event.clientX - line.getBoundingClientRect().left < 46) location.hash = line.id;
});
// A link to a line inside something folded opens it.
function openTarget() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const folded = target && target.closest("details");
  if (folded && !folded.open) {
    folded.open = true;
    target.scrollIntoView();
  }
}
addEventListener("hashchange", openTarget);
openTarget();

// An equation that is wider than the screen can be scrolled with the keyboard, too.
for (const equation of document.querySelectorAll(".equation")) {
  if (equation.scrollWidth > equation.clientWidth) equation.tabIndex = 0;
}
