"""Windows of prepared token files: each token is a label once, for any shards; and files that are damaged
later."""

import errno
import gc
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evergrad_trainer.base.errors import DataError, VolumeError
from evergrad_trainer.data import token_files
from evergrad_trainer.data.prepared import Dtype, Shard, TokenSequence
from evergrad_trainer.data.token_files import TokenReader, count_windows

END = 256


def write_shards(
    directory: Path, sizes: Sequence[int], *, dtype: Dtype = "uint16", before: int = 0
) -> TokenSequence:
    """Tokens 0, 1, 2, … over files of these sizes; each file begins with ``before`` tokens that are not part
    of it."""
    shards, first = [], 0
    for number, size in enumerate(sizes):
        path = directory / f"{dtype}-{number}.tokens"
        np.concatenate([np.full(before, 9), np.arange(first, first + size)]).astype(
            np.dtype(dtype).newbyteorder("<")
        ).tofile(path)
        shards.append(Shard(path, before, size))
        first += size
    return TokenSequence(dtype, tuple(shards))


def reader_of(sequence: TokenSequence, length: int) -> TokenReader:
    return TokenReader(sequence, sequence_length=length, end_of_document=END)


@pytest.mark.acceptance("number-C-60")
@pytest.mark.capability("C-60")
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8).filter(
        lambda sizes: sum(sizes) >= 2
    ),
    length=st.integers(1, 50),
    before=st.integers(0, 3),
    dtype=st.sampled_from(["uint16", "uint32"]),
)
def test_every_token_but_the_first_is_a_label_exactly_once(
    tmp_path: Path, sizes: list[int], length: int, before: int, dtype: Dtype
) -> None:
    sequence = write_shards(tmp_path, sizes, before=before, dtype=dtype)
    reader, total = reader_of(sequence, length), sum(sizes)
    windows = reader.read(range(reader.num_windows))
    assert windows.tokens.shape == (reader.num_windows, length + 1)
    labels = [
        token
        for row, count in zip(windows.tokens, windows.lengths, strict=True)
        for token in row[1:count]
    ]
    assert labels == list(range(1, total))
    inputs = [
        token
        for row, count in zip(windows.tokens, windows.lengths, strict=True)
        for token in row[: count - 1]
    ]
    assert inputs == list(range(total - 1))
    filled = windows.tokens[-1][windows.lengths[-1] :]
    assert (filled == END).all()
    reader.close()


@pytest.mark.capability("T-31")
@pytest.mark.parametrize(
    ("tokens", "length", "windows"),
    [
        (0, 8, 0),
        (1, 8, 0),
        (2, 8, 1),
        (9, 8, 1),
        (10, 8, 2),
        (17, 8, 2),
        (10**15, 1000, 10**12),
    ],
)
def test_the_number_of_windows_follows_from_the_tokens(
    tokens: int, length: int, windows: int
) -> None:
    assert count_windows(tokens, length) == windows


def test_windows_are_returned_in_the_requested_order(tmp_path: Path) -> None:
    reader = reader_of(write_shards(tmp_path, [50, 50]), 10)
    assert reader.read([7, 0, 7]).tokens[:, 0].tolist() == [70, 0, 70]
    assert reader.read([]).tokens.shape == (0, 11)
    for window in (-1, 10):
        with pytest.raises(IndexError, match="of 10"):
            reader.read([window])


def test_large_ids_are_read_unchanged(tmp_path: Path) -> None:
    np.array([2**32 - 1, 2**31, 5], dtype="<u4").tofile(tmp_path / "f")
    sequence = TokenSequence("uint32", (Shard(tmp_path / "f", 0, 3),))
    assert reader_of(sequence, 2).read([0]).tokens.tolist() == [[2**32 - 1, 2**31, 5]]


def test_many_shards_need_few_open_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "_OPEN_FILES", 3)
    reader = reader_of(write_shards(tmp_path, [10] * 20), 10)
    before = len(os.listdir("/proc/self/fd"))
    order = np.random.default_rng(0).integers(0, reader.num_windows, 200).tolist()
    assert reader.read(order).tokens[:, 0].tolist() == [window * 10 for window in order]
    assert len(os.listdir("/proc/self/fd")) - before <= 3
    del reader
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_closed_reader_reopens_its_files(tmp_path: Path) -> None:
    reader = reader_of(write_shards(tmp_path, [30]), 10)
    reader.read([0])
    reader.close()
    assert reader.read([1]).tokens[0, 0] == 10


@pytest.mark.parametrize("left", [0, 31, 70])
def test_a_file_that_was_truncated_after_opening_is_an_error_with_its_name(
    tmp_path: Path, left: int
) -> None:
    sequence = write_shards(tmp_path, [40, 41])
    reader = reader_of(sequence, 10)
    reader.read([0, 7])
    os.truncate(sequence.shards[1].path, left)
    assert reader.read([0]).tokens[0, 0] == 0
    with pytest.raises(DataError) as caught:
        reader.read([7])
    path = sequence.shards[1].path
    assert str(caught.value).startswith(
        f"{path}: ends at byte {left}; a sample needs those up to 82; it was removed or cut short"
    )
    assert f"delete the directory {tmp_path} and prepare again" in str(caught.value)


def test_a_file_removed_before_it_was_opened_is_an_error_with_its_name(
    tmp_path: Path,
) -> None:
    sequence = write_shards(tmp_path, [40, 40])
    sequence.shards[1].path.unlink()
    with pytest.raises(DataError, match="cannot be read"):
        reader_of(sequence, 10).read([7])


def test_threads_can_share_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "_OPEN_FILES", 2)
    reader = reader_of(write_shards(tmp_path, [10] * 10), 10)
    wrong: list[int] = []

    def check(seed: int) -> None:
        windows = np.random.default_rng(seed).integers(0, reader.num_windows, 500).tolist()
        wrong.extend(
            window
            for window in windows
            if reader.read([window]).tokens[0, 0] != window * 10
        )

    threads = [threading.Thread(target=check, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between tries, which take no time here."""
    made: list[float] = []
    monkeypatch.setattr("evergrad_trainer.base.volume.time.sleep", made.append)
    return made


def failing(monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> list[int]:
    """``os.preadv`` raises so often first; the descriptors it was called with."""
    read, called = os.preadv, list[int]()

    def fail(descriptor: int, *arguments: Any) -> int:
        called.append(descriptor)
        if len(called) <= times:
            raise OSError(number, os.strerror(number))
        return read(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", fail)
    return called


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_temporary_read_error_is_retried_after_opening_the_file_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float], number: int
) -> None:
    reader = reader_of(write_shards(tmp_path, [40]), 8)
    opened, open_ = list[Any](), os.open
    monkeypatch.setattr(
        os, "open", lambda *arguments: opened.append(arguments) or open_(*arguments)
    )
    failing(monkeypatch, number, 3)
    assert reader.read([1]).tokens.tolist() == [list(range(8, 17))]
    assert len(opened) == 4 and pauses == sorted(pauses) and len(pauses) == 3


def test_a_volume_that_stays_unavailable_is_a_host_fault_and_not_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    reader = reader_of(write_shards(tmp_path, [40]), 8)
    failing(monkeypatch, errno.ESTALE, 10**6)
    with pytest.raises(
        VolumeError, match="tokens: cannot be read; Stale file handle"
    ) as raised:
        reader.read([1])
    assert raised.value.exit_code == 70
    assert 15 < sum(pauses) < 60


def test_a_file_that_seems_too_short_is_checked_again_before_it_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    sequence = write_shards(tmp_path, [40])
    path = sequence.shards[0].path
    whole = path.read_bytes()
    os.truncate(path, 20)
    # The client learns of the whole file during the pause.
    monkeypatch.setattr(
        "evergrad_trainer.base.volume.time.sleep", lambda seconds: path.write_bytes(whole)
    )
    assert reader_of(sequence, 8).read([1]).tokens.tolist() == [list(range(8, 17))]
