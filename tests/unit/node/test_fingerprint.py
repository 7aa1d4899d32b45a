"""Nodes with different scripts, devices or images have different fingerprints; files that a script writes do
not matter."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from evergrad_coordinator.protocol import Hello
from evergrad_coordinator.rules.admission import refuse
from evergrad_coordinator.rules.state import GroupSettings
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.envelope.script import Script
from evergrad_trainer.node import fingerprint as module
from evergrad_trainer.node.fingerprint import fingerprint, fingerprint_of_plan, hash_script
from evergrad_trainer.worker.session import SessionPlan

FILES = {
    "train.py": "import torch, helper\nfrom package import part\n",
    "helper.py": "from package.deep import thing\n",
    "package/__init__.py": "",
    "package/part.py": "from . import beside\n",
    "package/beside.py": "",
    "package/deep/__init__.py": "from .thing import x\n",
    "package/deep/thing.py": "x = 1\n",
    "config.yaml": "a: 1\n",
}


def write(folder: Path, **changes: str) -> Path:
    for name, text in {**FILES, **changes}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


COMMANDS = [
    ["train.py", "--config", "config.yaml"],
    ["-m", "train", "config.yaml"],
    ["python3", "train.py", "config.yaml"],
]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("changed", sorted(FILES))
def test_a_change_of_any_source_file_changes_the_script_hash(
    tmp_path: Path, command: list[str], changed: str
) -> None:
    script = Script(command=tuple(command))
    one, other = write(tmp_path / "one"), write(tmp_path / "other")
    assert hash_script(script, one) == hash_script(script, other), "wherever it lies"
    write(other, **{changed: FILES[changed] + "# another version\n"})
    assert hash_script(script, one) != hash_script(script, other)


@pytest.mark.parametrize("command", COMMANDS)
def test_files_that_a_script_writes_do_not_change_its_hash(
    tmp_path: Path, command: list[str]
) -> None:
    script = Script(command=(*command, "state.pt"))
    before = hash_script(script, write(tmp_path))
    write(
        tmp_path,
        **{
            "runs/copy/train.py": "x",
            "state.pt": "y",
            "written.py": "z",
            "package/notes.txt": "n",
        },
    )
    assert hash_script(script, tmp_path) == before


@pytest.mark.parametrize(
    "text",
    [
        "import train\nimport helper\n",
        "not python (\n",
        "from ....... import a\n",
        "import a.b.c\n",
    ],
)
def test_any_text_has_a_hash(tmp_path: Path, text: str) -> None:
    script = Script(command=("train.py",))
    assert len(hash_script(script, write(tmp_path, **{"train.py": text}))) == 16
    assert len(hash_script(script, tmp_path / "nowhere")) == 16


def test_device_and_image_are_part_of_the_shared_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TrainingRun.model_validate(
        {
            "apiVersion": "evergrad.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": "r"},
            "spec": {"nodes": {"min": 1}, "script": {"command": ["train.py"]}},
        }
    )
    monkeypatch.delenv(module.IMAGE_DIGEST_VARIABLE, raising=False)
    found = []
    for count in (0, 1):
        monkeypatch.setattr(module, "count_accelerators", lambda count=count: count)
        found.append(fingerprint(run, tmp_path))
    assert [one.pop("device") for one in found] == ["cpu", "cuda"]
    assert found[0] == found[1] and found[0].keys() == {
        "torch",
        "evergrad",
        "configuration",
        "transformers",
        "script",
    }
    monkeypatch.setenv(module.IMAGE_DIGEST_VARIABLE, "sha256:1234")
    assert fingerprint(run, tmp_path)["image"] == "sha256:1234"


@pytest.mark.parametrize("name", ["mine.py", "mine/__init__.py"])
def test_the_node_that_writes_a_carried_task_has_the_same_fingerprint_as_nodes_that_find_it(
    tmp_path: Path, name: str
) -> None:
    run = TrainingRun.model_validate(
        {
            "apiVersion": "evergrad.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {"name": "docs"},
            "spec": {
                "training": {
                    "recipe": "mine:Task",
                    "files": {name: "ONE = 1\n"},
                    "model": {"config": {"model_type": "llama"}},
                    "data": {
                        "sources": [{"name": "docs", "path": "docs.jsonl"}],
                        "sequenceLength": 16,
                    },
                    "batching": {"globalBatchSize": 4, "microBatchSize": 2},
                    "optimizer": {"learningRate": 1e-3},
                    "horizon": {"steps": 3},
                }
            },
        }
    )
    first = fingerprint(run, tmp_path)
    assert fingerprint(run, tmp_path) == first


def test_nodes_with_other_data_sets_or_lengths_are_refused_by_name_and_both_values() -> (
    None
):
    def hello(data: str, steps: int, *evaluation: str) -> Hello:
        sets = [SimpleNamespace(name="wiki", fingerprint=one) for one in evaluation]
        plan = SimpleNamespace(
            numbers=SimpleNamespace(total_steps=steps),
            opened=SimpleNamespace(data=SimpleNamespace(fingerprint=data, evaluation=sets)),
            task_hash="",
        )
        shared = {"torch": "2", **fingerprint_of_plan(cast(SessionPlan, plan))}
        return Hello(
            "docs", "0", "i", "127.0.0.1", 1, "in-process", fingerprint=shared, token="t"
        )

    settings = GroupSettings("docs", min_nodes=1, max_nodes=2, expect=2, token="t")
    first = hello("aaaa", 100, "eeee")
    assert (
        refuse(hello("aaaa", 100, "eeee"), settings, fingerprint=first.fingerprint) is None
    )
    for other, said in (
        (
            hello("bbbb", 100, "eeee"),
            "hello.fingerprint.data: bbbb; the group's first member has aaaa.",
        ),
        (
            hello("aaaa", 90, "eeee"),
            "hello.fingerprint.steps: 90; the group's first member has 100.",
        ),
        (hello("aaaa", 100, "ffff"), "hello.fingerprint.evaluation: "),
        (hello("aaaa", 100), "hello.fingerprint.evaluation: "),
    ):
        refused = refuse(other, settings, fingerprint=first.fingerprint)
        assert refused is not None and refused.reason == "FingerprintDiffers"
        assert said in refused.message
