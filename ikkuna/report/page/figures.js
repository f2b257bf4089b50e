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
function makeHeatmap(card) {
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
function makeTable(table) {
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
addEventListener("input", event => {
  const filter = event.target, wanted = filter.value.toLowerCase();
  if (!filter.matches(".filter")) return;
  const area = filter.closest("p").nextElementSibling;
  for (const row of area.querySelectorAll("tbody tr")) row.hidden = !row.cells[0].textContent.toLowerCase().includes(wanted);
  for (const block of area.querySelectorAll("details")) {
    block.hidden = !block.querySelector("tbody tr:not([hidden])");
    block.open = wanted !== "" && !block.hidden;
  }
});

const css = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const plots = [], pages = document.querySelector("main"), times = JSON.parse(pages.dataset.times || "[]");
let isTime = false;
function wallTime(step) {
  let i = times.findIndex(pair => pair[0] >= step);
  if (i < 0) i = times.length - 1;
  const [a, b] = [times[Math.max(i - 1, 0)], times[i]], share = b[0] > a[0] ? (step - a[0]) / (b[0] - a[0]) : 0;
  const seconds = a[1] + Math.min(share, 1) * (b[1] - a[1]);
  return seconds < 100 ? seconds.toFixed(1) + " s" : seconds < 6000 ? (seconds / 60).toFixed(1) + " min" : (seconds / 3600).toFixed(1) + " h";
}
function short(value, digits = 4) {
  const size = Math.abs(value);
  for (const [unit, name] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (size >= Math.max(unit, 1e4) && size < 1e3 * unit) return +(value / unit).toPrecision(digits) + name;
  return size !== 0 && (size < 1e-3 || size >= 1e12) ? value.toExponential().replace(/(\.\d{3})\d+/, "$1") : String(+value.toPrecision(digits));
}
const toNumber = value => typeof value === "number" ? value : null;
function joined(data) {
  return uPlot.join(data.curves.map(curve => [curve.steps, curve.values.map(toNumber)]));
}
function paint(plot, data, isBelow) {
  const {ctx, bbox} = plot, {left, top, width, height} = bbox, ratio = devicePixelRatio;
  const x = step => plot.valToPos(step, "x", true), y = value => plot.valToPos(value, "y", true);
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  ctx.lineWidth = ratio;
  ctx.font = 11 * ratio + "px system-ui,sans-serif";
  if (isBelow) {
    if (data.healthy) {
      const [low, high] = data.healthy, begin = high === null ? top : y(high), end = low === null ? top + height : y(low);
      ctx.fillStyle = css("good");
      ctx.globalAlpha = 0.13;
      ctx.fillRect(left, begin, width, end - begin);
    }
  } else {
    ctx.fillStyle = css("soft");
    ctx.textAlign = "right";
    for (const [value, label] of data.lines) {
      const place = y(value), isHigh = place - top < 18 * ratio, at = [left + width - 4 * ratio, place + (isHigh ? 4 : -4) * ratio];
      ctx.strokeStyle = css("soft");
      ctx.setLineDash([5 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(left, place);
      ctx.lineTo(left + width, place);
      ctx.stroke();
      ctx.setLineDash([]);
      ctx.textBaseline = isHigh ? "top" : "bottom";
      ctx.strokeStyle = css("card");  // a curve behind the text would make it hard to read
      ctx.lineWidth = 4 * ratio;
      ctx.strokeText(label, ...at);
      ctx.lineWidth = ratio;
      ctx.fillText(label, ...at);
    }
    for (const [step, , severity] of data.marks) {
      const place = x(step);
      ctx.strokeStyle = ctx.fillStyle = css(severity === "error" ? "bad" : severity === "warning" ? "c1" : "c0");
      ctx.globalAlpha = 0.7;
      ctx.beginPath();
      ctx.moveTo(place, top);
      ctx.lineTo(place, top + height);
      ctx.stroke();
      ctx.globalAlpha = 1;
      ctx.beginPath();
      ctx.moveTo(place - 5 * ratio, top);
      ctx.lineTo(place + 5 * ratio, top);
      ctx.lineTo(place, top + 7 * ratio);
      ctx.fill();
    }
    ctx.strokeStyle = css("bad");
    ctx.lineWidth = 2 * ratio;
    for (const curve of data.curves) curve.values.forEach((value, i) => {
      if (typeof value === "number") return;
      ctx.beginPath();
      ctx.moveTo(x(curve.steps[i]), top + height - 8 * ratio);
      ctx.lineTo(x(curve.steps[i]), top + height);
      ctx.stroke();
    });
  }
  ctx.restore();
}
function limits(plot, low, high) {
  const data = plot.numbers;
  if (data.scale === "share") return [Math.min(low ?? 0, 0), Math.max(high ?? 1, 1)];
  if (low === null || low === undefined) return data.scale === "log" ? [0.1, 1] : [0, 1];
  for (const [value] of data.lines) if (value > 0 || data.scale !== "log") { low = Math.min(low, value); high = Math.max(high, value); }
  if (data.scale === "log") return high > 1.01 * low ? [low / 1.05, high * 1.05] : [low / 2, high * 2];
  const margin = 0.05 * (high - low) || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && data.scale !== "asinh" ? Math.max(low - margin, 0) : low - margin, high + margin];
}
// uPlot's own marks of a logarithmic axis do not end if the axis begins a little below a power of ten.
function decades(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (let digit = 1; digit < 10; digit++) found.push(Number(digit + "e" + power));
  return found.filter(value => value >= low && value <= high);
}
function logMarks(plot, axis, low, high) {
  const least = plot.numbers.scale === "log" ? low : plot.numbers.least;
  const above = high > 0 ? decades(Math.max(least, low), high) : [];
  const below = low < 0 ? decades(Math.max(least, -high), -low).map(value => -value).reverse() : [];
  const marks = [...below, ...(low <= 0 && high >= 0 ? [0] : []), ...above];
  if (marks.length > 2) return marks;
  const unit = 10 ** Math.floor(Math.log10((high - low) / 6));
  const step = unit * [1, 2, 5, 10].find(factor => high - low <= 6 * factor * unit);
  const first = Math.ceil(low / step), count = Math.floor(high / step) - first + 1;
  return Array.from({length: count}, (_, i) => Number(((first + i) * step).toPrecision(12)));
}
function labelled(plot, marks) {
  if (marks.length < 7) return marks;
  const digit = value => Number(Math.abs(value).toExponential()[0]);
  const powers = marks.filter(value => digit(value) < 2), often = Math.ceil(powers.length / 8);
  const isLabelled = value => digit(value) < 2 ? powers.indexOf(value) % often === 0 : powers.length < 4 && [2, 5].includes(digit(value));
  return marks.map(value => isLabelled(value) ? value : null);
}
function makeChart(card) {
  const data = JSON.parse(card.dataset.chart), box = card.querySelector(".plot"), count = data.curves.length;
  const table = joined(data), middle = count >> 1, isFaint = i => data.band && i !== middle;
  const series = data.curves.map((curve, i) => ({
    label: curve.name || "value", stroke: () => css("c" + curve.colour), width: isFaint(i) ? 0.5 : 1.6,
    points: {show: curve.values.filter(value => typeof value === "number").length < 3, size: 5}, spanGaps: false,
    value: (plot, value, s, i) => {
      const curve = plot.numbers.curves[s - 1], step = i === null ? null : plot.data[0][i], at = step === null ? -1 : curve.steps.indexOf(step);
      return at < 0 ? "–" : typeof curve.values[at] === "number" ? String(curve.values[at]) : curve.values[at];
    },
  }));
  const bands = data.band ? [...Array(middle).keys()].map(i => ({series: [count - i, i + 1], fill: () => css("area")})) : [];
  const logAxis = ["log", "asinh"].includes(data.scale) ? {splits: logMarks, filter: labelled} : {};
  const option = {
    width: Math.max(box.clientWidth, 200), height: 200,
    series: [{label: "step", value: (plot, step) => step === null ? "–" : isTime && times.length ? step + " (" + wallTime(step) + ")" : String(step)}, ...series],
    bands,
    legend: {live: true},
    cursor: {sync: {key: "steps"}, drag: {x: true, y: false}, points: {size: 6}},
    scales: {x: {time: false}, y: {distr: {log: 3, asinh: 4}[data.scale] || 1, asinh: data.least, log: 10, range: limits}},
    axes: [
      {stroke: () => css("soft"), grid: {stroke: () => css("grid"), width: 1}, ticks: {show: false}, size: 28, incrs: isTime ? undefined : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7, 1e8, 1e9, 1e10, 1e12, 1e15, 1e16, 1e17], values: (plot, steps) => steps.map(step => isTime && times.length ? wallTime(step) : short(step))},
      {stroke: () => css("soft"), grid: {stroke: () => css("grid"), width: 1}, ticks: {show: false}, size: 58, ...logAxis, values: (plot, values) => values.map(value => value === null || value === undefined ? "" : short(value, data.scale === "linear" ? 4 : 3))},
    ],
    hooks: {
      drawClear: [plot => paint(plot, plot.numbers, true)],
      draw: [plot => paint(plot, plot.numbers, false)],
      setCursor: [plot => {
        const near = plot.cursor.left < 0 ? [] : plot.numbers.marks.filter(mark => Math.abs(plot.valToPos(mark[0], "x") - plot.cursor.left) < 6);
        box.title = near.map(mark => mark[1]).join("\n");
      }],
      setScale: [(plot, key) => key === "x" && plot.whole && zoom(card, plot)],
    },
  };
  let plot;
  uPlot.prototype.numbers = data;
  plot = new uPlot(option, table, box);
  plot.numbers = data;
  plot.whole = [plot.scales.x.min, plot.scales.x.max];
  card.plot = plot;
  plots.push(plot);
  new ResizeObserver(() => box.clientWidth && plot.setSize({width: box.clientWidth, height: 200})).observe(box);
}
function replaceNumbers(plot, data) {
  plot.numbers = data;
  plot.setData(joined(data), false);
}
async function zoom(card, plot) {
  const url = card.dataset.url, {min, max} = plot.scales.x;
  if (!url || plot.busy) return;
  const asked = plot.asked = min + " " + max, isWhole = min <= plot.whole[0] && max >= plot.whole[1];
  const answer = await fetch(url + (isWhole ? "" : "&from=" + min + "&to=" + max));
  if (!answer.ok || plot.asked !== asked) return;
  plot.busy = true;
  replaceNumbers(plot, await answer.json());
  plot.setScale("x", {min, max});
  setTimeout(() => plot.busy = false);
}
function activate(root) {
  const seen = new IntersectionObserver(entries => entries.forEach(entry => {
    if (!entry.isIntersecting) return;
    seen.unobserve(entry.target);
    makeChart(entry.target);
  }), {rootMargin: "300px"});
  for (const card of root.querySelectorAll("[data-chart]")) seen.observe(card);
  for (const card of root.querySelectorAll("[data-heatmap]")) makeHeatmap(card);
  for (const table of root.querySelectorAll(".modules")) makeTable(table);
  for (const part of root.querySelectorAll("details[data-part]")) part.addEventListener("toggle", async () => {
    if (!part.open || part.isFilled) return;
    part.isFilled = true;
    const answer = await fetch(part.dataset.part), inner = part.querySelector("div");
    inner.innerHTML = await answer.text();
    activate(inner);
  });
}
const axis = document.querySelector(".axis");
if (axis) axis.addEventListener("click", () => {
  isTime = !isTime;
  axis.textContent = isTime ? "show steps" : "show wall time";
  for (const plot of plots) plot.redraw(false, true);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach(plot => plot.redraw(false, true)));
let state = pages.dataset.state;
async function follow() {
  try {
    const answer = await fetch(pages.dataset.follow), found = await answer.text();
    if (answer.ok && found !== state) {
      state = found;
      const head = document.getElementById("head"), part = await fetch(head.dataset.part);
      if (part.ok) head.innerHTML = await part.text();
      for (const card of document.querySelectorAll("[data-url]")) {
        if (!card.plot) continue;
        const plot = card.plot, isWhole = plot.scales.x.min <= plot.whole[0] && plot.scales.x.max >= plot.whole[1];
        if (!isWhole) continue;
        const data = await (await fetch(card.dataset.url)).json(), steps = data.curves.flatMap(curve => curve.steps);
        plot.busy = true;
        replaceNumbers(plot, data);
        plot.whole = [Math.min(...steps), Math.max(...steps)];
        plot.setScale("x", {min: plot.whole[0], max: plot.whole[1]});
        await new Promise(done => setTimeout(done));
        plot.busy = false;
      }
    }
  } catch (error) { document.body.classList.add("gone"); }
  setTimeout(follow, 2000);
}
activate(document);
if (pages.dataset.follow) setTimeout(follow, 2000);
