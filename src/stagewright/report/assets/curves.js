// Draws curves as SVG: a readout with a crosshair, smoothing, a logarithmic axis, and a button that hides each curve.
const SVG = "http://www.w3.org/2000/svg", MOST_TICKS = 6, NEAR = 8, LANE = 7; // pixels: within which a point is pointed at; of a lane of pauses
const chosenByReader = new Map(); // by the title of a plot, so that an update of a live page keeps it

function make(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e15) return value.toPrecision(4);
  if (size >= 100 || Number.isInteger(value)) return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
  return String(Number(value.toPrecision(size < 0.001 ? 3 : 4)));
}

// A few evenly spaced round numbers, from at most the lowest value to at least the highest.
function ticks(low, high, most = MOST_TICKS) {
  if (high <= low) [low, high] = low === 0 ? [-1, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  const rough = (high - low) / (most - 1), size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((factor) => factor * size >= rough * (1 - 1e-9)) * size;
  const found = [];
  for (let number = Math.floor(low / step + 1e-9); number <= Math.ceil(high / step - 1e-9); number++) found.push(number * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const factor of [1, 2, 5]) if (factor * 10 ** power >= low && factor * 10 ** power <= high) found.push(factor * 10 ** power);
  }
  const whole = found.filter((value) => Number.isInteger(Math.round(Math.log10(value) * 1e6) / 1e6));
  const enough = found.length > MOST_TICKS && whole.length > 1 ? whole : found;
  return enough.length > 1 ? enough : ticks(low, high).filter((value) => value >= low && value <= high);
}

// An exponential average that begins at the first value; of points that stand for many it takes their mean.
function smoothed(curve, weight) {
  let last = 0, count = 0;
  return curve.y.map((y, at) => {
    const value = curve.mean?.[at] ?? y;
    if (y === null) return null;
    last = last * weight + (1 - weight) * value;
    count += 1;
    return last / (1 - weight ** count);
  });
}

class Plot {
  constructor(box) {
    const data = this.data = JSON.parse(box.querySelector("script").textContent);
    this.box = box;
    this.svg = box.querySelector(".plot svg");
    this.tip = box.querySelector(".tip");
    this.status = box.querySelector(".live");
    this.slider = box.querySelector("input");
    this.logButton = box.querySelector(".log");
    this.at = null;
    const title = box.closest("section").querySelector("h2").textContent;
    this.chosen = chosenByReader.get(title) ?? { hidden: new Set(), smoothing: Number(this.slider?.value ?? 0), isLog: false };
    chosenByReader.set(title, this.chosen);
    if (this.slider) this.slider.value = this.chosen.smoothing;
    data.curves.forEach((curve, number) => { curve.number = number; });
    this.listen();
    this.draw();
  }

  listen() {
    const { svg, box } = this;
    const on = (target, name, act) => target.addEventListener(name, act);
    on(svg, "pointermove", (event) => this.pointAt(event));
    on(svg, "pointerdown", (event) => this.pointAt(event));
    on(svg, "pointerleave", (event) => { if (event.pointerType === "mouse") this.read(null); });
    on(svg, "blur", () => this.read(null));
    on(svg, "keydown", (event) => this.pressKey(event));
    if (this.slider) on(this.slider, "input", () => { this.chosen.smoothing = Number(this.slider.value); this.draw(); });
    if (this.logButton) on(this.logButton, "click", () => { this.chosen.isLog = !this.chosen.isLog; this.draw(); });
    for (const button of box.querySelectorAll(".toggle")) {
      on(button, "click", () => {
        const { hidden } = this.chosen, label = this.data.curves[button.dataset.curve].label;
        if (!hidden.delete(label)) hidden.add(label);
        this.draw();
      });
    }
    new ResizeObserver(() => { if (this.width !== svg.clientWidth) this.draw(); }).observe(svg);
  }

  draw() {
    const { svg, data, chosen } = this;
    this.isLog = chosen.isLog && Boolean(this.logButton);
    this.logButton?.setAttribute("aria-pressed", this.isLog);
    for (const button of this.box.querySelectorAll(".toggle")) {
      button.setAttribute("aria-pressed", !chosen.hidden.has(data.curves[button.dataset.curve].label));
    }
    this.shown = data.curves.filter((curve) => !chosen.hidden.has(curve.label));
    for (const curve of this.shown) curve.smooth = curve.look === "line" && chosen.smoothing ? smoothed(curve, chosen.smoothing) : null;
    this.width = svg.clientWidth;
    this.height = svg.clientHeight;
    svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    svg.replaceChildren();
    const xs = this.shown.flatMap((curve) => curve.x.filter((x, at) => x !== null && curve.y[at] !== null));
    this.steps = [...new Set(xs)].sort((one, other) => one - other);
    if (!xs.length) {
      make("text", { class: "tick", x: this.width / 2, y: this.height / 2, "text-anchor": "middle" }, svg).textContent =
        data.curves.length > this.shown.length ? "Every curve is hidden." : "No points to draw.";
      this.read(null);
      return;
    }
    this.setScales();
    this.drawAxes();
    this.drawMarks();
    for (const curve of this.shown) this.drawCurve(curve);
    this.cursor = make("g", { class: "cursor" }, svg);
    this.read(this.at, false);
  }

  setScales() {
    const values = [], { steps } = this;
    for (const curve of this.shown) {
      for (const row of [curve.y, curve.low, curve.high]) if (row) for (const y of row) if (y !== null) values.push(y);
    }
    let low = values.reduce((least, y) => Math.min(least, y)), high = values.reduce((most, y) => Math.max(most, y));
    if (this.isLog) {
      low = values.reduce((least, y) => y > 0 ? Math.min(least, y) : least, high);
      [low, high] = low === high ? [low / 2, high * 2] : [low / 1.02, high * 1.02];
      this.up = logTicks(low, high);
    } else {
      this.up = ticks(low > 0 && (this.data.fromZero || low < 0.75 * high) ? 0 : low, high); // from zero, unless that would flatten curves
      [low, high] = [this.up[0], this.up.at(-1)];
    }
    [this.low, this.high] = [low, high];
    [this.first, this.last] = steps.length > 1 ? [steps[0], steps.at(-1)] : [steps[0] - 1, steps[0] + 1];
    const longest = Math.max(...this.up.map((value) => short(value).length));
    this.margin = { left: 12 + 7 * longest, right: 14, top: 24, bottom: 38 };
  }

  x(value) {
    const { left, right } = this.margin;
    return left + (value - this.first) / (this.last - this.first) * (this.width - left - right);
  }

  y(value) {
    const { top, bottom } = this.margin, scale = this.isLog ? Math.log10 : Number;
    const share = (scale(value) - scale(this.low)) / (scale(this.high) - scale(this.low));
    return this.height - bottom - share * (this.height - top - bottom);
  }

  drawAxes() {
    const { svg, margin, width, height, data } = this, bottom = height - margin.bottom;
    const text = (words, attributes) => { make("text", { class: "tick", ...attributes }, svg).textContent = words; };
    for (const value of this.up) {
      make("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: this.y(value), y2: this.y(value) }, svg);
      text(short(value), { x: margin.left - 6, y: this.y(value) + 4, "text-anchor": "end" });
    }
    const across = ticks(this.first, this.last, Math.max(5, Math.min(12, Math.floor(width / 80))));
    for (const value of across.filter((value) => value >= this.first && value <= this.last)) {
      make("line", { class: "grid", x1: this.x(value), x2: this.x(value), y1: bottom, y2: bottom + 4 }, svg);
      text(short(value), { x: this.x(value), y: bottom + 17, "text-anchor": "middle" });
    }
    text(data.y, { x: 0, y: 12 });
    text(data.x, { x: width - margin.right, y: height - 4, "text-anchor": "end" });
  }

  // Pauses are bands over the whole height; those of one curve of several are in a lane of its colour, above the axis.
  drawMarks() {
    const { svg, margin: { left, right, top, bottom }, width, height } = this;
    const owners = this.shown.filter((curve) => this.data.marks.some(([, , , owner]) => owner === curve.number));
    const middle = (curve) => height - bottom - LANE * (owners.length - owners.indexOf(curve) - 0.5);
    for (const curve of owners) make("path", { class: `line lane c${curve.colour % 8}`, d: `M${left} ${middle(curve)}H${width - right}` }, svg);
    for (const [kind, start, end, owner] of this.data.marks) {
      const curve = owners.find((one) => one.number === owner);
      if (end < this.first || start > this.last || owner !== null && !curve) continue;
      const x = this.x(Math.max(start, this.first)), wide = Math.max(3, this.x(Math.min(end, this.last)) - x);
      if (curve) { make("rect", { class: `k-${kind}`, x, y: middle(curve) - LANE / 2 + 1, width: wide, height: LANE - 2 }, svg); continue; }
      make("rect", { class: `mark k-${kind}${wide < 6 ? " narrow" : ""}`, x, y: top, width: wide, height: height - top - bottom }, svg);
      make("rect", { class: `k-${kind}`, x, y: top - 5, width: wide, height: 5 }, svg);
    }
  }

  drawCurve(curve) {
    const { svg } = this, colour = `c${curve.colour % 8}`, dashed = curve.colour >= 8 ? " dashed" : "";
    const group = make("g", { "data-number": curve.number }, svg);
    const drawable = (y) => y !== null && y !== undefined && (!this.isLog || y > 0);
    const path = (values) => {
      let pen = "M", text = "";
      values.forEach((y, at) => {
        if (!drawable(y)) { pen = "M"; return; }
        if (curve.look === "line" && at && this.isPaused(curve, curve.x[at - 1], curve.x[at])) pen = "M";
        text += `${pen}${this.x(curve.x[at]).toFixed(1)} ${this.y(y).toFixed(1)}`;
        pen = "L";
      });
      return text;
    };
    if (curve.low && curve.high) {
      const ends = [...curve.x.keys()].filter((at) => drawable(curve.low[at]) && drawable(curve.high[at]));
      const corner = (row) => (at) => `${this.x(curve.x[at]).toFixed(1)},${this.y(row[at]).toFixed(1)}`;
      const outline = [...ends.map(corner(curve.high)), ...ends.reverse().map(corner(curve.low))];
      if (outline.length > 2) make("polygon", { class: `band ${colour}`, points: outline.join(" ") }, group);
    }
    if (curve.look === "points") {
      make("path", { class: `line thin ${colour}`, d: path(curve.y) }, group);
      curve.y.forEach((y, at) => { if (drawable(y)) this.drawPoint(curve, curve.x[at], y, group); });
    } else if (curve.look === "reference") {
      make("path", { class: `line reference ${colour}`, d: path(curve.y) }, group);
    } else {
      if (curve.smooth) make("path", { class: `line raw ${colour}${dashed}`, d: path(curve.y) }, group);
      make("path", { class: `line ${colour}${dashed}`, d: path(curve.smooth ?? curve.y) }, group);
      if (curve.y.filter(drawable).length === 1) curve.y.forEach((y, at) => { if (drawable(y)) this.drawPoint(curve, curve.x[at], y, group); });
    }
  }

  isPaused(curve, from, to) {
    const isOwn = (owner) => owner === null || owner === curve.number;
    return this.data.marks.some(([kind, start, end, owner]) => isOwn(owner) && kind === "evaluation" && start >= from && end <= to);
  }

  drawPoint(curve, x, y, group) {
    make("path", { class: `dot c${curve.colour % 8}`, d: curve.shape, transform: `translate(${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)})` }, group);
  }

  pointAt(event) {
    if (!this.steps.length) return;
    const bounds = this.svg.getBoundingClientRect(), x = event.clientX - bounds.left;
    const away = (value) => Math.abs(this.x(value) - x);
    let nearest = this.nearest(this.steps, this.first + (x - this.margin.left) / (this.width - this.margin.left - this.margin.right) * (this.last - this.first));
    for (const curve of this.shown) { // single points are easier to hit than one of many steps
      if (curve.look === "points") for (const own of curve.x) if (away(own) < NEAR && away(own) <= away(nearest) + NEAR) nearest = own;
    }
    this.read(nearest);
  }

  nearest(sorted, value) {
    const above = firstFrom(sorted, value);
    const [one, other] = [sorted[Math.max(0, above - 1)], sorted[Math.min(sorted.length - 1, above)]];
    return Math.abs(value - one) <= Math.abs(other - value) ? one : other;
  }

  // Shows the values at one x: the crosshair, a dot on every curve, and the readout.
  read(at, announces = false) {
    this.at = at;
    this.tip.hidden = at === null;
    this.cursor?.replaceChildren();
    if (at === null || !this.steps.length) { this.tip.hidden = true; return; }
    const x = this.x(at), { top, bottom } = this.margin, rows = [];
    make("line", { class: "crosshair", x1: x, x2: x, y1: top, y2: this.height - bottom }, this.cursor);
    for (const curve of this.shown) {
      const place = this.placeOf(curve, at);
      if (place === -1) continue;
      const raw = curve.y[place], value = curve.smooth?.[place] ?? raw;
      if (!this.isLog || value > 0) {
        make("circle", { class: `read c${curve.colour % 8}`, cx: this.x(curve.x[place]), cy: this.y(value), r: 4 }, this.cursor);
        if (curve.look !== "points" && curve.look !== "reference") {
          make("line", { class: "crosshair", x1: this.margin.left, x2: this.width - this.margin.right, y1: this.y(value), y2: this.y(value) }, this.cursor);
        }
      }
      const range = curve.low?.[place] == null ? "" : ` (${short(curve.low[place])} to ${short(curve.high[place])})`;
      rows.push([curve, short(value) + range + (curve.smooth ? ` (not smoothed: ${short(raw)})` : "")]);
    }
    for (const [kind, start, end, owner] of this.data.marks) {
      const curve = this.shown.find((one) => one.number === owner) ?? null;
      if (owner !== null && !curve) continue;
      if (at >= start && at <= end || this.x(start) <= x + 3 && this.x(end) >= x - 3) rows.push([curve, `${kind}, ${inUnits(end - start)}`]);
    }
    this.showTip(at, x, rows);
    if (announces) this.status.textContent = this.tip.innerText.replaceAll("\n", ", ");
  }

  // The point of a curve to read at an x: the nearest; of single points only one that is there.
  placeOf(curve, at) {
    const known = [...curve.x.keys()].filter((place) => curve.y[place] !== null && curve.x[place] !== null);
    if (!known.length) return -1;
    if (curve.look === "reference") return known[0];
    const best = known.reduce((one, other) => Math.abs(curve.x[other] - at) < Math.abs(curve.x[one] - at) ? other : one);
    const away = Math.abs(this.x(curve.x[best]) - this.x(at));
    return away <= (curve.look === "points" ? 1 : 3 * NEAR) ? best : -1;
  }

  showTip(at, x, rows) {
    const head = document.createElement("b");
    head.textContent = `${this.data.x} ${short(at)}`;
    const lines = rows.map(([curve, value]) => {
      const line = document.createElement("div");
      if (curve) {
        make("rect", { class: `p${curve.colour % 8}`, width: 10, height: 10, rx: 3 }, make("svg", { class: "swatch", width: 10, height: 10 }, line));
        if (this.data.curves.length > 1) line.append(`${curve.label}: `);
      }
      line.append(value);
      return line;
    });
    this.tip.replaceChildren(head, ...lines);
    this.tip.hidden = false;
    const wide = this.tip.offsetWidth, left = x + 14 + wide < this.width ? x + 14 : Math.max(0, x - 14 - wide);
    const above = this.width < 520 ? -this.tip.offsetHeight : 4; // on a phone it would cover the curves
    this.tip.style.transform = `translate(${left}px, ${this.margin.top + above}px)`;
  }

  pressKey(event) {
    if (event.ctrlKey || event.altKey || event.metaKey || !this.steps.length) return;
    const { steps } = this, last = steps.length - 1, by = event.shiftKey ? 10 : 1;
    const here = this.at === null ? -1 : firstFrom(steps, this.at);
    const moves = {
      ArrowRight: here + by, ArrowLeft: here === -1 ? last : here - by, PageDown: here + 10, PageUp: here - 10, Home: 0, End: last,
    };
    if (event.key === "Escape") this.read(null);
    else if (event.key in moves) this.read(steps[Math.max(0, Math.min(last, moves[event.key]))], true);
    else return;
    event.preventDefault();
  }
}
