"use strict";
// Draws attention maps from the page's own data. Texts enter by textContent only.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const MEASURES = [["entropy", "bits"], ["sparsity", ""], ["distance", "tokens"]];
  const at = (id) => document.getElementById(id);
  const state = { stack: 0, layer: 0, head: 0, colour: "maps", stretch: true, pin: null, cell: null };

  function make(name, parent, options = {}) {
    const { text, ...attributes } = options;
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (parent) parent.append(node);
    return node;
  }

  // --- numbers ---

  function half(bits) {
    const sign = bits & 0x8000 ? -1 : 1, power = (bits >> 10) & 31, rest = bits & 1023;
    return sign * (power ? 2 ** (power - 15) * (1 + rest / 1024) : 2 ** -24 * rest);
  }

  const halves = Float32Array.from({ length: 65536 }, (_, bits) => half(bits));

  // Weights are unpacked when a layer is first drawn.
  function weightsOf(layer) {
    if (!layer.values) {
      const raw = atob(layer.weights), count = raw.length / 2;
      layer.values = new Float32Array(count);
      for (let i = 0; i < count; i++) {
        layer.values[i] = halves[raw.charCodeAt(2 * i) | (raw.charCodeAt(2 * i + 1) << 8)];
      }
      const [heads, rows, columns] = layer.shape, size = rows * columns;
      layer.most = Array.from({ length: heads }, (_, h) => {
        let most = 0;
        for (let i = h * size; i < (h + 1) * size; i++) most = Math.max(most, Math.abs(layer.values[i]));
        return most;
      });
      delete layer.weights;
    }
    return layer.values;
  }

  function mapOf(layer, head) {
    const size = layer.shape[1] * layer.shape[2];
    return weightsOf(layer).subarray(head * size, (head + 1) * size);
  }

  function show(value) {
    if (value === null) return "–";
    if (value === 0) return "0";
    const size = Math.abs(value);
    return size < 0.0001 ? value.toExponential(1) : size < 0.1 ? value.toPrecision(2) : value.toFixed(3);
  }

  const stack = () => data.stacks[state.stack];
  const layer = () => stack().layers[state.layer];
  const queries = () => data.tokens[stack().queries];
  const keys = () => data.tokens[stack().keys];
  const weight = (q, k) => mapOf(layer(), state.head)[q * keys().length + k];

  function highest(one, head) {
    weightsOf(one);
    return one.most[head] || 1;
  }

  // --- colours ---

  let stops = [];
  let ramp = []; // 256 colours, red, green and blue of each
  let ink = "";
  function readColours() {
    const style = getComputedStyle(document.documentElement);
    stops = ["--low", "--middle", "--high"].map((name) => style.getPropertyValue(name).trim().split(/\s+/).map(Number));
    ramp = Uint8Array.from(Array.from({ length: 256 }, (_, i) => colour(i / 255)).flat());
    ink = style.getPropertyValue("--link").trim();
  }

  function colour(share) {
    const part = Math.min(1, Math.max(0, share)) * 2, from = part < 1 ? 0 : 1, rest = part - from;
    return stops[from].map((low, i) => Math.round(low + (stops[from + 1][i] - low) * rest));
  }

  function textOn(rgb) {
    const [r, g, b] = rgb.map((c) => ((c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.18 ? "#ffffff" : "#111111";
  }

  // One pixel for each weight; the style sheet makes it larger.
  function paint(canvas, one, head) {
    const values = mapOf(one, head), most = highest(one, head);
    [canvas.height, canvas.width] = [one.shape[1], one.shape[2]];
    const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
    for (let i = 0; i < values.length; i++) {
      const size = Math.abs(values[i]) / most, share = state.stretch ? Math.sqrt(size) : size;
      const from = 3 * Math.round(255 * share), to = 4 * i;
      for (let part = 0; part < 3; part++) image.data[to + part] = ramp[from + part];
      image.data[to + 3] = 255;
    }
    context.putImageData(image, 0, 0);
  }

  // --- keyboard: one element of a group is in the tab order, arrows move it ---

  function rove(container, items, columns, onMove = () => {}) {
    const focusable = (chosen) => items.forEach((item, i) => { item.tabIndex = i === chosen ? 0 : -1; });
    focusable(Math.max(0, items.findIndex((item) => item.getAttribute("aria-pressed") === "true")));
    container.onkeydown = (event) => {
      const now = items.indexOf(document.activeElement);
      const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -now, End: items.length - 1 - now };
      const next = now + steps[event.key];
      if (now < 0 || !(event.key in steps) || !items[next]) return;
      event.preventDefault();
      focusable(next);
      items[next].focus();
      onMove(next);
    };
    items.forEach((item, i) => item.addEventListener("click", () => focusable(i)));
  }

  // --- overview ---

  function choice(parent, legend, name, options, now, change) {
    const set = make("fieldset", parent);
    make("legend", set, { text: legend });
    for (const [value, text] of options) {
      const label = make("label", set), input = make("input", label, { type: "radio", name, value });
      input.checked = value === now;
      input.addEventListener("change", () => change(value));
      label.append(text);
    }
  }

  function drawChoices() {
    if (data.stacks.length > 1) {
      const names = { encoder: "encoder", decoder: "decoder", cross: "decoder to encoder" };
      choice(at("choices"), "Part", "stack", data.stacks.map((one, i) => [String(i), names[one.name] || one.name]), "0", (value) => {
        Object.assign(state, { stack: Number(value), layer: 0, head: 0, pin: null, cell: null });
        draw();
      });
    }
    const colours = [["maps", "maps"], ...MEASURES.map(([name]) => [name, name])];
    choice(at("choices"), "Show", "colour", colours, "maps", (value) => { state.colour = value; drawHeads(); });
    const label = make("label", make("fieldset", at("choices")));
    const box = make("input", label, { type: "checkbox", id: "stretch" });
    box.checked = state.stretch;
    label.append("stretch small weights (colour by square root)");
    box.addEventListener("change", () => { state.stretch = box.checked; draw(); });
  }

  function describe(one, head) {
    const values = one.measures[head].map((value, i) => `${MEASURES[i][0]} ${show(value)} ${MEASURES[i][1]}`.trim());
    return values.filter((_, i) => one.measures[head][i] !== null).join(", ");
  }

  function drawHeads() {
    const grid = at("heads"), layers = stack().layers, columns = Math.max(...layers.map((one) => one.shape[0]));
    const index = MEASURES.findIndex(([name]) => name === state.colour);
    const found = index < 0 ? [] : layers.flatMap((one) => one.measures.map((row) => row[index])).filter((value) => value !== null);
    const [low, high] = [Math.min(...found), Math.max(...found)];
    grid.replaceChildren();
    grid.style.gridTemplateColumns = `auto repeat(${columns}, max-content)`;
    grid.style.setProperty("--side", `${Math.max(48, Math.min(112, Math.floor(860 / columns)))}px`);
    make("span", grid, { class: "title" });
    for (let head = 0; head < columns; head++) make("span", grid, { class: "title", text: columns > 8 ? head : `head ${head}` });
    const cells = [];
    layers.forEach((one, number) => {
      const title = make("span", grid, { class: "title row", text: one.name });
      if (one.note) make("small", title, { text: one.note });
      for (let head = 0; head < columns; head++) {
        if (head >= one.shape[0]) { make("span", grid); continue; }
        const chosen = number === state.layer && head === state.head;
        const words = `${one.name}, head ${head}: ${describe(one, head)}`;
        const cell = make("button", grid, { type: "button", class: "cell", "aria-label": words, title: words, "aria-pressed": chosen });
        if (index < 0) paint(make("canvas", cell), one, head);
        else {
          const value = one.measures[head][index], rgb = colour(value === null ? 0 : high > low ? (value - low) / (high - low) : 0.5);
          cell.textContent = value === null ? "–" : value.toFixed(2);
          Object.assign(cell.style, { backgroundColor: `rgb(${rgb})`, color: textOn(rgb) });
        }
        cell.addEventListener("click", () => {
          Object.assign(state, { layer: number, head, pin: null });
          cells.forEach((other) => other.setAttribute("aria-pressed", other === cell));
          drawDetail();
        });
        cells.push(cell);
      }
    });
    rove(grid, cells, columns);
    drawScale(index, low, high, found.length);
  }

  function drawScale(index, low, high, count) {
    const scale = at("scale");
    scale.replaceChildren();
    if (index >= 0 && !count) { scale.textContent = "Maps between two sequences have no distance."; return; }
    scale.append(index < 0 ? "weight: 0" : `${state.colour}: ${show(low)}`);
    make("span", scale, { class: "ramp", "aria-hidden": "true" });
    scale.append(index < 0 ? "the head's largest weight" : `${show(high)} ${MEASURES[index][1]}`);
  }

  // --- one head: heat map ---

  const named = (texts, place) => `${place} “${texts[place]}”`;

  function drawMap() {
    const map = at("map"), rows = queries().length, columns = keys().length;
    const side = Math.max(14, Math.min(36, Math.floor(520 / Math.max(rows, columns))));
    map.replaceChildren();
    map.style.setProperty("--cell", `${side}px`);
    map.style.setProperty("--size", `${Math.min(13, side - 3)}px`);
    make("span", map);
    const across = make("div", map, { class: "across", "aria-hidden": "true" });
    keys().forEach((text) => make("span", across, { class: "token", text }));
    const down = make("div", map, { class: "down", "aria-hidden": "true" });
    queries().forEach((text) => make("span", down, { class: "token", text, title: text }));
    const words = `Heat map of ${rows} queries and ${columns} keys; arrow keys read the weights`;
    const field = make("div", map, { class: "field", tabindex: "0", role: "application", "aria-label": words });
    const canvas = make("canvas", field);
    Object.assign(canvas.style, { width: `${side * columns}px`, height: `${side * rows}px` });
    paint(canvas, layer(), state.head);
    const mark = make("div", field, { class: "mark" });
    mark.hidden = true;

    function point(cell, event) {
      state.cell = cell;
      for (const old of map.querySelectorAll(".on")) old.classList.remove("on");
      mark.hidden = !cell;
      if (!cell) { at("readout").textContent = ""; hideTip(); return; }
      const [q, k] = cell;
      across.children[k].classList.add("on");
      down.children[q].classList.add("on");
      Object.assign(mark.style, { left: `${k * side}px`, top: `${q * side}px` });
      const text = `query ${named(queries(), q)} reads key ${named(keys(), k)}: ${show(weight(q, k))}`;
      at("readout").textContent = text;
      if (event) showTip(`${queries()[q]} → ${keys()[k]}: ${show(weight(q, k))}`, event);
    }
    field.onmousemove = (event) => {
      const box = canvas.getBoundingClientRect();
      const place = (offset, count) => Math.max(0, Math.min(count - 1, Math.floor(offset / side)));
      point([place(event.clientY - box.top, rows), place(event.clientX - box.left, columns)], event);
    };
    field.onmouseleave = () => point(null);
    field.onblur = () => point(null);
    field.onkeydown = (event) => {
      const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!move) return;
      event.preventDefault();
      const [q, k] = state.cell ? [state.cell[0] + move[0], state.cell[1] + move[1]] : [0, 0];
      if (q >= 0 && q < rows && k >= 0 && k < columns) point([q, k]);
      mark.scrollIntoView({ block: "nearest", inline: "nearest" });
    };
  }

  const tip = make("div", document.body, { class: "tip", "aria-hidden": "true" });
  tip.hidden = true;
  function showTip(text, event) {
    tip.textContent = text;
    tip.hidden = false;
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10}px`;
  }
  function hideTip() { tip.hidden = true; }

  // --- one head: token lines ---

  function drawLines() {
    const box = at("lines"), step = Math.max(queries().length, keys().length) > 24 ? 20 : 26;
    box.replaceChildren();
    box.style.setProperty("--step", `${step}px`);
    const lists = [], canvas = document.createElement("canvas");
    for (const [side, texts] of [["query", queries()], ["key", keys()]]) {
      const list = make("ul", box, { "aria-label": `${side} tokens` });
      if (side === "query") box.append(canvas);
      const buttons = texts.map((text, place) => {
        const words = `${side} ${named(texts, place)}`;
        const button = make("button", make("li", list), { type: "button", class: "token", "aria-pressed": "false", "aria-label": words, title: words, text });
        const ask = () => light(side, place);
        button.onmouseenter = ask;
        button.onfocus = ask;
        button.onmouseleave = button.onblur = () => light(...(state.pin || [null]));
        button.onclick = () => pin(side, place);
        return button;
      });
      list.style.width = `${list.offsetWidth + 44}px`; // room for a weight beside a token
      rove(list, buttons, 1);
      lists.push(buttons);
    }
    box.addEventListener("keydown", (event) => { if (event.key === "Escape") pin(null); });

    function pin(side, place) {
      const same = state.pin && state.pin[0] === side && state.pin[1] === place;
      state.pin = side === null || same ? null : [side, place];
      lists.flat().forEach((button) => button.setAttribute("aria-pressed", "false"));
      if (state.pin) lists[side === "query" ? 0 : 1][place].setAttribute("aria-pressed", "true");
      light(...(state.pin || [null]));
    }

    const width = canvas.clientWidth || 176, height = step * Math.max(queries().length, keys().length);
    const sharp = window.devicePixelRatio || 1;
    Object.assign(canvas, { width: width * sharp, height: height * sharp, ariaHidden: "true" });
    Object.assign(canvas.style, { width: "100%", height: `${height}px` });
    const context = canvas.getContext("2d");

    // Opacity by weight: of all lines, or of those of the token asked for.
    function light(side, place) {
      context.setTransform(sharp, 0, 0, sharp, 0, 0);
      context.clearRect(0, 0, width, height);
      context.strokeStyle = ink;
      const [asked, other] = side === "key" ? [lists[1], lists[0]] : lists;
      for (const button of lists.flat()) {
        button.classList.remove("asked");
        button.style.backgroundColor = "";
        button.querySelector(".share")?.remove();
      }
      const lines = [];
      for (let q = 0; q < queries().length; q++) {
        for (let k = 0; k < keys().length; k++) {
          if (!side || place === (side === "query" ? q : k)) lines.push([q, k, weight(q, k)]);
        }
      }
      const most = lines.reduce((size, line) => Math.max(size, Math.abs(line[2])), 0) || 1;
      for (const [q, k, value] of lines) {
        const share = Math.min(1, Math.abs(value) / most);
        if (share < 0.01) continue;
        context.globalAlpha = side ? Math.max(0.08, share) : share;
        context.lineWidth = side ? 1 + 2 * share : 1.2;
        context.beginPath();
        context.moveTo(0, (q + 0.5) * step);
        context.bezierCurveTo(width / 2, (q + 0.5) * step, width / 2, (k + 0.5) * step, width, (k + 0.5) * step);
        context.stroke();
        if (!side) continue;
        const button = other[side === "query" ? k : q];
        button.style.backgroundColor = `rgb(${colour(0.25 * share)})`;
        if (share >= 0.05) make("span", button, { class: "share", text: ` ${show(value)}` });
      }
      if (side) asked[place].classList.add("asked");
    }
    light(null);
  }

  // --- all ---

  function drawDetail() {
    const one = layer();
    at("head").textContent = `${one.name}, head ${state.head}`;
    at("facts").textContent = [describe(one, state.head), one.note].filter(Boolean).join("; ");
    at("readout").textContent = "";
    state.cell = null;
    hideTip();
    drawMap();
    drawLines();
  }

  function draw() {
    readColours();
    drawHeads();
    drawDetail();
  }

  drawChoices();
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
