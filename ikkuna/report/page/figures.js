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
const within = share => Math.min(Math.max(share, 0), 1);
function makeZoomable(svg, box, isVertical, redraw) {
  const plot = svg.querySelector(".plot"), frame = svg.querySelector(".frame");
  const whole = plot.getAttribute("viewBox").split(" ").map(Number), view = {x: [0, 1], y: [0, 1]};
  let begin = null;
  function shares(event) {
    const [x, y] = inside(svg, event);
    return [within((x - box[0]) / box[2]), isVertical ? within((y - box[1]) / box[3]) : 0];
  }
  function show() {
    const [x, y] = [view.x, view.y];
    plot.setAttribute("viewBox", [whole[0] + x[0] * whole[2], whole[1] + y[0] * whole[3], (x[1] - x[0]) * whole[2], (y[1] - y[0]) * whole[3]].join(" "));
    redraw(view);
  }
  const part = ([low, high], a, b) => [low + Math.min(a, b) * (high - low), low + Math.max(a, b) * (high - low)];
  svg.addEventListener("mousedown", event => {
    if (event.button) return;
    begin = shares(event);
    event.preventDefault();
  });
  svg.addEventListener("mousemove", event => {
    if (begin === null) return;
    const end = shares(event), [left, right] = part([0, 1], begin[0], end[0]), [top, bottom] = isVertical ? part([0, 1], begin[1], end[1]) : [0, 1];
    const sizes = {x: box[0] + left * box[2], y: box[1] + top * box[3], width: (right - left) * box[2], height: (bottom - top) * box[3]};
    for (const name in sizes) frame.setAttribute(name, sizes[name]);
    frame.style.visibility = "visible";
  });
  addEventListener("mouseup", event => {
    if (begin === null) return;
    const start = begin, end = shares(event);
    begin = null;
    frame.style.visibility = "hidden";
    const isWide = Math.abs(end[0] - start[0]) > 0.01, isHigh = Math.abs(end[1] - start[1]) > 0.01;
    if (isWide) view.x = part(view.x, start[0], end[0]);
    if (isHigh) view.y = part(view.y, start[1], end[1]);
    if (isWide || isHigh) show();
  });
  svg.addEventListener("dblclick", () => { view.x = [0, 1]; view.y = [0, 1]; show(); });
  return view;
}
function write(group, labels) {
  group.replaceChildren(...labels.map(([x, y, text, anchor, size]) => {
    const label = document.createElementNS(group.namespaceURI, "text");
    label.setAttribute("x", x);
    label.setAttribute("y", y);
    label.setAttribute("text-anchor", anchor);
    if (size) label.setAttribute("font-size", size);
    label.setAttribute("class", size ? "row" : "tick");
    label.textContent = text;
    return label;
  }));
}
function roundSteps(low, high, count) {
  const raw = Math.max((high - low) / count, 1), unit = 10 ** Math.floor(Math.log10(raw)), found = [];
  const size = unit * [1, 2, 5, 10].find(factor => factor * unit >= raw * 0.999);
  for (let i = Math.ceil(low / size); i * size <= high; i++) found.push(i * size);
  return found;
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
  const svg = card.querySelector("svg"), cursor = svg.querySelector(".cursor"), ticks = svg.querySelector(".steps");
  const [whole, height] = [svg.querySelector(".plot"), svg.viewBox.baseVal.height];
  const [left, width] = ["x", "width"].map(name => Number(whole.getAttribute(name)));
  let data = null;
  const read = () => data = data || JSON.parse(card.dataset.chart);
  const shown = () => { const [low, high] = read().x; return view.x.map(share => low + share * (high - low)); };
  const view = makeZoomable(svg, [left, 0, width, Number(whole.getAttribute("height"))], false, () => {
    const [low, high] = shown();
    write(ticks, roundSteps(low, high, 5).map(step => {
      const x = left + (step - low) / (high - low) * width;
      return [x, height - 6, step, x > left + width - 20 ? "end" : "middle"];
    }));
  });
  svg.addEventListener("mousemove", event => {
    read();
    const [low, high] = shown(), step = low + (inside(svg, event)[0] - left) / width * (high - low), lines = [];
    let found = null;
    for (const curve of data.curves) {
      if (!curve.steps.length) continue;
      const i = nearest(curve.steps, step);
      if (found === null || Math.abs(curve.steps[i] - step) < Math.abs(found - step)) found = curve.steps[i];
      lines.push((curve.name ? curve.name + ": " : "") + curve.values[i]);
    }
    if (found === null) return;
    const place = left + within((found - low) / (high - low)) * width;
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
  const svg = card.querySelector("svg"), plot = svg.querySelector(".plot");
  const box = ["x", "y", "width", "height"].map(name => Number(plot.getAttribute(name)));
  let data = null, pixels = null, colours = null;
  const read = () => data = data || JSON.parse(card.dataset.heatmap);
  const view = makeZoomable(svg, box, true, () => {
    read();
    const [left, top, width, height] = box, first = view.y[0] * data.names.length, rows = (view.y[1] - view.y[0]) * data.names.length;
    const row = height / rows, size = Math.min(11, Math.max(row * 0.85, 8)), every = Math.max(1, Math.ceil((size + 1) / row)), labels = [];
    for (let i = Math.floor(first); i < first + rows; i++) {
      const y = top + (i + 0.5 - first) * row;
      if (i % every !== every >> 1 || y < top || y > top + height) continue;
      const name = data.names[i], half = data.characters >> 1;
      labels.push([left - 6, y + size * 0.35, name.length <= data.characters ? name : name.slice(0, half - 3) + "…" + name.slice(-half - 2), "end", size]);
    }
    write(svg.querySelector(".rows"), labels);
    const begin = view.x[0] * data.steps.length, columns = (view.x[1] - view.x[0]) * data.steps.length, count = Math.min(data.characters < 30 ? 4 : 6, Math.ceil(columns));
    const chosen = [...new Set(Array.from({length: count}, (_, i) => Math.floor(begin + (i + 0.5) / count * columns)))];
    write(svg.querySelector(".steps"), chosen.map(i => [left + within((i + 0.5 - begin) / columns) * width, top + height + 14, data.steps[i], "middle"]));
  });
  svg.addEventListener("mousemove", event => {
    if (pixels === null && colours === null) {
      read();
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
    const [x, y] = inside(svg, event), [left, top, width, height] = box;
    if (x < left || x >= left + width || y < top || y >= top + height) { hide(); return; }
    const column = Math.floor((view.x[0] + (x - left) / width * (view.x[1] - view.x[0])) * data.steps.length);
    const row = Math.floor((view.y[0] + (y - top) / height * (view.y[1] - view.y[0])) * data.names.length);
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
