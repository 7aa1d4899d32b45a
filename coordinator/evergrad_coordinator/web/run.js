"use strict";
// The page of one run: applies the coordinator's updates, and draws what has changed.
(() => {
  const MOST_EVENTS = 200, MOST_CHECKPOINTS = 100, MOST_PLOTS = 40, MOST_SETS = 6;
  const COLORS = ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6"];
  const TITLES = {
    loss: ["Training loss", "nats per token"], tokens_per_second: ["Throughput", "tokens per second"],
    learning_rate: ["Learning rate", ""], grad_norm: ["Gradient norm, before clipping", ""],
  };
  const emptyTrack = () => ({ x: [], columns: {} });
  let run = null;
  const begin = () => ({
    status: {}, steps: emptyTrack(), times: emptyTrack(), evaluations: {}, checkpoints: [], events: [],
    elapsed: 0, beganAt: 0,
  });

  // ---- updates ----------------------------------------------------------------------------------------------

  // Rows from `from` on are replaced; there are never more than the coordinator keeps.
  function applyTrack(track, change) {
    track.x.length = change.from;
    track.x.push(...change.x);
    for (const [name, parts] of Object.entries(change.columns)) {
      const column = (track.columns[name] ??= [[], [], []]);
      parts.forEach((values, index) => {
        column[index].length = change.from;
        column[index].push(...values);
      });
    }
  }

  function apply(update) {
    // Another coordinator, or this one again: its first update is all it has.
    if (run === null || update.beganAt !== run.beganAt) {
      run = begin();
      plots.forEach((plot) => plot.remove());
      plots.clear();
    }
    const isWhole = update.status !== undefined && "run" in update.status;
    if (isWhole) { run.checkpoints = []; run.events = []; }
    run.beganAt = update.beganAt;
    run.elapsed = update.elapsed;
    Object.assign(run.status, update.status);
    if (update.steps) applyTrack(run.steps, update.steps);
    if (update.times) applyTrack(run.times, update.times);
    for (const [name, change] of Object.entries(update.evaluations ?? {})) {
      applyTrack((run.evaluations[name] ??= emptyTrack()), change);
    }
    run.checkpoints = run.checkpoints.concat(update.checkpoints ?? []).slice(-MOST_CHECKPOINTS);
    run.events = run.events.concat(update.events ?? []).slice(-MOST_EVENTS);
    for (const part of Object.keys(update)) changed.add(part);
    if ("nodes" in (update.status ?? {})) changed.add("members");
    ask();
  }

  // ---- drawing, at most once a frame, and not while nobody looks ----------------------------------------------

  const changed = new Set();
  let isAsked = false, isPaused = false;
  function ask() {
    if (isAsked || isPaused || run === null) return;
    isAsked = true;
    requestAnimationFrame(() => { isAsked = false; show(); });
  }

  const timeOfDay = (unix) => new Date(unix * 1000).toLocaleTimeString([], { hour12: false });
  const hours = (unix) => timeOfDay(unix).replace(/:00$/, "");
  const clock = (elapsed) => timeOfDay(run.beganAt + elapsed);
  const sum = (values) => Object.values(values ?? {}).reduce((total, one) => total + one, 0);

  function show() {
    byId("all").hidden = false;
    showHead();
    showFigures();
    // A page that is made of a run's files has no nodes.
    byId("members").parentElement.hidden = !run.status.nodes;
    if (changed.has("members")) showMembers();
    if (changed.has("status")) { showRestarts(); showUses(); }
    if (changed.has("checkpoints")) {
      const rows = run.checkpoints.slice().reverse().map(([at, step]) => [clock(at), count(step)]);
      showTable(byId("checkpoints"), [["Time", "time"], ["Step", "number"]], rows, "None yet.");
    }
    if (changed.has("events")) {
      const rows = run.events.slice().reverse().map(([at, , text]) => [clock(at), text]);
      showTable(byId("events"), [["Time", "time"], ["Event", ""]], rows, "None yet.");
    }
    for (const id of ["checkpoints", "events"]) {
      if (!byId(id).firstChild) showTable(byId(id), [], [], "None yet.");
    }
    showPlots();
    changed.clear();
  }

  function showHead() {
    const { status } = run;
    setText(byId("run"), status.run ?? "");
    const phase = byId("phase");
    setText(phase, status.phase ?? "");
    phase.className = `status ${TONES[status.phase] ?? "quiet"}`;
    phase.hidden = false;
    setText(byId("why"), status.message ?? "");
    const step = status.step === null ? "" : ` · step ${count(status.step)}`;
    document.title = `${status.run} · ${status.phase}${step}`;
    const bar = byId("bar");
    bar.hidden = !status.totalSteps;
    if (status.totalSteps) { bar.max = status.totalSteps; bar.value = status.step ?? 0; }
    const failure = status.lastFailure;
    byId("failure").hidden = !failure;
    if (failure) {
      const at = failure.step >= 0 ? ` after step ${count(failure.step)}` : "";
      setText(byId("failure-text"), `${failure.cause} on node ${failure.node}, rank ${failure.rank}${at}; `
        + `${failure.withoutProgress} of ${status.maxFailures} failures without progress. ${failure.message}`);
    }
  }

  const shown = new Map();
  function figure(title, value, note) {
    let [valueOf, noteOf] = shown.get(title) ?? [];
    if (!valueOf) {
      const place = make("div");
      valueOf = make("dd", "", "value");
      noteOf = make("dd", "", "note");
      place.append(make("dt", title), valueOf, noteOf);
      byId("figures").append(place);
      shown.set(title, [valueOf, noteOf]);
    }
    setText(valueOf, value);
    setText(noteOf, note);
  }

  function showFigures() {
    const { status } = run, { nodes } = status;
    const restarts = sum(status.restarts), lost = sum(status.lostSeconds);
    const share = run.elapsed > 0 ? Math.min(1, lost / run.elapsed) : 0;
    const age = status.updatedSecondsAgo;
    figure("Step", count(status.step), status.totalSteps ? `of ${count(status.totalSteps)}` : "no total is known");
    figure("Training loss", real(status.loss), age === null ? "no report yet" : `reported ${duration(age)} ago`);
    figure("Tokens per second", shortCount(status.tokensPerSecond), "all processes together");
    figure("Time left", duration(status.etaSeconds),
      status.etaSeconds ? `ends ${new Date(Date.now() + status.etaSeconds * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "short", hour12: false })}` : "");
    figure("Processes", count(status.worldSize), nodes ? `${nodes.connected} nodes of ${nodes.min}–${nodes.max} are here` : "that train together");
    figure("Checkpoint", count(status.checkpointStep), status.checkpointStep === null ? "none yet" : "newest step on disk");
    figure("Restarts", count(restarts), restarts ? "changes of the group" : "trained in one go");
    figure("Waste", duration(lost), `nobody trained in ${(100 * share).toFixed(1)}% of ${duration(run.elapsed)}`);
  }

  function showMembers() {
    const { nodes } = run.status;
    const rows = nodes.members.map((one) => [
      one.node, one.state,
      one.firstRank === null ? MISSING : one.workers > 1 ? `${one.firstRank}–${one.firstRank + one.workers - 1}` : `${one.firstRank}`,
      one.address,
    ]);
    const more = nodes.numMembers - rows.length;
    if (more > 0) rows.push(["", `and ${count(more)} more`, "", ""]);
    showTable(byId("members"), [["Node", ""], ["State", ""], ["Ranks", "number"], ["Address", ""]], rows, "No node is here.");
  }

  function showRestarts() {
    const { restarts = {}, lostSeconds = {} } = run.status;
    const causes = [...new Set([...Object.keys(restarts), ...Object.keys(lostSeconds)])].sort();
    const rows = causes.map((one) => [one.replaceAll("_", " "), count(restarts[one] ?? 0), duration(lostSeconds[one] ?? 0)]);
    showTable(byId("restarts"), [["Cause", ""], ["Number", "number"], ["Nobody trained for", "number"]], rows, "None: trained in one go.");
  }

  // Node time by use. A page that is made of a run's files has none: only a coordinator counts it.
  function showUses() {
    const { uses, useTexts = {} } = run.status, total = sum(uses);
    byId("uses").parentElement.hidden = !uses;
    if (!uses) return;
    const rows = Object.entries(uses).map(([one, seconds]) =>
      [one, duration(seconds), `${(100 * seconds / total).toFixed(1)}%`, useTexts[one] ?? ""]);
    showTable(byId("uses"), [["Use", "name"], ["Node time", "number"], ["Share", "number"], ["What it is", ""]], rows, "No node has been here.");
  }

  // ---- plots -------------------------------------------------------------------------------------------------

  const plots = new Map();
  let isLogarithmic = false;
  const inShort = (number) => (Math.abs(number) >= 10000 ? shortCount(number) : real(number));
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const faint = (name) => `color-mix(in srgb, ${color(name)} 22%, transparent)`;

  function showPlots() {
    const isNew = (part) => changed.has(part);
    if (isNew("steps")) {
      for (const [name, parts] of Object.entries(run.steps.columns)) {
        const [title, unit] = TITLES[name] ?? [name, ""];
        draw(`steps/${name}`, { title, unit, isHero: name === "loss", hasBand: true, marks: name === "loss" },
          ["value"], [run.steps.x, ...parts]);
      }
    }
    if (isNew("evaluations")) showEvaluations();
    if (isNew("times")) {
      const { columns, x } = run.times;
      const times = x.map((one) => run.beganAt + one);
      draw("times", { title: "Processes and nodes", unit: "", isHero: true, isTime: true },
        Object.keys(columns), [times, ...Object.values(columns).map((parts) => parts[0])]);
    }
  }

  // One plot for each number that evaluations have, with a curve for each set.
  function showEvaluations() {
    const names = Object.keys(run.evaluations).slice(0, MOST_SETS);
    const numbers = new Set(names.flatMap((one) => Object.keys(run.evaluations[one].columns)));
    for (const number of numbers) {
      const sets = names.filter((one) => run.evaluations[one].columns[number]);
      const joined = uPlot.join(sets.map((one) => [run.evaluations[one].x, run.evaluations[one].columns[number][0]]));
      const title = number === "loss" ? "Evaluation loss" : `Evaluation: ${number}`;
      draw(`evaluations/${number}/${sets.length}`, { title, unit: number === "loss" ? "nats per token" : "", hasPoints: true },
        sets, joined);
    }
  }

  function draw(key, kind, names, data) {
    let plot = plots.get(key);
    if (!plot) {
      if (plots.size >= MOST_PLOTS) return;
      // A set more is another plot in the place of the one before.
      const prefix = key.startsWith("evaluations/") ? key.slice(0, key.lastIndexOf("/") + 1) : null;
      const before = prefix && [...plots.keys()].find((one) => one.startsWith(prefix));
      plot = new Plot(kind, names, data);
      if (before) { plots.get(before).replaceBy(plot); plots.delete(before); }
      else place(plot, key);
      plots.set(key, plot);
    }
    plot.setData(data);
  }

  // Loss, then evaluations, then the rest; the one over the time comes last.
  const rank = (key) => key === "steps/loss" ? 0 : key.startsWith("evaluations/loss") ? 1
    : key === "steps/tokens_per_second" ? 2 : key === "times" ? 5 : key.startsWith("evaluations") ? 4 : 3;
  function place(plot, key) {
    const behind = [...plots.entries()].filter(([one]) => rank(one) > rank(key)).map(([, one]) => one.element);
    const all = [...byId("plots").children];
    byId("plots").insertBefore(plot.element, all.find((one) => behind.includes(one)) ?? null);
    plot.begin();
  }

  class Plot {
    constructor(kind, names, data) {
      this.kind = kind;
      this.names = names;
      this.data = data;
      this.isZoomed = false;
      this.element = make("figure", "", kind.isHero ? "hero" : "");
      this.reading = make("span", "", "reading");
      this.canvas = make("div", "", "canvas");
      this.canvas.tabIndex = 0;
      this.canvas.setAttribute("role", "img");
      this.canvas.addEventListener("keydown", (event) => this.onKey(event));
      const caption = make("figcaption");
      caption.append(make("h3", kind.unit ? `${kind.title}, ${kind.unit}` : kind.title), this.reading);
      this.element.append(caption, this.canvas);
      this.observer = new ResizeObserver(() => this.fit());
    }

    begin() {
      this.chart = new uPlot(this.options(), this.data, this.canvas);
      this.observer.observe(this.canvas);
      this.read();
    }

    options() {
      const { kind } = this;
      const axis = { stroke: () => color("--muted"), grid: { stroke: () => color("--grid"), width: 1 },
        ticks: { stroke: () => color("--axis"), width: 1, size: 4 }, font: "11px system-ui, sans-serif" };
      const curve = (index) => ({
        label: this.names[index], stroke: () => color(COLORS[index]), width: 1.6, spanGaps: Boolean(kind.hasPoints),
        points: { show: kind.hasPoints ? (chart, number) => chart.data[number].length <= 60 : (chart) => chart.data[0].length === 1, size: 5 },
        paths: kind.isTime ? uPlot.paths.stepped({ align: 1 }) : undefined,
      });
      const edge = { stroke: "transparent", width: 0, points: { show: false } };
      return {
        width: this.width(), height: kind.isHero ? (kind.isTime ? 190 : 280) : 210, legend: { show: false },
        scales: {
          x: { time: Boolean(kind.isTime) },
          y: kind.isTime ? { range: (chart, low, high) => [0, Math.max(1, high) * 1.15] }
            : { distr: kind.isHero && isLogarithmic ? 3 : 1 },
        },
        axes: [
          { ...axis, size: 34, values: kind.isTime ? (chart, values) => values.map((one) => hours(one)) : (chart, values) => values.map((one) => (Number.isInteger(one) ? shortCount(one) : "")) },
          { ...axis, size: 58, values: (chart, values) => values.map((one) => (one === null ? "" : Math.abs(one) >= 1000 ? shortCount(one) : String(Number(one.toPrecision(4))))) },
        ],
        series: [{}, ...this.names.map((_, index) => curve(index)), ...(kind.hasBand ? [edge, edge] : [])],
        bands: kind.hasBand ? [{ series: [3, 2], fill: () => faint("--s1") }] : undefined,
        cursor: { sync: { key: kind.isTime ? "times" : "steps", setSeries: false }, points: { size: 7 }, drag: { x: true, y: false } },
        hooks: {
          setCursor: [() => this.read()],
          setSelect: [(chart) => { if (chart.select.width > 0) this.isZoomed = true; }],
          draw: kind.marks ? [(chart) => this.drawMarks(chart)] : [],
          ready: [(chart) => chart.over.addEventListener("dblclick", () => { this.isZoomed = false; })],
        },
      };
    }

    width() { return Math.max(200, Math.floor(this.canvas.clientWidth) || 300); }

    fit() {
      if (this.chart && this.chart.width !== this.width()) {
        this.chart.setSize({ width: this.width(), height: this.chart.height });
      }
    }

    setData(data) {
      this.data = data;
      if (!this.chart) return;
      this.chart.setData(data, !this.isZoomed);
      if (this.isZoomed) this.chart.redraw();
      this.read();
      const last = this.last(1);
      this.canvas.setAttribute("aria-label", `${this.kind.title}: ${data[0].length} points, now ${inShort(last)}`);
    }

    last(series) {
      const values = this.data[series];
      for (let index = values.length - 1; index >= 0; index -= 1) {
        if (values[index] !== null && values[index] !== undefined) return values[index];
      }
      return null;
    }

    where(index) {
      const x = this.data[0][index];
      return this.kind.isTime ? timeOfDay(x) : `step ${count(x)}`;
    }

    // The values under the cursor, else the newest ones.
    read() {
      const index = this.chart?.cursor.idx ?? null;
      const parts = [];
      this.names.forEach((name, number) => {
        if (this.names.length > 1) {
          const key = make("i", "", "key");
          key.style.background = `var(${COLORS[number]})`;
          parts.push(key, `${name} `);
        }
        parts.push(make("b", inShort(index === null ? this.last(number + 1) : this.data[number + 1][index])));
      });
      if (index !== null) {
        const [least, most] = this.kind.hasBand ? [this.data[2][index], this.data[3][index]] : [null, null];
        parts.push(least !== null && least !== most ? ` (${inShort(least)} to ${inShort(most)})` : "", ` at ${this.where(index)}`);
      }
      this.reading.replaceChildren(...parts);
    }

    onKey(event) {
      const { chart } = this, length = this.data[0].length;
      if (event.key === "Escape") {
        this.isZoomed = false;
        chart.setData(this.data, true);
        chart.setCursor({ left: -10, top: -10 });
        return;
      }
      const now = chart.cursor.idx ?? length - 1, page = Math.max(1, Math.round(length / 20));
      const next = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - page, PageDown: now + page, Home: 0, End: length - 1 }[event.key];
      if (next === undefined || !length) return;
      event.preventDefault();
      const index = Math.min(length - 1, Math.max(0, next));
      const left = chart.valToPos(this.data[0][index], "x"), value = this.data[1][index];
      chart.setCursor({ left, top: value === null ? 0 : chart.valToPos(value, "y") });
      setText(byId("spoken"), `${this.kind.title}: ${this.reading.textContent}`);
    }

    // Checkpoints stand as small triangles on the axis of the step.
    drawMarks(chart) {
      const { ctx, bbox } = chart;
      ctx.save();
      ctx.fillStyle = color("--s3");
      for (const [, step] of run.checkpoints) {
        const x = chart.valToPos(step, "x", true), y = bbox.top + bbox.height;
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.beginPath();
        ctx.moveTo(x, y - 8 * devicePixelRatio);
        ctx.lineTo(x - 4 * devicePixelRatio, y);
        ctx.lineTo(x + 4 * devicePixelRatio, y);
        ctx.fill();
      }
      ctx.restore();
    }

    replaceBy(other) {
      this.element.replaceWith(other.element);
      this.remove();
      other.begin();
    }

    remove() {
      this.observer.disconnect();
      this.chart?.destroy();
      this.element.remove();
    }
  }

  function press(id, act) {
    const button = byId(id);
    button.addEventListener("click", () => {
      const isPressed = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(isPressed));
      act(isPressed);
    });
  }
  press("pause", (isPressed) => { isPaused = isPressed; ask(); });
  press("log", (isPressed) => {
    isLogarithmic = isPressed;
    const before = plots.get("steps/loss");
    if (!before) return;
    const after = new Plot(before.kind, before.names, before.data);
    before.replaceBy(after);
    plots.set("steps/loss", after);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    plots.forEach((plot) => plot.chart.redraw(false)));

  // ---- the connection ------------------------------------------------------------------------------------------

  const setLink = (text, isAway) => {
    setText(byId("link"), text);
    byId("link").className = isAway ? "away" : "";
  };
  const KEY = "evergrad-token";

  // The token is behind a #, which no browser sends to a server; it leaves the address at once.
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem(KEY, given);
    history.replaceState(null, "", location.pathname);
  }

  async function open(token) {
    byId("ask").hidden = true;
    const end = await follow("/live", token, {
      onUpdate: apply,
      onOpen: () => setLink("live", false),
      onAway: (status) => setLink(status === 503 ? "too many pages are open" : "the coordinator does not answer", true),
    });
    if (end === "refused") {
      sessionStorage.removeItem(KEY);
      setLink("not connected", true);
      setText(byId("refusal"), "This is not the run's token. evergrad open RUN finds it and opens this page with it.");
      byId("ask").hidden = false;
      byId("token").focus();
    }
  }

  byId("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const token = byId("token").value.trim();
    byId("token").value = "";
    if (!token) return;
    sessionStorage.setItem(KEY, token);
    open(token);
  });

  const known = sessionStorage.getItem(KEY);
  if (!known && document.documentElement.dataset.token === "needed") {
    setLink("not connected", true);
    byId("ask").hidden = false;
  } else {
    open(known);
  }
})();
