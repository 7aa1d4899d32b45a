"""Compressed files: the same content, and an error with file and position if one is damaged."""

import gzip
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.preparation.unpacking import Unpacked, is_packed, open_content

Pack = Callable[[bytes], bytes]


def pack_gzip(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def pack_zstandard(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


both = pytest.mark.parametrize("pack", [pack_gzip, pack_zstandard])
DATA = random.Random(0).randbytes(300_000) + b"\n" * 3_000_000


def content(path: Path, *, size: int = 10_007) -> bytes:
    with open_content(path) as file:
        parts = []
        while data := file.read(size):
            parts.append(data)
    return b"".join(parts)


@both
def test_a_compressed_file_is_decompressed_to_its_content(
    tmp_path: Path, pack: Pack
) -> None:
    path = tmp_path / "any name"
    for data in (DATA, b"x", b""):
        path.write_bytes(pack(data))
        assert is_packed(path)
        assert content(path) == data
        path.write_bytes(data)
        assert not is_packed(path)
        assert content(path) == data


@both
def test_concatenated_archives_are_one_file(tmp_path: Path, pack: Pack) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"".join(pack(data) for data in (b"one ", b"", DATA, b" two")))
    assert content(path) == b"one " + DATA + b" two"


def test_zeros_after_a_gzip_archive_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(pack_gzip(b"text") + bytes(100_000))
    assert content(tmp_path / "f") == b"text"


def test_a_zstandard_file_may_start_with_a_skippable_frame(tmp_path: Path) -> None:
    skipped = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"note"
    (tmp_path / "f").write_bytes(skipped + pack_zstandard(b"text"))
    assert content(tmp_path / "f") == b"text"


@both
def test_seek_moves_forward_and_never_back(tmp_path: Path, pack: Pack) -> None:
    path = tmp_path / "f"
    path.write_bytes(pack(DATA))
    with open_content(path) as file:
        assert file.seek(200_000) == file.tell() == 200_000
        assert file.read(1000) == DATA[200_000:201_000]
        assert file.seek(10**9) == len(DATA)
        with pytest.raises(OSError, match="from its beginning"):
            file.seek(0)


@both
@pytest.mark.parametrize("cut", [5, 40_000, -1])
def test_a_truncated_archive_is_an_error_with_its_position(
    tmp_path: Path, pack: Pack, cut: int
) -> None:
    path = tmp_path / "f"
    data = pack(DATA)[:cut]
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        content(path)
    kind = "gzip" if pack is pack_gzip else "zstandard"
    text = str(caught.value)
    assert text.startswith(
        f"{path}: ends within its {kind} archive, after byte {len(data)}; "
    )
    assert text.endswith("before that; the file was cut short. Copy it again.")
    assert caught.value.exit_code == 64


@both
def test_a_damaged_archive_is_an_error_with_its_position(
    tmp_path: Path, pack: Pack
) -> None:
    path = tmp_path / "f"
    data = bytearray(pack(DATA))
    data[-2] ^= 255  # within the checksum, or the last block
    data[100_000:100_100] = bytes(100)
    path.write_bytes(data + b"something else")
    with pytest.raises(
        DataError, match=r"is damaged: its \w+ archive cannot be unpacked before byte \d+"
    ):
        content(path)


def test_without_a_zstandard_library_the_message_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").write_bytes(pack_zstandard(b"text"))
    for name in ("zstandard", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError) as caught:
        content(tmp_path / "f")
    assert str(caught.value) == (
        f"{tmp_path / 'f'}: is compressed with zstandard, which cannot be read here; the package zstandard "
        "is not installed. Run `pip install zstandard`, or compress the file with gzip."
    )


def test_the_compressed_bytes_that_were_read_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(pack_gzip(DATA))
    with open_content(path) as file:
        assert isinstance(file, Unpacked)
        while file.read(2**20):
            pass
        assert file.packed_bytes == path.stat().st_size


@pytest.mark.parametrize("window_log", [28, 31])
def test_a_zstandard_file_with_a_large_window_is_read(
    tmp_path: Path, window_log: int
) -> None:
    """As `zstd --long=28` and `zstd --long=31` write them; the library's default limit is 2**27."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=window_log)
    # Without the size of its content, which would let the writer choose a smaller window.
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "f"
    path.write_bytes(packer.compress(DATA) + packer.flush())
    assert zstandard.get_frame_parameters(path.read_bytes()).window_size == 2**window_log
    assert content(path) == DATA


def test_a_file_that_needs_a_dictionary_is_not_reported_as_damaged(tmp_path: Path) -> None:
    samples = [f"sample {number} of the dictionary".encode() * 4 for number in range(2000)]
    dictionary = zstandard.train_dictionary(4096, samples)
    path = tmp_path / "f"
    path.write_bytes(zstandard.ZstdCompressor(dict_data=dictionary).compress(samples[0]))
    with pytest.raises(DataError) as refused:
        content(path)
    assert "was compressed with a zstandard dictionary" in str(refused.value)
    assert "zstd -d -D" in str(refused.value)


def test_a_window_without_enough_memory_is_not_reported_as_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    path = tmp_path / "f"
    path.write_bytes(packer.compress(DATA) + packer.flush())
    monkeypatch.setattr("evergrad_trainer.data.preparation.unpacking._WINDOW_LOG", 27)
    with pytest.raises(DataError) as refused:
        content(path)
    assert "damaged" not in str(refused.value)
    assert "its zstandard window is too large" in str(refused.value)
