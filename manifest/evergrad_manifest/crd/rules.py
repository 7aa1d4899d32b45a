"""The rules in CEL that only an API server can enforce: immutable fields, bounds, and exactly one of several
fields.

The complete validation checks all other rules of a file. The operator's webhook runs it before these rules,
and the operator runs it again before a run's first pod.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from evergrad_manifest.envelope import KINDS
from evergrad_manifest.envelope.storage import PLACE_OF_STORAGE
from evergrad_manifest.identity import (
    OPERATIONAL_DATA,
    RECIPE_OF_RUNTIME,
    RECIPE_OF_SCRIPT,
    RECIPE_SECTIONS,
)
from evergrad_manifest.model.fields import fields_of
from evergrad_manifest.structure.nodes import Schema, rule
from evergrad_manifest.training import Data, Runtime
from evergrad_manifest.training.own_task import LONGEST_FILE_NAME
from evergrad_manifest.validation import FIXED, INVALID_SPEC

_IS_OPEN: Final = (
    f"(has(oldSelf.status) && has(oldSelf.status.reason) && oldSelf.status.reason == '{INVALID_SPEC}' && "
    "!has(oldSelf.status.recipeHash))"
)
"""Whether the run was refused before it began, so that all of it may be corrected.

The same condition as evergrad_manifest.validation.is_open.
"""

_NEW_RUN: Final = "Make a new TrainingRun, or set it back."


def _unchanged(owner: str, key: str) -> str:
    """Return a condition: the field ``key`` of ``self.owner`` has not changed, including from or to
    absent."""
    new, old = f"self.{owner}.{key}", f"oldSelf.{owner}.{key}"
    return f"has({new}) == has({old}) && (!has({new}) || {new} == {old})"


def _all_unchanged(owner: str, keys: Iterable[str]) -> str:
    return " && ".join(f"({_unchanged(owner, key)})" for key in keys)


def _within(owner: str, condition: str) -> str:
    """Return ``condition`` for a section ``owner`` that exists before and after the change. Another rule
    refuses a section that is added or removed."""
    return f"!has(self.{owner}) || !has(oldSelf.{owner}) || ({condition})"


def _exactly_one(keys: Iterable[str], message: str) -> Schema:
    given = ", ".join(f"has(self.{key})" for key in keys)
    return rule(f"[{given}].exists_one(given, given)", message)


# Only the arithmetic of runtime belongs to the recipe. An omitted field equals its default, so that writing
# the default later is not a change.
_RUNTIME: Final = "{0}.spec.training.runtime"
_ARITHMETIC: Final = [
    f"(has({_RUNTIME}) && has({_RUNTIME}.{key}) ? {_RUNTIME}.{key} : '{fields_of(Runtime)[key].default}')"
    for key in RECIPE_OF_RUNTIME
]
_RECIPE_IS_KEPT: Final = " && ".join(
    (
        _all_unchanged(
            "spec.training",
            [key for key in RECIPE_SECTIONS if key not in ("data", "horizon")],
        ),
        # A custom task may omit data, and CEL fails at a field of a missing section.
        "has(self.spec.training.data) == has(oldSelf.spec.training.data)",
        "(!has(self.spec.training.data) || ({}))".format(
            _all_unchanged(
                "spec.training.data",
                [key for key in fields_of(Data) if key not in OPERATIONAL_DATA],
            )
        ),
        *(f"{one.format('self')} == {one.format('oldSelf')}" for one in _ARITHMETIC),
    )
)
# These fields say where the run's state is. The other fields belong to a claim that is created once: the
# webhook refuses another size, and a change that bypasses the webhook has no effect. Each field costs 170
# bytes of the CRD.
_STORAGE_IS_KEPT: Final = (
    "has(self.spec.storage) == has(oldSelf.spec.storage) && ({})".format(
        _within("spec.storage", _all_unchanged("spec.storage", PLACE_OF_STORAGE))
    )
)
_KINDS_ARE_KEPT: Final = " && ".join(
    f"has(self.spec.{kind}) == has(oldSelf.spec.{kind})" for kind in KINDS
)

# Condition, field and message: one rule for each field, so that the refusal names the field. CEL cannot
# select a field of a missing object.
_KEPT: Final = (
    (
        _KINDS_ARE_KEPT,
        "",
        f"training and script cannot replace one another; neither reads what the other saved. {_NEW_RUN}",
    ),
    (
        _within("spec.training", _RECIPE_IS_KEPT),
        ".training",
        (
            "cannot be changed; it is the recipe of the run. Make a new TrainingRun, with "
            "training.initFrom for the weights."
        ),
    ),
    (
        _within("spec.script", _all_unchanged("spec.script", RECIPE_OF_SCRIPT)),
        ".script",
        f"cannot be changed; it is the recipe of the run. {_NEW_RUN}",
    ),
    *(
        (
            _STORAGE_IS_KEPT if key == "storage" else _unchanged("spec", key),
            f".{key}",
            f"cannot be changed; {why}. {_NEW_RUN}",
        )
        for key, why in FIXED.items()
    ),
)

# Keep the rules few: an API server refuses a CRD whose rules could cost too much. They also hold while the
# webhook is down.
RULES: Final[Mapping[str, tuple[Schema, ...]]] = {
    "": tuple(
        rule(
            f"{_IS_OPEN} || ({same})",
            message,
            at=f".spec{at}",
            reason="FieldValueForbidden",
        )
        for same, at, message in _KEPT
    ),
    "spec": (
        _exactly_one(
            KINDS, "a run is exactly one of training and script. Set one of them."
        ),
    ),
    "spec.nodes": (
        rule(
            "!has(self.min) || !has(self.max) || self.min <= self.max",
            "is below nodes.min. Raise max, or lower min.",
            at=".max",
        ),
    ),
    "spec.storage": (
        rule(
            "!has(self.size) || !has(self.claimName)",
            (
                "size and claimName are both set; a run has either a new volume or an existing one. "
                "Remove one of them."
            ),
        ),
    ),
    "spec.training.files": (
        rule(
            f"self.all(name, size(name) <= {LONGEST_FILE_NAME})",
            f"the name of a file has at most {LONGEST_FILE_NAME} characters. Rename it.",
        ),
    ),
    "spec.training.model": (
        _exactly_one(
            ("config", "path", "preset"),
            "a model is exactly one of config, path and preset. Set one of them.",
        ),
    ),
}
"""Path of a node (``[]`` enters the items of a list) → the rules of that node."""
