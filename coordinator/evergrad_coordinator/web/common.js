"use strict";
// What all pages and the report share: words for numbers, and elements.

const MISSING = "–";

function duration(seconds) {
  if (seconds === null || seconds === undefined || !isFinite(seconds)) return MISSING;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)}s`;
  const minutes = Math.round(seconds / 60);
  if (seconds < 3600) return `${Math.floor(seconds / 60)}m${String(Math.floor(seconds % 60)).padStart(2, "0")}s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours}h${String(minutes % 60).padStart(2, "0")}m`;
  return `${Math.floor(hours / 24)}d${String(hours % 24).padStart(2, "0")}h`;
}

function shortCount(number) {
  if (number === null || number === undefined || !isFinite(number)) return MISSING;
  const units = ["", "k", "M", "B", "T"];
  let rest = Math.abs(number), unit = 0;
  while (rest >= 999.5 && unit < units.length - 1) { rest /= 1000; unit += 1; }
  const text = unit === 0 && Number.isInteger(rest) ? String(rest) : String(Number(rest.toPrecision(3)));
  return (number < 0 ? "-" : "") + text + units[unit];
}

function real(number) {
  if (number === null || number === undefined || !isFinite(number)) return MISSING;
  if (number !== 0 && (Math.abs(number) < 1e-4 || Math.abs(number) >= 1e6)) return number.toExponential(3);
  return number.toLocaleString("en", { maximumFractionDigits: 4 });
}

const count = (number) =>
  number === null || number === undefined ? MISSING : Math.round(number).toLocaleString("en");

const byId = (id) => document.getElementById(id);

// Text only, never markup: names and messages come from nodes.
function make(tag, text = "", kind = "") {
  const one = document.createElement(tag);
  if (text !== "") one.textContent = text;
  if (kind) one.className = kind;
  return one;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// rows: texts; titles: [text, class]. The place of a table without rows says so.
function showTable(place, titles, rows, empty) {
  if (!rows.length) { place.replaceChildren(make("p", empty, "empty")); return; }
  const table = make("table"), head = make("tr"), body = make("tbody");
  for (const [title, kind] of titles) {
    const cell = make("th", title, kind);
    cell.scope = "col";
    head.append(cell);
  }
  for (const row of rows) {
    const line = make("tr");
    row.forEach((value, index) => line.append(value instanceof Node ? value : make("td", value, titles[index][1])));
    body.append(line);
  }
  const top = make("thead");
  top.append(head);
  table.append(top, body);
  place.replaceChildren(table);
}

const TONES = {
  Running: "good", Complete: "good", Failed: "bad", Stopped: "warn", Starting: "warn", Waiting: "warn",
  Draining: "warn", Suspended: "quiet", Pending: "quiet", Preparing: "quiet",
};
