"""The ids at which a text of a run's model ends: the ids that the model has learned, and the ids in the
directory that the run began with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from evergrad_manifest.training import Training
from evergrad_trainer.data.preparation.row_format import row_format
from evergrad_trainer.data.tokenizers import TextTokenizer
from evergrad_trainer.data.turn_end import find_ends
from evergrad_trainer.models.build import plan_model
from evergrad_trainer.models.generation import END, add_ends, read_settings
from evergrad_trainer.run.directory import find_record
from evergrad_trainer.run.record import read_base, read_run

_LONGEST_CHAIN: Final = 64
"""Maximum number of runs that begin with one another; a longer chain is a cycle."""


def find_export_ends(
    training: Training, base_directory: Path, tokenizer: TextTokenizer
) -> tuple[int, ...]:
    """Return every id that an export of the run declares as an end of a text, in order.

    Raises DataError if the chat template is invalid, and ModelError if generation settings cannot be read.
    """
    learned = find_ends(tokenizer, row_format(training, base_directory))
    ends = add_ends(_ends_before(training, base_directory), learned)
    return (ends,) if isinstance(ends, int) else tuple(ends)


def _ends_before(training: Training, base_directory: Path) -> int | Sequence[int] | None:
    """Return the end ids of the run's original model or of the manifest."""
    origin = find_origin(training, base_directory)
    settings = None if origin is None else read_settings(origin)
    ends: Any
    if settings is not None:
        ends = settings.get(END)
    elif training.model.path is not None:
        # Without generation settings, transformers uses the model's configuration.
        plan = plan_model(training.model, base_directory=base_directory, vocab_size=None)
        ends = getattr(plan.config, END, None)
    else:
        ends = (training.model.config or {}).get(END)
    return ends  # type: ignore[no-any-return]


def find_origin(training: Training, base: Path) -> Path | None:
    """Return the transformers directory with which the run began, also through other runs; None if it does
    not exist."""
    for _ in range(_LONGEST_CHAIN):
        named = training.model.path
        if named is not None:
            return base / named
        if training.init_from is None:
            return None
        path = base / training.init_from.path
        if (path / "config.json").is_file():
            return path
        found = find_record(path.resolve())
        if found is None or "training" not in found[1]["manifest"]["spec"]:
            return None
        directory, record = found
        training, base = read_run(directory, record).training, read_base(directory, record)
    return None
