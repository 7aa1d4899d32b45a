"""``spec.preparation`` and ``spec.evaluation``: additional pods with their own resources."""

from collections.abc import Iterator
from typing import Final

from pydantic import Field

from evergrad_manifest.envelope.resources import Resources, check_resources_at
from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import Section
from evergrad_manifest.model.view import View
from evergrad_manifest.values.numbers import Whole


class Preparation(Section):
    """Preparation of the data in a pod of its own, before any node is asked for."""

    resources: Resources = Resources()
    """Resources of the pod. It starts one helper process for each CPU."""
    node_selector: dict[str, str] | None = None
    """Labels that the pod's host must have. Default: node selector and node affinity of ``spec.template``."""


class CheckpointEvaluation(Section):
    """Evaluation of each checkpoint in a separate pod, during the training and after it."""

    resources: Resources = Resources()
    """Resources of the pod, which runs one process."""
    node_selector: dict[str, str] | None = None
    """Labels that the pod's host must have. Default: node selector and node affinity of ``spec.template``."""
    keep_waiting: Whole = Field(default=4, ge=1, le=64)
    """Number of the newest checkpoints that wait for their evaluation and are kept in addition to
    ``checkpoint.keep``. Older ones are not evaluated."""


def check_preparation(view: View) -> Iterator[Problem]:
    """Check the resources, and that Evergrad prepares the run's data."""
    if not view.is_given("spec.preparation"):
        return
    yield from check_resources_at(view, "spec", "preparation", "resources")
    if view.is_given("spec.script"):
        why = "a script reads its data itself"
        yield Problem("spec.preparation", "has no meaning with script", why, "Remove it")


def check_evaluation(view: View) -> Iterator[Problem]:
    """Check the resources, and that the run has sets that Evergrad evaluates."""
    if not view.is_given("spec.evaluation"):
        return
    yield from check_resources_at(view, "spec", "evaluation", "resources")
    if view.is_given("spec.script"):
        why = "only the script knows what it measures"
        yield Problem("spec.evaluation", "has no meaning with script", why, "Remove it")


RULES: Final = (check_preparation, check_evaluation)
