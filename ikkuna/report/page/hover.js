"use strict";
const tip = document.getElementById("tip");
function show(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const left = event.clientX + 14, top = event.clientY + 14;
  tip.style.left = Math.min(left, innerWidth - tip.offsetWidth - 6) + "px";
  tip.style.top = (top + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 8 : top) + "px";
}
function hide() { tip.hidden = true; }
function inside(svg, event) {
  const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
  return [(event.clientX - box.left) / box.width * view.width, (event.clientY - box.top) / box.height * view.height];
}
function nearest(steps, wanted) {
  let low = 0, high = steps.length - 1;
  while (low < high) {
    const middle = low + high >> 1;
    if (steps[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && wanted - steps[low - 1] < steps[low] - wanted ? low - 1 : low;
}
for (const card of document.querySelectorAll("[data-chart]")) {
  const svg = card.querySelector("svg"), cursor = svg.querySelector(".cursor");
  let data = null;
  svg.addEventListener("mousemove", event => {
    data = data || JSON.parse(card.dataset.chart);
    const [low, high, begin, end] = data.x, x = inside(svg, event)[0];
    const step = low + (x - begin) / (end - begin) * (high - low);
    const lines = [];
    let found = null;
    for (const curve of data.curves) {
      if (!curve.steps.length) continue;
      const i = nearest(curve.steps, step);
      if (found === null || Math.abs(curve.steps[i] - step) < Math.abs(found - step)) found = curve.steps[i];
      lines.push((curve.name ? curve.name + ": " : "") + curve.values[i]);
    }
    if (found === null) return;
    const place = begin + (found - low) / (high - low) * (end - begin);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.style.visibility = "visible";
    show(event, "step " + found + "\n" + lines.join("\n"));
  });
  svg.addEventListener("mouseleave", () => { cursor.style.visibility = "hidden"; hide(); });
}
function valueOf(data, colours, pixel) {
  const key = pixel[0] << 16 | pixel[1] << 8 | pixel[2], i = colours.get(key);
  if (i === undefined) return "";
  if (i >= data.colours) return ["exactly zero", "NaN or infinite", "no value"][i - data.colours];
  const share = i / (data.colours - 1);
  const value = data.type === "log" ? data.low * Math.pow(data.high / data.low, share) : data.low + share * (data.high - data.low);
  return "≈ " + value.toPrecision(3);
}
function paletteOf(bytes) {
  const found = new Map();
  for (let at = 8; at + 8 < bytes.length;) {
    const size = (bytes[at] << 24 | bytes[at + 1] << 16 | bytes[at + 2] << 8 | bytes[at + 3]) >>> 0;
    if (String.fromCharCode(...bytes.slice(at + 4, at + 8)) === "PLTE")
      for (let i = 0; i < size / 3; i++) {
        const p = at + 8 + 3 * i, key = bytes[p] << 16 | bytes[p + 1] << 8 | bytes[p + 2];
        if (!found.has(key)) found.set(key, i);
      }
    at += 12 + size;
  }
  return found;
}
for (const card of document.querySelectorAll("[data-heatmap]")) {
  const svg = card.querySelector("svg");
  let data = null, pixels = null, colours = null;
  svg.addEventListener("mousemove", event => {
    if (data === null) {
      data = JSON.parse(card.dataset.heatmap);
      const address = svg.querySelector("image").getAttribute("href"), image = new Image();
      colours = paletteOf(Uint8Array.from(atob(address.split(",")[1]), c => c.charCodeAt(0)));
      image.onload = () => {
        const canvas = document.createElement("canvas");
        canvas.width = image.width;
        canvas.height = image.height;
        pixels = canvas.getContext("2d");
        pixels.drawImage(image, 0, 0);
      };
      image.src = address;
    }
    if (pixels === null) return;
    const [x, y] = inside(svg, event), [left, top, width, height] = data.box;
    const column = Math.floor((x - left) / width * data.steps.length), row = Math.floor((y - top) / height * data.names.length);
    if (column < 0 || column >= data.steps.length || row < 0 || row >= data.names.length) { hide(); return; }
    const value = valueOf(data, colours, pixels.getImageData(column, row, 1, 1).data);
    show(event, data.names[row] + "\nstep " + data.steps[column] + "\n" + value);
  });
  svg.addEventListener("mouseleave", hide);
}
for (const table of document.querySelectorAll(".modules")) {
  table.querySelectorAll("th").forEach((head, column) => head.addEventListener("click", () => {
    const body = table.tBodies[0], up = head.dataset.up = head.dataset.up === "1" ? "" : "1";
    const key = row => {
      const text = row.cells[column].textContent.trim(), number = parseFloat(text.replace(/,/g, ""));
      return column < 2 || isNaN(number) ? text : number;
    };
    const rows = [...body.rows].map(row => [key(row), row]);
    rows.sort((a, b) => typeof a[0] === "number" && typeof b[0] === "number" ? a[0] - b[0] : String(a[0]).localeCompare(String(b[0]), undefined, {numeric: true}));
    if (!up) rows.reverse();
    body.append(...rows.map(pair => pair[1]));
  }));
}
for (const filter of document.querySelectorAll(".filter"))
  filter.addEventListener("input", () => {
    for (const row of filter.closest("p").nextElementSibling.querySelectorAll("tbody tr"))
      row.hidden = !row.cells[0].textContent.toLowerCase().includes(filter.value.toLowerCase());
  });
