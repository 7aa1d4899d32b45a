"use strict";
// The page of all runs: one table, sorted and searched here.
(() => {
  const COLUMNS = [
    ["Namespace", "", (run) => run.namespace], ["Run", "name", (run) => run.name], ["Phase", "", (run) => run.phase],
    ["Nodes", "number", (run) => run.nodes], ["Step", "number", (run) => run.step], ["Loss", "number", (run) => Number.parseFloat(run.loss)],
    ["Tokens/s", "number", (run) => size(run.tokensPerSecond)], ["Time left", "number", (run) => run.etaSeconds],
    ["Checkpoint", "number", (run) => run.checkpointStep], ["Restarts", "number", (run) => run.restarts],
    ["Message", "message", (run) => run.message],
  ];
  const UNITS = { k: 1e3, M: 1e6, B: 1e9, T: 1e12 };
  const size = (text) => Number.parseFloat(text) * (UNITS[text.slice(-1)] ?? 1);
  let fleet = null, sorted = null, isDescending = false, isAsked = false;

  function ask() {
    if (isAsked || fleet === null) return;
    isAsked = true;
    requestAnimationFrame(() => { isAsked = false; attempt(show, onFault); });
  }

  function cellsOf(run) {
    const phase = make("td");
    phase.append(make("span", run.phase, `status ${TONES[run.phase] ?? "quiet"}`));
    const step = run.step === null ? MISSING
      : run.totalSteps ? `${count(run.step)} of ${count(run.totalSteps)}` : count(run.step);
    const texts = [run.namespace, run.name, phase, run.nodes || MISSING, step, run.loss || MISSING,
      run.tokensPerSecond || MISSING, run.eta || MISSING, count(run.checkpointStep), count(run.restarts), run.message];
    return texts.map((one, index) => (one instanceof Node ? one : make("td", one, COLUMNS[index][1])));
  }

  function show() {
    setText(byId("heading"), fleet.total === 1 ? "1 run" : `${count(fleet.total)} runs`);
    document.title = `${fleet.phases.Running ?? 0} running · Evergrad runs`;
    byId("phases").replaceChildren(...Object.entries(fleet.phases).map(([phase, number]) =>
      make("li", `${phase} ${count(number)}`, TONES[phase] ?? "quiet")));
    const wanted = byId("find").value.trim().toLowerCase();
    const runs = fleet.runs.filter((run) =>
      [run.name, run.namespace, run.phase].some((one) => one.toLowerCase().includes(wanted)));
    if (sorted !== null) {
      const valueOf = COLUMNS[sorted][2], sign = isDescending ? -1 : 1;
      // Runs without a value come last either way.
      const lacks = (value) => value === null || value === "" || Number.isNaN(value);
      runs.sort((one, other) => {
        const [a, b] = [valueOf(one), valueOf(other)];
        if (lacks(a) || lacks(b)) return Number(lacks(a)) - Number(lacks(b));
        return sign * (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
      });
    }
    const more = fleet.total - fleet.runs.length;
    setText(byId("left-out"), more > 0 ? `${count(more)} older runs are left out` : "");
    const titles = COLUMNS.map(([title, kind]) => [title, kind]);
    // The focus stays where it is, although the table is made anew.
    const focused = document.activeElement?.closest?.("th")?.cellIndex ?? null;
    showTable(byId("runs"), titles, runs.map(cellsOf), fleet.total ? "No run has this name." : "There are no runs.");
    [...byId("runs").querySelectorAll("th")].forEach((cell, index) => {
      const button = make("button", cell.textContent);
      button.type = "button";
      button.addEventListener("click", () => {
        isDescending = sorted === index && !isDescending;
        sorted = index;
        show();
      });
      cell.replaceChildren(button);
      cell.setAttribute("aria-sort", sorted === index ? (isDescending ? "descending" : "ascending") : "none");
      if (focused === index) button.focus({ preventScroll: true });
    });
  }

  byId("find").addEventListener("input", ask);
  const setLink = (text, isAway) => {
    setText(byId("link"), text);
    byId("link").className = isAway ? "away" : "";
  };
  const onFault = () => setLink(FAULT, true);
  follow("/live", null, {
    onUpdate: (update) => { fleet = update; ask(); },
    onOpen: () => setLink("live", false),
    onFault,
    onAway: (status) => setLink(status === 503 ? "too many pages are open" : "the operator does not answer", true),
  });
})();
