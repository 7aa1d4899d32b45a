"use strict";
// A chart of the live page and of the report, over uPlot: curves with bands, one cursor over all charts, the values
// under it, and a keyboard. The document has an element #spoken, in which screen readers find what the keys read.

const inShort = (number) => (Math.abs(number) >= 10000 ? shortCount(number) : real(number));
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const fade = (name, percent) => `color-mix(in srgb, ${color(name)} ${percent}%, transparent)`;

const PATTERNS = { dashed: [9, 4], dotted: [2, 3] };

// Values between two gaps, which no line goes through.
function lonely(values, first, last) {
  const found = [];
  for (let index = first; index <= last; index += 1) {
    if (values[index] != null && values[index - 1] == null && values[index + 1] == null) found.push(index);
  }
  return found;
}

// The exponential mean of a curve's values, without the pull of its beginning; gaps stay gaps.
function smoothed(values, weight) {
  let mean = 0, share = 0;
  return values.map((value) => {
    if (value == null) return value;
    mean = weight * mean + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return mean / share;
  });
}

// The part of the values that is neither the lowest nor the highest 2%, with a margin; null of too few values.
function innerRange(values) {
  const sorted = values.filter((value) => value != null).sort((one, other) => one - other);
  if (sorted.length < 20) return null;
  const at = (part) => sorted[Math.round(part * (sorted.length - 1))], margin = 0.06 * (at(0.98) - at(0.02));
  return margin > 0 ? [at(0.02) - margin, at(0.98) + margin] : null;
}

// kind, all but the first four optional:
//   title, height
//   sync: charts of the same name have one cursor and are enlarged together
//   curves: [{ name, color, isFaint, dash }]; a color is the name of a CSS variable, a dash "", "dashed" or "dotted"
//   form: "line"; "points", which connects over gaps; "stairs"; "stack"
//   scale: "", "zero" (from zero on) or "logarithmic"
//   span: the least and the greatest x while nothing is enlarged
//   isTime: x is a time; across: label of its axis; ticks, where: texts of a value on it and under the cursor
//   isAdjustable: follows Plot.settings
//   newest: returns the newest value of the first curve, where it is known better than from merged rows
//   spansGaps: lines connect over gaps, since curves have different x
//   hooks: further ones of uPlot
//   description: text in the place of the chart
class Plot {
  static all = new Set();
  // smoothing: weight of the mean so far, 0 for none.
  static settings = { smoothing: 0, isLogarithmic: false, isClipped: false };

  static adjust(changes) {
    Object.assign(Plot.settings, changes);
    [...Plot.all].forEach((one) => { if (one.kind.isAdjustable) one.rebuild(); });
  }

  constructor(kind, element, head) {
    this.kind = { form: "line", scale: "", ticks: (x) => (Number.isInteger(x) ? count(x) : ""),
      where: (x) => `step ${count(x)}`, hooks: {}, ...kind };
    this.element = element;
    this.isZoomed = false;
    this.reading = make("span", "", "reading");
    this.canvas = make("div", "", "canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
    head.append(this.reading);
    element.append(this.canvas);
    this.observer = new ResizeObserver(() => this.fit());
  }

  // One column for each curve: its values, or also the least and the greatest one of each. The element is in the
  // document by now, and columns always have the parts that they began with.
  setData(x, columns) {
    Object.assign(this, { x, columns });
    const data = this.arrange();
    if (!this.chart) {
      this.chart = new uPlot(this.options(), data, this.canvas);
      this.observer.observe(this.canvas);
      Plot.all.add(this);
    } else {
      this.chart.setData(data, !this.isZoomed);
      if (this.isZoomed) this.chart.redraw();
    }
    this.read();
    const known = `${this.kind.title}: ${x.length} points, now ${inShort(this.last(0))}`;
    this.canvas.setAttribute("aria-label", this.kind.description ?? known);
  }

  get settings() {
    return this.kind.isAdjustable ? Plot.settings : { smoothing: 0, isLogarithmic: false, isClipped: false };
  }

  // Another scale or number of rows is another chart of uPlot.
  rebuild() {
    this.chart?.destroy();
    this.chart = null;
    this.isZoomed = false;
    this.setData(this.x, this.columns);
  }

  isLogarithmic() {
    if (!this.settings.isLogarithmic) return this.kind.scale === "logarithmic";
    // Without a positive value there is nothing that a logarithmic axis could show.
    return this.columns.some(([values]) => values.some((value) => value > 0));
  }

  // The data as uPlot has them: x, a row for each curve, the values as they are behind smoothed ones, and the edges of
  // the bands.
  arrange() {
    let values = this.columns.map(([value]) => value);
    if (this.kind.form === "stack") {
      let below = this.x.map(() => 0);
      values = values.map((one) => (below = one.map((value, index) => below[index] + (value ?? 0))));
    }
    const weight = this.settings.smoothing, raw = weight ? values : [];
    if (weight) values = values.map((one) => smoothed(one, weight));
    const rows = [...values, ...raw, ...this.columns.flatMap(([, ...edges]) => edges)];
    const isPositive = this.settings.isLogarithmic && this.isLogarithmic();
    return [this.x, ...(isPositive ? rows.map((row) => row.map((value) => (value > 0 ? value : null))) : rows)];
  }

  options() {
    const { kind, columns } = this, { curves } = kind;
    const axis = { stroke: () => color("--muted"), grid: { stroke: () => color("--grid"), width: 1 },
      ticks: { stroke: () => color("--axis"), width: 1, size: 4 }, font: "11px system-ui, sans-serif" };
    const label = kind.across ? { label: kind.across, labelSize: 14, labelGap: 0, labelFont: axis.font } : {};
    const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: Boolean(kind.spansGaps) };
    const raw = this.settings.smoothing ? curves.map((curve) => ({ ...curve, isFaint: true })) : [];
    // Edges stand behind the curves, the least and the greatest of each curve that has them.
    const banded = curves.filter((_, index) => columns[index].length === 3);
    const bands = banded.map((curve, index) => {
      const least = curves.length + raw.length + 1 + 2 * index;
      return { series: [least + 1, least], fill: () => fade(curve.color, 22) };
    });
    // In a stack, each curve's area ends at the one below.
    if (kind.form === "stack") curves.slice(1).forEach((_, index) => bands.push({ series: [index + 2, index + 1] }));
    return {
      width: this.width(), height: kind.height, legend: { show: false },
      scales: { x: { time: Boolean(kind.isTime), range: (chart, low, high) => this.widen(low, high) }, y: this.scaleOfValues() },
      axes: [
        { ...axis, ...label, size: kind.across ? 28 : 34, space: 80, values: (chart, values) => values.map((one) => kind.ticks(one)) },
        { ...axis, size: 58, values: (chart, values) => values.map((one) => (one === null ? "" : Math.abs(one) >= 1000 ? shortCount(one) : String(Number(one.toPrecision(4))))) },
      ],
      series: [{}, ...[...curves, ...raw].map((curve) => this.seriesOf(curve)), ...banded.flatMap(() => [edge, edge])],
      bands,
      cursor: { sync: { key: kind.sync, setSeries: false, scales: ["x", null] }, y: false, points: { size: 7 }, drag: { x: true, y: false } },
      hooks: { setCursor: [() => this.read()], setScale: [(chart, name) => this.noteZoom(name)], ...kind.hooks },
    };
  }

  seriesOf({ name, color: variable, isFaint, dash }) {
    const { form } = this.kind;
    const paint = () => (isFaint ? fade(variable, 45) : color(variable));
    return {
      label: name, stroke: paint, width: form === "stack" ? 0 : isFaint ? 1 : 1.6, spanGaps: form === "points" || Boolean(this.kind.spansGaps), dash: PATTERNS[dash],
      fill: form === "stack" ? paint : undefined,
      paths: form === "stairs" ? uPlot.paths.stepped({ align: 1 }) : undefined,
      points: {
        size: 5, show: (chart) => form !== "stack" && chart.data[0].length <= (form === "points" ? 60 : 1),
        filter: (chart, number, isShown) => (isShown || form === "stack" ? null : lonely(chart.data[number], ...chart.series[0].idxs)),
      },
    };
  }

  scaleOfValues() {
    const distribution = this.isLogarithmic() ? { distr: 3 } : {};
    if (this.settings.isClipped) {
      return { ...distribution, range: (chart, low, high) => this.clip(chart, low, high) };
    }
    if (this.isLogarithmic()) return distribution;
    return this.kind.scale === "zero" ? { range: (chart, low, high) => [Math.min(0, low), 1.1 * high || 1] } : {};
  }

  // Outliers leave the axis, so that the rest fills it.
  clip(chart, low, high) {
    const isLogarithmic = chart.scales.y.distr === 3;
    const [first, last] = chart.series[0].idxs;
    const rows = chart.data.slice(1, 1 + this.kind.curves.length);
    const inner = innerRange(rows.flatMap((row) => row.slice(first, last + 1)));
    if (inner && !isLogarithmic) return inner;
    // A part of less than one octave would have no mark on a logarithmic axis.
    if (inner && inner[0] > 0 && inner[1] > 2 * inner[0]) return inner.map((value) => Number(value.toPrecision(2)));
    if (low == null) return [low, high];
    return isLogarithmic ? uPlot.rangeLog(low, high, 10, false) : uPlot.rangeNum(low, high, 0.1, true);
  }

  // All there is becomes the span that charts of a page share; what was enlarged stays as it is.
  widen(low, high) {
    const { span } = this.kind, isAll = this.x.length < 2 || (low === this.x[0] && high === this.x.at(-1));
    return span && isAll ? span : [low, high];
  }

  noteZoom(name) {
    if (name !== "x" || !this.chart) return;
    const { min, max } = this.chart.scales.x, { span } = this.kind;
    this.isZoomed = span ? min !== span[0] || max !== span[1] : this.x.length > 1 && (min !== this.x[0] || max !== this.x.at(-1));
  }

  width() { return Math.max(200, Math.floor(this.canvas.clientWidth) || 300); }

  fit() {
    if (this.canvas.clientWidth && this.chart.width !== this.width()) {
      this.chart.setSize({ width: this.width(), height: this.chart.height });
    }
  }

  // The newest value of a curve.
  last(curve) {
    return this.columns[curve][0].findLast((value) => value !== null && value !== undefined) ?? null;
  }

  // The values under the cursor, else the newest ones.
  read() {
    const { curves } = this.kind, index = this.chart?.cursor.idx ?? null;
    const parts = [];
    curves.forEach(({ name, color: variable, isFaint, dash }, number) => {
      const [values, least, most] = this.columns[number];
      if (curves.length > 1) {
        const key = make("i", "", `key ${isFaint ? "faint" : ""} ${dash ?? ""}`.trim());
        key.style.borderColor = `var(${variable})`;
        parts.push(key, make("span", `${name} `, "name"));
      }
      parts.push(make("b", inShort(index !== null ? values[index] : (number === 0 ? this.kind.newest?.() : null) ?? this.last(number))));
      if (index !== null && least && least[index] !== most[index]) parts.push(` (${inShort(least[index])} to ${inShort(most[index])})`);
    });
    if (index !== null) parts.push(` at ${this.kind.where(this.x[index])}`);
    this.reading.replaceChildren(...parts);
    this.reading.classList.toggle("current", index !== null);
  }

  reset() {
    this.chart.setData(this.chart.data, true);
    this.chart.setCursor({ left: -10, top: -10 });
  }

  onKey(event) {
    const { chart } = this;
    if (event.key === "Escape") {
      Plot.all.forEach((one) => { if (one.kind.sync === this.kind.sync) one.reset(); });
      return;
    }
    // Only what is shown is read: no cursor stands outside of what was enlarged.
    const [first, last] = chart.series[0].idxs;
    const now = chart.cursor.idx ?? last, page = Math.max(1, Math.round((last - first) / 20));
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - page, PageDown: now + page, Home: first, End: last }[event.key];
    if (next === undefined || !this.x.length) return;
    event.preventDefault();
    const index = Math.min(last, Math.max(first, next)), value = chart.data[1][index];
    chart.setCursor({ left: chart.valToPos(this.x[index], "x"), top: value == null ? 0 : chart.valToPos(value, "y") });
    setText(byId("spoken"), `${this.kind.title}: ${this.reading.textContent}`);
  }

  remove() {
    Plot.all.delete(this);
    this.observer.disconnect();
    this.chart?.destroy();
    this.element.remove();
  }
}

// Colours are read when a chart is drawn.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
  Plot.all.forEach((one) => one.chart.redraw(false)));
