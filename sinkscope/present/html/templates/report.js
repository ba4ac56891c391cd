"use strict";
(async () => {
  async function unpacked(source) {
    const bytes = Uint8Array.from(atob(source.textContent), letter => letter.charCodeAt(0));
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
  const withError = (value, error) => error === null ? show(value) : `${show(value)} ± ${error}`;

  function chart(xs, ys, xLabel, title, {log = false, sems = null, names = {}} = {}) {
    const [w, h, left, bottom, top] = [400, 190, 46, 32, 8];
    const svg = make("svg", {class: "chart", viewBox: `0 0 ${w} ${h}`, width: w, height: h, role: "img", "aria-label": title});
    const place = x => log ? Math.log2(x + 1) : x;
    const [low, high] = [place(Math.min(...xs)), place(Math.max(...xs))];
    const ends = ys.map((y, i) => y === null ? null : y + (sems && sems[i] !== null ? sems[i] : 0));
    const peak = Math.max(1e-9, ...ends.filter(y => y !== null));
    const X = x => left + (w - left - 18) * (high > low ? (place(x) - low) / (high - low) : 0.5);
    const Y = y => h - bottom - (h - bottom - top) * y / peak;
    svg.append(make("path", {class: "axis", d: `M${left} ${top}V${h - bottom}H${w - 8}`}));
    for (const share of [0, 0.5, 1])
      svg.append(make("text", {class: "tick end", x: left - 4, y: Y(share * peak) + 4}, (share * peak).toPrecision(2)));
    const step = Math.max(1, Math.floor(xs.length / 5));
    xs.forEach((x, i) => {
      if (log ? [0, 1, 4, 15].includes(x) || i === xs.length - 1 || x % 128 === 0 : i % step === 0 || xs.length < 8)
        svg.append(make("text", {class: "tick mid", x: X(x), y: h - bottom + 13}, x));
    });
    svg.append(make("text", {class: "tick mid", x: (left + w) / 2, y: h - 4}, xLabel));
    const there = xs.map((x, i) => [x, ys[i], i]).filter(([, y]) => y !== null);
    svg.append(make("path", {class: "line c0", d: there.map(([x, y], i) => `${i ? "L" : "M"}${X(x)} ${Y(y)}`).join("")}));
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

  function captioned(title, svg) {
    const figure = html("figure");
    figure.append(html("figcaption", title), svg);
    return figure;
  }

  function strip(values, mean, sem, epsilon) {
    const [w, h, left, right, middle] = [400, 58, 46, 18, 20], title = "alpha_0 of each sequence";
    const svg = make("svg", {class: "chart", viewBox: `0 0 ${w} ${h}`, width: w, height: h, role: "img", "aria-label": title});
    const top = Math.max(1e-9, epsilon, ...values), X = x => left + (w - left - right) * x / top;
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

  const own = document.getElementById("data"), drawings = document.getElementById("drawings");
  const data = drawings ? await unpacked(own) : JSON.parse(own.textContent);
  const address = (index, place) => `#${index}=${encodeURIComponent(data[index].heads[place].name)}`;

  function detail(index, place) {
    const run = data[index], head = run.heads[place];
    const score = name => run.scores.indexOf(name);
    const table = html("table");
    run.scores.forEach((name, i) => {
      const {unit, what} = run.columns[i];
      const cell = html("th", name, {scope: "row", title: what + (unit ? ` (${unit})` : "")});
      table.insertRow().append(cell, html("td", withError(head.scores[i], head.sems[i])));
    });
    const curves = html("div");
    curves.append(chart(head.lengths, head.curve, "tokens", "alpha_0 by length", {sems: head.curve_sem}),
      chart(head.positions, head.alpha, "key position", "alpha by key position",
        {log: true, names: run.tokens[head.group] || {}}));
    if (head.spread.length > 1) {
      const at = score("sink_score");
      curves.append(strip(head.spread, head.scores[at], head.sems[at], run.epsilon));
    }
    const title = html("h4", head.name), link = html("p");
    link.append(html("a", "link to this head", {href: address(index, place)}));
    document.getElementById(`detail-${index}`).replaceChildren(title, link, curves, table);
  }

  function mark(index, place) {
    for (const other of document.querySelectorAll(`.map rect.chosen[data-run="${index}"]`)) other.classList.remove("chosen");
    document.querySelector(`.map rect[data-run="${index}"][data-head="${place}"]`).classList.add("chosen");
  }

  function choose(index, place) {
    mark(index, place);
    detail(index, place);
    history.replaceState(null, "", address(index, place));
  }

  // The head that the address names, such as #0=layer%205%20head%201; null where there is none of that name.
  function named() {
    const [, index, name] = /^#(\d+)=(.*)$/.exec(location.hash) || [];
    if (!data[index]) return null;
    let wanted;
    try { wanted = decodeURIComponent(name); } catch { return null; }
    const place = data[index].heads.findIndex(head => head.name === wanted);
    return place < 0 ? null : [Number(index), place];
  }

  // Colours: any score on the maps.

  function mixed(scale, share) {
    const place = Math.min(1, Math.max(0, share)) * (scale.length - 1), at = Math.min(Math.floor(place), scale.length - 2);
    const parts = color => [1, 3, 5].map(start => parseInt(color.slice(start, start + 2), 16));
    const [from, to] = [parts(scale[at]), parts(scale[at + 1])];
    return "#" + from.map((a, i) => Math.round(a + (to[i] - a) * (place - at)).toString(16).padStart(2, "0")).join("");
  }

  function paint(index, at) {
    const run = data[index], {low, high, unit} = run.columns[at], name = run.scores[at];
    for (const cell of document.querySelectorAll(`.map rect[data-run="${index}"]`)) {
      const head = run.heads[cell.dataset.head], value = head.scores[at];
      const share = high > low ? (value - low) / (high - low) : 0.5;
      cell.setAttribute("fill", value === null ? "none" : mixed(run.scale, share));
      cell.querySelector("title").textContent =
        `layer ${head.place[0]}, head ${head.place[1]}: ${name} ${withError(value, head.sems[at])}`;
    }
    for (const legend of document.querySelectorAll(`#maps-${index} .legend`)) {
      const [first, last] = legend.querySelectorAll("text");
      first.textContent = low;
      last.textContent = `${high} ${name}${unit ? ` (${unit})` : ""}`;
    }
    document.getElementById(`heading-${index}`).textContent = `${name} of every head`;
    document.querySelector(`#choose-${index} output`).textContent = run.columns[at].what;
  }

  function chooser(index) {
    const run = data[index], label = html("label", "Show "), field = html("select");
    run.scores.forEach((name, at) => {
      if (run.columns[at].low !== null) field.append(html("option", name, {value: at, title: run.columns[at].what}));
    });
    label.append(field);
    field.addEventListener("change", () => paint(index, Number(field.value)));
    document.getElementById(`choose-${index}`).replaceChildren(label, html("output"));
  }

  // All heads as a table: built when it is opened, the first ROWS rows of the order and the search.

  const ROWS = 200;

  function matches(run, head, words) {
    return words.every(word => {
      const [, name, sign, bound] = /^(\w+)([<>])(-?[\d.]+)$/.exec(word) || [];
      const at = run.scores.indexOf(name);
      if (at < 0) return `${head.name} ${head.place.join(".")}`.toLowerCase().includes(word.toLowerCase());
      return head.scores[at] !== null && (sign === ">" ? head.scores[at] > bound : head.scores[at] < bound);
    });
  }

  function tabulate(index) {
    const run = data[index], box = document.getElementById(`all-${index}`);
    const search = html("input", null, {type: "search", placeholder: "layer 5   bos_mass>0.5", autocomplete: "off"});
    const label = html("label", "Show heads with "), count = html("output"), table = html("table"), body = html("tbody");
    let order = {at: Math.max(0, run.scores.indexOf("bos_mass")), down: true};
    label.append(search);

    function fill() {
      const words = search.value.split(/\s+/).filter(Boolean);
      const kept = run.heads.map((head, place) => place).filter(place => matches(run, run.heads[place], words));
      const value = place => order.at < 0 ? place : run.heads[place].scores[order.at];
      kept.sort((one, other) => {
        const [a, b] = [value(one), value(other)];
        if (a === null || b === null) return (a === null) - (b === null);
        return (a < b ? -1 : a > b ? 1 : one - other) * (order.down ? -1 : 1);
      });
      count.textContent = `${Math.min(ROWS, kept.length)} of ${kept.length} heads`;
      body.replaceChildren(...kept.slice(0, ROWS).map(place => {
        const head = run.heads[place], row = html("tr"), first = html("th", null, {scope: "row"});
        first.append(html("a", head.name, {href: address(index, place)}));
        row.append(first, ...head.scores.map((score, at) => html("td", show(score), {title: withError(score, head.sems[at])})));
        return row;
      }));
    }

    const line = html("tr");
    ["head", ...run.scores].forEach((name, place) => {
      const cell = html("th", null, {scope: "col"}), button = html("button", name, {type: "button"});
      if (place) button.title = run.columns[place - 1].what;
      button.addEventListener("click", () => {
        order = {at: place - 1, down: order.at === place - 1 ? !order.down : place > 0};
        for (const other of line.children) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", order.down ? "descending" : "ascending");
        fill();
      });
      cell.append(button);
      line.append(cell);
    });
    const top = html("thead"), scroll = html("div", null, {class: "scroll"}), controls = html("p");
    top.append(line);
    table.append(top, body);
    scroll.append(table);
    controls.append(label, count);
    search.addEventListener("input", fill);
    box.append(controls, scroll);
    fill();
  }

  const strongest = data.flatMap((run, index) => {
    const score = head => head.scores[run.scores.indexOf("bos_mass")] ?? -1;
    const place = run.heads.reduce((best, head, place) => score(head) > score(run.heads[best]) ? place : best, 0);
    return run.heads.length ? [[index, place]] : [];
  });
  const asked = named();
  const opened = strongest.map(([index, place]) => asked && asked[0] === index ? asked : [index, place]);
  for (const [index, place] of opened) detail(index, place);
  if (drawings) {  // a large report: its charts are markup that sinkscope has escaped, as in any other report's page
    const charts = await unpacked(drawings);
    await new Promise(done => setTimeout(done));  // the first head is seen before the charts are laid out
    for (const place of document.querySelectorAll("[data-drawing]")) place.outerHTML = charts[place.dataset.drawing];
  }
  for (const [index, place] of opened) {
    mark(index, place);
    chooser(index);
    const all = document.getElementById(`all-${index}`);
    all.addEventListener("toggle", () => all.open && tabulate(index), {once: true});
    all.hidden = false;
  }
  if (asked) document.getElementById(`detail-${asked[0]}`).scrollIntoView();
  addEventListener("hashchange", () => {
    const found = named();
    if (!found) return;
    choose(...found);
    document.getElementById(`detail-${found[0]}`).scrollIntoView();
  });

  const moves = {ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1]};
  for (const map of document.querySelectorAll("svg.map")) {
    const cells = [...map.querySelectorAll("rect[data-head]")];
    const at = (x, y) => cells.find(cell => +cell.getAttribute("x") === x && +cell.getAttribute("y") === y);
    const pick = cell => choose(Number(cell.dataset.run), Number(cell.dataset.head));
    map.addEventListener("click", event => { const cell = event.target.closest("rect[data-head]"); if (cell) pick(cell); });
    map.addEventListener("keydown", event => {
      const cell = event.target.closest("rect[data-head]");
      if (!cell) return;
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(cell); return; }
      if (!(event.key in moves)) return;
      event.preventDefault();
      const size = +cell.getAttribute("width") + 1, [dx, dy] = moves[event.key];
      const next = at(+cell.getAttribute("x") + dx * size, +cell.getAttribute("y") + dy * size);
      if (!next) return;
      cell.tabIndex = -1; next.tabIndex = 0; next.focus();
    });
  }
})();
