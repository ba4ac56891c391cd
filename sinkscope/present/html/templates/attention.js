// Attention maps: the pointer and the arrow keys say what a cell is, in the line below its map.

function readCells(svg, {tokens, weights}) {
  const told = svg.parentElement.querySelector("output"), ring = make("rect", {class: "ring", width: 1, height: 1});
  const named = place => `${place} \u2018${tokens[place]}\u2019`;
  let at = [0, 0];

  function say(query, key) {
    at = [query, key];
    const value = weights[query][key];
    ring.setAttribute("x", key);
    ring.setAttribute("y", query);
    if (!ring.isConnected) svg.append(ring);
    told.textContent = `query ${named(query)}, key ${named(key)}: ${value === undefined ? "hidden" : (value / 1e4).toFixed(4)}`;
  }

  svg.addEventListener("pointermove", event => {
    const {x, y} = within(svg, event), [key, query] = [Math.floor(x), Math.floor(y)];
    if (key >= 0 && query >= 0 && key < tokens.length && query < tokens.length) say(query, key);
  });
  svg.addEventListener("keydown", event => {
    if (!(event.key in MOVES)) return;
    event.preventDefault();
    const [across, down] = MOVES[event.key], last = tokens.length - 1;
    const [query, key] = ring.isConnected ? [at[0] + down, at[1] + across] : [0, 0];
    say(Math.min(last, Math.max(0, query)), Math.min(last, Math.max(0, key)));
  });
}

JSON.parse(document.getElementById("weights").textContent).flat().forEach((map, place) =>
  readCells(document.querySelectorAll(".weights")[place], map));
