"""manifest.json: encoding, and that no damage passes."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergrad_trainer.checkpoint.layout import Version
from evergrad_trainer.checkpoint.manifest import (
    FileEntry,
    Identity,
    InvalidCheckpointError,
    Manifest,
    UnknownFormatError,
    decode_manifest,
    encode_manifest,
)


def build_manifest(**changes: object) -> Manifest:
    fields: dict[str, object] = {
        "version": Version(1200, 7, 3),
        "world_size": 2,
        "identity": Identity("docs-lm", "c0ffee", "dada"),
        "extra": {"cursor": {"docs": 17}, "best": None},
        "best": True,
        "files": (FileEntry("rank-00000.bin", 128, "0" * 32),),
        "libraries": {"torch": "2.13.0"},
        "finished": 1795261200.25,
    }
    return Manifest(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_manifest_is_parsed_as_it_was_written() -> None:
    assert decode_manifest(encode_manifest(build_manifest())) == build_manifest()


@pytest.mark.capability("G-69")
@given(st.data())
def test_a_flipped_bit_in_a_manifest_is_refused_or_has_no_effect(
    data: st.DataObject,
) -> None:
    encoded = bytearray(encode_manifest(build_manifest()))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(
        st.integers(0, 7)
    )
    try:
        assert decode_manifest(bytes(encoded)) == build_manifest()  # white space only
    except (InvalidCheckpointError, UnknownFormatError) as error:
        assert "manifest.json" in str(error)


@given(st.integers(0, 500))
def test_a_truncated_manifest_is_refused(length: int) -> None:
    encoded = encode_manifest(build_manifest())
    with pytest.raises(InvalidCheckpointError, match=r"manifest\.json"):
        decode_manifest(encoded[: min(length, len(encoded) - 3)])


@pytest.mark.acceptance("8d-4g")
@pytest.mark.parametrize(
    "garbage",
    [b"\0\0\0", b"[]", b"null", b"{}", b'{"format": 1}', b"\xff\xfe", b'{"format": "1"}'],
)
def test_garbage_is_not_a_manifest(garbage: bytes) -> None:
    with pytest.raises(InvalidCheckpointError, match="is not a manifest"):
        decode_manifest(garbage)


@pytest.mark.acceptance("input-G-64")
@pytest.mark.capability("G-64")
def test_a_newer_format_is_distinguished_from_damage() -> None:
    newer = {
        **json.loads(encode_manifest(build_manifest())),
        "format": 2,
        "something": "new",
    }
    with pytest.raises(
        UnknownFormatError, match="has format 2, this program knows up to 1"
    ):
        decode_manifest(json.dumps(newer).encode())


@pytest.mark.parametrize(
    "name", ["../rank-00000.bin", "/etc/passwd", "", ".", "..", "a/b", "a\0b"]
)
def test_a_file_name_that_points_outside_the_checkpoint_is_refused(name: str) -> None:
    manifest = build_manifest(files=(FileEntry(name, 1, "0" * 32),))
    with pytest.raises(InvalidCheckpointError, match="is not a plain file name"):
        decode_manifest(encode_manifest(manifest))


def test_a_value_that_strict_json_cannot_hold_is_refused_when_writing() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_manifest(build_manifest(extra={"loss": math.nan}))


def test_equal_content_is_recognised_although_other_processes_wrote_it() -> None:
    manifest = build_manifest()
    assert manifest.has_same_content(
        build_manifest(version=Version(1200, 8, 1), finished=0.0, best=False)
    )
    assert not manifest.has_same_content(build_manifest(version=Version(1300, 7, 3)))
    assert not manifest.has_same_content(build_manifest(extra={}))
    assert not manifest.has_same_content(
        build_manifest(files=(FileEntry("rank-00000.bin", 128, "1" * 32),))
    )
