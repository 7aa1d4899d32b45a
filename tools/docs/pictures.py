"""Draws the README's pictures from recorded data: recovery compared with torchrun, and a kill on a cluster.

An SVG contains no date and no random name, so that equal records give equal files. `make generate` writes
them. With `--check`, the exit code is 1 if a file differs from what would be drawn.
"""

import json
import statistics
import sys
from collections.abc import Mapping
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/pictures"
SAMPLES = ROOT / "tools/benchmarks/results/recovery-samples.json"
WALK = ROOT / "docs/start/walkthrough.md"
SECTION = "## A pod is deleted while the run trains"
WATCH, DELETE = "$ kubectl get trun quickstart -w", "kubectl delete pod"
PARTS = (
    ("level1", "Evergrad, a recipe", "#00796b"),
    ("level2", "Evergrad, your script", "#26a69a"),
    ("stock_tuned", "torchrun, shortest timers", "#8d6e63"),
    ("stock_default", "torchrun, default timers", "#b0896f"),
)
"""Parts of the benchmark, with the label and colour of each."""
STYLE = """\
text { font: 15px system-ui, sans-serif; fill: #1f2328; white-space: pre }
.strong { font-weight: 600 } .quiet { fill: #57606a }
.middle { text-anchor: middle }
.screen { font: 15px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #e6edf3 }
.head { fill: #9da7b3 } .short { fill: #f0b35a }
.command { font-weight: 600; fill: #7ee787 }
"""
WIDTH = 560
"""Width of a picture in pixels. On a phone of 390 pixels its text of 15 pixels is drawn with more than 9."""
_MARGIN, _LINE = 16, 22
_SCALE, _PART, _SECONDS = 6.9, 50, 70
"""Of the chart: pixels of a second, pixels of a part, seconds."""
RUN_COLUMNS = {"PHASE": 0, "NODES": 12, "STEP": 20, "LOSS": 31, "RESTARTS": 40, "AGE": 52}
"""Columns of a run that the picture shows, and where each begins, in characters."""
POD_COLUMNS = {"NAME": 0, "READY": 20, "STATUS": 28, "AGE": 52}
_EMPTY_AT_THE_END = {"NODES", "ETA"}
"""Columns that are empty in the row of a run that has ended."""


def draw_recovery(samples: dict[str, dict[str, dict[str, list[dict[str, float]]]]]) -> str:
    """A row a part: a dot for each kill, a bar to the median, in seconds."""
    top, bottom = 48, 52 + _PART * len(PARTS)
    title = "Seconds from SIGKILL of a node to the next finished step"
    lines = [_text(_MARGIN, 28, title, "strong")]
    for second in range(0, _SECONDS + 1, 10):
        x = _MARGIN + second * _SCALE
        lines.append(f'<path d="M{x:.1f} {top}V{bottom}" stroke="#d0d7de"/>')
        lines.append(_text(x, bottom + 20, str(second), "quiet middle"))

    for index, (part, name, color) in enumerate(PARTS):
        seconds = sorted(
            event["seconds"] for event in samples[part]["samples"]["node_kill"]
        )
        median, y = statistics.median(seconds), 84 + _PART * index
        bar = f'x="{_MARGIN}" y="{y - 9}" width="{median * _SCALE:.1f}" height="18"'
        lines.append(_text(_MARGIN + 4, y - 16, name, ""))
        lines.append(f'<rect {bar} fill="{color}" opacity="0.45"/>')
        lines += [
            f'<circle cx="{_MARGIN + one * _SCALE:.1f}" cy="{y}" r="3" fill="{color}"/>'
            for one in seconds
        ]
        end = _MARGIN + seconds[-1] * _SCALE + 10
        lines.append(_text(end, y + 5, f"{median:.2g} s", "strong"))

    count = len(samples[PARTS[0][0]]["samples"]["node_kill"])
    notes = (
        f"A dot is a kill ({count} each), a bar ends at the median.",
        "1 of 3 nodes is killed. 10M Llama, two CPU cores, gloo.",
    )
    for row, note in enumerate(notes):
        lines.append(_text(_MARGIN, bottom + 48 + 20 * row, note, "quiet"))
    return _svg(bottom + 84, lines)


def draw_kill(page: str) -> str:
    """The watched run and the deleted pod of the walk-through's section on a kill, in fixed columns."""
    section = page.split(SECTION, 1)[1].split("    $ kubectl wait", 1)[0]
    printed = [line[4:] for line in section.splitlines() if line.startswith("    ")]
    start = next(row for row, line in enumerate(printed) if line.startswith(WATCH))
    end = next(
        row for row, line in enumerate(printed) if row > start and line.startswith("$ ")
    )
    delete = next(part for part in printed[start].split("; ") if part.startswith(DELETE))

    drawn = [_command(WATCH), _cells(dict.fromkeys(RUN_COLUMNS), RUN_COLUMNS, "head")]
    heads = printed[start + 1].split()
    before: dict[str, str] = {}
    for line in printed[start + 2 : end]:
        if line.startswith("pod "):
            drawn += [_command(f"$ {delete}"), [(0, line, "screen")]]
        elif (cells := parse_row(heads, line)) != before:
            ready, _, wanted = cells["NODES"].partition("/")
            is_short = ready != wanted and ready != "0"
            drawn.append(_cells(cells, RUN_COLUMNS, "short" if is_short else ""))
            before = cells

    drawn += [
        _command(printed[end]),
        _cells(dict.fromkeys(POD_COLUMNS), POD_COLUMNS, "head"),
    ]
    heads = printed[end + 1].split()
    drawn += [
        _cells(dict(zip(heads, line.split(), strict=True)), POD_COLUMNS, "")
        for line in printed[end + 2 :]
    ]
    lines = [
        _text(_MARGIN + 9 * column, 30 + _LINE * row, text, classes)
        for row, parts in enumerate(drawn)
        for column, text, classes in parts
    ]
    note = "A recorded session; some columns are left out."
    lines.append(_text(_MARGIN, 38 + _LINE * len(drawn), note, "screen head"))
    return _svg(54 + _LINE * len(drawn), lines, background="#0d1117")


def parse_row(heads: list[str], line: str) -> dict[str, str]:
    """The cells of a printed run by column. A watch moves its columns, so a cell's place does not matter."""
    values = line.split()
    if len(values) < len(heads):
        heads_of_values = [head for head in heads if head not in _EMPTY_AT_THE_END]
    else:
        heads_of_values = heads
    return dict.fromkeys(heads, "") | dict(zip(heads_of_values, values, strict=True))


def _command(text: str) -> list[tuple[int, str, str]]:
    return [(0, text, "screen command")]


def _cells(
    cells: Mapping[str, str | None], columns: dict[str, int], classes: str
) -> list[tuple[int, str, str]]:
    """A row of cells; a cell without a value shows the name of its column."""
    return [
        (
            column,
            name if cells[name] is None else str(cells[name]),
            f"screen {classes}".strip(),
        )
        for name, column in columns.items()
    ]


def _text(x: float, y: float, text: str, classes: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}" xml:space="preserve">{escape(text)}</text>'


def _svg(height: int, lines: list[str], *, background: str = "#ffffff") -> str:
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    inner = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>\n{STYLE}</style>\n'
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{background}"/>\n{inner}\n</svg>\n'
    )


def draw_all() -> dict[Path, str]:
    """Return the content of each picture, by file."""
    return {
        FOLDER / "recovery.svg": draw_recovery(json.loads(SAMPLES.read_text("utf-8"))),
        FOLDER / "kill.svg": draw_kill(WALK.read_text("utf-8")),
    }


def main(arguments: list[str]) -> int:
    """Write the pictures; with ``--check``, only print which are out of date."""
    pictures = draw_all()
    behind = [
        file
        for file, text in pictures.items()
        if not file.is_file() or file.read_text("utf-8") != text
    ]
    if "--check" in arguments:
        for file in behind:
            print(
                f"{file.relative_to(ROOT)}: not what the records show. Run make generate."
            )
        return int(bool(behind))
    FOLDER.mkdir(exist_ok=True)
    for file in behind:
        file.write_text(pictures[file], "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
