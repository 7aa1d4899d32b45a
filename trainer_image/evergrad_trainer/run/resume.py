"""State of the run in a directory, and the check that this manifest may continue with it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import Problem, raise_if
from evergrad_manifest.identity import (
    DECIDED_BY_CONTENT,
    config_hash,
    recipe_of,
    to_wire,
)
from evergrad_manifest.model.differences import (
    ABSENT,
    changed_fields,
    problems_of_changes,
    show_value,
)
from evergrad_trainer.base.errors import RunDirectoryError
from evergrad_trainer.data.preparation.files import (
    evaluation_sources,
    find_files,
    training_sources,
)
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.data.start_positions import DATA_START, DataStart, StartRecord
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.run.record import (
    BASE,
    BEGUN_FROM,
    CORRECTED,
    BegunFrom,
    ModelRecord,
    comparable_configs,
    damaged,
    read_key,
    read_optional,
    read_run,
)

if TYPE_CHECKING:
    from evergrad_trainer.checkpoint.manifest import Identity

_HORIZON = "spec.training.horizon"


@dataclass(frozen=True)
class RunState:
    """State of a run before this start.

    ``recorded``: the result of data preparation when the run began; None for a script. ``total_steps``: the
    run's horizon when it began; 0 for a script. ``model``: the resolved model; None if an older version began
    the run. ``config_hash``, ``data_fingerprint``: hash of the recipe and fingerprint of the data that the
    run began with, as in its checkpoints; empty for a fresh run. ``start``: the position at which the run's
    data began; None if an older version began the run or if it has several stages. ``load``: the part of
    another run that this run began with, as in ``spec.training.initFrom.load`` (may be empty).
    """

    state: Literal["fresh", "begun", "complete"]
    total_steps: int = 0
    recorded: Prepared | None = None
    model: dict[str, Any] | None = None
    config_hash: str = ""
    data_fingerprint: str = ""
    start: DataStart | None = None
    load: str = ""


def inspect_directory(
    directory: RunDirectory,
    run: TrainingRun,
    *,
    extend: bool,
    base_directory: Path | None = None,
) -> RunState:
    """Compare the manifest with the run that began in ``directory``.

    ``base_directory``: the directory that relative paths of the manifest refer to. If the recipe is refused,
    the data files are checked too, so that the error names both kinds of problems.

    Raises RunDirectoryError if the directory contains another run, or if fields of the recipe differ; the
    error names every such field. With ``extend`` the horizon may differ.
    """
    resolved = directory.read_resolved()
    if resolved is None:
        return _inspect_unknown(directory)
    before = read_run(directory, resolved)
    where = str(directory.path)
    if before.metadata.name != run.metadata.name:
        raise RunDirectoryError(
            Problem(
                where,
                f"holds the run {before.metadata.name!r}",
                f"this manifest is the run {run.metadata.name!r}",
                "Choose another --run-directory, or use that run's manifest",
            )
        )
    _check_kind(before, run, where)
    if run.spec.script is not None:
        of_script = changed_fields(recipe_of(before), recipe_of(run), where="spec.script")
        raise_if(problems_of_changes(of_script, directory=where), RunDirectoryError)
        return RunState("complete" if directory.is_complete() else "begun")

    is_longer = _check_recipe(
        before, run, where, extend=extend, base_directory=base_directory
    )
    state: Literal["begun", "complete"] = (
        "complete" if directory.is_complete() and not is_longer else "begun"
    )
    return _read_state(directory, resolved, state)


def _check_recipe(
    before: TrainingRun,
    run: TrainingRun,
    where: str,
    *,
    extend: bool,
    base_directory: Path | None,
) -> bool:
    """Compare a typed recipe with the recipe that the run began with. Returns whether the horizon differs.

    Raises RunDirectoryError that names every other field that differs.
    """
    # Paths may differ, because later checks compare content.
    changes = [
        (path, old, new)
        for path, old, new in changed_fields(recipe_of(before), recipe_of(run))
        if not (DECIDED_BY_CONTENT.fullmatch(path) and ABSENT not in (old, new))
    ]
    # Only the horizon may change, and only with --extend, because the schedule depends on the horizon.
    horizon = [change for change in changes if change[0].startswith(_HORIZON)]
    problems = problems_of_changes(
        [change for change in changes if change not in horizon], directory=where
    )
    if horizon and not extend:
        problems += [
            Problem(
                path,
                f"{new} here, but the run in {where} began with {old}",
                "the horizon shapes the schedule",
                "Set it back, or use --extend to make the run longer",
            )
            for path, old, new in horizon
        ]
    if problems and base_directory is not None:
        for source in (
            *training_sources(run.training, base_directory),
            *evaluation_sources(run.training, base_directory),
        ):
            problems += find_files(source)[1]
    raise_if(problems, RunDirectoryError)
    return bool(horizon)


def _read_state(
    directory: RunDirectory,
    resolved: Mapping[str, Any],
    state: Literal["begun", "complete"],
) -> RunState:
    """Read the state of a typed run from its ``run.json``.

    Raises RunDirectoryError if a key is damaged or missing.
    """
    begun_from = read_optional(directory, resolved, BEGUN_FROM, BegunFrom)
    model = read_optional(directory, resolved, "model", ModelRecord)
    return RunState(
        state,
        total_steps=read_key(directory, resolved, "derived.totalSteps", int),
        recorded=read_key(directory, resolved, "prepared", Prepared),
        model=None if model is None else resolved["model"],
        config_hash=read_optional(directory, resolved, "configHash", str) or "",
        data_fingerprint=read_optional(directory, resolved, "dataFingerprint", str) or "",
        start=read_start(directory, resolved),
        load="" if begun_from is None else begun_from.load,
    )


def read_start(directory: RunDirectory, resolved: Mapping[str, Any]) -> DataStart | None:
    """Read the position at which the data of the run in ``directory`` begin.

    Returns None if an older version began the run or if it has several stages. Raises RunDirectoryError if a
    key is missing or damaged.
    """
    begun_from = read_optional(directory, resolved, BEGUN_FROM, BegunFrom)
    value = read_optional(directory, resolved, DATA_START, StartRecord)
    goes_on = begun_from is not None and begun_from.load == "position"
    if value is None:
        if goes_on:
            raise damaged(directory, DATA_START)
        return None
    # Require both keys or neither. With only one key, the run would silently begin at the first samples or
    # leave out no samples.
    parts = {"leftOut": value.left_out, "dataBefore": value.data_before or None}
    if goes_on or any(one is not None for one in parts.values()):
        for key, part in parts.items():
            if part is None:
                raise damaged(directory, f"{DATA_START}.{key}")
    return DataStart.from_record(value)


def _check_kind(before: TrainingRun, run: TrainingRun, where: str) -> None:
    """Refuse a change between a typed run and a script, because neither can read the other's checkpoints."""
    began, now = (
        "training" if one.spec.script is None else "script" for one in (before, run)
    )
    if began != now:
        raise RunDirectoryError(
            Problem(
                f"spec.{now}",
                f"this manifest has {now}, but the run in {where} began with {began}",
                "neither can continue from what the other saved",
                f"Set {began} again, or give this run a name of its own",
            )
        )


def check_extension(
    directory: RunDirectory, run_state: RunState, *, total_steps: int
) -> None:
    """Raise RunDirectoryError if the horizon is shorter than before; a horizon may only grow."""
    raise_if(
        problems_of_extension(directory, run_state, total_steps=total_steps),
        RunDirectoryError,
    )


def problems_of_extension(
    directory: RunDirectory, run_state: RunState, *, total_steps: int
) -> list[Problem]:
    """Return the problem of a horizon that is shorter than before, or an empty list."""
    if run_state.state != "begun" or total_steps >= run_state.total_steps:
        return []
    return [
        Problem(
            _HORIZON,
            (
                f"{total_steps} steps are fewer than the {run_state.total_steps} of the run in "
                f"{directory.path}"
            ),
            "a run can be extended, not shortened",
            (
                f"Use at least {run_state.total_steps} steps; to end it earlier use "
                "spec.training.stop.afterStep"
            ),
        )
    ]


def check_tokenizer_unchanged(run_state: RunState, prepared: Prepared) -> None:
    """Raise RunDirectoryError if the tokenizer differs from the tokenizer with which the run began."""
    recorded = run_state.recorded
    if recorded is not None and recorded.tokenizer_identity != prepared.tokenizer_identity:
        raise RunDirectoryError(
            Problem(
                "spec.training.tokenizer",
                (
                    f"its content is {prepared.tokenizer_identity}, but the run began with "
                    f"{recorded.tokenizer_identity}"
                ),
                "the same text would become other tokens"
                + (
                    "; this version reads all files of the directory, as AutoTokenizer does"
                    if prepared.tokenizer_identity.startswith("auto-")
                    else ""
                ),
                (
                    "Restore the tokenizer's files to continue this run, or train with these under "
                    "another run name"
                ),
            )
        )


def check_data_unchanged(
    directory: RunDirectory,
    run_state: RunState,
    *,
    fingerprint: str,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Raise RunDirectoryError if the data differ from the data with which the run began.

    The run's checkpoints would be refused too, but only after this start has claimed the run and written
    records. ``facts``: facts of the prepared stages; the error names each fact whose value has changed.
    """
    recorded = run_state.data_fingerprint
    if recorded and recorded != fingerprint:
        why, also = f"that of the data here is {fingerprint!r}", ""
        then = run_state.recorded.facts if run_state.recorded is not None else {}
        for name, value in (facts or {}).items():
            if name in then and then[name] != value:
                was, now = show_value(then[name]), show_value(value)
                why += f", with the {name} {now}, which was {was}"
        if run_state.start is None and run_state.load == "everything":
            # The other run may itself continue a run that used other data.
            why += (
                f", which begin at their first samples, since run.json has no {DATA_START}"
            )
            also = " (and run.json, if it is damaged)"
        raise RunDirectoryError(
            Problem(
                str(directory.path),
                f"the data's fingerprint is {recorded!r}",
                why,
                f"Restore the data this run began with{also}, or start a new run with initFrom",
            )
        )


def check_model_unchanged(
    directory: RunDirectory, run_state: RunState, model: dict[str, Any]
) -> None:
    """Raise RunDirectoryError, naming every field that differs, if the model is not the model of the run."""
    if run_state.model is not None:
        raise_if(
            compare_models(run_state.model, model, where=str(directory.path)),
            RunDirectoryError,
        )


def compare_models(
    before: Mapping[str, Any], now: Mapping[str, Any], *, where: str
) -> list[Problem]:
    """Return the differences between two descriptions of a model, with which the saved weights would compute
    another function.

    A key that exists in only one of two versions of transformers is not a difference.
    """
    old, new = comparable_configs(before, now)
    # An older version recorded the directory's configuration, but trained the model of the weights.
    corrected = now.get(CORRECTED, {})
    old = {
        key: new.get(key) if key in corrected and corrected[key] == value else value
        for key, value in old.items()
    }
    why = "the weights would be those of another function"
    if before["transformers"] != now["transformers"]:
        why += f"; transformers was {before['transformers']} then and is {now['transformers']} now"
    return [
        Problem(
            path,
            f"is {show_value(value)} here, but the run in {where} began with {show_value(was)}",
            why,
            "Set it in the model's configuration to what it was, or give the changed run a name of its own",
        )
        for path, was, value in changed_fields(
            old, new, where="the resolved model's configuration"
        )
    ]


def resolved_record(
    run: TrainingRun,
    prepared: Prepared,
    *,
    identity: "Identity",
    base_directory: str,
    derived: dict[str, Any],
    model: dict[str, Any],
) -> dict[str, Any]:
    """Build the content of ``run.json`` for a typed run.

    ``base_directory``: the directory that relative paths refer to, relative to the run directory.
    ``identity``: the identity of the run when it began; its data may have been in another place then.
    """
    return {
        "format": 1,
        "manifest": to_wire(run),
        BASE: base_directory,
        "derived": derived,
        "configHash": identity.config_hash,
        "dataFingerprint": identity.data_fingerprint,
        "prepared": prepared.to_json(),
        "model": model,
    }


def resolved_script_record(run: TrainingRun, *, base_directory: str) -> dict[str, Any]:
    """Build the content of ``run.json`` for a script; ``base_directory`` as in ``resolved_record``."""
    return {
        "format": 1,
        "manifest": to_wire(run),
        BASE: base_directory,
        "configHash": config_hash(run),
    }


def _inspect_unknown(directory: RunDirectory) -> RunState:
    """Return the state of a directory without ``run.json``: a fresh start if it is empty.

    Raises RunDirectoryError if the directory contains metrics or checkpoints of an unknown run.
    """
    # A start that is refused while it loads leaves an empty file of metrics. The next start may reuse it.
    leftovers = [
        path
        for path in (directory.metrics, directory.checkpoints / "latest")
        if path.exists() and path.stat().st_size > 0
    ]
    if leftovers:
        raise RunDirectoryError(
            Problem(
                str(directory.path),
                f"holds {leftovers[0].name} but no {directory.resolved.name}",
                "whose run this is cannot be told",
                "Restore run.json from a backup, or choose another --run-directory",
            )
        )
    return RunState("fresh")
