"""The whole state of a checkpoint, in the form that tests compare."""

from pathlib import Path

import torch

from evergrad_trainer.checkpoint.weights import open_tensors


def read_plain_state(checkpoint: Path, *, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return all tensors of one checkpoint whose keys begin with ``prefix``, whole, on the host, in this
    process alone.

    Raises CheckpointError if the checkpoint does not validate.
    """
    stored = open_tensors(checkpoint, prefix=prefix)
    return {key: stored.read(key) for key in stored.table}
