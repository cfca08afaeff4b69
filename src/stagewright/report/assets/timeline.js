
"use strict";
// Draws a pipeline's timeline on a canvas: one row per rank, compute as tall bars, transfers and waiting as strips below.
const AXIS = 22, STRIPS = [[0, 0.6], [0.64, 0.18], [0.85, 0.13]]; // per lane: where its strip begins in a row, and its height

function readBars(data) {
  const text = atob(data.bars);
  let at = 0;
  const next = () => {
    let value = 0, scale = 1, byte;
    do { byte = text.charCodeAt(at++); value += (byte & 127) * scale; scale *= 128; } while (byte > 127);
    return value;
  };
  const signed = () => { const value = next(); return value % 2 ? -(value + 1) / 2 : value / 2; };
  return data.lanes.map(([rank, lane, count]) => {
    const bars = { rank, lane, count, parts: [] };
    for (const name of ["start", "end", "reach"]) bars[name] = new Float64Array(count);
    bars.operation = new Uint8Array(count);
    for (let part = 0; part < 4; part++) bars.parts.push(new Float64Array(count));
    let start = 0, reach = 0;
    const now = [0, 0, 0, 0];
    for (let bar = 0; bar < count; bar++) {
      start += next();
      bars.start[bar] = start * data.tick;
      bars.end[bar] = (start + next()) * data.tick;
      bars.reach[bar] = reach = Math.max(reach, bars.end[bar]); // sorted, so that the first visible bar can be searched
      bars.operation[bar] = next();
      for (let part = 0; part < 4; part++) bars.parts[part][bar] = now[part] += signed();
    }
    return bars;
  });
}

function first(sorted, holds) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(sorted[middle])) high = middle; else low = middle + 1;
  }
  return low;
}
const firstAbove = (sorted, value) => first(sorted, (found) => found > value);
const firstFrom = (sorted, value) => first(sorted, (found) => found >= value);

function inUnits(seconds) {
  const size = Math.abs(seconds);
  const [scale, unit] = size >= 1 ? [1, "s"] : size >= 1e-3 ? [1e-3, "ms"] : size >= 1e-6 ? [1e-6, "µs"] : [1e-9, "ns"];
  return size ? `${Number((seconds / scale).toPrecision(4))} ${unit}` : "0 s";
}

class Timeline {
  constructor(box) {
    const data = this.data = JSON.parse(box.querySelector("script").textContent);
    this.box = box;
    this.canvas = box.querySelector("canvas");
    this.tip = box.querySelector(".tip");
    this.status = box.querySelector(".live");
    this.range = box.querySelector("[data-shows=range]");
    this.lanes = readBars(data);
    this.end = data.end || 1;
    this.from = 0;
    this.to = this.end;
    this.chosen = null;
    this.shownMark = -1;
    this.row = Math.max(20, Math.min(60, 1600 / Math.max(1, data.ranks.length)));
    this.pointers = new Map();
    this.moved = false;
    this.listen();
    this.readColours();
    [this.from, this.to] = data.view[1] > data.view[0] ? data.view : [0, this.end];
    this.draw();
  }

  listen() {
    const { canvas, box } = this;
    const on = (target, name, act, options) => target.addEventListener(name, act, options);
    on(canvas, "pointerdown", (event) => {
      this.pointers.set(event.pointerId, event);
      canvas.setPointerCapture(event.pointerId);
      this.pointAt(event);
    });
    for (const name of ["pointerup", "pointercancel"]) on(canvas, name, (event) => this.pointers.delete(event.pointerId));
    on(canvas, "pointermove", (event) => this.movePointer(event));
    on(canvas, "pointerleave", (event) => { if (event.pointerType === "mouse") this.hideTip(); });
    // The wheel zooms once the pointer was moved onto the timeline, not when the page scrolled it below the pointer.
    on(window, "scroll", () => { this.moved = false; }, { passive: true });
    on(canvas, "wheel", (event) => this.turnWheel(event), { passive: false });
    on(canvas, "keydown", (event) => this.pressKey(event));
    on(canvas, "blur", () => this.hideTip());
    on(box, "click", (event) => { const does = event.target.dataset.does; if (does) this.act(does); });
    for (const query of ["(prefers-color-scheme: dark)", "print"]) {
      on(matchMedia(query), "change", () => { this.readColours(); this.draw(); });
    }
    new ResizeObserver(() => this.later()).observe(canvas);
  }

  readColours() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    this.colours = this.data.operations.map(([, kind]) => colour(kind));
    this.marks = this.data.marks.map(([kind, start, end]) => ({ kind, start, end, colour: colour(kind) }));
    this.paint = { ink: colour("ink"), soft: colour("soft"), line: colour("line"), track: colour("track"), back: colour("surface") };
  }

  act(what) {
    const middle = (this.from + this.to) / 2, step = (this.to - this.from) / 5;
    if (what === "in") this.zoom(0.5, middle);
    else if (what === "out") this.zoom(2, middle);
    else if (what === "left") this.pan(-step);
    else if (what === "right") this.pan(step);
    else if (what === "whole") this.show(0, this.end);
    else if (what === "first") this.show(...this.data.view);
  }

  show(from, to) {
    const least = Math.max(this.end * 1e-7, 10 * this.data.tick);
    const length = Math.min(this.end, Math.max(least, to - from));
    this.from = Math.min(Math.max(0, from), this.end - length);
    this.to = this.from + length;
    this.later();
  }

  pan(seconds) { this.show(this.from + seconds, this.to + seconds); }

  zoom(factor, around) { this.show(around - (around - this.from) * factor, around + (this.to - around) * factor); }

  later() {
    if (!this.waits) { this.waits = true; requestAnimationFrame(() => { this.waits = false; this.draw(); }); }
  }

  get left() { return this.width < 520 ? 52 : 150; }
  timeAt(x) { return this.from + (x - this.left) / (this.width - this.left) * (this.to - this.from); }
  xOf(time) { return this.left + (time - this.from) / (this.to - this.from) * (this.width - this.left); }

  draw() {
    const began = performance.now(), { canvas, data } = this;
    const density = devicePixelRatio || 1, height = AXIS + this.row * data.ranks.length;
    canvas.style.height = `${height}px`;
    this.width = canvas.clientWidth;
    const wide = Math.round(this.width * density), high = Math.round(height * density);
    if (canvas.width !== wide || canvas.height !== high) { canvas.width = wide; canvas.height = high; }
    const pen = this.pen = canvas.getContext("2d");
    pen.setTransform(density, 0, 0, density, 0, 0);
    pen.fillStyle = this.paint.back;
    pen.fillRect(0, 0, this.width, height);
    this.drawAxis(height);
    pen.save();
    pen.beginPath();
    pen.rect(this.left, 0, this.width - this.left, height);
    pen.clip();
    this.drawn = 0;
    this.drawMarks(height);
    for (const lane of this.lanes) this.drawLane(lane);
    this.drawChosen();
    pen.restore();
    this.drawLabels();
    this.range.textContent = `${inUnits(this.from)} to ${inUnits(this.to)} of ${inUnits(this.end)}`;
    Object.assign(this.box.dataset, {
      bars: this.lanes.reduce((sum, lane) => sum + lane.count, 0), drawn: this.drawn, from: this.from, to: this.to,
      milliseconds: performance.now() - began,
    });
  }

  drawAxis(height) {
    const { pen } = this, rough = (this.to - this.from) / Math.max(2, (this.width - this.left) / 110);
    const size = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find((factor) => factor * size >= rough) * size;
    pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    for (let number = Math.ceil(this.from / step); number * step <= this.to; number++) {
      const x = Math.round(this.xOf(number * step)) + 0.5;
      pen.fillStyle = this.paint.line;
      pen.fillRect(x, 0, 1, height);
      pen.fillStyle = this.paint.soft;
      const label = inUnits(Number((number * step).toPrecision(12)));
      if (x + 4 + pen.measureText(label).width < this.width) pen.fillText(label, x + 4, AXIS / 2);
    }
    this.data.ranks.forEach((_, rank) => {
      const [, share] = STRIPS[0];
      pen.fillStyle = this.paint.track;
      pen.fillRect(this.left, AXIS + rank * this.row + 2, this.width - this.left, (this.row * 0.77) * share);
    });
  }

  // When training paused: a tint behind the bars of all ranks, solid at the top.
  drawMarks(height) {
    const { pen } = this;
    for (const { start, end, colour } of this.marks) {
      if (end < this.from || start > this.to) continue;
      const x = this.xOf(start), width = Math.max(2, this.xOf(end) - x);
      pen.fillStyle = colour;
      pen.globalAlpha = 0.22;
      pen.fillRect(x, 0, width, height);
      pen.globalAlpha = 1;
      pen.fillRect(x, 0, width, 4);
    }
  }

  drawLabels() {
    const { pen } = this;
    pen.fillStyle = this.paint.ink;
    pen.textAlign = "left";
    this.data.ranks.forEach((label, rank) => {
      const short = this.left < 100 ? label.replace(/ \(.*$/, "") : label;
      pen.fillText(short, 2, AXIS + (rank + 0.32) * this.row, this.left - 8);
    });
  }

  strip(lane) {
    const [begin, share] = STRIPS[lane.lane], inner = this.row * 0.77;
    return [AXIS + lane.rank * this.row + 2 + begin * inner, Math.max(2, share * inner)];
  }

  // Bars narrower than a pixel are merged by column: the kind with the most time gives the colour, less time fades it.
  drawLane(lane) {
    const { pen, colours } = this, [top, height] = this.strip(lane), scale = (this.width - this.left) / (this.to - this.from);
    const last = firstAbove(lane.start, this.to), shares = new Float64Array(colours.length);
    let column = -1, filled = 0;
    const flush = () => {
      if (!filled) return;
      let most = 0;
      for (let kind = 1; kind < shares.length; kind++) if (shares[kind] > shares[most]) most = kind;
      pen.globalAlpha = Math.min(1, Math.max(0.3, filled));
      pen.fillStyle = colours[most];
      pen.fillRect(column, top, 1, height);
      pen.globalAlpha = 1;
      shares.fill(0);
      filled = 0;
      this.drawn++;
    };
    for (let bar = firstAbove(lane.reach, this.from); bar < last; bar++) {
      const x = this.left + (lane.start[bar] - this.from) * scale, width = (lane.end[bar] - lane.start[bar]) * scale;
      if (x + width < this.left) continue;
      if (width < 1) {
        const here = Math.floor(x);
        if (here !== column) { flush(); column = here; }
        shares[lane.operation[bar]] += width;
        filled += Math.max(width, 0.02);
        continue;
      }
      flush();
      pen.fillStyle = colours[lane.operation[bar]];
      pen.fillRect(x, top, width > 3 ? width - 0.75 : width, height);
      this.drawn++;
      if (lane.lane === 0 && width > 26) this.drawName(lane, bar, Math.max(x, this.left), Math.min(x + width, this.width) - Math.max(x, this.left), top, height);
    }
    flush();
  }

  drawName(lane, bar, x, width, top, height) {
    const name = this.nameOf(lane, bar).replace(/^\d+/, "");
    if (width < 7 * name.length + 6 || height < 10) return;
    this.pen.fillStyle = isDark(this.colours[lane.operation[bar]]) ? "#ffffff" : "#101418";
    this.pen.fillText(name, x + 4, top + height / 2 + 0.5);
  }

  drawChosen() {
    if (!this.chosen) return;
    const { lane, bar } = this.chosen, [top, height] = this.strip(lane);
    const x = this.xOf(lane.start[bar]), width = Math.max(2, this.xOf(lane.end[bar]) - x);
    this.pen.lineWidth = 2;
    this.pen.strokeStyle = this.paint.ink;
    this.pen.strokeRect(x - 1, top - 1, width + 2, height + 2);
  }

  nameOf(lane, bar) {
    const mark = this.data.operations[lane.operation[bar]][0], [stage, microbatch, version, peer] = lane.parts.map((part) => part[bar]);
    if (mark === "?") return this.data.names[stage];
    const arrow = mark[0] === "S" ? ">" : "<";
    return stage + mark + (microbatch < 0 ? "" : microbatch) + (version < 0 ? "" : `@${version}`) + (peer < 0 ? "" : arrow + peer);
  }

  describe({ lane, bar }) {
    const mark = this.data.operations[lane.operation[bar]][0], [stage, microbatch, version, peer] = lane.parts.map((part) => part[bar]);
    const words = [this.data.operations[lane.operation[bar]][2]];
    if (mark !== "?") {
      if (microbatch >= 0) words.push(`of microbatch ${microbatch}`);
      words.push(`at stage ${stage}`);
      if (version >= 0) words.push("FB".includes(mark) ? `on version ${version}` : `of version ${version}`);
      else if (mark === "F") words.push("in an evaluation");
      if (peer >= 0) words.push(`${mark[0] === "S" ? "to" : "from"} rank ${peer}`);
    }
    const waits = lane.lane === 2 ? "waiting to start: " : "";
    return `${this.nameOf(lane, bar)}: ${waits}${words.join(" ").trim()}\n` +
      `${inUnits(lane.end[bar] - lane.start[bar])}, from ${inUnits(lane.start[bar])} on; ${this.data.ranks[lane.rank] || `rank ${lane.rank}`}`;
  }

  find(x, y) {
    const rank = Math.floor((y - AXIS) / this.row), time = this.timeAt(x), slack = 3 * (this.to - this.from) / this.width;
    if (x < this.left || rank < 0) return null;
    const rows = this.lanes.filter((lane) => lane.rank === rank);
    const lane = rows.find((lane) => { const [top, height] = this.strip(lane); return y >= top - 1 && y <= top + height + 1; });
    if (!lane) return null;
    let best = null, nearest = slack;
    for (let bar = firstAbove(lane.reach, time - slack); bar < lane.count && lane.start[bar] <= time + slack; bar++) {
      const away = Math.max(0, lane.start[bar] - time, time - lane.end[bar]);
      if (away < nearest || (away === 0 && nearest === 0)) { best = { lane, bar }; nearest = away; }
    }
    return best;
  }

  movePointer(event) {
    if (event.movementX || event.movementY || event.pointerType !== "mouse") this.moved = true;
    const before = this.pointers.get(event.pointerId);
    if (before) {
      if (Math.abs(before.clientX - event.clientX) < 1) return; // a finger that rests
      const others = [...this.pointers.values()].filter((other) => other.pointerId !== event.pointerId);
      if (others.length) this.pinch(before, event, others[0]);
      else this.pan((before.clientX - event.clientX) * (this.to - this.from) / (this.width - this.left));
      this.pointers.set(event.pointerId, event);
      this.hideTip();
      return;
    }
    this.pointAt(event);
  }

  pointAt(event) {
    const bounds = this.canvas.getBoundingClientRect();
    const x = event.clientX - bounds.left, found = this.find(x, event.clientY - bounds.top), time = this.timeAt(x);
    this.choose(found, x);
    const slack = 2 * (this.to - this.from) / this.width;
    const mark = x > this.left && !found && this.marks.find(({ start, end }) => time >= start - slack && time <= end + slack);
    if (mark) this.showMark(mark, x);
  }

  showMark({ kind, start, end }, x) {
    this.tip.textContent = `${kind}: training paused\n${inUnits(end - start)}, from ${inUnits(start)} on`;
    this.tip.hidden = false;
    const left = Math.min(Math.max(0, x + 10), Math.max(0, this.width - this.tip.offsetWidth));
    this.tip.style.transform = `translate(${left}px, ${AXIS + 4}px)`;
    this.status.textContent = this.tip.textContent.replace("\n", " ");
  }

  // To the next evaluation or checkpoint, and from the last to the first.
  nextMark() {
    if (!this.marks.length) return;
    const after = this.marks.find(({ start }) => start > this.shownMark) ?? this.marks[0];
    this.shownMark = after.start;
    const around = Math.max(after.end - after.start, (this.to - this.from) / 4);
    this.show(after.start - around, after.end + around);
    this.choose(null);
    this.showMark(after, this.xOf(after.start));
  }

  pinch(before, now, other) {
    const wide = Math.abs(before.clientX - other.clientX), wider = Math.abs(now.clientX - other.clientX);
    if (wide > 10 && wider > 10) this.zoom(wide / wider, this.timeAt(other.clientX - this.canvas.getBoundingClientRect().left));
  }

  turnWheel(event) {
    if (!this.moved && !event.ctrlKey) return;
    const sideways = event.shiftKey ? event.deltaY : event.deltaX, bounds = this.canvas.getBoundingClientRect();
    const [from, to] = [this.from, this.to];
    if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) this.pan(sideways * (to - from) / this.width);
    else this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), this.timeAt(event.clientX - bounds.left));
    if (from !== this.from || to !== this.to) event.preventDefault(); // at the limits the page scrolls on
  }

  pressKey(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const acts = { "+": "in", "=": "in", "-": "out", _: "out", ArrowLeft: "left", ArrowRight: "right", 0: "whole", Home: "whole" };
    const steps = { ".": [1, 0], ",": [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1], Enter: [0, 0] };
    if (event.key in acts) this.act(acts[event.key]);
    else if (event.key in steps) this.step(...steps[event.key]);
    else if (event.key === "m") this.nextMark();
    else if (event.key === "Escape") this.choose(null);
    else return;
    event.preventDefault();
  }

  // From the chosen bar to the next of its rank, whichever lane it is in, or to the one at the same time of another rank.
  step(bars, ranks) {
    const chosen = this.chosen, count = this.data.ranks.length;
    const time = chosen ? chosen.lane.start[chosen.bar] : (this.from + this.to) / 2;
    let rank = chosen ? chosen.lane.rank : 0;
    if (ranks && chosen) rank = Math.min(count - 1, Math.max(0, rank + ranks));
    let best = null, nearest = Infinity;
    for (const lane of this.lanes.filter((lane) => lane.rank === rank)) {
      for (const bar of this.besides(lane, time, bars)) {
        const away = Math.abs(lane.start[bar] - time) + (bars ? 0 : lane.lane * this.end);
        if (away < nearest || (away === nearest && bars < 0)) { best = { lane, bar }; nearest = away; }
      }
    }
    if (!best) return;
    const start = best.lane.start[best.bar], end = best.lane.end[best.bar], length = this.to - this.from;
    if (start < this.from || end > this.to) this.show(start - length / 2, start + length / 2);
    this.choose(best, this.xOf(Math.max(start, this.from)));
    this.status.textContent = this.describe(best).replace("\n", " ");
  }

  // The bars of a lane that may be chosen next; bars that start together are ordered by lane.
  besides(lane, time, bars) {
    const chosen = this.chosen, after = firstAbove(lane.start, time), from = firstFrom(lane.start, time);
    let found = [after - 1, after];
    if (bars && chosen && chosen.lane === lane) found = [chosen.bar + bars];
    else if (bars > 0) found = [chosen && lane.lane > chosen.lane.lane ? from : after];
    else if (bars < 0) found = [(chosen && lane.lane < chosen.lane.lane ? after : from) - 1];
    return found.filter((bar) => bar >= 0 && bar < lane.count);
  }

  choose(found, x = 0) {
    this.chosen = found;
    this.later();
    if (!found) { this.tip.hidden = true; return; }
    this.tip.textContent = this.describe(found);
    this.tip.hidden = false;
    const [top, height] = this.strip(found.lane);
    const left = Math.min(Math.max(0, x + 10), Math.max(0, this.width - this.tip.offsetWidth));
    const below = top + height + 8, above = top - this.tip.offsetHeight - 6;
    this.tip.style.transform = `translate(${left}px, ${above > 0 && below + this.tip.offsetHeight > this.canvas.clientHeight ? above : below}px)`;
  }

  hideTip() { this.tip.hidden = true; if (this.chosen) { this.chosen = null; this.later(); } }
}

function isDark(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.18; // below it white has more contrast than black
}
