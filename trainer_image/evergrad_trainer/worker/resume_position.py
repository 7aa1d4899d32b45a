"""Finds where the data of a fresh run begin that continues behind another run's step."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import Problem, raise_if
from evergrad_manifest.identity import DECIDED_BY_CONTENT, hashed_recipe
from evergrad_manifest.model.differences import Change, changed_fields, show_value
from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import CheckpointError
from evergrad_trainer.checkpoint.manifest import Identity
from evergrad_trainer.checkpoint.weights import look_at
from evergrad_trainer.data.preparation.row_format import OTHER_SAMPLES, find_changed_texts
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.data.start_positions import DataStart
from evergrad_trainer.run.directory import RunDirectory, find_record, searched_folders
from evergrad_trainer.run.record import read_key, read_optional, read_run
from evergrad_trainer.run.resume import read_start
from evergrad_trainer.state.registry import CURSOR, from_extra, recipe_in

FIELD: Final = "spec.training.initFrom"
_NO_POSITION: Final = ("model", "optimizer", "schedule", "ema", "horizon", "runtime")
"""Sections of a recipe that have no say in which samples a step has."""
_MIXTURE: Final = ("spec.training.data.sources", "spec.training.data.mixing")
"""Fields that may differ where the position of each source is kept."""
_SEEDS: Final = ("seed", "dataSeed")
_REMEDY: Final = "Set it back, or load the optimizer, and with it the weights, alone"


class Stored(Protocol):
    """A checkpoint that was chosen, or loaded."""

    @property
    def data_fingerprint(self) -> str:
        """Fingerprint of the data that it was trained on."""

    @property
    def extra(self) -> Mapping[str, Any]:
        """Values that it was saved with."""


@dataclass(frozen=True)
class OtherRun:
    """The run that is gone on with: where the data begin behind its step, and what they had been prepared to.

    ``prepared``: None where they have to be the same data, which are compared as a whole.
    """

    start: DataStart
    prepared: Prepared | None
    where: str


def find_other(run: TrainingRun, base_directory: Path) -> OtherRun | None:
    """The run behind whose step ``run`` continues where it is fresh; None where its data begin by themselves.

    Raises CheckpointError and RunDirectoryError, and VolumeError where it cannot be read now.
    """
    wanted = run.training.init_from
    if wanted is None or not wanted.goes_on:
        return None
    path = base_directory / wanted.path
    if wanted.load == "everything":
        # A resume in another directory: its data begin where that run's began. Behind links, as the load
        # reads it: the folders above a link are not those above the checkpoint.
        found = find_record(path.resolve())
        start = None if found is None else read_start(*found)
        return (
            OtherRun(start, None, str(path))
            if start is not None and start.goes_on
            else None
        )
    if (path / "config.json").is_file():
        # Refused where the state is loaded, in the words that all levels have.
        return None

    # By sizes alone: the load reads all of it, and refuses another checkpoint than this one.
    checkpoint, choice = look_at(path, step=wanted.step)
    why = "it says which sources the position is one of"
    found, problems = _find_own_record(checkpoint, choice.data_fingerprint, why=why)
    if found is None:
        raise CheckpointError(*problems)
    directory, record = found
    raise_if(
        _compare(read_run(directory, record), run, where=str(checkpoint)), CheckpointError
    )
    prepared = read_key(directory, record, "prepared", Prepared)
    if (began := read_start(directory, record)) is None:
        why = "the run has several stages, each with an order of its own, or an older version began it"
        remedy = (
            "Load everything in the same data, or the optimizer alone; of an older version, go on with that "
            "run once (with --extend where it is complete), which writes it down"
        )
        what = f"the run of {checkpoint} has not recorded where its sources begin"
        raise CheckpointError(Problem(f"{FIELD}.load", what, why, remedy))
    try:
        start = began.go_on(
            choice.step,
            cursor=from_extra(choice.extra).get(CURSOR, {}),
            data_fingerprint=choice.data_fingerprint,
            contents={one.name: one.content_hash for one in prepared.sources},
        )
    except ValueError as error:
        what = f"{checkpoint} is not at a position in the sources of its run"
        remedy = "Name another checkpoint, or load the optimizer alone"
        raise CheckpointError(Problem(f"{FIELD}.load", what, str(error), remedy)) from error
    return OtherRun(start, prepared, str(checkpoint))


def find_fingerprints(training: Training, base_directory: Path) -> frozenset[str]:
    """Fingerprints of the data of the run behind whose step a fresh one continues, in which its sources keep
    their places; none where it begins by itself, has other chat templates, or nobody knows them.

    Raises DataError, RunDirectoryError and VolumeError.
    """
    wanted = training.init_from
    if wanted is None or not wanted.goes_on:
        return frozenset()
    if (found := find_record((base_directory / wanted.path).resolve())) is None:
        return frozenset()
    prepared = read_optional(*found, "prepared", Prepared)
    # A template that was added since is a change, not one that a first version has passed over.
    if prepared is None or find_changed_texts(prepared.row_texts, training, base_directory):
        return frozenset()
    return prepared.fingerprints


def _find_own_record(
    checkpoint: Path, data_fingerprint: str, *, why: str
) -> tuple[tuple[RunDirectory, dict[str, Any]] | None, list[Problem]]:
    """The directory and ``run.json`` of the run that a checkpoint is of; without one, the problem.

    The checkpoint may have been copied without it, or beside that of another run. ``why``: what it is read
    for.
    """
    found = find_record(checkpoint)
    if found is None:
        *folders, last = map(str, searched_folders(checkpoint))
        what = f"no run.json of its run is in {', '.join(folders)} or {last}"
    else:
        directory, record = found
        if read_optional(directory, record, "dataFingerprint", str) == data_fingerprint:
            return found, []
        what = f"{directory.resolved} is not that of the run of {checkpoint}"
    what = f"{checkpoint} does not lie in the directory of its run: {what}"
    remedy = f"Name it in that directory, or copy its run.json into {searched_folders(checkpoint)[-1]}"
    return None, [Problem(f"{FIELD}.path", what, why, remedy)]


def differing_data(checkpoint: Path, stored: Stored, own: Identity) -> list[Problem]:
    """Each reason why the data here are not those that the other run's checkpoint was trained on.

    None where they are. Raises RunDirectoryError or VolumeError where the other run's record cannot be read.
    """
    if stored.data_fingerprint == own.data_fingerprint:
        return []
    why = "the position of a state is one in the data that it was trained on"
    remedy = "Set it back, keep the position in other sources (`position`), or load the optimizer alone"
    recipe = recipe_in(stored.extra)
    changes = position_changes(recipe, own.recipe) if recipe and own.recipe else []
    # Not the record that is missing, where fields differ that it says nothing of.
    if all(DECIDED_BY_CONTENT.fullmatch(field) for field, _, _ in changes):
        says = (
            "it says where the data of a run begin that went on from another one, and the checkpoint was "
            "trained on others than these"
        )
        _, problems = _find_own_record(checkpoint, stored.data_fingerprint, why=says)
        if problems:
            return problems
    return [
        Problem(
            field,
            f"{show_value(new)} here, and {show_value(old)} in {checkpoint}",
            why,
            remedy,
        )
        for field, old, new in changes
    ] or [Problem(str(checkpoint), "was trained on other data", why, remedy)]


def find_first_step(run: TrainingRun, base_directory: Path, own: Identity) -> int | None:
    """The step that a fresh ``run`` trains first where it continues in the same data; None for all others,
    whose data begin at that step.

    ``own``: what its checkpoints will carry. By the sizes of the other run's files alone. Raises
    CheckpointError where the data are others, and as ``find_other`` does.
    """
    wanted = run.training.init_from
    if wanted is None or wanted.load != "everything":
        return None
    checkpoint, choice = look_at(base_directory / wanted.path, step=wanted.step)
    raise_if(differing_data(checkpoint, choice, own), CheckpointError)
    return choice.step + 1


def _compare(before: TrainingRun, run: TrainingRun, *, where: str) -> list[Problem]:
    """Each field that differs and that says what an item of a source is, or in which order they come."""
    changes = position_changes(hashed_recipe(before), hashed_recipe(run))
    seeds = [one.training.reproducibility.seed_of_data for one in (before, run)]
    why = "a source goes on at its own place only where its items and their order are the same"
    return [
        Problem(
            field, f"{show_value(new)} here, and {show_value(old)} in {where}", why, _REMEDY
        )
        for field, old, new in changes
        if not field.startswith(_MIXTURE)
        and not DECIDED_BY_CONTENT.fullmatch(field)
        and (
            not field.startswith("spec.training.reproducibility.")
            or (field.endswith(_SEEDS) and seeds[0] != seeds[1])
        )
    ]


def position_changes(stored: Mapping[str, Any], own: Mapping[str, Any]) -> list[Change]:
    """Fields of two recipes that differ and have a say in which samples a step has."""
    return [
        change
        for change in changed_fields(stored, own)
        if change[0].split(".")[2].split("[")[0] not in _NO_POSITION
    ]


def check_content(
    other: OtherRun, start: DataStart | None, prepared: Prepared
) -> tuple[str, ...]:
    """The texts become the tokens that they became in the other run, and each of its files the same samples.

    ``start``: where the data of this run begin. Returns a warning for each source that begins at its first
    sample and may be one of an earlier run. Raises CheckpointError: a source whose samples are cut otherwise
    would begin again, as if it were another one.
    """
    if (before := other.prepared) is None:
        return ()
    _check_tokenizer(before, prepared, where=other.where)

    # Not those that only share their files with one of the other run: each of these begins again.
    left_out = other.start.left_out
    earlier = (*other.start.sources, *left_out)
    items = {one.fingerprint for one in earlier}
    sources = start.sources if start is not None else ()
    others = {one.name for one in sources if one.fingerprint not in items}
    names = {one.content: f"{one.name} of a run before {other.where}" for one in left_out}
    names |= {one.content_hash: f"{one.name} of {other.where}" for one in before.sources}
    why = "its place among those samples is none among these"
    remedy = "Set its fields (`samples`, `textField`, …) back, or load the optimizer alone"
    problems = [
        Problem(
            f"spec.training.data.sources[{index}]",
            f"{source.name} is {names[source.content_hash]}, cut into other samples",
            why,
            remedy,
        )
        for index, source in enumerate(prepared.sources)
        if source.name in others and source.content_hash in names
    ]
    raise_if(problems, CheckpointError)

    # A source that is new by name and content needs no warning: its 0 samples are in the event.
    unknown = [one.name for one in left_out if not one.content]
    doubts = {}
    for name in others & {one.name for one in earlier}:
        doubts[name] = (
            f"the source of this name that {other.where} goes on from has other samples"
        )
    for name in others if unknown else ():
        doubts[name] = (
            f"run.json of {other.where} does not say which files {', '.join(unknown)} had, which an earlier "
            "run has left out; it may be one of these, cut into other samples"
        )
    return tuple(
        f"{name} begins at its first sample: {doubts[name]}" for name in sorted(doubts)
    )


def _check_tokenizer(before: Prepared, prepared: Prepared, *, where: str) -> None:
    """Raise CheckpointError where a tokenizer's directory makes other samples of the same sources."""
    field = "spec.training.tokenizer"
    if prepared.tokenizer_identity != before.tokenizer_identity:
        here, there = prepared.tokenizer_identity, before.tokenizer_identity
        what = f"its content is {here}, and {there} in {where}"
        why = "the same text would become other samples"
        raise CheckpointError(Problem(field, what, why, _REMEDY))
    # None are recorded where rows take none from the directory, or an older version began the run.
    remedy = "Restore its files, or load the optimizer, and with it the weights, alone"
    problems = [
        Problem(field, f"its {what} changed since {where}", OTHER_SAMPLES, remedy)
        for what, text in prepared.row_texts.items()
        if text != before.row_texts.get(what, text)
    ]
    raise_if(problems, CheckpointError)
