"""One exit code for a run, from the exit codes of its nodes."""

import time
from pathlib import Path

import pytest
from patience import PATIENCE

from evergrad_trainer.node.local import LocalNodes, combine_node_codes


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], 0),
        ([75, 75], 75),
        ([75, 76], 76),
        ([76, 75, 75], 76),
        ([0, 75], 0),
        ([64, 70], 64),
        ([70, 75], 70),
        ([], 70),
    ],
    ids=str,
)
def test_the_most_severe_exit_code_wins_and_an_unsaved_state_is_never_reported_as_saved(
    codes: list[int], expected: int
) -> None:
    assert combine_node_codes(dict(enumerate(codes))) == expected


def test_a_node_that_fails_while_others_train_is_reported_immediately_and_at_the_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def be_node(index: int) -> int:
        while index == 0 and not (tmp_path / "end").exists():
            time.sleep(0.01)
        return 64 if index == 1 else 0

    nodes = LocalNodes(be_node, 2)
    nodes.start()
    try:
        deadline = time.monotonic() + PATIENCE
        while 1 not in nodes.ended and time.monotonic() < deadline:
            nodes.poll()
            time.sleep(0.01)
        assert (
            "warning: node 1 ended with exit code 64 and is not replaced: the run continues with 1 of 2 nodes"
            in capfd.readouterr().err
        )
        (tmp_path / "end").touch()
        while not nodes.are_over and time.monotonic() < deadline:
            nodes.poll()
            time.sleep(0.01)
    finally:
        nodes.close()
    assert nodes.ended == {0: 0, 1: 64}
    assert nodes.describe_missing().startswith(
        "warning: the run ended without node 1 (exit code 64): 1 of 2 nodes trained to its end"
    )


def test_a_run_whose_nodes_all_fail_is_not_reported_as_ended_without_some() -> None:
    nodes = LocalNodes(lambda index: 0, 2)
    nodes.ended.update({0: 70, 1: 70})
    assert nodes.describe_missing() == ""
