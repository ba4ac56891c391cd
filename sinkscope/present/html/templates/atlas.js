"use strict";
(() => {
  const body = document.querySelector(".atlas tbody"), heads = [...document.querySelectorAll(".atlas thead th")];
  const value = (row, place) => row.cells[place].dataset.sort;

  function sort(place) {
    const head = heads[place], words = "words" in head.dataset, before = head.getAttribute("aria-sort");
    const rising = before ? before === "descending" : words;  // words begin with a, numbers with the largest
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const compare = (a, b) => words ? a.localeCompare(b, undefined, {numeric: true}) : a - b;
    const rows = [...body.rows].sort((one, other) => {
      const [a, b] = [value(one, place), value(other, place)];
      if (a === "" || b === "") return (a === "") - (b === "");  // a missing value is last, whichever way
      return rising ? compare(a, b) : compare(b, a);
    });
    body.append(...rows);
  }

  heads.forEach((head, place) => head.querySelector("button").addEventListener("click", () => sort(place)));

  const filter = document.getElementById("filter"), count = document.getElementById("count");
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every(word => text.includes(word));
    }
    count.textContent = `${[...body.rows].filter(row => !row.hidden).length} of ${body.rows.length}`;
  });
})();
