"""Finds where the data of a fresh run begin that goes on behind another run's step."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evergrad_manifest.differences import Change, changed_fields, show_value
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import Problem, raise_if
from evergrad_manifest.identity import DECIDED_BY_CONTENT, hashed_recipe
from evergrad_trainer.checkpoint.weights import look_at
from evergrad_trainer.data.places import DATA_START, DataStart
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.errors import CheckpointError
from evergrad_trainer.resume import read_run
from evergrad_trainer.run_directory import find_record
from evergrad_trainer.state.registry import CURSOR, from_extra

FIELD: Final = "spec.training.initFrom"
_NO_POSITION: Final = ("model", "optimizer", "schedule", "ema", "horizon", "runtime")
"""Sections of a recipe that have no say in which samples a step has."""
_MIXTURE: Final = ("spec.training.data.sources", "spec.training.data.mixing")
"""Fields that may differ where the position of each source is kept."""
_SEEDS: Final = ("seed", "dataSeed")
_REMEDY: Final = "Set it back, or load the optimizer, and with it the weights, alone"


@dataclass(frozen=True)
class OtherRun:
    """The run that is gone on with: where the data begin behind its step, and what they had been prepared to.

    ``prepared``: None where they have to be the same data, which are compared as a whole.
    """

    start: DataStart
    prepared: Prepared | None
    where: str


def find_other(run: TrainingRun, base_directory: Path) -> OtherRun | None:
    """The run behind whose step ``run`` goes on where it is fresh; None where its data begin by themselves.

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
        start = None
        if found is not None and DATA_START in found[1]:
            start = DataStart.from_json(found[1][DATA_START])
        return OtherRun(start, None, str(path)) if start is not None and start.goes_on else None
    if (path / "config.json").is_file():
        # Refused where the state is loaded, in the words that all levels have.
        return None

    # By sizes alone: the load reads all of it, and refuses another checkpoint than this one.
    checkpoint, choice = look_at(path, step=wanted.step)
    found = find_record(checkpoint)
    if found is None or found[1].get("dataFingerprint") != choice.data_fingerprint:
        what = f"{checkpoint} does not lie in the directory of its run"
        why = "run.json there says which sources the position is one of"
        remedy = "Name that directory, with `step` for one of its checkpoints"
        raise CheckpointError(Problem(f"{FIELD}.path", what, why, remedy))
    directory, record = found
    raise_if(_compare(read_run(directory, record), run, where=str(checkpoint)), CheckpointError)
    cursor = from_extra(choice.extra).get(CURSOR, {})
    start = _start_behind(record, cursor, step=choice.step, where=str(checkpoint))
    return OtherRun(start, Prepared.from_json(record["prepared"]), str(checkpoint))


def _start_behind(
    record: Mapping[str, Any], cursor: Mapping[str, int], *, step: int, where: str
) -> DataStart:
    if DATA_START not in record:
        why = "the run has several stages, each with an order of its own, or an older version began it"
        remedy = (
            "Load everything in the same data, or the optimizer alone; of an older version, go on with that "
            "run once (--extend), which writes it down"
        )
        what = f"the run of {where} has not recorded where its sources begin"
        raise CheckpointError(Problem(f"{FIELD}.load", what, why, remedy))
    try:
        return DataStart.from_json(record[DATA_START]).go_on(
            step, cursor=cursor, data_fingerprint=str(record["dataFingerprint"])
        )
    except ValueError as error:
        what = f"{where} is not at a position in the sources of its run"
        remedy = "Name another checkpoint, or load the optimizer alone"
        raise CheckpointError(Problem(f"{FIELD}.load", what, str(error), remedy)) from error


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


def check_content(other: OtherRun, start: DataStart | None, prepared: Prepared) -> None:
    """The texts become the tokens that they became in the other run, and each of its files the same samples.

    ``start``: where the data of this run begin. Raises CheckpointError: a source whose samples are cut
    otherwise would begin anew, as if it were another one.
    """
    if (before := other.prepared) is None:
        return
    if prepared.tokenizer_identity != before.tokenizer_identity:
        here, there = prepared.tokenizer_identity, before.tokenizer_identity
        what = f"its content is {here}, and {there} in {other.where}"
        why = "the same text would become other samples"
        raise CheckpointError(Problem("spec.training.tokenizer", what, why, _REMEDY))

    # Not those that only share their files with one of the other run: each of these begins anew.
    items = {one.fingerprint for one in (*other.start.sources, *other.start.left_out)}
    sources = start.sources if start is not None else ()
    others = {one.name for one in sources if one.fingerprint not in items}
    names = {one.content_hash: one.name for one in before.sources}
    why = "its place among those samples is none among these"
    remedy = "Set its fields (`samples`, `textField`, …) back, or load the optimizer alone"
    problems = []
    for index, source in enumerate(prepared.sources):
        if source.name in others and source.content_hash in names:
            name = names[source.content_hash]
            what = f"{source.name} is {name} of {other.where}, cut into other samples"
            where = f"spec.training.data.sources[{index}]"
            problems.append(Problem(where, what, why, remedy))
    raise_if(problems, CheckpointError)
