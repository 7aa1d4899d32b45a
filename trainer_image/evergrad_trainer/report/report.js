"use strict";
// Puts charts, which can be enlarged and read, in the place of the report's pictures. These stay in the page: paper has
// them, and so has a reader where no script runs.
(() => {
  const { x, charts } = JSON.parse(byId("charts").textContent);
  const HEIGHT = 260;

  // A dashed line for each step from which training went on after a restart, as in the picture.
  const drawRestarts = (steps) => (chart) => {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.strokeStyle = fade("--muted", 70);
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    for (const step of steps) {
      const at = Math.round(chart.valToPos(step, "x", true)) + 0.5;
      if (at < bbox.left || at > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  };

  document.querySelectorAll("[data-chart]").forEach((figure, index) => {
    const one = charts[index], isOfSteps = one.across === "step";
    const kind = {
      title: one.title, description: one.description, across: one.across, form: one.form, scale: one.scale,
      height: one.height ?? HEIGHT, sync: one.across, span: one.span,
      curves: one.curves.map(({ name, color: variable, isFaint }) => ({ name, color: `--${variable}`, isFaint })),
      // Under the curves, so that they stay readable where there were many.
      hooks: one.marks.length ? { drawAxes: [drawRestarts(one.marks)] } : {},
    };
    if (!isOfSteps) Object.assign(kind, { ticks: real, where: (value) => `${real(value)} ${one.across}` });
    const live = make("div", "", "live"), head = make("div", "", "live-head");
    head.append(make("span", one.unit, "unit"));
    live.append(head);
    figure.append(live);
    figure.classList.add("is-live");
    try {
      new Plot(kind, live, head).setData(x[one.x], one.curves.map((curve) => curve.parts));
    } catch (error) {
      // A browser of years to come that cannot draw it shows the picture, and says why on its console.
      figure.classList.remove("is-live");
      live.remove();
      throw error;
    }
  });
  byId("hint").hidden = false;
})();
