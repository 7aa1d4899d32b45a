"""Validates a run as the API server sends it, with the checks of ``evergrad validate``, and refuses changes
of immutable fields. Pure."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, Final, get_args

from pydantic import ValidationError

from evergrad_manifest.derive import steps_without_data
from evergrad_manifest.envelope import Metadata, TrainingRun
from evergrad_manifest.envelope.storage import OPERATIONAL_STORAGE
from evergrad_manifest.errors import Problem
from evergrad_manifest.identity import recipe_of, to_wire
from evergrad_manifest.model.differences import changed_fields, show_value
from evergrad_manifest.model.fields import choices_of, fields_of, find_field, format_path
from evergrad_manifest.model.nesting import check_depth
from evergrad_manifest.model.raw import value_at
from evergrad_manifest.model.view import without_nulls
from evergrad_manifest.reading.problems import at_most
from evergrad_manifest.reading.problems import problems_of as problems_of_model
from evergrad_manifest.reading.validation import check_run, parse_run
from evergrad_manifest.training.steps import HORIZON
from evergrad_manifest.values.numbers import PLAIN_INTEGER, NumberError, parse_count

INVALID_SPEC: Final = "InvalidSpec"
"""Value of ``status.reason`` of a run that was refused before its first pod. All of such a run may still
change."""
FIXED: Final = {
    "image": "all pods of a run have one image",
    "managedBy": "two controllers would manage the run",
    "storage": "the run's state is there",
    "workersPerNode": "it belongs to how the run was planned",
}
"""Fields of ``spec`` outside the recipe that cannot change, with the reason."""


def problems_of(
    document: Mapping[str, Any], *, old: Mapping[str, Any] | None = None
) -> tuple[Problem, ...]:
    """Return every problem of ``document``, an object as the API server sends it; empty if it is valid.

    The problems are the same as ``evergrad validate`` prints for a file of the same content, but without
    lines of the file. ``old`` is the object before an update: if ``document`` has no new problems, it is also
    compared with ``old``. Problems that an older version has accepted do not permit changes of immutable
    fields.
    """
    run, found = check_run(manifest_of(document))
    if run is None or old is None or is_open(old) or check_depth(old) is not None:
        return at_most(found)
    if not found or set(found) <= set(check_run(manifest_of(old))[1]):
        found += _forbidden_changes(old, run)
    return at_most(found)


def changes_of(document: Mapping[str, Any], old: Mapping[str, Any]) -> tuple[Problem, ...]:
    """Return a problem for each change from ``old`` to ``document`` that a run that has begun must not
    make."""
    if is_open(old) or any(check_depth(one) is not None for one in (old, document)):
        return ()
    try:
        run = read_object(document)
    except ValidationError:
        return ()
    return tuple(_forbidden_changes(old, run))


def parse_object(document: Mapping[str, Any]) -> TrainingRun:
    """Return the run that an object of the API server describes.

    Raises ConfigurationError with all its problems.
    """
    return parse_run(manifest_of(document))


def read_object(document: Mapping[str, Any]) -> TrainingRun:
    """Return the run that an object describes, with checks of single fields only. This is faster, and
    sufficient for an object that was validated before.

    Raises pydantic's ValidationError.
    """
    return TrainingRun.model_validate(without_nulls(manifest_of(document), TrainingRun))


def manifest_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file that describes an object of the API server, without ``status`` and metadata that the
    cluster sets.

    The items of a list have neither apiVersion nor kind; both are filled in.
    """
    kinds = {key: fields_of(TrainingRun)[key] for key in ("apiVersion", "kind")}
    found: dict[str, Any] = {key: choices_of(info)[0] for key, info in kinds.items()}
    found |= {key: value for key, value in document.items() if key != "status"}
    if isinstance(metadata := found.get("metadata"), Mapping):
        found["metadata"] = {
            key: value for key, value in metadata.items() if key in fields_of(Metadata)
        }
    return found


def is_open(document: Mapping[str, Any]) -> bool:
    """Return whether the run was refused before it began, so that its recipe may be corrected in place."""
    status = document.get("status")
    reason, recipe = value_at(status, ("reason",)), value_at(status, ("recipeHash",))
    return reason == INVALID_SPEC and not recipe


def with_plain_numbers(
    document: Mapping[str, Any],
) -> tuple[Mapping[str, Any], tuple[Problem, ...]]:
    """Return ``document``, a manifest that an API server stores, with quoted whole numbers as numbers, and a
    problem for each of them.

    Earlier versions accepted ``min: "2"`` and ``lingerSeconds: 1k``. An API server checks an object only when
    it is written, so such objects still exist, and their runs must continue. Only fields that are plain
    integers today are converted: every other text keeps its meaning.
    """
    pruned = without_nulls(document, TrainingRun)
    try:
        TrainingRun.model_validate(pruned)
    except ValidationError as error:
        texts: dict[tuple[int | str, ...], str] = {}
        for details in error.errors(include_url=False):
            info = find_field(TrainingRun, details["loc"])
            if info is None or not isinstance(details["input"], str):
                continue
            # For a required field, pydantic moves the markers from the annotation to the metadata.
            members = (info.annotation, *get_args(info.annotation))
            marks = (
                info.metadata,
                *(getattr(one, "__metadata__", ()) for one in members),
            )
            if any(PLAIN_INTEGER in each for each in marks):
                texts[details["loc"]] = details["input"]
        found = {problem.path: problem for problem in problems_of_model(error, pruned)}
    else:
        return document, ()

    # Convert only texts that the model refused as numbers. Any other problem remains.
    copied, problems = deepcopy(dict(document)), []
    for path, text in texts.items():
        try:
            number = parse_count(text)
        except NumberError:
            # The text is not a number in any spelling, so no version accepted it.
            continue
        value_at(copied, path[:-1])[path[-1]] = number
        problems.append(found[format_path(path)])
    return copied, tuple(problems)


def _forbidden_changes(old: Mapping[str, Any], run: TrainingRun) -> Iterator[Problem]:
    try:
        # A stored number in quotes, which an older version accepted, does not permit changes of immutable
        # fields.
        before = read_object(with_plain_numbers(manifest_of(old))[0])
    except ValidationError:
        # If the old object cannot be parsed, it cannot be compared. The API server's own rules still apply.
        return

    # A run stays typed or a script, because neither can read the state that the other saved.
    had, has = (
        "training" if one.spec.script is None else "script" for one in (before, run)
    )
    if had != has:
        remedy = f"Set {had} again, or make a new TrainingRun"
        yield Problem(
            f"spec.{has}",
            f"replaces {had}",
            "neither can continue from what the other saved",
            remedy,
        )
        return

    yield from _find_recipe_changes(before, run, has)
    if has == "training":
        yield from _find_shorter_horizon(before, run)
    yield from _find_fixed_changes(before, run)


def _find_recipe_changes(
    before: TrainingRun, run: TrainingRun, kind: str
) -> Iterator[Problem]:
    """Yield fields of the recipe whose meaning differs, not only their spelling. ``kind``: its section."""
    further = ", with training.initFrom for the weights" if kind == "training" else ""
    for path, was, now in changed_fields(
        recipe_of(before), recipe_of(run), where=f"spec.{kind}"
    ):
        if path.startswith(HORIZON):
            continue
        why = "the recipe of a run does not change"
        remedy = f"Set it back to {show_value(was)}, or make a new TrainingRun{further}"
        yield Problem(
            path, f"{show_value(now)} cannot replace {show_value(was)}", why, remedy
        )


def _find_shorter_horizon(before: TrainingRun, run: TrainingRun) -> Iterator[Problem]:
    # A longer horizon is the same run. The length of a horizon in epochs depends on the data, so the trainer
    # compares it.
    olds, news = (steps_without_data(one.training) for one in (before, run))
    if olds is not None and news is not None and news < olds:
        what = f"{news} steps are fewer than the {olds} of this run"
        remedy = (
            f"Use at least {olds} steps; to end it earlier use spec.training.stop.afterStep"
        )
        yield Problem(HORIZON, what, "a run can be extended, not shortened", remedy)


def _find_fixed_changes(before: TrainingRun, run: TrainingRun) -> Iterator[Problem]:
    """Yield fields outside of the recipe that belong to the run's state and pods."""
    specs = [without_nulls(to_wire(one), TrainingRun)["spec"] for one in (before, run)]
    for key, why in FIXED.items():
        pair = [{key: spec[key]} if key in spec else {} for spec in specs]
        for path, was, now in changed_fields(*pair, where="spec"):
            if path.removeprefix("spec.storage.") in OPERATIONAL_STORAGE:
                continue
            what = f"{show_value(now)} cannot replace {show_value(was)}"
            yield Problem(
                path,
                what,
                why,
                f"Set it back to {show_value(was)}, or make a new TrainingRun",
            )
