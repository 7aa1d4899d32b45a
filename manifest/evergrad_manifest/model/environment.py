"""Checks variables of a pod's environment: their sources, and names that the run itself sets."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from evergrad_common.contract import OUR_VARIABLE_PREFIXES, OUR_VARIABLES
from evergrad_manifest.errors import Problem
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.items import Item, Keys, check_keys, check_unique
from evergrad_manifest.model.raw import FieldPath
from evergrad_manifest.model.spelling import nearest
from evergrad_manifest.values.numbers import show

_VARIABLE: Final = Keys(known=("name", "value", "valueFrom"), required=("name",))
_KEY: Final = Keys(
    known=("name", "key", "optional"),
    required=("name", "key"),
    kinds={"name": "text", "key": "text", "optional": "switch"},
)
_SOURCES: Final[Mapping[str, Keys]] = {
    "configMapKeyRef": _KEY,
    "secretKeyRef": _KEY,
    "fieldRef": Keys(
        known=("fieldPath", "apiVersion"),
        required=("fieldPath",),
        kinds={"fieldPath": "text", "apiVersion": "text"},
    ),
    "resourceFieldRef": Keys(
        known=("resource", "containerName", "divisor"),
        required=("resource",),
        kinds={"resource": "text", "containerName": "text"},
    ),
}
"""Possible sources of the value of one variable."""
_OBJECT: Final = Keys(
    known=("name", "optional"),
    required=("name",),
    kinds={"name": "text", "optional": "switch"},
)
_WHOLE: Final = ("configMapRef", "secretRef")
"""Possible sources of all variables of an object."""
_FROM: Final = Keys(known=("prefix", *_WHOLE), kinds={"prefix": "text"})


def is_reserved(name: str) -> bool:
    """Return whether the run itself sets a variable of this name."""
    return name in OUR_VARIABLES or name.startswith(OUR_VARIABLE_PREFIXES)


def check_variables(items: Sequence[Item]) -> Iterator[Problem]:
    """Find problems of the items of ``env``: a value that is not a text, or a name that the run itself
    sets."""
    yield from check_keys(items, _VARIABLE)
    yield from check_unique(items, "name")
    for path, item in items:
        name, value = item.get("name"), item.get("value")
        if name is not None and (
            not isinstance(name, str) or "=" in name or not name.isprintable()
        ):
            yield Problem(
                format_path((*path, "name")),
                f"{show(name)} is not a variable's name",
                "",
                "Correct it",
            )
        elif is_reserved(str(name)):
            why = "the run sets it for each of its processes"
            yield Problem(
                format_path((*path, "name")), f"{show(name)} is reserved", why, "Remove it"
            )
        if value is not None and not isinstance(value, str):
            why = "a variable is a text"
            yield Problem(
                format_path((*path, "value")),
                f"{show(value)} is not a text",
                why,
                f'Put it in quotes: "{show(value)}"',
            )
        if value is not None and item.get("valueFrom") is not None:
            yield Problem(
                format_path(path),
                "value and valueFrom are both set",
                "it is one of them",
                "Remove one of them",
            )
        if item.get("valueFrom") is not None:
            yield from check_source((*path, "valueFrom"), item["valueFrom"])


def check_source(path: FieldPath, source: Any) -> Iterator[Problem]:
    """Find problems of the source of a variable's value."""
    known = f"Known here: {', '.join(_SOURCES)}"
    if not isinstance(source, Mapping) or len(source) != 1:
        yield Problem(
            format_path(path),
            "does not name one source",
            "a variable comes from exactly one place",
            f"Name one. {known}",
        )
        return
    for kind, value in source.items():
        where = (*path, kind)
        if kind not in _SOURCES:
            near = nearest(kind, tuple(_SOURCES))
            why = f"did you mean `{near}`? {known}" if near else ""
            yield Problem(
                format_path(where),
                "not a source of a variable",
                why,
                "" if near else f"Use another. {known}",
            )
        elif not isinstance(value, Mapping):
            why = f"a mapping is needed with keys such as {', '.join(_SOURCES[kind].required)}"
            yield Problem(
                format_path(where), f"{show(value)} is not a mapping", why, "Correct it"
            )
        else:
            yield from check_keys([(where, value)], _SOURCES[kind])


def check_env_from(items: Sequence[Item]) -> Iterator[Problem]:
    """Find problems of the items of ``envFrom``. Each item takes all keys of one object.

    The keys are not known here. A key that the run itself sets has no effect: in a container, variables of
    ``env`` take precedence over variables of ``envFrom``.
    """
    yield from check_keys(items, _FROM)
    for path, item in items:
        named = [kind for kind in _WHOLE if item.get(kind) is not None]
        if len(named) != 1:
            why = "the variables come from exactly one place"
            yield Problem(
                format_path(path),
                "does not name one source",
                why,
                f"Name one. Known here: {', '.join(_WHOLE)}",
            )
        for kind in named:
            where, value = (*path, kind), item[kind]
            if isinstance(value, Mapping):
                yield from check_keys([(where, value)], _OBJECT)
                continue
            why = "a mapping is needed with keys such as name"
            yield Problem(
                format_path(where), f"{show(value)} is not a mapping", why, "Correct it"
            )
        prefix = item.get("prefix")
        if isinstance(prefix, str) and prefix.startswith(OUR_VARIABLE_PREFIXES):
            yield Problem(
                format_path((*path, "prefix")),
                f"{show(prefix)} is reserved",
                "the run's own variables use it",
                "Use another",
            )
