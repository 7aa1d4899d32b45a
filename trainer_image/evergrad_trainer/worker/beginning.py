"""Begins a fresh run with the state of another one, or with the weights of a transformers directory."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from evergrad_manifest.differences import changed_fields, show_value
from evergrad_manifest.errors import ConfigurationError, Problem, raise_if
from evergrad_manifest.training import InitFrom
from evergrad_trainer.checkpoint.files import hash_bytes, hash_file
from evergrad_trainer.checkpoint.restoring import Restored
from evergrad_trainer.checkpoint.weights import load_weights
from evergrad_trainer.errors import CheckpointError
from evergrad_trainer.models.adapters import check_initial
from evergrad_trainer.models.weights import load_model_directory
from evergrad_trainer.records import EventType
from evergrad_trainer.state.registry import (
    COUNTERS,
    FROZEN,
    MODEL,
    OPTIMIZER,
    SNAPSHOTS,
    Values,
    from_extra,
    recipe_in,
)
from evergrad_trainer.training.build import Machinery
from evergrad_trainer.training.calls import enter_first
from evergrad_trainer.worker.session import BEGUN_FROM, Session

_FIELD: Final = "spec.training.initFrom"
_NO_POSITION: Final = ("model", "optimizer", "schedule", "ema", "horizon", "runtime")
"""Sections of a recipe that have no say in which samples a step has."""
_COUNTED: Final = ("step", "evaluated_step", "updates", "skipped", "non_finite")
"""Counters that go on in a run which begins with all of another one's state. The others are of its own
directory: the run's id, the best of its checkpoints, wishes of its observers."""


def begin(session: Session, machinery: Machinery) -> None:
    """Load what the file asks for into a fresh state, where it asks for something. All ranks call this.

    The source is remembered for ``run.json``. Raises CheckpointError, ModelError or ConfigurationError.
    """
    wanted = session.plan.run.training.init_from
    recorded = _agree(session, wanted)
    if wanted is None:
        return
    started = time.monotonic()
    path = session.plan.base_directory / wanted.path
    raise_if(check_initial(path, session.plan.run.training.model.lora), CheckpointError)
    if (path / "config.json").is_file():
        # Such a directory has the weights of a model, and nothing else that could be asked for.
        given = {"load": wanted.load != "weights", "step": wanted.step is not None}
        why = "a transformers directory has weights, and neither steps nor an optimizer's state"
        problems = [
            Problem(f"{_FIELD}.{key}", f"{wanted.path} cannot give this", why, "Remove it")
            for key, is_given in given.items()
            if is_given
        ]
        if MODEL not in machinery.modules.trained:
            what = f"{wanted.path} is a transformers directory"
            names = ", ".join(machinery.modules.trained)
            why = f"its weights are those of a model, and what is trained is {names}"
            remedy = "Name a run of this recipe, or leave initFrom out"
            problems.append(Problem(f"{_FIELD}.path", what, why, remedy))
        raise_if(problems, ConfigurationError)
        config = session.plan.model.require_config()
        load_model_directory(path, machinery.state(), config=config)
        digest: str | None = None
        if session.world.is_main:
            hashes = [
                f"{one.name} {hash_file(one)}" for one in sorted(path.glob("*.safetensors"))
            ]
            digest = hash_bytes("\n".join(hashes).encode())
        # Collective: one answer, also where a directory is another one on another host.
        digest = str(session.world.broadcast_json(digest))
        source = {"checkpoint": "", "step": 0, "hash": digest}
    else:
        loaded = _load(session, machinery, wanted, path)
        source = {
            "checkpoint": loaded.path.name,
            "step": loaded.step,
            "hash": loaded.checksum,
        }
    if wanted.load != "everything":
        # The task made its values from the initial weights, which are replaced by others here.
        seed = session.plan.run.training.reproducibility.seed
        enter_first(machinery.opened, machinery.modules, seed=seed, cut=machinery.cut())
    _check_same(recorded, source, path)
    facts = {"path": str(path), **source, "load": wanted.load}
    session.begun_from = facts
    seconds = round(time.monotonic() - started, 6)
    # Every event has a step of its own: this run's.
    fields = {("from_step" if key == "step" else key): value for key, value in facts.items()}
    session.emit(EventType.BEGUN_FROM, {**fields, "seconds": seconds})


def _agree(session: Session, wanted: InitFrom | None) -> Mapping[str, Any] | None:
    """Make sure that all nodes ask for the same; what an earlier start of this run began with, if there was
    one."""
    world = session.world
    recorded = (
        (session.directory.read_resolved() or {}).get(BEGUN_FROM) if world.is_main else None
    )
    own = None if wanted is None else [wanted.load, wanted.step]
    # Collective: nodes with other files would wait for one another in the load.
    rows = world.gather_json([own, recorded])
    if any(row[0] != rows[0][0] for row in rows):
        raise ConfigurationError(
            Problem(
                _FIELD,
                "differs between the nodes of this run",
                "all of them begin with one state",
                "Give all nodes the same file",
            )
        )
    recorded = rows[0][1]
    if recorded is not None and wanted is None:
        _check_same(recorded, None, Path())
    return recorded  # type: ignore[no-any-return]


def _check_same(
    recorded: Mapping[str, Any] | None, source: Mapping[str, Any] | None, path: Path
) -> None:
    """A run that is started again before its first checkpoint begins with what it began with."""
    if recorded is None or (source is not None and recorded["hash"] == source["hash"]):
        return
    before = " of ".join(filter(None, (recorded["checkpoint"], recorded["path"])))
    now = "nothing is named now"
    if source is not None:
        now = (
            " of ".join(filter(None, (source["checkpoint"], str(path))))
            + " has another content"
        )
    raise CheckpointError(
        Problem(
            _FIELD,
            f"this run began with {before}, and {now}",
            "its steps would be those of two runs",
            "Name what it began with, or give the changed run a directory of its own",
        )
    )


def _load(session: Session, machinery: Machinery, wanted: InitFrom, path: Path) -> Restored:
    """Fill the state from a checkpoint of another run, as far as is asked for."""
    trained = machinery.modules.trained
    prefix = tuple(f"{name}." for name in ([MODEL] if MODEL in trained else trained))
    if wanted.load == "optimizer":
        prefix = tuple(f"{name}." for name in (*trained, OPTIMIZER))
    elif wanted.load == "everything":
        prefix = ("",)
    # Collectives: rank 0 chooses and reads, the others get what it has read.
    loaded = load_weights(
        path,
        machinery.state(),
        world=session.world,
        checksums=session.plan.run.training.checkpoint.verify == "always",
        step=wanted.step,
        prefix=prefix,
    )
    values = from_extra(loaded.extra)
    # Adapters of another run were trained beside the weights that they stand beside here.
    name = f"{MODEL}.base"
    own = machinery.frozen.get(name)
    if own is not None and values.get(FROZEN, {}).get(name) not in (None, own):
        what = f"the adapters in {path} were trained beside other frozen weights"
        why = "what they add would mean nothing beside these"
        remedy = "Use the model that they were trained with, or leave initFrom out"
        raise CheckpointError(Problem(f"{_FIELD}.path", what, why, remedy))
    if wanted.load == "optimizer":
        machinery.registry.load_values(values, only={OPTIMIZER})
    elif wanted.load == "everything":
        _check_position(session, loaded, values)
        counters = {key: values[COUNTERS][key] for key in _COUNTED if key in values[COUNTERS]}
        session.state_from = str(loaded.path)
        machinery.registry.load_values({**values, COUNTERS: {**counters, "best": None}})
    return loaded


def _check_position(session: Session, loaded: Restored, values: Mapping[str, Values]) -> None:
    """The steps behind the checkpoint's exist here, and have the samples that they have there."""
    where, total = str(loaded.path), session.plan.numbers.total_steps
    problems = []
    if loaded.step >= total:
        what = f"ends at step {total}, and {loaded.path.name} is the state after step {loaded.step}"
        remedy = "Lengthen the horizon, which counts the steps of the other run too, or name an earlier step"
        problems.append(
            Problem("spec.training.horizon", what, "nothing is left to train", remedy)
        )
    if loaded.data_fingerprint != session.data.fingerprint:
        why = "the position of a state is one in the data that it was trained on"
        remedy = "Set it back, or load the optimizer, and with it the weights, alone"
        stored, own = recipe_in(loaded.extra), session.identity.recipe
        changes = [
            (field, old, new)
            for field, old, new in changed_fields(stored, own)
            if stored and own and field.split(".")[2].split("[")[0] not in _NO_POSITION
        ]
        problems += [
            Problem(
                field, f"{show_value(new)} here, and {show_value(old)} in {where}", why, remedy
            )
            for field, old, new in changes
        ] or [Problem(where, "was trained on other data", why, remedy)]
    if values.get(SNAPSHOTS):
        steps = sorted({one["after"] for one in values[SNAPSHOTS].values()})
        what = f"needs the checkpoint of step {', '.join(map(str, steps))} beside it"
        why = "later steps are trained beside its weights"
        remedy = "Begin with the checkpoint of that step or an earlier one"
        problems.append(Problem(where, what, why, remedy))
    raise_if(problems, CheckpointError)
