"""A raw manifest → a TrainingRun, or every problem it has, each with its field's path. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from evergrad_manifest import (
    rules_envelope,
    rules_script,
    rules_template,
    training,
)
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import ConfigurationError, Problem
from evergrad_manifest.nesting import check_depth
from evergrad_manifest.reading.problems import at_most, problems_of
from evergrad_manifest.view import View, without_nulls

RULES: Final = (*rules_envelope.RULES, *rules_template.RULES, *rules_script.RULES)


def parse_run(raw: Mapping[str, Any]) -> TrainingRun:
    """The run that ``raw`` (camelCase, as from YAML or JSON) describes.

    Raises ConfigurationError with all its problems.
    """
    run, problems = check_run(raw)
    if run is None or problems:
        raise ConfigurationError(*at_most(problems))
    return run


def check_run(raw: Mapping[str, Any]) -> tuple[TrainingRun | None, list[Problem]]:
    """The run as far as its single fields are right, and every problem: of single fields first, then of
    several together."""
    # First: all that follows walks into the values.
    if (too_deep := check_depth(raw)) is not None:
        return None, [too_deep]

    pruned = without_nulls(raw, TrainingRun)
    run: TrainingRun | None = None
    problems: list[Problem] = []
    try:
        run = TrainingRun.model_validate(pruned)
    except ValidationError as error:
        problems += problems_of(error, pruned)
    view = View(pruned, TrainingRun)
    for rule in RULES if view.get("spec.training") is None else (*RULES, *training.RULES):
        problems += rule(view)
    return run, problems
