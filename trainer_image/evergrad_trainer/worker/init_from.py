"""Begins a fresh run with the state of another run, or with the weights of a transformers directory."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from evergrad_manifest.errors import ConfigurationError, Problem, raise_if
from evergrad_manifest.training import InitFrom
from evergrad_trainer.base.errors import CheckpointError
from evergrad_trainer.base.records import EventType
from evergrad_trainer.checkpoint.files import hash_bytes, hash_file
from evergrad_trainer.checkpoint.restore import Restored
from evergrad_trainer.checkpoint.weights import load_weights
from evergrad_trainer.models.adapters import check_initial
from evergrad_trainer.models.compatibility import compare_functions
from evergrad_trainer.models.weights import load_model_directory
from evergrad_trainer.run.record import BEGUN_FROM
from evergrad_trainer.state.registry import (
    COUNTERS,
    CURSOR,
    DESCRIPTION,
    FROZEN,
    MODEL,
    OBSERVERS,
    OPTIMIZER,
    SNAPSHOTS,
    Values,
    from_extra,
)
from evergrad_trainer.training.build import Machinery
from evergrad_trainer.training.task_adapter import enter_first
from evergrad_trainer.worker.resume_position import FIELD, differing_data
from evergrad_trainer.worker.session import Session

_COUNTED: Final = ("step", "evaluated_step", "updates", "skipped", "non_finite")
"""Counters that keep their values if a run continues after another run's step. The other counters belong to
the run's own directory: the id of the run, its best checkpoint, and the requests of its observers."""


def begin(session: Session, machinery: Machinery) -> None:
    """Load the source that ``spec.training.initFrom`` names, if any, into a fresh state.

    All ranks call this, because it contains collectives. The source is kept in the session and written to
    ``run.json`` later. Raises CheckpointError or ModelError if the source cannot be loaded or does not match
    this run, and ConfigurationError if the nodes' files differ or the source does not contain the requested
    state.
    """
    wanted = session.plan.run.training.init_from
    recorded = _agree(session, wanted)
    if wanted is None:
        return
    started = time.monotonic()
    path = session.plan.base_directory / wanted.path
    raise_if(check_initial(path, session.plan.run.training.model.lora), CheckpointError)
    if (path / "config.json").is_file():
        source, differences = _load_model(session, machinery, wanted, path)
        _check_same(recorded, source, path)
    else:
        source, differences = _load(session, machinery, wanted, path, recorded=recorded)
    if not wanted.goes_on:
        # The task computed its values from the initial weights, which have just been replaced.
        seed = session.plan.run.training.reproducibility.seed
        enter_first(machinery.opened, machinery.modules, seed=seed, cut=machinery.cut())
    facts = _describe_source(session, wanted, path, source)
    session.begun_from = facts
    # Rename ``step``: every event already has a field of this name, which is the step of this run.
    fields = {
        ("from_step" if key == "step" else key): value for key, value in facts.items()
    }
    seconds = round(time.monotonic() - started, 6)
    session.emit(EventType.BEGUN_FROM, {**fields, "seconds": seconds})
    for message in (*session.plan.doubts, *differences):
        session.emit(EventType.WARNING, {"message": message})


def _load_model(
    session: Session, machinery: Machinery, wanted: InitFrom, path: Path
) -> tuple[dict[str, Any], list[str]]:
    """Load the weights of a transformers directory, on all ranks together.

    Returns the source with the hash of its weights, and a line for each difference between the models that
    does not affect the result.
    """
    # The directory contains only the weights of a model, so refuse every other request.
    given = {"load": wanted.load != "weights", "step": wanted.step is not None}
    why = "a transformers directory has weights, and neither steps nor an optimizer's state"
    problems = [
        Problem(f"{FIELD}.{key}", f"{wanted.path} cannot give this", why, "Remove it")
        for key, is_given in given.items()
        if is_given
    ]
    if MODEL not in machinery.modules.trained:
        what = f"{wanted.path} is a transformers directory"
        names = ", ".join(machinery.modules.trained)
        why = f"its weights are those of a model, and what is trained is {names}"
        remedy = "Name a run of this recipe, or leave initFrom out"
        problems.append(Problem(f"{FIELD}.path", what, why, remedy))
    raise_if(problems, ConfigurationError)
    config = session.plan.model.require_config()
    differences = load_model_directory(path, machinery.state(), config=config)
    digest: str | None = None
    if session.world.is_main:
        hashes = [
            f"{one.name} {hash_file(one)}" for one in sorted(path.glob("*.safetensors"))
        ]
        digest = hash_bytes("\n".join(hashes).encode())
    # Collective: all ranks use rank 0's hash, even if the path is a different directory on another host.
    digest = str(session.world.broadcast_json(digest))
    return {"checkpoint": "", "step": 0, "hash": digest}, differences


def _describe_source(
    session: Session, wanted: InitFrom, path: Path, source: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what this run began with, as ``run.json`` records it."""
    facts: dict[str, Any] = {"path": str(path), **source, "load": wanted.load}
    if wanted.load == "position" and (start := session.data.train.start) is not None:
        facts["sources"] = {one.name: one.taken for one in start.sources}
    return facts


def _agree(session: Session, wanted: InitFrom | None) -> Mapping[str, Any] | None:
    """Check that all nodes request the same source; return the source of an earlier start, if any.

    Raises ConfigurationError if the nodes differ, and CheckpointError if the request differs from the
    earlier start.
    """
    world = session.world
    recorded = (
        (session.directory.read_resolved() or {}).get(BEGUN_FROM) if world.is_main else None
    )
    own = None if wanted is None else [wanted.load, wanted.step]
    # Collective: compare first, because nodes with different files would wait for each other in the load.
    rows = world.gather_json([own, recorded])
    if any(row[0] != rows[0][0] for row in rows):
        raise ConfigurationError(
            Problem(
                FIELD,
                "differs between the nodes of this run",
                "all of them begin with one state",
                "Give all nodes the same file",
            )
        )
    recorded = rows[0][1]
    if recorded is not None and wanted is None:
        _check_same(recorded, None, Path())
    if recorded is not None:
        check_load_unchanged(recorded["load"], wanted)
    return recorded  # type: ignore[no-any-return]


def check_load_unchanged(recorded: str, wanted: InitFrom | None) -> None:
    """Check that a run that is started again before its first checkpoint uses the same ``load`` as before.

    ``recorded`` is the value of ``load`` at the first start, or an empty string if it is not known. Raises
    CheckpointError if the values differ.
    """
    if wanted is None or recorded in ("", wanted.load):
        return
    raise CheckpointError(
        Problem(
            f"{FIELD}.load",
            f"{wanted.load} here, and this run began with {recorded}",
            "its steps would be those of two runs",
            f"Set it back to {recorded}, or give the changed run a directory of its own",
        )
    )


def _check_same(
    recorded: Mapping[str, Any] | None, source: Mapping[str, Any] | None, path: Path
) -> None:
    """Raise CheckpointError if a run without a checkpoint is started again with a different source."""
    if recorded is None or (source is not None and recorded["hash"] == source["hash"]):
        return
    now, remedy = "nothing is named now", "Name what it began with"
    if source is not None:
        now = (
            " of ".join(filter(None, (source["checkpoint"], str(path))))
            + " has another content"
        )
        if recorded["checkpoint"] and recorded["step"] != source["step"]:
            remedy = f"Set {FIELD}.step to {recorded['step']}"
    raise CheckpointError(
        Problem(
            FIELD,
            f"this run began with {_describe(recorded)}, and {now}",
            "its steps would be those of two runs",
            f"{remedy}, or give the changed run a directory of its own",
        )
    )


def _describe(recorded: Mapping[str, Any]) -> str:
    return " of ".join(filter(None, (recorded["checkpoint"], recorded["path"])))


def _load(
    session: Session,
    machinery: Machinery,
    wanted: InitFrom,
    path: Path,
    *,
    recorded: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], list[str]]:
    """Fill the requested parts of the state from a checkpoint of another run.

    Returns the checkpoint (its name, step and hash), and a line for each difference between the models that
    does not affect the result. ``recorded`` is the checkpoint that an earlier start of this run began with.
    """
    trained = machinery.modules.trained
    prefix = tuple(f"{name}." for name in ([MODEL] if MODEL in trained else trained))
    if wanted.load == "optimizer":
        prefix = tuple(f"{name}." for name in (*trained, OPTIMIZER))
    elif wanted.goes_on:
        prefix = ("",)
    loaded = _load_tensors(
        session, machinery, wanted, path, recorded=recorded, prefix=prefix
    )
    source = {"checkpoint": loaded.path.name, "step": loaded.step, "hash": loaded.checksum}
    # Check this before the state is compared with the data, which were opened as in the earlier start.
    _check_same(recorded, source, path)
    values = from_extra(loaded.extra)
    differences: list[str] = []
    if MODEL in trained:
        differences = _check_function(session, path, values)
    # Adapters can be used only with the frozen weights that they were trained with.
    name = f"{MODEL}.base"
    own = machinery.frozen.get(name)
    if own is not None and values.get(FROZEN, {}).get(name) not in (None, own):
        what = f"the adapters in {path} were trained beside other frozen weights"
        why = "what they add would mean nothing beside these"
        remedy = "Use the model that they were trained with, or leave initFrom out"
        raise CheckpointError(Problem(f"{FIELD}.path", what, why, remedy))
    if wanted.load == "optimizer":
        machinery.registry.load_values(values, only={OPTIMIZER})
    elif wanted.goes_on:
        keeps_data = wanted.load == "everything"
        _check_position(session, loaded, values, keeps_data=keeps_data)
        counters = {
            key: values[COUNTERS][key] for key in _COUNTED if key in values[COUNTERS]
        }
        session.state_from = str(loaded.path)
        # The cursor is a position in the other run's mixture, and its observers measured losses on that
        # mixture.
        left_out = () if keeps_data else (CURSOR, OBSERVERS)
        goes_on = {name: own for name, own in values.items() if name not in left_out}
        machinery.registry.load_values({**goes_on, COUNTERS: {**counters, "best": None}})
    return source, differences


def _check_function(
    session: Session, path: Path, values: Mapping[str, Values]
) -> list[str]:
    """Check that the weights compute the same function in this run as in the run that trained them.

    Returns a line for each difference that does not affect the result. Raises CheckpointError if the
    functions differ.
    """
    stored = values.get(DESCRIPTION)
    if stored is None:
        # An older version saved the checkpoint and did not record the configuration.
        return [
            f"the model of {path} is not recorded; only the shapes of its tensors were compared"
        ]
    problems, lines = compare_functions(
        stored, session.plan.model.describe(), where=str(path), field=f"{FIELD}.path"
    )
    raise_if(problems, CheckpointError)
    return lines


def _load_tensors(
    session: Session,
    machinery: Machinery,
    wanted: InitFrom,
    path: Path,
    *,
    recorded: Mapping[str, Any] | None,
    prefix: tuple[str, ...],
) -> Restored:
    """Fill the tensors whose names begin with ``prefix``.

    They are read from the checkpoint of the step that the file names, or from the newest checkpoint.
    """
    # The newest checkpoint of a run that still trains can change between two starts. Use the step that this
    # run has already used to begin, to open its data or to read a reference.
    step, start = wanted.step, session.data.train.start
    if step is None and recorded is not None and recorded["checkpoint"]:
        step = recorded["step"]
    elif step is None and wanted.load == "position" and start is not None:
        step = start.after_step
    elif step is None:
        step = machinery.modules.begins_behind
    try:
        # Collectives: rank 0 chooses and reads the checkpoint, and sends the tensors to the other ranks.
        return load_weights(
            path,
            machinery.state(),
            world=session.world,
            checksums=session.plan.run.training.checkpoint.verify == "always",
            step=step,
            prefix=prefix,
        )
    except CheckpointError as error:
        if step == wanted.step or recorded is None:
            raise
        # Remove the remedy of this error, to name another checkpoint: this run would refuse it.
        why = " ".join(str(replace(one, remedy="")) for one in error.problems)
        what = f"this run began with {_describe(recorded)}, which cannot be loaded now"
        remedy = (
            f"Bring it back, or set {FIELD}.path back if it was changed. Without it, begin anew in a "
            "directory of its own: this run has no checkpoint yet"
        )
        raise CheckpointError(Problem(FIELD, what, why, remedy)) from error


def _check_position(
    session: Session, loaded: Restored, values: Mapping[str, Values], *, keeps_data: bool
) -> None:
    """Check that this run has steps after the checkpoint's step, and that its data continue from there.

    With ``keeps_data`` these steps use the same samples as in the other run. Otherwise each source continues
    after the samples that it has already supplied. Raises CheckpointError with all problems.
    """
    where, total = str(loaded.path), session.plan.numbers.total_steps
    problems = []
    if loaded.step >= total:
        what = f"ends at step {total}, and {loaded.path.name} is the state after step {loaded.step}"
        remedy = "Lengthen the horizon, which counts the steps of the other run too, or name an earlier step"
        problems.append(
            Problem("spec.training.horizon", what, "nothing is left to train", remedy)
        )
    start = session.data.train.start
    if not keeps_data:
        # The data were opened from the manifest of a checkpoint, before this checkpoint was loaded.
        found = None if start is None else (start.data_before, start.after_step)
        if found != (loaded.data_fingerprint, loaded.step):
            what = f"{loaded.path.name} was loaded, and the data were opened to go on behind another one"
            why = "the newest one is damaged, or has come since"
            remedy = "Set spec.training.initFrom.step, or start again"
            problems.append(Problem(where, what, why, remedy))
    else:
        problems += differing_data(loaded.path, loaded, session.identity)
    if values.get(SNAPSHOTS):
        steps = sorted({one["after"] for one in values[SNAPSHOTS].values()})
        what = f"needs the checkpoint of step {', '.join(map(str, steps))} beside it"
        why = "later steps are trained beside its weights"
        remedy = "Begin with the checkpoint of that step or an earlier one"
        problems.append(Problem(where, what, why, remedy))
    raise_if(problems, CheckpointError)
