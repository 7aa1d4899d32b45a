"""What sources, held-out split, evaluation sets and the best checkpoint must satisfy together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from evergrad_manifest.errors import Problem
from evergrad_manifest.fields import FieldPath, format_path
from evergrad_manifest.reading.problems import nearest
from evergrad_manifest.reading.view import UNKNOWN, View
from evergrad_manifest.training import HELD_OUT

TRAINING: Final = "spec.training"
_SOURCES = f"{TRAINING}.data.sources"
_HELD_OUT = f"{TRAINING}.data.heldOut"
_EVALUATION = f"{TRAINING}.evaluation"


@dataclass(frozen=True)
class Meaningless:
    """A key that has no meaning beside a value of its neighbour ``beside``, and is refused when set."""

    key: str
    beside: str
    values: tuple[str, ...]
    remedy: str


OF_SOURCES: Final = (
    Meaningless("textField", "type", ("tokens",), "Remove it, or set type: jsonl"),
    Meaningless("dtype", "type", ("jsonl",), "Remove it, or set type: tokens"),
)
OF_SCHEDULE: Final = (
    Meaningless(
        "decay", "type", ("linear", "cosine", "constant"), "Remove it, or set type: wsd"
    ),
    Meaningless("minimumRatio", "type", ("constant",), "Remove it, or choose another type"),
)


def without_meaningless(
    section: Mapping[str, Any], table: tuple[Meaningless, ...]
) -> dict[str, Any]:
    """``section`` on the wire without the keys that would be refused if a file said them."""
    dropped = {entry.key for entry in table if section[entry.beside] in entry.values}
    return {key: value for key, value in section.items() if key not in dropped}


def check_meaningless(view: View) -> Iterator[Problem]:
    """Keys that would silently do nothing."""
    for where in (_SOURCES, f"{_EVALUATION}.sources"):
        for path, item in view.items(where):
            yield from _meaningless_in(view, path, item, OF_SOURCES)
    if (schedule := view.get(f"{TRAINING}.schedule")) is not UNKNOWN:
        yield from _meaningless_in(
            view, ("spec", "training", "schedule"), schedule, OF_SCHEDULE
        )
    for path, _ in view.items(f"{_EVALUATION}.sources"):
        if view.raw(*path, "weight") is not None:
            why = "a file that is only evaluated on is read whole, whatever its weight"
            yield Problem(
                format_path((*path, "weight")),
                "has no meaning for an evaluation source",
                why,
                "Remove it",
            )


def _meaningless_in(
    view: View, path: FieldPath, section: Mapping[str, Any], table: tuple[Meaningless, ...]
) -> Iterator[Problem]:
    for entry in table:
        if section[entry.beside] in entry.values and view.raw(*path, entry.key) is not None:
            what = f"has no meaning with {entry.beside} {section[entry.beside]}"
            yield Problem(format_path((*path, entry.key)), what, "", entry.remedy)


def check_source_names(view: View) -> Iterator[Problem]:
    """Names are unique over training and evaluation sources, since both appear in sample ids, files and
    metrics."""
    first: dict[str, tuple[str, str]] = {}
    for where in (_SOURCES, f"{_EVALUATION}.sources"):
        for path, item in view.items(where):
            name = item["name"]
            if name is UNKNOWN:
                continue
            here = format_path((*path, "name"))
            if name.casefold() == HELD_OUT.casefold() and (
                where == _SOURCES or view.is_given(_HELD_OUT)
            ):
                why = "it is the name of the evaluation set that data.heldOut makes"
                yield Problem(here, f"{name!r} is reserved", why, "Rename the source")
            elif name.casefold() in first:
                place, other = first[name.casefold()]
                same = "is also" if name == other else f"differs only in case from {other!r},"
                why = "names of sources are unique, whatever the case of their letters"
                yield Problem(
                    here, f"{name!r} {same} the name of {place}", why, "Rename one of them"
                )
            else:
                first[name.casefold()] = (format_path(path), name)


def check_held_out(view: View) -> Iterator[Problem]:
    """Exactly one of fraction and count; documents cannot be counted in a flat file of tokens."""
    if view.get(_HELD_OUT) is UNKNOWN or not view.is_given(_HELD_OUT):
        return
    given = [name for name in ("fraction", "count") if view.is_given(f"{_HELD_OUT}.{name}")]
    if not given:
        yield Problem(
            _HELD_OUT,
            "has no size",
            "one of fraction and count is needed",
            "Add one, such as `fraction: 1%`",
        )
    if len(given) == 2:
        yield Problem(
            _HELD_OUT,
            "fraction and count are both set",
            "it is exactly one of them",
            "Remove one of them",
        )
    flat = [
        format_path(path) for path, item in view.items(_SOURCES) if item["type"] == "tokens"
    ]
    if "count" in given and flat:
        why = f"{flat[0]} is a flat file of tokens, which has no documents to count"
        yield Problem(f"{_HELD_OUT}.count", "cannot be used here", why, "Use heldOut.fraction")


def check_evaluation(view: View) -> Iterator[Problem]:
    """Settings of the evaluation need something to evaluate on."""
    has_sources = view.raw("spec", "training", "evaluation", "sources") not in (None, [])
    if view.get(_EVALUATION) is UNKNOWN or has_sources or view.is_given(_HELD_OUT):
        return
    for key in ("every", "atStart", "samples"):
        if (
            view.is_given(f"{_EVALUATION}.{key}")
            and view.get(f"{_EVALUATION}.{key}") is not False
        ):
            why = "neither evaluation.sources nor data.heldOut is set"
            remedy = (
                "Add data.heldOut (such as `fraction: 1%`) or a source under "
                "evaluation.sources, or remove this"
            )
            yield Problem(
                f"{_EVALUATION}.{key}", "there is nothing to evaluate on", why, remedy
            )


def check_best(view: View) -> Iterator[Problem]:
    """The best checkpoint follows a metric that will exist while training."""
    path = f"{TRAINING}.checkpoint.best"
    metric = view.get(f"{path}.metric")
    if not view.is_given(path) or metric is UNKNOWN or metric is None:
        return
    if view.get(_EVALUATION) is not UNKNOWN and not view.is_given(f"{_EVALUATION}.every"):
        why = "without it the metric is only known at the end"
        yield Problem(
            f"{_EVALUATION}.every",
            "missing, and checkpoint.best needs it",
            why,
            "Add it, such as `every: {steps: 200}`",
        )
    sources = view.items(f"{_EVALUATION}.sources")
    names = [item["name"] for _, item in sources] + (
        [HELD_OUT] if view.is_given(_HELD_OUT) else []
    )
    if UNKNOWN in names or view.get(f"{_EVALUATION}.sources") is UNKNOWN:
        return
    metrics = [f"{name}/loss" for name in names]
    if metric not in metrics:
        near = nearest(metric, metrics)
        known = (
            f"Known here: {', '.join(metrics)}"
            if metrics
            else "Add an evaluation set first: evaluation.sources or data.heldOut"
        )
        why = (
            f"did you mean `{near}`? {known}"
            if near
            else "it is the name of an evaluation set followed by /loss"
        )
        yield Problem(
            f"{path}.metric",
            f"{metric!r} is not a metric of this run",
            why,
            "" if near else known,
        )


RULES: Final = (
    check_meaningless,
    check_source_names,
    check_held_out,
    check_evaluation,
    check_best,
)
