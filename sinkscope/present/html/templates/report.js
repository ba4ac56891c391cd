
(async () => {
  const [own, curves, drawings] = ["data", "curves", "drawings"].map(id => document.getElementById(id)?.textContent);
  const zipped = document.getElementById("data").type === "application/zlib";
  const data = zipped ? await unpacked(own) : JSON.parse(own), blocks = JSON.parse(curves);
  const address = (index, place) => `#${index}=${encodeURIComponent(data[index].heads[place].name)}`;

  // The curves of a head. They stand in blocks, as packing.py makes them; those of a large report are compressed.
  const BLOCK = 64;
  async function curvesOf(index, place) {
    const block = blocks[index][Math.floor(place / BLOCK)];
    return (typeof block === "string" ? await unpacked(block) : block)[place % BLOCK];
  }

  const latest = data.map(() => null), shown = [];  // of each run: the head asked for, the head on the page
  async function detail(index, place) {
    latest[index] = place;
    const curves = await curvesOf(index, place);
    if (latest[index] !== place) return;  // another head was chosen meanwhile
    shown[index] = {place, curves};
    // The heads of two runs stand beside each other: their curves have one scale.
    const most = {
      curve: Math.max(...shown.map(({curves}) => highest(curves.curve, curves.curve_sem))),
      alpha: Math.max(...shown.map(({curves}) => highest(curves.alpha))),
      spread: Math.max(...shown.map(({curves}) => highest(curves.spread))),
    };
    shown.forEach((_, each) => render(each, most));
  }

  function render(index, most) {
    const {place, curves} = shown[index], run = data[index], head = run.heads[place];
    const table = html("table", null, {"aria-label": `scores of ${head.name}`}), drawn = html("div");
    run.scores.forEach((name, i) => {
      const {unit, what} = run.columns[i];
      const cell = html("th", name, {scope: "row", title: what + (unit ? ` (${unit})` : "")});
      table.insertRow().append(cell, html("td", withError(head.scores[i], head.sems[i])));
    });
    drawn.append(chart(curves.lengths, curves.curve, "tokens", "alpha_0 by length",
      {sems: curves.curve_sem, least: most.curve}),
      chart(curves.positions, curves.alpha, "key position", "alpha by key position",
        {log: true, names: run.tokens[head.group] || {}, least: most.alpha}));
    if (curves.spread.length > 1) {
      const at = run.scores.indexOf("sink_score");
      drawn.append(strip(curves.spread, head.scores[at], head.sems[at], run.epsilon, most.spread));
    }
    const title = html("h4", head.name), link = html("p");
    link.append(html("a", "link to this head", {href: address(index, place)}));
    document.getElementById(`detail-${index}`).replaceChildren(title, link, drawn, table);
  }

  const maps = data.map(() => []);  // of each run
  const mark = (index, place) => maps[index].forEach(map => map.mark(place));

  // The head, and in the other run the head of the same name.
  async function reveal(index, place) {
    const {name} = data[index].heads[place];
    for (const [other, run] of data.entries()) {
      const same = other === index || data.length === 2 ? run.heads.findIndex(head => head.name === name) : -1;
      if (same < 0) continue;
      mark(other, same);
      await detail(other, same);
    }
  }

  function choose(index, place) {
    reveal(index, place);
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

  const said = (index, at) => place => {
    const run = data[index], head = run.heads[place];
    return `layer ${head.place[0]}, head ${head.place[1]}: ${run.scores[at]} ${withError(head.scores[at], head.sems[at])}`;
  };

  function paint(index, at) {
    const run = data[index], {low, high, unit} = run.columns[at], name = run.scores[at];
    const color = place => {
      const value = run.heads[place].scores[at];
      return value === null ? "none" : mixed(run.scale, high > low ? (value - low) / (high - low) : 0.5);
    };
    for (const map of maps[index]) map.paint(color, said(index, at));
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

  // All heads as a table: built when it is opened, ROWS rows at a time in the order and the search that are asked for.

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
    const label = html("label", "Show heads with "), count = html("output"), table = html("table", null, {"aria-label": "all heads"}), body = html("tbody");
    let order = {at: Math.max(0, run.scores.indexOf("bos_mass")), down: true};
    const more = html("button", null, {type: "button", class: "more"});
    let kept = [], shown = 0;
    label.append(search);

    function line(place) {
      const head = run.heads[place], row = html("tr"), first = html("th", null, {scope: "row"});
      first.append(html("a", head.name, {href: address(index, place)}));
      row.append(first, ...head.scores.map((score, at) => html("td", show(score), {title: withError(score, head.sems[at])})));
      return row;
    }

    function extend() {
      body.append(...kept.slice(shown, shown + ROWS).map(line));
      shown = Math.min(shown + ROWS, kept.length);
      count.textContent = `${shown} of ${kept.length} heads`;
      more.textContent = `Show ${Math.min(ROWS, kept.length - shown)} more`;
      more.hidden = shown === kept.length;
    }

    function fill() {
      const words = search.value.split(/\s+/).filter(Boolean);
      kept = run.heads.map((head, place) => place).filter(place => matches(run, run.heads[place], words));
      const value = place => order.at < 0 ? place : run.heads[place].scores[order.at];
      kept.sort((one, other) => {
        const [a, b] = [value(one), value(other)];
        if (a === null || b === null) return (a === null) - (b === null);
        return (a < b ? -1 : a > b ? 1 : one - other) * (order.down ? -1 : 1);
      });
      body.replaceChildren();
      shown = 0;
      extend();
    }

    const names = html("tr");
    ["head", ...run.scores].forEach((name, place) => {
      const cell = html("th", null, {scope: "col"}), button = html("button", name, {type: "button"});
      if (place) button.title = run.columns[place - 1].what;
      button.addEventListener("click", () => {
        order = {at: place - 1, down: order.at === place - 1 ? !order.down : place > 0};
        for (const other of names.children) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", order.down ? "descending" : "ascending");
        fill();
      });
      cell.append(button);
      names.append(cell);
    });
    const top = html("thead"), scroll = html("div", null, {class: "scroll"}), controls = html("p");
    top.append(names);
    table.append(top, body);
    scroll.append(table);
    controls.append(label, count);
    search.addEventListener("input", fill);
    more.addEventListener("click", extend);
    box.append(controls, scroll, more);
    fill();
  }

  const strongest = data.flatMap((run, index) => {
    const score = head => head.scores[run.scores.indexOf("bos_mass")] ?? -1;
    const place = run.heads.reduce((best, head, place) => score(head) > score(run.heads[best]) ? place : best, 0);
    return run.heads.length ? [[index, place]] : [];
  });
  const asked = named();
  const opened = strongest.map(([index, place]) => asked && asked[0] === index ? asked : [index, place]);
  for (const [index, place] of opened) await detail(index, place);
  const dense = new Map();  // the charts of a large report, and their points
  if (drawings) {  // their markup was escaped by sinkscope, as in any other report's page
    const drawn = await unpacked(drawings);
    await new Promise(done => setTimeout(done));  // the first head is seen before the charts are laid out
    for (const place of document.querySelectorAll("[data-drawing]")) {
      const {svg, points} = drawn[place.dataset.drawing];
      place.innerHTML = svg;
      dense.set(place.firstElementChild, points);
      place.replaceWith(place.firstElementChild);
    }
  }
  const pick = cell => choose(Number(cell.dataset.run), Number(cell.dataset.head));
  data.forEach((run, index) => {
    const known = said(index, Math.max(0, run.scores.indexOf("bos_mass")));
    for (const svg of document.querySelectorAll(`#maps-${index} .map`)) {
      const map = dense.has(svg) ? new Paths(svg, dense.get(svg), index, known) : new Squares(svg);
      maps[index].push(map);
      steer(map, pick);
      dense.delete(svg);
    }
  });
  for (const [svg, points] of dense) {
    if (svg.matches(".map")) new Paths(svg, points, null, null);
    else if (points.length) hover(svg, points);
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
})();
