"""The model of a run whose file describes none: the model of the weights that the run starts from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evergrad_manifest.training import RECIPES, Model, Training
from evergrad_trainer.checkpoint.weights import look_at
from evergrad_trainer.models.build import ModelPlan, plan_directory, plan_model
from evergrad_trainer.run.directory import RunDirectory, find_record
from evergrad_trainer.run.record import ModelRecord, read_optional
from evergrad_trainer.state.registry import DESCRIPTION, from_extra

_FIELD = "spec.training.initFrom.path"


def plan_initial(
    training: Training,
    *,
    base_directory: Path,
    vocab_size: int | None,
    run_directory: Path | None = None,
) -> ModelPlan:
    """Plan the model that the file describes, or else the model of the weights that the run starts from.

    ``vocab_size``: as in ``plan_model``. ``run_directory``: contains the configuration that the run started
    with; if that exists, the source of the weights is not read. Raises ModelError, RunDirectoryError, and
    CheckpointError or VolumeError if the source cannot be read.
    """
    settings, initial = training.model, training.init_from
    if not settings.is_given and initial is not None and training.recipe in RECIPES:
        stored = None if run_directory is None else _read_own(run_directory)
        if stored is None:
            path = base_directory / initial.path
            stored = describe_weights(path, step=initial.step, field=_FIELD)
        if stored is not None:
            settings = Model.model_validate({"config": dict(stored["config"])})
    return plan_model(settings, base_directory=base_directory, vocab_size=vocab_size)


def describe_weights(
    path: Path, *, step: int | None, field: str
) -> Mapping[str, Any] | None:
    """Return the description of the model in a transformers directory, a run or one checkpoint.

    Returns None if an older version saved it, without a description. Raises ModelError, and CheckpointError
    or VolumeError if there is no readable checkpoint.
    """
    if (path / "config.json").is_file():
        return plan_directory(path, field=field).describe()
    _, choice = look_at(path, step=step)
    stored = from_extra(choice.extra).get(DESCRIPTION)
    if stored is None and (found := find_record(path.resolve())) is not None:
        return found[1].get("model")
    return stored


def _read_own(run_directory: Path) -> Mapping[str, Any] | None:
    directory = RunDirectory(run_directory)
    record = directory.read_resolved()
    if record is None or read_optional(directory, record, "model", ModelRecord) is None:
        return None
    return record["model"]  # type: ignore[no-any-return]
