"""One exit code for a run out of those of its nodes."""

import pytest

from evergrad_trainer.node.local import combine_node_codes


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
def test_the_gravest_that_counts_wins_and_an_unsaved_state_is_never_called_saved(
    codes: list[int], expected: int
) -> None:
    assert combine_node_codes(dict(enumerate(codes))) == expected
