"use strict";
// The page of one run: applies the coordinator's updates, and draws what has changed.
(() => {
  const MOST_EVENTS = 200, MOST_CHECKPOINTS = 100, MOST_PLOTS = 64, MOST_NAMES = 20;
  const COLORS = ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6"];
  const DASHES = ["", "dashed", "dotted"];
  const TITLES = new Map([
    ["loss", ["Training loss", "nats per token"]], ["tokens_per_second", ["Throughput", "tokens per second"]],
    ["learning_rate", ["Learning rate", ""]], ["grad_norm", ["Gradient norm, before clipping", ""]],
  ]);
  // By name, which may be "constructor": no object of these has anything else.
  const emptyNames = () => Object.create(null);
  const emptyTrack = () => ({ x: [], columns: emptyNames() });
  let run = null;
  const begin = () => ({
    status: {}, steps: emptyTrack(), times: emptyTrack(), evaluations: emptyNames(), checkpoints: [], events: [],
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
      withoutPlot.clear();
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
    requestAnimationFrame(() => { isAsked = false; attempt(show, onFault); });
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
    // Two folders of one recipe have runs of the same name.
    const folder = status.folder && status.folder !== status.run ? ` (${status.folder})` : "";
    document.title = `${status.run}${folder} · ${status.phase}${step}`;
    showIcon(phase.className.split(" ")[1]);
    if (isLive) setLink(hasEnded() ? status.phase.toLowerCase() : "live", false);
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

  // The icon of the tab has the colour of the phase, so that tabs can be told apart.
  function showIcon(tone) {
    const fill = color(tone === "quiet" ? "--muted" : `--${tone}`);
    const picture = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><circle cx="8" cy="8" r="7" fill="${fill}"/></svg>`;
    const address = `data:image/svg+xml,${encodeURIComponent(picture)}`, link = document.querySelector("link[rel=icon]");
    if (link.href !== address) link.href = address;
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
    figure("Step", count(status.step), status.totalSteps ? `of ${count(status.totalSteps)}` : "total unknown");
    figure("Training loss", real(status.loss), age === null ? "no report yet" : `reported ${duration(age)} ago`);
    figure("Tokens per second", inShort(status.tokensPerSecond), "over the last minute");
    figure("Time left", duration(status.etaSeconds),
      status.etaSeconds ? `ends ${new Date(Date.now() + status.etaSeconds * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "short", hour12: false })}` : "");
    figure("Processes", count(status.worldSize), nodes ? `${nodes.connected} of ${nodes.min}–${nodes.max} nodes connected` : "that train together");
    figure("Checkpoint", count(status.checkpointStep), status.checkpointStep === null ? "none yet" : "newest step on disk");
    figure("Restarts", count(restarts), restarts ? "changes of the group" : "trained in one go");
    figure("Waste", duration(lost), `no training in ${(100 * share).toFixed(1)}% of ${duration(run.elapsed)}`);
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
    showTable(byId("members"), [["Node", ""], ["State", ""], ["Ranks", "number"], ["Address", ""]], rows, "No node is connected.");
  }

  function showRestarts() {
    const { restarts = {}, lostSeconds = {} } = run.status;
    const causes = [...new Set([...Object.keys(restarts), ...Object.keys(lostSeconds)])].sort();
    const rows = causes.map((one) => [one.replaceAll("_", " "), count(restarts[one] ?? 0), duration(lostSeconds[one] ?? 0)]);
    showTable(byId("restarts"), [["Cause", ""], ["Number", "number"], ["Time without training", "number"]], rows, "None: trained in one go.");
  }

  // Node time by use. A page that is made of a run's files has none: only a coordinator counts it.
  function showUses() {
    const { uses, useTexts = {} } = run.status, total = sum(uses);
    byId("uses").parentElement.hidden = !uses;
    if (!uses) return;
    const rows = Object.entries(uses).map(([one, seconds]) =>
      [one, duration(seconds), `${(100 * seconds / total).toFixed(1)}%`, useTexts[one] ?? ""]);
    showTable(byId("uses"), [["Use", "name"], ["Node time", "number"], ["Share", "number"], ["What it is", ""]], rows, "No node has connected yet.");
  }

  // ---- plots -------------------------------------------------------------------------------------------------

  const plots = new Map();
  const withoutPlot = new Set();
  // More curves than colours, as of the 16 evaluation sets that a coordinator keeps, differ in their line.
  const curvesOf = (names) => names.map((name, index) => (
    { name, color: COLORS[index % COLORS.length], dash: DASHES[Math.floor(index / COLORS.length) % DASHES.length] }));

  // Numbers of the status that are the newest values of a curve, whose last row may be a mean.
  const NEWEST = new Map([["loss", "loss"], ["tokens_per_second", "tokensPerSecond"]]);

  function showPlots() {
    const isNew = (part) => changed.has(part);
    if (isNew("steps")) {
      for (const [name, parts] of Object.entries(run.steps.columns)) {
        const [title, unit] = TITLES.get(name) ?? [name, ""];
        const own = name === "loss" ? { isHero: true, height: 280, hooks: { draw: [drawCheckpoints] } } : {};
        const kind = { title, unit, sync: "steps", isAdjustable: true, newest: () => run.status[NEWEST.get(name)], ...own };
        const other = overlay?.columns[name];
        if (!other) { draw(`steps/${name}`, { ...kind, curves: curvesOf(["value"]) }, run.steps.x, [parts]); continue; }
        const curves = curvesOf([run.status.run, overlay.name]);
        curves[1].dash = "dashed";
        const [x, ...rows] = uPlot.join([[run.steps.x, ...parts], [overlay.x, other]]);
        draw(`steps/${name}`, { ...kind, curves, spansGaps: true }, x, [rows.slice(0, parts.length), rows.slice(parts.length)]);
      }
    }
    if (isNew("evaluations")) showEvaluations();
    if (isNew("times")) {
      const { columns, x } = run.times;
      const kind = { title: "Processes and nodes", unit: "", isHero: true, height: 190, sync: "times", form: "stairs", scale: "zero",
        isTime: true, ticks: hours, where: timeOfDay, curves: curvesOf(Object.keys(columns)) };
      draw("times", kind, x.map((one) => run.beganAt + one), Object.values(columns).map(([value]) => [value]));
    }
    showLeftOut();
  }

  function showLeftOut() {
    const names = [...withoutPlot], more = names.length - MOST_NAMES;
    const list = names.slice(0, MOST_NAMES).join(", ") + (more > 0 ? ` and ${count(more)} others` : "");
    setText(byId("left-out"), `${count(names.length)} more ${names.length === 1 ? "number has" : "numbers have"} no plot here: ${list}.`);
    byId("left-out").hidden = !names.length;
  }

  // One plot for each number that evaluations have, with a curve for each set.
  function showEvaluations() {
    const names = Object.keys(run.evaluations);
    const numbers = new Set(names.flatMap((one) => Object.keys(run.evaluations[one].columns)));
    for (const number of numbers) {
      const sets = names.filter((one) => run.evaluations[one].columns[number]);
      const [x, ...values] = uPlot.join(sets.map((one) => [run.evaluations[one].x, run.evaluations[one].columns[number][0]]));
      const title = number === "loss" ? "Evaluation loss" : `Evaluation: ${number}`;
      const kind = { title, unit: number === "loss" ? "nats per token" : "", sync: "steps", form: "points", isAdjustable: true, curves: curvesOf(sets) };
      draw(`evaluations/${number}`, kind, x, values.map((one) => [one]));
    }
  }

  function draw(key, kind, x, columns) {
    let plot = plots.get(key);
    // One curve more is another plot in the place of the one before.
    if (plot?.kind.curves.length !== kind.curves.length) {
      // The one over the time is there beside any number of others.
      if (!plot && key !== "times" && plots.size - Number(plots.has("times")) >= MOST_PLOTS) {
        withoutPlot.add(kind.title);
        return;
      }
      const before = plot;
      plot = makePlot(kind);
      if (before) replace(before, plot);
      else place(plot, key);
      plots.set(key, plot);
    }
    plot.setData(x, columns);
  }

  function makePlot(kind) {
    const element = make("figure", "", kind.isHero ? "hero" : ""), caption = make("figcaption");
    caption.append(make("h3", kind.unit ? `${kind.title}, ${kind.unit}` : kind.title));
    if (kind.hooks?.draw?.includes(drawCheckpoints)) {
      const legend = make("span", "", "legend");
      legend.append(make("i", "▲"), make("span", "a checkpoint"));
      caption.append(legend);
    }
    element.append(caption);
    return new Plot({ height: 210, ...kind }, element, caption);
  }

  function replace(before, after) {
    before.element.replaceWith(after.element);
    before.remove();
  }

  // Loss, then evaluations, then the rest; the one over the time comes last.
  const rank = (key) => key === "steps/loss" ? 0 : key === "evaluations/loss" ? 1
    : key === "steps/tokens_per_second" ? 2 : key === "times" ? 5 : key.startsWith("evaluations/") ? 4 : 3;
  function place(plot, key) {
    const behind = [...plots.entries()].filter(([one]) => rank(one) > rank(key)).map(([, one]) => one.element);
    const all = [...byId("plots").children];
    byId("plots").insertBefore(plot.element, all.find((one) => behind.includes(one)) ?? null);
  }

  // Checkpoints stand as small triangles on the axis of the step.
  function drawCheckpoints(chart) {
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

  function press(id, act) {
    const button = byId(id);
    button.addEventListener("click", () => {
      const isPressed = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(isPressed));
      act(isPressed);
    });
  }
  press("pause", (isPressed) => { isPaused = isPressed; ask(); });
  press("log", (isLogarithmic) => Plot.adjust({ isLogarithmic }));
  press("clip", (isClipped) => Plot.adjust({ isClipped }));
  byId("smooth").addEventListener("change", () => Plot.adjust({ smoothing: Number(byId("smooth").value) }));

  // ---- a second run, from its metrics.jsonl: the page reads the file itself, and sends it nowhere ------------------

  let overlay = null;
  // As many rows as a curve of the coordinator may have, each the mean of its neighbours.
  const MOST_OVERLAY_ROWS = 600, MOST_OVERLAY_BYTES = 512 * 1024 * 1024;

  function parseOverlay(text, name) {
    // Of a step that was trained again, the last row counts.
    const rows = new Map();
    for (const line of text.split("\n")) {
      let row = null;
      try { row = JSON.parse(line); } catch { continue; }
      if (Number.isInteger(row?.step)) rows.set(row.step, { ...row.metrics, ...row });
    }
    if (!rows.size) return null;
    const steps = [...rows.keys()].sort((one, other) => one - other);
    const stride = Math.ceil(steps.length / MOST_OVERLAY_ROWS), columns = emptyNames(), x = [];
    for (let first = 0; first < steps.length; first += stride) {
      const part = steps.slice(first, first + stride);
      x.push(part.at(-1));
      for (const column of Object.keys(run.steps.columns)) {
        const values = part.map((step) => rows.get(step)[column]).filter((value) => typeof value === "number");
        (columns[column] ??= []).push(values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null);
      }
    }
    for (const [column, values] of Object.entries(columns)) {
      if (values.every((value) => value === null)) delete columns[column];
    }
    return { name, x, columns };
  }

  byId("other").addEventListener("change", async () => {
    const [file] = byId("other").files;
    const isTooLarge = file && file.size > MOST_OVERLAY_BYTES;
    overlay = file && run && !isTooLarge ? parseOverlay(await file.text(), file.name) : null;
    setText(byId("other-note"), !file ? "" : isTooLarge ? "The file is larger than 512 MiB."
      : overlay ? "" : "The file contains no steps. Choose a metrics.jsonl.");
    changed.add("steps");
    ask();
  });

  // ---- the connection ------------------------------------------------------------------------------------------

  const setLink = (text, isAway) => {
    setText(byId("link"), text);
    byId("link").className = isAway ? "away" : "";
  };
  const onFault = () => setLink(FAULT, true);
  let isLive = false;
  const hasEnded = () => ["Complete", "Failed", "Stopped"].includes(run?.status.phase);
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
      onOpen: () => {
        isLive = true;
        if (!hasEnded()) setLink("live", false);
      },
      onFault,
      onAway: (status) => {
        isLive = false;
        // A coordinator that ends with its run is no trouble.
        if (!hasEnded()) setLink(status === 503 ? "too many pages are open" : "the coordinator does not answer", true);
      },
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
