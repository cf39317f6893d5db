"use strict";
// Small line charts in SVG, drawn at the size of their container, and drawn again when that changes.

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, parent, text) {
  const result = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) result.setAttribute(key, value);
  if (text !== undefined) result.textContent = text;
  if (parent) parent.append(result);
  return result;
}

function short(x) {
  const size = Math.abs(x);
  if (size >= 1e6) return `${+(x / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(x / 1e3).toPrecision(3)}k`;
  return String(+x.toPrecision(3)).replace("-", "−");
}

// About as many round numbers as asked for.
function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((x) => x * power >= raw * 0.999);
  const result = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) result.push(i * step);
  return result;
}

// spec: x and y (ranges), curves ({ name, points, area }), xLabel, height, label (for screen readers), marks (vertical
// lines: { x, name }), dots ({ x, y, name }), crosses ([x, y]), log (of y), and hover(x), which is called with an x or with null.
function draw(container, spec) {
  container.spec = spec;
  if (!container.observer) {
    let width = 0;
    container.observer = new ResizeObserver(() => {
      if (container.clientWidth && container.clientWidth !== width) {
        width = container.clientWidth;
        redraw(container);
      }
    });
    container.observer.observe(container);
  }
  redraw(container);
}

function redraw(container) {
  const { x, y, curves, xLabel, height = 230, label, marks = [], dots = [], crosses = [], hover, log } = container.spec;
  const width = container.clientWidth;
  if (!width) return;
  const box = { left: 46, right: width - 10, top: 8, bottom: height - (xLabel ? 40 : 24) };
  const px = (v) => box.left + ((v - x[0]) / (x[1] - x[0])) * (box.right - box.left);
  const scale = log ? Math.log10 : (v) => v;
  const py = (v) => box.bottom - ((scale(v) - scale(y[0])) / (scale(y[1]) - scale(y[0]))) * (box.bottom - box.top);
  const focused = container.contains(document.activeElement);
  const svg = element("svg", { width, height, role: "img", "aria-label": label });
  if (hover) svg.setAttribute("tabindex", "0");

  const powers = [-4, -3, -2, -1, 0, 1, 2, 3, 4].map((power) => 10 ** power);
  for (const v of log ? powers.filter((v) => v >= y[0] && v <= y[1]) : ticks(y[0], y[1], 4)) {
    element("line", { class: v === 0 ? "base" : "grid", x1: box.left, x2: box.right, y1: py(v), y2: py(v) }, svg);
    element("text", { x: box.left - 6, y: py(v) + 4, "text-anchor": "end" }, svg, short(v));
  }
  element("line", { class: "base", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }, svg);
  for (const v of ticks(x[0], x[1], width < 420 ? 4 : 6)) {
    element("text", { x: px(v), y: box.bottom + 16, "text-anchor": "middle" }, svg, short(v));
  }
  if (xLabel) element("text", { x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, svg, xLabel);

  const clip = `clip-${container.id || Math.random().toString(36).slice(2)}`;
  const area = element("clipPath", { id: clip }, element("defs", {}, svg));
  element("rect", { x: box.left, y: box.top - 3, width: Math.max(0, box.right - box.left), height: box.bottom - box.top + 6 }, area);
  const inside = element("g", { "clip-path": `url(#${clip})` }, svg);
  for (const curve of curves) {
    const path = curve.points.map(([a, b], i) => `${i ? "L" : "M"}${px(a).toFixed(1)},${py(b).toFixed(1)}`).join("");
    element("path", { class: curve.area ? `area ${curve.name}` : `curve ${curve.name}`, d: path, style: curve.style || "" }, inside);
  }
  for (const mark of marks) element("line", { class: `cross ${mark.name || ""}`, x1: px(mark.x), x2: px(mark.x), y1: box.top, y2: box.bottom }, svg);
  for (const [a, b] of crosses) element("path", { class: "times", d: `M${px(a) - 4},${py(b) - 4}l8,8m0,-8l-8,8` }, svg);
  dots.forEach((dot, i) => { // one that others cover is larger, so that it shows as a ring around them
    const above = dots.slice(i + 1).filter((other) => Math.hypot(px(other.x) - px(dot.x), py(other.y) - py(dot.y)) < 3).length;
    element("circle", { class: `dot ${dot.name}`, cx: px(dot.x), cy: py(dot.y), r: 4.5 + 3 * above }, svg);
  });

  if (hover) {
    const cross = element("line", { class: "cross", y1: box.top, y2: box.bottom, visibility: "hidden" }, svg);
    const show = (v) => {
      cross.setAttribute("visibility", v === null ? "hidden" : "visible");
      if (v !== null) {
        cross.setAttribute("x1", px(v));
        cross.setAttribute("x2", px(v));
      }
      container.at = v;
      hover(v);
    };
    const clamp = (v) => Math.max(x[0], Math.min(x[1], v));
    svg.addEventListener("pointermove", (event) => {
      const at = (event.clientX - svg.getBoundingClientRect().left - box.left) / (box.right - box.left);
      show(clamp(x[0] + at * (x[1] - x[0])));
    });
    svg.addEventListener("pointerleave", () => show(null));
    svg.addEventListener("keydown", (event) => {
      const sign = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!sign) return;
      event.preventDefault();
      const start = container.at ?? (sign > 0 ? x[0] : x[1]);
      show(clamp(start + (sign * (x[1] - x[0])) / 50));
    });
  }
  container.replaceChildren(svg);
  if (focused && hover) svg.focus();
}
