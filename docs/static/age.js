"use strict";
// The age of the policy that limits the update: PPO's old policy, and the average of ppo_ewma.py.

const Age = {
  STEPS: 256, // T, environment steps of a rollout
  MINIBATCHES: 8,
  REFERENCE: 256,

  // Before optimiser step k (from 0) of a run, PPO's old policy is as old as the steps since its iteration began.
  old(k, epochs, minibatches = Age.MINIBATCHES) {
    return k % (epochs * minibatches);
  },

  // update_ewma, `count` times from the start: the weight of the network from j steps ago, and the mean age.
  average(count, decay) {
    let total = 1, com = 0;
    for (let i = 0; i < count; i++) {
      total = 1 + decay * total;
      com = (com + 1) * (1 - 1 / total);
    }
    const weights = [];
    for (let j = 0, weight = 1; j <= count; j++, weight *= decay) weights.push(weight / total);
    return { com, weights };
  },

  // The mean age after `count` updates, as a formula: what update_ewma adds up.
  com(count, decay) {
    if (decay === 0 || count === 0) return 0;
    const last = decay ** (count + 1);
    return decay / (1 - decay) - ((count + 1) * last) / (1 - last);
  },

  // Environment steps that come in for each optimiser step.
  frames(envs, epochs) {
    return (envs * Age.STEPS) / (epochs * Age.MINIBATCHES);
  },
};

(() => {
  const form = document.getElementById("age");
  if (!form) return;
  const get = (id) => document.getElementById(id);
  const RANGE = 8 * Age.REFERENCE * Age.STEPS; // environment steps to be seen
  const number = (x) => (x < 100 ? +x.toFixed(1) : Math.round(x)).toLocaleString("en-GB");

  // A sawtooth of stairs; if the teeth are too many to be seen, the area that they fill.
  function teeth(tooth, scale, range, name) {
    const count = Math.ceil(range / (tooth * scale.x));
    const height = (tooth - 1) * scale.y;
    if (count > 120) return { name, area: true, points: [[0, 0], [0, height], [range, height], [range, 0]] };
    const points = [];
    for (let k = 0; k < count * tooth; k++) {
      const age = (k % tooth) * scale.y;
      points.push([k * scale.x, age], [(k + 1) * scale.x, age]);
    }
    return { name, points };
  }

  function update() {
    const envs = 2 ** get("envs").value, stated = get("com").valueAsNumber, epochs = Number(get("epochs").value);
    const adjusted = get("adjusted").checked, fromStart = get("from-start").checked;
    const com = adjusted ? (stated * Age.REFERENCE) / envs : stated, decay = com / (com + 1);
    const frames = Age.frames(envs, epochs), tooth = epochs * Age.MINIBATCHES, steps = RANGE / frames;
    get("envs-out").textContent = envs;
    get("com-out").textContent = stated;

    const samples = 200, average = [];
    for (let i = 0; i <= samples; i++) {
      const k = Math.round((i / samples) * steps);
      average.push([k, fromStart ? Age.com(k, decay) : com]);
    }
    const reference = Age.frames(Age.REFERENCE, epochs);
    const scaled = (points, by) => points.map(([a, b]) => [a * by, b * by]);
    const high = Math.max(1.08 * tooth * Math.max(reference, frames), 1.25 * com * frames, 1.25 * stated * reference);
    draw(get("chart-env"), {
      x: [0, RANGE], y: [0, high], xLabel: "environment steps", label: `Age in environment steps: PPO's old policy from 0 to ${number((tooth - 1) * frames)}, the average ${number(com * frames)}`,
      curves: [teeth(tooth, { x: reference, y: reference }, RANGE, "faint"), teeth(tooth, { x: frames, y: frames }, RANGE, "behav"), { name: "prox", points: scaled(average, frames) }],
    });
    draw(get("chart-steps"), {
      x: [0, steps], y: [0, Math.max(1.08 * tooth, 1.25 * com)], xLabel: "optimiser steps", label: `Age in optimiser steps: PPO's old policy from 0 to ${tooth - 1}, the average ${number(com)}`,
      curves: [teeth(tooth, { x: 1, y: 1 }, steps, "behav"), { name: "prox", points: average }],
    });

    // Bars, one for each past network, as one outline: they may be thousands.
    const widest = 4 * Age.REFERENCE * Age.STEPS, shown = Math.ceil(widest / frames), top = 1 - decay || 1, stride = Math.max(1, Math.floor(shown / 1500));
    const bars = [[0, 0]], gap = shown > 120 ? 0 : 0.12 * frames;
    for (let j = 0; j < shown; j += stride) {
      const weight = top * decay ** j;
      bars.push([j * frames, 0], [j * frames, weight], [(j + stride) * frames - gap, weight], [(j + stride) * frames - gap, 0]);
    }
    draw(get("chart-weights"), {
      x: [0, widest], y: [0, 1.1 * top], height: 190, xLabel: "age, environment steps", label: `Weights of past networks, from ${percent(top)} for the newest; mean age ${number(com * frames)} environment steps`,
      curves: [{ name: "prox", area: true, points: bars }], marks: [{ x: com * frames, name: "mean" }],
    });

    const meanOld = (tooth - 1) / 2;
    const rows = [["PPO’s old policy, mean", meanOld], ["PPO’s old policy, oldest", tooth - 1], ["the average, once settled", com]];
    get("ages").tBodies[0].innerHTML = rows.map(([what, age]) => `<tr><th scope="row">${what}</th><td>${number(age)}</td><td>${number(age * frames)}</td></tr>`).join("");
    get("age-line").textContent = `With ${envs} environment${envs > 1 ? "s" : ""} an iteration has ${number(envs * Age.STEPS)} frames, and an optimiser step takes in ${number(frames)}. The average has a decay rate of ${decay.toPrecision(4)}; the newest network counts ${percent(top)}.`;
  }
  const percent = (x) => (x >= 0.001 ? `${+(100 * x).toPrecision(3)}%` : x.toPrecision(2));
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  update();
})();
