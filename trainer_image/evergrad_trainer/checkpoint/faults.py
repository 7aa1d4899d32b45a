"""Named points of the publish protocol at which a test may kill a process or raise an error."""

from typing import Protocol

MID_SHARD = "mid-shard"
"""Each rank, between two tensors of its shard."""
BEFORE_FSYNC = "before-fsync"
"""Each rank, its shard written and not yet on the disk."""
AFTER_SHARDS = "after-shards"
"""Rank 0, once every rank's shard is durable."""
BEFORE_MANIFEST = "before-manifest"
"""Rank 0, all but the manifest written."""
BEFORE_RENAME = "before-rename"
"""Rank 0, the manifest durable in the attempt directory."""
AFTER_RENAME = "after-rename"
"""Rank 0, published, before ``latest`` says so."""
RETENTION = "retention"
"""Rank 0, an old checkpoint renamed into the trash and not yet deleted."""

POINTS = (
    MID_SHARD,
    BEFORE_FSYNC,
    AFTER_SHARDS,
    BEFORE_MANIFEST,
    BEFORE_RENAME,
    AFTER_RENAME,
    RETENTION,
)


class FaultPoints(Protocol):
    """Called at each point, in the thread that gets there. May kill the process or raise OSError."""

    def reached(self, point: str, rank: int) -> None: ...


class NoFaults:
    """The fault points of the product: nothing happens at any of them."""

    def reached(self, point: str, rank: int) -> None:
        """Do nothing."""
