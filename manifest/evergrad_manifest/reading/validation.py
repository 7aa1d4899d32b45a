"""Validates a raw manifest: returns a TrainingRun, or every problem with the path of its field. Pure."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from evergrad_manifest.envelope import RULES, TrainingRun
from evergrad_manifest.errors import ConfigurationError, Problem
from evergrad_manifest.model.nesting import check_depth
from evergrad_manifest.model.raw import value_at
from evergrad_manifest.model.view import View, without_nulls
from evergrad_manifest.reading.problems import at_most, problems_of
from evergrad_manifest.structure.check import (
    check_structure,
    less_known,
    without_stored_nulls,
)
from evergrad_manifest.structure.pod_template import build_fragments
from evergrad_manifest.structure.sections import build_spec
from evergrad_manifest.training import RULES as RULES_OF_TRAINING
from evergrad_manifest.values.numbers import with_whole_numbers


def parse_run(raw: Mapping[str, Any]) -> TrainingRun:
    """Return the run that ``raw`` (camelCase, from YAML or JSON) describes.

    Raises ConfigurationError with all its problems.
    """
    run, problems = check_run(raw)
    if run is None or problems:
        raise ConfigurationError(*at_most(problems))
    return run


def check_run(raw: Mapping[str, Any]) -> tuple[TrainingRun | None, list[Problem]]:
    """Return the run, if its single fields are valid, and every problem: problems of single fields first,
    then of several fields together."""
    # Check the depth first: all later checks walk into the values.
    if (too_deep := check_depth(raw)) is not None:
        return None, [too_deep]

    pruned = _as_stored(raw)
    run: TrainingRun | None = None
    problems: list[Problem] = []
    try:
        run = TrainingRun.model_validate(pruned)
    except ValidationError as error:
        problems += problems_of(error, pruned)

    # Apply the rules about several fields.
    view = View(pruned, TrainingRun)
    # For a script, the rules of a recipe would report every field as missing.
    has_recipe = view.get("spec.training") is not None
    for rule in (*RULES, *RULES_OF_TRAINING) if has_recipe else RULES:
        problems += rule(view)

    # Check the limits that the models leave to an API server, with the same messages: lengths, sizes of maps
    # and lists, and Kubernetes' own structures, such as volumes. Do not report a path again that the models
    # have reported.
    stored = with_whole_numbers(value_at(pruned, ("spec",)))
    found = [] if stored is None else list(check_structure(build_spec(), stored, ("spec",)))
    return run, [*problems, *less_known(found, problems)]


def _as_stored(raw: Mapping[str, Any]) -> Any:
    """Return ``raw`` without the nulls that an API server drops, even in Kubernetes' own structures."""
    pruned = without_nulls(raw, TrainingRun)
    for path, schema in build_fragments().items():
        *parents, key = path.split(".")
        # This dict is new, because it is one of our sections, so ``raw`` does not change.
        section = value_at(pruned, tuple(parents))
        if isinstance(section, dict) and key in section:
            section[key] = without_stored_nulls(schema, section[key])
    return pruned
