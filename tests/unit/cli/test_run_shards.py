"""``evergrad run --nodes``: each possible number of remaining nodes can be split into replicas of the model."""

import argparse
import gc
import json
from pathlib import Path

import pytest

from evergrad_cli.main import build_whole_parser
from evergrad_manifest.errors import InputError
from evergrad_manifest.reading.validation import parse_run
from evergrad_trainer.commands import run
from evergrad_trainer.commands.run_arguments import world_sizes_of


def manifest(nodes: dict[str, int]) -> dict[str, object]:
    return {
        "apiVersion": "evergrad.dev/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": "copies"},
        "spec": {
            "nodes": nodes,
            "training": {
                "model": {
                    "config": {
                        "model_type": "llama",
                        "hidden_size": 64,
                        "num_hidden_layers": 1,
                    }
                },
                "data": {
                    "sources": [{"name": "docs", "path": "docs.jsonl"}],
                    "sequenceLength": 64,
                },
                "batching": {"globalBatchSize": 8, "microBatchSize": 1},
                "optimizer": {"learningRate": 1e-3},
                "horizon": {"steps": 10},
                "runtime": {"device": "cpu", "parallelism": "fsdp2", "shards": 2},
            },
        },
    }


def arguments(folder: Path, nodes: dict[str, int], *more: str) -> argparse.Namespace:
    (folder / "docs.jsonl").write_text('{"text": "x"}\n')
    (folder / "run.yaml").write_text(json.dumps(manifest(nodes)))
    return build_whole_parser().parse_args(
        ["run", str(folder / "run.yaml"), "--run-directory", str(folder / "run"), *more]
    )


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (("--nodes", "4", "--workers", "1"), 3),
        (("--nodes", "2", "--workers", "3"), 3),
        (("--workers", "3"), 3),
    ],
)
def test_a_group_that_could_not_continue_without_a_node_is_refused_before_the_first_step(
    options: tuple[str, ...],
    refused: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The command disables garbage collection for its process, which is the process of all tests here.
    monkeypatch.setattr(gc, "disable", lambda: None)
    with pytest.raises(InputError) as error:
        run.execute(arguments(tmp_path, {"min": 1}, *options))
    assert str(error.value) == (
        f"spec.training.runtime.shards: {refused} workers cannot be cut into copies of 2; each copy of the "
        "model is held by as many workers. Use a divisor of the workers of a node, so that every number of "
        "nodes can train."
    )


@pytest.mark.parametrize(
    ("nodes", "given", "expected"),
    [
        ({"min": 1}, 1, [2]),
        ({"min": 1}, 3, [2, 4, 6]),
        ({"min": 2, "max": 4}, 3, [4, 6]),
        ({"min": 2, "max": 4}, 1, [2]),
        ({"min": 2, "max": 4}, None, [4, 6, 8]),
        ({"min": 2}, None, [4]),
    ],
)
def test_the_numbers_of_workers_follow_the_file_and_the_requested_nodes(
    nodes: dict[str, int], given: int | None, expected: list[int]
) -> None:
    sizes = world_sizes_of(parse_run(manifest(nodes)), num_workers=2, num_nodes=given)
    assert sizes == expected
