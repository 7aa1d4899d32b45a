"""Low-rank adapters (LoRA, arXiv 2106.09685) next to the frozen weights of a model, with the layers of peft.

The frozen weights are the base. Every process loads them from the model's directory or creates them from the
seed, and the run's state contains their hash. Only trained weights are saved, sent to new members and passed
to the optimizer.
"""

import importlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from evergrad_manifest.errors import Problem, raise_if
from evergrad_manifest.model.spelling import nearest
from evergrad_manifest.training import Lora
from evergrad_trainer.base.errors import ModelError
from evergrad_trainer.models.randomness import Purpose, seed_generators
from evergrad_trainer.state.providers import mark_base

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FIELD: Final = "spec.training.model.lora"
_NAME: Final = "default"
"""The name of the adapter in peft, which is a part of the names of its parameters."""
_MOST_NAMED: Final = 6
ADAPTER_FILE: Final = "adapter_model.safetensors"
"""Name of the weights file in a directory that peft reads."""
INITIAL_FIELD: Final = "spec.training.initFrom.path"


def add_adapters(
    model: "PreTrainedModel", lora: Lora, *, seed: int, dtype: torch.dtype
) -> None:
    """Freeze ``model`` and add adapters of type ``dtype`` to its layers, in place.

    The initial values depend only on ``seed``, and the adapters add zero until the first update. Raises
    ModelError if a target layer does not exist, or if peft is not installed.
    """
    try:
        peft: Any = importlib.import_module("peft")
    except ImportError:
        what, why = "cannot be used here", "the package peft is not installed"
        remedy = (
            "Run `pip install peft` (the trainer's image has it), or train the model whole"
        )
        raise ModelError(Problem(_FIELD, what, why, remedy)) from None
    targets = choose_targets(model, lora)
    is_transposed = any(not isinstance(layer, nn.Linear) for layer in targets.values())
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.scale,
        lora_dropout=lora.dropout,
        use_rslora=lora.rank_stabilized,
        target_modules=sorted(targets),
        fan_in_fan_out=is_transposed,
        task_type="CAUSAL_LM",
    )
    seed_generators(seed, 0, 0, Purpose.ADAPTERS)
    with warnings.catch_warnings():
        # A model may have layers of both kinds. peft warns that it corrects the flag for some of them.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        peft.inject_adapter_in_model(config, model, adapter_name=_NAME)
    mark_base(
        model, [name for name, one in model.named_parameters() if not one.requires_grad]
    )
    for parameter in model.parameters():
        # peft uses the type of the base layer, in which small updates could be lost to rounding.
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def choose_targets(model: "PreTrainedModel", lora: Lora) -> dict[str, Any]:
    """Return the layers that get an adapter, by their full names.

    Raises ModelError with all problems if a target is not valid, if there are no linear layers, or if the
    rank is too large.
    """
    layers: dict[str, Any] = {
        name: one for name, one in model.named_modules() if _is_linear(one)
    }
    head: Any = model.get_output_embeddings()
    if not lora.target_modules:
        chosen = {name: one for name, one in layers.items() if one is not head}
        if not chosen:
            what = (
                f"a {model.config.model_type} model has no linear layers besides its head"
            )
            why = "an adapter is a product of two matrices that is added to a third"
            raise ModelError(
                Problem(f"{_FIELD}.targetModules", what, why, "Train it whole")
            )
    else:
        raise_if(list(_target_problems(model, lora.target_modules)), ModelError)
        chosen = {
            name: one
            for name, one in layers.items()
            if _is_meant(name, lora.target_modules)
        }
    name, least = min(
        ((name, min(one.weight.shape)) for name, one in chosen.items()),
        key=lambda one: one[1],
    )
    if lora.rank > least:
        what = f"{lora.rank} is above the {least} of {name}"
        why = "two matrices of that inner size have more values than the matrix they are added to"
        raise ModelError(Problem(f"{_FIELD}.rank", what, why, f"Use at most {least}"))
    return chosen


def _target_problems(model: "PreTrainedModel", targets: Sequence[str]) -> Iterator[Problem]:
    modules = {name: one for name, one in model.named_modules() if name}
    linear = [name for name, one in modules.items() if _is_linear(one)]
    endings = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    head: Any = model.get_output_embeddings()
    table: Any = model.get_input_embeddings()
    for index, target in enumerate(targets):
        where = f"{_FIELD}.targetModules[{index}]"
        found = [name for name in modules if _is_meant(name, [target])]
        others = [name for name in found if name not in linear]
        if not found:
            near = nearest(target, endings)
            guess = f"Did you mean {near}? " if near else ""
            why = f"the linear layers are {', '.join(endings[:_MOST_NAMED])}"
            if len(endings) > _MOST_NAMED:
                why += f" and {len(endings) - _MOST_NAMED} more"
            remedy = f"{guess}Write the end of a name, as {model.config.model_type} has it"
            yield Problem(where, f"{target!r} names no module", why, remedy)
        elif others:
            kind = type(modules[others[0]]).__name__
            what = f"{target!r} names {others[0]}, a {kind}"
            why = "adapters can only be added to linear layers"
            yield Problem(
                where, what, why, f"Name one of {', '.join(endings[:_MOST_NAMED])}"
            )
        elif any(modules[name] is head for name in found) and head.weight is table.weight:
            what = f"{target!r} is the output head, which shares its weights with the embeddings"
            why = "an adapter that is merged into one of them would also change the other"
            yield Problem(where, what, why, "Remove it")


def _is_meant(name: str, targets: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def check_initial(path: Path, lora: Lora | None) -> list[Problem]:
    """Return a problem if ``initFrom.path`` is a transformers directory and ``model.lora`` is set.

    Adapters cannot start from whole weights, because whole weights are their base.
    """
    if lora is None or not (path / "config.json").is_file():
        return []
    what = "names a transformers directory together with model.lora"
    why = "adapters begin at zero, and whole weights are the base that they are added to"
    return [Problem(INITIAL_FIELD, what, why, "Write it as model.path")]


def merge_adapters(model: "PreTrainedModel") -> None:
    """Add the adapters to their base weights, in fp32, and remove the adapters, in place."""
    from peft.tuners.lora import LoraLayer

    with torch.no_grad():
        layers: list[tuple[str, Any]] = [
            (path, one) for path, one in model.named_modules() if isinstance(one, LoraLayer)
        ]
        for path, layer in layers:
            plain = layer.get_base_layer()
            down, up = (
                layer.lora_A[_NAME].weight.float(),
                layer.lora_B[_NAME].weight.float(),
            )
            added = up @ down * float(layer.scaling[_NAME])
            if not isinstance(plain, nn.Linear):
                # GPT-2's layers store their weights transposed.
                added = added.T
            plain.weight.copy_(plain.weight.float() + added)
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, plain)
    mark_base(model, ())
    # Remove these attributes: otherwise, save_pretrained would treat the model as a model with adapters.
    for name in ("peft_config", "_hf_peft_config_loaded"):
        vars(model).pop(name, None)


def adapter_key(name: str) -> str:
    """Return the name of an adapter's parameter in the files of peft."""
    return f"base_model.model.{name.replace(f'.{_NAME}.', '.')}"


def write_adapter_config(model: "PreTrainedModel", directory: Path, *, base: str) -> None:
    """Write peft's configuration of the adapters of ``model``. ``base``: path or name of the base model."""
    config: Any = vars(model)["peft_config"][_NAME]
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(directory)
