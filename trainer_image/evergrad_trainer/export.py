"""A checkpoint as a transformers directory: safetensors, configuration and tokenizer, for any tool that reads
those."""

import logging
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from evergrad_manifest.errors import Problem, raise_if
from evergrad_manifest.identity import from_wire
from evergrad_manifest.training import Training
from evergrad_trainer.checkpoint.layout import parse_checkpoint_name
from evergrad_trainer.checkpoint.restoring import compare_tensors
from evergrad_trainer.checkpoint.weights import StoredTensors, find_checkpoint, open_tensors
from evergrad_trainer.data.chat_template import TEMPLATE_FILE
from evergrad_trainer.data.tokenizers import TextTokenizer, load_tokenizer
from evergrad_trainer.errors import CheckpointError, RunDirectoryError
from evergrad_trainer.models.build import ModelPlan, build_empty_model, build_model, plan_model
from evergrad_trainer.models.safetensors_files import TensorForm, write_weights
from evergrad_trainer.run_directory import RunDirectory, reported
from evergrad_trainer.state.providers import module_tensors
from evergrad_trainer.state.registry import MODEL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_MAX_FILE_BYTES: Final = 5 * 10**9
"""Most bytes of one safetensors file: what tools that read them a file at a time can be expected to hold."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportResult:
    """The directory that was written, and its source. ``dtype``: torch's name of the weights' type."""

    checkpoint: Path
    step: int
    output: Path
    parameters: int
    dtype: str


def export_checkpoint(
    run_directory: Path, *, step: int | None, output: Path, dtype: str | None
) -> ExportResult:
    """Write the newest valid checkpoint (or that of ``step``) to ``output``, which must not exist yet.

    ``dtype``: ``float32``, ``bfloat16`` or ``float16``; default: the type the weights have. ``output``
    appears whole or not at all. One tensor at a time is in memory, converted as it is read. Raises
    RunDirectoryError, VolumeError (no space), CheckpointError, ModelError or DataError.
    """
    directory = RunDirectory(run_directory)
    resolved = directory.read_resolved()
    if resolved is None:
        directory.require_run()
        raise RunDirectoryError(
            Problem(
                str(directory.resolved),
                "does not exist",
                "the model's configuration stands in it",
                "Restore it from a backup",
            )
        )
    if output.exists():
        raise RunDirectoryError(
            Problem(
                str(output),
                "exists already",
                "an export never overwrites",
                "Choose another --output, or move it away",
            )
        )

    # Mistakes of the run's files show before the checkpoint is hashed, which may take minutes.
    run = from_wire(resolved["manifest"])
    training, base = run.training, run_directory / resolved["baseDirectory"]
    tokenizer = load_tokenizer(training.tokenizer, base)
    plan = plan_model(training.model, base_directory=base, vocab_size=tokenizer.vocab_size)
    model = build_empty_model(plan, precision=training.runtime.precision)
    # The types of the tensors to be written; there is nothing to convert yet.
    if dtype is not None:
        model.to(_DTYPES[dtype])  # type: ignore[arg-type]
    checkpoint = find_checkpoint(run_directory, step=step)
    stored = open_tensors(checkpoint, prefix=f"{MODEL}.", checksums=False)

    # Beside the final name, so that the rename is one of the same file system.
    temporary = output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with reported(output, what="cannot be written"):
            temporary.mkdir(parents=True)
            _write_model(model, stored, temporary, plan=plan, where=str(checkpoint))
            _write_tokenizer(tokenizer, training, temporary)
            os.rename(temporary, output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    parameters = sum(parameter.numel() for parameter in model.parameters())
    name = str(next(model.parameters()).dtype).removeprefix("torch.")
    version = parse_checkpoint_name(checkpoint.name)
    return ExportResult(checkpoint, version.step if version else 0, output, parameters, name)


def _write_tokenizer(tokenizer: TextTokenizer, training: Training, directory: Path) -> None:
    tokenizer.save_pretrained(directory)
    if training.rows is not None and training.rows.chat_template is not None:
        # The form of the prompts that the model has learned to answer.
        (directory / TEMPLATE_FILE).write_text(training.rows.chat_template, encoding="utf-8")


def _write_model(
    model: "PreTrainedModel",
    stored: StoredTensors,
    directory: Path,
    *,
    plan: ModelPlan,
    where: str,
) -> None:
    """Write configuration and weights of ``model``, which has no memory for them, from ``stored``."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.utils.logging import disable_progress_bar

    # Before the first file: names or shapes of another model would make an export that loads nowhere.
    tensors = module_tensors(model)
    wanted = {f"{MODEL}.{name}": tensor for name, tensor in tensors.items()}
    raise_if(compare_tensors(stored.table, wanted, where=where), CheckpointError)
    model.config.use_cache = True

    # A few architectures are saved under other names and shapes than they have in memory (experts in one
    # tensor, for example). transformers makes those from the whole model only.
    reverted = revert_weight_conversion(model, dict(tensors))
    if {name: value.shape for name, value in reverted.items()} != {
        name: value.shape for name, value in tensors.items()
    }:
        _log.warning(
            "a %s model is converted as a whole when it is saved: all its weights are held in memory",
            plan.name,
        )
        whole = build_model(plan, seed=0, precision="fp32", with_weights=False)
        # In place, by the method of torch: the type of transformers' own is not known.
        torch.nn.Module.to(whole, model.dtype)
        with torch.no_grad():
            for name, tensor in module_tensors(whole).items():
                tensor.copy_(stored.read(f"{MODEL}.{name}", tensor.dtype))
        whole.config.use_cache = True
        disable_progress_bar()
        whole.save_pretrained(directory, max_shard_size=_MAX_FILE_BYTES)
        return

    # The same files as save_pretrained's, which would want the whole model in memory.
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
        lambda name: stored.read(f"{MODEL}.{name}", forms[name].dtype),
        num_parameters=model.num_parameters(),
        max_file_bytes=_MAX_FILE_BYTES,
    )
