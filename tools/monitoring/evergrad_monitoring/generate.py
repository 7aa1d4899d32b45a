"""Writes the chart's dashboards and rules: ``python -m evergrad_monitoring.generate``. With ``--check`` it
only compares, and fails if they differ."""

import argparse
import re
import sys
from pathlib import Path
from typing import Final

from evergrad_monitoring.alerts import ALERTS, THRESHOLDS, render_rules
from evergrad_monitoring.dashboards import DASHBOARDS

_ROOT: Final = Path(__file__).resolve().parents[3]
_FILES: Final = _ROOT / "charts/evergrad/files"
_PAGE: Final = _ROOT / "docs/operate/monitoring.md"
_BEGIN, _END = "<!-- table: alerts -->\n", "<!-- end -->"


def render_table() -> str:
    """Return the table of alerts for the page."""
    lines = [
        "",
        "| Alert | Severity | Holds for | Thresholds | Summary |",
        "|---|---|---|---|---|",
    ]
    for alert in ALERTS:
        thresholds = ", ".join(f"`{key}` {THRESHOLDS[key]:g}" for key in alert.thresholds)
        says = alert.summary.replace("{{ $labels.run_namespace }}/{{ $labels.run }}", "…")
        name = f"[{alert.name}](../runbooks/{alert.name}.md)"
        holds = re.sub(r"<(\w+)>", lambda found: f"{THRESHOLDS[found[1]]:g}", alert.holds)
        lines.append(f"| {name} | {alert.severity} | {holds} | {thresholds} | {says} |")
    return "\n".join([*lines, "", ""])


def render_all() -> dict[Path, str]:
    """Return the text of each generated file."""
    made = {_FILES / f"dashboards/{uid}.json": text for uid, text in DASHBOARDS.items()}
    before, _, rest = _PAGE.read_text("utf-8").partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return {
        **made,
        _FILES / "alerts.yaml.tpl": render_rules(),
        _PAGE: f"{before}{_BEGIN}{render_table()}{_END}{after}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only")
    is_check = parser.parse_args().check
    stale = []
    for path, text in render_all().items():
        if path.exists() and path.read_text("utf-8") == text:
            continue
        stale.append(path)
        if not is_check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    for path in stale:
        print(
            f"{path.relative_to(_ROOT)}: {'is out of date; run make generate' if is_check else 'written'}"
        )
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
