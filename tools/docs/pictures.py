"""Draws the README's pictures from recorded data: recovery compared with torchrun, and a kill on a cluster.

An SVG contains no date and no random name, so that equal records give equal files. `make generate` writes
them. With `--check`, the exit code is 1 if a file differs from what would be drawn.
"""

import json
import statistics
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs/pictures"
SAMPLES = ROOT / "tools/benchmarks/results/recovery-samples.json"
WALK = ROOT / "docs/start/walkthrough.md"
SECTION = "## A pod is deleted while the run trains"
PARTS = (
    ("level1", "Evergrad, a recipe", "#00796b"),
    ("level2", "Evergrad, your script", "#26a69a"),
    ("stock_tuned", "torchrun, shortest timers", "#8d6e63"),
    ("stock_default", "torchrun, default timers", "#b0896f"),
)
"""Parts of the benchmark, with the label and colour of each."""
STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2328; white-space: pre }
.strong { font-weight: 600 } .quiet { fill: #57606a }
.end { text-anchor: end } .middle { text-anchor: middle }
.screen { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #e6edf3 }
.command { font-weight: 600; fill: #7ee787 }
"""
_LEFT, _WIDTH, _ROW, _SECONDS = 220, 460, 38, 70


def draw_recovery(samples: dict[str, dict[str, dict[str, list[dict[str, float]]]]]) -> str:
    """Return one row per part: a dot for each kill, and a bar that ends at the median, in seconds."""
    scale = _WIDTH / _SECONDS
    bottom = 56 + _ROW * len(PARTS)
    title = "Seconds from SIGKILL of 1 of 3 nodes to the next finished step"
    lines = [_text(20, 28, title, "strong")]
    for second in range(0, _SECONDS + 1, 10):
        x = _LEFT + second * scale
        lines.append(f'<path d="M{x:.1f} 44V{bottom}" stroke="#d0d7de"/>')
        lines.append(_text(x, bottom + 18, str(second), "quiet middle"))

    for index, (part, name, color) in enumerate(PARTS):
        seconds = sorted(
            event["seconds"] for event in samples[part]["samples"]["node_kill"]
        )
        median, y = statistics.median(seconds), 66 + _ROW * index
        bar = f'x="{_LEFT}" y="{y - 9}" width="{median * scale:.1f}" height="18"'
        lines.append(_text(_LEFT - 12, y + 4, name, "end"))
        lines.append(f'<rect {bar} fill="{color}" opacity="0.45"/>')
        lines += [
            f'<circle cx="{_LEFT + one * scale:.1f}" cy="{y}" r="3" fill="{color}"/>'
            for one in seconds
        ]
        lines.append(
            _text(_LEFT + seconds[-1] * scale + 10, y + 4, f"{median:.2g} s", "strong")
        )

    count = len(samples[PARTS[0][0]]["samples"]["node_kill"])
    note = f"A dot is a kill ({count} each), a bar ends at the median. 10M Llama, two CPU cores, gloo."
    lines.append(_text(20, bottom + 44, note, "quiet"))
    return _svg(780, bottom + 60, lines)


def draw_terminal(page: str) -> str:
    """Return the commands of the walk-through's section on a kill, and their output."""
    section = page.split(SECTION, 1)[1].split("    $ kubectl wait", 1)[0]
    shown = [line[4:] for line in section.splitlines() if line.startswith("    ")]
    width = 32 + round(7.25 * max(len(line) for line in shown))
    lines = [
        _text(
            16,
            28 + 18 * row,
            line,
            "screen command" if line.startswith("$ ") else "screen",
        )
        for row, line in enumerate(shown)
    ]
    return _svg(width, 28 + 18 * len(shown), lines, background="#0d1117")


def _text(x: float, y: float, text: str, classes: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}" xml:space="preserve">{escape(text)}</text>'


def _svg(width: int, height: int, lines: list[str], *, background: str = "#ffffff") -> str:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    inner = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>\n{STYLE}</style>\n'
        f'<rect width="{width}" height="{height}" rx="8" fill="{background}"/>\n{inner}\n</svg>\n'
    )


def draw_all() -> dict[Path, str]:
    """Return the content of each picture, by file."""
    return {
        FOLDER / "recovery.svg": draw_recovery(json.loads(SAMPLES.read_text("utf-8"))),
        FOLDER / "kill.svg": draw_terminal(WALK.read_text("utf-8")),
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
