"""Documents of a window that see nothing of each other: positions and labels by hand."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from evergrad_manifest.training import Training
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.data.token_source import IGNORE_INDEX, TokenSource, positions_behind
from evergrad_trainer.data.tokenizers import BYTE_END

_, E = IGNORE_INDEX, BYTE_END


def test_positions_restart_after_each_document_end() -> None:
    ends = np.array([[0, 0, 1, 0, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0, 1]], dtype=np.bool_)
    assert positions_behind(ends).tolist() == [
        [0, 1, 2, 0, 1, 0, 0, 1],
        [0, 0, 1, 2, 3, 4, 5, 6],
    ]


def test_an_end_predicts_nothing_and_a_split_document_restarts(
    training: Callable[..., Training],
    documents: Callable[[Path, Sequence[str]], Path],
    prepared_in: Callable[..., Prepared],
    tmp_path: Path,
) -> None:
    documents(tmp_path / "docs.jsonl", ["ab", "cdefgh", "i"])
    recipe = training(data={"sequenceLength": 8, "packing": "documents"})
    source = prepared_in(recipe).sources[0]
    # a b E c d e f g | h E i E: the last token of a window is the first of the next one.
    opened = TokenSource(
        source, source.train, sequence_length=8, end_of_document=E, keeps_apart=True
    )
    rows = opened.read([0, 1])
    inputs, labels, positions = (
        rows.tensors[name].tolist() for name in ("input_ids", "labels", "position_ids")
    )
    a, b, c, d, e, f, g, h, i = b"abcdefghi"
    assert inputs == [[a, b, E, c, d, e, f, g], [h, E, i, E, E, E, E, E]]
    assert labels == [[b, E, _, d, e, f, g, h], [E, _, E, _, _, _, _, _]]
    assert positions == [[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 1, 0, 0, 0, 0]]
    assert rows.weight == 9


@pytest.mark.parametrize("is_apart", [True, False])
def test_windows_have_the_same_tokens_with_and_without_separated_documents(
    training: Callable[..., Training],
    documents: Callable[[Path, Sequence[str]], Path],
    prepared_in: Callable[..., Prepared],
    tmp_path: Path,
    topics: list[str],
    is_apart: bool,
) -> None:
    documents(tmp_path / "docs.jsonl", topics)
    source = prepared_in(training()).sources[0]
    plain, other = (
        TokenSource(
            source, source.train, sequence_length=16, end_of_document=E, keeps_apart=one
        )
        for one in (False, is_apart)
    )
    assert len(plain) == len(other)
    items = list(range(len(plain)))
    one, two = plain.read(items), other.read(items)
    assert (one.tensors["input_ids"] == two.tensors["input_ids"]).all()
    assert ("position_ids" in two.tensors) == is_apart
    # All that is missing are the labels of the ends.
    is_end = one.tensors["input_ids"] == E
    missing = int((is_end & (one.tensors["labels"] != _)).sum())
    assert one.weight - two.weight == (missing if is_apart else 0)
    assert missing > 10
