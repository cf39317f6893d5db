"use strict";
// The three objectives of staleness.py for one frame, over r = pi / pi_prox. rho = pi_prox / pi_behav.

const Objective = {
  KINDS: ["decoupled", "behavior", "recent"],

  // policy_loss, negated: its value, and its gradient by log pi. epsilon 0: no clipping.
  clipped(ratio, advantage, epsilon) {
    const clip = epsilon === 0 ? ratio : Math.min(Math.max(ratio, 1 - epsilon), 1 + epsilon);
    const free = ratio * advantage <= clip * advantage;
    return { value: Math.min(ratio * advantage, clip * advantage), gradient: free ? ratio * advantage : 0 };
  },

  at(kind, ratio, rho, advantage, epsilon) {
    if (kind === "decoupled") return Objective.clipped(ratio, rho * advantage, epsilon); // the advantage absorbs rho
    if (kind === "behavior") return Objective.clipped(ratio * rho, advantage, epsilon);
    return Objective.clipped(ratio, advantage, epsilon);
  },
};

(() => {
  const form = document.getElementById("objective");
  if (!form) return;
  const get = (id) => document.getElementById(id);
  const NAMES = { decoupled: "prox", behavior: "behav", recent: "recent" };
  const LABELS = { decoupled: "decoupled", behavior: "PPO with the behaviour policy", recent: "PPO with the recent policy" };
  const RANGE = [0, 2];
  const show = (x) => (Object.is(Math.abs(x), 0) ? "0" : x.toFixed(3).replace("-", "−"));

  function update() {
    const rho = get("rho").valueAsNumber, epsilon = get("eps").valueAsNumber, ratio = get("ratio").valueAsNumber;
    const chosen = Objective.KINDS.filter((kind) => form.querySelector(`[data-kind="${kind}"]`).checked);
    get("rho-out").textContent = rho.toFixed(2);
    get("eps-out").textContent = epsilon ? epsilon.toFixed(2) : "off";
    get("ratio-out").textContent = ratio.toFixed(2);

    const grid = [];
    for (let i = 0; i <= 800; i++) grid.push(RANGE[0] + (i / 800) * (RANGE[1] - RANGE[0]));
    for (const [sign, advantage] of [["plus", 1], ["minus", -1]]) {
      for (const what of ["value", "gradient"]) {
        const all = Objective.KINDS.flatMap((kind) => grid.map((r) => Objective.at(kind, r, rho, advantage, epsilon)[what]));
        const y = advantage > 0 ? [-0.15, 1.05 * Math.max(1.5, ...all)] : [1.05 * Math.min(-1.5, ...all), 0.15];
        draw(get(`${what}-${sign}`), {
          x: RANGE, y, xLabel: "r = π / π prox", height: 220,
          label: `${what === "value" ? "Objective" : "Gradient"} over r for an advantage of ${advantage}; at r = ${ratio}: ${chosen.map((kind) => `${kind} ${show(Objective.at(kind, ratio, rho, advantage, epsilon)[what])}`).join(", ")}`,
          curves: [...chosen].reverse().map((kind) => ({ name: NAMES[kind], points: grid.map((r) => [r, Objective.at(kind, r, rho, advantage, epsilon)[what]]) })),
          marks: [{ x: ratio }],
          dots: chosen.map((kind) => ({ x: ratio, y: Objective.at(kind, ratio, rho, advantage, epsilon)[what], name: NAMES[kind] })),
        });
      }
    }
    get("objectives").tBodies[0].innerHTML = chosen.map((kind) => {
      const cells = ["value", "gradient"].flatMap((what) => [1, -1].map((a) => show(Objective.at(kind, ratio, rho, a, epsilon)[what])));
      return `<tr data-kind="${kind}"><th scope="row">${LABELS[kind]}</th>${cells.map((x) => `<td>${x}</td>`).join("")}</tr>`;
    }).join("");

    const start = epsilon === 0 ? null : rho > 1 + epsilon ? "A > 0" : rho < 1 - epsilon ? "A < 0" : null;
    const words = [];
    if (rho === 1) words.push("Fresh data: the three objectives are one.");
    if (start) words.push(`Before the first step (r = 1), PPO with the behaviour policy has a ratio of ${rho.toFixed(2)}, beyond its clip range: no gradient where ${start}.`);
    else if (rho !== 1 && epsilon) words.push(`PPO with the behaviour policy is clipped at r = ${((1 - epsilon) / rho).toFixed(2)} and ${((1 + epsilon) / rho).toFixed(2)}, off centre.`);
    if (rho !== 1) words.push(`PPO with the recent policy weighs this frame by 1, where ${rho.toFixed(2)} would be right.`);
    if (epsilon === 0) words.push("Without clipping the decoupled objective and PPO with the behaviour policy agree: the proximal policy has no say.");
    get("objective-line").textContent = words.join(" ");
  }
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  update();
})();
