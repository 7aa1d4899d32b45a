"""Weights of a transformers directory into a model that already exists: safetensors only, every name and
shape checked."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from evergrad_manifest.errors import Problem
from evergrad_trainer.errors import ModelError
from evergrad_trainer.models.build import find_weights, load_directory

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FIELD = "spec.training.initFrom.path"


def load_model_directory(
    directory: Path,
    state: Mapping[str, torch.Tensor],
    *,
    config: "PreTrainedConfig",
    field: str = _FIELD,
) -> None:
    """Copy the weights in ``directory`` over the ``model.`` tensors of ``state``.

    ``field``: what named the directory, for messages. Raises ModelError unless all are there.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    if find_weights(directory, field=field) is None:
        name = field.removeprefix("spec.training.").removesuffix(".path")
        raise ModelError(
            Problem(
                field,
                f"{directory} holds no weights",
                remedy=f"Give a directory with *.safetensors, or leave {name} out",
            )
        )
    source = load_directory(directory, torch.float32, config=config)
    tensors = {
        f"model.{name}": parameter.detach() for name, parameter in source.named_parameters()
    }
    with torch.no_grad():
        for key, target in state.items():
            if not key.startswith("model.") or key not in tensors:
                continue
            values = tensors[key]
            if isinstance(target, DTensor):
                # Collective: rank 0's copy is cut for all, so that ranks which read the directory at two
                # moments hold parts of one tensor.
                values = distribute_tensor(
                    values.to(target.device), target.device_mesh, target.placements
                )
            target.copy_(values)
