"""Requirements of the examples on a cluster: each overlay gives a run whose paths can exist in a pod, and the
pages create the objects that it names."""

import re
from pathlib import Path

import pytest
import yaml

from evergrad_cli.cluster.commands.placement import placement_problems, placement_warnings
from evergrad_manifest.reading.loader import load_manifest
from evergrad_manifest.training import RECIPES

ROOT = Path(__file__).resolve().parents[3]
SUBMIT = re.compile(r"^ +evergrad submit (\S+) --overlay (\S+) --wait$", re.MULTILINE)
MAPS = re.compile(r"kubectl create configmap (\S+)")
PAGES = sorted(
    page
    for page in ROOT.glob("examples/*/README.md")
    if SUBMIT.search(page.read_text("utf-8"))
)


def test_each_recipe_has_a_cluster_example() -> None:
    recipes = {
        yaml.safe_load((ROOT / file).read_text("utf-8"))["spec"]["training"]["recipe"]
        for page in PAGES
        for file, _ in SUBMIT.findall(page.read_text("utf-8"))
    }
    assert recipes == set(RECIPES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_runs_on_a_page_use_paths_in_a_pod_and_data_from_its_config_maps(
    page: Path,
) -> None:
    text = page.read_text("utf-8")
    (folders,) = re.findall(r"for folder in ([a-z ]+);", text) or [""]
    made = {
        name.replace("$folder", folder)
        for name in MAPS.findall(text)
        for folder in (folders.split() if "$folder" in name else [""])
    }
    named: set[str] = set()
    for file, overlay in SUBMIT.findall(text):
        run = load_manifest(ROOT / file, overlays=[ROOT / overlay]).run
        assert placement_problems(run) == placement_warnings(run) == []
        for volume in run.spec.template.volumes:
            sources = volume.get("projected", {}).get("sources", [volume])
            named |= {one["configMap"]["name"] for one in sources}
    assert named == made


def test_the_reader_of_a_volume_runs_under_the_restricted_profile() -> None:
    pod = yaml.safe_load((ROOT / "examples/reader.yaml").read_text("utf-8"))
    (container,) = pod["spec"]["containers"]
    security = container["securityContext"]
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert all(mount["readOnly"] for mount in container["volumeMounts"])
