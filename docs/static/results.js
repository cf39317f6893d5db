"use strict";
// Learning curves: a chart for each game and variant, a colour for each value, a thin line for each seed, a thick one for
// their mean.

(() => {
  const COLOURS = 8;

  function interpolate(xs, ys, x) {
    if (x < xs[0] || x > xs[xs.length - 1]) return null;
    let i = xs.findIndex((v) => v >= x);
    if (i <= 0) return ys[0];
    return ys[i - 1] + ((x - xs[i - 1]) / (xs[i] - xs[i - 1])) * (ys[i] - ys[i - 1]);
  }

  // Mean over runs, where all of them have begun and none has ended.
  function mean(runs, steps) {
    const xs = steps[runs[0].steps];
    return xs.flatMap((x) => {
      const ys = runs.map((run) => interpolate(steps[run.steps], run.y, x));
      return ys.includes(null) ? [] : [[x, ys.reduce((a, b) => a + b) / ys.length]];
    });
  }

  function set(title, options, render) {
    const fieldset = document.createElement("fieldset");
    fieldset.append(Object.assign(document.createElement("legend"), { textContent: title }));
    for (const option of options) {
      const label = Object.assign(document.createElement("label"), { className: "check" });
      const box = Object.assign(document.createElement("input"), { type: "checkbox", value: option, checked: true });
      label.append(box, ...render(option));
      fieldset.append(label);
    }
    return { fieldset, chosen: () => [...fieldset.querySelectorAll("input:checked")].map((box) => box.value) };
  }

  function show(plot) {
    const data = RESULTS[plot.dataset.experiment];
    const [filters, facets] = [".filters", ".facets"].map((x) => plot.querySelector(x));
    const colour = (value) => `var(--s${data.values.indexOf(value) % COLOURS})`;
    const key = (value) => Object.assign(document.createElement("span"), { className: "key", style: `color: ${colour(value)}` });
    const sets = {
      game: set("Game", data.games, (x) => [x]),
      variant: set("Setting", data.variants, (x) => [x]),
      value: set(data.lines || "Line", data.values, (x) => [key(x), x]),
      seed: set("Seed", data.seeds, (x) => [x]),
    };
    for (const [name, { fieldset }] of Object.entries(sets)) {
      if (data[`${name}s`].length > 1) filters.append(fieldset);
    }
    const named = (variant, value) => (variant in data.labels ? data.labels[variant].replace("{}", value) : value);
    const xs = data.steps.flat(), ys = data.curves.flatMap((curve) => curve.y);
    const sorted = [...ys].sort((a, b) => a - b), high = sorted[Math.floor(0.999 * (sorted.length - 1))];
    const range = { x: [0, Math.max(...xs)], y: data.log ? [sorted.find((y) => y > 0), high] : [Math.min(0, sorted[0]), 1.05 * high], log: data.log };

    function update() {
      const chosen = Object.fromEntries(Object.entries(sets).map(([name, x]) => [name, x.chosen()]));
      const curves = data.curves.filter((curve) => Object.entries(chosen).every(([name, values]) => values.includes(curve[name])));
      const groups = new Map();
      for (const curve of curves) {
        const place = `${curve.game}\n${curve.variant}`;
        groups.set(place, [...(groups.get(place) || []), curve]);
      }
      facets.replaceChildren();
      facets.classList.toggle("single", groups.size === 1);
      if (!curves.length) facets.textContent = "Nothing is chosen.";
      for (const [name, runs] of groups) {
        const title = name.split("\n").filter((x, i) => x && (i ? data.variants.length > 1 : data.games.length > 1)).join(", ") || data.measured;
        const facet = Object.assign(document.createElement("div"), { className: "facet" });
        const chart = Object.assign(document.createElement("div"), { className: "chart" });
        const readout = Object.assign(document.createElement("p"), { className: "readout" });
        facet.append(Object.assign(document.createElement("h4"), { textContent: title }), chart, readout);
        facets.append(facet);
        const variant = runs[0].variant;
        if (variant in data.labels) {
          facet.querySelector("h4").append(Object.assign(document.createElement("span"), { textContent: `, each line ${named(variant, "N")}` }));
        }
        const lines = [], means = [];
        for (const value of data.values) {
          const mine = runs.filter((run) => run.value === value), style = `stroke: ${colour(value)}`;
          if (!mine.length) continue;
          if (mine.length > 1) for (const run of mine) lines.push({ name: "run", style, points: data.steps[run.steps].map((x, i) => [x, run.y[i]]) });
          means.push({ name: "mean", value: named(variant, value), style, points: mean(mine, data.steps) });
        }
        const last = means.filter((x) => x.points.length).map((x) => `${x.value}: ${x.points[x.points.length - 1][1].toFixed(2)}`).join(", ");
        const crosses = data.crosses ? data.crosses.points : [];
        draw(chart, {
          ...range, height: 200, xLabel: "environment steps", curves: [...lines, ...means], crosses, label: `${title}, ${data.measured} over environment steps; last: ${last}${crosses.length ? `; crosses: ${data.crosses.label}` : ""}`,
          hover(x) {
            if (x === null) return (readout.textContent = "");
            const parts = means.map((line) => [line.value, interpolate(line.points.map((p) => p[0]), line.points.map((p) => p[1]), x)]);
            const text = parts.filter(([, y]) => y !== null).map(([value, y]) => `${value}: ${y.toFixed(2)}`).join(" \u00b7 ");
            readout.replaceChildren(Object.assign(document.createElement("b"), { textContent: `step ${Math.round(x).toLocaleString("en-GB")}  ` }), text);
          },
        });
      }
    }
    if (data.crosses) {
      const legend = Object.assign(document.createElement("p"), { className: "crosses" });
      legend.append(Object.assign(document.createElement("span"), { textContent: "\u00d7" }), ` ${data.crosses.label}`);
      filters.append(legend);
    }
    filters.addEventListener("input", update);
    update();
  }
  for (const plot of document.querySelectorAll(".plot")) show(plot);
})();
