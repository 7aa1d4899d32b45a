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

    ``recorded``: what its data was prepared to when it began; ``total_steps``: its horizon then.

    For a script both are unknown: None and 0. ``model``: what its model was resolved to; None where an older
    version began it. ``config_hash``, ``data_fingerprint``: those of the recipe and of the data that it
    began with, which its checkpoints carry; empty for a fresh run. ``start``: where its data began; None
    where an older version began it, or it has several stages. ``load``: how much of another run it began
    with; empty for none.
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

    ``base_directory``: where paths of the manifest start. If the recipe is refused, the data are looked for
    there as well, so that both are corrected at once. Raises RunDirectoryError if another run lives there, or
    naming every field of the recipe that differs (with ``extend`` the horizon may).
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

    # A typed recipe: every field that differs is named, but for places, whose content decides later.
    changes = [
        (path, old, new)
        for path, old, new in changed_fields(recipe_of(before), recipe_of(run))
        if not (DECIDED_BY_CONTENT.fullmatch(path) and ABSENT not in (old, new))
    ]
    # The horizon alone may grow, and only where that was asked for: it shapes the schedule.
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
    state: Literal["begun", "complete"] = (
        "complete" if directory.is_complete() and not horizon else "begun"
    )
    return _read_state(directory, resolved, state)


def _read_state(
    directory: RunDirectory,
    resolved: Mapping[str, Any],
    state: Literal["begun", "complete"],
) -> RunState:
    """Read the state of a typed run from its ``run.json``.

    Raises RunDirectoryError for a damaged or missing key.
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
    """Where the data of the run in ``directory`` begin; None where an older version began it, or it has
    several stages.

    Raises RunDirectoryError naming each key that is missing or damaged.
    """
    begun_from = read_optional(directory, resolved, BEGUN_FROM, BegunFrom)
    value = read_optional(directory, resolved, DATA_START, StartRecord)
    goes_on = begun_from is not None and begun_from.load == "position"
    if value is None:
        if goes_on:
            raise damaged(directory, DATA_START)
        return None
    # All or nothing: with a part it would be a run that begins at its first samples, or has left out none.
    parts = {"leftOut": value.left_out, "dataBefore": value.data_before or None}
    if goes_on or any(one is not None for one in parts.values()):
        for key, part in parts.items():
            if part is None:
                raise damaged(directory, f"{DATA_START}.{key}")
    return DataStart.from_record(value)


def _check_kind(before: TrainingRun, run: TrainingRun, where: str) -> None:
    """A typed run stays one, and so does a script: neither can read what the other saved."""
    began, now = (
        "training" if one.spec.script is None else "script" for one in (before, run)
    )
    if began != now:
        raise RunDirectoryError(
            Problem(
                f"spec.{now}",
                f"this manifest has {now}, but the run in {where} began with {began}",
                "neither can go on with what the other saved",
                f"Set {began} again, or give this run a name of its own",
            )
        )


def check_extension(
    directory: RunDirectory, run_state: RunState, *, total_steps: int
) -> None:
    """A horizon may grow, never shrink. Raises RunDirectoryError."""
    raise_if(
        problems_of_extension(directory, run_state, total_steps=total_steps),
        RunDirectoryError,
    )


def problems_of_extension(
    directory: RunDirectory, run_state: RunState, *, total_steps: int
) -> list[Problem]:
    """The problem of a horizon that is shorter than the run's was."""
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
    """The text becomes the tokens it became when the run began. Raises RunDirectoryError."""
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
                    "Restore the tokenizer's files to go on with this run, or train with these under "
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
    """The task reads what it read when the run began. Raises RunDirectoryError.

    Its checkpoints would be refused as well, but only once this start has claimed the run and left records.
    ``facts``: those of its stages; one that the task had prepared with another value is named.
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
            # The other run may itself have gone on from one in other data.
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
    """The model is what the run began with. Raises RunDirectoryError naming every field that differs."""
    if run_state.model is not None:
        raise_if(
            compare_models(run_state.model, model, where=str(directory.path)),
            RunDirectoryError,
        )


def compare_models(
    before: Mapping[str, Any], now: Mapping[str, Any], *, where: str
) -> list[Problem]:
    """The differences between two descriptions of a model: the saved weights would be those of another
    function.

    A key that only one version of transformers knows is no difference.
    """
    old, new = comparable_configs(before, now)
    # An older version recorded what the directory says, and trained what its weights say.
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
    """The content of ``run.json``. ``base_directory``: where relative paths start, seen from the run
    directory.

    ``identity`` is that of the run as it began, whose data may have lain elsewhere.
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
    """The content of ``run.json`` for a script; ``base_directory`` as above."""
    return {
        "format": 1,
        "manifest": to_wire(run),
        BASE: base_directory,
        "configHash": config_hash(run),
    }


def _inspect_unknown(directory: RunDirectory) -> RunState:
    """Without ``run.json``: an empty place is a fresh start, checkpoints of nobody are not."""
    # A start that is refused in its load leaves a file of metrics without a step, and may be mended.
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
