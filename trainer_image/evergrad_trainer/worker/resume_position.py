"""Finds the data position of a fresh run that continues after another run's step (``initFrom``)."""

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
"""Sections of a recipe that do not change which samples a step uses."""
_MIXTURE: Final = ("spec.training.data.sources", "spec.training.data.mixing")
"""Fields that may differ if the position of each source is kept."""
_SEEDS: Final = ("seed", "dataSeed")
_REMEDY: Final = "Set it back, or load the optimizer, and with it the weights, alone"


class Stored(Protocol):
    """A checkpoint that was chosen or loaded."""

    @property
    def data_fingerprint(self) -> str:
        """Fingerprint of the data that the checkpoint was trained on."""

    @property
    def extra(self) -> Mapping[str, Any]:
        """Additional values that were saved with the checkpoint."""


@dataclass(frozen=True)
class OtherRun:
    """The run that a fresh run continues: the data position after its step, and its prepared data.

    ``prepared`` is None if both runs must use the same data; the data are then compared as a whole.
    """

    start: DataStart
    prepared: Prepared | None
    where: str


def find_other(run: TrainingRun, base_directory: Path) -> OtherRun | None:
    """Return the run that a fresh ``run`` continues, or None if the data of ``run`` begin at their start.

    Raises CheckpointError or RunDirectoryError if the other run cannot be continued, and VolumeError if its
    directory cannot be read at the moment.
    """
    wanted = run.training.init_from
    if wanted is None or not wanted.goes_on:
        return None
    path = base_directory / wanted.path
    if wanted.load == "everything":
        # This is a resume in another directory, so the data begin at the same position as the other run's
        # data. Resolve links as the load does: the parents of a link are not the parents of the checkpoint.
        found = find_record(path.resolve())
        start = None if found is None else read_start(*found)
        return (
            OtherRun(start, None, str(path))
            if start is not None and start.goes_on
            else None
        )
    if (path / "config.json").is_file():
        # The path is a plain model. The code that loads the state refuses it, with one message for all
        # levels.
        return None

    # Check only the sizes of the files here. The load reads the whole checkpoint, and refuses it if it is
    # not the same checkpoint.
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
    """Return the data fingerprints of the run that a fresh run continues.

    The sources of the fresh run keep their positions in these data. The set is empty if the fresh run does
    not continue another run, if the chat templates differ, or if the other run did not record its data.

    Raises DataError, RunDirectoryError or VolumeError if the other run's record or a template cannot be read.
    """
    wanted = training.init_from
    if wanted is None or not wanted.goes_on:
        return frozenset()
    if (found := find_record((base_directory / wanted.path).resolve())) is None:
        return frozenset()
    prepared = read_optional(*found, "prepared", Prepared)
    # A template that was added since then counts as a change. It is not a template that an older version
    # did not record.
    if prepared is None or find_changed_texts(prepared.row_texts, training, base_directory):
        return frozenset()
    return prepared.fingerprints


def _find_own_record(
    checkpoint: Path, data_fingerprint: str, *, why: str
) -> tuple[tuple[RunDirectory, dict[str, Any]] | None, list[Problem]]:
    """Return the directory and ``run.json`` of the run that wrote a checkpoint, or the problem.

    The checkpoint may have been copied without its ``run.json``, or next to the ``run.json`` of another run.
    ``why`` is the reason for reading the record; it becomes part of the message.
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
    """Return each reason why the data of this run differ from the data of the other run's checkpoint.

    The list is empty if the data are the same. Raises RunDirectoryError or VolumeError if the other run's
    record cannot be read.
    """
    if stored.data_fingerprint == own.data_fingerprint:
        return []
    why = "the position of a state is one in the data that it was trained on"
    remedy = "Set it back, keep the position in other sources (`position`), or load the optimizer alone"
    recipe = recipe_in(stored.extra)
    changes = position_changes(recipe, own.recipe) if recipe and own.recipe else []
    # Report a missing record only if the record could explain the difference: if other fields differ,
    # report these fields instead.
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
    """Return the first step that a fresh ``run`` trains if it continues in the same data, or None otherwise.

    For every other run the data begin at its first step. ``own`` is the identity that the checkpoints of
    ``run`` will contain. Only the sizes of the other run's files are checked. Raises CheckpointError if the
    data differ, and the errors of ``find_other``.
    """
    wanted = run.training.init_from
    if wanted is None or wanted.load != "everything":
        return None
    checkpoint, choice = look_at(base_directory / wanted.path, step=wanted.step)
    raise_if(differing_data(checkpoint, choice, own), CheckpointError)
    return choice.step + 1


def _compare(before: TrainingRun, run: TrainingRun, *, where: str) -> list[Problem]:
    """Return a problem for each differing field that changes the items of a source or their order."""
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
    """Return the fields that differ between two recipes and change which samples a step uses."""
    return [
        change
        for change in changed_fields(stored, own)
        if change[0].split(".")[2].split("[")[0] not in _NO_POSITION
    ]


def check_content(
    other: OtherRun, start: DataStart | None, prepared: Prepared
) -> tuple[str, ...]:
    """Check that texts become the same tokens, and files the same samples, as in the other run.

    ``start`` is the data position at which this run begins. Returns a warning for each source that begins at
    its first sample although it may be a source of an earlier run. Raises CheckpointError if a source is cut
    into different samples, because it would be treated as a new source and begin again.
    """
    if (before := other.prepared) is None:
        return ()
    _check_tokenizer(before, prepared, where=other.where)

    # Exclude sources that only share their files with a source of the other run: each of them begins again.
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

    # A source with a new name and new content needs no warning: the event shows its 0 samples.
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
    """Raise CheckpointError if the tokenizer's directory makes different samples of the same sources."""
    field = "spec.training.tokenizer"
    if prepared.tokenizer_identity != before.tokenizer_identity:
        here, there = prepared.tokenizer_identity, before.tokenizer_identity
        what = f"its content is {here}, and {there} in {where}"
        why = "the same text would become other samples"
        raise CheckpointError(Problem(field, what, why, _REMEDY))
    # No texts are recorded if the rows use none from the directory, or if an older version began the run.
    remedy = "Restore its files, or load the optimizer, and with it the weights, alone"
    problems = [
        Problem(field, f"its {what} changed since {where}", OTHER_SAMPLES, remedy)
        for what, text in prepared.row_texts.items()
        if text != before.row_texts.get(what, text)
    ]
    raise_if(problems, CheckpointError)
