"""The README's pictures match the records, and its numbers match the benchmark."""

import importlib.util
import json
import re
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def pictures(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "pictures", root / "tools/docs/pictures.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_match_the_records(root: Path) -> None:
    script = [sys.executable, str(root / "tools/docs/pictures.py"), "--check"]
    result = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_a_changed_record_gives_another_picture(pictures: ModuleType) -> None:
    samples = {
        part: {"samples": {"node_kill": [{"seconds": 2.0}, {"seconds": 4.0}]}}
        for part, _, _ in pictures.PARTS
    }
    drawn = pictures.draw_recovery(samples)
    assert drawn.count("<circle") == 2 * len(pictures.PARTS)
    assert drawn.count(">3 s<") == len(pictures.PARTS)
    samples["level1"]["samples"]["node_kill"][1]["seconds"] = 5.0
    assert drawn != pictures.draw_recovery(samples)


def test_a_terminal_picture_shows_only_the_section_with_the_kill(
    pictures: ModuleType,
) -> None:
    page = (
        f"## Before\n\n    $ nothing\n\n{pictures.SECTION}\n\n    $ kubectl get <pods>\n    NAME  READY\n\n"
        "*0 s*\n\n    $ kubectl wait\n    met\n"
    )
    texts = [
        element.text
        for element in ElementTree.fromstring(pictures.draw_terminal(page)).iter()
        if element.tag.endswith("text")
    ]
    assert texts == ["$ kubectl get <pods>", "NAME  READY"]


def test_the_figures_in_the_readme_match_the_medians_of_the_benchmark(
    root: Path, pictures: ModuleType
) -> None:
    promise = (root / "README.md").read_text("utf-8").split("![", 1)[0]
    samples = json.loads(pictures.SAMPLES.read_text("utf-8"))
    medians = {
        part: statistics.median(
            event["seconds"] for event in samples[part]["samples"]["node_kill"]
        )
        for part in ("level1", "stock_tuned", "stock_default")
    }
    assert re.findall(r"\*\*([\d.]+ s)\*\*", promise) == [
        f"{median:.2g} s" for median in medians.values()
    ]
    assert {event["steps_lost"] for event in samples["level1"]["samples"]["node_kill"]} == {
        0
    }, "the README says that no finished step is repeated"
