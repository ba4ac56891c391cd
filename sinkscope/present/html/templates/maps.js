
// Heat maps. A small one has a square for each head, which shows its title without this script. A dense one has a path
// for each colour, and one square that follows the pointer and the arrow keys and says what is below it.

const LEFT = 44, TOP = 16;  // as in heat_map.py

function mixed(scale, share) {
  const place = Math.min(1, Math.max(0, share)) * (scale.length - 1), at = Math.min(Math.floor(place), scale.length - 2);
  const parts = color => [1, 3, 5].map(start => parseInt(color.slice(start, start + 2), 16));
  const [from, to] = [parts(scale[at]), parts(scale[at + 1])];
  return "#" + from.map((a, i) => Math.round(a + (to[i] - a) * (place - at)).toString(16).padStart(2, "0")).join("");
}

function within(svg, event) {
  return new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
}

class Squares {
  constructor(svg) {
    this.svg = svg;
    const cells = [...svg.querySelectorAll("rect[data-head]")];
    this.places = new Map(cells.map(cell => [Number(cell.dataset.head), cell]));
    this.at = new Map(cells.map(cell => [`${cell.getAttribute("x")} ${cell.getAttribute("y")}`, cell]));
  }

  here(event) { return event.target.closest("rect[data-head]"); }

  beside(cell, across, down) {
    const size = Number(this.svg.dataset.size);
    const next = this.at.get(`${+cell.getAttribute("x") + size * across} ${+cell.getAttribute("y") + size * down}`);
    if (next) [cell.tabIndex, next.tabIndex] = [-1, 0];
    return next;
  }

  mark(place) {
    this.svg.querySelector(".chosen")?.classList.remove("chosen");
    this.places.get(place)?.classList.add("chosen");
  }

  paint(color, said) {
    for (const [place, cell] of this.places) {
      cell.setAttribute("fill", color(place));
      cell.querySelector("title").textContent = said(place);
    }
  }
}

class Paths {
  // `points`: column, row, and the head that stands there, or words. `run`: whose heads. `said`: what a head's title is.
  constructor(svg, points, run, said) {
    Object.assign(this, {svg, points, run, said, size: Number(svg.dataset.size), square: null, chosen: null});
    this.at = new Map(points.map(point => [`${point[0]} ${point[1]}`, point]));
    svg.addEventListener("pointermove", event => this.here(event));
    if (run !== null && points.length) this.put(points[0]);  // where the Tab key stops
  }

  box([column, row], attributes) {
    const [x, y, width] = [LEFT + this.size * column, TOP + this.size * row, this.size - 1];
    return make("rect", {x, y, width, height: width, fill: "none", ...attributes});
  }

  put(point) {
    const [column, row, what] = point, head = {tabindex: 0, role: "button", "data-run": this.run, "data-head": what};
    const square = this.box(point, {class: "square", "data-at": `${column} ${row}`, ...(this.run === null ? {} : head)});
    square.append(make("title", {}, this.run === null ? what : this.said(what)));
    const focused = this.square !== null && this.square === document.activeElement;
    if (this.square) this.square.replaceWith(square); else this.svg.append(square);
    this.square = square;
    if (focused) square.focus({preventScroll: true});
    return square;
  }

  here(event) {
    if (event.target.closest(".square")) return this.square;
    const {x, y} = within(this.svg, event);
    const found = this.at.get(`${Math.floor((x - LEFT) / this.size)} ${Math.floor((y - TOP) / this.size)}`);
    return found ? this.put(found) : null;
  }

  beside(cell, across, down) {
    const [column, row] = cell.dataset.at.split(" ").map(Number);
    const found = this.at.get(`${column + across} ${row + down}`);
    return found ? this.put(found) : null;
  }

  mark(place) {
    const found = this.points.find(point => point[2] === place);
    this.chosen?.remove();
    this.chosen = found ? this.box(found, {class: "chosen", "pointer-events": "none"}) : null;
    if (found) this.svg.append(this.chosen);
  }

  paint(color, said) {
    this.said = said;
    const paths = new Map();
    for (const [column, row, place] of this.points) {
      const fill = color(place), [x, y, side] = [LEFT + this.size * column, TOP + this.size * row, this.size - 1];
      if (!paths.has(fill)) paths.set(fill, []);
      paths.get(fill).push(`M${x} ${y}h${side}v${side}h${-side}z`);
    }
    for (const path of this.svg.querySelectorAll("path")) path.remove();
    this.svg.prepend(...[...paths].map(([fill, squares]) => make("path", {fill, d: squares.join("")})));
    if (this.square) this.put(this.at.get(this.square.dataset.at));
  }
}

// The pointer and the keys on a map of heads: `pick` is given the square of a head.
const MOVES = {ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1]};
function steer(map, pick) {
  map.svg.addEventListener("click", event => { const cell = map.here(event); if (cell) pick(cell); });
  map.svg.addEventListener("keydown", event => {
    const cell = event.target.closest("rect[data-head]");
    if (!cell) return;
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(cell); return; }
    if (!(event.key in MOVES)) return;
    event.preventDefault();
    map.beside(cell, ...MOVES[event.key])?.focus();
  });
}

// A chart of many dots: a ring around the dot that is nearest to the pointer says what it is.
function hover(svg, points) {
  const ring = make("circle", {class: "dot near", r: 4}), title = make("title");
  ring.append(title);
  svg.addEventListener("pointermove", event => {
    const pointer = within(svg, event);
    let [found, least] = [null, 36];
    for (const point of points) {
      const distance = (point[0] - pointer.x) ** 2 + (point[1] - pointer.y) ** 2;
      if (distance < least) [found, least] = [point, distance];
    }
    if (!found) { ring.remove(); return; }
    ring.setAttribute("cx", found[0]);
    ring.setAttribute("cy", found[1]);
    if (title.textContent !== found[2]) title.textContent = found[2];
    if (!ring.isConnected) svg.append(ring);
  });
}
