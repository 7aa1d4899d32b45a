"""``manifest.json``: the fields of a published checkpoint, their encoding and their validation.

This module is pure and does not import torch.
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
"""Version of the manifest format. It is increased if older programs cannot read the new format."""


PERMANENT = CheckpointFile.PERMANENT
"""Key of ``extra``. Retention never removes a checkpoint for which it is true. An older program that does not
support the key reads it as a counter."""

_IDENTITY = ("run", "config_hash", "data_fingerprint")
"""Fields of an identity in a manifest. Do not add any, because older programs could not read them."""


class InvalidCheckpointError(EvergradError):
    """A checkpoint is damaged or incomplete.

    The message is the reason, for example ``file rank-00000.bin: checksum differs``.
    """

    code = "internal.checkpoint_damaged"
    trouble: Trouble = "invalid"


class UnknownFormatError(EvergradError):
    """A checkpoint was written by a newer program. It is not damaged, so do not quarantine or skip it."""

    code = "internal.checkpoint_newer"


@dataclass(frozen=True)
class Identity:
    """The identity of the run that wrote a checkpoint. A run loads only checkpoints with its own identity."""

    run: str
    config_hash: str
    data_fingerprint: str
    recipe: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The values that ``config_hash`` was computed from, if known. A checkpoint has them in ``extra``."""


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint: its plain name, its length in bytes and its hash as 32 hex digits."""

    name: str
    bytes: int
    hash: str


@dataclass(frozen=True)
class Manifest:
    """The manifest of one checkpoint.

    ``finished`` is Unix time in seconds. ``extra`` contains JSON values from the caller of the save.
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
        """Size of all files together, in bytes."""
        return sum(file.bytes for file in self.files)

    @property
    def is_permanent(self) -> bool:
        """Whether retention never removes this checkpoint."""
        return self.extra.get(PERMANENT) is True

    @property
    def checksum(self) -> str:
        """Hash over all fields, which changes if any field changes."""
        text = json.dumps(
            _to_json(self), sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        return hash_bytes(text.encode())

    def has_same_content(self, other: "Manifest") -> bool:
        """Return whether both manifests describe the same state of the same step.

        The attempt and the time may differ.
        """
        return self._content() == other._content()

    def _content(self) -> tuple[object, ...]:
        return self.version.step, self.world_size, self.identity, self.extra, self.files


@dataclass(frozen=True)
class Candidate:
    """A published name. If the manifest cannot be read, ``manifest`` is None and ``reason`` is the error."""

    name: str
    version: Version
    manifest: Manifest | None
    reason: str = ""


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode ``manifest.json``, with a checksum over all fields to detect flipped bits."""
    fields = {**_to_json(manifest), "checksum": manifest.checksum}
    return json.dumps(fields, indent=1, allow_nan=False).encode() + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """Decode ``manifest.json``.

    Raises InvalidCheckpointError if it is damaged, and UnknownFormatError if a newer program wrote it.
    """
    if not data:
        raise InvalidCheckpointError(f"file {MANIFEST}: is empty")
    try:
        raw = json.loads(data)
        manifest_format = raw["format"]
        # Check the format first, because other fields may have a different meaning in a newer format.
        if isinstance(manifest_format, int) and manifest_format > FORMAT:
            raise UnknownFormatError(
                f"file {MANIFEST}: has format {manifest_format}, this program knows up to {FORMAT}"
            )
        manifest = _from_json(raw)
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidCheckpointError(
            f"file {MANIFEST}: is not a manifest ({error!r})"
        ) from error
    # The checksum covers the decoded fields, which proves that they are the fields that were written.
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
    # Convert each field, so that a damaged file raises an error here and not later during the load.
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
    # A name with a separator could refer to a file outside the checkpoint's directory.
    if (
        not isinstance(value, str)
        or not value
        or value in (".", "..")
        or "/" in value
        or "\0" in value
    ):
        raise ValueError(f"{value!r} is not a plain file name")
    return value
