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
  const html = (name, text) => make(name, {}, text, null);
  const show = value => value === null ? "missing" : String(value);

  function chart(xs, ys, xLabel, title, log) {
    const [w, h, left, bottom, top] = [400, 190, 46, 32, 8];
    const svg = make("svg", {class: "chart", viewBox: `0 0 ${w} ${h}`, width: w, height: h, role: "img", "aria-label": title});
    const place = x => log ? Math.log2(x + 1) : x;
    const [low, high] = [place(Math.min(...xs)), place(Math.max(...xs))];
    const peak = Math.max(1e-9, ...ys.filter(y => y !== null));
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
    const there = xs.map((x, i) => [x, ys[i]]).filter(([, y]) => y !== null);
    svg.append(make("path", {class: "line c0", d: there.map(([x, y], i) => `${i ? "L" : "M"}${X(x)} ${Y(y)}`).join("")}));
    for (const [x, y] of there) {
      const dot = make("circle", {class: "dot c0", cx: X(x), cy: Y(y), r: 2.2});
      dot.append(make("title", {}, `${xLabel} ${x}: ${y}`));
      svg.append(dot);
    }
    const figure = html("figure");
    figure.append(html("figcaption", title), svg);
    return figure;
  }

  function detail(index, place) {
    const run = data[index], head = run.heads[place];
    const table = html("table");
    run.scores.forEach((name, i) => {
      const row = table.insertRow();
      row.append(make("th", {scope: "row"}, name, null), html("td", show(head.scores[i])));
    });
    const curves = html("div");
    curves.append(chart(head.lengths, head.curve, "tokens", "alpha_0 by length", false),
      chart(head.positions, head.alpha, "key position", "alpha by key position", true));
    document.getElementById(`detail-${index}`).replaceChildren(html("h4", head.name), curves, table);
  }

  function mark(index, place) {
    for (const other of document.querySelectorAll(`.map rect.chosen[data-run="${index}"]`)) other.classList.remove("chosen");
    document.querySelector(`.map rect[data-run="${index}"][data-head="${place}"]`).classList.add("chosen");
  }

  function choose(cell) {
    mark(cell.dataset.run, cell.dataset.head);
    detail(cell.dataset.run, cell.dataset.head);
  }

  const own = document.getElementById("data"), drawings = document.getElementById("drawings");
  const data = drawings ? await unpacked(own) : JSON.parse(own.textContent);
  const strongest = data.flatMap((run, index) => {
    const score = head => head.scores[run.scores.indexOf("bos_mass")] ?? -1;
    const place = run.heads.reduce((best, head, place) => score(head) > score(run.heads[best]) ? place : best, 0);
    return run.heads.length ? [[index, place]] : [];
  });
  for (const [index, place] of strongest) detail(index, place);
  if (drawings) {  // a large report: its charts are markup that sinkscope has escaped, as in any other report's page
    const charts = await unpacked(drawings);
    await new Promise(done => setTimeout(done));  // the first head is seen before the charts are laid out
    for (const place of document.querySelectorAll("[data-drawing]")) place.outerHTML = charts[place.dataset.drawing];
  }
  for (const [index, place] of strongest) mark(index, place);

  const moves = {ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1]};
  for (const map of document.querySelectorAll("svg.map")) {
    const cells = [...map.querySelectorAll("rect[data-head]")];
    const at = (x, y) => cells.find(cell => +cell.getAttribute("x") === x && +cell.getAttribute("y") === y);
    map.addEventListener("click", event => { const cell = event.target.closest("rect[data-head]"); if (cell) choose(cell); });
    map.addEventListener("keydown", event => {
      const cell = event.target.closest("rect[data-head]");
      if (!cell) return;
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(cell); return; }
      if (!(event.key in moves)) return;
      event.preventDefault();
      const size = +cell.getAttribute("width") + 1, [dx, dy] = moves[event.key];
      const next = at(+cell.getAttribute("x") + dx * size, +cell.getAttribute("y") + dy * size);
      if (!next) return;
      cell.tabIndex = -1; next.tabIndex = 0; next.focus();
    });
  }
})();
