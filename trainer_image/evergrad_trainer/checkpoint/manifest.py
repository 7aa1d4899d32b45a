"""``manifest.json``: the fields of a published checkpoint, their encoding and their checks.

Pure: no torch.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from evergrad_common.causes import Trouble
from evergrad_common.contract import CheckpointFile
from evergrad_manifest.errors import EvergradError
from evergrad_trainer.checkpoint.files import HASH_ALGORITHM, hash_bytes
from evergrad_trainer.checkpoint.layout import MANIFEST, Version

FORMAT = CheckpointFile.FORMAT
"""Grows when an older program could not read what a newer one writes."""


PERMANENT = CheckpointFile.PERMANENT
"""Key of ``extra`` that retention looks at: a checkpoint that has it is never removed. A program that does
not know it takes it for one more counter."""

_IDENTITY = ("run", "config_hash", "data_fingerprint")
"""Fields of an identity that are written to a manifest. Never more: an older program would not know them."""


class InvalidCheckpointError(EvergradError):
    """A checkpoint is damaged or incomplete.

    ``str`` is the reason, e.g. ``file rank-00000.bin: checksum differs``.
    """

    code = "internal.checkpoint_damaged"
    trouble: Trouble = "invalid"


class UnknownFormatError(EvergradError):
    """A checkpoint was written by a newer program. Not damage: it must not be set aside or skipped."""

    code = "internal.checkpoint_newer"


@dataclass(frozen=True)
class Identity:
    """Whose checkpoints these are. A run loads only what has the same identity."""

    run: str
    config_hash: str
    data_fingerprint: str
    recipe: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The values that ``config_hash`` was made of, as far as known; a checkpoint has them in ``extra``."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint: its plain name, its length in bytes and its hash as 32 hex digits."""

    name: str
    bytes: int
    hash: str


@dataclass(frozen=True)
class Manifest:
    """The facts of one checkpoint.

    ``finished`` is Unix time in seconds; ``extra`` is the caller's, JSON values only.
    """

    version: Version
    world_size: int
    identity: Identity
    extra: dict[str, Any]
    best: bool
    files: tuple[FileEntry, ...]
    libraries: dict[str, str]
    finished: float

    @property
    def bytes(self) -> int:
        """Length of all files together, in bytes."""
        return sum(file.bytes for file in self.files)

    @property
    def is_permanent(self) -> bool:
        """Whether retention leaves it for ever."""
        return self.extra.get(PERMANENT) is True

    @property
    def checksum(self) -> str:
        """Hash over all fields, which differs as soon as one of them does."""
        text = json.dumps(
            _to_json(self), sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        return hash_bytes(text.encode())

    def has_same_content(self, other: "Manifest") -> bool:
        """Whether both hold the same state of the same step, whichever attempt wrote it and when."""
        return self._content() == other._content()

    def _content(self) -> tuple[object, ...]:
        return self.version.step, self.world_size, self.identity, self.extra, self.files


@dataclass(frozen=True)
class Candidate:
    """A published name; ``manifest`` is None where it cannot be read, and ``reason`` then says why."""

    name: str
    version: Version
    manifest: Manifest | None
    reason: str = ""


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``, with a checksum over all fields so that a flipped bit in
    them is seen."""
    fields = {**_to_json(manifest), "checksum": manifest.checksum}
    return json.dumps(fields, indent=1, allow_nan=False).encode() + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """Read ``manifest.json``.

    Raises InvalidCheckpointError for damage, UnknownFormatError for a newer program's.
    """
    if not data:
        raise InvalidCheckpointError(f"file {MANIFEST}: is empty")
    try:
        raw = json.loads(data)
        manifest_format = raw["format"]
        # Before any other field: those of a newer format may mean something else.
        if isinstance(manifest_format, int) and manifest_format > FORMAT:
            raise UnknownFormatError(
                f"file {MANIFEST}: has format {manifest_format}, this program knows up to {FORMAT}"
            )
        manifest = _from_json(raw)
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidCheckpointError(
            f"file {MANIFEST}: is not a manifest ({error!r})"
        ) from error
    # Over the fields as they were understood: what was read is what was written.
    if raw.get("checksum") != manifest.checksum:
        raise InvalidCheckpointError(f"file {MANIFEST}: checksum differs")
    return manifest


def _to_json(manifest: Manifest) -> dict[str, Any]:
    fields = {
        name: value
        for name, value in vars(manifest).items()
        if name not in ("version", "identity", "files")
    }
    return {
        "format": FORMAT,
        **asdict(manifest.version),
        **fields,
        "identity": {name: getattr(manifest.identity, name) for name in _IDENTITY},
        "hash_algorithm": HASH_ALGORITHM,
        "files": [asdict(file) for file in manifest.files],
    }


def _from_json(raw: dict[str, Any]) -> Manifest:
    if raw["hash_algorithm"] != HASH_ALGORITHM:
        raise ValueError(f"hash_algorithm {raw['hash_algorithm']!r}")
    # Field by field, so that a damaged file is an error here and not somewhere in the loading.
    identity = raw["identity"]
    return Manifest(
        version=Version(
            *(_integer(raw[name]) for name in ("step", "generation", "serial"))
        ),
        world_size=_integer(raw["world_size"]),
        identity=Identity(
            run=str(identity["run"]),
            config_hash=str(identity["config_hash"]),
            data_fingerprint=str(identity["data_fingerprint"]),
        ),
        extra=dict(raw["extra"]),
        best=bool(raw["best"]),
        files=tuple(
            FileEntry(_plain_name(file["name"]), _integer(file["bytes"]), str(file["hash"]))
            for file in raw["files"]
        ),
        libraries={str(name): str(version) for name, version in raw["libraries"].items()},
        finished=float(raw["finished"]),
    )


def _integer(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a natural number")
    return value


def _plain_name(value: Any) -> str:
    # A name with a separator could reach outside the checkpoint's own directory.
    if (
        not isinstance(value, str)
        or not value
        or value in (".", "..")
        or "/" in value
        or "\0" in value
    ):
        raise ValueError(f"{value!r} is not a plain file name")
    return value
