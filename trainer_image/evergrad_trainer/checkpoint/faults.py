"""Named points of the publish protocol at which a test can kill a process or raise an error."""

from typing import Protocol

MID_SHARD = "mid-shard"
"""Each rank: between two tensors of its shard."""
BEFORE_FSYNC = "before-fsync"
"""Each rank: its shard is written but not yet durable."""
AFTER_SHARDS = "after-shards"
"""Rank 0: the shards of all ranks are durable."""
BEFORE_MANIFEST = "before-manifest"
"""Rank 0: all files except the manifest are written."""
BEFORE_RENAME = "before-rename"
"""Rank 0: the manifest is durable in the attempt directory."""
AFTER_RENAME = "after-rename"
"""Rank 0: the checkpoint is published, but ``latest`` does not name it yet."""
RETENTION = "retention"
"""Rank 0: an old checkpoint is renamed into the trash but not yet deleted."""

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
    """A hook that is called at each point, in the thread that reaches it.

    The hook may kill the process or raise OSError.
    """

    def reached(self, point: str, rank: int) -> None: ...


class NoFaults:
    """The hook outside tests, which does nothing."""

    def reached(self, point: str, rank: int) -> None:
        """Do nothing."""
