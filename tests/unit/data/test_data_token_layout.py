"""Files of token ids whose width or byte order differs from the manifest."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.preparation.token_layout import find_layout
from evergrad_trainer.data.prepared import Prepared

Recipe = Callable[..., Training]
Prepare = Callable[..., Prepared]
SMALL = np.random.default_rng(0).integers(1, 257, 4000)
LARGE = np.random.default_rng(1).integers(0, 128_000, 4000)
FIELD = "spec.training.data.sources[0].dtype"


def recipe_of(training: Recipe, **keys: str) -> Training:
    source = {"name": "ids", "type": "tokens", "path": "ids.bin", **keys}
    return training(data={"sources": [source]})


@pytest.mark.parametrize(
    ("ids", "written", "declared", "said"),
    [
        (SMALL, "<u4", "uint16", "holds little-endian uint32 ids"),
        (SMALL, "<i8", "uint16", "holds little-endian int64 ids"),
        (SMALL, "<i8", "uint32", "holds little-endian int64 ids"),
        (SMALL, ">u2", "uint16", "holds big-endian uint16 ids"),
        (SMALL, ">u4", "uint16", "holds big-endian uint32 ids"),
        (SMALL, ">u4", "uint32", "holds big-endian uint32 ids"),
        (SMALL, ">i8", "uint16", "holds big-endian int64 ids"),
        (SMALL, ">i8", "uint32", "holds big-endian int64 ids"),
        (LARGE, "<u4", "uint16", "holds little-endian uint32 ids"),
        (LARGE, ">u4", "uint16", "holds big-endian uint32 ids"),
        (LARGE, "<i8", "uint16", "holds little-endian int64 ids"),
    ],
)
def test_ids_of_another_width_or_byte_order_are_refused_with_the_right_dtype(
    training: Recipe,
    prepared_in: Prepare,
    tmp_path: Path,
    ids: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    written: str,
    declared: str,
    said: str,
) -> None:
    ids.astype(written).tofile(tmp_path / "ids.bin")
    with pytest.raises(DataError) as refused:
        prepared_in(recipe_of(training, dtype=declared))
    assert f"ids.bin: {said}" in str(refused.value)
    assert refused.value.exit_code == 64
    assert f"{FIELD} is {declared}" in str(refused.value)
    # The remedy works, whether a field is set or the file is converted.
    name, dtype = "ids.bin", "uint32"
    if "Convert it: " in str(refused.value):
        code = str(refused.value).partition("Convert it: ")[2].partition(", and set")[0]
        code = code.replace("'ids.bin", f"'{tmp_path}/ids.bin")
        exec(code, {"numpy": np})
        name = "ids.bin.uint32"
    assert np.fromfile(tmp_path / name, "<u4").tolist() == ids.tolist()
    if ids.max() <= 256:
        (source,) = prepared_in(recipe_of(training, path=name, dtype=dtype)).sources
        assert source.train.tokens == 4000


@pytest.mark.parametrize(
    ("ids", "declared"),
    [
        (SMALL, "uint16"),
        (SMALL, "uint32"),
        (SMALL % 4, "uint16"),
        (np.zeros(4000), "uint16"),
        (np.zeros(4000), "uint32"),
        (np.tile([7, 0], 5), "uint16"),
        (np.stack([LARGE % 60_000, np.full(4000, 11)], axis=1).ravel(), "uint16"),
        (LARGE, "uint32"),
        (LARGE % 65_536, "uint16"),
    ],
)
def test_ids_of_the_dtype_in_the_manifest_are_accepted(
    ids: "np.ndarray[tuple[int], np.dtype[np.int64]]", declared: str
) -> None:
    """Numbers that alternate with one separator, a few ids with zeros, and padding are not a sign of this."""
    assert (
        find_layout(ids.astype(np.dtype(declared).newbyteorder("<")).tobytes(), declared)
        is None
    )


def test_a_numpy_file_is_refused(
    training: Recipe, prepared_in: Prepare, tmp_path: Path
) -> None:
    with (tmp_path / "ids.bin").open("wb") as file:
        np.save(file, SMALL.astype("<u2"))
    with pytest.raises(DataError, match=r"ids\.bin: is a numpy file .* read as token ids"):
        prepared_in(recipe_of(training))
