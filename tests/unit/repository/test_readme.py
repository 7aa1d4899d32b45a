"""The README shows a run, and the runs that it and the pages show are valid."""

import re
from pathlib import Path

import pytest

from evergrad_manifest.reading.loader import load_manifest

ROOT = Path(__file__).resolve().parents[3]
_BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
MANIFESTS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in _PAGES
    for number, block in enumerate(_BLOCK.findall(page.read_text("utf-8")))
    if "\nkind: TrainingRun\n" in block
    and re.search(r"^  (training|script):", block, re.MULTILINE)
]


def test_the_readme_shows_a_run() -> None:
    assert any(manifest.id == "README.md-0" for manifest in MANIFESTS)


@pytest.mark.parametrize("block", MANIFESTS)
def test_each_complete_run_on_a_page_is_valid(block: str, tmp_path: Path) -> None:
    file = tmp_path / "shown.yaml"
    file.write_text(block, "utf-8")
    load_manifest(file)
