"""One pass over a source file: hash, lines, chunks and ids; errors in a file; and the stored result."""

import gzip
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.preparation import scan_cache, sources
from evergrad_trainer.data.preparation.content import Content
from evergrad_trainer.data.preparation.files import SourceEntry, find_files
from evergrad_trainer.data.preparation.sources import (
    Scan,
    raise_if_out_of_vocabulary,
    scan_file,
)


def source_of(path: Path, *, kind: str = "jsonl", dtype: str = "uint16") -> SourceEntry:
    return SourceEntry("spec.training.data.sources[0]", "docs", path, kind, "text", dtype)  # type: ignore[arg-type]


def scan(path: Path, **options: str) -> Scan:
    return scan_file(source_of(path, **options), path, on_bytes=lambda _: None)


def scan_cached(
    source: SourceEntry, directory: Path, *, on_bytes: Callable[[int], None]
) -> Content:
    """As prepare does it, for a source of one file."""
    return scan_cache.scan_cached(source, [source.path], directory, on_bytes=on_bytes)


def age(path: Path, seconds: float = 60) -> None:
    """Make a file look as if it was last written some time ago."""
    then = time.time() - seconds
    os.utime(path, (then, then))


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    lines=st.lists(
        st.binary(max_size=40).map(lambda data: data.replace(b"\n", b" ")),
        min_size=1,
        max_size=30,
    ),
    ends=st.booleans(),
    chunk=st.integers(1, 100),
    block=st.integers(1, 64),
)
def test_chunks_are_whole_lines_that_cover_the_file(
    lines: list[bytes],
    ends: bool,
    chunk: int,
    block: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = b"\n".join(lines) + (b"\n" if ends else b"")
    if not data or data.startswith(
        (
            b"\x1f\x8b",
            b"BZh",
            b"PK",
            b"PAR1",
            b"\xff\xfe",
            b"\xfe\xff",
            b"\xfd7",
            b"\x28\xb5",
        )
    ):
        return
    (tmp_path / "f").write_bytes(data)
    monkeypatch.setattr(sources, "SMALLEST_CHUNK", chunk)
    monkeypatch.setattr(sources, "_BLOCK", block)
    found = scan(tmp_path / "f")
    assert found.content_hash == xxhash.xxh3_128_hexdigest(data)
    assert found.lines == data.count(b"\n") + (not data.endswith(b"\n"))
    assert b"".join(data[piece.start : piece.end] for piece in found.spans) == data
    assert sum(piece.size for piece in found.spans) == found.size == len(data)
    chunks = Content(((tmp_path / "f", found),)).chunks
    assert [piece.number for piece in chunks] == list(range(len(found.spans)))
    for piece in found.spans:
        assert piece.first_line == data[: piece.start].count(b"\n") + 1
        assert data[piece.end - 1 : piece.end] == b"\n" or piece.end == len(data)
    for piece in found.spans[:-1]:
        assert piece.end - piece.start >= chunk
        assert b"\n" not in data[piece.start + chunk : piece.end - 1]


def test_a_large_file_has_a_bounded_number_of_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(b"line\n" * 20_000)
    monkeypatch.setattr(sources, "SMALLEST_CHUNK", 16)
    monkeypatch.setattr(sources, "MOST_CHUNKS", 50)
    assert 40 <= len(scan(tmp_path / "f").spans) <= 50


@pytest.mark.acceptance("input-O-34")
def test_problems_of_a_file_are_reported_with_its_path(tmp_path: Path) -> None:
    def message(name: str, **options: str) -> str:
        _, (problem,) = find_files(source_of(tmp_path / name, **options))
        return str(problem).removeprefix(f"{tmp_path / name}: ")

    (tmp_path / "empty").touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "odd").write_bytes(b"123")
    (tmp_path / "single").write_bytes(b"12")
    (tmp_path / "fine").write_bytes(b"1234")
    field = "spec.training.data.sources[0]"
    relative = "Check the path; it is relative to the manifest's directory."
    assert message("none") == f"does not exist; {field}.path names it. {relative}"
    assert (
        message("")
        == f"contains no file whose name ends in .jsonl or .ndjson (or those with .gz or .zst); {field}.path "
        f"names it. Check the folder, or name its files by a pattern, such as {tmp_path}/*."
    )
    assert message("empty").startswith(f"is empty; {field}.path names it.")
    assert message("pipe").startswith("is not a regular file")
    assert message("fine/below").startswith("cannot be read; Not a directory")
    assert message("odd", kind="tokens").startswith(
        f"ends within a token id; its size, 3 bytes, is not a multiple of 2 ({field}.dtype is uint16)"
    )
    assert message("single", kind="tokens").startswith("contains a single token id")
    assert message("fine", kind="tokens", dtype="uint32").startswith(
        "contains a single token id"
    )
    fine = tmp_path / "fine"
    assert find_files(source_of(fine, kind="tokens")) == ((fine,), [])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_reported(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0)
    _, (problem,) = find_files(source_of(tmp_path / "secret"))
    assert "permission denied" in str(problem)


@pytest.mark.parametrize(
    ("data", "what", "remedy"),
    [
        (
            gzip.compress(gzip.compress(b"{}\n", mtime=0), mtime=0),
            "is compressed twice (gzip)",
            "Decompress it once.",
        ),
        (
            '{"text": "a"}\n'.encode("utf-16"),
            "is UTF-16 text",
            "Convert it to UTF-8, e.g. with iconv.",
        ),
        (b"PAR1....", "is a Parquet file", "Set type: parquet."),
        (b"PK\x03\x04....", "is a zip archive", "Unpack it."),
    ],
)
def test_a_file_of_another_kind_is_detected(
    tmp_path: Path, data: bytes, what: str, remedy: str
) -> None:
    (tmp_path / "f").write_bytes(data)
    with pytest.raises(DataError) as caught:
        scan(tmp_path / "f")
    assert str(caught.value).startswith(f"{tmp_path / 'f'}: {what}")
    assert str(caught.value).endswith(remedy)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_the_largest_id_of_a_tokens_file_is_found_at_any_position(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.arange(1000) % 250
    ids[777] = 300
    (tmp_path / "f").write_bytes(ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    monkeypatch.setattr(sources, "_BLOCK", 64)
    found = scan(tmp_path / "f", kind="tokens", dtype=dtype)
    assert found.largest_id == 300
    source = source_of(tmp_path / "f", kind="tokens", dtype=dtype)
    raise_if_out_of_vocabulary(source, source.path, found, 301)
    with pytest.raises(DataError) as caught:
        raise_if_out_of_vocabulary(source, source.path, found, 257)
    assert str(caught.value).startswith(
        f"{tmp_path / 'f'}: token 777 is 300; the tokenizer has the ids 0 to 256; the largest in "
        "the file is 300. "
        f"Check spec.training.data.sources[0].dtype ({dtype})"
    )


def counting(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often a file was really read."""
    calls: list[Path] = []
    real = scan_cache.scan_file
    monkeypatch.setattr(
        scan_cache,
        "scan_file",
        lambda source, path, **rest: calls.append(path) or real(source, path, **rest),
    )
    return lambda: len(calls)


def test_an_unchanged_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_text('{"text": "a"}\n')
    monkeypatch.setattr(scan_cache, "is_settled", lambda _: True)
    reads = counting(monkeypatch)
    first = scan_cached(source_of(path), tmp_path / "scans", on_bytes=lambda _: None)
    assert (
        scan_cached(source_of(path), tmp_path / "scans", on_bytes=lambda _: None) == first
    )
    assert reads() == 1
    ((_, one),) = first.files
    assert Scan.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_a_touched_file_is_read_again_and_a_change_of_equal_size_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_text('{"text": "a"}\n')
    monkeypatch.setattr(scan_cache, "is_settled", lambda _: True)
    reads = counting(monkeypatch)
    first = scan_cached(source_of(path), tmp_path / "scans", on_bytes=lambda _: None)
    age(path)
    assert (
        scan_cached(
            source_of(path), tmp_path / "scans", on_bytes=lambda _: None
        ).content_hash
        == first.content_hash
    )
    stamp = path.stat()
    path.write_text('{"text": "b"}\n')
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert (
        scan_cached(
            source_of(path), tmp_path / "scans", on_bytes=lambda _: None
        ).content_hash
        != first.content_hash
    )
    assert reads() == 3


def test_a_recently_written_file_is_not_trusted_by_its_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_text('{"text": "a"}\n')
    reads = counting(monkeypatch)
    for _ in range(2):
        scan_cached(source_of(path), tmp_path / "scans", on_bytes=lambda _: None)
    assert reads() == 2
    assert not (tmp_path / "scans").exists()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": 99, "scan": {}}',
        '{"format": 2, "scans": {"f": {"stat": {}}}}',
        '{"format": 2, "scans": []}',
    ],
)
def test_a_damaged_scan_cache_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    path = tmp_path / "f"
    path.write_text('{"text": "a"}\n')
    monkeypatch.setattr(scan_cache, "is_settled", lambda _: True)
    first = scan_cached(source_of(path), tmp_path / "scans", on_bytes=lambda _: None)
    (memory,) = (tmp_path / "scans").iterdir()
    memory.write_text(content)
    assert (
        scan_cached(source_of(path), tmp_path / "scans", on_bytes=lambda _: None) == first
    )


def test_an_unwritable_scan_cache_raises_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f"
    path.write_text('{"text": "a"}\n')
    monkeypatch.setattr(scan_cache, "is_settled", lambda _: True)
    (tmp_path / "scans").write_text("a file is in the way")
    assert (
        scan_cached(source_of(path), tmp_path / "scans", on_bytes=lambda _: None).lines == 1
    )


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text('{"text": "a"}\n')

    def append(_: int) -> None:
        with path.open("a") as file:
            file.write('{"text": "b"}\n')

    with pytest.raises(DataError, match="changed while it was being prepared"):
        scan_file(source_of(path), path, on_bytes=append)
