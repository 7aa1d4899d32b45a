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


def texts_of(svg: str) -> list[ElementTree.Element]:
    return [
        element
        for element in ElementTree.fromstring(svg).iter()
        if element.tag.endswith("text")
    ]


def test_the_picture_of_a_kill_shows_only_its_section_in_fixed_columns(
    pictures: ModuleType,
) -> None:
    page = f"""## Before

    $ nothing

{pictures.SECTION}

    $ kubectl get pods -l <label>
    NAME  READY  STATUS  RESTARTS  AGE

    {pictures.WATCH} & sleep 1; kubectl delete pod a --wait=false; sleep 30
    NAME   PHASE     NODES   STEP     LOSS   ETA   RESTARTS   AGE
    a      Running   2/2     9/200    3.1    4s    0          7s
    a      Running   1/2     100/200   3.0    3s    1          8s
    pod "a" deleted
    a      Complete           200/200   2.4          1          15s
    a      Complete           200/200   2.4          1          15s

    $ kubectl get pods -l <label>
    NAME   READY   STATUS      RESTARTS   AGE
    a-0    0/1     Completed   0          37s

    $ kubectl wait
    met
"""
    lines: dict[float, list[tuple[float, str | None]]] = {}
    for element in texts_of(pictures.draw_kill(page)):
        place = (float(element.attrib["x"]), element.text)
        lines.setdefault(float(element.attrib["y"]), []).append(place)
    rows = [[text for _, text in places if text] for _, places in sorted(lines.items())]
    assert rows[:-1] == [
        [pictures.WATCH],
        ["PHASE", "NODES", "STEP", "LOSS", "RESTARTS", "AGE"],
        ["Running", "2/2", "9/200", "3.1", "0", "7s"],
        ["Running", "1/2", "100/200", "3.0", "1", "8s"],
        ["$ kubectl delete pod a --wait=false"],
        ['pod "a" deleted'],
        ["Complete", "200/200", "2.4", "1", "15s"],
        ["$ kubectl get pods -l <label>"],
        ["NAME", "READY", "STATUS", "AGE"],
        ["a-0", "0/1", "Completed", "37s"],
    ]
    runs = [places for places in lines.values() if len(places) == len(pictures.RUN_COLUMNS)]
    assert len(runs) == 4 and len({tuple(x for x, _ in places) for places in runs}) == 1


@pytest.mark.parametrize("name", ["kill.svg", "recovery.svg"])
def test_the_text_of_a_picture_has_nine_pixels_on_a_phone(
    root: Path, pictures: ModuleType, name: str
) -> None:
    # A page of 390 pixels leaves 358 for a picture.
    svg = (root / "docs/pictures" / name).read_text("utf-8")
    scale = 358 / pictures.WIDTH
    sizes = [int(size) for size in re.findall(r"font: (\d+)px", svg)]
    assert sizes and min(sizes) * scale >= 9
    # A letter of a terminal is 0.6 of its size wide.
    ends = [
        float(element.attrib["x"]) + 0.6 * min(sizes) * len(element.text or "")
        for element in texts_of(svg)
        if "screen" in element.attrib["class"]
    ]
    assert max(ends, default=0) <= pictures.WIDTH


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
