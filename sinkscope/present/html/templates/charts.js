"use strict";
// Elements, the charts of one head, and what is compressed in the page.

async function unpacked(text) {
  const letters = atob(text), bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

const SVG = "http://www.w3.org/2000/svg";
const make = (name, attributes = {}, text = null, space = SVG) => {
  const element = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
};
const html = (name, text = null, attributes = {}) => make(name, attributes, text, null);
const show = value => value === null ? "missing" : String(value);

// A mean and its error with equal decimals: two digits of the error, unless the mean's three digits end before.
function withError(value, error) {
  const numbers = typeof value === "number" && typeof error === "number" && error > 0;
  if (!numbers) return error === null ? show(value) : `${show(value)} ± ${error}`;
  const least = digits => number => digits - 1 - Math.floor(Math.log10(Math.abs(number)));
  const places = Math.min(least(2)(error), value ? least(3)(value) : Infinity);
  return places > 6 ? `${value} ± ${error}` : [value, error].map(number => number.toFixed(Math.max(0, places))).join(" ± ");
}

function chart(xs, ys, xLabel, title, {log = false, sems = null, names = {}, least = 0} = {}) {
  const [w, h, left, bottom, top] = [400, 190, 46, 32, 8];
  const svg = make("svg", {class: "chart", viewBox: `0 0 ${w} ${h}`, width: w, height: h, role: "img", "aria-label": title});
  const place = x => log ? Math.log2(x + 1) : x;
  const [low, high] = [place(Math.min(...xs)), place(Math.max(...xs))];
  const ends = ys.map((y, i) => y === null ? null : y + (sems && sems[i] !== null ? sems[i] : 0));
  const peak = Math.max(1e-9, least, ...ends.filter(y => y !== null));
  const X = x => left + (w - left - 18) * (high > low ? (place(x) - low) / (high - low) : 0.5);
  const Y = y => h - bottom - (h - bottom - top) * y / peak;
  svg.append(make("path", {class: "axis", d: `M${left} ${top}V${h - bottom}H${w - 8}`}));
  for (const share of [0, 0.5, 1])
    svg.append(make("text", {class: "tick end", x: left - 4, y: Y(share * peak) + 4}, (share * peak).toPrecision(2)));
  const step = Math.max(1, Math.floor(xs.length / 5));
  const marked = log ? decimals(xs[0], xs.at(-1)) : xs.filter((x, i) => i % step === 0 || xs.length < 8);
  for (const x of marked) {
    svg.append(make("text", {class: "tick mid", x: X(x), y: h - bottom + 13}, x));
    svg.append(make("path", {class: "axis", d: `M${X(x)} ${h - bottom}v3`}));
  }
  svg.append(make("text", {class: "tick mid", x: (left + w) / 2, y: h - 4}, log ? `${xLabel} (logarithmic scale)` : xLabel));
  const there = xs.map((x, i) => [x, ys[i], i]).filter(([, y]) => y !== null);
  const joined = i => i > 0 && ys[i - 1] !== null;  // the line breaks where a value is missing
  svg.append(make("path", {class: "line c0", d: there.map(([x, y, i]) => `${joined(i) ? "L" : "M"}${X(x)} ${Y(y)}`).join("")}));
  for (const [x, y, i] of there) {
    const sem = sems ? sems[i] : null;
    if (sem !== null) svg.append(make("path", {class: "error", d: `M${X(x)} ${Y(Math.max(0, y - sem))}V${Y(y + sem)}`}));
    const dot = make("circle", {class: "dot c0", cx: X(x), cy: Y(y), r: 2.2});
    const token = names[x] === undefined ? "" : ` '${names[x]}'`;
    dot.append(make("title", {}, `${xLabel} ${x}${token}: ${withError(y, sem)}`));
    svg.append(dot);
  }
  return captioned(title, svg);
}

// 0, 1, 2, 5, 10, 20, 50, ... within two positions.
function decimals(low, high) {
  const found = [0];
  for (let power = 1; power <= high; power *= 10) found.push(power, 2 * power, 5 * power);
  return found.filter(x => x >= low && x <= high);
}

// The largest value that curves show.
function highest(values, sems) {
  return Math.max(0, ...values.map((y, i) => (y ?? 0) + (sems?.[i] ?? 0)));
}

function captioned(title, svg) {
  const figure = html("figure");
  figure.append(html("figcaption", title), svg);
  return figure;
}

function strip(values, mean, sem, epsilon, least = 0) {
  const [w, h, left, right, middle] = [400, 58, 46, 18, 20], title = "alpha_0 of each sequence";
  const svg = make("svg", {class: "chart", viewBox: `0 0 ${w} ${h}`, width: w, height: h, role: "img", "aria-label": title});
  const top = Math.max(1e-9, least, epsilon, ...values), X = x => left + (w - left - right) * x / top;
  svg.append(make("path", {class: "axis", d: `M${left} ${h - 22}H${w - 8}`}));
  for (const x of [0, top / 2, top]) svg.append(make("text", {class: "tick mid", x: X(x), y: h - 9}, x.toPrecision(2)));
  svg.append(make("path", {class: "threshold", d: `M${X(epsilon)} 4V${h - 22}`}));
  for (const value of values) {
    const dot = make("circle", {class: "sequence", cx: X(value), cy: middle, r: 3});
    dot.append(make("title", {}, String(value)));
    svg.append(dot);
  }
  if (mean !== null && sem !== null)
    svg.append(make("path", {class: "error wide", d: `M${X(Math.max(0, mean - sem))} ${middle + 9}H${X(mean + sem)}`}));
  return captioned(`${title}; dashed: epsilon; bar: mean ± standard error`, svg);
}
