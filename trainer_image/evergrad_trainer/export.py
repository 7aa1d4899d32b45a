"""Exports a checkpoint to a directory in the format of transformers, with safetensors, configuration and
tokenizer, or exports only its adapters in peft's format."""

import logging
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from evergrad_manifest.derive import why_not_exported
from evergrad_manifest.errors import Problem, raise_if
from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import CheckpointError, DataError, RunDirectoryError
from evergrad_trainer.checkpoint.layout import parse_checkpoint_name
from evergrad_trainer.checkpoint.restore import compare_tensors
from evergrad_trainer.checkpoint.weights import (
    StoredTensors,
    hold_checkpoint,
    open_tensors,
    read_extra,
)
from evergrad_trainer.data.auto_tokenizer import COMBINED
from evergrad_trainer.data.chat_template import TEMPLATE_FILE, TEMPLATE_FOLDER
from evergrad_trainer.data.tokenizers import (
    TextTokenizer,
    check_saved,
    load_tokenizer,
    problem_of_difference,
)
from evergrad_trainer.models.adapters import (
    ADAPTER_FILE,
    adapter_key,
    merge_adapters,
    write_adapter_config,
)
from evergrad_trainer.models.build import (
    ModelPlan,
    build_empty_model,
    build_model,
)
from evergrad_trainer.models.generation import TextIds, keep_settings, set_ids
from evergrad_trainer.models.safetensors_files import TensorForm, write_weights
from evergrad_trainer.optim.average import AVERAGE, TRAINED, check_has_average
from evergrad_trainer.run.directory import RunDirectory, reported
from evergrad_trainer.run.record import read_base, read_run
from evergrad_trainer.state.providers import module_tensors
from evergrad_trainer.state.registry import EMA, FROZEN, MODEL, from_extra
from evergrad_trainer.task import Modules
from evergrad_trainer.text_ends import find_export_ends, find_origin
from evergrad_trainer.training.frozen import hash_frozen
from evergrad_trainer.training.initial_model import plan_initial

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_MAX_FILE_BYTES: Final = 5 * 10**9
"""Maximum size of one safetensors file, because some tools load one whole file at a time into memory."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportResult:
    """The written directory and its source. ``dtype``: torch's name of the weights' type, such as
    ``bfloat16``."""

    checkpoint: Path
    step: int
    output: Path
    parameters: int
    dtype: str


@dataclass(frozen=True)
class _Weights:
    """The trained weights of one checkpoint, or their average if ``average`` is set."""

    stored: StoredTensors
    average: StoredTensors | None
    where: str

    @classmethod
    def open(cls, checkpoint: Path, weights: str) -> "_Weights":
        """Open ``weights`` (``trained`` or ``average``) of a checkpoint that has been validated.

        Raises CheckpointError if they cannot be read.
        """
        trained = open_tensors(checkpoint, prefix=f"{MODEL}.", checksums=False)
        average = None
        if weights == AVERAGE:
            average = open_tensors(checkpoint, prefix=f"{EMA}.", checksums=False)
        return cls(trained, average, str(checkpoint))

    def check(self, wanted: Mapping[str, torch.Tensor]) -> None:
        """Raise CheckpointError if the checkpoint does not have tensors of these names and shapes."""
        keyed = {f"{MODEL}.{name}": tensor for name, tensor in wanted.items()}
        raise_if(
            compare_tensors(self.stored.table, keyed, where=self.where), CheckpointError
        )

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Read one whole tensor. Tensors without an average, such as buffers, are read as they are."""
        key = f"{EMA}.{MODEL}.{name}"
        if self.average is not None and key in self.average.table:
            return self.average.read(key, dtype)
        return self.stored.read(f"{MODEL}.{name}", dtype)


def export_checkpoint(
    run_directory: Path,
    *,
    step: int | None,
    output: Path,
    dtype: str | None,
    weights: str = TRAINED,
    is_adapter: bool = False,
) -> ExportResult:
    """Write the newest valid checkpoint, or the checkpoint of ``step``, to ``output``, which must not exist.

    ``dtype``: ``float32``, ``bfloat16`` or ``float16``; None keeps the type of the weights. ``weights``:
    ``trained`` or ``average``. ``is_adapter``: write only the adapters, in peft's format; otherwise adapters
    are merged into the base weights. ``output`` appears complete or not at all. Without a merge, one tensor
    at a time is in memory and is converted when it is read.

    Raises RunDirectoryError, VolumeError (for example if the volume is full), CheckpointError, ModelError or
    DataError.
    """
    if output.exists():
        why = "an export never overwrites"
        remedy = "Choose another --output, or move it away"
        raise RunDirectoryError(Problem(str(output), "exists already", why, remedy))
    # Check the run's files before the checkpoint is hashed, which may take minutes.
    training, base = _read_run(run_directory, weights=weights, is_adapter=is_adapter)
    tokenizer = load_tokenizer(training.tokenizer, base)
    plan = plan_initial(
        training,
        base_directory=base,
        vocab_size=tokenizer.vocab_size,
        run_directory=run_directory,
    )
    model = build_empty_model(plan, precision=training.runtime.precision)
    ids = _text_ids(training, base, tokenizer)
    origin = find_origin(training, base)
    # Set the dtypes of the tensors to write. The model is empty, so no data are converted here.
    if dtype is not None:
        model.to(_DTYPES[dtype])  # type: ignore[arg-type]

    # In the same folder as the output, so that the rename stays within one file system.
    temporary = output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}.tmp")
    # Hold the checkpoint until the last tensor is read; otherwise a training run could remove it.
    with hold_checkpoint(run_directory, step=step) as checkpoint:
        found = _Weights.open(checkpoint, weights)
        found.check(module_tensors(model))
        try:
            with reported(output, what="cannot be written"):
                temporary.mkdir(parents=True)
                if is_adapter:
                    _write_adapters(model, found, temporary, plan=plan)
                elif training.model.lora is not None:
                    model = _write_merged(
                        model, found, temporary, training=training, plan=plan, ids=ids
                    )
                else:
                    _write_model(model, found, temporary, plan=plan, ids=ids)
                # Keep the settings of the original model: chat models have several end tokens and settings
                # for sampling.
                if origin is not None:
                    keep_settings(origin, temporary, ids.ends)
                tokenizer.save_pretrained(temporary)
                _check_tokenizer(tokenizer, temporary)
                _write_template(training, temporary)
                os.rename(temporary, output)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    written = [one for one in model.parameters() if one.requires_grad or not is_adapter]
    parameters, name = sum(one.numel() for one in written), str(written[0].dtype)
    version = parse_checkpoint_name(checkpoint.name)
    name, step = name.removeprefix("torch."), version.step if version else 0
    return ExportResult(checkpoint, step, output, parameters, name)


def _text_ids(training: Training, base: Path, tokenizer: TextTokenizer) -> TextIds:
    """Find the ids with which the run's texts begin and end. Raises DataError or ModelError."""
    special = tokenizer.special_ids
    return TextIds(
        find_export_ends(training, base, tokenizer),
        begin=special.get("bos_token"),
        filling=special.get("pad_token", tokenizer.end_of_document),
        given=training.model.config or {},
    )


def _check_tokenizer(tokenizer: TextTokenizer, directory: Path) -> None:
    """Raise DataError if transformers would produce other ids for a text than the run trained on."""
    try:
        difference = check_saved(tokenizer, directory)
    except DataError as error:
        # Only other programs load this tokenizer. The exported weights are usable without it.
        _log.warning("the export is written, but %s", error)
        return
    if difference is None:
        return
    if difference.text in COMBINED:
        _log.warning(
            "transformers composes characters that were trained separately: %s", difference
        )
        return
    raise DataError(problem_of_difference(difference))


def _write_template(training: Training, folder: Path) -> None:
    """Write the chat template that the training used."""
    if training.rows is not None and training.rows.chat_template is not None:
        template = training.rows.chat_template
        (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")
        # Rows with tools used this template too. transformers would prefer a template from that folder for
        # them.
        shutil.rmtree(folder / TEMPLATE_FOLDER, ignore_errors=True)


def _read_run(
    run_directory: Path, *, weights: str, is_adapter: bool
) -> tuple[Training, Path]:
    """Read the run's settings, and the directory that their paths are relative to.

    Raises RunDirectoryError if run.json is missing or if the run does not have the requested weights.
    """
    directory = RunDirectory(run_directory)
    resolved = directory.read_resolved()
    if resolved is None:
        directory.require_run()
        what, why = "does not exist", "it contains the model's configuration"
        raise RunDirectoryError(
            Problem(str(directory.resolved), what, why, "Restore it from a backup")
        )
    training = read_run(directory, resolved).training
    if why := why_not_exported(training):
        what = f"recipe {training.recipe} trains no model that could be exported"
        remedy = "Its modules are in its checkpoints, for spec.training.initFrom"
        raise RunDirectoryError(Problem(str(run_directory), what, why, remedy))
    if is_adapter and training.model.lora is None:
        what, why = "has no adapters", "spec.training.model.lora is not set"
        raise RunDirectoryError(
            Problem(str(run_directory), what, why, "Leave --adapter out")
        )
    check_has_average(training, weights, where=str(run_directory))
    return training, read_base(directory, resolved)


def _write_model(
    model: "PreTrainedModel",
    found: _Weights,
    directory: Path,
    *,
    plan: ModelPlan,
    ids: TextIds,
) -> None:
    """Write configuration and weights of ``model``, whose tensors have no storage."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors = module_tensors(model)
    model.config.use_cache = True
    _set_ids(model, plan, ids)

    # A few architectures are saved with other names and shapes than in memory, for example with all experts
    # in one tensor. transformers converts them only with the whole model in memory.
    reverted = revert_weight_conversion(model, dict(tensors))
    if {name: value.shape for name, value in reverted.items()} != {
        name: value.shape for name, value in tensors.items()
    }:
        _log.warning(
            "a %s model is converted as a whole when it is saved: all its weights are held in memory",
            plan.name,
        )
        _write_whole(found, directory, plan=plan, ids=ids, dtype=model.dtype)
        return

    # Write the same files as save_pretrained, which would need the whole model in memory.
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
    ignored = set(model._keys_to_ignore_on_save or ())
    forms = {
        name: TensorForm(tensor.dtype, tuple(tensor.shape))
        for name, tensor in tensors.items()
        if name not in ignored
    }
    write_weights(
        directory,
        forms,
        lambda name: found.read(name, forms[name].dtype),
        num_parameters=model.num_parameters(),
        max_file_bytes=_MAX_FILE_BYTES,
    )


def _write_whole(
    found: _Weights, directory: Path, *, plan: ModelPlan, ids: TextIds, dtype: torch.dtype
) -> None:
    """Load the whole model as ``dtype``, and let transformers convert and write it."""
    whole = build_model(plan, seed=0, precision="fp32", with_weights=False)
    # In place, with torch's method, because the override in transformers is not typed.
    torch.nn.Module.to(whole, dtype)
    with torch.no_grad():
        for name, tensor in module_tensors(whole).items():
            tensor.copy_(found.read(name, tensor.dtype))
    _set_ids(whole, plan, ids)
    _save_whole(whole, directory)


def _write_merged(
    empty: "PreTrainedModel",
    found: _Weights,
    directory: Path,
    *,
    training: Training,
    plan: ModelPlan,
    ids: TextIds,
) -> "PreTrainedModel":
    """Merge the adapters into the base weights and write the model; returns the written model.

    ``empty``: an empty model with the requested dtype. Raises CheckpointError if the base weights are not the
    weights with which the adapters were trained.
    """
    seed, precision = training.reproducibility.seed, training.runtime.precision
    model = build_model(plan, seed=seed, precision=precision)
    recorded = from_extra(read_extra(Path(found.where))).get(FROZEN, {})
    built = hash_frozen(Modules({MODEL: model}))
    if any(recorded.get(name) != own for name, own in built.items()):
        what = "its adapters were trained with other weights than the current ones"
        why = f"{plan.weights or 'what the seed makes'} has changed since the run began"
        remedy = "Restore it, or export the adapters alone: --adapter"
        raise CheckpointError(Problem(found.where, what, why, remedy))
    with torch.no_grad():
        for name, tensor in module_tensors(model).items():
            tensor.copy_(found.read(name, tensor.dtype))
    # In place, with torch's method, because the override in transformers is not typed. Convert to the wider
    # dtype before the merge and to the requested dtype after it, so that the sum is rounded only once.
    torch.nn.Module.to(model, torch.promote_types(model.dtype, empty.dtype))
    merge_adapters(model)
    torch.nn.Module.to(model, empty.dtype)
    _set_ids(model, plan, ids)
    _save_whole(model, directory)
    return model


def _set_ids(model: "PreTrainedModel", plan: ModelPlan, ids: TextIds) -> None:
    """Set the ids of the tokenizer in a model that has no directory; a directory contains its own ids."""
    if plan.settings.path is None:
        set_ids(model, ids)


def _save_whole(model: "PreTrainedModel", directory: Path) -> None:
    """Write a whole model from memory with ``save_pretrained`` of transformers."""
    from transformers.utils.logging import disable_progress_bar

    model.config.use_cache = True
    disable_progress_bar()
    model.save_pretrained(directory, max_shard_size=_MAX_FILE_BYTES)


def _write_adapters(
    model: "PreTrainedModel", found: _Weights, directory: Path, *, plan: ModelPlan
) -> None:
    """Write the adapters of ``model``, whose tensors have no storage, under peft's names."""
    from safetensors.torch import save_file

    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    tensors = {
        adapter_key(name): found.read(name, one.dtype) for name, one in trained.items()
    }
    save_file(tensors, directory / ADAPTER_FILE, metadata={"format": "pt"})
    base = "" if plan.weights is None else str(plan.weights.resolve())
    write_adapter_config(model, directory, base=base)
