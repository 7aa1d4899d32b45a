"""Loads the weights of a transformers directory into an existing model.

Only safetensors files are loaded, and every name, shape and setting is checked.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from evergrad_manifest.errors import Problem, raise_if
from evergrad_trainer.base.errors import ModelError
from evergrad_trainer.models.build import ModelPlan, load_directory, plan_directory
from evergrad_trainer.models.compatibility import compare_functions
from evergrad_trainer.state.providers import module_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_FIELD = "spec.training.initFrom.path"


def load_model_directory(
    directory: Path,
    state: Mapping[str, torch.Tensor],
    *,
    config: "PreTrainedConfig",
    field: str = _FIELD,
) -> list[str]:
    """Copy the weights in ``directory`` to the ``model.`` tensors of ``state``, in place.

    ``config``: the configuration of the model of ``state``. ``field``: the manifest field that names the
    directory. Returns a line of text for each setting that differs without an effect. Raises ModelError if
    weights are missing, or if they belong to a model that computes another function.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    plan = plan_directory(directory, field=field)
    if plan.weights is None:
        name = field.removeprefix("spec.training.").removesuffix(".path")
        raise ModelError(
            Problem(
                field,
                f"{directory} contains no weights",
                remedy=f"Give a directory with *.safetensors, or leave {name} out",
            )
        )
    own = ModelPlan(config, None).describe()
    problems, lines = compare_functions(
        plan.describe(), own, where=str(directory), field=field
    )
    raise_if(problems, ModelError)
    source = load_directory(
        plan.weights, torch.float32, config=plan.stored_config, attention=plan.attention
    )
    tensors = {f"model.{name}": one for name, one in module_tensors(source).items()}
    wanted = {key: one for key, one in state.items() if key.startswith("model.")}
    if differing := sorted(wanted.keys() ^ tensors.keys()):
        raise ModelError(
            Problem(
                field,
                f"{len(differing)} tensors are in {directory} or in the model alone, first {differing[0]}",
                "the model would be partly random, or part of the weights lost",
                "Use weights of the same architecture and size",
            )
        )
    with torch.no_grad():
        for key, target in wanted.items():
            values = tensors[key]
            if isinstance(target, DTensor):
                # Collective: shard the copy of rank 0 for all ranks. If each rank sharded its own copy and
                # the directory changed in between, the shards could belong to different tensors.
                values = distribute_tensor(
                    values.to(target.device), target.device_mesh, target.placements
                )
            target.copy_(values)
    return lines
