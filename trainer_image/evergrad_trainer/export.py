"""A checkpoint as a transformers directory: safetensors, configuration and tokenizer, for any tool that reads
those."""

import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

import torch

from evergrad_manifest.errors import Problem
from evergrad_manifest.identity import from_wire
from evergrad_trainer.checkpoint.layout import parse_checkpoint_name
from evergrad_trainer.checkpoint.weights import find_checkpoint, read_into
from evergrad_trainer.data.tokenizers import load_tokenizer
from evergrad_trainer.errors import RunDirectoryError
from evergrad_trainer.models.build import build_model, plan_model
from evergrad_trainer.run_directory import RunDirectory
from evergrad_trainer.state.providers import module_tensors
from evergrad_trainer.state.registry import MODEL

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHARD_SIZE = "5GB"
"""Most bytes of one safetensors file, of which each is written from the model's own memory, one after the other."""


@dataclass(frozen=True)
class ExportResult:
    """What was written where. ``dtype``: torch's name of the weights' type."""

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
    appears whole or not at all. Raises RunDirectoryError, CheckpointError, ModelError or DataError.
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
    from transformers.utils.logging import disable_progress_bar

    run = from_wire(resolved["manifest"])
    training, base = run.training, run_directory / resolved["baseDirectory"]
    tokenizer = load_tokenizer(training.tokenizer, base)
    plan = plan_model(training.model, base_directory=base, vocab_size=tokenizer.vocab_size)
    checkpoint = find_checkpoint(run_directory, step=step)
    model = build_model(plan, seed=0, precision=training.runtime.precision, with_weights=False)
    if dtype is not None:
        # Before the weights are there: they are converted as they are read, and held once, in the type they are written in.
        model.to(_DTYPES[dtype])  # type: ignore[arg-type]
    weights = {f"{MODEL}.{name}": tensor for name, tensor in module_tensors(model).items()}
    read_into(checkpoint, weights, prefix=f"{MODEL}.")
    model.config.use_cache = True
    disable_progress_bar()
    temporary = output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        model.save_pretrained(temporary, max_shard_size=_SHARD_SIZE)
        tokenizer.save_pretrained(temporary)
        os.rename(temporary, output)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    parameters = sum(parameter.numel() for parameter in model.parameters())
    name = str(next(model.parameters()).dtype).removeprefix("torch.")
    version = parse_checkpoint_name(checkpoint.name)
    return ExportResult(checkpoint, version.step if version else 0, output, parameters, name)
